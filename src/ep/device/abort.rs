//! How the host ends the waits of running kernels.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ep::World;
use crate::ep::page::OnFailure;
use crate::ep::world::Member;
use crate::gpu::Pinned;

/// The host's own abort word of one rank. When its process learns that the world has failed (a rank panicked or gave up a wait on the host, a process
/// ended), the word is set, and the waits of this rank's kernels, which look at it from time to time, end.
///
/// The word lies in pinned memory and the host simply stores it: that works whatever the driver is doing. Measured on an H200: a copy, a value or a kernel
/// that the host queues in a stream of its own, of any priority, never reaches the device when more streams wait than it has queues (8, with
/// `CUDA_DEVICE_MAX_CONNECTIONS` up to 32), and is not even queued while another thread frees memory.
///
/// Made at setup, one for each object. On a thread that panics, dropping it fails the world first.
#[derive(Debug)]
pub struct AbortLine {
    /// Dropped first: afterwards nobody stores the word.
    _on_failure: OnFailure,
    memory: Arc<Pinned>,
    at: usize,
    member: Arc<Member>,
}

impl AbortLine {
    /// The word of 64 bits at byte `at` of `memory` becomes 1 when the world fails; at once, if it has.
    ///
    /// # Panics
    /// When the word does not lie in the memory, or `at` is no multiple of 8.
    pub fn new(world: &World, memory: &Arc<Pinned>, at: usize) -> Self {
        let member = world.member().clone();
        let raised = memory.clone();
        raised.word(at);
        let _on_failure = member.on_failure(Box::new(move || raise(&raised, at)));
        AbortLine { _on_failure, memory: memory.clone(), at, member }
    }

    /// Sets the word now. From any thread, at any time: a store.
    pub fn raise(&self) {
        raise(&self.memory, self.at);
    }
}

fn raise(memory: &Pinned, at: usize) {
    memory.word(at).store(1, Ordering::Release);
}

impl Drop for AbortLine {
    fn drop(&mut self) {
        self.member.fail_if_panicking();
    }
}
