//! Where every token of a call went, kept for combine and replay.
use std::sync::Arc;

use crate::ep::device::tuning::Tokens;
use crate::ep::object::Shared;
use crate::ep::signal::{COUNT_MASK, CountWord, Kind};
use crate::ep::{Config, ExpertParallel, Layout, Overflow, Plan};
use crate::error::{Demand, Error, Limit, Result};
use crate::gpu::Shareable;
use crate::id::{Expert, Rank};
use crate::tensor::{DType, DeviceAddress, Layout as Strides, TensorView};

/// No slot: the route is masked or dropped, or belongs to another rank.
pub(crate) const NONE: u32 = u32::MAX;

/// Where every token of a call went and where every received row came from. Its memory is allocated once, by [`Routing::new`]; it can be kept
/// (60 layers, until backward) and used again.
#[derive(Debug)]
pub struct Routing {
    pub(crate) config: Config,
    pub(crate) rank: Rank,
    /// Epoch of the dispatch that filled it; 0 when it holds no call.
    pub(crate) filled_by: u64,
    pub(crate) num_tokens: usize,
    num_dropped: usize,
    pub(crate) sent: SentRows,
    pub(crate) received: ReceivedRows,
    /// Count words of every rank `[sender, word]`: tokens to each rank, then (expert layouts) rows of each expert.
    pub(crate) counts: Vec<u32>,
    /// Of a GPU rank: all of it, in the memory of the GPU.
    pub(super) device: Option<DeviceRouting>,
}

/// A routing in the memory of a GPU.
#[derive(Debug)]
pub(super) struct DeviceRouting {
    /// `None`: the caller's.
    memory: Option<Shareable>,
    pub address: DeviceAddress,
    /// What the host knows of the number of tokens.
    pub tokens: Tokens,
    /// The object's, which must have done what it does with the memory before that goes.
    shared: Arc<Shared>,
}

impl DeviceRouting {
    /// A copy of `len` bytes from `at` on, when the object's stream has come to it.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let Some(end) = self.shared.cuda() else { return Ok(Vec::new()) };
        let address = DeviceAddress { address: self.address.address + at as u64, ..self.address };
        let layout = Strides::contiguous("routing", DType::Bytes, &[len])?;
        // SAFETY: inside the routing's memory, which lives as long as self; the stream is waited for.
        end.stream().read(&unsafe { TensorView::from_device(address, layout) }?)
    }
}

impl Drop for DeviceRouting {
    fn drop(&mut self) {
        if let (Some(_), Some(end)) = (&self.memory, self.shared.cuda()) {
            // On a failure nothing is left to do.
            let _ = end.stream().synchronize();
        }
    }
}

/// The source's side: arrays `[max_tokens, K]` by route, and bases. Positions are stored relative to the sender's base, so that they can be
/// written before the counts of the others are known.
#[derive(Debug, Clone)]
pub(crate) struct SentRows {
    /// Global expert id, -1 where masked.
    pub topk_idx: Vec<i32>,
    pub topk_weights: Vec<f32>,
    /// Position among this rank's tokens for the owner of the route.
    pub arrival: Vec<u32>,
    /// Position among this rank's rows of the expert (expert layouts).
    pub row: Vec<u32>,
    /// Arrivals of lower ranks at each rank `[world]`.
    pub arrival_base: Vec<u32>,
    /// Rows of lower ranks of each expert `[E]`.
    pub row_base: Vec<u32>,
    /// First slot of each expert's segment on its owner `[E]`.
    pub segment: Vec<u32>,
}

/// The receiver's side of the expert layouts, one entry per arrival, ordered by (source rank, token).
#[derive(Debug, Clone, Default)]
pub(crate) struct ReceivedRows {
    pub num_arrivals: usize,
    /// `[max_arrivals]`: the slot whose payload travelled, and into which a partial sum goes.
    pub primary: Vec<u32>,
    /// `[max_arrivals, K]`: slots in ascending expert id, then `NONE`.
    pub slots: Vec<u32>,
    /// `[max_arrivals, K]`: global ids of those rows' experts.
    pub experts: Vec<u32>,
    /// `[max_arrivals, K]`: weights of those rows.
    pub weights: Vec<f32>,
}

impl Routing {
    /// Memory for any call of an object with this configuration. On a GPU it is device memory; dropping the routing waits for the object's stream. Ranks that share
    /// a GPU make theirs, and other memory, before any of them calls: the driver may give it only when kernels end, which may wait for the rank that asks.
    ///
    /// # Errors
    /// `Memory` when a GPU has no room; those of its driver.
    pub fn new(ep: &ExpertParallel) -> Result<Self> {
        let Some(end) = ep.shared.cuda() else { return Ok(Self::of(ep, None)) };
        let (device, len) = (end.stream().device().clone(), Self::bytes(ep));
        let memory = Shareable::new(&device, len)?;
        let address = memory.address();
        Ok(Self::of(ep, Some(DeviceRouting { memory: Some(memory), address, tokens: Tokens::default(), shared: ep.shared.clone() })))
    }

    /// As [`new`](Self::new), in memory of the caller on the object's GPU: [`bytes`](Self::bytes) of it, aligned to 256. What is there does not matter.
    ///
    /// # Errors
    /// `Invalid` for memory of another device, `Unsupported` for a CPU rank.
    ///
    /// # Safety
    /// The memory is the routing's alone, and stays so until the routing is dropped and the object's stream has done what was queued.
    pub unsafe fn in_memory(ep: &ExpertParallel, address: DeviceAddress) -> Result<Self> {
        const OP: &str = "routing";
        const ALIGN: u64 = 256; // derived: as every allocation of the driver, and above every line of its arrays
        let Some(end) = ep.shared.cuda() else {
            return Err(Error::Unsupported { op: OP, what: "device memory".into(), why: "the ranks of this world work on CPUs".into() });
        };
        if !address.address.is_multiple_of(ALIGN) {
            return Err(Error::invalid(OP, "address", format!("{:#x}", address.address), format!("a multiple of {ALIGN}")));
        }
        end.stream().device().adopt(OP, "address", address.address)?;
        Ok(Self::of(ep, Some(DeviceRouting { memory: None, address, tokens: Tokens::default(), shared: ep.shared.clone() })))
    }

    fn of(ep: &ExpertParallel, device: Option<DeviceRouting>) -> Self {
        let (c, p) = (ep.config(), ep.plan());
        let routes = if device.is_none() { c.max_tokens * c.k } else { 0 };
        let by_expert = c.layout.is_by_expert() && device.is_none();
        let if_expert = |n: usize| if by_expert { n } else { 0 };
        let if_host = |n: usize| if device.is_none() { n } else { 0 };
        Routing {
            config: c.clone(),
            rank: ep.rank(),
            filled_by: 0,
            num_tokens: 0,
            num_dropped: 0,
            sent: SentRows {
                topk_idx: vec![-1; routes],
                topk_weights: vec![0.0; routes],
                arrival: vec![NONE; routes],
                row: vec![NONE; if_expert(routes)],
                arrival_base: vec![0; if_host(p.world)],
                row_base: vec![0; if_expert(c.num_experts)],
                segment: vec![0; if_expert(c.num_experts)],
            },
            received: ReceivedRows {
                num_arrivals: 0,
                primary: vec![NONE; if_expert(p.max_arrivals)],
                slots: vec![NONE; if_expert(p.max_arrivals * c.k)],
                experts: vec![NONE; if_expert(p.max_arrivals * c.k)],
                weights: vec![0.0; if_expert(p.max_arrivals * c.k)],
            },
            counts: vec![0; if_host(p.world * p.num_count_words)],
            device,
        }
    }

    /// Bytes that [`Routing::new`] allocates.
    pub fn bytes(ep: &ExpertParallel) -> usize {
        if let Some(end) = ep.shared.cuda() {
            return end.ctx().layout.routing.num_bytes;
        }
        let (c, p) = (ep.config(), ep.plan());
        let by_expert = usize::from(c.layout.is_by_expert());
        let routes = c.max_tokens * c.k * (12 + 4 * by_expert);
        let bases = 4 * p.world + 8 * c.num_experts * by_expert;
        let received = p.max_arrivals * (4 + 12 * c.k) * by_expert;
        routes + bases + received + 4 * p.world * p.num_count_words
    }

    /// Tokens of the call on this rank; the rows of `x`, when their number was in the memory of a GPU.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Rows of this rank's tokens that receivers dropped ([`Overflow::Drop`]). On a GPU it waits for the object's stream and reads the number.
    ///
    /// # Errors
    /// Those of [`ExpertParallel::synchronize`].
    pub fn num_dropped(&self, ep: &ExpertParallel) -> Result<usize> {
        match ep.shared.cuda() {
            None => Ok(self.num_dropped),
            Some(_) => super::cuda::num_dropped(ep, self),
        }
    }

    /// Routes `num_tokens` tokens: fills the arrays by route and this rank's count words.
    ///
    /// `id` and `weight` read a route; a route is masked when its id is out of range or appeared before in its row.
    pub(crate) fn route(&mut self, plan: &Plan, num_tokens: usize, id: impl Fn(usize, usize) -> i64, weight: impl Fn(usize, usize) -> f32) {
        let (k, num_experts, me) = (self.config.k, self.config.num_experts, self.rank.index());
        let owners = plan.placement.owners();
        let (to_rank, of_expert) = self.counts[me * plan.num_count_words..][..plan.num_count_words].split_at_mut(plan.world);
        to_rank.fill(0);
        of_expert.fill(0);
        let s = &mut self.sent;
        let mut arrival_at = [0u32; crate::ep::MAX_RANKS];
        for t in 0..num_tokens {
            let ids = &mut s.topk_idx[t * k..][..k];
            let mut destinations = 0u64;
            for route in 0..k {
                let at = t * k + route;
                let e = id(t, route);
                let is_masked = e < 0 || e >= num_experts as i64 || ids[..route].contains(&(e as i32));
                if is_masked {
                    ids[route] = -1;
                    s.topk_weights[at] = 0.0;
                    s.arrival[at] = NONE;
                    continue;
                }
                let e = e as usize;
                let rank = owners[e].index();
                ids[route] = e as i32;
                s.topk_weights[at] = weight(t, route);
                if destinations >> rank & 1 == 0 {
                    destinations |= 1 << rank;
                    arrival_at[rank] = to_rank[rank];
                    to_rank[rank] += 1;
                }
                s.arrival[at] = arrival_at[rank];
                if !of_expert.is_empty() {
                    s.row[at] = of_expert[e];
                    of_expert[e] += 1;
                }
            }
        }
        self.num_tokens = num_tokens;
    }

    /// This rank's count words for `epoch`. With more tokens than `max_tokens` the words are invalid and carry that number, 20 bits each.
    pub(crate) fn words(&self, plan: &Plan, epoch: u64, bank: usize, kind: Kind, oversize: Option<usize>, out: &mut [CountWord]) {
        let counts = &self.counts[self.rank.index() * plan.num_count_words..][..plan.num_count_words];
        for (i, (word, &count)) in out.iter_mut().zip(counts).enumerate() {
            let count = match oversize {
                None => u64::from(count),
                Some(n) => (n as u64).checked_shr(20 * i as u32).unwrap_or(0) & COUNT_MASK,
            };
            *word = CountWord { epoch, count, bank: bank as u64, invalid: oversize.is_some(), kind: kind as u64 };
        }
    }

    /// Tokens that `sender` sends to `rank`.
    pub(crate) fn arrivals(&self, plan: &Plan, sender: usize, rank: usize) -> u32 {
        self.counts[sender * plan.num_count_words + rank]
    }

    /// Rows that `sender` sends for `expert` (expert layouts).
    pub(crate) fn rows(&self, plan: &Plan, sender: usize, expert: usize) -> u32 {
        self.counts[sender * plan.num_count_words + plan.world + expert]
    }

    /// Rows that all ranks send for `expert` (expert layouts).
    pub(crate) fn all_rows(&self, plan: &Plan, expert: Expert) -> u32 {
        (0..plan.world).map(|s| self.rows(plan, s, expert.index())).sum()
    }

    /// Rows of a segment of `demand` rows that are kept, and the rows that it takes.
    pub(crate) fn segment_rows(&self, plan: &Plan, demand: u32) -> (u32, u32) {
        let kept = match (self.config.layout, self.config.overflow) {
            (Layout::ByExpert { .. }, Overflow::Error) => demand,
            _ => demand.min(u32::try_from(plan.max_rows_per_expert).unwrap_or(u32::MAX)),
        };
        match self.config.layout {
            Layout::ByExpert { segment_align } => (kept, (kept as usize).next_multiple_of(segment_align).min(u32::MAX as usize) as u32),
            Layout::ByExpertFixed { rows_per_expert } => (kept, rows_per_expert as u32),
            Layout::ByToken => (kept, kept),
        }
    }

    /// Decides on capacity from the count matrix, as every rank does, and then fixes where this rank's rows go.
    pub(crate) fn place(&mut self, plan: &Plan) -> Result<()> {
        self.check_capacity(plan)?;
        let me = self.rank.index();
        let mut num_dropped = 0usize;
        for rank in 0..plan.world {
            let base: u32 = (0..me).map(|s| self.arrivals(plan, s, rank)).sum();
            self.sent.arrival_base[rank] = base;
            if self.config.layout == Layout::ByToken {
                let mine = self.arrivals(plan, me, rank) as usize;
                num_dropped += mine - mine.min(plan.max_rows.saturating_sub(base as usize));
            }
        }
        if self.config.layout.is_by_expert() {
            for rank in 0..plan.world {
                let mut start = 0u32;
                for &expert in plan.placement.experts_of(Rank(rank as u32)) {
                    let e = expert.index();
                    let base: u32 = (0..me).map(|s| self.rows(plan, s, e)).sum();
                    let (kept, taken) = self.segment_rows(plan, self.all_rows(plan, expert));
                    self.sent.row_base[e] = base;
                    self.sent.segment[e] = start;
                    start += taken;
                    let mine = self.rows(plan, me, e);
                    num_dropped += (mine - mine.min(kept.saturating_sub(base))) as usize;
                }
            }
        }
        self.num_dropped = num_dropped;
        Ok(())
    }

    fn check_capacity(&self, plan: &Plan) -> Result<()> {
        let demand_of = |rank: usize| -> (Limit, u64, u64) {
            let experts = plan.placement.experts_of(Rank(rank as u32));
            let all = |e: &Expert| self.all_rows(plan, *e);
            match self.config.layout {
                Layout::ByToken => {
                    let rows = (0..plan.world).map(|s| u64::from(self.arrivals(plan, s, rank))).sum();
                    (Limit::Rows, rows, plan.max_rows as u64)
                }
                Layout::ByExpert { .. } => {
                    let rows = experts.iter().map(|e| u64::from(self.segment_rows(plan, all(e)).1)).sum();
                    (Limit::Rows, rows, plan.max_rows as u64)
                }
                Layout::ByExpertFixed { rows_per_expert } => {
                    let fullest = experts.iter().map(all).max().unwrap_or(0);
                    (Limit::RowsPerExpert, u64::from(fullest), rows_per_expert as u64)
                }
            }
        };
        let may_drop = self.config.overflow == Overflow::Drop && !matches!(self.config.layout, Layout::ByExpert { .. });
        if may_drop || (0..plan.world).map(demand_of).all(|(_, demand, capacity)| demand <= capacity) {
            return Ok(());
        }
        let demand = |rank: usize| {
            let (limit, demand, capacity) = demand_of(rank);
            Demand { rank: Rank(rank as u32), limit, demand, capacity }
        };
        Err(Error::Capacity { op: "dispatch", demands: (0..plan.world).map(demand).collect() })
    }

    /// The slot of a route's row at its owner, as seen from the source; `NONE` when masked or dropped.
    pub(crate) fn slot(&self, plan: &Plan, token: usize, route: usize) -> u32 {
        let at = token * self.config.k + route;
        let e = self.sent.topk_idx[at];
        if e < 0 {
            return NONE;
        }
        let e = e as usize;
        if self.config.layout == Layout::ByToken {
            let slot = self.sent.arrival_base[plan.placement.owners()[e].index()] + self.sent.arrival[at];
            return if (slot as usize) < plan.max_rows { slot } else { NONE };
        }
        let position = self.sent.row_base[e] + self.sent.row[at];
        let is_kept = (position as usize) < plan.max_rows_per_expert || !self.can_drop();
        if is_kept { self.sent.segment[e] + position } else { NONE }
    }

    fn can_drop(&self) -> bool {
        self.config.overflow == Overflow::Drop
    }
}
