//! The gate of the shared expert.

use super::handle::{OP, get};
use super::tensor::{Growing, MoeTensor, Place, optional, output, read, views, write};
use super::{MoeBackend, guard};
use crate::error::{Error, Result};
use crate::id::Expert;
use crate::ops::gate::{self, Activation, GateOptions, Rounding};

/// 1 / (1 + exp(-logit)).
pub const MOE_ACTIVATION_SIGMOID: i32 = 0;
/// The logit itself.
pub const MOE_ACTIVATION_LINEAR: i32 = 1;

/// f32 until the store: one rounding.
pub const MOE_ROUNDING_FUSED: i32 = 0;
/// After each step, as a framework that runs each as an operation of its own in the type of the activations.
pub const MOE_ROUNDING_FRAMEWORK: i32 = 1;

/// What may vary in a gate beside its tensors. `moe_gate_options_init` sets the defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeGateOptions {
    /// sizeof(MoeGateOptions): later versions may add members at the end.
    pub size: usize,
    /// MOE_ACTIVATION_SIGMOID (the default) or MOE_ACTIVATION_LINEAR.
    pub activation: i32,
    /// MOE_ROUNDING_FUSED (the default) or MOE_ROUNDING_FRAMEWORK.
    pub rounding: i32,
    /// Multiplies the gate after the activation; finite. 1 by default.
    pub scale: f32,
    /// Not 0: nothing queued before the call writes `w`. Read only by programmatic launches on a GPU. 0 by default.
    pub weights_are_constant: i32,
    /// Added to each dot product: [1], the type of x or f32. May be null.
    pub bias: *const MoeTensor,
    /// Added to each token's logit: [T] or [T, 1], the type of x or f32. May be null.
    pub addend: *const MoeTensor,
}

// SAFETY: integers, a float and pointers; zeros are a value of each.
unsafe impl Growing for MoeGateOptions {
    const NAME: &'static str = "MoeGateOptions";
}

/// Sets the defaults. `size` is sizeof(MoeGateOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_gate_options_init(options: *mut MoeGateOptions, size: usize) -> i32 {
    let default = MoeGateOptions {
        size,
        activation: MOE_ACTIVATION_SIGMOID,
        rounding: MOE_ROUNDING_FUSED,
        scale: 1.0,
        weights_are_constant: 0,
        bias: std::ptr::null(),
        addend: std::ptr::null(),
    };
    // SAFETY: the header requires `size` bytes there.
    guard(|| unsafe { write(options, size, &default) })
}

/// # Safety
/// As the header requires of options and of the tensors that they name.
unsafe fn options_of<'a>(place: Place, options: *const MoeGateOptions) -> Result<GateOptions<'a>> {
    if options.is_null() {
        return Ok(GateOptions::default());
    }
    // SAFETY: not null; the caller's promise.
    let options = unsafe { read(options) }?;
    // SAFETY: null or a tensor: the caller's promise.
    let (bias, addend) = unsafe { (options.bias.as_ref(), options.addend.as_ref()) };
    Ok(GateOptions {
        activation: match options.activation {
            MOE_ACTIVATION_SIGMOID => Activation::Sigmoid,
            MOE_ACTIVATION_LINEAR => Activation::Linear,
            other => return Err(Error::invalid(OP, "activation", other, "0 or 1")),
        },
        rounding: rounding_of(options.rounding)?,
        // SAFETY: the caller's promise.
        bias: unsafe { optional(place, "bias", bias) }?,
        // SAFETY: the caller's promise.
        addend: unsafe { optional(place, "addend", addend) }?,
        scale: options.scale,
        weights_are_constant: options.weights_are_constant != 0,
    })
}

fn rounding_of(number: i32) -> Result<Rounding> {
    match number {
        MOE_ROUNDING_FUSED => Ok(Rounding::Fused),
        MOE_ROUNDING_FRAMEWORK => Ok(Rounding::Framework),
        other => Err(Error::invalid(OP, "rounding", other, "0 or 1")),
    }
}

/// out[t] = activation(x[t] . w), a number for each token.
///
/// x: [T, K] of f32, f16 or bf16; w: [K] of the type of x or f32; out: [T] or [T, 1] of the type of x or f32. T and K may be 0. A row of x may lie inside
/// a larger matrix. `options` may be null. The sum has one order on every backend, so the bytes are the same everywhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_gate(
    backend: Option<&MoeBackend>,
    x: Option<&MoeTensor>,
    w: Option<&MoeTensor>,
    options: *const MoeGateOptions,
    out: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for tensors.
        let [x, w] = unsafe { views(place, [("x", x), ("w", w)]) }?;
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        // SAFETY: the header's rules for tensors.
        let out = unsafe { output(place, "out", out) }?;
        gate::gate(backend, x, w, &options, out)
    })
}

/// out[t, n] = g[t] * s[t, n], where g is what `moe_gate` computes.
///
/// s: [T, N] of the type of x or f32; out: as s.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_gate_mul(
    backend: Option<&MoeBackend>,
    x: Option<&MoeTensor>,
    w: Option<&MoeTensor>,
    s: Option<&MoeTensor>,
    options: *const MoeGateOptions,
    out: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for tensors.
        let [x, w, s] = unsafe { views(place, [("x", x), ("w", w), ("s", s)]) }?;
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        // SAFETY: the header's rules for tensors.
        let out = unsafe { output(place, "out", out) }?;
        gate::gate_mul(backend, x, w, s, &options, out)
    })
}

/// out[t, n] = round(out[t, n] + g[t] * s[t, n]), in f32: adds the weighed shared expert to the routed sum. Tensors as for `moe_gate_mul`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_gate_mul_add(
    backend: Option<&MoeBackend>,
    x: Option<&MoeTensor>,
    w: Option<&MoeTensor>,
    s: Option<&MoeTensor>,
    options: *const MoeGateOptions,
    out: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for tensors.
        let [x, w, s] = unsafe { views(place, [("x", x), ("w", w), ("s", s)]) }?;
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        // SAFETY: the header's rules for tensors.
        let out = unsafe { output(place, "out", out) }?;
        gate::gate_mul_add(backend, x, w, s, &options, out)
    })
}

/// Writes the shared expert behind the routed top-k of each token: topk_idx[t, K] = shared_expert, topk_weights[t, K] = gate * scale.
///
/// topk_idx: i32 or i64 [T, K + 1]; topk_weights: f32 [T, K + 1]. Their first K columns stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_gate_append_topk(
    backend: Option<&MoeBackend>,
    x: Option<&MoeTensor>,
    w: Option<&MoeTensor>,
    shared_expert: u32,
    options: *const MoeGateOptions,
    topk_idx: Option<&MoeTensor>,
    topk_weights: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for tensors.
        let [x, w] = unsafe { views(place, [("x", x), ("w", w)]) }?;
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        // SAFETY: the header's rules for tensors.
        let topk_idx = unsafe { output(place, "topk_idx", topk_idx) }?;
        // SAFETY: the header's rules for tensors.
        let topk_weights = unsafe { output(place, "topk_weights", topk_weights) }?;
        gate::gate_append_topk(backend, x, w, Expert(shared_expert), &options, topk_idx, topk_weights)
    })
}

/// out = sigmoid(g) * s, element by element: for a gate of which the logits exist.
///
/// s: [T, N]; g: [T, 1] or [T, N]; out: as s. `rounding`: MOE_ROUNDING_FUSED or MOE_ROUNDING_FRAMEWORK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_sigmoid_mul(
    backend: Option<&MoeBackend>,
    s: Option<&MoeTensor>,
    g: Option<&MoeTensor>,
    rounding: i32,
    out: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for tensors.
        let [s, g] = unsafe { views(place, [("s", s), ("g", g)]) }?;
        // SAFETY: the header's rules for tensors.
        let out = unsafe { output(place, "out", out) }?;
        gate::sigmoid_mul(backend, s, g, rounding_of(rounding)?, out)
    })
}
