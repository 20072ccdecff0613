//! Doorbells: how a rank that waits sleeps, and is woken by whoever stores a word of its.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// A 32-bit word that the system can put sleepers on.
#[doc(hidden)]
pub trait Sleepers {
    /// The value.
    fn load(&self) -> u32;
    /// Adds, wrapping; -1 takes away.
    fn add(&self, value: i32);
    /// Sleeps until a wake, at most `nap`, if the word still has this value.
    fn sleep(&self, value: u32, nap: Duration);
    /// Wakes whoever sleeps on the word.
    fn wake(&self);
    /// Stores before it come before loads behind it, for all threads alike: one that orders less would not do.
    fn full_fence();
}

/// What wakes a parked rank.
#[derive(Debug)]
#[repr(C)]
#[doc(hidden)]
pub struct Bell<W = AtomicU32> {
    /// What the system's queue of sleepers is keyed by; a ring changes it.
    num_rings: W,
    num_parked: W,
}

impl<W: Sleepers> Bell<W> {
    /// A bell of two words that are 0.
    pub fn over(num_rings: W, num_parked: W) -> Self {
        Bell { num_rings, num_parked }
    }

    /// Whether somebody sleeps here, or is about to.
    pub fn has_parked(&self) -> bool {
        self.num_parked.load() > 0
    }

    /// Wakes whoever is parked here. Called after a word of theirs was stored.
    pub fn ring(&self) {
        // The store of the word comes before the load of the flag, as the store of the flag comes before the last poll in `park`: one of the
        // two sides sees the other. sync bell: full, pairs with the fence in `park`
        W::full_fence();
        if self.has_parked() {
            self.num_rings.add(1);
            self.num_rings.wake();
        }
    }

    /// Sleeps until a ring, at most `nap`, unless `is_ready` already holds.
    pub fn park(&self, nap: Duration, is_ready: impl FnOnce() -> bool) {
        // Before the flag: a ring after this read makes the sleep end at once.
        let num_rings = self.num_rings.load();
        self.num_parked.add(1);
        // sync bell: full, pairs with the fence in `ring`
        W::full_fence();
        if !is_ready() {
            self.num_rings.sleep(num_rings, nap);
        }
        self.num_parked.add(-1);
    }
}

impl Sleepers for AtomicU32 {
    fn load(&self) -> u32 {
        AtomicU32::load(self, Ordering::Acquire)
    }

    fn add(&self, value: i32) {
        self.fetch_add(value as u32, Ordering::Release);
    }

    /// The queue is found by the memory under the word, so it reaches across processes.
    #[cfg(target_os = "linux")]
    fn sleep(&self, value: u32, nap: Duration) {
        use rustix::thread::futex;
        let Ok(nap) = futex::Timespec::try_from(nap) else { return };
        // Woken, changed, interrupted or too late: the caller polls again in any case.
        let _ = futex::wait(self, futex::Flags::empty(), value, Some(&nap));
    }

    /// Without such queues a sleeper looks again soon (arbitrary: a tenth of a millisecond).
    #[cfg(not(target_os = "linux"))]
    fn sleep(&self, value: u32, nap: Duration) {
        if Sleepers::load(self) == value {
            std::thread::sleep(nap.min(Duration::from_micros(100)));
        }
    }

    #[cfg(target_os = "linux")]
    fn wake(&self) {
        use rustix::thread::futex;
        // No error is possible for a word that exists.
        let _ = futex::wake(self, futex::Flags::empty(), i32::MAX as u32);
    }

    #[cfg(not(target_os = "linux"))]
    fn wake(&self) {}

    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}
