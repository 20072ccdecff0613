//! cast on the CPU: matrices in batches, batches in tiles, tiles on threads.
//!
//! A tile is read row by row; each row is scaled and rounded into a buffer of the thread, stored to the row copy from there, and the buffer is
//! transposed into the column copy. Greatest magnitudes are maxima of bits, so their order does not matter.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};

use super::check::{Known, offset};
use super::formula::{Scale, current};
use super::kernels::{amax_columns, amax_row, cast_row, scale_row};
use super::layout::{PACKED, Side, Sums, padded};
use super::tile::{Beside, LINES, Shared, TILE_COLUMNS, TILE_ROWS, store, tile_stride, transpose};
use super::{Block, OP, Operands, ScaleLayout, Scaling};
use crate::backend::Cpu;
use crate::cpu::Level;
use crate::cpu::convert::widen;
use crate::cpu::copy::{Store, finish};
use crate::error::Result;
use crate::tensor::{TensorView, TensorViewMut};

/// Matrices whose tiles are shared out together (arbitrary: their descriptions take 30 KiB of stack, and one fork serves them all).
const BATCH: usize = 128;
/// Output bytes from which stores go past the caches: less is likely still in the L3 when it is read (arbitrary: half of a common 32 MiB).
const STREAM_BYTES: usize = 16 << 20;
/// Rows of column scales in a tile (derived: the smallest blocks have 32 rows).
const GROUPS: usize = TILE_ROWS / 32;

/// One matrix, with its part of every tensor.
struct Job<'a> {
    x: &'a [u8],
    x_stride: usize,
    rows: usize,
    padded: usize,
    columns: usize,
    scale: f32,
    row: Option<Copy2d<'a>>,
    column: Option<Copy2d<'a>>,
    amax: Option<&'a mut [u8]>,
    scale_inv: Option<&'a mut [u8]>,
}

/// One copy of a matrix. Strides and offsets are in elements.
struct Copy2d<'a> {
    data: Shared<'a>,
    first: usize,
    stride: usize,
    scales: Option<Scales<'a>>,
}

/// The block scales of a copy. Strides and offsets are in bytes.
struct Scales<'a> {
    data: Shared<'a>,
    first: usize,
    line_stride: usize,
    /// Between blocks of a line; between words when packed.
    block_stride: usize,
    num_blocks: usize,
    is_packed: bool,
    is_f32: bool,
}

/// Casts a checked list.
pub(super) fn list(cpu: &Cpu, known: &Known, matrices: &mut [Operands<'_>]) -> Result<()> {
    let bytes = matrices.iter().map(output_bytes).fold(0, usize::saturating_add);
    for matrices in matrices.chunks_mut(BATCH) {
        let mut batch = Batch::new(cpu.level(), known, bytes);
        for matrix in matrices {
            let rows = matrix.x.shape()[0];
            let mut parts = Parts::new(matrix)?;
            batch.push(parts.next(known, 0, rows, false));
        }
        batch.run(cpu);
    }
    Ok(())
}

/// Casts a checked group.
pub(super) fn grouped(cpu: &Cpu, known: &Known, all: &mut Operands<'_>, offsets: &TensorView<'_>) -> Result<()> {
    let bytes = output_bytes(all);
    let num_matrices = offsets.shape()[0] - 1;
    if let Some(status) = all.status.as_mut().filter(|_| num_matrices > 0) {
        status.host_mut(OP, "status")?.copy_from_slice(&super::status::GOOD.to_le_bytes());
    }
    let offset_bytes = offsets.host(OP, "offsets")?;
    let at = |i| offset(offsets.dtype(), offset_bytes, i) as usize;
    let mut parts = Parts::new(all)?;
    for first in (0..num_matrices).step_by(BATCH) {
        let mut batch = Batch::new(cpu.level(), known, bytes);
        for i in first..num_matrices.min(first + BATCH) {
            batch.push(parts.next(known, at(i), at(i + 1) - at(i), true));
        }
        batch.run(cpu);
    }
    Ok(())
}

fn output_bytes(o: &Operands<'_>) -> usize {
    [&o.row, &o.column].into_iter().flatten().map(|view| view.layout().extent_bytes()).fold(0, usize::saturating_add)
}

/// Hands out the matrices of operands one after the other.
struct Parts<'a> {
    x: &'a [u8],
    x_stride: usize,
    columns: usize,
    /// Extents of the matrices handed out.
    before: Sums,
    row: Option<Output<'a>>,
    column: Option<Output<'a>>,
    scale: Option<&'a [u8]>,
    amax: Option<&'a mut [u8]>,
    scale_inv: Option<&'a mut [u8]>,
}

/// A copy of all matrices and the scales of it: bytes and row stride of each.
#[derive(Clone, Copy)]
struct Output<'a> {
    data: Shared<'a>,
    stride: usize,
    scales: Option<(Shared<'a>, usize)>,
    scale_bytes: usize,
}

impl<'a> Output<'a> {
    fn new(data: &'a mut Option<TensorViewMut<'_>>, scales: &'a mut Option<TensorViewMut<'_>>) -> Result<Option<Self>> {
        let Some(data) = data else { return Ok(None) };
        let stride = data.strides()[0];
        let scale_bytes = scales.as_ref().map_or(0, |s| s.dtype().size());
        let scales = match scales {
            None => None,
            Some(s) => {
                let stride = s.strides()[0];
                Some((Shared::new(s.host_mut(OP, "scales")?), stride))
            }
        };
        Ok(Some(Output { data: Shared::new(data.host_mut(OP, "output")?), stride, scales, scale_bytes }))
    }
}

/// Takes the next four bytes of a tensor with one f32 for each matrix.
fn next_f32<'a>(all: &mut Option<&'a mut [u8]>) -> Option<&'a mut [u8]> {
    let (one, rest) = all.take()?.split_at_mut(size_of::<f32>());
    *all = Some(rest);
    Some(one)
}

impl<'a> Parts<'a> {
    fn new(o: &'a mut Operands<'_>) -> Result<Self> {
        let scale = o.scale.as_ref().map(|s| s.host(OP, "scale")).transpose()?;
        Ok(Parts {
            x: o.x.host(OP, "x")?,
            x_stride: o.x.strides()[0],
            columns: o.x.shape()[1],
            before: Sums::default(),
            row: Output::new(&mut o.row, &mut o.row_scales)?,
            column: Output::new(&mut o.column, &mut o.column_scales)?,
            scale,
            amax: o.amax.as_mut().map(|a| a.host_mut(OP, "amax")).transpose()?,
            scale_inv: o.scale_inv.as_mut().map(|s| s.host_mut(OP, "scale_inv")).transpose()?,
        })
    }

    /// The next matrix: `rows` rows of `x` from `first_row` on.
    fn next(&mut self, known: &Known, first_row: usize, rows: usize, is_grouped: bool) -> Job<'a> {
        let before = self.before;
        self.before = before.with(rows, known.pad_rows, &known.scaling).expect("checked");
        let padded = padded(rows, known.pad_rows).expect("checked");
        let columns = self.columns;
        let is_empty = rows == 0 || columns == 0;
        let copy = |output: Option<Output<'a>>, side: Side| {
            let output = output.filter(|_| !is_empty)?;
            let (first, stride) = match side {
                Side::Row => (before.rows * output.stride, output.stride),
                Side::Column if is_grouped => (before.rows * columns, padded),
                Side::Column => (0, output.stride),
            };
            Some(Copy2d { data: output.data, first, stride, scales: scales(&output, known, side, &before, padded, columns, is_grouped) })
        };
        let scale = self.scale.as_mut().map(|all| {
            let (one, rest) = all.split_first_chunk().expect("checked");
            *all = rest;
            f32::from_le_bytes(*one)
        });
        Job {
            x: if is_empty { &[] } else { &self.x[first_row * self.x_stride * known.from.size()..] },
            x_stride: self.x_stride,
            rows,
            padded,
            columns,
            scale: scale.unwrap_or(1.0),
            row: copy(self.row, Side::Row),
            column: copy(self.column, Side::Column),
            amax: next_f32(&mut self.amax),
            scale_inv: next_f32(&mut self.scale_inv),
        }
    }
}

/// Where the scales of one matrix lie.
fn scales<'a>(
    output: &Output<'a>,
    known: &Known,
    side: Side,
    before: &Sums,
    padded: usize,
    columns: usize,
    is_grouped: bool,
) -> Option<Scales<'a>> {
    let Scaling::Block { block, layout, .. } = known.scaling else { return None };
    let (data, stride) = output.scales?;
    let size = output.scale_bytes;
    let (lines, length) = block.extents();
    let num_blocks = if side == Side::Row { columns } else { padded }.div_ceil(length);
    // In elements: where this matrix starts, from line to line, from block to block.
    let (first, line_stride, block_stride) = match (layout, side) {
        (ScaleLayout::RowMajor, Side::Row) => (before.row_blocks * stride, stride, 1),
        (ScaleLayout::RowMajor, Side::Column) if is_grouped => (columns.div_ceil(lines) * before.column_blocks, num_blocks, 1),
        (ScaleLayout::RowMajor, Side::Column) => (0, stride, 1),
        (ScaleLayout::ColumnMajor, Side::Row) => (before.row_blocks, 1, stride),
        (ScaleLayout::ColumnMajor, Side::Column) => (before.column_blocks * stride, 1, stride),
        (ScaleLayout::PackedE8m0, Side::Row) => (before.rows, 1, stride),
        (ScaleLayout::PackedE8m0, Side::Column) => (before.column_words * stride, 1, stride),
    };
    Some(Scales {
        data,
        first: first * size,
        line_stride: line_stride * size,
        block_stride: block_stride * size,
        num_blocks,
        is_packed: layout == ScaleLayout::PackedE8m0,
        is_f32: size == size_of::<f32>() && layout != ScaleLayout::PackedE8m0,
    })
}

impl Scales<'_> {
    /// Writes the scale of `block` of `line`; when packed, with the last block of a line the rest of its word.
    fn put(&self, line: usize, block: usize, scale: &Scale) {
        let at = self.first + line * self.line_stride;
        let put = |at: usize, bytes: &[u8]| {
            // SAFETY: the bytes of one scale, which only the thread of the one tile that holds its block writes.
            unsafe { self.data.slice(at, bytes.len()) }.copy_from_slice(bytes);
        };
        if self.is_packed {
            let byte = block % PACKED;
            let end = if block + 1 == self.num_blocks { PACKED } else { byte + 1 };
            put(at + block / PACKED * self.block_stride + byte, &[scale.e8m0, 0, 0, 0][..end - byte]);
        } else if self.is_f32 {
            put(at + block * self.block_stride, &scale.stored.to_le_bytes());
        } else {
            put(at + block * self.block_stride, &[scale.e8m0]);
        }
    }

    /// Writes the scale of a square block whose lines start at `first_line`.
    fn put_square(&self, first_line: usize, num_lines: usize, block: usize, scale: &Scale) {
        if self.is_packed {
            (first_line..first_line + num_lines).for_each(|line| self.put(line, block, scale));
        } else {
            self.put(first_line / TILE_ROWS, block, scale);
        }
    }
}

/// Buffers of a thread.
struct Scratch {
    /// A tile of output elements, rows `tile_stride` apart.
    narrow: Vec<u8>,
    /// A tile of input elements as f32, for block scales.
    wide: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { narrow: Vec::new(), wide: Vec::new() }) };
}

/// A tile of a matrix.
#[derive(Clone, Copy)]
struct Tile {
    first_row: usize,
    first_column: usize,
    num_rows: usize,
    num_columns: usize,
}

struct Batch<'a> {
    level: Level,
    known: &'a Known,
    stream: bool,
    jobs: [Option<Job<'a>>; BATCH],
    num_jobs: usize,
    /// First tile of each job, and the number of all tiles.
    first_tile: [usize; BATCH + 1],
    amax: [AtomicU32; BATCH],
}

impl<'a> Batch<'a> {
    fn new(level: Level, known: &'a Known, output_bytes: usize) -> Self {
        Batch {
            level,
            known,
            stream: output_bytes >= STREAM_BYTES,
            jobs: [const { None }; BATCH],
            num_jobs: 0,
            first_tile: [0; BATCH + 1],
            amax: [const { AtomicU32::new(0) }; BATCH],
        }
    }

    fn push(&mut self, job: Job<'a>) {
        let i = self.num_jobs;
        let num_tiles = job.padded.div_ceil(TILE_ROWS) * job.columns.div_ceil(TILE_COLUMNS);
        self.first_tile[i + 1] = self.first_tile[i] + num_tiles;
        self.jobs[i] = Some(job);
        self.num_jobs += 1;
    }

    fn run(&mut self, cpu: &Cpu) {
        let num_tiles = self.first_tile[self.num_jobs];
        if let Scaling::Current { epsilon, power_of_two } = self.known.scaling {
            cpu.for_each_part(num_tiles, |tile| self.measure(tile));
            for (job, amax) in self.jobs.iter_mut().flatten().zip(&self.amax) {
                job.scale = current(f32::from_bits(amax.load(Ordering::Relaxed)), self.known.to, epsilon, power_of_two);
            }
        }
        cpu.for_each_part(num_tiles, |tile| self.cast(tile));
        for (job, amax) in self.jobs.iter_mut().flatten().zip(&self.amax) {
            if let Some(stored) = &mut job.amax {
                let is_empty = job.rows == 0 || job.columns == 0;
                let old = if self.known.reset_amax { 0 } else { i32::from_le_bytes(stored[..4].try_into().expect("four bytes")) };
                let new = if is_empty { old } else { old.max(amax.load(Ordering::Relaxed) as i32) };
                stored.copy_from_slice(&new.to_le_bytes());
            }
            if let Some(stored) = &mut job.scale_inv {
                stored.copy_from_slice(&(1.0 / job.scale).to_le_bytes());
            }
        }
    }

    /// The job of a tile, its number, and the tile.
    fn locate(&self, tile: usize) -> (&Job<'a>, usize, Tile) {
        let job_idx = self.first_tile[..=self.num_jobs].partition_point(|&first| first <= tile) - 1;
        let job = self.jobs[job_idx].as_ref().expect("a job of this batch");
        (job, job_idx, job.tile(tile - self.first_tile[job_idx]))
    }

    fn measure(&self, tile: usize) {
        let (job, job_idx, tile) = self.locate(tile);
        let mut amax = 0;
        for row in 0..job.valid_rows(&tile) {
            amax = amax_row(self.level, self.known.from, job.source(self.known, &tile, row)).max(amax);
        }
        self.amax[job_idx].fetch_max(amax, Ordering::Relaxed);
    }

    fn cast(&self, tile_idx: usize) {
        let (job, job_idx, tile) = self.locate(tile_idx);
        let next = (tile_idx + 1 < self.first_tile[job_idx + 1]).then(|| job.tile(tile_idx + 1 - self.first_tile[job_idx]));
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { narrow, wide } = scratch;
            let bytes = TILE_ROWS * tile_stride(self.known.to.size());
            if narrow.len() < bytes {
                narrow.resize(bytes, 0);
            }
            let narrow = &mut narrow[..bytes];
            let amax = match self.known.scaling {
                Scaling::Block { block, .. } => {
                    wide.resize(TILE_ROWS * TILE_COLUMNS, 0.0);
                    match block {
                        Block::Square128 => self.cast_squares(job, &tile, narrow, wide),
                        Block::Row128 | Block::Row32 => self.cast_rows(job, &tile, block.extents().1, narrow, wide),
                    }
                }
                Scaling::Given | Scaling::Current { .. } => self.cast_plain(job, &tile, next.as_ref(), narrow),
            };
            self.amax[job_idx].fetch_max(amax, Ordering::Relaxed);
        });
        if self.stream {
            finish(Store::Streaming);
        }
    }

    /// One scale for the whole matrix.
    fn cast_plain(&self, job: &Job<'_>, tile: &Tile, next: Option<&Tile>, narrow: &mut [u8]) -> u32 {
        let size = self.known.to.size();
        let valid = job.valid_rows(tile);
        let mut amax = 0;
        for row in 0..tile.num_rows {
            let line = &mut narrow[row * tile_stride(size)..][..tile.num_columns * size];
            if row >= valid {
                line.fill(0);
                self.store_row(job, tile, row, line);
                continue;
            }
            let next = next.filter(|next| row < job.valid_rows(next));
            let next = next.map_or(&[][..], |next| job.source(self.known, next, row));
            let source = job.source(self.known, tile, row);
            let mut beside = Beside { row: self.row_of(job, tile, row), stream: self.stream, next };
            amax = cast_row(self.level, self.known.from, self.known.to, source, job.scale, line, &mut beside).max(amax);
        }
        self.store_columns(job, tile, narrow);
        amax
    }

    /// A scale for each block of `length` elements of a row, and others for each block of as many rows of a column.
    fn cast_rows(&self, job: &Job<'_>, tile: &Tile, length: usize, narrow: &mut [u8], wide: &mut [f32]) -> u32 {
        let (from, to) = (self.known.from, self.known.to);
        let Scaling::Block { formula, .. } = self.known.scaling else { unreachable!("called for block scales") };
        let valid = job.valid_rows(tile);
        let mut amax = 0;
        let mut column_amax = [[0u32; TILE_COLUMNS]; GROUPS];
        let mut factors = [[0f32; TILE_COLUMNS]; GROUPS];
        for row in 0..tile.num_rows {
            let x = &mut wide[row * TILE_COLUMNS..][..tile.num_columns];
            self.widen_row(job, tile, row, valid, x);
            let blocks = x.chunks(length).zip(column_amax[row / length].chunks_mut(length)).zip(factors[0].chunks_mut(length));
            for (b, ((x, column_amax), factors)) in blocks.enumerate() {
                let block_amax = amax_columns(self.level, x, column_amax);
                amax = amax.max(block_amax);
                if let Some(scales) = job.row.as_ref().and_then(|copy| copy.scales.as_ref()) {
                    let scale = formula.scale(f32::from_bits(block_amax), from, to);
                    scales.put(tile.first_row + row, tile.first_column / length + b, &scale);
                    factors.fill(scale.scale);
                }
            }
            if job.row.is_some() {
                let line = &mut narrow[..tile.num_columns];
                scale_row(self.level, to, x, &factors[0], line);
                self.store_row(job, tile, row, line);
            }
        }
        if let Some(scales) = job.column.as_ref().and_then(|copy| copy.scales.as_ref()) {
            for group in 0..tile.num_rows.div_ceil(length) {
                for c in 0..tile.num_columns {
                    let scale = formula.scale(f32::from_bits(column_amax[group][c]), from, to);
                    scales.put(tile.first_column + c, tile.first_row / length + group, &scale);
                    factors[group][c] = scale.scale;
                }
            }
            for row in 0..tile.num_rows {
                let x = &wide[row * TILE_COLUMNS..][..tile.num_columns];
                let line = &mut narrow[row * tile_stride(to.size())..][..tile.num_columns];
                scale_row(self.level, to, x, &factors[row / length], line);
            }
            self.store_columns(job, tile, narrow);
        }
        amax
    }

    /// A scale for each block of 128 x 128; both copies have the same.
    fn cast_squares(&self, job: &Job<'_>, tile: &Tile, narrow: &mut [u8], wide: &mut [f32]) -> u32 {
        let (from, to) = (self.known.from, self.known.to);
        let Scaling::Block { formula, .. } = self.known.scaling else { unreachable!("called for block scales") };
        let valid = job.valid_rows(tile);
        let mut column_amax = [0u32; TILE_COLUMNS];
        for row in 0..tile.num_rows {
            let x = &mut wide[row * TILE_COLUMNS..][..tile.num_columns];
            self.widen_row(job, tile, row, valid, x);
            amax_columns(self.level, x, &mut column_amax);
        }
        let mut factors = [0f32; TILE_COLUMNS];
        let mut amax = 0;
        let blocks = column_amax[..tile.num_columns].chunks(TILE_ROWS).zip(factors.chunks_mut(TILE_ROWS));
        for (b, (column_amax, factors)) in blocks.enumerate() {
            let block_amax = column_amax.iter().copied().max().unwrap_or(0);
            amax = amax.max(block_amax);
            let scale = formula.scale(f32::from_bits(block_amax), from, to);
            factors.fill(scale.scale);
            let first_column = tile.first_column + b * TILE_ROWS;
            if let Some(scales) = job.row.as_ref().and_then(|copy| copy.scales.as_ref()) {
                scales.put_square(tile.first_row, tile.num_rows, first_column / TILE_ROWS, &scale);
            }
            if let Some(scales) = job.column.as_ref().and_then(|copy| copy.scales.as_ref()) {
                scales.put_square(first_column, column_amax.len(), tile.first_row / TILE_ROWS, &scale);
            }
        }
        for row in 0..tile.num_rows {
            let x = &wide[row * TILE_COLUMNS..][..tile.num_columns];
            let line = &mut narrow[row * tile_stride(to.size())..][..tile.num_columns];
            scale_row(self.level, to, x, &factors, line);
            self.store_row(job, tile, row, line);
        }
        self.store_columns(job, tile, narrow);
        amax
    }

    fn widen_row(&self, job: &Job<'_>, tile: &Tile, row: usize, valid: usize, x: &mut [f32]) {
        if row < valid {
            widen(self.level, self.known.from, job.source(self.known, tile, row), x);
        } else {
            x.fill(0.0);
        }
    }

    /// A row of a tile in the row copy; empty if that is not wanted.
    #[allow(clippy::mut_from_ref)] // the parts of different tiles do not overlap
    fn row_of<'j>(&self, job: &'j Job<'_>, tile: &Tile, row: usize) -> &'j mut [u8] {
        let Some(copy) = &job.row else { return &mut [] };
        let size = self.known.to.size();
        let at = copy.first + (tile.first_row + row) * copy.stride + tile.first_column;
        // SAFETY: a row of this tile, which only the thread of this tile takes, and once at a time.
        unsafe { copy.data.slice(at * size, tile.num_columns * size) }
    }

    fn store_row(&self, job: &Job<'_>, tile: &Tile, row: usize, line: &[u8]) {
        if job.row.is_some() {
            store(self.level, self.row_of(job, tile, row), line, self.stream);
        }
    }

    fn store_columns(&self, job: &Job<'_>, tile: &Tile, narrow: &[u8]) {
        let Some(copy) = &job.column else { return };
        let size = self.known.to.size();
        for column in (0..tile.num_columns).step_by(LINES) {
            let mut lines: [&mut [u8]; LINES] = std::array::from_fn(|i| {
                if column + i >= tile.num_columns {
                    return &mut [][..];
                }
                let at = copy.first + (tile.first_column + column + i) * copy.stride + tile.first_row;
                // SAFETY: a column of this tile, which only the thread of this tile takes, and once at a time.
                unsafe { copy.data.slice(at * size, tile.num_rows * size) }
            });
            transpose(self.level, size, narrow, column, tile.num_rows, &mut lines, self.stream);
        }
    }
}

impl Job<'_> {
    /// Tile `tile_idx`, the tiles of a row of tiles one after the other.
    fn tile(&self, tile_idx: usize) -> Tile {
        let across = self.columns.div_ceil(TILE_COLUMNS);
        let first_row = tile_idx / across * TILE_ROWS;
        let first_column = tile_idx % across * TILE_COLUMNS;
        let num_rows = TILE_ROWS.min(self.padded - first_row);
        Tile { first_row, first_column, num_rows, num_columns: TILE_COLUMNS.min(self.columns - first_column) }
    }

    /// Rows of a tile that are not padding.
    fn valid_rows(&self, tile: &Tile) -> usize {
        tile.num_rows.min(self.rows.saturating_sub(tile.first_row))
    }

    /// A row of a tile in the input.
    fn source(&self, known: &Known, tile: &Tile, row: usize) -> &[u8] {
        let size = known.from.size();
        let at = (tile.first_row + row) * self.x_stride + tile.first_column;
        &self.x[at * size..][..tile.num_columns * size]
    }
}
