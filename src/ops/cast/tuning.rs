//! How the kernels' constants follow from types.
#![forbid(unsafe_code)]

use crate::gpu::Properties;
use crate::tensor::DType;

/// What a block casts at once: constants of the kernels by the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub(super) rows: u16,
    pub(super) columns: u16,
    /// Tiles of a part, one below the other.
    pub(super) down: u16,
    /// Strips of columns that a part of a low matrix takes at most.
    pub(super) stack: u16,
    /// Tiles of a part at the end of a group.
    pub(super) tail: u16,
    /// Blocks that a multiprocessor holds.
    pub(super) blocks: u16,
}

/// Rows and columns of a patch (spec: kernels).
pub(super) const PATCH: usize = 8;

impl Tile {
    pub(super) fn threads(self) -> u32 {
        u32::from(self.rows) * u32::from(self.columns) / (PATCH * PATCH) as u32
    }

    /// Rows of a part.
    pub(super) fn part_rows(self) -> usize {
        usize::from(self.rows) * usize::from(self.down)
    }

    /// Rows of a part at the end.
    pub(super) fn tail_rows(self) -> usize {
        usize::from(self.rows) * usize::from(self.tail)
    }

    /// Strips of columns that a part of `part_rows` rows takes of a matrix of `height` rows: `stack_of` of locate.cuh.
    pub(super) fn stack_of(self, height: u32, part_rows: usize, to: DType) -> u32 {
        let fill_rows = if to.size() == 1 { 2 * PATCH } else { PATCH };
        (2..=usize::from(self.stack)).map(|n| u32::from(height as usize <= part_rows / n / fill_rows * fill_rows)).sum::<u32>() + 1
    }

    pub(super) fn smem_bytes(self, to: DType) -> u32 {
        self.part_rows() as u32 * u32::from(self.columns) * to.size() as u32
    }

    /// Registers of a thread that let the blocks fit (spec: 65536 of a multiprocessor, 255 of a thread, handed out in eights).
    pub(super) fn max_registers(self) -> u32 {
        (65536 / (self.threads() * u32::from(self.blocks)) / 8 * 8).min(255)
    }
}

/// Whether an NVIDIA GPU has an instruction that rounds to this type (spec: PTX, FP8 from compute capability 8.9 on, and no FNUZ).
pub(super) fn is_native(capability: (u32, u32), to: DType) -> bool {
    match to {
        DType::E4M3 | DType::E5M2 => capability >= (8, 9),
        DType::E4M3Fnuz | DType::E5M2Fnuz => false,
        _ => true,
    }
}

/// Rows at whose multiples parts end: `CUT_ROWS` of locate.cuh.
pub(super) fn cut_rows(tile: Tile, has_block_scales: bool) -> u32 {
    if has_block_scales { tile.rows.into() } else { 32 }
}

/// For kernels without tiles, which share sources with those that have them (arbitrary).
pub(super) const NO_TILE: Tile = Tile { rows: 128, columns: 128, down: 1, stack: 1, tail: 1, blocks: 1 };

/// Rows of a matrix up to which lower tiles and a third block are better (measured: H200, see docs/cast.md: of 128 rows 0.898 of the copy against
/// 0.855, of 264 rows 0.844 against 0.917).
const LOW_ROWS: usize = 160;

/// Of one scale a matrix (measured: H200, docs/cast.md: with 2, 3 and 4 skewed matrices of 135 rows reach 0.884, 0.899 and 0.900 of the copy; `num_stacks` of locate.cuh holds three).
const STACK: u16 = 3;

/// The tile of one scale a matrix (docs/cast.md has what was measured: H200, bf16 to e4m3), for matrices of so many rows on average. Rounding by integer
/// arithmetic takes more registers.
pub(super) fn tile(from: DType, to: DType, is_native: bool, mean_rows: usize) -> Tile {
    match (from.size(), to.size()) {
        (2, 1) if is_native && mean_rows <= LOW_ROWS => Tile { rows: 64, columns: 256, down: 4, stack: STACK, tail: 1, blocks: 3 },
        (2, 1) if is_native => Tile { rows: 96, columns: 256, down: 3, stack: STACK, tail: 1, blocks: 2 },
        (_, 1) if is_native => Tile { rows: 128, columns: 128, down: 2, stack: STACK, tail: 1, blocks: 2 },
        (_, 1) => Tile { rows: 128, columns: 128, down: 2, stack: STACK, tail: 1, blocks: 1 },
        // The wider outputs' shared tile is as large in bytes.
        (_, 2) => Tile { rows: 64, columns: 128, down: 2, stack: STACK, tail: 1, blocks: 2 },
        _ => Tile { rows: 64, columns: 128, down: 1, stack: STACK, tail: 1, blocks: 2 },
    }
}

/// The tile of current scaling in one launch (measured: H200, of 64 x 128, 64 x 256, 128 x 128 and 128 x 256; docs/cast.md).
pub(super) const RESIDENT_TILE: Tile = Tile { rows: 64, columns: 256, down: 1, stack: 1, tail: 1, blocks: 2 };

/// Tiles of a block that stay in shared memory; one more stays in registers (derived: two blocks' of 96 KiB fit in 228 KiB).
pub(super) const RESIDENT_SLOTS: usize = 3;

/// Tiles of a block at most (arbitrary: places of 32 bytes in shared memory, more than current scaling in one launch is good for).
pub(super) const RESIDENT_MAX_TILES: usize = 32;

/// Matrices at most (arbitrary: words of the program's memory, four sets of them).
pub(super) const RESIDENT_MAX_MATRICES: usize = 1024;

/// Rows of a matrix on average from which current scaling in one launch is better: lower ones leave much of a tile empty (derived: twice its rows).
const RESIDENT_LEAST_ROWS: u64 = 128;

/// Shared memory of a block of current scaling in one launch.
pub(super) fn resident_smem_bytes(from: DType) -> u32 {
    RESIDENT_SLOTS as u32 * u32::from(RESIDENT_TILE.rows) * u32::from(RESIDENT_TILE.columns) * from.size() as u32
}

/// Whether current scaling of aligned matrices takes one launch that keeps a part of its input on the chip (measured: H200, 32 MiB 24.2 us instead of 32.3, 64 MiB
/// 57.3 and 61.5, 96 MiB 86.6 and 85.8).
pub(super) fn is_resident(
    device: &Properties,
    (from, to): (DType, DType),
    rows: u64,
    num_matrices: u64,
    num_elements: u64,
    num_parts: u64,
) -> bool {
    let num_blocks = slots(RESIDENT_TILE, device.num_sms);
    let tile_bytes = u64::from(RESIDENT_TILE.rows) * u64::from(RESIDENT_TILE.columns) * from.size() as u64;
    let on_chip = num_blocks * (RESIDENT_SLOTS as u64 + 1) * tile_bytes;
    // What a block has besides: places, words for each warp, what the driver keeps (arbitrary, more than that).
    let smem_bytes = u32::from(RESIDENT_TILE.blocks) * (resident_smem_bytes(from) + 4096);
    device.compute_capability >= (9, 0)
        && device.cooperative_launch
        && device.smem_bytes_per_sm >= smem_bytes
        && is_native(device.compute_capability, to)
        && (from.size(), to.size()) == (2, 1)
        && num_matrices <= RESIDENT_MAX_MATRICES as u64
        && num_matrices.saturating_mul(RESIDENT_LEAST_ROWS) <= rows
        && num_elements.saturating_mul(from.size() as u64) <= 2 * on_chip
        && num_blocks <= RESIDENT_MAX_BLOCKS
        && num_parts <= num_blocks * RESIDENT_MAX_TILES as u64
}

/// Blocks at most: `TURN` of resident.cu.
const RESIDENT_MAX_BLOCKS: u64 = 1 << 10;

/// The tile of block scales (docs/cast.md has what was measured: H200, bf16 to e4m3), which is a part: two beside each other are slower (measured: H200, even matrices
/// 0.918 of the copy instead of 0.954). It is read twice, the second time from the first-level cache, which four of them fill. Inputs of f32 and rounding by integer
/// arithmetic take more registers: with four blocks they would spill.
pub(super) fn block_tile(from: DType, is_native: bool) -> Tile {
    let blocks = match (from, is_native) {
        (_, false) => 1,
        (DType::F32, true) => 2,
        _ => 4,
    };
    Tile { rows: 128, columns: 128, down: 1, stack: 1, tail: 1, blocks }
}

/// Matrices that the parameters of a list's launch hold: the smallest of these that suffices (256: at most 32 KiB of parameters, spec: CUDA 12.1; the
/// others keep small lists cheap, arbitrary).
pub(super) const LIST_SIZES: [usize; 3] = [8, 64, 256];

/// Blocks that the device holds.
pub(super) fn slots(tile: Tile, num_sms: u32) -> u64 {
    u64::from(num_sms) * u64::from(tile.blocks)
}

/// Rows of strips at the end that are cut into lower parts, so that the last blocks are short: as many as `eighths` of eight of the blocks that the device
/// holds would cast. None when all of `num_parts` parts run at once, which more parts would not (measured: H200, 256 parts of 256 rows take 20.1 us, in
/// lower ones 22.0).
pub(super) fn tail(tile: Tile, num_sms: u32, num_parts: u64, eighths: u64) -> u64 {
    let slots = slots(tile, num_sms);
    if num_parts <= slots { 0 } else { slots * tile.part_rows() as u64 * eighths / 8 }
}

/// Of a group (measured: H200, docs/cast.md; with more, blocks that search for their part become too many).
const GROUP_TAIL: u64 = 3;
/// Of a table (measured as above).
pub(super) const TABLE_TAIL: u64 = 3;

/// Parts of a group at most: beside their number a word has two bits that say what is wrong (`STATUS_SHIFT` of find_by_block.cuh).
pub(super) const MAX_GROUP_PARTS: u64 = (1 << 30) - 1;

/// A group as far as the host knows it.
pub(super) struct Group {
    pub(super) rows: u64,
    pub(super) num_matrices: u64,
    pub(super) num_strips: u64,
    pub(super) tile: Tile,
    pub(super) num_sms: u32,
}

impl Group {
    /// Rows at the end that are cut into lower parts.
    pub(super) fn tail_rows(&self) -> u64 {
        let num_down = (self.rows / self.num_matrices).div_ceil(self.tile.part_rows() as u64);
        let num_parts = self.num_matrices.saturating_mul(num_down).saturating_mul(self.num_strips);
        tail(self.tile, self.num_sms, num_parts, GROUP_TAIL) / self.num_strips.max(1)
    }

    /// Slots of a strip with block scales: each matrix has one more than its parts at most (derived: find_by_slot.cuh).
    pub(super) fn num_slots(&self) -> u64 {
        self.rows / self.tile.part_rows() as u64 + self.num_matrices
    }

    /// Parts at most, whatever the offsets are: each matrix may end inside of a part, and all may be low ones.
    pub(super) fn most_parts(&self) -> u64 {
        (self.rows / self.tile.tail_rows() as u64 + self.num_matrices).saturating_mul(self.num_strips)
    }

    /// Parts of a strip that are expected at most: the first blocks take several parts when there are more, and one without a part takes the time of its search
    /// (measured: H200, 2 to 4 ns of the launch each; with as many as equal heights have, even matrices 0.933 of the copy instead of 0.931, skewed ones 0.874 instead
    /// of 0.896). High matrices end in the middle of a part, those of lower ones take several strips (derived: skewed matrices of benches/shapes need 0.44, 0.41, 0.28 and 0.14 more
    /// each by their mean rows, even and uniform ones less). The last `tail_rows` rows have lower parts.
    pub(super) fn num_down(&self, tail_rows: u64) -> u64 {
        let &Group { rows, num_matrices, num_strips, tile, num_sms } = self;
        let (part_rows, tail_rows) = (tile.part_rows() as u64, tail_rows.min(rows));
        let of_tail = tail_rows.div_ceil(tile.tail_rows() as u64) - tail_rows / part_rows;
        // Of few matrices no block is to take two parts while others have none: one more part for each is the most there can be.
        let is_few = num_matrices.saturating_mul(num_strips) <= slots(tile, num_sms);
        let of_32 = match rows.div_ceil(num_matrices) {
            _ if is_few => 32,
            mean if mean <= part_rows / 2 => 5,
            mean if mean <= part_rows => 9,
            mean if mean <= 2 * part_rows => 13,
            _ => 16,
        };
        let least = num_matrices.div_ceil(tile.stack.into());
        (rows.div_ceil(part_rows) + (num_matrices * of_32).div_ceil(32)).max(least) + of_tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_no_more_parts_than_a_word_counts() {
        let group = |rows, num_matrices, num_strips| Group { rows, num_matrices, num_strips, tile: RESIDENT_TILE, num_sms: 132 };
        assert!(group(65536, 256, 28).most_parts() < MAX_GROUP_PARTS);
        // Of a row each.
        for (num_matrices, num_strips) in [(1 << 30, 1), (1 << 28, 4), (u64::from(u32::MAX), u64::from(u32::MAX))] {
            assert!(group(num_matrices, num_matrices, num_strips).most_parts() > MAX_GROUP_PARTS, "{num_matrices} x {num_strips}");
        }
    }
}
