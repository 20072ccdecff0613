//! One rank's end of the buffers through which tokens travel.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::device::End;
use super::device::tuning::{Launches, Tuning};
use super::signal::{CountWord, Machine, Rules, Signals, num_signal_words};
use super::symmetric::{Symmetric, Words};
use super::wait::scaled;
use super::world::{Member, lock, timeout_scale};
use super::{Config, Plan, World};
use crate::backend::Cuda;
use crate::cpu::Level;
use crate::error::{Error, Result};
use crate::gpu::{Event, Stream};
use crate::id::Rank;

const OP: &str = "ep setup";

/// One rank's end of the buffers through which tokens travel to experts and back: banks, signal words, epochs.
///
/// Every rank calls the same operations in the same order. An object is used by one thread at a time (`&mut self`).
#[derive(Debug)]
pub struct ExpertParallel {
    pub(crate) shared: Arc<Shared>,
    /// Last dispatch, replay included.
    pub(crate) epoch: u64,
    /// This rank's count words of the call that is being made.
    pub(crate) words: Vec<CountWord>,
}

/// What an object and its arrivals have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub member: Arc<Member>,
    pub config: Config,
    pub plan: Plan,
    pub timeout: Duration,
    /// Of CPU ranks: the memory of every rank, this one included.
    pub ranks: Vec<RankMemory>,
    /// Of a GPU rank: its end on the GPU.
    cuda: Option<End>,
    /// What describes an arrival, per bank; taken together with the bank.
    banks: [Mutex<Option<Box<Counts>>>; 2],
}

/// Numbers that describe the rows of one arrival. Allocated once per bank.
#[derive(Debug, Clone)]
pub(crate) struct Counts {
    pub num_rows: [u32; 1],
    pub num_dropped: usize,
    /// `[L]`.
    pub num_rows_per_expert: Vec<u32>,
    /// `[L + 1]` in the expert layouts, else empty.
    pub segment_start: Vec<u32>,
    /// First arrival of each sender `[world + 1]`.
    pub arrival_start: Vec<u32>,
    /// Rows of lower ranks `[world, L]` in the expert layouts, else empty.
    pub row_base: Vec<u32>,
}

/// What the peers of a rank read and write of it.
#[derive(Debug)]
pub(crate) struct RankMemory {
    pub bytes: Arc<Symmetric>,
    pub signals: Signals<Machine, Words<AtomicU64>>,
}

impl ExpertParallel {
    /// Collective: every rank of the world calls it with an equal configuration. It fails on all ranks or on none.
    ///
    /// # Errors
    /// `Invalid` for a configuration that no world of this size can use, `Mismatch` when two ranks differ, `Memory`, `Timeout`, `Poisoned`;
    /// `Setup` around the error of one rank only.
    pub fn new(world: &World, config: Config) -> Result<Self> {
        Self::with_tuning(world, config, Tuning::default())
    }

    /// As [`new`](Self::new), with a say in how kernels are launched on a GPU; a CPU has no use for it. Need not be equal on all ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new); `Invalid` for launches that no kernel can have, or whose waiting blocks do not fit beside those of the other ranks and
    /// objects of the GPU.
    pub fn with_tuning(world: &World, config: Config, tuning: Tuning) -> Result<Self> {
        let plan = config.plan(world.size());
        let description =
            serde_json::to_value(&config).map_err(|e| Error::invalid(OP, "config", e, "a configuration that can be compared"));
        let descriptions = world.exchange(OP, plan.as_ref().map_err(Clone::clone).and(description))?;
        same_everywhere(&descriptions)?;
        let plan = plan?;

        let timeout = timeout_scale().and_then(|scale| scaled(config.timeout, scale));
        let (timeout, ranks, cuda) = match world.member().cuda() {
            None => {
                let memory = timeout.clone().and_then(|_| world.member().allocate(plan.regions.total_bytes));
                // Nobody writes to a peer before all have allocated, zeroed and mapped: collective, and the barrier.
                let memories = world.member().exchange_memory(OP, memory)?;
                (timeout?, memories.into_iter().map(|memory| RankMemory::new(memory, &plan)).collect(), None)
            }
            Some(cuda) => {
                let end = End::new(world, cuda, &config, &plan, timeout.clone(), tuning)?;
                (timeout?, Vec::new(), Some(end))
            }
        };
        let words = vec![CountWord::unpack(0); plan.num_count_words];
        let banks = [0, 1].map(|_| Mutex::new(Some(Box::new(Counts::new(&config, &plan, world.rank())))));
        let shared = Shared { member: world.member().clone(), config, plan, timeout, ranks, cuda, banks };
        Ok(ExpertParallel { shared: Arc::new(shared), epoch: 0, words })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The sizes that follow from it.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// Waits for all that this object has queued, and returns what its calls met that only the GPU knew: `Capacity` of the last refused call,
    /// `Mismatch`, `Timeout`, `Poisoned`. On a CPU there is nothing to wait for.
    pub fn synchronize(&self) -> Result<()> {
        self.shared.member.check_alive()?;
        self.shared.cuda().map_or(Ok(()), |end| end.wait(&self.shared.member, self.shared.timeout))
    }

    /// Of a GPU rank: fills its banks with 0xFF, for tests that look for reads of what nobody wrote. Before the first call of any rank; waits.
    #[doc(hidden)]
    pub fn poison(&self) -> Result<()> {
        self.shared.cuda().map_or(Ok(()), End::poison)
    }

    /// Of a GPU rank: calls from now on are queued in `stream`, after what the stream until now holds. While one of the two is being captured into a
    /// graph, the caller orders them. Objects of a rank that use different streams share the multiprocessors on which they wait: give them their streams before the
    /// first call, or set [`PhaseTuning::sms`](super::PhaseTuning); the next call of one that finds no room is refused.
    ///
    /// # Errors
    /// `Invalid` for a stream of another device, `Unsupported` for a CPU rank; those of the driver.
    pub fn set_stream(&mut self, stream: &Stream) -> Result<()> {
        const OP: &str = "set_stream";
        let Some(end) = self.shared.cuda() else {
            return Err(Error::Unsupported { op: OP, what: "a stream".into(), why: "the ranks of this world work on CPUs".into() });
        };
        let (old, programmatic) = {
            let ctx = end.ctx();
            (ctx.cuda.stream().clone(), ctx.cuda.is_programmatic())
        };
        if old.device() != stream.device() {
            return Err(Error::invalid(OP, "stream", format!("of {:?}", stream.device()), format!("of {:?}", old.device())));
        }
        if old.raw() != stream.raw() && !old.is_capturing()? && !stream.is_capturing()? {
            let event = Event::new(old.device())?;
            event.record(&old)?;
            stream.wait_for(&event)?;
        }
        end.set_cuda(Cuda::on(stream.clone()).programmatic(programmatic));
        Ok(())
    }

    /// Launches are shaped by `tuning` from now on; graphs that hold earlier launches keep them. For tuners and benchmarks, which capture one graph of each
    /// shape over the same buffers. Collective, with nothing queued on any rank. A CPU rank has no launches.
    ///
    /// # Errors
    /// As [`with_tuning`](Self::with_tuning), on all ranks or on none; after one the next call is only allowed behind a `retune` that succeeds.
    #[doc(hidden)]
    pub fn retune(&mut self, world: &World, tuning: Tuning) -> Result<()> {
        match self.shared.cuda() {
            None => Ok(()),
            Some(end) => end.retune(world, &self.shared.config, &self.shared.plan, tuning),
        }
    }

    /// How a call of so many tokens is launched; `None` on a CPU, which launches nothing.
    pub fn launches(&self, num_tokens: usize) -> Option<Launches> {
        let num_tokens = u32::try_from(num_tokens).unwrap_or(u32::MAX);
        self.shared.cuda().map(|end| end.ctx().kernels.launches(num_tokens))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.shared.member.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.shared.plan.world
    }

    /// Local experts of this rank.
    pub fn num_local_experts(&self) -> usize {
        self.shared.plan.placement.num_local(self.rank())
    }
}

/// `Mismatch` naming the first rank that differs from rank 0, and the field.
fn same_everywhere(descriptions: &[serde_json::Value]) -> Result<()> {
    let Some((first, rest)) = descriptions.split_first() else { return Ok(()) };
    let Some((r, other)) = rest.iter().enumerate().find(|(_, d)| *d != first) else { return Ok(()) };
    let fields = first.as_object().into_iter().flatten();
    let differs = |(name, value): (&String, &serde_json::Value)| {
        let there = other.get(name).filter(|there| *there != value)?;
        Some((name.clone(), value.to_string(), there.to_string()))
    };
    let (what, first_value, second_value) =
        fields.map(differs).find_map(|d| d).unwrap_or_else(|| ("config".into(), first.to_string(), other.to_string()));
    Err(Error::Mismatch { op: OP, first: Rank(0), second: Rank(r as u32 + 1), what, first_value, second_value })
}

impl RankMemory {
    fn new(bytes: Arc<Symmetric>, plan: &Plan) -> Self {
        let words = Words::new(bytes.clone(), plan.regions.signals, num_signal_words(plan.world, plan.num_count_words));
        RankMemory { bytes, signals: Signals::over(words, plan.world, plan.num_count_words) }
    }
}

impl Shared {
    pub fn me(&self) -> usize {
        self.member.rank().index()
    }

    /// This rank's end on its GPU, when it has one.
    pub fn cuda(&self) -> Option<&End> {
        self.cuda.as_ref()
    }

    /// Before a call. `Poisoned` once the world has failed; on a GPU also what the calls before this one met, and whether its grids have a place there.
    pub fn check_alive(&self) -> Result<()> {
        self.member.check_alive()?;
        let Some(end) = &self.cuda else { return Ok(()) };
        end.settle("ep")?;
        end.check(&self.member, self.timeout)
    }

    pub fn level(&self) -> Level {
        self.member.cpu().level()
    }

    /// This rank's own memory.
    pub fn mine(&self) -> &RankMemory {
        &self.ranks[self.me()]
    }

    /// Offset of bank `bank` in the memory of every rank.
    pub fn bank_offset(&self, bank: usize) -> usize {
        bank * self.plan.regions.bank_bytes
    }

    /// Peers, this rank among them, each rank starting with another one.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, world) = (self.me(), self.plan.world);
        (0..world).map(move |i| (me + i) % world)
    }

    /// Takes the bank of dispatch or replay `epoch`. Banks alternate, so that all ranks take the same one.
    pub fn take_bank(self: &Arc<Self>, op: &'static str, epoch: u64) -> Result<Lease> {
        let bank = Machine::bank(epoch, self.config.in_flight);
        let Some(counts) = lock(&self.banks[bank]).take() else {
            let why = format!("an arrival of it is alive, and in_flight is {}", self.config.in_flight);
            return Err(Error::Busy { op, what: format!("bank {bank}"), why });
        };
        Ok(Lease { shared: self.clone(), bank, epoch, counts: Some(counts), is_counted: AtomicBool::new(false) })
    }
}

impl Counts {
    pub fn num_rows(&self) -> usize {
        self.num_rows[0] as usize
    }

    fn new(config: &Config, plan: &Plan, rank: Rank) -> Self {
        let local = plan.placement.num_local(rank);
        let if_expert = |n: usize| if config.layout.is_by_expert() { n } else { 0 };
        Counts {
            num_rows: [0],
            num_dropped: 0,
            num_rows_per_expert: vec![0; local],
            segment_start: vec![0; if_expert(local + 1)],
            arrival_start: vec![0; plan.world + 1],
            row_base: vec![0; if_expert(plan.world * local)],
        }
    }
}

/// A bank that is taken until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pub shared: Arc<Shared>,
    pub bank: usize,
    /// The dispatch or replay that took it.
    pub epoch: u64,
    counts: Option<Box<Counts>>,
    /// On a GPU, `ByToken`: the rows of each expert have been counted.
    is_counted: AtomicBool,
}

impl Lease {
    /// Offset of a region of this bank in the memory of every rank.
    pub fn at(&self, region: usize) -> usize {
        self.shared.bank_offset(self.bank) + region
    }

    pub fn counts(&self) -> &Counts {
        self.counts.as_ref().expect("a lease holds the counts until it is dropped")
    }

    /// Notes that the rows of each expert are being counted; `true` when that was known.
    pub fn set_counted(&self) -> bool {
        self.is_counted.swap(true, Ordering::Relaxed)
    }

    pub fn counts_mut(&mut self) -> &mut Counts {
        self.counts.as_mut().expect("a lease holds the counts until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.shared.banks[self.bank]) = self.counts.take();
    }
}
