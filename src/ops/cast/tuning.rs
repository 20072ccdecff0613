//! How the kernels' constants follow from types.
#![forbid(unsafe_code)]

use crate::tensor::DType;

/// What a block casts at once: constants of the kernels by the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub(super) rows: u16,
    pub(super) columns: u16,
    /// Tiles of a part, one below the other.
    pub(super) down: u16,
    /// Tiles of a part, one beside the other.
    pub(super) across: u16,
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

    /// Columns of a part.
    pub(super) fn strip_columns(self) -> u32 {
        u32::from(self.columns) * u32::from(self.across)
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
pub(super) const NO_TILE: Tile = Tile { rows: 128, columns: 128, down: 1, across: 1, tail: 1, blocks: 1 };

/// Rows of a matrix up to which lower tiles and a third block are better (measured: H200, see docs/cast.md: of 128 rows 0.898 of the copy against
/// 0.855, of 264 rows 0.844 against 0.917).
const LOW_ROWS: usize = 160;

/// The tile of one scale a matrix (docs/cast.md has what was measured: H200, bf16 to e4m3), for matrices of so many rows on average. Rounding by integer
/// arithmetic takes more registers.
pub(super) fn tile(from: DType, to: DType, is_native: bool, mean_rows: usize) -> Tile {
    match (from.size(), to.size()) {
        (2, 1) if is_native && mean_rows <= LOW_ROWS => Tile { rows: 64, columns: 256, down: 4, across: 1, tail: 1, blocks: 3 },
        (2, 1) if is_native => Tile { rows: 96, columns: 256, down: 3, across: 1, tail: 1, blocks: 2 },
        (_, 1) if is_native => Tile { rows: 128, columns: 128, down: 2, across: 1, tail: 1, blocks: 2 },
        (_, 1) => Tile { rows: 128, columns: 128, down: 2, across: 1, tail: 1, blocks: 1 },
        // The wider outputs' shared tile is as large in bytes.
        (_, 2) => Tile { rows: 64, columns: 128, down: 2, across: 1, tail: 1, blocks: 2 },
        _ => Tile { rows: 64, columns: 128, down: 1, across: 1, tail: 1, blocks: 2 },
    }
}

/// The tile of block scales (docs/cast.md has what was measured: H200, bf16 to e4m3): it is read twice, the second time from the first-level cache, which four of
/// them fill. Inputs of f32, rounding by integer arithmetic and square blocks take more registers: with four blocks they would spill.
pub(super) fn block_tile(from: DType, is_native: bool, is_square: bool) -> Tile {
    let blocks = match (from, is_native) {
        (_, false) => 1,
        (DType::F32, true) => 2,
        _ => 4 - u16::from(is_square),
    };
    Tile { rows: 128, columns: 128, down: 1, across: 2, tail: 1, blocks }
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
const GROUP_TAIL: u64 = 2;
/// Of a table (measured as above).
pub(super) const TABLE_TAIL: u64 = 3;

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

    /// Parts of a strip that are expected at most: a block takes several parts when there are more, one without a part ends at once (measured: 512 of those
    /// cost 0.3 us). Each matrix ends in the middle of a part, and hardly one has none; the last `tail_rows` rows have lower parts.
    pub(super) fn num_down(&self, tail_rows: u64) -> u64 {
        let &Group { rows, num_matrices, num_strips, tile, num_sms } = self;
        let (part_rows, tail_rows) = (tile.part_rows() as u64, tail_rows.min(rows));
        let of_tail = tail_rows.div_ceil(tile.tail_rows() as u64) - tail_rows / part_rows;
        // Of few matrices no block is to take two parts while others have none: one more part for each is the most there can be.
        let is_few = num_matrices.saturating_mul(num_strips) <= slots(tile, num_sms);
        let of_ends = if is_few { num_matrices } else { num_matrices.div_ceil(2) };
        (rows.div_ceil(part_rows) + of_ends).max(num_matrices + num_matrices.div_ceil(8)) + of_tail
    }
}
