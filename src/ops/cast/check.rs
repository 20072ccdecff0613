//! The one validator of cast: what it returns is known good.
#![forbid(unsafe_code)]

use super::layout::{Shape, Side, Sums, scale_shape};
use super::like::{Like, overlapping, range};
use super::overlap::{self, Region};
use super::{Formula, OP, Operands, Options, ScaleLayout, Scaling};
use crate::backend::{Cpu, Cuda};
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceAddress, Layout, TensorView, TensorViewMut};

/// The memory in which a call's tensors must lie, and what can be known of their contents before the call runs.
pub(super) trait Memory {
    /// An error that names `what` when the view lies elsewhere.
    fn holds(&self, what: impl Into<String>, view: &TensorView<'_>) -> Result<()>;

    /// As [`Memory::holds`], of a view that is written.
    fn holds_output(&self, what: impl Into<String>, view: &TensorViewMut<'_>) -> Result<()>;

    /// The device on which they lie; `None` for host memory.
    fn device(&self) -> Option<u32>;

    /// Whether two views may share bytes: on a host the borrow checker has seen to that.
    fn may_overlap(&self) -> bool;

    /// The extents of a group, or the least there can be when its offsets are read later.
    fn sums(&self, offsets: &TensorView<'_>, capacity: usize, options: &Options<'_>) -> Result<Sums>;
}

impl Memory for Cpu {
    fn holds(&self, what: impl Into<String>, view: &TensorView<'_>) -> Result<()> {
        view.host(OP, what).map(|_| ())
    }

    fn holds_output(&self, what: impl Into<String>, view: &TensorViewMut<'_>) -> Result<()> {
        view.host(OP, what).map(|_| ())
    }

    fn device(&self) -> Option<u32> {
        None
    }

    fn may_overlap(&self) -> bool {
        false
    }

    fn sums(&self, offsets: &TensorView<'_>, capacity: usize, options: &Options<'_>) -> Result<Sums> {
        sums_of(offsets, capacity, options)
    }
}

/// A list has hundreds of tensors: their devices are compared here, and their addresses are not looked up in the driver's tables.
impl Memory for Cuda {
    #[inline(always)]
    fn holds(&self, what: impl Into<String>, view: &TensorView<'_>) -> Result<()> {
        is_on(self, what, view.device(), view.layout().extent_bytes())
    }

    #[inline(always)]
    fn holds_output(&self, what: impl Into<String>, view: &TensorViewMut<'_>) -> Result<()> {
        is_on(self, what, view.device(), view.layout().extent_bytes())
    }

    fn device(&self) -> Option<u32> {
        Some(Cuda::device(self).ordinal())
    }

    fn may_overlap(&self) -> bool {
        true
    }

    fn sums(&self, _: &TensorView<'_>, _: usize, _: &Options<'_>) -> Result<Sums> {
        Ok(Sums::default())
    }
}

#[inline(always)]
fn is_on(cuda: &Cuda, what: impl Into<String>, found: Option<DeviceAddress>, extent_bytes: usize) -> Result<()> {
    let here = cuda.device().ordinal();
    if extent_bytes == 0 || found.is_some_and(|found| found.device == here) { Ok(()) } else { Err(elsewhere(what.into(), found, here)) }
}

#[cold]
fn elsewhere(what: String, found: Option<DeviceAddress>, here: u32) -> Error {
    let got = match found {
        Some(found) => format!("at address {:#x} of device {}", found.address, found.device),
        None => "in host memory".into(),
    };
    Error::invalid(OP, what, got, format!("in the memory of device {here} (the backend is cuda)"))
}

/// What all matrices of a call have in common; every view fits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) scaling: Scaling,
    pub(super) pad_rows: usize,
    pub(super) reset_amax: bool,
    /// On average over the matrices of a list.
    pub(super) mean_rows: usize,
}

/// Whether the flag, which was checked, says now that there is nothing to do. A GPU reads it when the operation runs.
pub(super) fn is_noop(_: &Cpu, options: &Options<'_>) -> bool {
    let Some(noop) = &options.noop else { return false };
    let bytes = noop.host(OP, "noop").expect("checked");
    let bits = u32::from_le_bytes(*bytes.first_chunk().expect("checked"));
    // -0 is zero.
    if noop.dtype() == DType::F32 { f32::from_bits(bits) != 0.0 } else { bits != 0 }
}

/// Checks a list; `None` for one without matrices. Hands each matrix that was found good to `each`: what it reads next is at hand then.
pub(super) fn list(
    memory: &impl Memory,
    matrices: &[Operands<'_>],
    options: &Options<'_>,
    mut each: impl FnMut(&Operands<'_>),
) -> Result<Option<Known>> {
    options_alone(memory, options)?;
    let Some(first) = matrices.first() else { return Ok(None) };
    let known = one_of_list(memory, 0, first, first, options)?;
    let (mut like, mut total_rows) = (Like::of(memory, first, options), 0usize);
    for (i, matrix) in matrices.iter().enumerate() {
        if !like.as_ref().is_some_and(|like: &Like<'_>| like.is_good(matrix)) {
            one_of_list(memory, i, matrix, first, options)?;
            like = Like::of(memory, matrix, options);
        }
        total_rows = total_rows.saturating_add(matrix.x.layout().first_dims()[0]);
        each(matrix);
    }
    Ok(Some(Known { mean_rows: total_rows / matrices.len(), ..known }))
}

/// Checks matrix `i` of a list.
#[inline(never)]
pub(super) fn one_of_list(
    memory: &impl Memory,
    i: usize,
    matrix: &Operands<'_>,
    first: &Operands<'_>,
    options: &Options<'_>,
) -> Result<Known> {
    let name = Name { matrix: Some(i) };
    let known = operands(memory, name, matrix, first, options)?;
    let (rows, columns) = extents(name, &matrix.x)?;
    let sums = Sums::default().with(rows, options.pad_rows, &options.scaling);
    let sums = sums.ok_or_else(|| too_many_rows(name.of("x"), rows))?;
    outputs(memory, name, matrix, options, &sums, columns, false)?;
    apart(memory, name, matrix)?;
    per_matrix(memory, name, matrix, 1)?;
    if matrix.status.is_some() {
        return Err(Error::invalid(OP, name.of("status"), "present", "absent: a list has no offsets"));
    }
    Ok(known)
}

/// Checks that no output of a checked list on a GPU shares bytes with another output or an input, of whichever matrix.
pub(super) fn all_apart(matrices: &[Operands<'_>], options: &Options<'_>) -> Result<()> {
    fn region(device: Option<DeviceAddress>, layout: &Layout) -> Option<Region> {
        let at = device.filter(|_| layout.extent_bytes() > 0)?.address;
        let size = layout.dtype().size() as u64;
        Some(match (layout.shape(), layout.strides()) {
            (&[rows, columns], &[stride, _]) => Region::new(at, rows as u64, columns as u64 * size, stride as u64 * size),
            _ => Region::new(at, 1, layout.extent_bytes() as u64, 0),
        })
    }
    let (mut outputs, mut inputs) = (Vec::with_capacity(matrices.len() * 6), Vec::with_capacity(matrices.len() * 2 + 1));
    for (i, o) in matrices.iter().enumerate() {
        let written = [
            ("row", &o.row),
            ("column", &o.column),
            ("row_scales", &o.row_scales),
            ("column_scales", &o.column_scales),
            ("amax", &o.amax),
            ("scale_inv", &o.scale_inv),
        ];
        let of = |view: &TensorViewMut<'_>| region(view.device(), view.layout());
        outputs.extend(written.into_iter().filter_map(|(field, view)| Some((of(view.as_ref()?)?, (Some(i), field)))));
        let of = |view: &TensorView<'_>| region(view.device(), view.layout());
        inputs.extend(
            [("x", Some(&o.x)), ("scale", o.scale.as_ref())].into_iter().filter_map(|(field, view)| Some((of(view?)?, (Some(i), field)))),
        );
    }
    inputs.extend(options.noop.as_ref().and_then(|noop| Some((region(noop.device(), noop.layout())?, (None, "noop")))));
    match overlap::shared(&mut outputs, &inputs) {
        None => Ok(()),
        Some(((matrix, field), (other, other_field))) => {
            let name = |matrix, field| String::from(Name { matrix }.of(field));
            Err(Error::invalid(
                OP,
                name(matrix, field),
                format!("overlapping {}", name(other, other_field)),
                "apart from every other tensor of the list",
            ))
        }
    }
}

/// Checks a grouped call.
pub(super) fn grouped(memory: &impl Memory, all: &Operands<'_>, offsets: &TensorView<'_>, options: &Options<'_>) -> Result<Known> {
    options_alone(memory, options)?;
    let name = Name { matrix: None };
    let known = operands(memory, name, all, all, options)?;
    let (capacity, columns) = extents(name, &all.x)?;
    dtype_of("offsets", offsets.dtype(), &[DType::I32, DType::I64])?;
    memory.holds("offsets", offsets)?;
    if !matches!(offsets.shape(), &[n] if n > 0) {
        return Err(Error::invalid(OP, "offsets", format!("of shape {:?}", offsets.shape()), "[number of matrices + 1]"));
    }
    let sums = memory.sums(offsets, capacity, options)?;
    outputs(memory, name, all, options, &sums, columns, true)?;
    apart(memory, name, all)?;
    per_matrix(memory, name, all, offsets.shape()[0] - 1)?;
    if let Some(status) = &all.status {
        dtype_of("status", status.dtype(), &[DType::U32])?;
        output(memory, "status", status, &Shape::exact([1]))?;
    }
    Ok(known)
}

/// Offset `i`, of a view that was checked.
pub(super) fn offset(dtype: DType, bytes: &[u8], i: usize) -> i64 {
    match dtype {
        DType::I32 => i32::from_le_bytes(*bytes.as_chunks().0.get(i).expect("inside the checked view")) as i64,
        _ => i64::from_le_bytes(*bytes.as_chunks().0.get(i).expect("inside the checked view")),
    }
}

/// Whose fields an error names. Text is made for an error only: a good call allocates nothing.
#[derive(Clone, Copy)]
struct Name {
    /// Place in the list; `None` in a group.
    matrix: Option<usize>,
}

impl Name {
    fn of(self, field: &str) -> Field<'_> {
        Field { matrix: self.matrix, field }
    }
}

/// A field of an operand.
#[derive(Clone, Copy)]
struct Field<'n> {
    matrix: Option<usize>,
    field: &'n str,
}

impl From<Field<'_>> for String {
    fn from(Field { matrix, field }: Field<'_>) -> Self {
        matrix.map_or_else(|| field.into(), |i| format!("matrices[{i}].{field}"))
    }
}

fn options_alone(memory: &impl Memory, options: &Options<'_>) -> Result<()> {
    if !matches!(options.pad_rows, 1 | 16 | 32 | 128) {
        return Err(Error::invalid(OP, "pad_rows", options.pad_rows, "1, 16, 32 or 128"));
    }
    let (epsilon, name) = match options.scaling {
        Scaling::Current { epsilon, .. } => (epsilon, "scaling.epsilon"),
        Scaling::Block { formula: Formula::TransformerEngine { epsilon, .. }, .. } => (epsilon, "scaling.formula.epsilon"),
        _ => (0.0, ""),
    };
    if !(epsilon.is_finite() && epsilon >= 0.0) {
        return Err(Error::invalid(OP, name, epsilon, "finite and not negative"));
    }
    if let Scaling::Block { formula, layout: ScaleLayout::PackedE8m0, .. } = options.scaling
        && !formula.is_power_of_two()
    {
        return Err(Error::invalid(OP, "scaling.layout", "PackedE8m0", "RowMajor or ColumnMajor, or a formula of powers of two"));
    }
    if let Some(noop) = &options.noop {
        dtype_of("noop", noop.dtype(), &[DType::F32, DType::I32, DType::U32])?;
        shape_of("noop", noop.shape(), &Shape::exact([1]))?;
        memory.holds("noop", noop)?;
    }
    Ok(())
}

/// Types, presence, and what does not depend on the number of rows.
#[inline(always)]
fn operands(memory: &impl Memory, name: Name, o: &Operands<'_>, first: &Operands<'_>, options: &Options<'_>) -> Result<Known> {
    let from = o.x.dtype();
    dtype_of(name.of("x"), from, &[DType::F32, DType::F16, DType::BF16])?;
    same(name.of("x"), from, first.x.dtype())?;
    memory.holds(name.of("x"), &o.x)?;
    if o.row.is_none() && o.column.is_none() {
        return Err(Error::invalid(OP, name.of("row"), "absent", "present, or column present"));
    }
    for (field, output, of_first) in [("row", &o.row, &first.row), ("column", &o.column, &first.column)] {
        present(name.of(field), output.is_some(), of_first.is_some(), "as in the first matrix")?;
    }
    let to = o.row.as_ref().or(o.column.as_ref()).expect("one is present").dtype();
    let fp8 = [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz];
    let any = [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz, DType::F16, DType::BF16, DType::F32];
    let of_first = first.row.as_ref().or(first.column.as_ref()).expect("as in this matrix").dtype();
    for (field, output) in [("row", &o.row), ("column", &o.column)] {
        if let Some(output) = output {
            dtype_of(name.of(field), output.dtype(), if options.scaling == Scaling::Given { &any } else { &fp8 })?;
            same(name.of(field), output.dtype(), of_first)?;
            memory.holds_output(name.of(field), output)?;
        }
    }
    let is_block = matches!(options.scaling, Scaling::Block { .. });
    if o.scale.is_some() && options.scaling != Scaling::Given {
        return Err(Error::invalid(OP, name.of("scale"), "present", "absent: this scaling computes its scales"));
    }
    if o.scale_inv.is_some() && is_block {
        return Err(Error::invalid(OP, name.of("scale_inv"), "present", "absent: each block has a scale of its own"));
    }
    let why = if is_block { "for each copy" } else { "only with block scales" };
    present(name.of("row_scales"), o.row_scales.is_some(), is_block && o.row.is_some(), why)?;
    present(name.of("column_scales"), o.column_scales.is_some(), is_block && o.column.is_some(), why)?;
    Ok(Known { from, to, scaling: options.scaling, pad_rows: options.pad_rows, reset_amax: options.reset_amax, mean_rows: 0 })
}

/// Rows and columns of the input.
#[inline(always)]
fn extents(name: Name, x: &TensorView<'_>) -> Result<(usize, usize)> {
    match x.shape() {
        &[rows, columns] => Ok((rows, columns)),
        shape => Err(Error::invalid(OP, name.of("x"), format!("of shape {shape:?}"), "[rows, columns]")),
    }
}

fn too_many_rows(name: impl Into<String> + Copy, rows: usize) -> Error {
    Error::invalid(OP, name, format!("of {rows} rows"), "fewer, so that padded rows can be counted")
}

/// Reads the offsets, of the right shape, and adds up the extents of the matrices.
fn sums_of(offsets: &TensorView<'_>, capacity: usize, options: &Options<'_>) -> Result<Sums> {
    let bytes = offsets.host(OP, "offsets")?;
    let num_offsets = offsets.shape()[0];
    let mut sums = Sums::default();
    let mut before = 0;
    for i in 0..num_offsets {
        let at = offset(offsets.dtype(), bytes, i);
        let name = || format!("offsets[{i}]");
        if i == 0 && at != 0 {
            return Err(Error::invalid(OP, name(), at, 0));
        }
        if at < before || at as u64 > capacity as u64 {
            return Err(Error::invalid(OP, name(), at, format!("from {before} (the offset before) to {capacity} (the rows of x)")));
        }
        let rows = (at - before) as usize;
        sums = sums.with(rows, options.pad_rows, &options.scaling).ok_or_else(|| too_many_rows("x", capacity))?;
        before = at;
    }
    Ok(sums)
}

#[inline(always)]
fn outputs(
    memory: &impl Memory,
    name: Name,
    o: &Operands<'_>,
    options: &Options<'_>,
    sums: &Sums,
    columns: usize,
    is_grouped: bool,
) -> Result<()> {
    if let Some(row) = &o.row {
        output(memory, name.of("row"), row, &Shape::exact([sums.rows, columns]).growing(0, is_grouped))?;
    }
    if let Some(column) = &o.column {
        let shape = if is_grouped { Shape::exact([columns.saturating_mul(sums.rows)]) } else { Shape::exact([columns, sums.rows]) };
        output(memory, name.of("column"), column, &shape.growing(0, is_grouped))?;
    }
    let Scaling::Block { block, formula, layout } = options.scaling else { return Ok(()) };
    for (field, side, view) in [("row_scales", Side::Row, &o.row_scales), ("column_scales", Side::Column, &o.column_scales)] {
        let Some(view) = view else { continue };
        let name = name.of(field);
        let dtypes: &[DType] = match (layout, formula) {
            (ScaleLayout::PackedE8m0, _) => &[DType::I32, DType::U32],
            (_, Formula::Mx) => &[DType::E8M0],
            (_, f) if f.is_power_of_two() => &[DType::F32, DType::E8M0],
            _ => &[DType::F32],
        };
        dtype_of(name, view.dtype(), dtypes)?;
        output(memory, name, view, &scale_shape(side, block, layout, sums, columns, is_grouped))?;
        let row_bytes = view.strides()[0].saturating_mul(view.dtype().size());
        // 16 bytes: what TMA and Transformer Engine's GEMMs ask for (spec).
        if layout != ScaleLayout::RowMajor && view.shape()[0] > 1 && !row_bytes.is_multiple_of(16) {
            return Err(Error::invalid(OP, name, format!("with rows {row_bytes} bytes apart"), "rows a multiple of 16 bytes apart"));
        }
    }
    Ok(())
}

/// The large tensors of one matrix share no byte. (Of all tensors of a long list that would take longer than the launch.)
#[inline(always)]
fn apart(memory: &impl Memory, name: Name, o: &Operands<'_>) -> Result<()> {
    if !memory.may_overlap() {
        return Ok(());
    }
    let of = |view: &Option<TensorViewMut<'_>>| view.as_ref().map_or((0, 0), |view| range(view.address(), view.layout()));
    match overlapping(range(o.x.address(), o.x.layout()), of(&o.row), of(&o.column)) {
        None => Ok(()),
        Some(("row", _)) => Err(Error::invalid(OP, name.of("row"), "overlapping x", "apart from x")),
        Some((field, with)) => Err(Error::invalid(OP, name.of(field), format!("overlapping {with}"), "apart from x and row")),
    }
}

#[inline(always)]
fn per_matrix(memory: &impl Memory, name: Name, o: &Operands<'_>, num_matrices: usize) -> Result<()> {
    let shape = Shape::exact([num_matrices]);
    if let Some(scale) = &o.scale {
        dtype_of(name.of("scale"), scale.dtype(), &[DType::F32])?;
        shape_of(name.of("scale"), scale.shape(), &shape)?;
        memory.holds(name.of("scale"), scale)?;
    }
    for (field, view) in [("amax", &o.amax), ("scale_inv", &o.scale_inv)] {
        if let Some(view) = view {
            dtype_of(name.of(field), view.dtype(), &[DType::F32])?;
            output(memory, name.of(field), view, &shape)?;
        }
    }
    Ok(())
}

/// An output: its shape, rows that do not overlap, its memory.
#[inline(always)]
fn output(memory: &impl Memory, name: impl Into<String> + Copy, view: &TensorViewMut<'_>, want: &Shape) -> Result<()> {
    shape_of(name, view.shape(), want)?;
    if let (&[rows, columns], &[stride, _]) = (view.shape(), view.strides())
        && rows > 1
        && stride < columns
    {
        return Err(Error::invalid(OP, name, format!("with rows {stride} apart"), format!("rows at least {columns} apart")));
    }
    memory.holds_output(name, view)
}

// These are looked through hundreds of times a call: what makes text stands apart.

#[inline(always)]
fn shape_of(name: impl Into<String> + Copy, got: &[usize], want: &Shape) -> Result<()> {
    let fits = |d: usize| got[d] == want[d] || want.grows == Some(d) && got[d] > want[d];
    if got.len() == want.len() && (0..got.len()).all(fits) { Ok(()) } else { Err(another_shape(name.into(), got, want)) }
}

#[cold]
fn another_shape(name: String, got: &[usize], want: &Shape) -> Error {
    let larger = match want.grows {
        Some(d) if want.len() > 1 => format!(" or more in dimension {d}"),
        Some(_) => " or more".into(),
        None => String::new(),
    };
    Error::invalid(OP, name, format!("of shape {got:?}"), format!("shape {:?}{larger}", &want[..]))
}

#[inline(always)]
fn dtype_of(name: impl Into<String> + Copy, got: DType, want: &[DType]) -> Result<()> {
    if want.contains(&got) { Ok(()) } else { Err(another_dtype(name.into(), got, want)) }
}

#[cold]
fn another_dtype(name: String, got: DType, want: &[DType]) -> Error {
    let names: Vec<_> = want.iter().map(|d| d.name()).collect();
    Error::invalid(OP, name, got, names.join(" or "))
}

#[inline(always)]
fn same(name: impl Into<String> + Copy, got: DType, first: DType) -> Result<()> {
    if got == first { Ok(()) } else { Err(mixed(name.into(), got, first)) }
}

#[cold]
fn mixed(name: String, got: DType, first: DType) -> Error {
    Error::invalid(OP, name, got, format!("{first}, as the other copies of this call"))
}

#[inline(always)]
fn present(name: impl Into<String> + Copy, is: bool, must_be: bool, why: &str) -> Result<()> {
    if is == must_be { Ok(()) } else { Err(not_as_wanted(name.into(), is, must_be, why)) }
}

#[cold]
fn not_as_wanted(name: String, is: bool, must_be: bool, why: &str) -> Error {
    let word = |p| if p { "present" } else { "absent" };
    Error::invalid(OP, name, word(is), format!("{} ({why})", word(must_be)))
}
