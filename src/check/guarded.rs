//! Output buffers that start poisoned, between guard bands.

use crate::check::Failed;

/// Byte of poison: NaN in f32, bf16 and e4m3, -1 in indices.
pub const POISON: u8 = 0xFF;
/// Byte of the guard bands, unlike the poison.
const GUARD: u8 = 0xA5;
/// Bytes of each band: more than the widest vector store (64) can overshoot (arbitrary above that).
const BAND: usize = 256;
/// Alignment of the buffer (derived: a cache line, and the widest vector).
const ALIGN: usize = 64;

/// `len` bytes of poison, aligned to 64 plus `offset`, with a guard band on each side.
#[derive(Debug)]
pub struct Guarded {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Guarded {
    /// Aligned to 64 bytes.
    pub fn new(len: usize) -> Self {
        Self::at_offset(len, 0)
    }

    /// Starts `offset` bytes after a 64-byte boundary.
    pub fn at_offset(len: usize, offset: usize) -> Self {
        let mut memory = vec![GUARD; len + 2 * BAND + ALIGN + offset];
        let address = memory.as_ptr().addr() + BAND;
        let start = BAND + (address.next_multiple_of(ALIGN) - address) + offset;
        memory[start..start + len].fill(POISON);
        Guarded { memory, start, len }
    }

    /// The bytes between the bands.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }

    /// The bytes between the bands, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }

    /// Poisons the buffer again.
    pub fn poison(&mut self) {
        self.bytes_mut().fill(POISON);
    }

    /// Fails when a guard band was written.
    pub fn check(&self, what: &str) -> Result<(), Failed> {
        let outside = |i: &usize| !(self.start..self.start + self.len).contains(i);
        match (0..self.memory.len()).filter(outside).find(|&i| self.memory[i] != GUARD) {
            None => Ok(()),
            Some(i) => {
                let at = i as isize - self.start as isize;
                Err(Failed(format!("{what}: byte {at} of a buffer of {} bytes was written", self.len)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_outside_is_found() {
        for at in [-1isize, -64, 40, 41, 200] {
            let mut g = Guarded::new(40);
            g.check("x").unwrap();
            let i = (g.start as isize + at) as usize;
            g.memory[i] = 0;
            assert!(g.check("x").unwrap_err().0.contains(&format!("byte {at} ")));
        }
    }
}
