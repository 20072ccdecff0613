//! Where rows and scales lie: the arithmetic that the validator and every backend share.
#![forbid(unsafe_code)]

use super::{Block, ScaleLayout, Scaling};

/// E8M0 scales in a packed word (spec: 32 bits of 8).
pub(super) const PACKED: usize = 4;

impl Block {
    /// Lines and elements of a line that share a scale.
    pub(super) fn extents(self) -> (usize, usize) {
        match self {
            Block::Row128 => (1, 128),
            Block::Square128 => (128, 128),
            Block::Row32 => (1, 32),
        }
    }
}

/// Sums over the matrices of a grouped call (of those before one, or of all), or the extents of one matrix.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    /// Padded rows.
    pub(super) rows: usize,
    /// Blocks along the lines of the row copy.
    pub(super) row_blocks: usize,
    /// Blocks along the elements of a line of the column copy.
    pub(super) column_blocks: usize,
    /// Packed words along the same.
    pub(super) column_words: usize,
}

impl Sums {
    /// With a matrix of `rows` rows more, or `None` on overflow.
    pub(super) fn with(self, rows: usize, pad_rows: usize, scaling: &Scaling) -> Option<Sums> {
        let padded = padded(rows, pad_rows)?;
        let (lines, length) = match scaling {
            Scaling::Block { block, .. } => block.extents(),
            _ => (1, 1),
        };
        let column_blocks = padded.div_ceil(length);
        Some(Sums {
            rows: self.rows.checked_add(padded)?,
            // These sums are at most that of the rows.
            row_blocks: self.row_blocks + padded.div_ceil(lines),
            column_blocks: self.column_blocks + column_blocks,
            column_words: self.column_words + column_blocks.div_ceil(PACKED),
        })
    }
}

/// `rows` rounded up to `pad_rows`, or `None` on overflow.
pub(super) fn padded(rows: usize, pad_rows: usize) -> Option<usize> {
    rows.checked_next_multiple_of(pad_rows)
}

/// Which copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Row,
    Column,
}

/// The shape that a tensor must have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    extents: [usize; 2],
    num_dims: usize,
    /// The extent that may be larger: that along which a grouped call's matrices follow each other.
    pub(super) grows: Option<usize>,
}

impl Shape {
    pub(super) fn exact<const N: usize>(extents: [usize; N]) -> Self {
        let mut all = [0; 2];
        all[..N].copy_from_slice(&extents);
        Shape { extents: all, num_dims: N, grows: None }
    }

    pub(super) fn growing(self, dimension: usize, is_grouped: bool) -> Self {
        Shape { grows: is_grouped.then_some(dimension), ..self }
    }
}

impl std::ops::Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.extents[..self.num_dims]
    }
}

/// The shape of a scale tensor.
pub(super) fn scale_shape(side: Side, block: Block, layout: ScaleLayout, sums: &Sums, columns: usize, is_grouped: bool) -> Shape {
    let (lines, length) = block.extents();
    let (across, along) = (columns.div_ceil(lines), columns.div_ceil(length));
    let (shape, grows) = match (side, layout) {
        (Side::Row, ScaleLayout::RowMajor) => (Shape::exact([sums.row_blocks, along]), 0),
        (Side::Row, ScaleLayout::ColumnMajor) => (Shape::exact([along, sums.row_blocks]), 1),
        (Side::Row, ScaleLayout::PackedE8m0) => (Shape::exact([along.div_ceil(PACKED), sums.rows]), 1),
        // A product that overflows is larger than any view.
        (Side::Column, ScaleLayout::RowMajor) if is_grouped => (Shape::exact([across.saturating_mul(sums.column_blocks)]), 0),
        (Side::Column, ScaleLayout::RowMajor) => (Shape::exact([across, sums.column_blocks]), 0),
        (Side::Column, ScaleLayout::ColumnMajor) => (Shape::exact([sums.column_blocks, across]), 0),
        (Side::Column, ScaleLayout::PackedE8m0) => (Shape::exact([sums.column_words, columns]), 0),
    };
    shape.growing(grows, is_grouped)
}
