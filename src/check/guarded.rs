//! Output buffers that start poisoned, between guard bands, in the memory of any backend.

use std::cell::OnceCell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, Cuda};
use crate::check::Failed;
use crate::gpu::Buffer;
use crate::tensor::{Layout, TensorView, TensorViewMut};

/// Byte of poison: NaN in f32, bf16 and e4m3, -1 in indices.
pub const POISON: u8 = 0xFF;
/// Byte of the guard bands, unlike the poison.
const GUARD: u8 = 0xA5;
/// Bytes of each band: more than the widest vector store (64) can overshoot (arbitrary above that).
const BAND: usize = 256;
/// Alignment of the buffer (derived: a cache line, and the widest vector).
const ALIGN: usize = 64;

/// Device memory for mirrors, allocated at once: where ranks share a GPU, freeing memory waits for kernels that may wait for the rank that frees. For the
/// same reason the memory is kept for the next arena of its size.
#[derive(Debug)]
pub struct Arena {
    /// There until it is dropped.
    buffer: Option<Buffer>,
    /// Whether another arena may use the memory.
    is_kept: bool,
    /// Bytes given out, and how many spans are alive; with the last of them all is free again.
    state: Mutex<(usize, usize)>,
}

/// Memory of arenas that are gone.
static SPARE: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

impl Arena {
    /// `len` bytes on the device of `cuda`.
    pub fn new(cuda: &Cuda, len: usize) -> Result<Arc<Self>, Failed> {
        Ok(Arc::new(Arena { buffer: Some(Buffer::new(cuda.device(), len)?), is_kept: false, state: Mutex::new((0, 0)) }))
    }

    /// As [`new`](Self::new), in memory that is never freed.
    pub fn kept(cuda: &Cuda, len: usize) -> Result<Arc<Self>, Failed> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Buffer| buffer.len() == len && buffer.device() == cuda.device();
        let buffer = spare.iter().position(fits).map(|i| spare.swap_remove(i));
        drop(spare);
        let buffer = buffer.map_or_else(|| Buffer::new(cuda.device(), len), Ok)?;
        Ok(Arc::new(Arena { buffer: Some(buffer), is_kept: true, state: Mutex::new((0, 0)) }))
    }

    fn buffer(&self) -> Result<&Buffer, Failed> {
        self.buffer.as_ref().ok_or_else(|| Failed("an arena without memory".into()))
    }

    fn take(self: &Arc<Self>, len: usize) -> Result<Span, Failed> {
        const BOUNDARY: usize = 256; // spec: what the driver aligns allocations to
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let at = state.0.next_multiple_of(BOUNDARY);
        let have = self.buffer()?.len();
        if at + len > have {
            return Err(Failed(format!("the checks' device memory of {have} bytes is full: {at} used, {len} more wanted")));
        }
        *state = (at + len, state.1 + 1);
        Ok(Span { arena: self.clone(), at })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.is_kept {
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).extend(self.buffer.take());
        }
    }
}

/// A part of an arena.
#[derive(Debug)]
struct Span {
    arena: Arc<Arena>,
    at: usize,
}

impl Drop for Span {
    fn drop(&mut self) {
        let mut state = self.arena.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1 -= 1;
        if state.1 == 0 {
            state.0 = 0;
        }
    }
}

/// `len` bytes of poison, aligned to 64 plus `offset`, with a guard band on each side.
///
/// On a GPU the bytes and their bands have a mirror in device memory: a view copies them there, [`fetch`](Self::fetch) brings them back.
#[derive(Debug)]
pub struct Guarded {
    memory: Vec<u8>,
    start: usize,
    len: usize,
    /// How far the start is behind a boundary.
    offset: usize,
    mirror: OnceCell<Span>,
    /// Where the mirror is taken from; memory of its own otherwise.
    arena: Option<Arc<Arena>>,
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
        Guarded { memory, start, len, offset, mirror: OnceCell::new(), arena: None }
    }

    /// With its mirror in `arena`.
    pub fn within(self, arena: Option<&Arc<Arena>>) -> Self {
        Guarded { arena: arena.cloned(), ..self }
    }

    /// The bytes between the bands.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }

    /// The bytes between the bands, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }

    /// Bytes with their bands, and where they start in the mirror: the same distance behind a boundary as here.
    fn banded(&self) -> std::ops::Range<usize> {
        self.start - BAND..self.start + self.len + BAND
    }

    /// The mirror, with what the bytes are now.
    fn upload(&self, cuda: &Cuda) -> Result<&Span, Failed> {
        if self.mirror.get().is_none() {
            let len = self.offset + self.banded().len();
            let span = match &self.arena {
                Some(arena) => arena.take(len)?,
                None => Arena::new(cuda, len)?.take(len)?,
            };
            // The cell is empty: it was just asked, and it is not shared among threads.
            let _ = self.mirror.set(span);
        }
        let mirror = self.mirror.get().ok_or_else(|| Failed("a buffer has no mirror".into()))?;
        mirror.arena.buffer()?.upload(cuda.stream(), mirror.at + self.offset, &self.memory[self.banded()])?;
        Ok(mirror)
    }

    /// A tensor from byte `at` on, in the memory of the backend.
    pub fn view(&self, backend: &Backend, at: usize, layout: Layout) -> Result<TensorView<'_>, Failed> {
        match backend {
            Backend::Cpu(_) => Ok(TensorView::new(&self.bytes()[at..], layout)?),
            Backend::Cuda(cuda) => {
                let mirror = self.upload(cuda)?;
                Ok(mirror.arena.buffer()?.view(mirror.at + self.offset + BAND + at, layout)?)
            }
        }
    }

    /// A tensor from byte `at` on that an operation writes, in the memory of the backend.
    pub fn view_mut(&mut self, backend: &Backend, at: usize, layout: Layout) -> Result<TensorViewMut<'_>, Failed> {
        match backend {
            Backend::Cpu(_) => Ok(TensorViewMut::new(&mut self.bytes_mut()[at..], layout)?),
            Backend::Cuda(cuda) => {
                let mirror = self.upload(cuda)?;
                Ok(mirror.arena.buffer()?.part_mut(mirror.at + self.offset + BAND + at, layout)?)
            }
        }
    }

    /// Waits for the backend and brings back what it wrote, bands included.
    pub fn fetch(&mut self, backend: &Backend) -> Result<(), Failed> {
        if let (Backend::Cuda(cuda), Some(mirror)) = (backend, self.mirror.get()) {
            let banded = self.banded();
            mirror.arena.buffer()?.download(cuda.stream(), mirror.at + self.offset, &mut self.memory[banded])?;
        }
        Ok(())
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
