//! The one validator of the gate's backward: as that of the forward, whose rules for shared arguments it uses.
#![forbid(unsafe_code)]

use super::super::GateOptions;
use super::super::check::{GatesIn, RowsIn, RowsOut, gates, matrix, one_of, rows, rows_mut, same_shape, shape_is_column, x_or_f32};
use super::super::view::RowsMut;
use super::{GateGradients, GateMulGradients};
use crate::error::{Error, Result};
use crate::space::Space;
use crate::tensor::{DType, TensorView, TensorViewMut};

/// A checked call of [`super::gate_backward`]. A result is absent when it was not asked for or has no element.
pub(super) struct GateBackward<'a, S: Space> {
    pub(super) gates: GatesIn<'a, S>,
    /// T rows of one element.
    pub(super) dg: RowsIn<'a, S>,
    /// T rows of one element.
    pub(super) dlogit: Option<RowsOut<'a, S>>,
    /// `[T, K]`.
    pub(super) dx: Option<RowsOut<'a, S>>,
    /// K rows of one element, without distance.
    pub(super) dw: Option<RowsOut<'a, S>>,
    /// One element.
    pub(super) dbias: Option<RowsOut<'a, S>>,
}

/// Checks a call of [`super::gate_backward`].
pub(super) fn gate_backward<'a, S: Space>(
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    dg: TensorView<'a>,
    options: &GateOptions<'a>,
    outputs: &'a mut GateGradients<'_>,
) -> Result<GateBackward<'a, S>> {
    const OP: &str = "gate_backward";
    let gates = gates(OP, space, x, w, options)?;
    let num_tokens = gates.x.num_rows;
    one_of(OP, "dg", dg.dtype(), &x_or_f32(&gates))?;
    shape_is_column(OP, "dg", dg.shape(), num_tokens)?;
    let dg = rows(OP, space, "dg", dg)?;
    let GateGradients { dlogit, dx, dw, dbias } = outputs;
    let dlogit = f32_column(OP, space, "dlogit", dlogit, num_tokens)?;
    let dx = optional(dx, |dx| {
        one_of(OP, "dx", dx.dtype(), &[x.dtype()])?;
        same_shape(OP, "dx", dx.shape(), "x", x.shape())?;
        rows_mut(OP, space, "dx", dx)
    })?;
    let dw = optional(dw, |dw| {
        one_of(OP, "dw", dw.dtype(), &[w.dtype(), DType::F32])?;
        let k = x.shape()[1];
        if *dw.shape() != [k] && *dw.shape() != [1, k] {
            return Err(Error::invalid(OP, "dw", format!("of shape {:?}", dw.shape()), format!("[{k}] or [1, {k}], the columns of x")));
        }
        let size = dw.dtype().size();
        Ok(rows_mut(OP, space, "dw", dw)?.map(|dw| RowsMut { row_bytes: size, stride_bytes: size, ..dw }))
    })?;
    let dbias = optional(dbias, |dbias| {
        one_of(OP, "dbias", dbias.dtype(), &x_or_f32(&gates))?;
        same_shape(OP, "dbias", dbias.shape(), "a bias", &[1])?;
        rows_mut(OP, space, "dbias", dbias)
    })?;
    Ok(GateBackward { gates, dg, dlogit, dx, dw, dbias })
}

/// A checked call of [`super::gate_mul_backward`]. A result is absent when it was not asked for or has no element.
pub(super) struct GateMulBackward<'a, S: Space> {
    pub(super) gates: GatesIn<'a, S>,
    /// `[T, N]`, of the same type as `dout`.
    pub(super) s: RowsIn<'a, S>,
    /// `[T, N]`.
    pub(super) dout: RowsIn<'a, S>,
    /// T rows of one element.
    pub(super) dg: Option<RowsOut<'a, S>>,
    /// `[T, N]`.
    pub(super) ds: Option<RowsOut<'a, S>>,
}

/// Checks a call of [`super::gate_mul_backward`].
pub(super) fn gate_mul_backward<'a, S: Space>(
    space: &S,
    x: TensorView<'a>,
    w: TensorView<'a>,
    s: TensorView<'a>,
    dout: TensorView<'a>,
    options: &GateOptions<'a>,
    outputs: &'a mut GateMulGradients<'_>,
) -> Result<GateMulBackward<'a, S>> {
    const OP: &str = "gate_mul_backward";
    let gates = gates(OP, space, x, w, options)?;
    let num_tokens = gates.x.num_rows;
    one_of(OP, "s", s.dtype(), &x_or_f32(&gates))?;
    let (num_rows, _) = matrix(OP, "s", s.shape())?;
    if num_rows != num_tokens {
        return Err(Error::invalid(OP, "s", format!("of {num_rows} rows"), format!("of {num_tokens}, as x")));
    }
    one_of(OP, "dout", dout.dtype(), &[s.dtype()])?;
    same_shape(OP, "dout", dout.shape(), "s", s.shape())?;
    let GateMulGradients { dg, ds } = outputs;
    let s_rows = rows(OP, space, "s", s)?;
    let dout = rows(OP, space, "dout", dout)?;
    let dg = f32_column(OP, space, "dg", dg, num_tokens)?;
    let ds = optional(ds, |ds| {
        one_of(OP, "ds", ds.dtype(), &[s.dtype()])?;
        same_shape(OP, "ds", ds.shape(), "s", s.shape())?;
        rows_mut(OP, space, "ds", ds)
    })?;
    Ok(GateMulBackward { gates, s: s_rows, dout, dg, ds })
}

fn optional<'a, 'b, T>(
    view: &'a mut Option<TensorViewMut<'b>>,
    check: impl FnOnce(&'a mut TensorViewMut<'b>) -> Result<Option<T>>,
) -> Result<Option<T>> {
    view.as_mut().map_or(Ok(None), check)
}

fn f32_column<'a, S: Space>(
    op: &'static str,
    space: &S,
    what: &str,
    view: &'a mut TensorViewMut<'_>,
    num_tokens: usize,
) -> Result<Option<RowsOut<'a, S>>> {
    one_of(op, what, view.dtype(), &[DType::F32])?;
    shape_is_column(op, what, view.shape(), num_tokens)?;
    rows_mut(op, space, what, view)
}
