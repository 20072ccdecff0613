//! What all ranks must agree on: shapes, layout, capacity, wire. Compared at setup; a difference is [`Error::Mismatch`].
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::error::{Error, Result};
use crate::id::Rank;
use crate::routing::Placement;
use crate::tensor::DType;

/// Elements that share one scale in fused quantisation and on an fp8 wire (spec: DeepSeek-V3's 1x128 activation blocks).
pub const SCALE_BLOCK: usize = 128;

/// Bytes to which rows, records and regions are aligned (derived: the 16-byte vectors of every GPU).
pub const ROW_ALIGN: usize = 16;

/// Most tokens of one rank in one call (derived: a count is 20 bits of a signal word, and the worst case must fit).
pub const MAX_TOKENS: usize = 524_288;

/// Most routes of one token (derived: duplicates of a row are found in a table of this size).
pub const MAX_K: usize = 32;

/// Most ranks of one world (derived: a token's destinations are one 64-bit mask).
pub const MAX_RANKS: usize = 64;

/// How received rows are arranged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum Layout {
    /// One row per (token, rank), ordered by (source rank, token).
    ByToken,
    /// One row per (token, local expert), grouped by expert, (source rank, token) inside; each segment is padded to a multiple of
    /// `segment_align` rows with zero rows (source -1, weight 0). For contiguous grouped GEMM.
    ByExpert {
        /// Rows to a multiple of which a segment is padded; at least 1.
        segment_align: usize,
    },
    /// `[L, rows_per_expert, H]` plus counts, (source rank, token) inside each expert. For masked grouped GEMM.
    ByExpertFixed {
        /// Rows of each expert's segment.
        rows_per_expert: usize,
    },
}

impl Layout {
    /// `true` when a token has a row for each of its local experts.
    pub fn is_by_expert(self) -> bool {
        !matches!(self, Layout::ByToken)
    }
}

/// What happens when more rows arrive than fit. Every rank holds the whole count matrix, so all decide alike before any payload moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum Overflow {
    /// No rank writes payload, every rank returns [`Error::Capacity`], the world stays usable.
    #[default]
    Error,
    /// `ByToken` drops the slots from `max_rows` on; the expert layouts drop what comes after `max_rows_per_expert` (or `rows_per_expert`)
    /// rows in a segment. A dropped row adds nothing in combine. Both sides count what was dropped.
    Drop,
}

/// Fused quantisation of the payload on its way: e4m3 with one scale per [`SCALE_BLOCK`] elements (the last block of a row may be short).
///
/// With `amax` = max |x| of the block over values that are not NaN, and `m = max(amax, 1e-4)`:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum Quantize {
    /// `q = e4m3(x * (448 / m))`; the scale is the f32 `m / 448`.
    F32,
    /// `e = ceil(log2(m / 448))`, `q = e4m3(x * 2^-e)`; the scale is the E8M0 byte `e + 127`.
    PowerOfTwo,
}

/// Where the scales of received rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum ScaleLayout {
    /// `[rows, S]` bytes, inside each row's metadata record.
    #[default]
    RowMajor,
    /// `[ceil(S / 4), aligned rows]` words of 4 bytes: word `g` of row `r` at `g * aligned_rows + r`, `aligned_rows` a multiple of 4 (16 bytes).
    /// `ByExpertFixed` has one such matrix per local expert. With S scale bytes not a multiple of 4 this is an error.
    ColumnMajor,
    /// The same, for E8M0 bytes: four of a row in one word, the first in its lowest byte, the last word filled up with zeros (spec: DeepGEMM's
    /// packed UE8M0).
    PackedE8M0,
}

/// How ids appear in an arrival's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum IdSpace {
    /// Global expert ids; masked routes are -1.
    #[default]
    Global,
    /// Local ids of the receiving rank; -1 for masked routes and other ranks' experts.
    Local,
}

/// Which protocol carries the payload. The bytes are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum Mode {
    /// Counts first, then rows straight into place.
    #[default]
    Throughput,
    /// The first rows travel in one message with the counts, into internal staging, when `expected_tokens` says that they are few.
    LowLatency,
}

/// In which form a row travels back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum Wire {
    /// The bits of `y` (or of the rank's partial sum, rounded once to the type of `y`).
    #[default]
    AsIs,
    /// `e4m3(value)`, no scale.
    Fp8Direct,
    /// e4m3 with one f32 scale per [`SCALE_BLOCK`], always scaled, by the formula of [`Quantize::F32`]; read as `f32(q) * scale`.
    Fp8Block,
}

/// Where the rows of an expert layout are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
#[non_exhaustive]
pub enum Reduce {
    /// Each rank sums its rows of a token in ascending expert id in f32 and rounds once to the wire.
    #[default]
    AtRank,
    /// As `AtRank`, but the partial sum travels as f32, unrounded.
    AtRankF32,
    /// Every expert row travels; one running f32 sum in ascending global expert id. The result does not depend on the world size.
    AtSource,
}

/// The configuration of an [`ExpertParallel`](super::ExpertParallel). Equal on all ranks.
///
/// ```
/// use moe_kernels::ep::{Config, Layout};
/// use moe_kernels::DType;
/// let config = Config { layout: Layout::ByExpert { segment_align: 128 }, ..Config::new(7168, DType::BF16, 256, 8, 4096) };
/// assert_eq!(config.plan(4)?.row_bytes, 14336);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Config {
    /// Elements of a row.
    pub hidden: usize,
    /// Element type of `x`: f32, f16, bf16, an FP8 format, or bytes.
    pub dtype: DType,
    /// Global experts.
    pub num_experts: usize,
    /// Routes of a token, 1 to [`MAX_K`].
    pub k: usize,
    /// Most tokens of a rank in one call, 1 to [`MAX_TOKENS`].
    pub max_tokens: usize,
    /// Owner of each expert; `None` is DESIGN's rule, `floor(e * world / num_experts)`.
    pub expert_map: Option<Vec<Rank>>,
    /// How received rows are arranged.
    pub layout: Layout,
    /// Rows of the receive buffer; `None` is the worst case.
    pub max_rows: Option<usize>,
    /// With [`Layout::ByExpert`] and [`Overflow::Drop`]: rows kept per segment; `None` is the worst case.
    pub max_rows_per_expert: Option<usize>,
    /// What happens when more arrive.
    pub overflow: Overflow,
    /// Opaque scale bytes per token that travel with its row; 0 for none. Not with `quantize`.
    pub scale_bytes: usize,
    /// Fused quantisation of f32, f16 or bf16 rows to e4m3.
    pub quantize: Option<Quantize>,
    /// Where the scales of received rows are.
    pub scale_layout: ScaleLayout,
    /// How expert ids appear in the metadata.
    pub id_space: IdSpace,
    /// Protocol of the payload.
    pub mode: Mode,
    /// Tokens per rank that a call usually has: chooses the low-latency form. Never read from a call's own count.
    pub expected_tokens: usize,
    /// Banks: 1, or 2 to have two arrivals at once.
    pub in_flight: usize,
    /// Element type of `y` and of combine's output: f32, f16 or bf16.
    pub combine_dtype: DType,
    /// In which form rows travel back.
    pub wire: Wire,
    /// Where the rows of an expert layout are summed.
    pub reduce: Reduce,
    /// Expert layouts: combine multiplies each row by its route's weight. Otherwise the expert side has applied the weights.
    pub weighted: bool,
    /// Reserve room for folding per-row weights back to `[T, K]`.
    pub fold_weights: bool,
    /// Bound of every wait. Multiplied by the environment's `MOE_TIMEOUT_SCALE`. Need not be equal on all ranks.
    #[serde(skip)]
    pub timeout: Duration,
}

impl Config {
    /// `ByToken`, worst-case capacity, no scales, throughput mode, one bank, plain sum in the type of x (bf16 if x is no f32, f16 or bf16).
    pub fn new(hidden: usize, dtype: DType, num_experts: usize, k: usize, max_tokens: usize) -> Self {
        Config {
            hidden,
            dtype,
            num_experts,
            k,
            max_tokens,
            expert_map: None,
            layout: Layout::ByToken,
            max_rows: None,
            max_rows_per_expert: None,
            overflow: Overflow::Error,
            scale_bytes: 0,
            quantize: None,
            scale_layout: ScaleLayout::RowMajor,
            id_space: IdSpace::Global,
            mode: Mode::Throughput,
            expected_tokens: max_tokens,
            in_flight: 1,
            combine_dtype: if dtype.is_float() { dtype } else { DType::BF16 },
            wire: Wire::AsIs,
            reduce: Reduce::AtRank,
            weighted: false,
            fold_weights: false,
            timeout: Duration::from_secs(30), // arbitrary: longer than any compile or page-in seen, short enough to debug
        }
    }

    /// Every derived size, exactly, before anything is allocated.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the field that no world of `world` ranks can use.
    pub fn plan(&self, world: usize) -> Result<super::Plan> {
        super::Plan::new(self, world)
    }

    /// As [`plan`](Self::plan), for a world whose ranks own GPUs: what each of them allocates there.
    ///
    /// ```
    /// use moe_kernels::{DType, ep::Config};
    /// let plan = Config::new(7168, DType::BF16, 256, 8, 128).device_plan(8)?;
    /// // 1024 rows of x and of y, 1024 records of 80 bytes, 1920 bytes of words.
    /// assert_eq!(plan.symmetric_bytes, 1024 * (2 * 14336 + 80) + 1920);
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan); [`Error::Unsupported`] for what only the kernels cannot do.
    pub fn device_plan(&self, world: usize) -> Result<super::DevicePlan> {
        Ok(super::device::memory::DeviceLayout::new(self, &self.plan(world)?)?.plan())
    }

    /// Every kernel that an object of this configuration loads on a GPU: to be compiled before there is one, as by
    /// [`jit::compile`](crate::gpu::jit::compile).
    ///
    /// # Errors
    /// As [`device_plan`](Self::device_plan).
    pub fn programs(&self, world: usize, tuning: super::Tuning) -> Result<Vec<crate::gpu::Program>> {
        let plan = self.plan(world)?;
        let layout = super::device::memory::DeviceLayout::new(self, &plan)?;
        let mut all = crate::ops::dispatch::gpu::programs(self, &plan, &layout, tuning);
        all.extend(crate::ops::combine::gpu::programs(self, &plan, tuning));
        Ok(all)
    }

    /// The owners of the experts in a world of `world` ranks.
    pub fn placement(&self, world: usize) -> Result<Placement> {
        match &self.expert_map {
            None => Placement::blocks(self.num_experts, world),
            Some(map) if map.len() == self.num_experts => Placement::from_map(map, world),
            Some(map) => {
                Err(Error::invalid("ep", "expert_map", format!("{} entries", map.len()), format!("{} (num_experts)", self.num_experts)))
            }
        }
    }
}
