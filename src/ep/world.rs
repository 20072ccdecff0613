//! Worlds of ranks: threads of one process, their collective setup, and the first failure that ends a world.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::config::MAX_RANKS;
use super::wait::Doorbell;
use crate::backend::{Backend, Cpu};
use crate::error::{Error, Failure, FailureKind, Result};
use crate::id::Rank;

/// Bound of the waits of collective setup (arbitrary: allocating and zeroing a node's memory takes seconds).
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// One rank's membership of a world. Dropping it, and every object made with it, leaves the world; a peer that then waits for this rank fails
/// at once.
#[derive(Debug, Clone)]
pub struct World {
    member: Arc<Member>,
}

/// One rank, alive as long as anything that acts for it.
#[derive(Debug)]
pub(crate) struct Member {
    rank: Rank,
    cpu: Cpu,
    shared: Arc<Shared>,
    /// Collective calls so far: the key under which ranks meet.
    num_exchanges: AtomicU64,
    setup_timeout: Duration,
    /// What this rank does, for its record if it panics.
    doing: Mutex<Doing>,
}

/// Operation, phase and epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doing {
    pub op: &'static str,
    pub phase: &'static str,
    pub epoch: u64,
}

/// What the ranks of a world have in common.
#[derive(Debug)]
struct Shared {
    /// Ranks; each with what wakes its thread.
    doorbells: Vec<Doorbell>,
    left: Vec<AtomicBool>,
    /// The abort word: the first failure, read by every wait.
    first: OnceLock<Failure>,
    board: Mutex<HashMap<u64, Meeting>>,
    board_changed: Condvar,
}

type Posted = Result<Arc<dyn Any + Send + Sync>>;

/// One collective call: what each rank posted, and how many have read it.
#[derive(Debug)]
struct Meeting {
    posted: Vec<Option<Posted>>,
    num_read: usize,
}

impl World {
    /// The memberships of a world of `size` ranks in this process, to be moved to a thread each. Every rank works on `backend`; with the CPU's
    /// global threads and more than one rank, each rank works on its own thread only.
    ///
    /// # Errors
    /// `Invalid` for a size of 0 or above 64.
    pub fn threads(backend: &Backend, size: usize) -> Result<Vec<World>> {
        let cpu = backend.as_cpu("world")?;
        if !(1..=MAX_RANKS).contains(&size) {
            return Err(Error::invalid("world", "size", size, format!("1 to {MAX_RANKS}")));
        }
        let shared = Arc::new(Shared {
            doorbells: (0..size).map(|_| Doorbell::default()).collect(),
            left: (0..size).map(|_| AtomicBool::new(false)).collect(),
            first: OnceLock::new(),
            board: Mutex::default(),
            board_changed: Condvar::new(),
        });
        let scale = timeout_scale()?;
        let member = |r: usize| {
            Ok::<_, Error>(Arc::new(Member {
                rank: Rank(r as u32),
                cpu: cpu.share(size)?,
                shared: shared.clone(),
                num_exchanges: AtomicU64::new(0),
                setup_timeout: SETUP_TIMEOUT.mul_f64(scale),
                doing: Mutex::new(Doing { op: "world", phase: "setup", epoch: 0 }),
            }))
        };
        (0..size).map(|r| Ok(World { member: member(r)? })).collect()
    }

    /// Runs `work` on a thread for each of `size` ranks and returns their results in the order of ranks. A rank that panicked is
    /// [`Error::Poisoned`] in its place, with a record that names it.
    ///
    /// ```
    /// use moe_kernels::{Backend, ep::World};
    /// let ranks = World::run(&Backend::cpu(), 3, |world| Ok(world.rank().0))?;
    /// assert_eq!(ranks.into_iter().collect::<Result<Vec<_>, _>>()?, [0, 1, 2]);
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    pub fn run<R: Send>(backend: &Backend, size: usize, work: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<Result<R>>> {
        let worlds = Self::threads(backend, size)?;
        let work = &work;
        Ok(std::thread::scope(|scope| {
            let rank_of = |world: World| {
                let member = world.member.clone();
                catch_unwind(AssertUnwindSafe(|| work(world))).unwrap_or_else(|_| {
                    let first = member.fail(member.record(FailureKind::Panicked));
                    Err(Error::Poisoned { first })
                })
            };
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || rank_of(world))).collect();
            threads.into_iter().map(|t| t.join().expect("panics were caught on the thread")).collect()
        }))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.member.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.member.size()
    }

    /// The CPU threads and instructions that this rank works with.
    pub fn cpu(&self) -> &Cpu {
        &self.member.cpu
    }

    /// The first failure of the world, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.member.shared.first.get().copied()
    }

    /// Waits until every rank is here. Collective.
    ///
    /// # Errors
    /// `Timeout` or `Poisoned`.
    pub fn barrier(&self) -> Result<()> {
        self.exchange("barrier", Ok(())).map(|_| ())
    }

    /// Every rank's value, in the order of ranks. Collective; fails on all ranks when one rank brings an error or does not come.
    pub(crate) fn exchange<T: Clone + Send + Sync + 'static>(&self, op: &'static str, value: Result<T>) -> Result<Vec<T>> {
        self.member.exchange(op, value)
    }

    pub(crate) fn member(&self) -> &Arc<Member> {
        &self.member
    }
}

impl Member {
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.shared.left.len()
    }

    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// What wakes the thread of `rank`.
    pub fn doorbell(&self, rank: usize) -> &Doorbell {
        &self.shared.doorbells[rank]
    }

    /// Wakes every rank that waits.
    pub fn ring_all(&self) {
        self.shared.doorbells.iter().for_each(Doorbell::ring);
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.left[rank].load(Ordering::Acquire)
    }

    /// Notes what this rank does from now on.
    pub fn set_doing(&self, doing: Doing) {
        *lock(&self.doing) = doing;
    }

    /// `Poisoned` once the world has failed.
    pub fn check_alive(&self) -> Result<()> {
        self.shared.first.get().map_or(Ok(()), |&first| Err(Error::Poisoned { first }))
    }

    fn record(&self, kind: FailureKind) -> Failure {
        let Doing { op, phase, epoch } = *lock(&self.doing);
        Failure { kind, op, phase, rank: self.rank, peer: self.rank, epoch, seen: epoch }
    }

    /// Stores the world's first failure, if this is it, wakes everybody and returns the first.
    pub fn fail(&self, failure: Failure) -> Failure {
        let first = *self.shared.first.get_or_init(|| failure);
        self.ring_all();
        // The board's lock orders the record before the check of a rank that is about to sleep there.
        drop(lock(&self.shared.board));
        self.shared.board_changed.notify_all();
        first
    }

    /// The error of a rank that gave up waiting with `failure`.
    pub fn timed_out(&self, failure: Failure, bound: Duration) -> Error {
        match self.fail(failure) {
            first if first == failure && failure.kind == FailureKind::Timeout => Error::Timeout { failure, bound },
            first => Error::Poisoned { first },
        }
    }

    fn exchange<T: Clone + Send + Sync + 'static>(&self, op: &'static str, value: Result<T>) -> Result<Vec<T>> {
        let key = self.num_exchanges.fetch_add(1, Ordering::Relaxed);
        self.set_doing(Doing { op, phase: "setup", epoch: key + 1 });
        let deadline = Instant::now() + self.setup_timeout;
        let me = self.rank.index();
        let mut board = lock(&self.shared.board);
        let meeting = board.entry(key).or_insert_with(|| Meeting { posted: vec![None; self.size()], num_read: 0 });
        meeting.posted[me] = Some(value.map(|v| Arc::new(v) as Arc<dyn Any + Send + Sync>));
        self.shared.board_changed.notify_all();
        loop {
            let meeting = board.get_mut(&key).expect("a meeting lasts until all have read it");
            let Some(missing) = meeting.posted.iter().position(Option::is_none) else { break };
            self.check_alive()?;
            let failure = |kind, rank| Failure { kind, op, phase: "setup", rank, peer: Rank(missing as u32), epoch: key + 1, seen: key };
            if self.has_left(missing) {
                drop(board);
                return Err(self.timed_out(failure(FailureKind::Left, Rank(missing as u32)), self.setup_timeout));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(board);
                return Err(self.timed_out(failure(FailureKind::Timeout, self.rank), self.setup_timeout));
            }
            board = self.shared.board_changed.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let meeting = board.get_mut(&key).expect("a meeting lasts until all have read it");
        let posted = meeting.posted.clone();
        meeting.num_read += 1;
        if meeting.num_read == self.size() {
            board.remove(&key);
        }
        drop(board);
        values(op, posted)
    }
}

/// Every rank's value, or the error of the lowest rank that brought one: the same on all ranks.
fn values<T: Clone + 'static>(op: &'static str, posted: Vec<Option<Posted>>) -> Result<Vec<T>> {
    let posted: Vec<Posted> = posted.into_iter().flatten().collect();
    let errors: Vec<_> = posted.iter().enumerate().filter_map(|(r, p)| p.as_ref().err().map(|e| (r, e))).collect();
    if let Some(&(rank, error)) = errors.first() {
        if errors.len() == posted.len() && errors.iter().all(|(_, e)| *e == error) {
            return Err(error.clone());
        }
        return Err(Error::Setup { op, rank: Rank(rank as u32), error: Box::new(error.clone()) });
    }
    let value = |p: &Posted| p.as_ref().ok().and_then(|v| v.downcast_ref::<T>()).cloned();
    let differs = || Error::invalid(op, "collective call", "another operation on some rank", "the same on all ranks, in the same order");
    posted.iter().map(|p| value(p).ok_or_else(differs)).collect()
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.left[self.rank.index()].store(true, Ordering::Release);
        if std::thread::panicking() {
            self.fail(self.record(FailureKind::Panicked));
        }
        // As in `fail`, for the flag.
        drop(lock(&self.shared.board));
        self.shared.board_changed.notify_all();
        self.ring_all();
    }
}

/// A lock whose data is valid at every step, so a panic of another holder does not matter.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `MOE_TIMEOUT_SCALE`: sanitizers and emulators are 15 to 1000 times slower.
pub(super) fn timeout_scale() -> Result<f64> {
    let Ok(text) = std::env::var("MOE_TIMEOUT_SCALE") else { return Ok(1.0) };
    let ok = |s: &f64| s.is_finite() && (1e-3..=1e6).contains(s);
    text.parse()
        .ok()
        .filter(ok)
        .ok_or_else(|| Error::invalid("world", "MOE_TIMEOUT_SCALE", format!("`{text}`"), "a number from 0.001 to 1000000"))
}
