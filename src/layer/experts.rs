//! Experts on the CPU: gate and up, SiLU, down.
//!
//! A tile of rows of one expert is widened to f32 and transposed once: `[hidden, rows]`. Each task then takes some rows of the weights, widens a block of
//! at most 512 columns into its own cache, and multiplies it with the tile: wide weights never go to memory. Results stay transposed until they are
//! stored. Order of the sums: `cpu/gemm.rs`. Roundings to the type of the tokens: `Fused`: SiLU(gate) * up once; `Framework`: gate, up, SiLU(gate) and its
//! product with up, each. Then the expert's row once when it is stored, and where a framework rounds it, weight * row.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use crate::backend::Cpu;
use crate::cpu::{convert, elementwise, gemm};
use crate::layer::Shape;
use crate::layer::preset::WEIGHT_BLOCK;
use crate::layer::weights::{Matrix, Mlp};
use crate::ops::gate::Rounding;
use crate::tensor::DType;

/// Most rows that share one pass over an expert's weights. Widening them costs as much as multiplying some ten rows (measured), so more rows gain
/// little, and need more scratch.
pub(crate) const TILE_ROWS: usize = 512;

/// Rows of weights of one task: widened blocks of 96 x 512 f32 take 192 KiB of the second-level cache (derived; a multiple of 6 and 8, the columns of
/// the kernels of `gemm`).
const TASK_ROWS: usize = 96;

/// Rows that are transposed together (derived: 16 f32 are a cache line), and columns (arbitrary: 16 x 256 f32 fit in the first-level cache).
const PATCH_ROWS: usize = 16;
const PATCH_COLS: usize = 256;

/// Rows of tokens or results: where they are in a larger buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) dtype: DType,
    pub(crate) stride_bytes: usize,
}

/// Which rows of a buffer, in which order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Selection<'a> {
    /// From this one on.
    From(usize),
    /// These, ascending.
    List(&'a [i32]),
}

impl<'a> Selection<'a> {
    fn at(self, i: usize) -> usize {
        match self {
            Selection::From(first) => first + i,
            Selection::List(list) => list[i] as usize,
        }
    }

    fn skip(self, num: usize) -> Self {
        match self {
            Selection::From(first) => Selection::From(first + num),
            Selection::List(list) => Selection::List(&list[num..]),
        }
    }
}

/// `0..num_rows` in tiles of nearly equal size.
pub(crate) fn tiles(num_rows: usize) -> impl Iterator<Item = Range<usize>> {
    gemm::parts(num_rows, num_rows.div_ceil(TILE_ROWS))
}

/// Where a row of a tile is added, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addend {
    pub(crate) row: usize,
    pub(crate) weight: f32,
    pub(crate) is_first: bool,
}

/// f32 scratch of one rank, for tiles of rows. All transposed: `[elements, rows of the tile]`.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    x: Vec<f32>,
    h: Vec<f32>,
    y: Vec<f32>,
    /// Rows of the tile, and with the padding of the products.
    num_rows: usize,
    padded_rows: usize,
}

impl Scratch {
    /// Bytes that tiles of `num_rows` rows need at most, of everything in a layer.
    pub(crate) fn size_bytes(shape: &Shape, num_rows: usize) -> u64 {
        let padded = num_rows.min(TILE_ROWS).next_multiple_of(gemm::ROW_ALIGN);
        let elements = shape.hidden + shape.expert_width.max(shape.shared_width) + shape.hidden.max(shape.router.num_experts);
        (elements * padded * size_of::<f32>()) as u64
    }

    /// Widens and transposes rows `tile` of those selected.
    pub(crate) fn load(&mut self, cpu: &Cpu, rows: Rows<'_>, selected: Selection<'_>, tile: Range<usize>, cols: usize) {
        let selected = selected.skip(tile.start);
        self.num_rows = tile.len();
        self.padded_rows = tile.len().next_multiple_of(gemm::ROW_ALIGN);
        let x = grown(&mut self.x, cols * self.padded_rows);
        let size = rows.dtype.size();
        for_each_part(cpu, x, self.padded_rows, cols.div_ceil(PATCH_COLS), |part, out| {
            let mut patch = [[0f32; PATCH_COLS]; PATCH_ROWS];
            for first in (0..self.padded_rows).step_by(PATCH_ROWS) {
                for (r, patch) in patch.iter_mut().enumerate() {
                    let patch = &mut patch[..part.len()];
                    if first + r < tile.len() {
                        let start = selected.at(first + r) * rows.stride_bytes + part.start * size;
                        convert::widen(cpu.level(), rows.dtype, &rows.bytes[start..][..part.len() * size], patch);
                    } else {
                        patch.fill(0.0);
                    }
                }
                for (c, out) in out.chunks_exact_mut(self.padded_rows).enumerate() {
                    for (out, patch) in out[first..][..PATCH_ROWS].iter_mut().zip(&patch) {
                        *out = patch[c];
                    }
                }
            }
        });
    }

    /// `y = x W^T` of the loaded tile.
    pub(crate) fn linear(&mut self, cpu: &Cpu, weights: &Matrix) {
        let m = self.padded_rows;
        let x = &self.x[..weights.cols * m];
        let y = grown(&mut self.y, weights.rows * m);
        for_each_part(cpu, y, m, num_tasks(cpu, weights.rows), |part, y| multiply(cpu, weights, part, x, y, m));
    }

    /// `y = down(SiLU(gate(x)) * up(x))` of the loaded tile, rounded inside as `rounding` says; y is not rounded.
    pub(crate) fn mlp(&mut self, cpu: &Cpu, mlp: &Mlp, dtype: DType, rounding: Rounding) {
        let m = self.padded_rows;
        let x = &self.x[..mlp.gate.cols * m];
        let h = grown(&mut self.h, mlp.gate.rows * m);
        for_each_part(cpu, h, m, num_tasks(cpu, mlp.gate.rows), |part, gate| {
            multiply(cpu, &mlp.gate, part.clone(), x, gate, m);
            UP.with_borrow_mut(|up| {
                let up = grown(up, gate.len());
                multiply(cpu, &mlp.up, part, x, up, m);
                match rounding {
                    Rounding::Fused => elementwise::silu_mul(cpu.level(), dtype, gate, up),
                    Rounding::Framework => elementwise::silu_mul_stepwise(cpu.level(), dtype, gate, up),
                }
            });
        });
        let h = &self.h[..mlp.down.cols * m];
        let y = grown(&mut self.y, mlp.down.rows * m);
        for_each_part(cpu, y, m, num_tasks(cpu, mlp.down.rows), |part, y| multiply(cpu, &mlp.down, part, h, y, m));
    }

    /// Rounds the tile's `y` once to `dtype` and stores its rows, one after the other. With a weight for each row: `round(weight * round(y))`.
    pub(crate) fn store(&self, cpu: &Cpu, cols: usize, dtype: DType, weights: Option<&[f32]>, out: &mut [u8]) {
        let row_bytes = cols * dtype.size();
        for_each_chunk(cpu, &mut out[..self.num_rows * row_bytes], PATCH_ROWS * row_bytes, |i, out| {
            self.for_each_patch(i * PATCH_ROWS, cols, |row, start, values| {
                // The last patch has fewer rows.
                if let Some(out) = out.chunks_exact_mut(row_bytes).nth(row) {
                    if let Some(weights) = weights {
                        elementwise::scale_stepwise(cpu.level(), dtype, weights[i * PATCH_ROWS + row], values);
                    }
                    convert::narrow(cpu.level(), dtype, values, &mut out[start * dtype.size()..][..values.len() * dtype.size()]);
                }
            });
        });
    }

    /// Rounds the tile's `y` once to `dtype` and adds its rows, times their weights, to those rows of `sum [rows, cols]` that `to` names: the first to
    /// arrive is `w * y`, the others `fma(w, y, sum)`. With `is_stepwise`, `w * y` is rounded to `dtype` before it is added.
    pub(crate) fn add_to(&self, cpu: &Cpu, cols: usize, dtype: DType, is_stepwise: bool, to: &[Addend], sum: &mut [f32]) {
        // Each task has the rows of `sum` from its first row to that of the next task: the list ascends.
        let mut tasks = Vec::with_capacity(to.len().div_ceil(PATCH_ROWS));
        let (mut rest, mut start) = (sum, 0);
        for (i, rows) in to.chunks(PATCH_ROWS).enumerate() {
            let end = to.get((i + 1) * PATCH_ROWS).map_or(start + rest.len() / cols, |next| next.row);
            let (mine, others) = std::mem::take(&mut rest).split_at_mut((end - start) * cols);
            tasks.push((i * PATCH_ROWS, rows, start, mine));
            (rest, start) = (others, end);
        }
        let work = |(first, rows, start, sum): (usize, &[Addend], usize, &mut [f32])| {
            self.for_each_patch(first, cols, |row, col, values| {
                let Some(addend) = rows.get(row) else { return };
                let sum = &mut sum[(addend.row - start) * cols + col..][..values.len()];
                let weight = if is_stepwise {
                    elementwise::scale_stepwise(cpu.level(), dtype, addend.weight, values);
                    1.0
                } else {
                    elementwise::round(cpu.level(), dtype, values);
                    addend.weight
                };
                if addend.is_first {
                    elementwise::scale(cpu.level(), weight, values);
                    sum.copy_from_slice(values);
                } else {
                    elementwise::add_scaled(cpu.level(), weight, values, sum);
                }
            });
        };
        if cpu.is_serial() || tasks.len() <= 1 {
            tasks.into_iter().for_each(work);
        } else {
            cpu.install(|| tasks.into_par_iter().for_each(work));
        }
    }

    /// Transposes 16 rows of `y` from `first` on back, and hands out pieces of them: row in the patch, first column, values.
    fn for_each_patch(&self, first: usize, cols: usize, mut each: impl FnMut(usize, usize, &mut [f32])) {
        let mut patch = [[0f32; PATCH_COLS]; PATCH_ROWS];
        for start in (0..cols).step_by(PATCH_COLS) {
            let width = PATCH_COLS.min(cols - start);
            for c in 0..width {
                let y = &self.y[(start + c) * self.padded_rows + first..][..PATCH_ROWS];
                for (patch, y) in patch.iter_mut().zip(y) {
                    patch[c] = *y;
                }
            }
            for (row, values) in patch.iter_mut().enumerate() {
                each(row, start, &mut values[..width]);
            }
        }
    }
}

thread_local! {
    /// The up product of one task, and one widened block of weights.
    static UP: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static BLOCK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The first `len` elements, after growing the vector if it is shorter.
pub(crate) fn grown<T: Copy + Default>(values: &mut Vec<T>, len: usize) -> &mut [T] {
    if values.len() < len {
        values.resize(len, T::default());
    }
    &mut values[..len]
}

/// Tasks for `rows` rows of weights: about [`TASK_ROWS`] each, and as many for each thread.
fn num_tasks(cpu: &Cpu, rows: usize) -> usize {
    let tasks = rows.div_ceil(TASK_ROWS);
    let even = tasks.next_multiple_of(cpu.num_threads());
    // One row alone would take another kernel, with another order of the sum.
    if rows >= 2 * even { even } else { 1 }
}

/// `out = W[part] x`, all blocks of the sum in order.
fn multiply(cpu: &Cpu, weights: &Matrix, part: Range<usize>, x: &[f32], out: &mut [f32], m: usize) {
    BLOCK.with_borrow_mut(|block| {
        for cols in gemm::blocks(weights.cols) {
            let block = grown(block, part.len() * cols.len());
            widen(cpu, weights, part.clone(), cols.clone(), block);
            gemm::product(block, &x[cols.start * m..cols.end * m], out, cols.len(), m, cols.start == 0);
        }
    });
}

/// A block of a matrix as f32, fp8 times its scales.
fn widen(cpu: &Cpu, weights: &Matrix, rows: Range<usize>, cols: Range<usize>, out: &mut [f32]) {
    let size = weights.dtype.size();
    let scales_per_row = weights.cols.div_ceil(WEIGHT_BLOCK);
    for (row, out) in rows.zip(out.chunks_exact_mut(cols.len())) {
        let start = (row * weights.cols + cols.start) * size;
        convert::widen(cpu.level(), weights.dtype, &weights.bytes[start..][..cols.len() * size], out);
        if weights.dtype.is_fp8() {
            let scales = &weights.scales[row / WEIGHT_BLOCK * scales_per_row..][..scales_per_row];
            let scales = &scales[cols.start / WEIGHT_BLOCK..];
            // The first scale block may have begun before this block of columns.
            let head = (WEIGHT_BLOCK - cols.start % WEIGHT_BLOCK).min(out.len());
            let (first, rest) = out.split_at_mut(head);
            elementwise::scale(cpu.level(), scales[0], first);
            elementwise::scale_by(cpu.level(), &scales[1..], WEIGHT_BLOCK, rest);
        }
    }
}

/// Splits `data [rows, width]` into `num` nearly equal parts of rows and works on each.
fn for_each_part(cpu: &Cpu, data: &mut [f32], width: usize, num: usize, work: impl Fn(Range<usize>, &mut [f32]) + Sync + Send) {
    let mut rest = data;
    let len = rest.len() / width;
    let parts: Vec<_> = gemm::parts(len, num)
        .map(|part| {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(part.len() * width);
            rest = others;
            (part, mine)
        })
        .collect();
    if cpu.is_serial() || num <= 1 {
        parts.into_iter().for_each(|(part, data)| work(part, data));
    } else {
        cpu.install(|| parts.into_par_iter().for_each(|(part, data)| work(part, data)));
    }
}

/// Works on each chunk of `len` bytes.
pub(crate) fn for_each_chunk(cpu: &Cpu, data: &mut [u8], len: usize, work: impl Fn(usize, &mut [u8]) + Sync + Send) {
    if cpu.is_serial() || data.len() <= len {
        data.chunks_mut(len).enumerate().for_each(|(i, data)| work(i, data));
    } else {
        cpu.install(|| data.par_chunks_mut(len).enumerate().for_each(|(i, data)| work(i, data)));
    }
}
