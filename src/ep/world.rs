//! Worlds of ranks: threads of one process or one process per rank, their collective setup, and the first failure that ends a world.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::bell::Bell;
use super::config::MAX_RANKS;
use super::meeting::{Board, Posted, values};
pub(crate) use super::page::Doing;
use super::page::{Hook, OnNews, Page};
#[cfg(target_os = "linux")]
use super::processes::{Processes, Rendezvous};
use super::symmetric::{Symmetric, Words};
use super::wait::Poll;
use crate::backend::{Backend, Cpu, Cuda};
use crate::error::{Error, Failure, FailureKind, Result};
use crate::id::Rank;
use crate::name::Name;

/// Bound of the waits of collective setup (arbitrary: allocating and zeroing a node's memory takes seconds).
pub(super) const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

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
    local_rank: usize,
    /// Threads for what the host computes, a GPU rank's too.
    cpu: Cpu,
    /// Of a GPU rank: its GPU, and the stream that its objects use at first.
    cuda: Option<Cuda>,
    page: Arc<Page>,
    link: Link,
    /// Collective calls so far: the key under which ranks meet.
    num_meetings: AtomicU64,
    setup_timeout: Duration,
}

/// How what ranks bring to a collective call reaches the others.
#[derive(Debug)]
enum Link {
    /// Threads of one process.
    Threads(Arc<Board>),
    /// Processes of one machine.
    #[cfg(target_os = "linux")]
    Processes(Processes),
}

impl World {
    /// The memberships of a world of `size` ranks in this process, to be moved to a thread each. Every rank works on `backend`: on its share of
    /// the CPU's threads, or on a GPU with a stream of its own; the ranks share the GPU, or take turns on several ([`Cuda::across`]).
    ///
    /// # Errors
    /// `Invalid` for a size of 0 or above 64; those of the GPU.
    pub fn threads(backend: &Backend, size: usize) -> Result<Vec<World>> {
        check_size(size)?;
        let of_rank = |rank| match backend {
            Backend::Cpu(cpu) => cpu.share(size).map(Backend::Cpu),
            Backend::Cuda(cuda) => cuda.of_rank(rank).map(Backend::Cuda),
        };
        Self::threads_on(&(0..size).map(of_rank).collect::<Result<Vec<_>>>()?)
    }

    /// The memberships of a world with a rank on each of `backends`, all CPUs or all GPUs; a GPU may be there several times.
    ///
    /// # Errors
    /// As [`threads`](Self::threads); `Invalid` for CPUs and GPUs together.
    pub fn threads_on(backends: &[Backend]) -> Result<Vec<World>> {
        let size = backends.len();
        check_size(size)?;
        if let Some(other) = backends.iter().find(|backend| backend.name() != backends[0].name()) {
            return Err(Error::invalid("world", "backends", format!("{} and {}", backends[0].name(), other.name()), "of one kind"));
        }
        let page = Arc::new(Page::new(Arc::new(Symmetric::new(Page::num_bytes(size))?), size));
        let board = Arc::new(Board::default());
        let setup_timeout = SETUP_TIMEOUT.mul_f64(timeout_scale()?);
        let world = |r: usize| {
            Ok(World::new(Member {
                rank: Rank(r as u32),
                local_rank: r,
                cpu: cpu_of(&backends[r], size)?,
                cuda: cuda_of(&backends[r]),
                page: page.clone(),
                link: Link::Threads(board.clone()),
                num_meetings: AtomicU64::new(0),
                setup_timeout,
            }))
        };
        (0..size).map(world).collect()
    }

    /// The membership of a process that has met the others.
    #[cfg(target_os = "linux")]
    pub(super) fn of_processes(backend: &Backend, rendezvous: &Rendezvous, page: Arc<Page>, link: Processes) -> Result<World> {
        Ok(World::new(Member {
            rank: rendezvous.rank(),
            local_rank: rendezvous.local_rank(),
            cpu: match backend {
                Backend::Cpu(cpu) => cpu.share(page.world())?,
                Backend::Cuda(_) => cpu_of(backend, page.world())?,
            },
            cuda: cuda_of(&backend.of_rank(rendezvous.local_rank())?),
            page,
            link: Link::Processes(link),
            num_meetings: AtomicU64::new(0),
            setup_timeout: rendezvous.bound(),
        }))
    }

    fn new(member: Member) -> Self {
        member.set_doing(Doing { op: "world", phase: "setup", epoch: 0 });
        World { member: Arc::new(member) }
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
                // Not the membership: a rank may leave while its work goes on.
                let (page, rank) = (world.member.page.clone(), world.rank());
                catch_unwind(AssertUnwindSafe(|| work(world))).unwrap_or_else(|_| {
                    let first = page.fail(rank, page.record(FailureKind::Panicked, rank));
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

    /// Number of this rank among those of its machine: which GPU it takes, for example.
    pub fn local_rank(&self) -> usize {
        self.member.local_rank
    }

    /// The CPU threads and instructions that this rank works with.
    pub fn cpu(&self) -> &Cpu {
        &self.member.cpu
    }

    /// What this rank works on: its share of the CPU, or its GPU with the stream that its objects use at first.
    pub fn backend(&self) -> Backend {
        self.member.cuda.clone().map_or_else(|| Backend::Cpu(self.member.cpu.clone()), Backend::Cuda)
    }

    /// The first failure of the world, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.member.page.first()
    }

    /// Waits until every rank is here. Collective.
    ///
    /// # Errors
    /// `Timeout` or `Poisoned`.
    pub fn barrier(&self) -> Result<()> {
        self.exchange("barrier", Ok(())).map(|_| ())
    }

    /// Every rank's bytes, in the order of ranks. Collective; fails on all ranks when one rank brings an error.
    ///
    /// ```
    /// use moe_kernels::{Backend, ep::World};
    /// let ranks = World::run(&Backend::cpu(), 2, |world| world.gather(Ok(vec![7; 1 + world.rank().index()])))?;
    /// assert_eq!(ranks[0].as_ref().unwrap(), &[vec![7], vec![7, 7]]);
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Setup` around the error of a rank, `Memory`, `Timeout`, `Poisoned`.
    pub fn gather(&self, bytes: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        const OP: Name = "gather";
        let lens: Vec<u64> = self.exchange(OP, bytes.as_ref().map(|b| b.len() as u64).map_err(Clone::clone))?;
        let word_bytes = size_of::<u64>();
        let filled = bytes.and_then(|bytes| {
            let memory = self.member.allocate(bytes.len().next_multiple_of(word_bytes))?;
            let words = Words::<AtomicU64>::new(memory.clone(), 0, bytes.len().div_ceil(word_bytes));
            for (word, chunk) in words.iter().zip(bytes.chunks(word_bytes)) {
                let mut value = [0; size_of::<u64>()];
                value[..chunk.len()].copy_from_slice(chunk);
                word.store(u64::from_le_bytes(value), Ordering::Relaxed);
            }
            Ok(memory)
        });
        // The exchange orders the words before the reads.
        let memories = self.member.exchange_memory(OP, filled)?;
        let read = |(memory, len): (Arc<Symmetric>, u64)| {
            let len = len as usize;
            let words = Words::<AtomicU64>::new(memory, 0, len.div_ceil(word_bytes));
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            bytes.truncate(len);
            bytes
        };
        Ok(memories.into_iter().zip(lens).map(read).collect())
    }

    /// Every rank's value, in the order of ranks. Collective; fails on all ranks when one rank brings an error or does not come.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(&self, op: Name, value: Result<T>) -> Result<Vec<T>> {
        self.member.exchange(op, value)
    }

    pub(crate) fn member(&self) -> &Arc<Member> {
        &self.member
    }
}

/// The CPU of a rank: its own, or a GPU rank's share of the machine's.
fn cpu_of(backend: &Backend, size: usize) -> Result<Cpu> {
    match backend {
        Backend::Cpu(cpu) => Ok(cpu.clone()),
        Backend::Cuda(_) => Cpu::default().share(size),
    }
}

fn cuda_of(backend: &Backend) -> Option<Cuda> {
    match backend {
        Backend::Cpu(_) => None,
        Backend::Cuda(cuda) => Some(cuda.clone()),
    }
}

pub(super) fn check_size(size: usize) -> Result<()> {
    match (1..=MAX_RANKS).contains(&size) {
        true => Ok(()),
        false => Err(Error::invalid("world", "size", size, format!("1 to {MAX_RANKS}"))),
    }
}

impl Member {
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.page.world()
    }

    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Of a GPU rank.
    pub fn cuda(&self) -> Option<&Cuda> {
        self.cuda.as_ref()
    }

    #[cfg(target_os = "linux")]
    pub(super) fn page(&self) -> &Page {
        &self.page
    }

    /// What wakes the thread of `rank`.
    pub fn doorbell(&self, rank: usize) -> &Bell {
        &self.page.ranks[rank].bell
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.page.has_left(rank)
    }

    /// Notes what this rank does from now on.
    pub fn set_doing(&self, doing: Doing) {
        self.page.set_doing(self.rank.index(), doing);
    }

    /// `Poisoned` once the world has failed.
    pub fn check_alive(&self) -> Result<()> {
        let Some(first) = self.page.first() else { return Ok(()) };
        // It may be a failure of another process that nobody here has seen yet.
        self.page.run_hooks();
        Err(Error::Poisoned { first })
    }

    /// Runs `hook` when this process learns of the world's first failure, or of a rank that has left, until what this returns is dropped.
    pub fn on_news(&self, hook: Hook) -> OnNews {
        self.page.on_news(hook)
    }

    /// Fails the world if this thread panics: for what is dropped before the membership is.
    pub fn fail_if_panicking(&self) {
        if std::thread::panicking() {
            self.fail(self.page.record(FailureKind::Panicked, self.rank));
        }
    }

    /// Stores the world's first failure, if this is it, wakes everybody and returns the first.
    pub fn fail(&self, failure: Failure) -> Failure {
        self.page.fail(self.rank, failure)
    }

    /// The error of a rank that gave up waiting with `failure`.
    pub fn timed_out(&self, failure: Failure, bound: Duration) -> Error {
        match self.fail(failure) {
            first if first == failure && failure.kind == FailureKind::Timeout => Error::Timeout { failure, bound },
            first => Error::Poisoned { first },
        }
    }

    /// Whether all ranks are threads of this process.
    pub(super) fn is_among_threads(&self) -> bool {
        matches!(self.link, Link::Threads(_))
    }

    /// What the ranks of this process have in common at this point of setup, and nothing else in the process has while the world lives.
    pub(super) fn place_in_setup(&self) -> (usize, u64) {
        (Arc::as_ptr(&self.page).addr(), self.num_meetings.load(Ordering::Relaxed))
    }

    /// What every rank brings, in the order of ranks.
    pub(super) fn meet(&self, posted: Posted) -> Result<Vec<Posted>> {
        let key = self.num_meetings.fetch_add(1, Ordering::Relaxed);
        let op = posted.op;
        let (me, size) = (self.rank.index(), self.size());
        let posted = match &self.link {
            Link::Threads(board) => {
                board.post(key, size, me, posted);
                None
            }
            #[cfg(target_os = "linux")]
            Link::Processes(_) => Some(posted),
        };
        self.page.meet(me, key + 1);
        let doing = Doing { op, phase: "setup", epoch: key + 1 };
        self.wait(doing, self.setup_timeout, || match (0..size).find(|&r| self.page.num_meetings(r) <= key) {
            None => Poll::Ready,
            Some(peer) => Poll::Missing { peer, seen: self.page.num_meetings(peer) },
        })?;
        match (&self.link, posted) {
            (Link::Threads(board), _) => Ok(board.take(key)),
            #[cfg(target_os = "linux")]
            (Link::Processes(link), Some(posted)) => link.exchange(self, key, posted, self.setup_timeout),
            #[cfg(target_os = "linux")]
            (Link::Processes(_), None) => Ok(Vec::new()),
        }
    }

    pub(super) fn exchange<T: Serialize + DeserializeOwned>(&self, op: Name, value: Result<T>) -> Result<Vec<T>> {
        values(op, &self.meet(Posted::new(op, value))?)
    }

    /// Zeroed memory that [`exchange_memory`](Self::exchange_memory) can share.
    pub fn allocate(&self, num_bytes: usize) -> Result<Arc<Symmetric>> {
        match &self.link {
            Link::Threads(_) => Symmetric::new(num_bytes).map(Arc::new),
            #[cfg(target_os = "linux")]
            Link::Processes(_) => Symmetric::shared(num_bytes).map(Arc::new),
        }
    }

    /// The memory of every rank, all of it mapped by all ranks. Collective; fails on all ranks when one brings an error.
    pub fn exchange_memory(&self, op: Name, memory: Result<Arc<Symmetric>>) -> Result<Vec<Arc<Symmetric>>> {
        match &self.link {
            Link::Threads(_) => {
                let posted = Posted { memory: memory.as_ref().ok().cloned(), ..Posted::new(op, memory.map(|_| ())) };
                let all = self.meet(posted)?;
                values::<()>(op, &all)?;
                Ok(all.into_iter().filter_map(|posted| posted.memory).collect())
            }
            #[cfg(target_os = "linux")]
            Link::Processes(_) => {
                use std::os::fd::AsFd;
                let file = |memory: &Arc<Symmetric>| {
                    let io = |why: String| Error::Io { what: "passing on shared memory".into(), why };
                    let file = memory.file().ok_or_else(|| io("the memory is this process's alone".into()))?;
                    Ok(vec![file.try_clone_to_owned().map_err(|e| io(e.to_string()))?])
                };
                let files = self.exchange_files(op, memory.as_ref().map_err(Clone::clone).and_then(file))?;
                let map = |(rank, files): (usize, Vec<Arc<OwnedFd>>)| match (&memory, files.first()) {
                    // One address for an allocation in a process.
                    (Ok(mine), _) if rank == self.rank.index() => Ok(mine.clone()),
                    (_, Some(file)) => Symmetric::map(file.as_fd()).map(Arc::new),
                    _ => Err(Error::invalid(op, "collective call", "another operation on some rank", "the same on all ranks")),
                };
                let mapped = files.into_iter().enumerate().map(map).collect::<Result<Vec<_>>>();
                // Nobody uses the memory before all have mapped it.
                self.exchange(op, mapped.as_ref().map(|_| ()).map_err(Clone::clone))?;
                mapped
            }
        }
    }

    /// Open files of every rank: between processes each gets files of its own, which are the same as the sender's. Collective; fails on all
    /// ranks when one brings an error.
    pub fn exchange_files(&self, op: Name, files: Result<Vec<OwnedFd>>) -> Result<Vec<Vec<Arc<OwnedFd>>>> {
        let (num, files) = match files {
            Ok(files) => (Ok(files.len()), files.into_iter().map(Arc::new).collect()),
            Err(error) => (Err(error), Vec::new()),
        };
        let all = self.meet(Posted { files, ..Posted::new(op, num) })?;
        values::<usize>(op, &all)?;
        Ok(all.into_iter().map(|posted| posted.files).collect())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.fail_if_panicking();
        self.page.leave(self.rank.index());
    }
}

/// A lock whose data is valid at every step, so a panic of another holder does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
