//! cast on a GPU: parameters from checked operands, and the launches of a call.

use bytemuck::{Pod, Zeroable};

use super::check::Known;
use super::tuning::{self, LIST_SIZES, Tile};
use super::variant::{Form, Kind, MATRIX_THREADS, Scales, Variant};
use super::{Formula, OP, Operands, Options, ScaleLayout, Scaling};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Geometry, Kernels};
use crate::tensor::{DType, TensorView, TensorViewMut};

pub(super) static KERNELS: Kernels<Variant> = Kernels::new();

/// `Matrix` of locate.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct Matrix {
    x: u64,
    row: u64,
    column: u64,
    scale: u64,
    amax: u64,
    scale_inv: u64,
    x_stride: u64,
    row_stride: u64,
    column_stride: u64,
    pub(super) num_rows: u32,
    pub(super) num_columns: u32,
    pub(super) first_part: u32,
    pub(super) num_down: u32,
}

/// `Matrix` of locate.cuh with block scales.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct BlockMatrix {
    row_scales: u64,
    column_scales: u64,
    row_scales_stride: u64,
    column_scales_stride: u64,
    matrix: Matrix,
}

/// What the kernels take of a matrix.
pub(super) trait Entry: Pod + Default {
    fn of(o: &Operands<'_>) -> Self;
    fn matrix(&mut self) -> &mut Matrix;
}

impl Entry for Matrix {
    #[inline(always)]
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
    #[inline(always)]
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

/// `ParametersOfAll` of locate.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ParametersOfAll {
    noop: u64,
    offsets: u64,
    status: u64,
    row_capacity: u64,
    block_capacity: u64,
    word_capacity: u64,
    pub(super) num_matrices: u32,
    pub(super) num_blocks: u32,
    pad_rows: u32,
    flags: u32,
    epsilon: f32,
    num_strips: u32,
    tail_start: u32,
    pub(super) num_parts: u32,
}

/// `ParametersOf` of locate.cuh: its matrices, or where they are.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Parameters<M> {
    pub(super) all: ParametersOfAll,
    pub(super) matrices: M,
}

const _: () = assert!(size_of::<Matrix>() == 88 && size_of::<BlockMatrix>() == 120, "no padding, as in locate.cuh");
const _: () = assert!(size_of::<Parameters<[Matrix; 1]>>() == 80 + 88, "no padding, as in locate.cuh");
// Spec: CUDA, bytes of a kernel's parameters from 12.1 on.
const _: () = assert!(size_of::<Parameters<[BlockMatrix; LIST_SIZES[2]]>>() <= 32764);

/// Bits of `Parameters::flags`, as in locate.cuh.
mod flag {
    pub(super) const NOOP_IS_FLOAT: u32 = 1;
    pub(super) const OFFSETS_ARE_64_BITS: u32 = 2;
    pub(super) const RESET_AMAX: u32 = 4;
    pub(super) const POWER_OF_TWO: u32 = 8;
    pub(super) const LAST_FIRST: u32 = 16;
}

/// The address under a view; 0 for an absent one.
#[inline(always)]
fn read(view: Option<&TensorView<'_>>) -> u64 {
    view.and_then(|view| view.device()).map_or(0, |device| device.address)
}

#[inline(always)]
fn write(view: Option<&TensorViewMut<'_>>) -> u64 {
    view.and_then(|view| view.device()).map_or(0, |device| device.address)
}

/// Bytes from row to row.
#[inline(always)]
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

impl ParametersOfAll {
    /// For `num_elements` elements in all.
    pub(super) fn in_order(&mut self, cuda: &Cuda, known: &Known, num_elements: u64) {
        // While the input fits in the cache with room for outputs both passes take it in one order; of a larger one the second pass finds what the first has
        // read last (measured: H200 of 50 MB, 8 matrices of 4096 columns, 32 MiB 31.7 us and reversed 32.1, 64 MiB 62.3 and 59.8).
        let bytes = num_elements.saturating_mul(known.from.size() as u64);
        if matches!(known.scaling, Scaling::Current { .. }) && bytes > cuda.device().properties().l2_bytes / 4 * 3 {
            self.flags |= flag::LAST_FIRST;
        }
    }

    pub(super) fn new(known: &Known, options: &Options<'_>) -> Self {
        let (epsilon, power_of_two) = match known.scaling {
            Scaling::Current { epsilon, power_of_two }
            | Scaling::Block { formula: Formula::TransformerEngine { epsilon, power_of_two }, .. } => (epsilon, power_of_two),
            _ => (0.0, false),
        };
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let flags = flag(options.noop.as_ref().is_some_and(|noop| noop.dtype() == DType::F32), flag::NOOP_IS_FLOAT)
            | flag(known.reset_amax, flag::RESET_AMAX)
            | flag(power_of_two, flag::POWER_OF_TWO);
        ParametersOfAll {
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
            tail_start: 0,
            num_parts: 0,
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
    let mut parameters = Parameters { all: ParametersOfAll::new(known, options), matrices: [E::default(); N] };
    let (call, packed) =
        Call::of_list(cuda, known, matrices, Form::List(N as u16)).pack(cuda, matrices, first, &mut parameters.matrices)?;
    parameters.all.num_matrices = matrices.len() as u32;
    parameters.all.num_parts = packed.num_parts;
    parameters.all.num_blocks = call.blocks(cuda, packed.num_parts);
    parameters.all.in_order(cuda, known, packed.num_elements);
    call.queue(cuda, &parameters)
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
    let mut call = Call::new(cuda, known, all, all.x.shape()[0] / num_matrices, Form::Group);
    let [rows, columns] = extents(&all.x).map_err(|(got, want)| Error::invalid(OP, "x", got, want))?;
    needs_inverse(known, all).map_err(|(got, want)| Error::invalid(OP, "scale_inv", got, want))?;
    let mut entry = E::of(all);
    let matrix = entry.matrix();
    (matrix.num_rows, matrix.num_columns) = (rows, columns);
    call.aligned = matrix.is_aligned(known.to);
    call.choose_resident(cuda, u64::from(rows), num_matrices as u64, u64::from(rows) * u64::from(columns));
    let mut parameters = Parameters { all: ParametersOfAll::new(known, options), matrices: [entry] };
    let p = &mut parameters.all;
    [p.row_capacity, p.block_capacity, p.word_capacity] = capacities(known, all, columns as usize);
    p.offsets = read(Some(offsets));
    p.status = write(all.status.as_ref());
    if offsets.dtype() == DType::I64 {
        p.flags |= flag::OFFSETS_ARE_64_BITS;
    }
    p.num_matrices =
        u32::try_from(num_matrices).map_err(|_| Error::invalid(OP, "offsets", format!("of {num_matrices} matrices"), "fewer than 2^32"))?;
    p.num_strips = columns.div_ceil(call.tile.strip_columns());
    let group = tuning::Group {
        rows: rows.into(),
        num_matrices: num_matrices as u64,
        num_strips: p.num_strips.into(),
        tile: call.tile,
        num_sms: cuda.device().properties().num_sms,
    };
    let num_down = if matches!(known.scaling, Scaling::Block { .. }) {
        group.num_slots()
    } else {
        let tail_rows = group.tail_rows();
        p.tail_start = u64::from(rows).saturating_sub(tail_rows) as u32;
        group.num_down(tail_rows)
    };
    let num_parts = num_down * u64::from(p.num_strips);
    if num_parts > MAX_BLOCKS {
        return Err(too_many_parts());
    }
    p.in_order(cuda, known, u64::from(rows) * u64::from(columns));
    // One block at least, for what is written once.
    p.num_blocks = call.blocks(cuda, num_parts.max(1) as u32);
    call.queue(cuda, &parameters)
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
pub(super) const MAX_BLOCKS: u64 = (1 << 31) - 1;

pub(super) fn too_many_parts() -> Error {
    Error::invalid(OP, "x", "too large for one launch", "fewer than 2^31 parts")
}

/// Rows and columns as the kernels count them.
#[inline(always)]
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
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'k> {
    known: &'k Known,
    scales: Scales,
    pub(super) tile: Tile,
    form: Form,
    aligned: bool,
    row: bool,
    column: bool,
    /// Current scaling in one launch.
    resident: bool,
}

/// What is known of a list when its matrices are packed.
pub(super) struct Packed {
    pub(super) num_parts: u32,
    pub(super) num_elements: u64,
    /// As [`Matrix::is_aligned`], of all.
    aligned: bool,
}

/// The geometry with which kernel `i` of a call is launched. Programmatically: behind another one of the call always, where that exists (spec: compute capability 9.0);
/// a cooperative one begins when all before it has ended.
pub(super) fn geometry_of(cuda: &Cuda, i: usize, geometry: Geometry) -> Geometry {
    let programmatic = cuda.is_programmatic() || i > 0 && cuda.device().compute_capability() >= (9, 0);
    Geometry { programmatic: programmatic && !geometry.cooperative, ..geometry }
}

/// A kernel of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) variant: Variant,
    pub(super) geometry: Geometry,
}

/// Kernels of a call at most.
pub(super) const MAX_STEPS: usize = 4;

impl<'k> Call<'k> {
    fn new(cuda: &Cuda, known: &'k Known, first: &Operands<'_>, mean_rows: usize, form: Form) -> Self {
        let scales = Scales::of(known, first);
        let is_native = tuning::is_native(cuda.device().compute_capability(), known.to);
        let tile = scales.tile(known.from, known.to, is_native, mean_rows);
        Call { known, scales, tile, form, aligned: true, row: first.row.is_some(), column: first.column.is_some(), resident: false }
    }

    /// Of a list of at least one matrix.
    pub(super) fn of_list(cuda: &Cuda, known: &'k Known, matrices: &[Operands<'_>], form: Form) -> Self {
        let rows = matrices.iter().fold(0, |sum: usize, o| sum.saturating_add(o.x.shape()[0]));
        Self::new(cuda, known, &matrices[0], rows / matrices.len(), form)
    }

    /// Whether current scaling takes one launch, of matrices of so many rows and elements in all; then the tile is another one.
    fn choose_resident(&mut self, cuda: &Cuda, rows: u64, num_matrices: u64, num_elements: u64) {
        if self.scales != Scales::Current || !self.aligned {
            return;
        }
        let (known, tile) = (self.known, tuning::RESIDENT_TILE);
        // Each matrix may end inside of a tile, and each has columns on average.
        let columns = num_elements.div_ceil(rows.max(1));
        let down = rows.div_ceil(u64::from(tile.rows)).saturating_add(num_matrices);
        let num_parts = down.saturating_mul(columns.div_ceil(u64::from(tile.columns)) + 1);
        if tuning::is_resident(cuda.device().properties(), (known.from, known.to), rows, num_matrices, num_elements, num_parts) {
            (self.resident, self.tile) = (true, tile);
        }
    }

    /// Blocks of the launch that casts so many parts, or as many as are expected.
    pub(super) fn blocks(&self, cuda: &Cuda, num_parts: u32) -> u32 {
        // Those of current scaling in one launch fill the device.
        if self.resident { tuning::slots(self.tile, cuda.device().properties().num_sms) as u32 } else { num_parts }
    }

    /// What the kernels take of the matrices of a list, of which these are `first` and its followers; the call with what that says of it.
    pub(super) fn pack<E: Entry>(mut self, cuda: &Cuda, matrices: &[Operands<'_>], first: usize, to: &mut [E]) -> Result<(Self, Packed)> {
        let mut packed = self.pack_parts(matrices, first, to)?;
        self.aligned = packed.aligned;
        let rows = matrices.iter().fold(0u64, |sum, o| sum.saturating_add(o.x.shape()[0] as u64));
        self.choose_resident(cuda, rows, matrices.len() as u64, packed.num_elements);
        if self.resident {
            // The parts of another tile.
            packed = self.pack_parts(matrices, first, to)?;
            self.resident = u64::from(packed.num_parts)
                <= tuning::slots(self.tile, cuda.device().properties().num_sms) * tuning::RESIDENT_MAX_TILES as u64;
        }
        Ok((self, packed))
    }

    fn pack_parts<E: Entry>(&self, matrices: &[Operands<'_>], first: usize, to: &mut [E]) -> Result<Packed> {
        let (known, tile) = (self.known, self.tile);
        let (mut num_parts, mut num_elements, mut aligned) = (0u64, 0u64, true);
        for (i, (o, entry)) in matrices.iter().zip(to).enumerate() {
            let name = |field: &str| format!("matrices[{}].{field}", first + i);
            *entry = E::of(o);
            let [rows, columns] = extents(&o.x).map_err(|(got, want)| Error::invalid(OP, name("x"), got, want))?;
            needs_inverse(known, o).map_err(|(got, want)| Error::invalid(OP, name("scale_inv"), got, want))?;
            let matrix = entry.matrix();
            let num_down = (rows as usize).next_multiple_of(known.pad_rows).div_ceil(tile.part_rows()) as u32;
            (matrix.num_rows, matrix.num_columns) = (rows, columns);
            (matrix.first_part, matrix.num_down) = (num_parts as u32, num_down);
            aligned &= rows == 0 || columns == 0 || matrix.is_aligned(known.to);
            num_parts += u64::from(num_down) * u64::from(columns.div_ceil(tile.strip_columns()));
            num_elements = num_elements.saturating_add(u64::from(rows) * u64::from(columns));
            if num_parts > MAX_BLOCKS {
                return Err(too_many_parts());
            }
        }
        Ok(Packed { num_parts: num_parts as u32, num_elements, aligned })
    }

    /// The kernels, one after the other.
    pub(super) fn steps(&self, all: &ParametersOfAll) -> impl Iterator<Item = Step> {
        let Call { row, column, aligned, scales, resident, .. } = *self;
        let is_current = scales == Scales::Current && !resident;
        // With current scaling the greatest magnitudes stand in scale_inv until all tiles have read them.
        let kinds = [
            (is_current || !resident && (self.known.reset_amax || all.num_blocks == 0)).then_some(Kind::Before),
            is_current.then_some(Kind::Tiles { row: false, column: false, aligned }),
            Some(if resident { Kind::Resident { row, column } } else { Kind::Tiles { row, column, aligned } }),
            is_current.then_some(Kind::After),
        ];
        let [num_blocks, num_matrices] = [all.num_blocks, all.num_matrices];
        kinds.into_iter().flatten().map(move |kind| {
            let tile = kind.tile(self.tile);
            let variant = Variant { kind, from: self.known.from, to: self.known.to, form: self.form, scales, tile };
            let (blocks, threads, smem_bytes) = match kind {
                Kind::Tiles { column, .. } => (num_blocks, tile.threads(), scales.smem_bytes(tile, self.known.to, column)),
                Kind::Resident { .. } => (num_blocks, tile.threads(), tuning::resident_smem_bytes(self.known.from)),
                Kind::Before | Kind::After => (num_matrices.div_ceil(MATRIX_THREADS), MATRIX_THREADS, 0),
            };
            let cooperative = matches!(kind, Kind::Resident { .. });
            Step { variant, geometry: Geometry { grid: [blocks, 1, 1], threads, smem_bytes, cooperative, ..Geometry::default() } }
        })
    }

    fn queue<M: Copy>(&self, cuda: &Cuda, parameters: &Parameters<M>) -> Result<()> {
        for (i, step) in self.steps(&parameters.all).enumerate() {
            let kernel = KERNELS.get(OP, cuda.stream(), step.variant)?;
            let geometry = geometry_of(cuda, i, step.geometry);
            // SAFETY: the kernel was loaded for this stream's device and takes this struct; the validator has checked that the views behind its addresses
            // lie on the device and cover what the extents say, and the kernel compares what it reads from the device with the extents.
            unsafe { kernel.launch(cuda.stream(), &geometry, parameters) }?;
        }
        Ok(())
    }
}
