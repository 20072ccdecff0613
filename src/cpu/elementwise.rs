//! Element-wise steps of the experts, over rows of f32. One loop each, compiled once for each [`Level`]; every step is one IEEE operation, so every
//! level gives the same bits.

use super::Level;
use super::convert;
use super::float;
#[cfg(target_arch = "x86_64")]
use super::level::Isa;
use crate::random::SplitMix64;
use crate::tensor::DType;

/// Instantiates a loop for every instruction set, under the name of a function that takes the level first.
macro_rules! at_every_level {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $ty:ty),*)) => {
        $(#[$doc])*
        pub fn $name(level: Level, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*);
            }
            match level.0 {
                // SAFETY: a Level is only made after the features of its instruction set were detected.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}

at_every_level! {
    /// `gate = round(silu(gate) * up)`: the product in f32, one rounding to `dtype` (f32, f16, bf16).
    silu_mul = silu_mul_loops(dtype: DType, gate: &mut [f32], up: &[f32])
}

at_every_level! {
    /// `gate = round(round(silu(round(gate))) * round(up))`: each step rounded to `dtype` (f32, f16, bf16).
    silu_mul_stepwise = silu_mul_stepwise_loops(dtype: DType, gate: &mut [f32], up: &[f32])
}

at_every_level! {
    /// `x = round(factor * round(x))`: both rounded to `dtype` (f32, f16, bf16).
    scale_stepwise = scale_stepwise_loops(dtype: DType, factor: f32, x: &mut [f32])
}

at_every_level! {
    /// `out = round(out + x)`: rows of elements of `dtype` (f32, f16, bf16), the sum in f32.
    add_rows = add_rows_loops(dtype: DType, x: &[u8], out: &mut [u8])
}

at_every_level! {
    /// Rounds to `dtype` (f32, f16, bf16) and back.
    round = round_loops(dtype: DType, x: &mut [f32])
}

at_every_level! {
    /// `x = factor * x`.
    scale = scale_loops(factor: f32, x: &mut [f32])
}

at_every_level! {
    /// Multiplies each block of `block` elements by its own factor.
    scale_by = scale_by_loops(factors: &[f32], block: usize, x: &mut [f32])
}

at_every_level! {
    /// `sum = fma(factor, x, sum)`.
    add_scaled = add_scaled_loops(factor: f32, x: &[f32], sum: &mut [f32])
}

at_every_level! {
    /// Element `i` of a stream of uniform values in `[-bound, bound)`: bits `16 * (i % 4)..` of output `i / 4` of the generator, for `i` from
    /// `4 * first` on. `out` holds a multiple of 4.
    uniform = uniform_loops(random: &SplitMix64, first: u64, bound: f32, out: &mut [f32])
}

/// Calls `each` with the rounding to `dtype` and back as a closure, so that each format has a loop of its own.
macro_rules! with_rounding {
    ($dtype:expr, $each:ident($($arg:expr),*)) => {
        match $dtype {
            DType::BF16 => $each($($arg,)* |x| float::f32_from_bf16(float::bf16_from_f32(x))),
            DType::F16 => $each($($arg,)* |x| float::f32_from_f16(float::f16_from_f32(x))),
            _ => $each($($arg,)* |x| x),
        }
    };
}

#[inline(always)]
fn silu_mul_loops(dtype: DType, gate: &mut [f32], up: &[f32]) {
    #[inline(always)]
    fn each(gate: &mut [f32], up: &[f32], round: impl Fn(f32) -> f32) {
        gate.iter_mut().zip(up).for_each(|(g, u)| *g = round(float::silu(*g) * u));
    }
    with_rounding!(dtype, each(gate, up));
}

#[inline(always)]
fn silu_mul_stepwise_loops(dtype: DType, gate: &mut [f32], up: &[f32]) {
    #[inline(always)]
    fn each(gate: &mut [f32], up: &[f32], round: impl Fn(f32) -> f32) {
        gate.iter_mut().zip(up).for_each(|(g, u)| *g = round(round(float::silu(round(*g))) * round(*u)));
    }
    with_rounding!(dtype, each(gate, up));
}

#[inline(always)]
fn scale_stepwise_loops(dtype: DType, factor: f32, x: &mut [f32]) {
    #[inline(always)]
    fn each(factor: f32, x: &mut [f32], round: impl Fn(f32) -> f32) {
        x.iter_mut().for_each(|x| *x = round(factor * round(*x)));
    }
    with_rounding!(dtype, each(factor, x));
}

#[inline(always)]
fn add_rows_loops(dtype: DType, x: &[u8], out: &mut [u8]) {
    // 128 is arbitrary: elements that stay in the first-level cache.
    let (mut sum, mut addend) = ([0f32; 128], [0f32; 128]);
    let len = sum.len() * dtype.size();
    for (x, out) in x.chunks(len).zip(out.chunks_mut(len)) {
        convert::widen_loops(dtype, x, &mut addend);
        convert::widen_loops(dtype, out, &mut sum);
        sum.iter_mut().zip(&addend).for_each(|(sum, x)| *sum += x);
        convert::narrow_loops(dtype, &sum, out);
    }
}

#[inline(always)]
fn round_loops(dtype: DType, x: &mut [f32]) {
    #[inline(always)]
    fn each(x: &mut [f32], round: impl Fn(f32) -> f32) {
        x.iter_mut().for_each(|x| *x = round(*x));
    }
    with_rounding!(dtype, each(x));
}

#[inline(always)]
fn scale_loops(factor: f32, x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x *= factor);
}

#[inline(always)]
fn add_scaled_loops(factor: f32, x: &[f32], sum: &mut [f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum = factor.mul_add(*x, *sum));
}

#[inline(always)]
fn scale_by_loops(factors: &[f32], block: usize, x: &mut [f32]) {
    x.chunks_mut(block).zip(factors).for_each(|(x, &factor)| x.iter_mut().for_each(|x| *x *= factor));
}

#[inline(always)]
fn uniform_loops(random: &SplitMix64, first: u64, bound: f32, out: &mut [f32]) {
    let step = bound / 32768.0; // 2^15: 16 bits of two signs
    for (quad, n) in out.chunks_exact_mut(4).zip(first..) {
        let bits = random.at(n);
        for (i, x) in quad.iter_mut().enumerate() {
            *x = ((bits >> (16 * i)) as u16 as i32 - 32768) as f32 * step;
        }
    }
}
