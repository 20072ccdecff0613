//! Backward of the gate: from the gradient of what the forward wrote to those of what it read.
//!
//! | forward | its result's gradient goes to | then |
//! |---|---|---|
//! | [`gate`](super::gate) | [`gate_backward`] as `dg` | |
//! | [`gate_mul`](super::gate_mul) | [`gate_mul_backward`] as `dout` | its `dg` to [`gate_backward`] |
//! | [`gate_mul_add`](super::gate_mul_add) | the same, and unchanged to what `out` held before | the same |
//! | [`gate_append_topk`](super::gate_append_topk) | [`gate_backward`]: the last column of the gradient of `topk_weights` is `dg` | |

mod check;
mod cpu;
mod elementwise;
mod gpu;

pub(super) use gpu::{precompile, programs};

use super::GateOptions;
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::{TensorView, TensorViewMut};

/// What [`gate_backward`] writes.
#[derive(Debug)]
pub struct GateGradients<'a> {
    /// Of each logit, and so of an addend: `[T]` or `[T, 1]`, f32. Always written: the others are made of it.
    pub dlogit: TensorViewMut<'a>,
    /// Of `x`: `[T, K]`, type of `x`.
    pub dx: Option<TensorViewMut<'a>>,
    /// Of `w`: `[K]` or `[1, K]`, type of `w` or f32.
    pub dw: Option<TensorViewMut<'a>>,
    /// Of a bias: `[1]`, type of `x` or f32.
    pub dbias: Option<TensorViewMut<'a>>,
}

/// The gradients of everything that decides a gate, from those of the gates.
///
/// `x`, `w` and `options` are those of the forward, whose logits are made again in the same order; nothing else need be kept. `dg` is `[T]` or
/// `[T, 1]`, of the type of `x` or f32.
///
/// | result | is |
/// |---|---|
/// | `dlogit[t]` | `((dg[t] * scale) * (1 - s)) * s`, where `s` is the sigmoid of the logit; `dg[t] * scale` with [`Activation::Linear`](super::Activation::Linear) |
/// | `dx[t, k]` | `dlogit[t] * w[k]` |
/// | `dw[k]` | the sum over t of `dlogit[t] * x[t, k]` |
/// | `dbias` | the sum over t of `dlogit[t]` |
///
/// Each step is one operation of f32, and each result is rounded once to its type. With [`Rounding::Framework`](super::Rounding::Framework) `s`,
/// `dg * scale`, `1 - s` and both products are also rounded to the type of `x`, as PyTorch's autograd does on a GPU (its CPU keeps the three steps
/// of a bf16 sigmoid's gradient in f32). The sum over tokens has one order for every T, K, backend and thread count; it is written down in
/// [`crate::oracle::gate_backward`].
///
/// Without tokens `dw` and `dbias` are +0. Nothing is allocated. The rows of a result must not overlap.
///
/// # Errors
/// As [`gate`](super::gate()).
///
/// ```
/// use moe_kernels::ops::gate::{GateGradients, GateOptions, gate_backward};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let x = [1.0f32, 2.0, 3.0, -1.0, -2.0, -3.0];
/// let w = [4.0f32, -2.0, 0.0]; // two logits of 0: s * (1 - s) is one quarter
/// let dg = [1.0f32, 2.0];
/// let (mut dlogit, mut dx, mut dw) = ([0.0f32; 2], [0.0f32; 6], [0.0f32; 3]);
/// gate_backward(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[2, 3])?,
///     TensorView::from_slice(&w, &[3])?,
///     TensorView::from_slice(&dg, &[2])?,
///     &GateOptions::default(),
///     GateGradients {
///         dlogit: TensorViewMut::from_slice(&mut dlogit, &[2])?,
///         dx: Some(TensorViewMut::from_slice(&mut dx, &[2, 3])?),
///         dw: Some(TensorViewMut::from_slice(&mut dw, &[3])?),
///         dbias: None,
///     },
/// )?;
/// assert_eq!(dlogit, [0.25, 0.5]);
/// assert_eq!(dx, [1.0, -0.5, 0.0, 2.0, -1.0, 0.0]);
/// assert_eq!(dw, [-0.25, -0.5, -0.75]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate_backward(
    backend: &Backend,
    x: TensorView<'_>,
    w: TensorView<'_>,
    dg: TensorView<'_>,
    options: &GateOptions<'_>,
    mut outputs: GateGradients<'_>,
) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => {
            let call = check::gate_backward(cpu, x, w, dg, options, &mut outputs)?;
            cpu::gate_backward(cpu, call);
            Ok(())
        }
        Backend::Cuda(cuda) => gpu::gate_backward(cuda, check::gate_backward(cuda, x, w, dg, options, &mut outputs)?),
    }
}

/// What [`gate_mul_backward`] writes.
#[derive(Debug)]
pub struct GateMulGradients<'a> {
    /// Of each gate: `[T]` or `[T, 1]`, f32: what [`gate_backward`] takes.
    pub dg: TensorViewMut<'a>,
    /// Of `s`: its shape and type.
    pub ds: Option<TensorViewMut<'a>>,
}

/// The gradients of `g` and `s` of [`gate_mul`](super::gate_mul) or [`gate_mul_add`](super::gate_mul_add), from that of the product.
///
/// `x`, `w`, `s` and `options` are those of the forward, whose gates are made again in the same order and with the same roundings. `dout` has the shape
/// and type of `s`.
///
/// | result | is |
/// |---|---|
/// | `dg[t]` | `dout[t] . s[t]`, in the order of the forward's dot product, not rounded further |
/// | `ds[t, n]` | `g[t] * dout[t, n]`, rounded once to the type of `s` |
///
/// # Errors
/// As [`gate`](super::gate()).
///
/// ```
/// use moe_kernels::ops::gate::{GateMulGradients, GateOptions, gate_mul_backward};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let (x, w) = ([0.0f32; 4], [1.0f32; 4]); // a gate of one half
/// let (shared, dout) = ([3.0f32, -8.0], [2.0f32, 0.5]);
/// let (mut dg, mut ds) = ([0.0f32; 1], [0.0f32; 2]);
/// gate_mul_backward(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[1, 4])?,
///     TensorView::from_slice(&w, &[4])?,
///     TensorView::from_slice(&shared, &[1, 2])?,
///     TensorView::from_slice(&dout, &[1, 2])?,
///     &GateOptions::default(),
///     GateMulGradients {
///         dg: TensorViewMut::from_slice(&mut dg, &[1])?,
///         ds: Some(TensorViewMut::from_slice(&mut ds, &[1, 2])?),
///     },
/// )?;
/// assert_eq!((dg, ds), ([2.0], [1.0, 0.25]));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate_mul_backward(
    backend: &Backend,
    x: TensorView<'_>,
    w: TensorView<'_>,
    s: TensorView<'_>,
    dout: TensorView<'_>,
    options: &GateOptions<'_>,
    mut outputs: GateMulGradients<'_>,
) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => {
            let call = check::gate_mul_backward(cpu, x, w, s, dout, options, &mut outputs)?;
            cpu::gate_mul_backward(cpu, call);
            Ok(())
        }
        Backend::Cuda(cuda) => gpu::gate_mul_backward(cuda, check::gate_mul_backward(cuda, x, w, s, dout, options, &mut outputs)?),
    }
}
