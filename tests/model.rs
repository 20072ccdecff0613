//! The signal code under a model checker: two ranks, every interleaving and every reordering that the fences allow.
//!
//! Payload lives in cells that the checker watches: a read or write that the words do not order is an error, whatever the values.

use std::cell::Cell;
use std::sync::{Arc, Once};

use libtest_mimic::{Failed, Trial};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use moe_kernels::ep::signal::{CountWord, Kind, Memory, Signals, Word};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, check: fn()| {
        Trial::test(format!("model::two ranks::{name}"), move || std::panic::catch_unwind(check).map_err(|p| Failed::from(message(&*p))))
    };
    vec![
        trial("rows are complete when done is seen", rows::<Sound>),
        trial("staged rows are complete when counts are seen", staged::<Sound>),
        trial("a bank is not written before its credit", credit::<Sound>),
        trial("rows are not overwritten while they are read", pull::<Sound>),
        trial("rows need a release", || must_fail(rows::<NoRelease>)),
        trial("rows need an acquire", || must_fail(rows::<NoAcquire>)),
        trial("staged rows need a release", || must_fail(staged::<NoRelease>)),
        trial("staged rows need an acquire", || must_fail(staged::<NoAcquire>)),
        trial("rows that are read need a release", || must_fail(pull::<NoRelease>)),
        trial("rows that are read need an acquire", || must_fail(pull::<NoAcquire>)),
        trial("rows need the credit", || must_fail(without_credit)),
    ]
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_else(|| "panicked".into())
}

/// The checker's atomics, with a fence left out by choice.
#[derive(Debug)]
struct Model<const RELEASE: bool, const ACQUIRE: bool>;

#[derive(Debug)]
struct ModelWord(AtomicU64);

impl Word for ModelWord {
    fn zero() -> Self {
        ModelWord(AtomicU64::new(0))
    }

    fn load(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn store(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl<const RELEASE: bool, const ACQUIRE: bool> Memory for Model<RELEASE, ACQUIRE> {
    type Word = ModelWord;

    fn release() {
        if RELEASE {
            fence(Ordering::Release);
        }
    }

    fn acquire() {
        if ACQUIRE {
            fence(Ordering::Acquire);
        }
    }
}

/// One rank's memory: its words, and a row of each kind that a peer writes or reads.
struct RankMemory<M: Memory> {
    signals: Signals<M>,
    /// The row that the peer writes.
    row: UnsafeCell<u64>,
    /// The staged row of each parity.
    staged: [UnsafeCell<u64>; 2],
    /// The row that experts write and the peer reads.
    output: UnsafeCell<u64>,
}

struct TwoRanks<M: Memory>([RankMemory<M>; 2]);

// SAFETY: the checker's cells report every access that is not ordered; sharing them is what the model is about.
unsafe impl<M: Memory> Sync for TwoRanks<M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Send for TwoRanks<M> {}

impl<M: Memory> TwoRanks<M> {
    fn new() -> Self {
        let rank = || RankMemory {
            signals: Signals::new(2, 1),
            row: UnsafeCell::new(0),
            staged: [UnsafeCell::new(0), UnsafeCell::new(0)],
            output: UnsafeCell::new(0),
        };
        TwoRanks([rank(), rank()])
    }

    fn post_counts(&self, me: usize, epoch: u64) {
        M::release();
        self.0[1 - me].signals.post_counts(me, &[CountWord { epoch, count: 1, bank: 0, invalid: false, kind: Kind::Dispatch as u64 }]);
    }

    fn read_counts(&self, me: usize, epoch: u64) {
        while self.0[me].signals.poll_counts(1 - me, epoch, 0, |_, word| assert_eq!(word.count, 1)) == 0 {
            loom::thread::yield_now();
        }
        M::acquire();
    }

    /// Steps 2 to 7: the peer's row arrives.
    fn dispatch(&self, me: usize, epoch: u64) {
        self.post_counts(me, epoch);
        self.read_counts(me, epoch);
        write(&self.0[1 - me].row, epoch);
        M::release();
        self.0[1 - me].signals.post_done(me, epoch);
        while self.0[me].signals.seen_done(1 - me) < epoch {
            loom::thread::yield_now();
        }
        M::acquire();
        assert_eq!(read(&self.0[me].row), epoch);
    }

    /// Steps 8 to 10: the peer's output is read.
    fn combine(&self, me: usize, epoch: u64) {
        write(&self.0[me].output, epoch);
        M::release();
        self.0[1 - me].signals.post_ready(me, epoch);
        while self.0[me].signals.seen_ready(1 - me) < epoch {
            loom::thread::yield_now();
        }
        M::acquire();
        assert_eq!(read(&self.0[1 - me].output), epoch);
    }
}

fn write(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: the checker fails the model when this access races.
    cell.with_mut(|p| unsafe { *p = value });
}

fn read(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: as above.
    cell.with(|p| unsafe { *p })
}

/// Runs `steps` on both ranks in every way.
fn explore<M: Memory + 'static>(steps: impl Fn(&TwoRanks<M>, usize) + Copy + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // Two switches away from a thread that could go on find every known mutant in seconds (measured); more adds time only.
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let ranks = Arc::new(TwoRanks::<M>::new());
        let peer = ranks.clone();
        let thread = loom::thread::spawn(move || steps(&peer, 1));
        steps(&ranks, 0);
        thread.join().unwrap();
    });
}

type Sound = Model<true, true>;
type NoRelease = Model<false, true>;
type NoAcquire = Model<true, false>;

fn rows<M: Memory + 'static>() {
    explore::<M>(|ranks, me| ranks.dispatch(me, 1));
}

fn staged<M: Memory + 'static>() {
    // Three epochs: the third uses the staging of the first again.
    explore::<M>(|ranks, me| {
        for epoch in 1..=3 {
            write(&ranks.0[1 - me].staged[epoch as usize & 1], epoch);
            ranks.post_counts(me, epoch);
            ranks.read_counts(me, epoch);
            assert_eq!(read(&ranks.0[me].staged[epoch as usize & 1]), epoch);
        }
    });
}

fn credit<M: Memory + 'static>() {
    // The second epoch overwrites the row that the first one's arrival read.
    explore::<M>(|ranks, me| {
        ranks.dispatch(me, 1);
        ranks.dispatch(me, 2);
    });
}

fn pull<M: Memory + 'static>() {
    explore::<M>(|ranks, me| {
        ranks.dispatch(me, 1);
        ranks.combine(me, 1);
        // What experts write after the next dispatch is what the peer read in the combine before it.
        ranks.dispatch(me, 2);
        write(&ranks.0[me].output, 2);
    });
}

fn without_credit() {
    explore::<Sound>(|ranks, me| {
        for epoch in 1..=2 {
            // Writes before it has read the peer's words.
            write(&ranks.0[1 - me].row, epoch);
            Sound::release();
            ranks.0[1 - me].signals.post_done(me, epoch);
            while ranks.0[me].signals.seen_done(1 - me) < epoch {
                loom::thread::yield_now();
            }
            Sound::acquire();
            assert_eq!(read(&ranks.0[me].row), epoch);
        }
    });
}

thread_local! {
    /// This thread's panics are expected: the hook prints nothing.
    static IS_EXPECTED: Cell<bool> = const { Cell::new(false) };
}

fn must_fail(model: fn()) {
    static QUIET_HOOK: Once = Once::new();
    QUIET_HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_EXPECTED.get() {
                print(info);
            }
        }));
    });
    IS_EXPECTED.set(true);
    let found = std::panic::catch_unwind(model).map_err(|p| message(&*p));
    IS_EXPECTED.set(false);
    assert!(matches!(&found, Err(m) if m.contains("Causality violation")), "the checker found no race: {found:?}");
}
