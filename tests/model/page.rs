//! What the page of a world does with words: the first failure, leaving and meeting, and sleepers that must not be missed.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};
use std::time::Duration;

use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Condvar, Mutex};
use moe_kernels::ep::bell::{Bell, Sleepers};
use moe_kernels::ep::signal::{Label, Word, observe, publish, publish_first};

use super::platform::{Loom, LoomPayload, LoomWord, Mutant, Payload, Platform, has};

/// Two ranks fail at once: both find the same first failure, with a whole record.
pub fn first_failure() {
    struct Page {
        first: LoomWord,
        /// Of each rank; atomics in the page too, so that what is not whole is a wrong value.
        records: [[LoomWord; 2]; 2],
        /// What each rank took for the first.
        seen: [LoomWord; 2],
    }
    let new = || {
        let pair = || [LoomWord::zero(), LoomWord::zero()];
        Page { first: LoomWord::zero(), records: [pair(), pair()], seen: pair() }
    };
    Loom::explore(2, new, |page, me| {
        page.records[me].iter().for_each(|word| word.store(me as u64 + 7));
        publish_first::<Loom>(Label::First, &page.first, me as u64 + 1);
        let of = observe::<Loom>(Label::First, &page.first);
        assert_ne!(of, 0, "a failure that nobody finds");
        for word in &page.records[of as usize - 1] {
            assert_eq!(word.load(), of + 6, "a record that is not whole");
        }
        page.seen[me].store(of);
        // What the other took, once it has.
        let other = page.seen[1 - me].load();
        assert!(other == 0 || other == of, "two first failures");
    });
}

/// A rank that left has stored all of its words; a rank that met has done all before.
pub fn published(label: Label) {
    Loom::explore(
        2,
        || (LoomPayload::new(), LoomWord::zero()),
        move |(payload, word), me| {
            if me == 0 {
                payload.write(5);
                publish::<Loom>(label, word, 1);
            } else {
                while observe::<Loom>(label, word) == 0 {
                    Loom::pause(0);
                }
                assert_eq!(payload.read(), 5);
            }
        },
    );
}

/// A word that the system puts sleepers on. Nobody is ever woken but by a ring: who is missed sleeps for good, and the checker says so.
struct LoomSleepers {
    word: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl LoomSleepers {
    fn new() -> Self {
        LoomSleepers { word: AtomicU32::new(0), queue: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Sleepers for LoomSleepers {
    fn load(&self) -> u32 {
        self.word.load(Relaxed)
    }

    fn add(&self, value: i32) {
        self.word.fetch_add(value as u32, Relaxed);
    }

    fn sleep(&self, value: u32, _: Duration) {
        let queue = self.queue.lock().expect("no panic");
        // The system compares and queues in one.
        if self.word.fetch_add(0, AcqRel) == value {
            drop(self.woken.wait(queue).expect("no panic"));
        }
    }

    fn wake(&self) {
        let _queue = self.queue.lock().expect("no panic");
        self.woken.notify_all();
    }

    fn full_fence() {
        if has(Mutant::WeakBell) {
            fence(AcqRel);
        } else if !has(Mutant::NoRelease(Label::Bell)) {
            fence(SeqCst);
        }
    }
}

/// A rank waits for a word and sleeps; another stores it and rings.
pub fn doorbell() {
    Loom::explore(
        2,
        || (LoomWord::zero(), Bell::over(LoomSleepers::new(), LoomSleepers::new())),
        |(word, bell), me| {
            if me == 0 {
                word.store(1);
                bell.ring();
            } else {
                while word.load() == 0 {
                    bell.park(Duration::MAX, || word.load() != 0);
                }
            }
        },
    );
}

/// As `payload.cu` completes its rows where all ranks are on one device: every block releases and adds its share to the done word of the peer. The two
/// epochs before were refused and left the word as it was. Of device code this can only be a likeness.
pub fn counted_blocks() {
    const EPOCH: u64 = 3;
    const SHIFT: u32 = 24; // EPOCH_SHIFT of layout.cuh
    struct Blocks {
        rows: [LoomPayload; 2],
        done: AtomicU64,
    }
    let new = || Blocks { rows: [LoomPayload::new(), LoomPayload::new()], done: AtomicU64::new(0) };
    Loom::explore(3, new, move |blocks, thread| {
        if thread < 2 {
            let others = if has(Mutant::ShareOfOne) { 0 } else { 1 };
            // The other block may have added its share by now: that is below the epoch.
            let said = if thread == 0 { blocks.done.load(Relaxed) } else { 0 };
            let said = if has(Mutant::ShareOfAll) { said } else { said >> SHIFT << SHIFT };
            let share = if thread == 0 { (EPOCH << SHIFT) - said - others } else { 1 };
            blocks.rows[thread].write(3);
            <Loom as moe_kernels::ep::signal::Memory>::release(Label::Done);
            if has(Mutant::BlockStores) {
                blocks.done.store(EPOCH << SHIFT, Relaxed);
            } else {
                blocks.done.fetch_add(share, Relaxed);
            }
        } else {
            while blocks.done.load(Relaxed) >> SHIFT < EPOCH {
                Loom::pause(0);
            }
            <Loom as moe_kernels::ep::signal::Memory>::acquire(Label::Done);
            assert_eq!(blocks.rows.each_ref().map(Payload::read), [3, 3]);
        }
    });
}

/// As `low_latency.cu`, and `payload.cu` on several devices, complete their rows: every block releases to the device and counts itself, the last one releases to the
/// system what it saw of the others too. Of device code this can only be a likeness.
pub fn last_block(last_fence: std::sync::atomic::Ordering) {
    struct Blocks {
        rows: [LoomPayload; 2],
        arrived: AtomicU32,
        done: LoomWord,
    }
    let new = || Blocks { rows: [LoomPayload::new(), LoomPayload::new()], arrived: AtomicU32::new(0), done: LoomWord::zero() };
    Loom::explore(3, new, move |blocks, thread| {
        if thread < 2 {
            blocks.rows[thread].write(3);
            <Loom as moe_kernels::ep::signal::Memory>::release(Label::Done);
            if blocks.arrived.fetch_add(1, Relaxed) == 1 {
                fence(last_fence);
                blocks.done.store(1);
            }
        } else {
            while blocks.done.load() == 0 {
                Loom::pause(0);
            }
            <Loom as moe_kernels::ep::signal::Memory>::acquire(Label::Done);
            assert_eq!(blocks.rows.each_ref().map(Payload::read), [3, 3]);
        }
    });
}
