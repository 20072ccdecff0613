//! Words in device memory that the host sets while kernels run.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::buffer::Pinned;
use super::device::Device;
use super::shareable::Shareable;
use super::stream::Stream;
use crate::error::{Error, Result};

/// 64-bit words that become 1 when the alarm is raised: by the copy engine, in a stream of its own that shares no queue with other streams, so that
/// kernels which wait for these words, and whatever is queued behind them, do not hold it up.
pub struct Alarm {
    stream: Stream,
    one: &'static Pinned,
    words: Vec<u64>,
    /// Holds the words.
    _memory: Vec<Arc<Shareable>>,
}

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

impl Alarm {
    /// Prepares to set the word at byte `offset` of each of these memories, which `device` can access.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a word outside of one of them or not aligned, [`Error::Gpu`] from the driver.
    pub fn new(device: &Device, memory: &[Arc<Shareable>], offset: usize) -> Result<Self> {
        let word = |memory: &Arc<Shareable>| {
            let is_inside = offset.checked_add(WORD).is_some_and(|end| end <= memory.len());
            if !is_inside || !offset.is_multiple_of(WORD) {
                return Err(Error::invalid("alarm", "offset", offset, format!("a multiple of {WORD}, within {} bytes", memory.len())));
            }
            Ok(memory.address().address + offset as u64)
        };
        let words = memory.iter().map(word).collect::<Result<Vec<_>>>()?;
        Ok(Alarm { stream: Stream::urgent(device)?, one: one(device)?, words, _memory: memory.to_vec() })
    }

    /// Queues the writes and returns: from any thread, any number of times. Allocates nothing and waits for no kernel.
    ///
    /// # Errors
    /// The first [`Error::Gpu`] from the driver; the other words are written all the same.
    pub fn raise(&self) -> Result<()> {
        let device = self.stream.device();
        let _bound = device.bind()?;
        let mut result = Ok(());
        for &word in &self.words {
            let one = self.one.bytes().as_ptr();
            // SAFETY: the word lies in memory that self holds until `drop` has waited for the copy; the 1 lives as long as the process.
            let written = unsafe { device.driver().copy_to_device(word, one.cast(), WORD, self.stream.raw()) };
            result = result.and(written);
        }
        result
    }
}

/// A 1 in pinned memory. There is one for all devices, and it is never freed: freeing waits for kernels, and so could an alarm that is dropped.
fn one(device: &Device) -> Result<&'static Pinned> {
    static ONE: Mutex<Option<&'static Pinned>> = Mutex::new(None);
    let mut one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(one) = *one {
        return Ok(one);
    }
    let mut pinned = Pinned::new(device, WORD)?;
    pinned.bytes_mut().copy_from_slice(&1u64.to_ne_bytes());
    Ok(one.insert(Box::leak(Box::new(pinned))))
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // Copies alone, so this waits for no kernel. After an error of the context nothing runs any more.
        let _ = self.stream.synchronize();
    }
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alarm").field("device", self.stream.device()).field("num_words", &self.words.len()).finish()
    }
}
