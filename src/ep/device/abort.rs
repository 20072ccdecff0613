//! How the host ends the waits of running kernels.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ep::World;
use crate::ep::page::{News, OnNews};
use crate::ep::world::Member;
use crate::gpu::Pinned;

/// What the host of a rank says to its running kernels, in two words that their waits look at from time to time. When its process learns that the world has
/// failed (a rank panicked or gave up a wait on the host, a process ended), the abort word is set, and the waits end. When it learns that ranks have left, the
/// other word gets their bits, and a wait for one of them ends, if what it waits for is not there: a rank leaves when its kernels have ended, so it never will be.
///
/// The words lie in pinned memory and the host simply stores them: that works whatever the driver is doing. Measured on an H200: a copy, a value or a kernel
/// that the host queues in a stream of its own, of any priority, never reaches the device when more streams wait than it has queues (8, with
/// `CUDA_DEVICE_MAX_CONNECTIONS` up to 32), and is not even queued while another thread frees memory.
///
/// Made at setup, one for each object. On a thread that panics, dropping it fails the world first.
#[derive(Debug)]
pub struct AbortLine {
    /// Dropped first: afterwards nobody stores the words.
    _on_news: OnNews,
    memory: Arc<Pinned>,
    at: usize,
    member: Arc<Member>,
}

impl AbortLine {
    /// The word of 64 bits at byte `at` of `memory` becomes 1 when the world fails; at once, if it has. The one behind it gets bit r when rank r leaves.
    ///
    /// # Panics
    /// When the words do not lie in the memory, or `at` is no multiple of 8.
    pub fn new(world: &World, memory: &Arc<Pinned>, at: usize) -> Self {
        let member = world.member().clone();
        let told = memory.clone();
        let left = at + size_of::<u64>();
        told.word(at);
        told.word(left);
        let _on_news = member.on_news(Box::new(move |news| match news {
            News::Failed => raise(&told, at),
            // sync left: release, pairs with the polls of this rank's kernels
            News::Left(ranks) => told.word(left).store(ranks, Ordering::Release),
        }));
        AbortLine { _on_news, memory: memory.clone(), at, member }
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
