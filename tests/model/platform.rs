//! What a model runs on: loom, which knows what fences order, for two ranks; shuttle, which takes every access in one order, for more.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Once};

use moe_kernels::ep::signal::{Label, Memory, Rules, Word};

/// One way to break the protocol. Models run the library's own code on memory that consults these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    NoRelease(Label),
    NoAcquire(Label),
    /// A full fence that orders less.
    WeakBell,
    /// One copy of the count words instead of two by parity.
    OneParity,
    /// Count words compared with `>=`.
    CountsAtLeast,
    /// Done and ready words compared with `==`.
    Exactly,
    /// Always the same bank.
    OneBank,
    /// One ready word for both banks.
    OneReadyWord,
    /// As many copies of the staging as banks.
    FewCopies,
    /// The last of several first failures stays.
    LastWins,
    /// The first block of a kernel adds to a done word as if it were the only one.
    ShareOfOne,
    /// It takes what the others have added already for a part of the epoch.
    ShareOfAll,
    /// A block stores the done word instead of adding to it.
    BlockStores,
}

thread_local! {
    /// Those in force. The checkers run all threads of a model on the one that started it.
    static IN_FORCE: RefCell<Vec<Mutant>> = const { RefCell::new(Vec::new()) };
}

pub fn has(mutant: Mutant) -> bool {
    IN_FORCE.with_borrow(|all| all.contains(&mutant))
}

/// Runs `model` under `mutants`.
pub fn under<R>(mutants: &[Mutant], model: impl FnOnce() -> R) -> R {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            IN_FORCE.with_borrow_mut(Vec::clear);
        }
    }
    let _reset = Reset;
    IN_FORCE.with_borrow_mut(|all| all.extend(mutants));
    model()
}

/// The rules of the library, or those of the mutants in force.
macro_rules! rules {
    ($memory:ty) => {
        impl Rules for $memory {
            fn parity(epoch: u64) -> usize {
                if has(Mutant::OneParity) { 0 } else { Machine::parity(epoch) }
            }

            fn is_of(seen: u64, epoch: u64) -> bool {
                if has(Mutant::CountsAtLeast) { seen >= epoch } else { Machine::is_of(seen, epoch) }
            }

            fn has_come(seen: u64, epoch: u64) -> bool {
                if has(Mutant::Exactly) { seen == epoch } else { Machine::has_come(seen, epoch) }
            }

            fn bank(epoch: u64, in_flight: usize) -> usize {
                if has(Mutant::OneBank) { 0 } else { Machine::bank(epoch, in_flight) }
            }

            fn ready_word(bank: usize) -> usize {
                if has(Mutant::OneReadyWord) { 0 } else { Machine::ready_word(bank) }
            }

            fn staging_copies(in_flight: usize) -> usize {
                if has(Mutant::FewCopies) { in_flight } else { Machine::staging_copies(in_flight) }
            }
        }
    };
}

/// Memory, and threads that use it, under a checker.
pub trait Platform: 'static {
    type Memory: Memory<Word: Send + Sync> + 'static;
    /// Payload: an access that the words do not order is an error.
    type Payload: Payload + Send + Sync;

    /// Lets others go on; `polls` times in this wait.
    fn pause(polls: usize);

    /// The model has found something.
    fn fail(found: &str);

    /// It has: ranks go no further.
    fn has_failed() -> bool {
        false
    }

    /// Runs `rank` on a thread for each rank in many ways, each time on what `new` makes.
    fn explore<T: Send + Sync + 'static>(
        world: usize,
        new: impl Fn() -> T + Send + Sync + 'static,
        rank: impl Fn(&T, usize) + Copy + Send + Sync + 'static,
    );
}

pub trait Payload {
    fn new() -> Self;
    fn write(&self, value: u64);
    fn read(&self) -> u64;
}

use moe_kernels::ep::signal::Machine;

#[derive(Debug)]
pub struct Loom;

#[derive(Debug)]
pub struct LoomWord(loom::sync::atomic::AtomicU64);

rules!(Loom);

impl Memory for Loom {
    type Word = LoomWord;

    fn release(label: Label) {
        if !has(Mutant::NoRelease(label)) {
            loom::sync::atomic::fence(loom::sync::atomic::Ordering::Release);
        }
    }

    fn acquire(label: Label) {
        if !has(Mutant::NoAcquire(label)) {
            loom::sync::atomic::fence(loom::sync::atomic::Ordering::Acquire);
        }
    }
}

impl Word for LoomWord {
    fn zero() -> Self {
        LoomWord(loom::sync::atomic::AtomicU64::new(0))
    }

    fn load(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn store(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    fn claim(&self, value: u64) {
        if has(Mutant::LastWins) {
            self.0.store(value, Relaxed);
        } else {
            let _ = self.0.compare_exchange(0, value, Relaxed, Relaxed);
        }
    }
}

#[derive(Debug)]
pub struct LoomPayload(loom::cell::UnsafeCell<u64>);

// SAFETY: the checker reports every access that is not ordered; sharing them is what the models are about.
unsafe impl Sync for LoomPayload {}

impl Payload for LoomPayload {
    fn new() -> Self {
        LoomPayload(loom::cell::UnsafeCell::new(0))
    }

    fn write(&self, value: u64) {
        // SAFETY: the checker fails the model when this access races.
        self.0.with_mut(|p| unsafe { *p = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|p| unsafe { *p })
    }
}

impl Platform for Loom {
    type Memory = Loom;
    type Payload = LoomPayload;

    fn pause(_: usize) {
        loom::thread::yield_now();
    }

    fn fail(found: &str) {
        panic!("{found}");
    }

    fn explore<T: Send + Sync + 'static>(
        world: usize,
        new: impl Fn() -> T + Send + Sync + 'static,
        rank: impl Fn(&T, usize) + Copy + Send + Sync + 'static,
    ) {
        let mut builder = loom::model::Builder::new();
        // Two switches away from a thread that could go on find every known mutant in seconds (measured); more adds time only.
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let ranks = Arc::new(new());
            let threads: Vec<_> = (1..world)
                .map(|r| {
                    let ranks = ranks.clone();
                    loom::thread::spawn(move || rank(&ranks, r))
                })
                .collect();
            rank(&ranks, 0);
            threads.into_iter().for_each(|thread| thread.join().expect("the checker reports panics of its threads"));
        });
    }
}

pub fn ensure<P: Platform>(holds: bool, otherwise: &str) {
    if !holds {
        P::fail(otherwise);
    }
}

thread_local! {
    /// What a model of more than two ranks has found. Not a panic on the spot: the checker prints those.
    static FOUND: RefCell<Option<String>> = const { RefCell::new(None) };
    /// This thread's panics are expected: the hook prints nothing.
    pub static IS_EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Makes panics that a trial expects print nothing.
pub fn quiet_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        // The checker's first run sets a hook that prints for every panic of the process. It is replaced.
        shuttle::Runner::new(shuttle::scheduler::RandomScheduler::new_from_seed(1, 1), shuttle::Config::default()).run(|| {});
        std::panic::set_hook(Box::new(move |info| {
            if !IS_EXPECTED.get() {
                print(info);
            }
        }));
    });
}

#[derive(Debug)]
pub struct Shuttle;

#[derive(Debug)]
pub struct ShuttleWord(shuttle::sync::atomic::AtomicU64);

rules!(Shuttle);

impl Memory for Shuttle {
    type Word = ShuttleWord;

    fn release(_: Label) {}

    fn acquire(_: Label) {}
}

impl Word for ShuttleWord {
    fn zero() -> Self {
        ShuttleWord(shuttle::sync::atomic::AtomicU64::new(0))
    }

    fn load(&self) -> u64 {
        self.0.load(shuttle::sync::atomic::Ordering::SeqCst)
    }

    fn store(&self, value: u64) {
        self.0.store(value, shuttle::sync::atomic::Ordering::SeqCst);
    }

    fn claim(&self, value: u64) {
        let order = shuttle::sync::atomic::Ordering::SeqCst;
        let _ = self.0.compare_exchange(0, value, order, order);
    }
}

/// A value, and who uses it: the number of readers, or -1.
#[derive(Debug)]
pub struct ShuttlePayload {
    value: AtomicI64,
    users: AtomicI64,
}

/// The words of the other checker, so that one test finds both.
const RACE: &str = "Causality violation";

impl Payload for ShuttlePayload {
    fn new() -> Self {
        ShuttlePayload { value: AtomicI64::new(0), users: AtomicI64::new(0) }
    }

    fn write(&self, value: u64) {
        ensure::<Shuttle>(self.users.swap(-1, Relaxed) == 0, RACE);
        // An access takes time: others may come meanwhile.
        shuttle::thread::yield_now();
        self.value.store(value as i64, Relaxed);
        ensure::<Shuttle>(self.users.swap(0, Relaxed) == -1, RACE);
    }

    fn read(&self) -> u64 {
        ensure::<Shuttle>(self.users.fetch_add(1, Relaxed) >= 0, RACE);
        let before = self.value.load(Relaxed);
        shuttle::thread::yield_now();
        ensure::<Shuttle>(self.value.load(Relaxed) == before && self.users.fetch_sub(1, Relaxed) > 0, RACE);
        before as u64
    }
}

impl Platform for Shuttle {
    type Memory = Shuttle;
    type Payload = ShuttlePayload;

    fn pause(polls: usize) {
        // A sound wait takes some hundred.
        if polls > 5000 {
            Self::fail("a wait without end");
        }
        shuttle::thread::yield_now();
    }

    fn fail(found: &str) {
        FOUND.with_borrow_mut(|first| _ = first.get_or_insert_with(|| found.to_owned()));
    }

    fn has_failed() -> bool {
        FOUND.with_borrow(Option::is_some)
    }

    fn explore<T: Send + Sync + 'static>(
        world: usize,
        new: impl Fn() -> T + Send + Sync + 'static,
        rank: impl Fn(&T, usize) + Copy + Send + Sync + 'static,
    ) {
        let mut config = shuttle::Config::default();
        config.failure_persistence = shuttle::FailurePersistence::None;
        quiet_hook();
        FOUND.set(None);
        let model = move || {
            if Self::has_failed() {
                return;
            }
            let ranks = Arc::new(new());
            let threads: Vec<_> = (0..world)
                .map(|r| {
                    let ranks = ranks.clone();
                    shuttle::thread::spawn(move || rank(&ranks, r))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().expect("the checker reports panics of its threads"));
        };
        // A fixed seed; as many runs as find every mutant ten times over.
        let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, 300);
        shuttle::Runner::new(scheduler, config).run(model);
        if let Some(found) = FOUND.take() {
            panic!("{found}");
        }
    }
}
