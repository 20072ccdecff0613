//! The page of a world: who has failed, left, met and sleeps. Atomics alone, in memory of one process or of several.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::bell::Bell;
use super::signal::{Label, Machine, observe, publish, publish_first};
use super::symmetric::{Symmetric, Words};
use super::world::lock;
use crate::error::{Failure, FailureKind};
use crate::id::Rank;
use crate::name::{Name, intern};

/// Bytes of a name in a record (arbitrary: longer than every name here; the rest of a longer one is lost).
const NAME_WORDS: usize = 4;
const RECORD_WORDS: usize = 2 * NAME_WORDS + 3;

/// What one rank says about itself. Zeros at first.
#[derive(Debug)]
#[repr(C, align(64))] // 64: a cache line (derived)
pub(crate) struct RankPage {
    pub bell: Bell,
    /// Keeps what peers read in every post apart from what the rank writes in every wait.
    _line: [u8; 56],
    /// 1 once the rank has left.
    left: AtomicU64,
    /// Collective calls that it has entered.
    num_meetings: AtomicU64,
    /// What it does, packed.
    doing: AtomicU64,
    /// The failure that it found, complete before the world's first failure can name this rank.
    record: [AtomicU64; RECORD_WORDS],
}

/// Operation, phase and epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doing {
    pub op: Name,
    pub phase: Name,
    pub epoch: u64,
}

/// Names that a rank's own note can hold; of others, and before its first note, it holds the first. A rank that dies cannot say what it did in any
/// other way.
const NAMES: [Name; 12] =
    ["setup", "world", "barrier", "gather", "ep setup", "dispatch", "replay", "combine", "counts", "rows", "ready", "block"];

fn code(name: Name) -> u64 {
    NAMES.iter().position(|n| *n == name).unwrap_or(0) as u64
}

fn name_of(code: u64) -> Name {
    NAMES.get(code as usize & 0xFF).copied().unwrap_or(NAMES[0])
}

/// The page, as the ranks of one process see it.
#[derive(Debug)]
pub(crate) struct Page {
    /// The abort word: 0, or 1 + the rank whose record is the world's first failure. Set once; read by every wait.
    first: Words<AtomicU64>,
    pub ranks: Words<RankPage>,
    /// Held by the rank of this process that stores a record.
    recording: Mutex<()>,
    /// What this process does about a failure.
    hooks: Mutex<Hooks>,
}

/// What runs when a process learns something of its world.
#[derive(Default)]
struct Hooks {
    hooks: Vec<(u64, Hook)>,
    num_added: u64,
    /// What they have been told.
    failed: bool,
    left: u64,
}

/// What a process has learnt of its world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// The first failure is there. Told once.
    Failed,
    /// These ranks have left, a bit for each. Told again when there are more of them.
    Left(u64),
}

/// It must be short, must not panic and must not touch the page: it runs under a lock, on whichever thread learns of it.
pub(crate) type Hook = Box<dyn Fn(News) + Send + Sync>;

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").field("num", &self.hooks.len()).field("failed", &self.failed).field("left", &self.left).finish()
    }
}

/// A hook that runs on news, until this is dropped: afterwards it neither runs nor is running.
#[derive(Debug)]
pub(crate) struct OnNews {
    page: Arc<Page>,
    key: u64,
}

impl Drop for OnNews {
    fn drop(&mut self) {
        let mut hooks = lock(&self.page.hooks);
        if let Some(at) = hooks.hooks.iter().position(|(key, _)| *key == self.key) {
            let hook = hooks.hooks.swap_remove(at);
            // What it holds may take long to drop, and may look at the page.
            drop(hooks);
            drop(hook);
        }
    }
}

impl Page {
    /// Bytes of the page of `world` ranks.
    pub fn num_bytes(world: usize) -> usize {
        (world + 1) * size_of::<RankPage>()
    }

    /// The page in `memory`, which has [`num_bytes`](Self::num_bytes).
    pub fn new(memory: Arc<Symmetric>, world: usize) -> Self {
        let ranks = Words::new(memory.clone(), size_of::<RankPage>(), world);
        Page { first: Words::new(memory, 0, 1), ranks, recording: Mutex::new(()), hooks: Mutex::default() }
    }

    pub fn world(&self) -> usize {
        self.ranks.len()
    }

    /// The first failure of the world.
    #[inline]
    pub fn first(&self) -> Option<Failure> {
        // sync first: acquire, pairs with `publish_first` in `fail`
        match observe::<Machine>(Label::First, &self.first[0]) {
            0 => None,
            of => Some(self.ranks[of as usize - 1].read_record()),
        }
    }

    /// Stores the world's first failure, if this is it, wakes everybody and returns the first. `me` is the rank of this process that found it.
    pub fn fail(&self, me: Rank, failure: Failure) -> Failure {
        {
            let _one_at_a_time = lock(&self.recording);
            if self.first().is_none() {
                // Nobody reads it before the exchange succeeds, and it is written once: afterwards there is a first failure.
                self.ranks[me.index()].write_record(failure);
                // sync first: release, pairs with `observe` in `first`. Of several ranks one wins, for all.
                publish_first::<Machine>(Label::First, &self.first[0], u64::from(me.0) + 1);
            }
        }
        self.ring_all();
        self.run_hooks();
        self.first().unwrap_or(failure)
    }

    /// Runs `hook` when this process learns something: now, what it knows. Whoever fails in this process, reads the failure in a wait, or watches the
    /// other processes calls [`run_hooks`](Self::run_hooks); who leaves, or watches them, [`tell_left`](Self::tell_left).
    pub fn on_news(self: &Arc<Self>, hook: Hook) -> OnNews {
        let mut hooks = lock(&self.hooks);
        if hooks.failed {
            hook(News::Failed);
        }
        if hooks.left != 0 {
            hook(News::Left(hooks.left));
        }
        hooks.num_added += 1;
        let key = hooks.num_added;
        hooks.hooks.push((key, hook));
        drop(hooks);
        let added = OnNews { page: self.clone(), key };
        // What another process did and nobody here has seen yet.
        if self.first().is_some() {
            self.run_hooks();
        }
        self.tell_left();
        added
    }

    /// The world has failed: runs the hooks, if they have not run.
    pub fn run_hooks(&self) {
        let mut hooks = lock(&self.hooks);
        if !std::mem::replace(&mut hooks.failed, true) {
            hooks.hooks.iter().for_each(|(_, hook)| hook(News::Failed));
        }
    }

    /// Tells the hooks who has left, if they do not know.
    pub fn tell_left(&self) {
        let left = (0..self.world()).filter(|rank| self.has_left(*rank)).fold(0, |all, rank| all | 1 << rank);
        let mut hooks = lock(&self.hooks);
        if left & !hooks.left != 0 {
            hooks.left |= left;
            let left = hooks.left;
            hooks.hooks.iter().for_each(|(_, hook)| hook(News::Left(left)));
        }
    }

    /// Wakes every rank that waits.
    pub fn ring_all(&self) {
        self.ranks.iter().for_each(|rank| rank.bell.ring());
    }

    pub fn has_left(&self, rank: usize) -> bool {
        // sync left: acquire, pairs with `leave`
        observe::<Machine>(Label::Left, &self.ranks[rank].left) != 0
    }

    pub fn leave(&self, rank: usize) {
        // sync left: release, pairs with `has_left`: after it there are no more words to wait for
        publish::<Machine>(Label::Left, &self.ranks[rank].left, 1);
        self.ring_all();
        self.tell_left();
    }

    /// Collective calls that `rank` has entered.
    pub fn num_meetings(&self, rank: usize) -> u64 {
        // sync meet: acquire, pairs with `meet`
        observe::<Machine>(Label::Meet, &self.ranks[rank].num_meetings)
    }

    /// `rank` enters its `num`-th collective call.
    pub fn meet(&self, rank: usize, num: u64) {
        // sync meet: release, pairs with `num_meetings`
        publish::<Machine>(Label::Meet, &self.ranks[rank].num_meetings, num);
        self.ring_all();
    }

    /// Notes what `rank` does from now on.
    pub fn set_doing(&self, rank: usize, Doing { op, phase, epoch }: Doing) {
        self.ranks[rank].doing.store(epoch << 16 | code(op) << 8 | code(phase), Ordering::Relaxed);
    }

    /// What `rank` did last, as a failure that is its own.
    pub fn record(&self, kind: FailureKind, rank: Rank) -> Failure {
        let doing = self.ranks[rank.index()].doing.load(Ordering::Relaxed);
        let epoch = doing >> 16;
        Failure {
            kind,
            op: name_of(doing >> 8 & 0xFF),
            phase: name_of(doing & 0xFF),
            rank,
            peer: rank,
            epoch,
            seen: epoch,
            blocks_arrived: 0,
        }
    }
}

const KINDS: [FailureKind; 4] = [FailureKind::Timeout, FailureKind::Panicked, FailureKind::Left, FailureKind::Died];

impl RankPage {
    fn write_record(&self, failure: Failure) {
        let Failure { kind, op, phase, rank, peer, epoch, seen, blocks_arrived } = failure;
        let kind = KINDS.iter().position(|k| *k == kind).unwrap_or(0) as u64;
        let ids = [u64::from(rank.0) | u64::from(peer.0) << 16 | kind << 32 | u64::from(blocks_arrived) << 40, epoch, seen];
        let words = pack_name(op).into_iter().chain(pack_name(phase)).chain(ids);
        self.record.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
    }

    fn read_record(&self) -> Failure {
        let words: [u64; RECORD_WORDS] = std::array::from_fn(|i| self.record[i].load(Ordering::Relaxed));
        let [ids, epoch, seen] = [0, 1, 2].map(|i| words[2 * NAME_WORDS + i]);
        Failure {
            kind: KINDS.get((ids >> 32 & 0xFF) as usize).copied().unwrap_or(FailureKind::Died),
            op: unpack_name(&words[..NAME_WORDS]),
            phase: unpack_name(&words[NAME_WORDS..2 * NAME_WORDS]),
            rank: Rank((ids & 0xFFFF) as u32),
            peer: Rank((ids >> 16 & 0xFFFF) as u32),
            epoch,
            seen,
            blocks_arrived: (ids >> 40) as u32,
        }
    }
}

fn pack_name(name: Name) -> [u64; NAME_WORDS] {
    let bytes = name.as_bytes();
    std::array::from_fn(|w| {
        let byte = |i: usize| u64::from(bytes.get(8 * w + i).copied().unwrap_or(0)) << (8 * i);
        (0..8).map(byte).sum()
    })
}

fn unpack_name(words: &[u64]) -> Name {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).take_while(|&b| b != 0).collect();
    intern(&String::from_utf8_lossy(&bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::time::{Duration, Instant};

    use super::*;

    fn page(world: usize) -> Page {
        Page::new(Arc::new(Symmetric::new(Page::num_bytes(world)).unwrap()), world)
    }

    fn failure(kind: FailureKind, rank: u32) -> Failure {
        Failure {
            kind,
            op: "dispatch",
            phase: "a phase of thirty-two bytes, all",
            rank: Rank(rank),
            peer: Rank(63),
            epoch: 1 << 40,
            seen: 7,
            blocks_arrived: 0xFF_FFFF,
        }
    }

    #[test]
    fn the_first_record_stays_whole() {
        for kind in KINDS {
            let page = page(64);
            assert_eq!(page.first(), None);
            assert_eq!(page.fail(Rank(5), failure(kind, 5)), failure(kind, 5));
            assert_eq!(page.fail(Rank(3), failure(FailureKind::Left, 3)), failure(kind, 5));
            assert_eq!(page.first(), Some(failure(kind, 5)));
        }
    }

    /// As two processes would: each with its own lock, on one memory.
    #[test]
    fn one_of_two_failures_wins_for_both() {
        const NUM: usize = 5000; // arbitrary: a store in place of the exchange is found every time
        let memory = Arc::new(Symmetric::new(Page::num_bytes(2)).unwrap());
        let memories: Vec<_> = (0..NUM).map(|_| Arc::new(Symmetric::new(Page::num_bytes(2)).unwrap())).collect();
        let steps = Page::new(memory, 2);
        let results = std::thread::scope(|scope| {
            let threads = [0, 1].map(|rank| {
                let (steps, memories) = (&steps, &memories);
                scope.spawn(move || {
                    let fail = |(step, memory): (usize, &Arc<Symmetric>)| {
                        let page = Page::new(memory.clone(), 2);
                        // Both at the same time.
                        steps.meet(rank, step as u64 + 1);
                        while steps.num_meetings(1 - rank) <= step as u64 {
                            std::hint::spin_loop();
                        }
                        page.fail(Rank(rank as u32), failure(FailureKind::Died, rank as u32))
                    };
                    memories.iter().enumerate().map(fail).collect::<Vec<_>>()
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        for ((a, b), memory) in results[0].iter().zip(&results[1]).zip(&memories) {
            let first = Page::new(memory.clone(), 2).first();
            assert!(a == b && first == Some(*a), "{a:?} {b:?} {first:?}");
        }
    }

    #[test]
    fn hooks_run_once_when_the_world_fails() {
        let memory = Arc::new(Symmetric::new(Page::num_bytes(2)).unwrap());
        let page = Arc::new(Page::new(memory.clone(), 2));
        let counts = [(); 4].map(|()| Arc::new(AtomicU32::new(0)));
        let add = |page: &Arc<Page>, i: usize| {
            let count = counts[i].clone();
            page.on_news(Box::new(move |news| {
                count.fetch_add(u32::from(news == News::Failed), Ordering::Relaxed);
            }))
        };
        let seen = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let kept = add(&page, 0);
        drop(add(&page, 1));
        assert_eq!(seen(), [0; 4]);
        page.fail(Rank(0), failure(FailureKind::Died, 1));
        page.fail(Rank(1), failure(FailureKind::Panicked, 1));
        assert_eq!(seen(), [1, 0, 0, 0]);
        // Who comes later is told at once, once.
        let late = add(&page, 2);
        page.run_hooks();
        assert_eq!(seen(), [1, 0, 1, 0]);
        // Another process, which sees the same words.
        let other = Arc::new(Page::new(memory, 2));
        let theirs = add(&other, 3);
        assert_eq!(seen(), [1, 0, 1, 1]);
        other.run_hooks();
        assert_eq!(seen(), [1, 0, 1, 1]);
        drop((kept, late, theirs));
    }

    #[test]
    fn hooks_are_told_who_has_left() {
        let memory = Arc::new(Symmetric::new(Page::num_bytes(64)).unwrap());
        let page = Arc::new(Page::new(memory.clone(), 64));
        let listen = |page: &Arc<Page>| {
            let heard = Arc::new(Mutex::new(Vec::new()));
            let told = heard.clone();
            (page.on_news(Box::new(move |news| lock(&told).push(news))), heard)
        };
        let (kept, first) = listen(&page);
        page.tell_left();
        assert_eq!(*lock(&first), []);
        page.leave(63);
        page.leave(1);
        page.tell_left();
        let (both, alone) = (News::Left(1 << 63 | 2), News::Left(1 << 63));
        assert_eq!(*lock(&first), [alone, both]);
        // Who comes late, and another process, which sees the same words.
        let (late, second) = listen(&page);
        let (theirs, third) = listen(&Arc::new(Page::new(memory, 64)));
        assert_eq!((&*lock(&second), &*lock(&third)), (&vec![both], &vec![both]));
        assert_eq!(*lock(&first), [alone, both]);
        drop((kept, late, theirs));
    }

    #[test]
    fn a_note_names_what_a_rank_did() {
        let page = page(3);
        page.set_doing(1, Doing { op: "combine", phase: "ready", epoch: 12 });
        let record = page.record(FailureKind::Died, Rank(1));
        assert_eq!((record.op, record.phase, record.epoch, record.rank), ("combine", "ready", 12, Rank(1)));
        page.set_doing(1, Doing { op: "something of a caller", phase: "setup", epoch: 1 });
        assert_eq!(page.record(FailureKind::Died, Rank(1)).op, NAMES[0]);
    }

    #[test]
    fn a_ring_ends_the_sleep() {
        let page = page(1);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| page.ranks[0].bell.park(Duration::from_secs(20), || false));
            while !page.ranks[0].bell.has_parked() {
                std::thread::yield_now();
            }
            page.ranks[0].bell.ring();
        });
        assert!(start.elapsed() < Duration::from_secs(10), "the ring was lost");
        // Ready at the last look: no sleep.
        page.ranks[0].bell.park(Duration::from_secs(20), || true);
        assert!(start.elapsed() < Duration::from_secs(10), "a rank slept although it was ready");
    }
}
