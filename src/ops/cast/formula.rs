//! From a block's greatest magnitude to its scale.
#![forbid(unsafe_code)]

use super::Formula;
use crate::tensor::DType;

/// A scale in the three forms that are needed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// What elements are multiplied by.
    pub(super) scale: f32,
    /// What a GEMM multiplies by.
    pub(super) stored: f32,
    /// `stored` as E8M0, when it is a power of two.
    pub(super) e8m0: u8,
}

/// Least magnitude that DeepGEMM's scales see (spec: DeepGEMM).
const DEEP_GEMM_LEAST: f32 = 1e-4;

impl Formula {
    /// Whether every scale is a power of two.
    pub(super) fn is_power_of_two(self) -> bool {
        match self {
            Formula::TransformerEngine { power_of_two, .. } | Formula::DeepGemm { power_of_two } => power_of_two,
            Formula::Mx => true,
        }
    }

    /// The scale of a block with greatest magnitude `amax`, of input type `from` and output type `to`.
    #[inline]
    pub(super) fn scale(self, amax: f32, from: DType, to: DType) -> Scale {
        match self {
            Formula::TransformerEngine { epsilon, power_of_two } => {
                let scale = quotient(amax, largest(to), epsilon, power_of_two, largest(from));
                let stored = 1.0 / scale;
                Scale { scale, stored, e8m0: (stored.to_bits() >> 23) as u8 }
            }
            Formula::DeepGemm { power_of_two: false } => {
                let m = amax.max(DEEP_GEMM_LEAST);
                Scale { scale: largest(to) / m, stored: m / largest(to), e8m0: 0 }
            }
            Formula::DeepGemm { power_of_two: true } => power_at_least(amax.max(DEEP_GEMM_LEAST) / largest(to)),
            Formula::Mx => power_at_least(amax / largest(to)),
        }
    }
}

/// Largest finite value of a format.
fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::E4M3 => 448.0,
        DType::E4M3Fnuz => 240.0,
        DType::E5M2 | DType::E5M2Fnuz => 57344.0,
        DType::F16 => 65504.0,
        DType::BF16 => f32::from_bits(0x7F7F_0000),
        _ => f32::MAX,
    }
}

/// The scale of a whole matrix under current scaling.
pub(super) fn current(amax: f32, to: DType, epsilon: f32, power_of_two: bool) -> f32 {
    quotient(amax, largest(to), epsilon, power_of_two, f32::MAX)
}

fn quotient(amax: f32, largest: f32, epsilon: f32, power_of_two: bool, instead_of_infinity: f32) -> f32 {
    let amax = amax.max(epsilon);
    if amax == 0.0 || amax.is_infinite() {
        return 1.0;
    }
    let scale = largest / amax;
    let scale = if scale.is_infinite() { instead_of_infinity } else { scale };
    if power_of_two { f32::from_bits(scale.to_bits() & 0x7F80_0000) } else { scale }
}

/// The least power of two that E8M0 holds and that is not below `x`, or the greatest.
fn power_at_least(x: f32) -> Scale {
    let bits = x.to_bits();
    // E8M0's 0 is 2^-127, a subnormal of f32 with bits 0x400000; everything above it rounds up to the next exponent.
    let up = if bits <= 0x40_0000 { 0 } else { (bits + 0x7F_FFFF) >> 23 };
    let e8m0 = up.min(0xFE);
    // 2^-127 and 2^-(-127): the one is subnormal, the other is not.
    let power = |biased: u32| f32::from_bits(if biased == 0 { 0x40_0000 } else { biased << 23 });
    Scale { scale: power(0xFE - e8m0), stored: power(e8m0), e8m0: e8m0 as u8 }
}
