//! cast on a GPU: parameters from checked operands, and the launches of a call.

use bytemuck::{Pod, Zeroable};

use super::check::{self, Known};
use super::tuning::{self, LIST_SIZES, Tile};
use super::variant::{Form, Kind, MATRIX_THREADS, Scales, Variant};
use super::{Formula, OP, Operands, Options, ScaleLayout, Scaling};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Geometry, Kernels};
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

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
    /// Its tensors, with the bytes of an element of all inputs and of all copies: looking at the type of each takes longer than all else here.
    fn of(o: &Operands<'_>, sizes: [usize; 2]) -> Self;
    fn matrix(&mut self) -> &mut Matrix;
}

impl Entry for Matrix {
    #[inline(always)]
    fn of(o: &Operands<'_>, [from, to]: [usize; 2]) -> Self {
        // The stride of a single row does not matter.
        let stride = |layout: &Layout| if layout.first_dims()[0] > 1 { stride_bytes(layout, to) } else { 0 };
        let copy = |view: &Option<TensorViewMut<'_>>| view.as_ref().map_or((0, 0), |view| (view.address(), stride(view.layout())));
        let ((row, row_stride), (column, column_stride)) = (copy(&o.row), copy(&o.column));
        Matrix {
            x: o.x.address(),
            row,
            column,
            scale: read(o.scale.as_ref()),
            amax: write(o.amax.as_ref()),
            scale_inv: write(o.scale_inv.as_ref()),
            x_stride: stride_bytes(o.x.layout(), from),
            row_stride,
            column_stride,
            ..Matrix::default()
        }
    }

    fn matrix(&mut self) -> &mut Matrix {
        self
    }
}

impl Entry for BlockMatrix {
    #[inline(always)]
    fn of(o: &Operands<'_>, sizes: [usize; 2]) -> Self {
        let stride = |view: Option<&TensorViewMut<'_>>| view.map_or(0, |view| stride_bytes(view.layout(), view.dtype().size()));
        BlockMatrix {
            row_scales: write(o.row_scales.as_ref()),
            column_scales: write(o.column_scales.as_ref()),
            row_scales_stride: stride(o.row_scales.as_ref()),
            column_scales_stride: stride(o.column_scales.as_ref()),
            matrix: Matrix::of(o, sizes),
        }
    }

    fn matrix(&mut self) -> &mut Matrix {
        &mut self.matrix
    }
}

/// `ParametersOfAll` of locate.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
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
    num_stacks: [u32; 2],
}

/// `ParametersOf` of locate.cuh: its matrices, or where they are.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Parameters<M> {
    pub(super) all: ParametersOfAll,
    pub(super) matrices: M,
}

const _: () = assert!(size_of::<Matrix>() == 88 && size_of::<BlockMatrix>() == 120, "no padding, as in locate.cuh");
const _: () = assert!(size_of::<Parameters<[Matrix; 1]>>() == 88 + 88, "no padding, as in locate.cuh");
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
    view.map_or(0, |view| view.address())
}

#[inline(always)]
fn write(view: Option<&TensorViewMut<'_>>) -> u64 {
    view.map_or(0, |view| view.address())
}

/// Bytes from row to row of a matrix.
#[inline(always)]
fn stride_bytes(layout: &Layout, size: usize) -> u64 {
    layout.first_dims()[2].saturating_mul(size) as u64
}

impl Matrix {
    /// 0 when rows are whole vectors of eight elements at addresses that the widest accesses take, of which copies take `store` bytes.
    #[inline(always)]
    fn odd_bits(&self, store: u64) -> u64 {
        (self.x | self.x_stride) & (VECTOR - 1) | (self.row | self.row_stride) & (store - 1) | u64::from(self.num_columns) & (PATCH - 1)
    }
}

/// Bytes of the widest store of a patch's row of a copy.
fn store_bytes(to: DType) -> u64 {
    (PATCH * to.size() as u64).min(VECTOR)
}

/// As in tuning.rs, of addresses.
const PATCH: u64 = tuning::PATCH as u64;
const _: () = assert!(VECTOR.is_power_of_two() && PATCH.is_power_of_two(), "masks");

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
            num_stacks: [0; 2],
        }
    }
}

/// Checks and casts a list.
pub(super) fn list(cuda: &Cuda, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<()> {
    if matches!(options.scaling, Scaling::Block { .. }) {
        list_of::<BlockMatrix>(cuda, matrices, options)
    } else {
        list_of::<Matrix>(cuda, matrices, options)
    }
}

fn list_of<E: Entry>(cuda: &Cuda, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<()> {
    const SMALL: usize = LIST_SIZES[0];
    const MIDDLE: usize = LIST_SIZES[1];
    const LARGE: usize = LIST_SIZES[2];
    // Of several launches all matrices are checked before the first one.
    let is_one = (1..=LARGE).contains(&matrices.len());
    let known = if is_one { None } else { check::list(cuda, matrices, options, |_| ())? };
    for (i, chunk) in matrices.chunks(LARGE).enumerate() {
        let first = i * LARGE;
        match chunk.len() {
            0..=SMALL => part_of_list::<E, SMALL>(cuda, known.as_ref(), chunk, first, options),
            num if num <= MIDDLE => part_of_list::<E, MIDDLE>(cuda, known.as_ref(), chunk, first, options),
            _ => part_of_list::<E, LARGE>(cuda, known.as_ref(), chunk, first, options),
        }?;
    }
    Ok(())
}

/// Casts the matrices of one launch; checks them unless that was done.
fn part_of_list<E: Entry, const N: usize>(
    cuda: &Cuda,
    checked: Option<&Known>,
    matrices: &[Operands<'_>],
    first: usize,
    options: &Options<'_>,
) -> Result<()> {
    let mut parameters = Parameters { all: ParametersOfAll::default(), matrices: [E::default(); N] };
    let mut packing = Packing::new(&matrices[0]);
    let mut places = parameters.matrices.iter_mut();
    let mut each = |o: &Operands<'_>| {
        if let Some(entry) = places.next() {
            packing.add(o, entry);
        }
    };
    let known = match checked {
        Some(known) => {
            matrices.iter().for_each(&mut each);
            *known
        }
        None => match check::list(cuda, matrices, options, each)? {
            Some(known) => known,
            None => return Ok(()),
        },
    };
    packing.finish(&known, matrices, first)?;
    let call = Call::of_list(cuda, &known, &matrices[0], Form::List(N as u16), &packing);
    let (call, packed) = call.cut(cuda, &mut parameters.matrices[..matrices.len()])?;
    parameters.all = ParametersOfAll::new(&known, options);
    parameters.all.num_matrices = matrices.len() as u32;
    parameters.all.num_parts = packed.num_parts;
    parameters.all.num_blocks = call.blocks(cuda, packed.num_parts);
    parameters.all.in_order(cuda, &known, packed.num_elements);
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
    for_gpu(known, all).map_err(|(field, got, want)| Error::invalid(OP, field, got, want))?;
    let [rows, columns, _] = all.x.layout().first_dims().map(|extent| extent as u32);
    let mut entry = E::of(all, [known.from.size(), known.to.size()]);
    let matrix = entry.matrix();
    (matrix.num_rows, matrix.num_columns) = (rows, columns);
    call.aligned = matrix.odd_bits(store_bytes(known.to)) == 0;
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
    p.num_strips = columns.div_ceil(call.tile.columns.into());
    p.num_stacks = [p.num_strips.div_ceil(2), p.num_strips.div_ceil(3)];
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
        if group.most_parts() > tuning::MAX_GROUP_PARTS {
            let got = format!("of {num_matrices} matrices in {rows} rows of {columns}");
            return Err(Error::invalid(OP, "offsets", got, "fewer than 2^30 parts, each a tile or its rest"));
        }
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

/// What the kernels ask for beyond what every backend does. Says what is wrong of which field, what it is and what it must be.
fn for_gpu(known: &Known, o: &Operands<'_>) -> Result<(), (&'static str, String, &'static str)> {
    let far = |layout: &Layout| Some(layout.strides()[0].saturating_mul(layout.dtype().size())).filter(|bytes| *bytes > MAX_ROW_BYTES);
    let rows_apart = |field, bytes| (field, format!("with rows {bytes} bytes apart"), "rows less than 2^32 bytes apart on a gpu");
    if let Some(bytes) = far(o.x.layout()) {
        return Err(rows_apart("x", bytes));
    }
    if o.x.shape().iter().any(|extent| *extent >= MAX_EXTENT) {
        return Err(("x", format!("of shape {:?}", o.x.shape()), "extents below 2^30 on a gpu"));
    }
    if let Some(bytes) = o.row.as_ref().filter(|row| row.shape()[0] > 1).and_then(|row| far(row.layout())) {
        return Err(rows_apart("row", bytes));
    }
    if needs_inverse(known) && o.scale_inv.is_none() {
        return Err(("scale_inv", "absent".into(), "present with current scaling on a gpu"));
    }
    Ok(())
}

/// Extents that the kernels count are less.
const MAX_EXTENT: usize = 1 << 30;
/// Rows lie at most so many bytes apart: kernels keep that in 32 bits. Columns may be further.
const MAX_ROW_BYTES: usize = u32::MAX as usize;

/// Current scaling keeps a matrix's greatest magnitude there until its scale is known: a call allocates nothing.
fn needs_inverse(known: &Known) -> bool {
    matches!(known.scaling, Scaling::Current { .. })
}

/// A list on its way into what kernels take, one matrix after the other. What all matrices must have is gathered bit by bit, and looked at in the end.
pub(super) struct Packing {
    sizes: [usize; 2],
    store: u64,
    /// As [`Matrix::odd_bits`].
    odd: u64,
    extents: usize,
    strides: u64,
    lacks_inverse: bool,
}

impl Packing {
    /// For a list of which `first` is one.
    pub(super) fn new(first: &Operands<'_>) -> Self {
        let to = first.row.as_ref().or(first.column.as_ref()).map_or(first.x.dtype(), |copy| copy.dtype());
        let sizes = [first.x.dtype().size(), to.size()];
        Packing { sizes, store: store_bytes(to), odd: 0, extents: 0, strides: 0, lacks_inverse: false }
    }

    /// A matrix, checked, into its entry: all but its parts. What does not fit is found by `finish`.
    #[inline(always)]
    pub(super) fn add<E: Entry>(&mut self, o: &Operands<'_>, entry: &mut E) {
        *entry = E::of(o, self.sizes);
        let [rows, columns, _] = o.x.layout().first_dims();
        let matrix = entry.matrix();
        (matrix.num_rows, matrix.num_columns) = (rows as u32, columns as u32);
        let is_empty = (rows == 0) | (columns == 0);
        self.odd |= if is_empty { 0 } else { matrix.odd_bits(self.store) };
        self.extents |= rows | columns;
        self.strides |= matrix.x_stride | matrix.row_stride;
        self.lacks_inverse |= matrix.scale_inv == 0;
    }

    /// # Errors
    /// [`Error::Invalid`] for a matrix that a GPU does not take; these are numbered from `first` on.
    pub(super) fn finish(&self, known: &Known, matrices: &[Operands<'_>], first: usize) -> Result<()> {
        const { assert!(MAX_EXTENT.is_power_of_two() && (MAX_ROW_BYTES + 1).is_power_of_two(), "bits of several numbers together") };
        let lacks = self.lacks_inverse && needs_inverse(known);
        if self.extents < MAX_EXTENT && self.strides <= MAX_ROW_BYTES as u64 && !lacks {
            return Ok(());
        }
        for (i, o) in matrices.iter().enumerate() {
            for_gpu(known, o).map_err(|(field, got, want)| Error::invalid(OP, format!("matrices[{}].{field}", first + i), got, want))?;
        }
        Ok(())
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

/// What is known of a list when its matrices are cut into parts.
pub(super) struct Packed {
    pub(super) num_parts: u32,
    pub(super) num_elements: u64,
    num_rows: u64,
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

    /// Of a list that begins with `first`.
    pub(super) fn of_list(cuda: &Cuda, known: &'k Known, first: &Operands<'_>, form: Form, packing: &Packing) -> Self {
        Call { aligned: packing.odd == 0, ..Self::new(cuda, known, first, known.mean_rows, form) }
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

    /// Cuts the matrices of a list into parts; the call with what that says of it.
    pub(super) fn cut<E: Entry>(mut self, cuda: &Cuda, entries: &mut [E]) -> Result<(Self, Packed)> {
        let mut packed = self.cut_by_tile(entries)?;
        self.choose_resident(cuda, packed.num_rows, entries.len() as u64, packed.num_elements);
        if self.resident {
            // The parts of another tile.
            packed = self.cut_by_tile(entries)?;
            self.resident = u64::from(packed.num_parts)
                <= tuning::slots(self.tile, cuda.device().properties().num_sms) * tuning::RESIDENT_MAX_TILES as u64;
        }
        Ok((self, packed))
    }

    fn cut_by_tile<E: Entry>(&self, entries: &mut [E]) -> Result<Packed> {
        let (part_rows, pad_rows) = (self.tile.part_rows() as u32, self.known.pad_rows as u32);
        let (mut num_parts, mut num_elements, mut num_rows) = (0u64, 0u64, 0u64);
        // Of the matrix before: divisions take long.
        let (mut of, mut num_down, mut num_across) = ([0u32; 2], 0u32, 0u32);
        for entry in entries {
            let matrix = entry.matrix();
            let [rows, columns] = [matrix.num_rows, matrix.num_columns];
            if of != [rows, columns] {
                of = [rows, columns];
                let height = rows.next_multiple_of(pad_rows);
                num_down = height.div_ceil(part_rows);
                let stack = self.tile.stack_of(height, self.tile.part_rows(), self.known.to);
                num_across = columns.div_ceil(u32::from(self.tile.columns)).div_ceil(stack);
            }
            (matrix.first_part, matrix.num_down) = (num_parts as u32, num_down);
            num_parts += u64::from(num_down) * u64::from(num_across);
            num_elements = num_elements.saturating_add(u64::from(rows) * u64::from(columns));
            num_rows += u64::from(rows);
            if num_parts > MAX_BLOCKS {
                return Err(too_many_parts());
            }
        }
        Ok(Packed { num_parts: num_parts as u32, num_elements, num_rows })
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
