//! The one validator of cast: what it returns is known good.
#![forbid(unsafe_code)]

use super::layout::{Shape, Side, Sums, scale_shape};
use super::{Formula, OP, Operands, Options, ScaleLayout, Scaling};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorView, TensorViewMut};

/// What all matrices of a call have in common; every view fits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) scaling: Scaling,
    pub(super) pad_rows: usize,
    pub(super) reset_amax: bool,
}

/// Checks a list; `None` when there is nothing to do.
pub(super) fn list(matrices: &[Operands<'_>], options: &Options<'_>) -> Result<Option<Known>> {
    options_alone(options)?;
    let Some(first) = matrices.first() else { return Ok(None) };
    let mut known = None;
    for (i, matrix) in matrices.iter().enumerate() {
        let name = Name { matrix: Some(i) };
        known = Some(operands(name, matrix, first, options)?);
        let (rows, columns) = extents(name, &matrix.x)?;
        let sums = Sums::default().with(rows, options.pad_rows, &options.scaling);
        let sums = sums.ok_or_else(|| too_many_rows(name.of("x"), rows))?;
        outputs(name, matrix, options, &sums, columns, false)?;
        per_matrix(name, matrix, 1)?;
    }
    Ok(known.filter(|_| !is_noop(options)))
}

/// Checks a grouped call; `None` when there is nothing to do.
pub(super) fn grouped(all: &Operands<'_>, offsets: &TensorView<'_>, options: &Options<'_>) -> Result<Option<Known>> {
    options_alone(options)?;
    let name = Name { matrix: None };
    let known = operands(name, all, all, options)?;
    let (capacity, columns) = extents(name, &all.x)?;
    let sums = sums_of(offsets, capacity, options)?;
    outputs(name, all, options, &sums, columns, true)?;
    per_matrix(name, all, offsets.shape()[0] - 1)?;
    Ok(Some(known).filter(|_| !is_noop(options)))
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

fn options_alone(options: &Options<'_>) -> Result<()> {
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
        noop.host(OP, "noop")?;
    }
    Ok(())
}

fn is_noop(options: &Options<'_>) -> bool {
    let Some(noop) = &options.noop else { return false };
    let bytes = noop.host(OP, "noop").expect("checked");
    let bits = u32::from_le_bytes(*bytes.first_chunk().expect("checked"));
    // -0 is zero.
    if noop.dtype() == DType::F32 { f32::from_bits(bits) != 0.0 } else { bits != 0 }
}

/// Types, presence, and what does not depend on the number of rows.
fn operands(name: Name, o: &Operands<'_>, first: &Operands<'_>, options: &Options<'_>) -> Result<Known> {
    let from = o.x.dtype();
    dtype_of(name.of("x"), from, &[DType::F32, DType::F16, DType::BF16])?;
    same(name.of("x"), from, first.x.dtype())?;
    o.x.host(OP, name.of("x"))?;
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
            output.host(OP, name.of(field))?;
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
    Ok(Known { from, to, scaling: options.scaling, pad_rows: options.pad_rows, reset_amax: options.reset_amax })
}

/// Rows and columns of the input.
fn extents(name: Name, x: &TensorView<'_>) -> Result<(usize, usize)> {
    match x.shape() {
        &[rows, columns] => Ok((rows, columns)),
        shape => Err(Error::invalid(OP, name.of("x"), format!("of shape {shape:?}"), "[rows, columns]")),
    }
}

fn too_many_rows(name: impl Into<String> + Copy, rows: usize) -> Error {
    Error::invalid(OP, name, format!("of {rows} rows"), "fewer, so that padded rows can be counted")
}

/// Reads the offsets and adds up the extents of the matrices.
fn sums_of(offsets: &TensorView<'_>, capacity: usize, options: &Options<'_>) -> Result<Sums> {
    dtype_of("offsets", offsets.dtype(), &[DType::I32, DType::I64])?;
    let bytes = offsets.host(OP, "offsets")?;
    let num_offsets = match offsets.shape() {
        &[n] if n > 0 => n,
        shape => return Err(Error::invalid(OP, "offsets", format!("of shape {shape:?}"), "[number of matrices + 1]")),
    };
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

fn outputs(name: Name, o: &Operands<'_>, options: &Options<'_>, sums: &Sums, columns: usize, is_grouped: bool) -> Result<()> {
    if let Some(row) = &o.row {
        output(name.of("row"), row, &Shape::exact([sums.rows, columns]).growing(0, is_grouped))?;
    }
    if let Some(column) = &o.column {
        let shape = if is_grouped { Shape::exact([columns.saturating_mul(sums.rows)]) } else { Shape::exact([columns, sums.rows]) };
        output(name.of("column"), column, &shape.growing(0, is_grouped))?;
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
        output(name, view, &scale_shape(side, block, layout, sums, columns, is_grouped))?;
        let row_bytes = view.strides()[0].saturating_mul(view.dtype().size());
        // 16 bytes: what TMA and Transformer Engine's GEMMs ask for (spec).
        if layout != ScaleLayout::RowMajor && view.shape()[0] > 1 && !row_bytes.is_multiple_of(16) {
            return Err(Error::invalid(OP, name, format!("with rows {row_bytes} bytes apart"), "rows a multiple of 16 bytes apart"));
        }
    }
    Ok(())
}

fn per_matrix(name: Name, o: &Operands<'_>, num_matrices: usize) -> Result<()> {
    let shape = Shape::exact([num_matrices]);
    if let Some(scale) = &o.scale {
        dtype_of(name.of("scale"), scale.dtype(), &[DType::F32])?;
        shape_of(name.of("scale"), scale.shape(), &shape)?;
        scale.host(OP, name.of("scale"))?;
    }
    for (field, view) in [("amax", &o.amax), ("scale_inv", &o.scale_inv)] {
        if let Some(view) = view {
            dtype_of(name.of(field), view.dtype(), &[DType::F32])?;
            output(name.of(field), view, &shape)?;
        }
    }
    Ok(())
}

/// An output: its shape, rows that do not overlap, host memory.
fn output(name: impl Into<String> + Copy, view: &TensorViewMut<'_>, want: &Shape) -> Result<()> {
    shape_of(name, view.shape(), want)?;
    if let (&[rows, columns], &[stride, _]) = (view.shape(), view.strides())
        && rows > 1
        && stride < columns
    {
        return Err(Error::invalid(OP, name, format!("with rows {stride} apart"), format!("rows at least {columns} apart")));
    }
    view.host(OP, name).map(|_| ())
}

fn shape_of(name: impl Into<String> + Copy, got: &[usize], want: &Shape) -> Result<()> {
    let fits = |d: usize| got[d] == want[d] || want.grows == Some(d) && got[d] > want[d];
    if got.len() == want.len() && (0..got.len()).all(fits) {
        return Ok(());
    }
    let larger = match want.grows {
        Some(d) if want.len() > 1 => format!(" or more in dimension {d}"),
        Some(_) => " or more".into(),
        None => String::new(),
    };
    Err(Error::invalid(OP, name, format!("of shape {got:?}"), format!("shape {:?}{larger}", &want[..])))
}

fn dtype_of(name: impl Into<String> + Copy, got: DType, want: &[DType]) -> Result<()> {
    if want.contains(&got) {
        return Ok(());
    }
    let names: Vec<_> = want.iter().map(|d| d.name()).collect();
    Err(Error::invalid(OP, name, got, names.join(" or ")))
}

fn same(name: impl Into<String> + Copy, got: DType, first: DType) -> Result<()> {
    if got == first {
        return Ok(());
    }
    Err(Error::invalid(OP, name, got, format!("{first}, as the other copies of this call")))
}

fn present(name: impl Into<String> + Copy, is: bool, must_be: bool, why: &str) -> Result<()> {
    let word = |p| if p { "present" } else { "absent" };
    if is == must_be {
        return Ok(());
    }
    Err(Error::invalid(OP, name, word(is), format!("{} ({why})", word(must_be))))
}
