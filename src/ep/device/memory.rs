//! Where everything is in the memory of a rank on a GPU: what its peers use, what is its own, and a routing. All of it is known before anything is
//! allocated.
#![forbid(unsafe_code)]

use std::mem::size_of;

use super::layout::{BankHead, LINE_BYTES, Place, RoutingHead, Signals, State};
use crate::ep::signal::{Machine, Rules};
use crate::ep::{Config, IdSpace, Layout, Mode, Plan, Regions};
use crate::error::{Error, Result};
use crate::id::Rank;

const OP: &str = "ep config";

/// Lanes of a warp on NVIDIA (spec): the groups in which messages are packed.
const LANES: usize = 32;
/// Bytes of a vector.
const VECTOR: usize = 16;
/// Most blocks of `route` (`MAX_BLOCKS` of route.cu).
pub(crate) const MAX_ROUTE_BLOCKS: usize = 16;
/// Most experts of an expert layout (`route` keeps a word for each in shared memory).
const MAX_EXPERTS: usize = 2048;
/// Static shared memory of a block (spec: CUDA).
pub(crate) const STATIC_SMEM_BYTES: usize = 48 * 1024;
/// Most bytes of a row and of its scales (arbitrary: kernels count vectors of a row in 32 bits).
const MAX_ROW_BYTES: usize = 1 << 30;

/// Bytes that an object needs on a GPU, by [`Config::device_plan`](crate::ep::Config::device_plan).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DevicePlan {
    /// Memory of a rank that all ranks map: banks, staging, signal words.
    pub symmetric_bytes: usize,
    /// Memory of a rank alone.
    pub private_bytes: usize,
    /// One [`Routing`](crate::ops::dispatch::Routing).
    pub routing_bytes: usize,
}

/// Offsets in the memories of an object on a GPU. Equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceLayout {
    /// In the memory that peers use: the regions of the plan, then staging and signals of GPUs.
    pub regions: Regions,
    /// Bytes of a message in staging, 0 without.
    pub message_bytes: usize,
    /// Rows of one sender that travel as messages; 0: dispatch takes the path of two kernels.
    pub staged_rows: usize,
    pub signals: Signals,
    pub private: Private,
    pub routing: RoutingLayout,
}

/// Offsets in a rank's own memory. All of it is zeroed at setup, then the tables of a map are filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Private {
    /// [`State`].
    pub state: usize,
    /// u64 `[16, num_words]`.
    pub block_words: usize,
    pub banks: [Bank; 2],
    /// u32 `[num_experts]`, `[num_experts]` and `[world + 1]`; only with an expert map, see [`map_tables`].
    pub owners: usize,
    pub experts: usize,
    pub first_expert: usize,
    pub num_bytes: usize,
}

/// Offsets of what describes an arrival, in a rank's own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Bank {
    /// [`BankHead`].
    pub head: usize,
    /// [`Place`] `[world, local]`; expert layouts.
    pub arriving: usize,
    /// u32 `[local]`: rows kept of each local expert; `ByToken`: what `index_rows` is asked for.
    pub expert_rows: usize,
    /// u32 `[local + 1]`; likewise.
    pub segment_start: usize,
}

/// Offsets in the memory of a routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoutingLayout {
    /// [`RoutingHead`].
    pub head: usize,
    /// u32 `[world, num_words]`.
    pub counts: usize,
    /// u32 `[max_tokens, min(k, world)]`.
    pub sent: usize,
    /// `[max_tokens, route_bytes]`.
    pub records: usize,
    /// u32 `[max_tokens, k]`; from here on expert layouts.
    pub rows: usize,
    /// [`Place`] `[num_experts]`.
    pub places: usize,
    /// u32 `[max_arrivals]`.
    pub primary: usize,
    /// u32 `[max_arrivals, k]`, as the next.
    pub slots: usize,
    pub experts: usize,
    /// f32 `[max_arrivals, k]`.
    pub weights: usize,
    pub num_bytes: usize,
}

/// Adds up arrays, each from a line of its own; every step is checked.
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, counts: &[usize], bytes: usize) -> Result<usize> {
        let start = self.0;
        let size = counts.iter().try_fold(bytes, |size, count| size.checked_mul(*count));
        let end = size.and_then(|size| start.checked_add(size)).and_then(|end| end.checked_next_multiple_of(LINE_BYTES));
        let too_large = || Error::invalid(OP, "sizes", "a product beyond usize", "sizes whose buffers can be addressed");
        self.0 = end.filter(|&end| end <= isize::MAX as usize).ok_or_else(too_large)?;
        Ok(start)
    }
}

impl DeviceLayout {
    /// Of the configuration whose plan this is.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a product of sizes is too large; [`Error::Unsupported`] for what only the kernels cannot do.
    pub fn new(c: &Config, p: &Plan) -> Result<Self> {
        check_limits(c, p)?;
        let staged_rows = if can_stage(c) { p.staged_rows } else { 0 };
        let groups = |bytes: usize| (bytes / VECTOR).div_ceil(LANES);
        let message_bytes = if staged_rows > 0 { (groups(p.row_bytes) + groups(p.record_bytes)) * LANES * 2 * VECTOR } else { 0 };
        let signals = Signals::new(p.world, p.num_count_words);
        let banks_end = p.regions.bank_bytes * c.in_flight; // checked by the plan
        let mut at = Cursor(banks_end.next_multiple_of(LINE_BYTES));
        let staging = at.take(&[Machine::staging_copies(c.in_flight), p.world, staged_rows], message_bytes)?;
        let signals_at = at.take(&[1], signals.num_bytes)?;
        let regions = Regions { staging, signals: signals_at, total_bytes: at.0, ..p.regions };
        let (private, routing) = (Private::new(c, p)?, RoutingLayout::new(c, p)?);
        Ok(DeviceLayout { regions, message_bytes, staged_rows, signals, private, routing })
    }

    /// What the caller is told.
    pub fn plan(&self) -> DevicePlan {
        DevicePlan {
            symmetric_bytes: self.regions.total_bytes,
            private_bytes: self.private.num_bytes,
            routing_bytes: self.routing.num_bytes,
        }
    }
}

impl Private {
    fn new(c: &Config, p: &Plan) -> Result<Self> {
        let by_expert = usize::from(c.layout.is_by_expert());
        let mut at = Cursor(0);
        let state = at.take(&[1], size_of::<State>())?;
        let block_words = at.take(&[MAX_ROUTE_BLOCKS, p.num_count_words], 8)?;
        let mut banks = [Bank::default(); 2];
        for bank in &mut banks[..c.in_flight] {
            *bank = Bank {
                head: at.take(&[1], size_of::<BankHead>())?,
                arriving: at.take(&[p.world, p.max_local, by_expert], size_of::<Place>())?,
                expert_rows: at.take(&[p.max_local], 4)?,
                segment_start: at.take(&[p.max_local + 1], 4)?,
            };
        }
        let has_map = usize::from(c.expert_map.is_some());
        let owners = at.take(&[c.num_experts, has_map], 4)?;
        let experts = at.take(&[c.num_experts, has_map], 4)?;
        let first_expert = at.take(&[p.world + 1, has_map], 4)?;
        Ok(Private { state, block_words, banks, owners, experts, first_expert, num_bytes: at.0 })
    }
}

impl RoutingLayout {
    fn new(c: &Config, p: &Plan) -> Result<Self> {
        let by_expert = usize::from(c.layout.is_by_expert());
        let mut at = Cursor(0);
        Ok(RoutingLayout {
            head: at.take(&[1], size_of::<RoutingHead>())?,
            counts: at.take(&[p.world, p.num_count_words], 4)?,
            sent: at.take(&[c.max_tokens, c.k.min(p.world)], 4)?,
            records: at.take(&[c.max_tokens, route_bytes(c.k)], 1)?,
            rows: at.take(&[c.max_tokens, c.k, by_expert], 4)?,
            places: at.take(&[c.num_experts, by_expert], size_of::<Place>())?,
            primary: at.take(&[p.max_arrivals, by_expert], 4)?,
            slots: at.take(&[p.max_arrivals, c.k, by_expert], 4)?,
            experts: at.take(&[p.max_arrivals, c.k, by_expert], 4)?,
            weights: at.take(&[p.max_arrivals, c.k, by_expert], 4)?,
            num_bytes: at.0,
        })
    }
}

/// Bytes of a token's part of a record: source, ids, weights (`ROUTE_BYTES` of routing.cuh).
pub(crate) fn route_bytes(k: usize) -> usize {
    (8 + 8 * k).next_multiple_of(VECTOR)
}

/// `owners`, `experts` and `first_expert` of a rank's own memory, for a configuration with an expert map.
pub(crate) fn map_tables(p: &Plan) -> [Vec<u32>; 3] {
    let owners = p.placement.owners().iter().map(|rank| rank.0).collect();
    let (mut experts, mut first) = (Vec::new(), vec![0]);
    for rank in 0..p.world {
        experts.extend(p.placement.experts_of(Rank(rank as u32)).iter().map(|expert| expert.0));
        first.push(experts.len() as u32);
    }
    [owners, experts, first]
}

/// Whether rows may travel as messages: as they are, with records that are the same for every destination.
fn can_stage(c: &Config) -> bool {
    let is_plain = c.quantize.is_none() && c.scale_bytes == 0 && c.id_space == IdSpace::Global;
    c.mode == Mode::LowLatency && c.layout == Layout::ByToken && is_plain
}

fn check_limits(c: &Config, p: &Plan) -> Result<()> {
    let unsupported = |what: String, why: String| Err(Error::Unsupported { op: "ep setup", what, why });
    let largest = p.row_bytes.max(p.transit_bytes).max(p.expert_row_bytes).max(p.wire_row_bytes);
    if largest > MAX_ROW_BYTES {
        return unsupported(format!("a row of {largest} bytes on a GPU"), format!("rows have at most {MAX_ROW_BYTES}"));
    }
    if c.layout.is_by_expert() && c.num_experts > MAX_EXPERTS {
        let what = format!("an expert layout of {} experts on a GPU", c.num_experts);
        return unsupported(what, format!("its routing has room for {MAX_EXPERTS}; ByToken takes any number"));
    }
    let smem_bytes = route_smem_bytes(c.layout.is_by_expert(), c.num_experts, p.world);
    if smem_bytes > STATIC_SMEM_BYTES {
        let what = format!("an expert layout of {} experts on {} ranks on a GPU", c.num_experts, p.world);
        return unsupported(what, format!("its routing needs {smem_bytes} bytes of shared memory and has {STATIC_SMEM_BYTES}"));
    }
    Ok(())
}

/// Shared memory of a block of `route` with most threads (`Shared` of route.cu), at most.
fn route_smem_bytes(by_expert: bool, num_experts: usize, world: usize) -> usize {
    const MOST_WARPS: usize = 16; // of 32 lanes, in a block of 512 threads
    const BIT_BYTES: usize = 16384; // as in routing.cuh
    let experts = if by_expert { BIT_BYTES + 3 * 4 * num_experts } else { 16 + 3 * 4 };
    let decision = 4 * (4 * world + 1 + 2);
    4 * world * (MOST_WARPS + MAX_ROUTE_BLOCKS + world) + decision + experts + 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn layout(c: &Config, world: usize) -> (Plan, DeviceLayout) {
        let plan = c.plan(world).unwrap();
        let layout = DeviceLayout::new(c, &plan).unwrap();
        (plan, layout)
    }

    fn base() -> Config {
        Config::new(7168, DType::BF16, 256, 8, 128)
    }

    #[test]
    fn by_token() {
        let (plan, layout) = layout(&base(), 8);
        assert_eq!((layout.staged_rows, layout.message_bytes), (0, 0));
        // Regions of a bank are the plan's; behind them only the words, which need no staging.
        assert_eq!(layout.regions.x, 0);
        assert_eq!(layout.regions.records, 1024 * 14336);
        assert_eq!(layout.regions.bank_bytes, plan.regions.bank_bytes);
        assert_eq!(layout.regions.signals, plan.regions.bank_bytes.next_multiple_of(128));
        // 128 + 8 * 64 + 16 * 64 + 64 + 128 bytes of words.
        assert_eq!(layout.regions.total_bytes, layout.regions.signals + 1920);
        assert_eq!(layout.private.block_words, 128);
        assert_eq!(layout.private.banks[0].head, 128 + 16 * 8 * 8);
        assert_eq!(layout.private.banks[1], Bank::default());
        // Head 272, counts 256, sent 4096, records 80 * 128.
        assert_eq!(layout.routing.num_bytes, 384 + 256 + 4096 + 10240);
        assert_eq!(layout.plan().routing_bytes, layout.routing.num_bytes);
    }

    #[test]
    fn messages_have_their_own_size_and_place() {
        let c = Config { mode: Mode::LowLatency, expected_tokens: 1, in_flight: 2, ..base() };
        let (_, layout) = layout(&c, 2);
        // 28 groups of 32 vectors of the row and one of the record, twice 16 bytes each.
        assert_eq!((layout.staged_rows, layout.message_bytes), (32, 29 * 32 * 32));
        assert_eq!(layout.regions.signals, layout.regions.staging + 3 * 2 * 32 * 29 * 1024);
        assert!(layout.regions.staging >= 2 * layout.regions.bank_bytes);
        for other in [
            Config { scale_bytes: 16, ..c.clone() },
            Config { quantize: Some(crate::ep::Quantize::F32), ..c.clone() },
            Config { id_space: IdSpace::Local, ..c.clone() },
            Config { layout: Layout::ByExpert { segment_align: 1 }, ..c.clone() },
            Config { expected_tokens: 128, ..c },
        ] {
            assert_eq!(super::tests::layout(&other, 2).1.staged_rows, 0, "{other:?}");
        }
    }

    #[test]
    fn expert_layouts() {
        let c = Config { layout: Layout::ByExpert { segment_align: 16 }, in_flight: 2, ..base() };
        let (plan, layout) = layout(&c, 4);
        assert_eq!(plan.num_count_words, 260);
        let [first, second] = layout.private.banks;
        assert_eq!(first.expert_rows - first.arriving, 4 * 64 * 8);
        assert_eq!(first.segment_start - first.expert_rows, 256);
        assert_eq!(second.head - first.head, 384 + 2048 + 256 + 384);
        assert_eq!(layout.private.num_bytes, layout.private.owners);
        let r = layout.routing;
        assert_eq!((r.places - r.rows, r.primary - r.places, r.slots - r.primary), (128 * 8 * 4, 256 * 8, 512 * 4));
        assert_eq!((r.experts - r.slots, r.num_bytes - r.weights), (512 * 8 * 4, 512 * 8 * 4));
    }

    #[test]
    fn tables_of_a_map() {
        let c = Config { expert_map: Some([1, 0, 1, 1].map(Rank).to_vec()), k: 2, num_experts: 4, ..base() };
        let (plan, layout) = layout(&c, 3);
        assert_eq!(map_tables(&plan), [vec![1, 0, 1, 1], vec![1, 0, 2, 3], vec![0, 1, 4, 4]]);
        assert_eq!(layout.private.num_bytes - layout.private.owners, 3 * 128);
    }

    #[test]
    fn what_kernels_cannot_do_is_said_at_setup() {
        let fixed = |num_experts: usize| Config { num_experts, layout: Layout::ByExpertFixed { rows_per_expert: 4 }, ..base() };
        let error = |c: &Config, world| DeviceLayout::new(c, &c.plan(world).unwrap()).map(|_| ());
        assert_eq!(error(&fixed(2048), 8), Ok(()));
        assert!(matches!(error(&fixed(2049), 8), Err(Error::Unsupported { .. })));
        assert!(matches!(error(&fixed(2048), 64), Err(Error::Unsupported { .. })));
        assert_eq!(error(&Config { num_experts: 2049, ..base() }, 8), Ok(()));
        let huge = Config { hidden: 1 << 30, max_tokens: 1, ..base() };
        assert!(matches!(error(&huge, 1), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn sizes_beyond_memory_are_errors() {
        let c = Config { max_tokens: crate::ep::MAX_TOKENS, k: 32, max_rows: Some(1), ..base() };
        assert!(DeviceLayout::new(&c, &c.plan(64).unwrap()).is_ok());
        let mut at = Cursor(0);
        assert!(at.take(&[1 << 63, 2], 1).is_err(), "the product is 0 in 64 bits");
        assert!(at.take(&[usize::MAX / 2, 3], 1).is_err());
        assert!(at.take(&[isize::MAX as usize], 1).is_err());
        assert_eq!(at.0, 0);
    }
}
