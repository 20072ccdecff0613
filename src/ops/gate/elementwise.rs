//! What is done to each element, compiled for each instruction set: from sums to gates, and gates times rows.

use super::{Activation, Rounding};
use crate::cpu::Level;
use crate::cpu::float;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;
use crate::tensor::DType;

/// From a sum to its gate.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    pub(super) bias: Option<f32>,
    pub(super) activation: Activation,
    pub(super) rounding: Rounding,
    pub(super) scale: f32,
    /// The type of the steps before the scale, for [`Rounding::Framework`].
    pub(super) dtype: DType,
    /// The type of the scaled gate, for [`Rounding::Framework`].
    pub(super) g_dtype: DType,
}

/// Compiles `$body`, an `#[inline(always)]` function, for each instruction set, and calls the one of a level.
macro_rules! at_each_level {
    ($(#[$doc:meta])* $name:ident = $body:ident ( $($argument:ident : $ty:ty),* $(,)? )) => {
        $(#[$doc])*
        pub(super) fn $name(level: Level, $($argument: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
            fn avx512($($argument: $ty),*) {
                $body($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2($($argument: $ty),*) {
                $body($($argument),*)
            }
            match level.0 {
                // SAFETY: a Level is only made after the features of its instruction set were detected.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2($($argument),*) },
                _ => $body($($argument),*),
            }
        }
    };
}

pub(super) use at_each_level;

at_each_level! {
    /// Makes gates of sums, in place. `addends` has a number for each, or none at all.
    gates = gates_loops(steps: &Steps, addends: &[f32], values: &mut [f32])
}

at_each_level! {
    /// `out = g * s`, or `out + g * s` with `add`, for a row of `s` and of `out` of the same type.
    scale_row = scale_row_loops(dtype: DType, rounding: Rounding, add: bool, g: f32, s: &[u8], out: &mut [u8])
}

at_each_level! {
    /// `out = s * sigmoid(g)` for a row of each; `out` has the type of `s`.
    sigmoid_mul_row = sigmoid_mul_row_loops(s_dtype: DType, g_dtype: DType, rounding: Rounding, s: &[u8], g: &[u8], out: &mut [u8])
}

/// Elements of one type as loops see them.
pub(super) trait Format {
    const SIZE: usize;
    fn read(bytes: &[u8]) -> f32;
    fn write(value: f32, bytes: &mut [u8]);
    /// To the type and back.
    fn round(value: f32) -> f32;
}

pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F32;

impl Format for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        float::f32_from_bf16(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&float::bf16_from_f32(value).to_le_bytes());
    }
    #[inline(always)]
    fn round(value: f32) -> f32 {
        float::f32_from_bf16(float::bf16_from_f32(value))
    }
}

impl Format for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        float::f32_from_f16(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&float::f16_from_f32(value).to_le_bytes());
    }
    #[inline(always)]
    fn round(value: f32) -> f32 {
        float::f32_from_f16(float::f16_from_f32(value))
    }
}

impl Format for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
    #[inline(always)]
    fn round(value: f32) -> f32 {
        value
    }
}

/// Calls `$function` for the type that a validated dtype names.
macro_rules! with_format {
    ($dtype:expr => $function:ident < $($generic:ty),* > ( $($argument:expr),* )) => {
        match $dtype {
            DType::BF16 => $function::<$($generic,)* Bf16>($($argument),*),
            DType::F16 => $function::<$($generic,)* F16>($($argument),*),
            DType::F32 => $function::<$($generic,)* F32>($($argument),*),
            other => panic!("gate: {other} is no type of a gate"),
        }
    };
}

pub(super) use with_format;

#[inline(always)]
fn gates_loops(steps: &Steps, addends: &[f32], values: &mut [f32]) {
    let Steps { bias, activation, rounding, scale, dtype, g_dtype } = *steps;
    if let Some(bias) = bias {
        values.iter_mut().for_each(|v| *v += bias);
    }
    round_all(rounding, dtype, values);
    if !addends.is_empty() {
        values.iter_mut().zip(addends).for_each(|(v, a)| *v += a);
        round_all(rounding, dtype, values);
    }
    if activation == Activation::Sigmoid {
        values.iter_mut().for_each(|v| *v = float::sigmoid(*v));
        round_all(rounding, dtype, values);
    }
    values.iter_mut().for_each(|v| *v *= scale);
    round_all(rounding, g_dtype, values);
}

#[inline(always)]
fn round_all(rounding: Rounding, dtype: DType, values: &mut [f32]) {
    #[inline(always)]
    fn to<F: Format>(values: &mut [f32]) {
        values.iter_mut().for_each(|v| *v = F::round(*v));
    }
    if rounding == Rounding::Framework {
        with_format!(dtype => to<>(values));
    }
}

#[inline(always)]
fn scale_row_loops(dtype: DType, rounding: Rounding, add: bool, g: f32, s: &[u8], out: &mut [u8]) {
    #[inline(always)]
    fn row<F: Format>(rounding: Rounding, add: bool, g: f32, s: &[u8], out: &mut [u8]) {
        let elements = out.chunks_exact_mut(F::SIZE).zip(s.chunks_exact(F::SIZE));
        match (add, rounding) {
            (false, _) => elements.for_each(|(out, s)| F::write(g * F::read(s), out)),
            (true, Rounding::Fused) => elements.for_each(|(out, s)| F::write(F::read(out) + g * F::read(s), out)),
            (true, Rounding::Framework) => elements.for_each(|(out, s)| F::write(F::read(out) + F::round(g * F::read(s)), out)),
        }
    }
    with_format!(dtype => row<>(rounding, add, g, s, out));
}

#[inline(always)]
fn sigmoid_mul_row_loops(s_dtype: DType, g_dtype: DType, rounding: Rounding, s: &[u8], g: &[u8], out: &mut [u8]) {
    #[inline(always)]
    fn row<S: Format, G: Format>(rounding: Rounding, s: &[u8], g: &[u8], out: &mut [u8]) {
        let elements = out.chunks_exact_mut(S::SIZE).zip(s.chunks_exact(S::SIZE)).zip(g.chunks_exact(G::SIZE));
        match rounding {
            Rounding::Fused => elements.for_each(|((out, s), g)| S::write(S::read(s) * float::sigmoid(G::read(g)), out)),
            Rounding::Framework => elements.for_each(|((out, s), g)| S::write(S::read(s) * G::round(float::sigmoid(G::read(g))), out)),
        }
    }
    #[inline(always)]
    fn with_s<S: Format>(g_dtype: DType, rounding: Rounding, s: &[u8], g: &[u8], out: &mut [u8]) {
        with_format!(g_dtype => row<S>(rounding, s, g, out));
    }
    with_format!(s_dtype => with_s<>(g_dtype, rounding, s, g, out));
}
