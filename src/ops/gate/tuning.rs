//! How the kernel's constants follow from sizes and from the device.
#![forbid(unsafe_code)]

use std::fmt;

use super::gpu::Kind;
use crate::gpu::Device;
use crate::tensor::DType;

/// How rows are spread over lanes, blocks and clusters: constants of kernel.cu by the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mapping {
    pub(super) teams_per_row: u16,
    pub(super) rows_per_block: u16,
    pub(super) elements_per_lane: u16,
    pub(super) cluster: u16,
    pub(super) kept_vectors: u16,
    pub(super) one_pass: bool,
}

impl Mapping {
    pub(super) fn threads(self) -> u32 {
        LANES as u32 * u32::from(self.teams_per_row) * u32::from(self.rows_per_block)
    }
}

/// For the table of resources: `8 teams x 16`, then what is unusual.
impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.teams_per_row, self.rows_per_block) {
            (1, rows) => write!(f, "{rows} rows x {}", self.elements_per_lane)?,
            (teams, _) => write!(f, "{teams} teams x {}", self.elements_per_lane)?,
        }
        if self.cluster > 1 {
            write!(f, " cluster {}", self.cluster)?;
        }
        if self.kept_vectors > 1 {
            write!(f, " kept {}", self.kept_vectors)?;
        }
        if !self.one_pass {
            write!(f, " looped")?;
        }
        Ok(())
    }
}

/// Sizes of the order of the sum (spec): elements e, lanes l, values of w.
const EIGHT: usize = 8;
const LANES: usize = 32;
const NUM_W: usize = 32;

/// What a choice depends on beside the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) num_sms: usize,
    pub(super) has_clusters: bool,
}

impl Limits {
    pub(super) fn of(device: &Device) -> Self {
        Limits { num_sms: device.num_sms() as usize, has_clusters: device.compute_capability() >= (9, 0) }
    }
}

/// What a call is, as far as a choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    /// Types of x, of w (or g), and of s and the result.
    pub(super) types: [DType; 3],
    pub(super) num_tokens: usize,
    pub(super) k: usize,
    pub(super) n: usize,
}

/// The mapping of a call, and the blocks among which the columns of a row are split.
pub(super) fn choose(limits: &Limits, shape: &Shape) -> (Mapping, u32) {
    let mapping = if shape.kind.has_dot() { of_dot(limits, shape) } else { of_rows(limits, shape) };
    if !shape.kind.has_rows() {
        return (mapping, 1);
    }
    // Columns that one pass of the threads of a row takes. For few rows half a pass each: the other threads cost nothing, and another SM loads as well.
    let pass = LANES * EIGHT * mapping.teams_per_row as usize;
    let num_blocks = shape.num_tokens.div_ceil(mapping.rows_per_block as usize).max(1) * mapping.cluster as usize;
    let num_column_blocks = (limits.num_sms / num_blocks).min(shape.n.div_ceil(pass / 2)).clamp(1, MAX_COLUMN_BLOCKS);
    // The kernel counts the columns of a block in 31 bits.
    let num_column_blocks = num_column_blocks.max(shape.n >> 30);
    let num_passes = shape.n.div_ceil(pass * num_column_blocks * mapping.cluster as usize);
    let kept_vectors = num_passes.next_power_of_two().clamp(1, max_kept_vectors(shape.kind)) as u16;
    (Mapping { kept_vectors, ..mapping }, num_column_blocks as u32)
}

/// Numbers of tokens, one at least of each class that [`choose`] tells apart.
pub(super) fn classes_of_tokens(limits: &Limits) -> impl Iterator<Item = usize> + use<> {
    // Every class ends at a multiple of what a device holds divided by a power of two, or above all of them.
    let num_sms = limits.num_sms;
    (1..=num_sms).chain([num_sms + 1, LARGE_PER_SM * num_sms, LARGE_PER_SM * num_sms + 1])
}

/// Blocks among which the columns of a row are split at most: each makes the same gate again (arbitrary; a row of 64 passes is long).
const MAX_COLUMN_BLOCKS: usize = 64;

/// Vectors of s that a thread loads before it knows the gate; with `out` to read as well half as many (measured: more registers than that cost more
/// than the later loads).
fn max_kept_vectors(kind: Kind) -> usize {
    if kind == Kind::GateMulAdd { 2 } else { 4 }
}

fn of_dot(limits: &Limits, shape: &Shape) -> Mapping {
    let &Shape { types: [x, w, _], num_tokens, k, .. } = shape;
    // Elements of one lane, so that a row's lanes hold it at once: at most what the registers of the threads of a block hold.
    let with = |teams: usize, cluster: usize| {
        let (threads, lanes) = (teams * LANES, teams * LANES * cluster);
        let registers = (NVIDIA_REGISTERS / threads).min(255); // spec (CUDA): 255 for one thread
        let elements = k.div_ceil(lanes).next_power_of_two().clamp(EIGHT, elements_that_fit(registers, x.size() + w.size()));
        Mapping {
            teams_per_row: teams as u16,
            rows_per_block: 1,
            elements_per_lane: elements as u16,
            cluster: cluster as u16,
            kept_vectors: 1,
            one_pass: k <= lanes * elements,
        }
    };
    // Values of w that the row has, as the binary tree over them sees it.
    let num_w = k.div_ceil(LANES * EIGHT).next_power_of_two().clamp(1, NUM_W);
    let is_large = num_tokens > LARGE_PER_SM * limits.num_sms;
    if num_w == 1 {
        return Mapping { rows_per_block: if is_large { ROWS } else { 1 }, ..with(1, 1) };
    }
    if k > CLUSTER_ABOVE && limits.has_clusters && num_tokens * CLUSTER <= limits.num_sms {
        return with(NUM_W / CLUSTER, CLUSTER);
    }
    // Two vectors a lane, so half as many teams as values of w, but for short rows, and for one row's gate alone.
    let is_alone = !shape.kind.has_rows() && !is_large && num_w == 8;
    let mapping = with(if num_w >= 8 && !is_alone { num_w / 2 } else { num_w }, 1);
    if mapping.one_pass { mapping } else { with(NUM_W, 1) }
}

/// 32-bit registers of an SM (spec: CUDA, every compute capability from 3.5 on).
const NVIDIA_REGISTERS: usize = 65536;
/// Rows for each SM above which throughput counts and not the time of one row.
const LARGE_PER_SM: usize = 2;
/// Blocks of a cluster.
const CLUSTER: usize = 8;
/// K above which a cluster serves a row.
const CLUSTER_ABOVE: usize = 16384;
/// Rows of a block where a row has one team (arbitrary: 256 threads).
pub(super) const ROWS: u16 = 8;

/// The forms without a dot: threads for the columns only.
fn of_rows(limits: &Limits, shape: &Shape) -> Mapping {
    let num_vectors = shape.n.div_ceil(EIGHT * LANES);
    let teams = if shape.num_tokens > LARGE_PER_SM * limits.num_sms { num_vectors / 4 } else { num_vectors };
    let teams = teams.next_power_of_two().clamp(1, 8);
    Mapping {
        teams_per_row: teams as u16,
        rows_per_block: if teams == 1 { ROWS } else { 1 },
        elements_per_lane: EIGHT as u16,
        cluster: 1,
        kept_vectors: 1,
        one_pass: true,
    }
}

/// The largest power of two of elements, of `bytes` for one of x and one of w, that this many registers hold beside the kernel's own.
const fn elements_that_fit(registers: usize, bytes: usize) -> usize {
    let free = registers.saturating_sub(OWN_REGISTERS);
    let elements = free * 4 / bytes;
    if elements < EIGHT { EIGHT } else { 1 << elements.ilog2() }
}

/// Registers of a thread beside the elements that it holds: addresses, sums, predicates (measured: 14 to 31, docs/gate.md; 24 is what keeps the
/// largest that fit free of spills on every architecture).
const OWN_REGISTERS: usize = 24;

/// Registers that a mapping may use: what a block of its threads can have.
pub(super) fn max_registers(mapping: Mapping) -> u32 {
    // spec (CUDA): 255 for one thread, handed out in eights.
    (NVIDIA_REGISTERS as u32 / mapping.threads() / 8 * 8).min(255)
}

/// An architecture whose register file is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// NVIDIA Ampere.
    Sm80,
    /// NVIDIA Hopper.
    Sm90,
    /// NVIDIA Blackwell.
    Sm100,
    /// AMD CDNA 3.
    Gfx942,
    /// AMD CDNA 4.
    Gfx950,
    /// AMD RDNA 3.
    Gfx1100,
    /// AMD RDNA 3.5.
    Gfx1151,
    /// AMD RDNA 4.
    Gfx1201,
}

impl Arch {
    /// Registers of 32 bits that each thread of a block of 1024 can have.
    const fn registers_of_1024_threads(self) -> usize {
        match self {
            // spec: 65536 registers of an SM.
            Arch::Sm80 | Arch::Sm90 | Arch::Sm100 => NVIDIA_REGISTERS / 1024,
            // spec: 512 for a lane of each of the 4 SIMDs, which have 4 waves of 64 each.
            Arch::Gfx942 | Arch::Gfx950 => 512 / 4,
            // spec: 1536 for a lane of each of the 4 SIMDs of a work-group processor, which have 8 waves of 32 each.
            Arch::Gfx1100 | Arch::Gfx1151 | Arch::Gfx1201 => 1536 / 8,
        }
    }
}

/// The longest row (elements of x, with weights of the same type) whose every load is in flight at once in one block.
///
/// Derivation: a block has 1024 threads at most, and the register file gives each of them R registers of 32 bits (NVIDIA 65536 / 1024 = 64; CDNA
/// 512 / 4 waves = 128; RDNA 1536 / 8 waves = 192). 24 of them hold what is not data. One element of x and of w takes 2 * size / 4 registers, packed as
/// they lie in memory, so a thread holds (R - 24) * 2 / size elements, cut to a power of two: 32, 64 or 128 in 16 bits, half of that in f32. Twice as
/// many would spill. A longer row works too: a block takes it in several passes, and a cluster of blocks shares it where there are clusters.
///
/// ```
/// use moe_kernels::DType;
/// use moe_kernels::ops::gate::{Arch, max_k_single_block};
/// assert_eq!(max_k_single_block(DType::BF16, Arch::Sm90), 32768);
/// assert_eq!(max_k_single_block(DType::F32, Arch::Sm90), 16384);
/// assert_eq!(max_k_single_block(DType::BF16, Arch::Gfx950), 65536);
/// assert_eq!(max_k_single_block(DType::BF16, Arch::Gfx1151), 131072);
/// ```
pub const fn max_k_single_block(dtype: DType, arch: Arch) -> usize {
    1024 * elements_that_fit(arch.registers_of_1024_threads(), 2 * dtype.size())
}
