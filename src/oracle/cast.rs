//! The meaning of cast: one matrix at a time, the whole of it in f32.

use crate::ops::cast::{Block, Formula, Options, ScaleLayout, Scaling};
use crate::oracle::float::{narrow, push, widen};
use crate::tensor::DType;

/// What the outputs for one matrix hold. All tensors are contiguous here.
#[derive(Debug, Clone)]
pub struct Cast {
    /// Rows of the outputs, padding included.
    pub padded: usize,
    /// `[padded, columns]`
    pub row: Vec<u8>,
    /// `[columns, padded]`
    pub column: Vec<u8>,
    /// Scales of `row` under block scaling.
    pub row_scales: Grid,
    /// Scales of `column` under block scaling.
    pub column_scales: Grid,
    /// Greatest magnitude; `None` without elements.
    pub amax: Option<f32>,
    /// 1 / scale.
    pub scale_inv: f32,
}

/// The scales of one copy: `[lines of blocks, blocks of a line]`.
#[derive(Debug, Clone, Default)]
pub struct Grid {
    /// Lines of the copy.
    pub lines: usize,
    /// Lines of blocks.
    pub line_blocks: usize,
    /// Blocks of a line.
    pub blocks: usize,
    /// What a GEMM multiplies by.
    pub stored: Vec<f32>,
}

/// Casts the matrix `x [rows, columns]` of values of type `from` to `to`. `scale` counts for [`Scaling::Given`] only.
pub fn cast(x: &[f32], [rows, columns]: [usize; 2], from: DType, to: DType, scale: f32, options: &Options<'_>) -> Cast {
    let padded = rows.div_ceil(options.pad_rows) * options.pad_rows;
    let padded_x = |r: usize, c: usize| if r < rows { x[r * columns + c] } else { 0.0 };
    let transposed_x = |c: usize, r: usize| padded_x(r, c);
    let amax = greatest(x.iter().copied());
    let scale = match options.scaling {
        Scaling::Current { epsilon, power_of_two } => quotient(amax, largest(to), epsilon, power_of_two, f32::MAX),
        Scaling::Given => scale,
        Scaling::Block { .. } => 1.0,
    };
    let (mut row, mut column) = (Vec::new(), Vec::new());
    let (mut row_scales, mut column_scales) = (Grid::default(), Grid::default());
    if let Scaling::Block { block, formula, .. } = options.scaling {
        row_scales = copy_by_blocks([padded, columns], &padded_x, block, formula, from, to, &mut row);
        column_scales = copy_by_blocks([columns, padded], &transposed_x, block, formula, from, to, &mut column);
    } else {
        copy([padded, columns], &|r, c| if r < rows { scale * padded_x(r, c) } else { 0.0 }, to, &mut row);
        copy([columns, padded], &|c, r| if r < rows { scale * padded_x(r, c) } else { 0.0 }, to, &mut column);
    }
    let amax = (rows * columns > 0).then_some(amax);
    Cast { padded, row, column, row_scales, column_scales, amax, scale_inv: 1.0 / scale }
}

/// `amax` after a matrix with greatest magnitude `new` was cast (`None`: one without elements).
pub fn raised(stored: f32, new: Option<f32>, reset: bool) -> f32 {
    let stored = if reset { 0.0 } else { stored };
    let Some(new) = new else { return stored };
    // The greater as signed integers: negative values lose against +0, a positive NaN wins.
    f32::from_bits((stored.to_bits() as i32).max(new.to_bits() as i32) as u32)
}

fn copy([lines, length]: [usize; 2], value: &dyn Fn(usize, usize) -> f32, to: DType, out: &mut Vec<u8>) {
    for line in 0..lines {
        for i in 0..length {
            push(to, value(line, i), out);
        }
    }
}

/// Greatest magnitude: NaN drops out, at least +0.
fn greatest(values: impl Iterator<Item = f32>) -> f32 {
    let mut greatest = 0.0;
    for v in values {
        if v.abs() > greatest {
            greatest = v.abs();
        }
    }
    greatest
}

fn copy_by_blocks(
    [lines, length]: [usize; 2],
    x: &dyn Fn(usize, usize) -> f32,
    block: Block,
    formula: Formula,
    from: DType,
    to: DType,
    out: &mut Vec<u8>,
) -> Grid {
    let (block_lines, block_length) = match block {
        Block::Row128 => (1, 128),
        Block::Square128 => (128, 128),
        Block::Row32 => (1, 32),
    };
    let (line_blocks, blocks) = (lines.div_ceil(block_lines), length.div_ceil(block_length));
    let mut scales = Vec::new();
    let mut stored = Vec::new();
    for line_block in 0..line_blocks {
        for b in 0..blocks {
            let its_lines = line_block * block_lines..lines.min((line_block + 1) * block_lines);
            let its_elements = b * block_length..length.min((b + 1) * block_length);
            let amax = greatest(its_lines.flat_map(|l| its_elements.clone().map(move |i| x(l, i))));
            let (scale, store) = scale_of(formula, amax, from, to);
            scales.push(scale);
            stored.push(store);
        }
    }
    copy([lines, length], &|l, i| scales[l / block_lines * blocks + i / block_length] * x(l, i), to, out);
    Grid { lines, line_blocks, blocks, stored }
}

/// The factor of a block's elements, and the stored scale.
fn scale_of(formula: Formula, amax: f32, from: DType, to: DType) -> (f32, f32) {
    let power = |m: f32| {
        let e = (-127..=126).find(|&e| m as f64 <= 2f64.powi(e)).unwrap_or(127);
        (2f64.powi(-e) as f32, 2f64.powi(e) as f32)
    };
    match formula {
        Formula::TransformerEngine { epsilon, power_of_two } => {
            let scale = quotient(amax, largest(to), epsilon, power_of_two, largest(from));
            (scale, 1.0 / scale)
        }
        Formula::DeepGemm { power_of_two } => {
            let m = if amax < 1e-4 { 1e-4 } else { amax };
            if power_of_two { power(m / largest(to)) } else { (largest(to) / m, m / largest(to)) }
        }
        Formula::Mx => power(amax / largest(to)),
    }
}

fn quotient(amax: f32, largest: f32, epsilon: f32, power_of_two: bool, instead_of_infinity: f32) -> f32 {
    let amax = if amax < epsilon { epsilon } else { amax };
    if amax == 0.0 || amax == f32::INFINITY {
        return 1.0;
    }
    let mut scale = largest / amax;
    if scale == f32::INFINITY {
        scale = instead_of_infinity;
    }
    if power_of_two {
        let e = (-126..=127).rev().find(|&e| 2f64.powi(e) <= scale as f64);
        scale = 2f64.powi(e.expect("no smaller than 240 / f32::MAX, which is normal")) as f32;
    }
    scale
}

/// Largest finite value: what infinity or, for the formats without one, more than any value becomes under saturation.
fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => f32::MAX,
        DType::F16 => widen(DType::F16, 0x7BFF),
        DType::BF16 => widen(DType::BF16, 0x7F7F),
        fp8 => widen(fp8, narrow(fp8, f32::INFINITY)),
    }
}

/// One element of a scale tensor, or one byte of a packed one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cell {
    /// Row in the tensor.
    pub i: usize,
    /// Column in the tensor.
    pub j: usize,
    /// Byte in the element.
    pub byte: usize,
    /// The scale; `None` for a byte of a packed word past the last block, which is 0.
    pub stored: Option<f32>,
}

impl Grid {
    /// Every cell of the scale tensor of a list's matrix.
    pub fn cells(&self, layout: ScaleLayout, block: Block) -> Vec<Cell> {
        let at = |line_block: usize, b: usize| self.stored[line_block * self.blocks + b];
        let mut cells = Vec::new();
        if layout == ScaleLayout::PackedE8m0 {
            let lines_of_a_block = if block == Block::Square128 { 128 } else { 1 };
            for line in 0..self.lines {
                for b in 0..self.blocks.div_ceil(4) * 4 {
                    let stored = (b < self.blocks).then(|| at(line / lines_of_a_block, b));
                    cells.push(Cell { i: b / 4, j: line, byte: b % 4, stored });
                }
            }
            return cells;
        }
        for line_block in 0..self.line_blocks {
            for b in 0..self.blocks {
                let (i, j) = if layout == ScaleLayout::RowMajor { (line_block, b) } else { (b, line_block) };
                cells.push(Cell { i, j, byte: 0, stored: Some(at(line_block, b)) });
            }
        }
        cells
    }
}

/// A power of two as E8M0.
pub fn e8m0(power: f32) -> u8 {
    (0..=254).find(|&bits| widen(DType::E8M0, bits) == power).map_or(0xFF, |bits| bits as u8)
}
