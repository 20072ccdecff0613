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
    /// Every row is whole vectors at addresses that 16-byte accesses take.
    pub(super) aligned: bool,
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
pub(super) fn classes_of_tokens(limits: &Limits) -> std::ops::RangeInclusive<usize> {
    // Above, there is a block for each SM whatever the mapping.
    1..=usize::from(ROWS).max(LARGE_PER_SM) * limits.num_sms + 1
}

/// Blocks among which the columns of a row are split at most: each makes the same gate again (arbitrary; a row of 64 passes is long).
const MAX_COLUMN_BLOCKS: usize = 64;

/// Vectors of s that a thread loads before it knows the gate; of `out` as many (measured on an H200, T = 4096, K = N = 2048, bf16, in us: with 1, 2, 4 vectors
/// gate_mul takes 13.9, 13.7, 13.9; with 1, 2 gate_mul_add takes 17.3, 17.6). With 2 sigmoid_mul spills on sm_100a.
fn max_kept_vectors(kind: Kind) -> usize {
    if matches!(kind, Kind::GateMulAdd | Kind::SigmoidMul) { 1 } else { 2 }
}

fn of_dot(limits: &Limits, shape: &Shape) -> Mapping {
    let &Shape { kind, types: [x, w, s], num_tokens, k, aligned, .. } = shape;
    // What is held beside x and w: a vector of s, and of what `out` was. Elements that are taken one by one cost more addresses and predicates (16: measured,
    // without it the kernels of 1024 threads spill).
    let of_rows = if kind.has_rows() { 2 * s.size() * if kind == Kind::GateMulAdd { 2 } else { 1 } } else { 0 };
    let held = of_rows + if aligned { 0 } else { 16 };
    // Elements of one lane, so that a row's lanes hold it at once: at most what the registers of the threads of a block hold.
    let with = |teams: usize, cluster: usize| {
        let (threads, lanes) = (teams * LANES, teams * LANES * cluster);
        let registers = (NVIDIA_REGISTERS / threads).min(255); // spec (CUDA): 255 for one thread
        let elements = k.div_ceil(lanes).next_power_of_two().clamp(EIGHT, elements_that_fit(registers - held, x.size() + w.size()));
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
    if num_w <= if is_large && !kind.has_rows() { ONE_TEAM } else { 1 } {
        return Mapping { rows_per_block: if is_large { ROWS } else { 1 }, ..with(1, 1) };
    }
    if k > CLUSTER_ABOVE && limits.has_clusters && num_tokens * CLUSTER <= limits.num_sms {
        return with(NUM_W / CLUSTER, CLUSTER);
    }
    // Two vectors a lane, so half as many teams as values of w, but for short rows.
    let mapping = with(if num_w >= 8 { num_w / 2 } else { num_w }, 1);
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
/// Values of w up to which one team serves a row when there are many and no rows to multiply (measured on an H200, T = 4096, in us: K = 1024 with a block a row
/// 5.8, which is the rate at which blocks start, with a team a row 3.4; K = 2048 5.8 with four teams and with one; gate_mul of K = N = 1024 7.8 with both).
const ONE_TEAM: usize = 4;
/// Rows of a block where a row has one team (arbitrary: 256 threads).
pub(super) const ROWS: u16 = 8;

/// The forms without a dot: threads for the columns only.
fn of_rows(limits: &Limits, shape: &Shape) -> Mapping {
    let num_vectors = shape.n.div_ceil(EIGHT * LANES);
    let is_large = shape.num_tokens > LARGE_PER_SM * limits.num_sms;
    // A thread that keeps one vector has as much in flight only with a thread for each.
    let teams = if is_large && max_kept_vectors(shape.kind) > 1 { num_vectors / 4 } else { num_vectors };
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

/// Registers of a thread beside the elements that it holds: addresses, sums, predicates (measured, docs/gate.md: 24 is what keeps the largest that
/// fit free of spills on every architecture).
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

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [[DType; 3]; 4] =
        [[DType::BF16; 3], [DType::F16, DType::F32, DType::F16], [DType::BF16, DType::BF16, DType::F32], [DType::F32; 3]];
    const KINDS: [Kind; 5] = [Kind::Gate, Kind::GateMul, Kind::GateMulAdd, Kind::SigmoidMul, Kind::SigmoidMulEach];

    /// What kernel.cu and a launch require, of every choice.
    #[test]
    fn a_choice_is_legal() {
        let sizes = [0, 1, 7, 8, 255, 256, 257, 1000, 2048, 4096, 8192, 8193, 16384, 16385, 32768, 65536, 131072, 131073, 1 << 20, 1 << 33];
        for (num_sms, has_clusters) in [(1, false), (108, false), (132, true)] {
            let limits = Limits { num_sms, has_clusters };
            for (kind, types) in KINDS.into_iter().flat_map(|kind| TYPES.map(|types| (kind, types))) {
                for (num_tokens, k) in [1, 2, 16, 17, 132, 264, 265, 4096].into_iter().flat_map(|t| sizes.map(|k| (t, k))) {
                    for n in sizes {
                        let shape = Shape { kind, types, num_tokens, k, n, aligned: k % 8 == 0 && n % 8 == 0 };
                        let (mapping, num_column_blocks) = choose(&limits, &shape);
                        let Mapping { teams_per_row, rows_per_block, elements_per_lane, cluster, kept_vectors, one_pass } = mapping;
                        let context = format!("{shape:?} {mapping:?} {num_column_blocks}");
                        let (teams, elements) = (teams_per_row as usize, elements_per_lane as usize);
                        assert!(mapping.threads() <= 1024, "{context}");
                        assert!([teams, elements, cluster.into(), kept_vectors.into()].iter().all(|n| n.is_power_of_two()), "{context}");
                        assert!(elements >= EIGHT && teams * cluster as usize <= NUM_W, "{context}");
                        assert!(rows_per_block == 1 || teams == 1 && cluster == 1, "{context}");
                        assert!(cluster == 1 || has_clusters, "{context}");
                        // Spec (CUDA): blocks along y.
                        assert!((1..=65535).contains(&num_column_blocks), "{context}");
                        assert!(!kind.has_rows() || n / (num_column_blocks as usize) < 1 << 31, "{context}");
                        if kind.has_dot() {
                            // What kernel.cu derives.
                            let vectors = (elements / EIGHT).min(NUM_W / (teams * cluster as usize));
                            let pass = LANES * EIGHT * vectors * teams * cluster as usize;
                            let batch = elements / EIGHT / vectors;
                            assert_eq!(one_pass, k <= pass * batch, "{context}");
                            assert!(one_pass && batch == 1 || pass == 8192, "{context}");
                            let registers = elements * (types[0].size() + types[1].size()) / 4 + 16; // 16: the least that was measured
                            assert!(registers <= max_registers(mapping) as usize, "{context}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_classes_of_tokens_are_all_there() {
        let limits = Limits { num_sms: 132, has_clusters: true };
        for (kind, types) in KINDS.into_iter().flat_map(|kind| TYPES.map(|types| (kind, types))) {
            for (k, n) in [(40, 264), (2048, 2048), (2048, 5000), (20000, 2048), (140_000, 64)] {
                let mapping = |num_tokens| choose(&limits, &Shape { kind, types, num_tokens, k, n, aligned: true }).0;
                let known: Vec<_> = classes_of_tokens(&limits).map(mapping).collect();
                for num_tokens in (1..600).chain([1000, 4096, 1 << 20]) {
                    assert!(known.contains(&mapping(num_tokens)), "{num_tokens} tokens, {kind:?} {types:?} {k} {n}");
                }
            }
        }
    }

    #[test]
    fn the_longest_row_of_a_block_follows_from_the_registers() {
        for (arch, registers) in [(Arch::Sm80, 64), (Arch::Sm100, 64), (Arch::Gfx942, 128), (Arch::Gfx1201, 192)] {
            for dtype in [DType::BF16, DType::F32] {
                let elements = max_k_single_block(dtype, arch) / 1024;
                let needed = |elements: usize| elements * 2 * dtype.size() / 4 + OWN_REGISTERS;
                assert!(needed(elements) <= registers && needed(2 * elements) > registers, "{arch:?} {dtype}");
            }
        }
    }
}
