//! The one validator of the gate: from views that a caller made to rows that are known good. `None` means that there is nothing to write.
#![forbid(unsafe_code)]

use super::view::{Rows, RowsMut};
use super::{Activation, GateOptions, Rounding};
use crate::error::{Error, Result};
use crate::id::Expert;
use crate::space::Space;
use crate::tensor::{DType, TensorView, TensorViewMut};

/// Everything that decides the gate of a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gates<R> {
    /// `[T, K]`.
    pub(super) x: Rows<R>,
    /// One row of K.
    pub(super) w: Rows<R>,
    /// One element.
    pub(super) bias: Option<Rows<R>>,
    /// T rows of one element.
    pub(super) addend: Option<Rows<R>>,
    pub(super) activation: Activation,
    pub(super) rounding: Rounding,
    pub(super) scale: f32,
    pub(super) weights_are_constant: bool,
    /// The type that g is rounded to by [`Rounding::Framework`].
    pub(super) g_dtype: DType,
}

type Checked<T> = Result<Option<T>>;
pub(super) type GatesIn<'a, S> = Gates<<S as Space>::Read<'a>>;
pub(super) type RowsIn<'a, S> = Rows<<S as Space>::Read<'a>>;
pub(super) type RowsOut<'a, S> = RowsMut<<S as Space>::Write<'a>>;

/// Checks a call of [`super::gate`].
pub(super) fn gate<'a, S: Space>(
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    options: &GateOptions<'a>,
    out: &'a mut TensorViewMut<'_>,
) -> Checked<(GatesIn<'a, S>, RowsOut<'a, S>)> {
    const OP: &str = "gate";
    let gates = gates(OP, space, x, w, options)?;
    one_of(OP, "out", out.dtype(), &x_or_f32(&gates))?;
    let gates = Gates { g_dtype: out.dtype(), ..gates };
    shape_is_column(OP, "out", out.shape(), gates.x.num_rows)?;
    let out = rows_mut(OP, space, "out", out)?;
    Ok(out.map(|out| (gates, out)))
}

/// Checks a call of [`super::gate_mul`] or [`super::gate_mul_add`].
pub(super) fn gate_mul<'a, S: Space>(
    op: &'static str,
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    s: TensorView<'a>,
    options: &GateOptions<'a>,
    out: &'a mut TensorViewMut<'_>,
) -> Checked<(GatesIn<'a, S>, RowsIn<'a, S>, RowsOut<'a, S>)> {
    let gates = gates(op, space, x, w, options)?;
    one_of(op, "s", s.dtype(), &x_or_f32(&gates))?;
    let (num_tokens, n) = matrix(op, "s", s.shape())?;
    if num_tokens != gates.x.num_rows {
        return Err(Error::invalid(op, "s", format!("of {num_tokens} rows"), format!("of {}, as x", gates.x.num_rows)));
    }
    let s = rows(op, space, "s", s)?;
    let out = product(op, space, s, n, out)?;
    Ok(out.map(|out| (gates, s, out)))
}

/// Checks a call of [`super::gate_append_topk`].
pub(super) fn gate_append_topk<'a, S: Space>(
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    shared_expert: Expert,
    options: &GateOptions<'a>,
    topk_idx: &'a mut TensorViewMut<'_>,
    topk_weights: &'a mut TensorViewMut<'_>,
) -> Checked<(GatesIn<'a, S>, RowsOut<'a, S>, RowsOut<'a, S>)> {
    const OP: &str = "gate_append_topk";
    let gates = Gates { g_dtype: DType::F32, ..gates(OP, space, x, w, options)? };
    one_of(OP, "topk_idx", topk_idx.dtype(), &[DType::I32, DType::I64])?;
    one_of(OP, "topk_weights", topk_weights.dtype(), &[DType::F32])?;
    if topk_idx.dtype() == DType::I32 && i32::try_from(shared_expert.0).is_err() {
        return Err(Error::invalid(OP, "shared_expert", shared_expert, format!("at most {}, as topk_idx is i32", i32::MAX)));
    }
    let (num_tokens, num_columns) = matrix(OP, "topk_idx", topk_idx.shape())?;
    if num_tokens != gates.x.num_rows {
        return Err(Error::invalid(OP, "topk_idx", format!("of {num_tokens} rows"), format!("of {}, as x", gates.x.num_rows)));
    }
    if num_columns == 0 {
        return Err(Error::invalid(OP, "topk_idx", "without columns", "one column at least"));
    }
    same_shape(OP, "topk_weights", topk_weights.shape(), "topk_idx", topk_idx.shape())?;
    let idx = rows_mut(OP, space, "topk_idx", topk_idx)?;
    let weights = rows_mut(OP, space, "topk_weights", topk_weights)?;
    Ok(idx.zip(weights).map(|(idx, weights)| (gates, idx, weights)))
}

/// Checks a call of [`super::sigmoid_mul`].
pub(super) fn sigmoid_mul<'a, S: Space>(
    space: &S,
    s: TensorView<'a>,
    g: TensorView<'a>,
    out: &'a mut TensorViewMut<'_>,
) -> Checked<(RowsIn<'a, S>, RowsIn<'a, S>, RowsOut<'a, S>)> {
    const OP: &str = "sigmoid_mul";
    one_of(OP, "s", s.dtype(), &FLOATS)?;
    one_of(OP, "g", g.dtype(), &[s.dtype(), DType::F32])?;
    let (num_tokens, n) = matrix(OP, "s", s.shape())?;
    let shape = matrix(OP, "g", g.shape())?;
    if shape != (num_tokens, 1) && shape != (num_tokens, n) {
        let want = format!("[{num_tokens}, 1] or [{num_tokens}, {n}], as s");
        return Err(Error::invalid(OP, "g", format!("of shape {:?}", g.shape()), want));
    }
    let s = rows(OP, space, "s", s)?;
    let g = rows(OP, space, "g", g)?;
    let out = product(OP, space, s, n, out)?;
    Ok(out.map(|out| (s, g, out)))
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

pub(super) fn x_or_f32(gates: &Gates<impl Copy>) -> [DType; 2] {
    [gates.x.dtype, DType::F32]
}

/// The arguments that four of the five forms share.
pub(super) fn gates<'a, S: Space>(
    op: &'static str,
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    options: &GateOptions<'a>,
) -> Result<GatesIn<'a, S>> {
    let GateOptions { activation, rounding, bias, addend, scale, weights_are_constant } = *options;
    one_of(op, "x", x.dtype(), &FLOATS)?;
    let (num_tokens, k) = matrix(op, "x", x.shape())?;
    let of_x = [x.dtype(), DType::F32];
    one_of(op, "w", w.dtype(), &of_x)?;
    if *w.shape() != [k] && *w.shape() != [1, k] {
        return Err(Error::invalid(op, "w", format!("of shape {:?}", w.shape()), format!("[{k}] or [1, {k}], the columns of x")));
    }
    if let Some(bias) = bias {
        one_of(op, "bias", bias.dtype(), &of_x)?;
        if *bias.shape() != [1] {
            return Err(Error::invalid(op, "bias", format!("of shape {:?}", bias.shape()), "[1]"));
        }
    }
    if let Some(addend) = addend {
        one_of(op, "addend", addend.dtype(), &of_x)?;
        shape_is_column(op, "addend", addend.shape(), num_tokens)?;
    }
    if !scale.is_finite() {
        return Err(Error::invalid(op, "scale", scale, "a finite number"));
    }
    Ok(Gates {
        x: rows(op, space, "x", x)?,
        w: Rows { num_rows: 1, row_bytes: k * w.dtype().size(), ..rows(op, space, "w", w)? },
        bias: bias.map(|bias| rows(op, space, "bias", bias)).transpose()?,
        addend: addend.map(|addend| rows(op, space, "addend", addend)).transpose()?,
        activation,
        rounding,
        scale,
        weights_are_constant,
        g_dtype: x.dtype(),
    })
}

/// `out` of the shape and type of `s`.
fn product<'a, S: Space>(
    op: &'static str,
    space: &S,
    s: Rows<impl Copy>,
    n: usize,
    out: &'a mut TensorViewMut<'_>,
) -> Result<Option<RowsOut<'a, S>>> {
    one_of(op, "out", out.dtype(), &[s.dtype])?;
    same_shape(op, "out", out.shape(), "s", &[s.num_rows, n])?;
    rows_mut(op, space, "out", out)
}

pub(super) fn one_of(op: &'static str, what: &str, got: DType, allowed: &[DType]) -> Result<()> {
    if allowed.contains(&got) {
        return Ok(());
    }
    let mut names: Vec<_> = allowed.iter().map(|d| d.name()).collect();
    names.dedup();
    Err(Error::invalid(op, what, format!("of type {got}"), names.join(" or ")))
}

pub(super) fn matrix(op: &'static str, what: &str, shape: &[usize]) -> Result<(usize, usize)> {
    match *shape {
        [rows, columns] => Ok((rows, columns)),
        _ => Err(Error::invalid(op, what, format!("of shape {shape:?}"), "two dimensions")),
    }
}

pub(super) fn same_shape(op: &'static str, what: &str, got: &[usize], of: &str, shape: &[usize]) -> Result<()> {
    if got == shape {
        return Ok(());
    }
    Err(Error::invalid(op, what, format!("of shape {got:?}"), format!("{shape:?}, as {of}")))
}

pub(super) fn shape_is_column(op: &'static str, what: &str, shape: &[usize], num_tokens: usize) -> Result<()> {
    if *shape == [num_tokens] || *shape == [num_tokens, 1] {
        return Ok(());
    }
    let want = format!("[{num_tokens}] or [{num_tokens}, 1], the rows of x");
    Err(Error::invalid(op, what, format!("of shape {shape:?}"), want))
}

/// Rows, elements in a row, and bytes from row to row; a vector is rows of one element.
fn geometry(dtype: DType, shape: &[usize], strides: &[usize]) -> (usize, usize, usize) {
    let size = dtype.size();
    let (num_rows, columns, stride) = match (shape, strides) {
        ([rows, columns], [stride, _]) => (*rows, *columns, *stride),
        (shape, _) => (shape.iter().product(), 1, 1),
    };
    // Without rows the columns may be any number, and with one row the stride, as neither is walked.
    let row_bytes = if num_rows == 0 { 0 } else { columns * size };
    (num_rows, row_bytes, if num_rows > 1 && columns > 0 { stride * size } else { row_bytes })
}

pub(super) fn rows<'a, S: Space>(op: &'static str, space: &S, what: &str, view: TensorView<'a>) -> Result<RowsIn<'a, S>> {
    let (num_rows, row_bytes, stride_bytes) = geometry(view.dtype(), view.shape(), view.strides());
    Ok(Rows { memory: space.read(op, what, view)?, dtype: view.dtype(), num_rows, row_bytes, stride_bytes })
}

/// `None` when the view has no element.
pub(super) fn rows_mut<'a, S: Space>(
    op: &'static str,
    space: &S,
    what: &str,
    view: &'a mut TensorViewMut<'_>,
) -> Result<Option<RowsOut<'a, S>>> {
    let (num_rows, row_bytes, stride_bytes) = geometry(view.dtype(), view.shape(), view.strides());
    let dtype = view.dtype();
    if stride_bytes < row_bytes {
        let got = format!("rows {} elements apart", stride_bytes / dtype.size());
        let want = format!("at least {} apart: rows that do not overlap", row_bytes / dtype.size());
        return Err(Error::invalid(op, what, got, want));
    }
    let memory = space.write(op, what, view)?;
    Ok((num_rows > 0 && row_bytes > 0).then_some(RowsMut { memory, dtype, num_rows, row_bytes, stride_bytes }))
}
