//! cast on a GPU: parameters from checked operands, and the launches of a call.

use super::check::Known;
use super::tuning::{self, LIST_SIZES, Tile};
use super::{Block, Formula, OP, Operands, Options, ScaleLayout, Scaling};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Constant, Geometry, Kernels, Program, Source, Spec, Targets};
use crate::kernel_source;
use crate::tensor::{DType, TensorView, TensorViewMut};

static KERNELS: Kernels<Variant> = Kernels::new();

macro_rules! sources {
    ($($kernel:literal),*) => {
        &[
            kernel_source!("gpu/device/platform.cuh"),
            kernel_source!("gpu/device/float.cuh"),
            kernel_source!("gpu/device/fp8.cuh"),
            kernel_source!("gpu/device/copy.cuh"),
            kernel_source!("ops/cast/formula.cuh"),
            kernel_source!("ops/cast/patch.cuh"),
            kernel_source!("ops/cast/locate.cuh"),
            $(kernel_source!($kernel)),*
        ]
    };
}
const TILE_SOURCES: &[Source] = sources!("ops/cast/tile.cu");
const MATRICES_SOURCES: &[Source] = sources!("ops/cast/matrices.cu");
const BLOCK_SOURCES: &[Source] = sources!("ops/cast/search.cuh", "ops/cast/block.cu");

/// Threads of a block of `cast_matrices` (arbitrary, as in matrices.cu).
const MATRIX_THREADS: u32 = 128;

/// Everything that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    kind: Kind,
    from: DType,
    to: DType,
    /// Matrices of a list that the parameters hold; 0 for a group.
    list: u16,
    scales: Scales,
    tile: Tile,
}

/// Where scales come from, as far as kernels differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Scales {
    Given,
    /// From the matrices' own greatest magnitudes.
    Current,
    Blocks {
        block: Block,
        formula: Formulas,
        stored: Stored,
    },
}

/// `Formula` of formula.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Formulas {
    TransformerEngine,
    DeepGemm,
    DeepGemmPowerOfTwo,
    Mx,
}

impl Formulas {
    fn of(formula: Formula) -> Self {
        match formula {
            Formula::TransformerEngine { .. } => Formulas::TransformerEngine,
            Formula::DeepGemm { power_of_two: false } => Formulas::DeepGemm,
            Formula::DeepGemm { power_of_two: true } => Formulas::DeepGemmPowerOfTwo,
            Formula::Mx => Formulas::Mx,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Formulas::TransformerEngine => "TRANSFORMER_ENGINE",
            Formulas::DeepGemm => "DEEP_GEMM",
            Formulas::DeepGemmPowerOfTwo => "DEEP_GEMM_POWER_OF_TWO",
            Formulas::Mx => "MX",
        }
    }
}

/// `Stored` of locate.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stored {
    RowMajorF32 = 0,
    RowMajorE8m0 = 1,
    ColumnMajorF32 = 2,
    ColumnMajorE8m0 = 3,
    Packed = 4,
}

impl Stored {
    fn of(layout: ScaleLayout, dtype: DType) -> Self {
        match (layout, dtype) {
            (ScaleLayout::PackedE8m0, _) => Stored::Packed,
            (ScaleLayout::RowMajor, DType::F32) => Stored::RowMajorF32,
            (ScaleLayout::RowMajor, _) => Stored::RowMajorE8m0,
            (ScaleLayout::ColumnMajor, DType::F32) => Stored::ColumnMajorF32,
            (ScaleLayout::ColumnMajor, _) => Stored::ColumnMajorE8m0,
        }
    }
}

impl Scales {
    fn of(known: &Known, o: &Operands<'_>) -> Self {
        match known.scaling {
            Scaling::Given => Scales::Given,
            Scaling::Current { .. } => Scales::Current,
            Scaling::Block { block, formula, layout } => {
                let dtype = o.row_scales.as_ref().or(o.column_scales.as_ref()).map_or(DType::F32, |scales| scales.dtype());
                Scales::Blocks { block, formula: Formulas::of(formula), stored: Stored::of(layout, dtype) }
            }
        }
    }

    fn name(self) -> String {
        match self {
            Scales::Given => "given scale".into(),
            Scales::Current => "current scale".into(),
            Scales::Blocks { block, formula, stored } => {
                let (lines, length) = block.extents();
                format!("{lines}x{length} {} {stored:?}", formula.name().to_lowercase())
            }
        }
    }

    fn tile(self, from: DType, to: DType, is_native: bool, mean_rows: usize) -> Tile {
        match self {
            Scales::Blocks { .. } => tuning::block_tile(from, is_native),
            Scales::Given | Scales::Current => tuning::tile(from, to, is_native, mean_rows),
        }
    }
}

impl Scales {
    /// Of the columns of a part. With block scales they leave without shared memory.
    fn smem_bytes(self, tile: Tile, to: DType, has_column: bool) -> u32 {
        if has_column && !matches!(self, Scales::Blocks { .. }) { tile.smem_bytes(to) } else { 0 }
    }
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// What is done once a matrix, before its tiles.
    Before,
    /// And after them.
    After,
    Tiles {
        row: bool,
        column: bool,
        aligned: bool,
    },
}

impl Kind {
    /// What is done once a matrix knows no tiles: one kernel is enough.
    fn tile(self, tile: Tile) -> Tile {
        if matches!(self, Kind::Tiles { .. }) { tile } else { tuning::NO_TILE }
    }
}

impl Spec for Variant {
    fn program(&self) -> Program {
        let Variant { kind, from, to, list, scales, tile } = *self;
        let form = if list > 0 { format!("list of {list}") } else { "grouped".into() };
        let (block_lines, block_length, stored) = match scales {
            Scales::Blocks { block, stored, .. } => (block.extents().0, block.extents().1, stored as i64),
            Scales::Given | Scales::Current => (0, 0, 0),
        };
        let mut constants = vec![
            Constant::Type("FROM", from.name()),
            Constant::Type("TO", to.name()),
            Constant::Bool("LIST", list > 0),
            Constant::Bool("CURRENT", scales == Scales::Current),
            Constant::Int("BLOCK_LINES", block_lines as i64),
            Constant::Int("BLOCK_LENGTH", block_length as i64),
            Constant::Int("STORED", stored),
            Constant::Int("TILE_ROWS", tile.rows.into()),
            Constant::Int("TILE_COLUMNS", tile.columns.into()),
            Constant::Int("TILES_DOWN", tile.down.into()),
            Constant::Int("STRIP_COLUMNS", tile.strip_columns().into()),
            Constant::Int("MAX_MATRICES", list.max(1).into()),
        ];
        let (types, scale) = (format!("{from} to {to}"), scales.name());
        let Kind::Tiles { row, column, aligned } = kind else {
            constants.push(Constant::Bool("FINISH", kind == Kind::After));
            return Program {
                name: format!("cast matrices {types}, {}, {scale}, {form}", if kind == Kind::After { "after" } else { "before" }),
                entry: "cast_matrices",
                sources: MATRICES_SOURCES,
                constants,
                threads: MATRIX_THREADS,
                smem_bytes: 0,
                max_registers: 64, // arbitrary: short
                targets: Targets::All,
            };
        };
        constants.extend([
            Constant::Int("BLOCKS", tile.blocks.into()),
            Constant::Bool("ROW", row),
            Constant::Bool("COLUMN", column),
            Constant::Bool("ALIGNED", aligned),
        ]);
        let copies = match (row, column) {
            (true, true) => "both",
            (true, false) => "row",
            (false, true) => "column",
            (false, false) => "amax",
        };
        let Tile { rows, columns, down, across, blocks } = tile;
        let beside = if across > 1 { format!("x{across}") } else { String::new() };
        let unaligned = if aligned { "" } else { ", unaligned" };
        let (entry, sources) = match scales {
            Scales::Blocks { formula, .. } => {
                constants.push(Constant::Int("FORMULA", formula as i64));
                ("cast_blocks", BLOCK_SOURCES)
            }
            Scales::Given | Scales::Current => ("cast_tile", TILE_SOURCES),
        };
        Program {
            name: format!("cast tiles {types}, {copies}, {scale}, {form}{unaligned} {rows}x{columns}x{down}{beside}, {blocks} resident"),
            entry,
            sources,
            constants,
            threads: tile.threads(),
            smem_bytes: scales.smem_bytes(tile, to, column),
            max_registers: tile.max_registers(),
            // Tiles that count on instructions for FP8 are for where they are.
            targets: if to.is_fp8() && tile.blocks > 1 { Targets::Hopper } else { Targets::All },
        }
    }
}

/// `Matrix` of locate.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Matrix {
    x: u64,
    row: u64,
    column: u64,
    scale: u64,
    amax: u64,
    scale_inv: u64,
    x_stride: u64,
    row_stride: u64,
    column_stride: u64,
    num_rows: u32,
    num_columns: u32,
    first_part: u32,
    padding: u32,
}

/// `Matrix` of locate.cuh with block scales.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct BlockMatrix {
    row_scales: u64,
    column_scales: u64,
    row_scales_stride: u64,
    column_scales_stride: u64,
    matrix: Matrix,
}

/// What the kernels take of a matrix.
trait Entry: Copy + Default {
    fn of(o: &Operands<'_>) -> Self;
    fn matrix(&mut self) -> &mut Matrix;
}

impl Entry for Matrix {
    fn of(o: &Operands<'_>) -> Self {
        Matrix {
            x: read(Some(&o.x)),
            row: write(o.row.as_ref()),
            column: write(o.column.as_ref()),
            scale: read(o.scale.as_ref()),
            amax: write(o.amax.as_ref()),
            scale_inv: write(o.scale_inv.as_ref()),
            x_stride: (o.x.strides()[0] * o.x.dtype().size()) as u64,
            row_stride: row_stride(o.row.as_ref()),
            column_stride: row_stride(o.column.as_ref()),
            ..Matrix::default()
        }
    }

    fn matrix(&mut self) -> &mut Matrix {
        self
    }
}

impl Entry for BlockMatrix {
    fn of(o: &Operands<'_>) -> Self {
        BlockMatrix {
            row_scales: write(o.row_scales.as_ref()),
            column_scales: write(o.column_scales.as_ref()),
            row_scales_stride: row_stride(o.row_scales.as_ref()),
            column_scales_stride: row_stride(o.column_scales.as_ref()),
            matrix: Matrix::of(o),
        }
    }

    fn matrix(&mut self) -> &mut Matrix {
        &mut self.matrix
    }
}

/// `Parameters` of locate.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Parameters<E, const N: usize> {
    noop: u64,
    offsets: u64,
    status: u64,
    row_capacity: u64,
    block_capacity: u64,
    word_capacity: u64,
    num_matrices: u32,
    num_blocks: u32,
    pad_rows: u32,
    flags: u32,
    epsilon: f32,
    num_strips: u32,
    matrices: [E; N],
}

const _: () = assert!(size_of::<Matrix>() == 88 && size_of::<BlockMatrix>() == 120, "no padding, as in locate.cuh");
const _: () = assert!(size_of::<Parameters<Matrix, 1>>() == 72 + 88, "no padding, as in locate.cuh");
// Spec: CUDA, bytes of a kernel's parameters from 12.1 on.
const _: () = assert!(size_of::<Parameters<BlockMatrix, { LIST_SIZES[2] }>>() <= 32764);

/// Bits of `Parameters::flags`, as in locate.cuh.
mod flag {
    pub(super) const NOOP_IS_FLOAT: u32 = 1;
    pub(super) const OFFSETS_ARE_64_BITS: u32 = 2;
    pub(super) const RESET_AMAX: u32 = 4;
    pub(super) const POWER_OF_TWO: u32 = 8;
}

/// The address under a view; 0 for an absent one.
fn read(view: Option<&TensorView<'_>>) -> u64 {
    view.and_then(|view| view.device()).map_or(0, |device| device.address)
}

fn write(view: Option<&TensorViewMut<'_>>) -> u64 {
    view.and_then(|view| view.device()).map_or(0, |device| device.address)
}

/// Bytes from row to row.
fn row_stride(view: Option<&TensorViewMut<'_>>) -> u64 {
    view.map_or(0, |view| (view.strides()[0] * view.dtype().size()) as u64)
}

impl Matrix {
    /// Whether rows are whole vectors of eight elements at addresses that the widest accesses take.
    fn is_aligned(&self, to: DType) -> bool {
        let store = (tuning::PATCH * to.size()).min(VECTOR as usize) as u64;
        let x = [self.x, self.x_stride].iter().all(|at| at.is_multiple_of(VECTOR));
        x && [self.row, self.row_stride].iter().all(|at| at.is_multiple_of(store)) && self.num_columns.is_multiple_of(tuning::PATCH as u32)
    }
}

/// Bytes of the widest access (spec).
const VECTOR: u64 = 16;

impl<E: Entry, const N: usize> Parameters<E, N> {
    fn new(known: &Known, options: &Options<'_>) -> Self {
        let (epsilon, power_of_two) = match known.scaling {
            Scaling::Current { epsilon, power_of_two }
            | Scaling::Block { formula: Formula::TransformerEngine { epsilon, power_of_two }, .. } => (epsilon, power_of_two),
            _ => (0.0, false),
        };
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let flags = flag(options.noop.as_ref().is_some_and(|noop| noop.dtype() == DType::F32), flag::NOOP_IS_FLOAT)
            | flag(known.reset_amax, flag::RESET_AMAX)
            | flag(power_of_two, flag::POWER_OF_TWO);
        Parameters {
            noop: read(options.noop.as_ref()),
            offsets: 0,
            status: 0,
            row_capacity: u64::MAX,
            block_capacity: u64::MAX,
            word_capacity: u64::MAX,
            num_matrices: 0,
            num_blocks: 0,
            pad_rows: known.pad_rows as u32,
            flags,
            epsilon,
            num_strips: 0,
            matrices: [E::default(); N],
        }
    }
}

/// Casts a checked list.
pub(super) fn list(cuda: &Cuda, known: &Known, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<()> {
    if matches!(known.scaling, Scaling::Block { .. }) {
        list_of::<BlockMatrix>(cuda, known, matrices, options)
    } else {
        list_of::<Matrix>(cuda, known, matrices, options)
    }
}

fn list_of<E: Entry>(cuda: &Cuda, known: &Known, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<()> {
    const SMALL: usize = LIST_SIZES[0];
    const MIDDLE: usize = LIST_SIZES[1];
    const LARGE: usize = LIST_SIZES[2];
    for (i, chunk) in matrices.chunks(LARGE).enumerate() {
        let first = i * LARGE;
        match chunk.len() {
            0..=SMALL => part_of_list::<E, SMALL>(cuda, known, chunk, first, options),
            num if num <= MIDDLE => part_of_list::<E, MIDDLE>(cuda, known, chunk, first, options),
            _ => part_of_list::<E, LARGE>(cuda, known, chunk, first, options),
        }?;
    }
    Ok(())
}

fn part_of_list<E: Entry, const N: usize>(
    cuda: &Cuda,
    known: &Known,
    matrices: &[Operands<'_>],
    first: usize,
    options: &Options<'_>,
) -> Result<()> {
    let scales = Scales::of(known, &matrices[0]);
    let mean_rows = matrices.iter().fold(0, |sum: usize, o| sum.saturating_add(o.x.shape()[0])) / matrices.len();
    let tile = scales.tile(known.from, known.to, tuning::is_native(cuda.device().compute_capability(), known.to), mean_rows);
    let mut parameters = Parameters::<E, N>::new(known, options);
    let (mut num_parts, mut aligned) = (0u64, true);
    for (i, (o, entry)) in matrices.iter().zip(&mut parameters.matrices).enumerate() {
        let name = |field: &str| format!("matrices[{}].{field}", first + i);
        *entry = E::of(o);
        let [rows, columns] = extents(&o.x).map_err(|(got, want)| Error::invalid(OP, name("x"), got, want))?;
        needs_inverse(known, o).map_err(|(got, want)| Error::invalid(OP, name("scale_inv"), got, want))?;
        let matrix = entry.matrix();
        (matrix.num_rows, matrix.num_columns, matrix.first_part) = (rows, columns, num_parts as u32);
        aligned &= rows == 0 || columns == 0 || matrix.is_aligned(known.to);
        let padded = (rows as usize).next_multiple_of(known.pad_rows);
        num_parts += padded.div_ceil(tile.part_rows()) as u64 * u64::from(columns.div_ceil(tile.strip_columns()));
        if num_parts > MAX_BLOCKS {
            return Err(too_many_parts());
        }
    }
    parameters.num_matrices = matrices.len() as u32;
    parameters.num_blocks = num_parts as u32;
    let (row, column) = (matrices[0].row.is_some(), matrices[0].column.is_some());
    Call { known, scales, tile, list: N as u16, aligned, row, column }.queue(cuda, &parameters)
}

/// Casts a checked group.
pub(super) fn grouped(cuda: &Cuda, known: &Known, all: &Operands<'_>, offsets: &TensorView<'_>, options: &Options<'_>) -> Result<()> {
    if matches!(known.scaling, Scaling::Block { .. }) {
        group_of::<BlockMatrix>(cuda, known, all, offsets, options)
    } else {
        group_of::<Matrix>(cuda, known, all, offsets, options)
    }
}

fn group_of<E: Entry>(cuda: &Cuda, known: &Known, all: &Operands<'_>, offsets: &TensorView<'_>, options: &Options<'_>) -> Result<()> {
    let num_matrices = offsets.shape()[0] - 1;
    if num_matrices == 0 {
        return Ok(());
    }
    let scales = Scales::of(known, all);
    let mean_rows = all.x.shape()[0] / num_matrices;
    let tile = scales.tile(known.from, known.to, tuning::is_native(cuda.device().compute_capability(), known.to), mean_rows);
    let mut parameters = Parameters::<E, 1>::new(known, options);
    let [rows, columns] = extents(&all.x).map_err(|(got, want)| Error::invalid(OP, "x", got, want))?;
    needs_inverse(known, all).map_err(|(got, want)| Error::invalid(OP, "scale_inv", got, want))?;
    let mut entry = E::of(all);
    let matrix = entry.matrix();
    (matrix.num_rows, matrix.num_columns) = (rows, columns);
    let aligned = matrix.is_aligned(known.to);
    parameters.matrices[0] = entry;
    [parameters.row_capacity, parameters.block_capacity, parameters.word_capacity] = capacities(known, all, columns as usize);
    parameters.offsets = read(Some(offsets));
    parameters.status = write(all.status.as_ref());
    if offsets.dtype() == DType::I64 {
        parameters.flags |= flag::OFFSETS_ARE_64_BITS;
    }
    parameters.num_matrices =
        u32::try_from(num_matrices).map_err(|_| Error::invalid(OP, "offsets", format!("of {num_matrices} matrices"), "fewer than 2^32"))?;
    let num_down = tuning::num_parts_expected(rows.into(), num_matrices as u64, tile.part_rows() as u64);
    parameters.num_strips = columns.div_ceil(tile.strip_columns());
    let num_blocks = num_down * u64::from(parameters.num_strips);
    if num_blocks > MAX_BLOCKS {
        return Err(too_many_parts());
    }
    // One block at least, for what is written once.
    parameters.num_blocks = num_blocks.max(1) as u32;
    Call { known, scales, tile, list: 0, aligned, row: all.row.is_some(), column: all.column.is_some() }.queue(cuda, &parameters)
}

/// What a group's outputs hold of padded rows, of blocks along columns, and of words of such blocks. The kernel compares: only it knows the offsets.
fn capacities(known: &Known, all: &Operands<'_>, columns: usize) -> [u64; 3] {
    let [mut rows, mut blocks, mut words] = [usize::MAX; 3];
    if let Some(row) = &all.row {
        rows = rows.min(row.shape()[0]);
    }
    if let Some(column) = &all.column {
        rows = rows.min(column.shape()[0].checked_div(columns).unwrap_or(usize::MAX));
    }
    if let Scaling::Block { block, layout, .. } = known.scaling {
        let (lines, _) = block.extents();
        if let Some(scales) = &all.row_scales {
            let held = scales.shape()[usize::from(layout != ScaleLayout::RowMajor)];
            let of_lines = if lines == 1 || layout == ScaleLayout::PackedE8m0 { &mut rows } else { &mut blocks };
            *of_lines = (*of_lines).min(held);
        }
        if let Some(scales) = &all.column_scales {
            let held = scales.shape()[0];
            match layout {
                ScaleLayout::RowMajor => blocks = blocks.min(held.checked_div(columns.div_ceil(lines)).unwrap_or(usize::MAX)),
                ScaleLayout::ColumnMajor => blocks = blocks.min(held),
                ScaleLayout::PackedE8m0 => words = words.min(held),
            }
        }
    }
    [rows as u64, blocks as u64, words as u64]
}

/// Blocks of a launch (spec: CUDA, along x).
const MAX_BLOCKS: u64 = (1 << 31) - 1;

fn too_many_parts() -> Error {
    Error::invalid(OP, "x", "too large for one launch", "fewer than 2^31 parts")
}

/// Rows and columns as the kernels count them.
fn extents(x: &TensorView<'_>) -> Result<[u32; 2], (String, &'static str)> {
    let number = |extent: usize| u32::try_from(extent).ok().filter(|extent| *extent < 1 << 30);
    let row_bytes = x.strides().first().copied().unwrap_or(0).saturating_mul(x.dtype().size());
    if row_bytes > u32::MAX as usize {
        return Err((format!("with rows {row_bytes} bytes apart"), "rows less than 2^32 bytes apart on a gpu"));
    }
    match (number(x.shape()[0]), number(x.shape()[1])) {
        (Some(rows), Some(columns)) => Ok([rows, columns]),
        _ => Err((format!("of shape {:?}", x.shape()), "extents below 2^30 on a gpu")),
    }
}

/// Current scaling keeps a matrix's greatest magnitude there until its scale is known: a call allocates nothing.
fn needs_inverse(known: &Known, o: &Operands<'_>) -> Result<(), (String, &'static str)> {
    match known.scaling {
        Scaling::Current { .. } if o.scale_inv.is_none() => Err(("absent".into(), "present with current scaling on a gpu")),
        _ => Ok(()),
    }
}

/// A call on its way from parameters to launches.
struct Call<'k> {
    known: &'k Known,
    scales: Scales,
    tile: Tile,
    list: u16,
    aligned: bool,
    row: bool,
    column: bool,
}

impl Call<'_> {
    fn queue<E: Entry, const N: usize>(&self, cuda: &Cuda, parameters: &Parameters<E, N>) -> Result<()> {
        let Call { row, column, aligned, .. } = *self;
        if self.scales == Scales::Current || self.known.reset_amax || parameters.num_blocks == 0 {
            self.launch(cuda, Kind::Before, self.scales, parameters)?;
        }
        let tiles = Kind::Tiles { row, column, aligned };
        if self.scales != Scales::Current {
            return self.launch(cuda, tiles, self.scales, parameters);
        }
        let with = |change: fn(&mut Matrix)| {
            let mut changed = *parameters;
            changed.matrices.iter_mut().for_each(|entry| change(entry.matrix()));
            changed
        };
        // The greatest magnitudes stand in scale_inv until all tiles have read them.
        let measured = with(|m| (m.amax, m.scale_inv, m.scale) = (m.scale_inv, 0, 0));
        self.launch(cuda, Kind::Tiles { row: false, column: false, aligned }, Scales::Given, &measured)?;
        let scaled = with(|m| (m.scale, m.scale_inv, m.amax) = (m.scale_inv, 0, 0));
        self.launch(cuda, tiles, Scales::Current, &scaled)?;
        self.launch(cuda, Kind::After, Scales::Current, parameters)
    }

    fn launch<E: Entry, const N: usize>(&self, cuda: &Cuda, kind: Kind, scales: Scales, parameters: &Parameters<E, N>) -> Result<()> {
        let variant = Variant { kind, from: self.known.from, to: self.known.to, list: self.list, scales, tile: kind.tile(self.tile) };
        let (num_blocks, threads, smem_bytes) = match kind {
            Kind::Tiles { column, .. } => (parameters.num_blocks, self.tile.threads(), scales.smem_bytes(self.tile, self.known.to, column)),
            Kind::Before | Kind::After => (parameters.num_matrices.div_ceil(MATRIX_THREADS), MATRIX_THREADS, 0),
        };
        let kernel = KERNELS.get(OP, cuda.stream(), variant)?;
        let geometry =
            Geometry { grid: [num_blocks, 1, 1], threads, smem_bytes, programmatic: cuda.is_programmatic(), ..Geometry::default() };
        // SAFETY: the kernel was loaded for this stream's device and takes this struct; the validator has checked that the views behind its addresses
        // lie on the device and cover what the extents say, and the kernel compares what it reads from the device with the extents.
        unsafe { kernel.launch(cuda.stream(), &geometry, parameters) }
    }
}

/// The kernels that the table of resources lists.
pub(super) fn shipped() -> Vec<Variant> {
    let mut all: Vec<Variant> = Vec::new();
    let both = Kind::Tiles { row: true, column: true, aligned: true };
    let mut add = |kind: Kind, from: DType, to: DType, list: usize, scales: Scales, is_native: bool| {
        // High matrices and low ones.
        for mean_rows in [usize::MAX, 0] {
            let variant =
                Variant { kind, from, to, list: list as u16, scales, tile: kind.tile(scales.tile(from, to, is_native, mean_rows)) };
            if !all.contains(&variant) {
                all.push(variant);
            }
        }
    };
    let hopper = (9, 0);
    for from in [DType::BF16, DType::F16, DType::F32] {
        for to in [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz, DType::F16, DType::BF16, DType::F32] {
            add(both, from, to, 0, Scales::Given, false);
            add(both, from, to, 0, Scales::Given, tuning::is_native(hopper, to));
        }
    }
    let (from, to) = (DType::BF16, DType::E4M3);
    for is_native in [true, false] {
        for list in LIST_SIZES {
            add(both, from, to, list, Scales::Given, is_native);
        }
        for (row, column) in [(true, false), (false, true), (false, false)] {
            add(Kind::Tiles { row, column, aligned: true }, from, to, 0, Scales::Given, is_native);
        }
        add(Kind::Tiles { row: true, column: true, aligned: false }, from, to, 0, Scales::Given, is_native);
        add(both, from, to, 0, Scales::Current, is_native);
    }
    for kind in [Kind::Before, Kind::After] {
        add(kind, from, to, 0, Scales::Current, true);
    }
    add(Kind::Before, from, to, LIST_SIZES[2], Scales::Given, true);
    for (block, formula, stored) in [
        (Block::Row128, Formulas::TransformerEngine, Stored::ColumnMajorF32),
        (Block::Row128, Formulas::DeepGemm, Stored::ColumnMajorF32),
        (Block::Row128, Formulas::DeepGemmPowerOfTwo, Stored::Packed),
        (Block::Square128, Formulas::TransformerEngine, Stored::RowMajorF32),
        (Block::Square128, Formulas::DeepGemm, Stored::RowMajorF32),
        (Block::Row32, Formulas::Mx, Stored::RowMajorE8m0),
    ] {
        let scales = Scales::Blocks { block, formula, stored };
        for is_native in [true, false] {
            add(both, from, to, 0, scales, is_native);
        }
        add(both, DType::F32, to, 0, scales, true);
    }
    all
}
