//! The shared expert's gate: one number per token, from a dot product, and what it is multiplied with.
//!
//! | function | writes |
//! |---|---|
//! | [`gate`] | `g = sigmoid(x . w)` |
//! | [`gate_mul`] | `g * s` |
//! | [`gate_mul_add`] | `out + g * s` |
//! | [`gate_append_topk`] | `g` and the shared expert's id behind the routed top-k |
//! | [`sigmoid_mul`] | `sigmoid(g) * s` of a `g` that is already there |
//! | [`gate_backward`] | the gradients of the logit, `x`, `w` and the bias, from that of `g` |
//! | [`gate_mul_backward`] | the gradients of `g` and `s`, from that of `g * s` |
//!
//! # What is computed, and where it is rounded
//!
//! For each token the steps are, all in f32:
//!
//! 1. `dot = x . w` in one order for every K, T, backend and thread count (it is written down in [`crate::oracle::gate`]).
//! 2. `linear = dot + bias`, if there is a bias.
//! 3. `logit = linear + addend[t]`, if there is an addend.
//! 4. `sigmoid(logit)`, or `logit` itself with [`Activation::Linear`].
//! 5. `g =` that `* scale` (a scale of 1 changes nothing).
//! 6. the form's own arithmetic: `p = g * s`, then `out + p`.
//!
//! | step | [`Rounding::Fused`] | [`Rounding::Framework`] |
//! |---|---|---|
//! | 2 linear | f32 | rounded to the type of `x` (once, after the bias) |
//! | 3 logit | f32 | rounded to the type of `x` |
//! | 4 activation | f32 | rounded to the type of `x` |
//! | 5 g | f32 | rounded to the type of `x`; where g itself is the result, to the type of that result |
//! | 6 p | f32 | rounded to the type of `s` |
//! | 6 out + p | f32 | f32 |
//! | store | rounded once to the type of the result | rounded once to the type of the result |
//!
//! No step is contracted into a fused multiply-add except inside the dot product, where the order of the sum says so. Rounding is to nearest
//! even. NaN propagates, a large negative logit gives 0, K = 0 gives a dot of +0 (and so a sigmoid of 0.5).
//!
//! # Types and shapes
//!
//! `x [T, K]` is f32, f16 or bf16, with any row stride (rows of a larger matrix, also overlapping or repeated ones). `w [K]` or `[1, K]` has the
//! type of `x` or f32; so have `bias [1]` and `addend [T]` or `[T, 1]`. `s [T, N]` has the type of `x` or f32 and the result the type of `s`.
//! Any T, K and N may be 0. The rows of a result must not overlap.

mod backward;
mod check;
mod cpu;
mod dot;
mod elementwise;
mod gpu;
mod tuning;
mod vector;
mod view;

pub use backward::{GateGradients, GateMulGradients, gate_backward, gate_mul_backward};

use crate::backend::Backend;
use crate::error::Result;
use crate::gpu::{Program, Spec};
use crate::id::Expert;
use crate::tensor::{DType, TensorView, TensorViewMut};

pub use tuning::{Arch, max_k_single_block};

/// Where the results of single steps are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// f32 until the store: one rounding.
    #[default]
    Fused,
    /// After each step, as a framework that runs each as an operation of its own in the type of the activations.
    Framework,
}

/// What is applied to the logit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `1 / (1 + exp(-logit))`.
    #[default]
    Sigmoid,
    /// Nothing: any linear layer with one output.
    Linear,
}

/// What may vary beside the tensors.
///
/// ```
/// use moe_kernels::ops::gate::{Activation, GateOptions};
/// let plain_linear = GateOptions { activation: Activation::Linear, ..GateOptions::default() };
/// assert_eq!(plain_linear.scale, 1.0);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct GateOptions<'a> {
    /// What is applied to the logit.
    pub activation: Activation,
    /// Where the results of single steps are rounded.
    pub rounding: Rounding,
    /// Added to each dot product: `[1]`, type of `x` or f32.
    pub bias: Option<TensorView<'a>>,
    /// Added to each token's logit: `[T]` or `[T, 1]`, type of `x` or f32.
    pub addend: Option<TensorView<'a>>,
    /// Multiplies the gate after the activation. Finite.
    pub scale: f32,
    /// Nothing that is queued before this call writes `w`, so a programmatic launch may read it before that has ended. Other launches do not
    /// look at it. Off by default.
    pub weights_are_constant: bool,
}

impl Default for GateOptions<'_> {
    fn default() -> Self {
        GateOptions {
            activation: Activation::Sigmoid,
            rounding: Rounding::Fused,
            bias: None,
            addend: None,
            scale: 1.0,
            weights_are_constant: false,
        }
    }
}

/// `out[t] = g[t]`.
///
/// `out` is `[T]` or `[T, 1]`, of the type of `x` or f32.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) names the argument that has a wrong type, shape, stride or place, before anything is written.
///
/// ```
/// use moe_kernels::ops::gate::{GateOptions, gate};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let x = [1.0f32, 2.0, 3.0, -1.0, -2.0, -3.0];
/// let w = [0.5f32, 0.25, -0.5];
/// let mut g = [0.0f32; 2];
/// gate(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[2, 3])?,
///     TensorView::from_slice(&w, &[3])?,
///     &GateOptions::default(),
///     TensorViewMut::from_slice(&mut g, &[2])?,
/// )?;
/// assert_eq!(g, [0.37754068, 0.62245935]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate(backend: &Backend, x: TensorView<'_>, w: TensorView<'_>, options: &GateOptions<'_>, mut out: TensorViewMut<'_>) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => {
            if let Some((gates, out)) = check::gate(cpu, x, w, options, &mut out)? {
                cpu::gate(cpu, &gates, out);
            }
            Ok(())
        }
        Backend::Cuda(cuda) => match check::gate(cuda, x, w, options, &mut out)? {
            Some((gates, out)) => gpu::gate(cuda, &gates, out),
            None => Ok(()),
        },
    }
}

/// `out[t, n] = g[t] * s[t, n]`: the shared expert's output, weighed, in one pass.
///
/// `s` is `[T, N]`, of the type of `x` or f32; `out` has its shape and type.
///
/// # Errors
/// As [`gate`].
///
/// ```
/// use half::bf16;
/// use moe_kernels::ops::gate::{GateOptions, gate_mul};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let x = [bf16::ZERO; 4]; // a logit of 0: the gate is one half
/// let w = [bf16::ONE; 4];
/// let shared = [bf16::from_f32(3.0), bf16::from_f32(-8.0)];
/// let mut out = [bf16::ZERO; 2];
/// gate_mul(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[1, 4])?,
///     TensorView::from_slice(&w, &[4])?,
///     TensorView::from_slice(&shared, &[1, 2])?,
///     &GateOptions::default(),
///     TensorViewMut::from_slice(&mut out, &[1, 2])?,
/// )?;
/// assert_eq!(out.map(bf16::to_f32), [1.5, -4.0]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate_mul(
    backend: &Backend,
    x: TensorView<'_>,
    w: TensorView<'_>,
    s: TensorView<'_>,
    options: &GateOptions<'_>,
    mut out: TensorViewMut<'_>,
) -> Result<()> {
    const OP: &str = "gate_mul";
    match backend {
        Backend::Cpu(cpu) => {
            if let Some((gates, s, out)) = check::gate_mul(OP, cpu, x, w, s, options, &mut out)? {
                cpu::gate_mul::<false>(cpu, &gates, s, out);
            }
            Ok(())
        }
        Backend::Cuda(cuda) => match check::gate_mul(OP, cuda, x, w, s, options, &mut out)? {
            Some((gates, s, out)) => gpu::gate_mul(cuda, OP, false, &gates, s, out),
            None => Ok(()),
        },
    }
}

/// `out[t, n] = out[t, n] + g[t] * s[t, n]`: the shared expert's output, weighed and added to the routed experts' sum.
///
/// The product is rounded to f32 before it is added (no fused multiply-add), and the sum once to the type of `out`. Types and shapes are those
/// of [`gate_mul`].
///
/// # Errors
/// As [`gate`].
///
/// ```
/// use moe_kernels::ops::gate::{GateOptions, gate_mul_add};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let (x, w, shared) = ([0.0f32; 4], [1.0f32; 4], [3.0f32, -8.0]);
/// let mut out = [10.0f32, 20.0];
/// gate_mul_add(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[1, 4])?,
///     TensorView::from_slice(&w, &[4])?,
///     TensorView::from_slice(&shared, &[1, 2])?,
///     &GateOptions::default(),
///     TensorViewMut::from_slice(&mut out, &[1, 2])?,
/// )?;
/// assert_eq!(out, [11.5, 16.0]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate_mul_add(
    backend: &Backend,
    x: TensorView<'_>,
    w: TensorView<'_>,
    s: TensorView<'_>,
    options: &GateOptions<'_>,
    mut out: TensorViewMut<'_>,
) -> Result<()> {
    const OP: &str = "gate_mul_add";
    match backend {
        Backend::Cpu(cpu) => {
            if let Some((gates, s, out)) = check::gate_mul(OP, cpu, x, w, s, options, &mut out)? {
                cpu::gate_mul::<true>(cpu, &gates, s, out);
            }
            Ok(())
        }
        Backend::Cuda(cuda) => match check::gate_mul(OP, cuda, x, w, s, options, &mut out)? {
            Some((gates, s, out)) => gpu::gate_mul(cuda, OP, true, &gates, s, out),
            None => Ok(()),
        },
    }
}

/// Writes the gate as a routing weight: `topk_idx[t, last] = shared_expert` and `topk_weights[t, last] = g[t]`.
///
/// `topk_idx` (i32 or i64) and `topk_weights` (f32) are `[T, top_k + 1]`; the columns before the last, the routed choice, stay as they are. So
/// the shared expert is one more expert of a grouped GEMM.
///
/// # Errors
/// As [`gate`]; an expert id that the type of `topk_idx` cannot hold names `shared_expert`.
///
/// ```
/// use moe_kernels::ops::gate::{GateOptions, gate_append_topk};
/// use moe_kernels::{Backend, Expert, TensorView, TensorViewMut};
///
/// let (x, w) = ([0.0f32; 4], [1.0f32; 4]);
/// let (mut idx, mut weights) = ([7i32, 3, -1], [0.75f32, 0.25, 0.0]);
/// gate_append_topk(
///     &Backend::cpu(),
///     TensorView::from_slice(&x, &[1, 4])?,
///     TensorView::from_slice(&w, &[4])?,
///     Expert(60),
///     &GateOptions::default(),
///     TensorViewMut::from_slice(&mut idx, &[1, 3])?,
///     TensorViewMut::from_slice(&mut weights, &[1, 3])?,
/// )?;
/// assert_eq!((idx, weights), ([7, 3, 60], [0.75, 0.25, 0.5]));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn gate_append_topk(
    backend: &Backend,
    x: TensorView<'_>,
    w: TensorView<'_>,
    shared_expert: Expert,
    options: &GateOptions<'_>,
    mut topk_idx: TensorViewMut<'_>,
    mut topk_weights: TensorViewMut<'_>,
) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => {
            let checked = check::gate_append_topk(cpu, x, w, shared_expert, options, &mut topk_idx, &mut topk_weights)?;
            if let Some((gates, idx, weights)) = checked {
                cpu::gate_append_topk(cpu, &gates, shared_expert, idx, weights);
            }
            Ok(())
        }
        Backend::Cuda(cuda) => match check::gate_append_topk(cuda, x, w, shared_expert, options, &mut topk_idx, &mut topk_weights)? {
            Some((gates, idx, weights)) => gpu::gate_append_topk(cuda, &gates, shared_expert, idx, weights),
            None => Ok(()),
        },
    }
}

/// `out[t, n] = s[t, n] * sigmoid(g[t, 0])`, or `s[t, n] * sigmoid(g[t, n])` when `g` has as many columns as `s`.
///
/// `s [T, N]` is f32, f16 or bf16, `g [T, 1]` or `[T, N]` has its type or is f32, `out` has the shape and type of `s`. With
/// [`Rounding::Framework`] the sigmoid is rounded to the type of `g`; the product is rounded once, to the type of `out`, in both.
///
/// # Errors
/// As [`gate`].
///
/// ```
/// use moe_kernels::ops::gate::{Rounding, sigmoid_mul};
/// use moe_kernels::{Backend, TensorView, TensorViewMut};
///
/// let (s, g) = ([3.0f32, -8.0], [0.0f32]);
/// let mut out = [0.0f32; 2];
/// sigmoid_mul(
///     &Backend::cpu(),
///     TensorView::from_slice(&s, &[1, 2])?,
///     TensorView::from_slice(&g, &[1, 1])?,
///     Rounding::Fused,
///     TensorViewMut::from_slice(&mut out, &[1, 2])?,
/// )?;
/// assert_eq!(out, [1.5, -4.0]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn sigmoid_mul(backend: &Backend, s: TensorView<'_>, g: TensorView<'_>, rounding: Rounding, mut out: TensorViewMut<'_>) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => {
            if let Some((s, g, out)) = check::sigmoid_mul(cpu, s, g, &mut out)? {
                cpu::sigmoid_mul(cpu, s, g, rounding, out);
            }
            Ok(())
        }
        Backend::Cuda(cuda) => match check::sigmoid_mul(cuda, s, g, &mut out)? {
            Some((s, g, out)) => gpu::sigmoid_mul(cuda, s, g, rounding, out),
            None => Ok(()),
        },
    }
}

/// A call of this module without its data: what [`precompile`] needs to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// The function.
    pub form: Form,
    /// Type of `x`; of `s` for [`Form::SigmoidMul`].
    pub x: DType,
    /// Type of `w`; of `g` for [`Form::SigmoidMul`].
    pub w: DType,
    /// Type of the result.
    pub out: DType,
    /// Columns of `x`; of `g` for [`Form::SigmoidMul`].
    pub k: usize,
    /// Columns of `s`, where there is one.
    pub n: usize,
}

/// A function of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// [`gate`].
    Gate,
    /// [`gate_mul`].
    GateMul,
    /// [`gate_mul_add`].
    GateMulAdd,
    /// [`gate_append_topk`].
    GateAppendTopk,
    /// [`sigmoid_mul`].
    SigmoidMul,
    /// [`gate_backward`]; the result is `dw`.
    GateBackward,
    /// [`gate_mul_backward`]; the result is `ds`.
    GateMulBackward,
}

/// Compiles and loads every kernel that such a call may need, for any number of tokens and any option, so that it can be captured in a graph at
/// once. Tensors are taken to lie at multiples of 16 bytes, in rows of multiples of 16 bytes. Nothing to do on the CPU.
///
/// # Errors
/// [`Error::Library`](crate::Error::Library) without a compiler, [`Error::Compile`](crate::Error::Compile) with the compiler's log,
/// [`Error::Gpu`](crate::Error::Gpu) from the driver.
///
/// ```
/// use moe_kernels::ops::gate::{Call, Form, precompile};
/// use moe_kernels::{Backend, DType};
/// let call = Call { form: Form::GateMul, x: DType::BF16, w: DType::BF16, out: DType::BF16, k: 2048, n: 2048 };
/// precompile(&Backend::cpu(), &[call])?;
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn precompile(backend: &Backend, calls: &[Call]) -> Result<()> {
    match backend {
        Backend::Cpu(_) => Ok(()),
        Backend::Cuda(cuda) => calls.iter().try_for_each(|call| gpu::precompile(cuda, call)),
    }
}

/// The kernels of this module that the table of resources lists.
pub fn programs() -> Vec<Program> {
    gpu::shipped().iter().map(Spec::program).chain(backward::programs()).collect()
}

/// The kernel in which each lane holds `elements_per_lane` (a power of two from 8 on) elements of one row before it adds them: where the bound of
/// the elements of a lane comes from.
pub fn one_tile_program(dtype: DType, elements_per_lane: u16) -> Program {
    gpu::one_tile(dtype, elements_per_lane).program()
}
