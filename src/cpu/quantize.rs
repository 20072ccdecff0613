//! Rows to e4m3 with one scale per block of 128, as dispatch and the fp8 wire of combine do it (DESIGN 3.2).

use super::Level;
#[cfg(target_arch = "x86_64")]
use super::level::Isa;
use super::{convert, float};
use crate::ep::{Quantize, SCALE_BLOCK};
use crate::tensor::DType;

/// Least `m` of a block (spec: DeepGEMM's per-token cast).
const AMAX_FLOOR: f32 = 1e-4;
/// Largest finite e4m3 (spec: OCP FP8).
const E4M3_MAX: f32 = 448.0;

/// Quantises a row of `dtype` to `q` (one byte an element) and `scales` (4 bytes a block for [`Quantize::F32`], 1 for
/// [`Quantize::PowerOfTwo`]). NaN drops out of the maximum and becomes 0x7F.
pub(crate) fn quantize_row(level: Level, kind: Quantize, dtype: DType, src: &[u8], q: &mut [u8], scales: &mut [u8]) {
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(kind, dtype, src, q, scales) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(kind, dtype, src, q, scales) },
        _ => body(kind, dtype, src, q, scales),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn avx512(kind: Quantize, dtype: DType, src: &[u8], q: &mut [u8], scales: &mut [u8]) {
    body(kind, dtype, src, q, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn avx2(kind: Quantize, dtype: DType, src: &[u8], q: &mut [u8], scales: &mut [u8]) {
    body(kind, dtype, src, q, scales);
}

#[inline(always)]
fn body(kind: Quantize, dtype: DType, src: &[u8], q: &mut [u8], scales: &mut [u8]) {
    let scale_bytes = match kind {
        Quantize::F32 => 4,
        Quantize::PowerOfTwo => 1,
    };
    let blocks = q.chunks_mut(SCALE_BLOCK).zip(src.chunks(SCALE_BLOCK * dtype.size())).zip(scales.chunks_exact_mut(scale_bytes));
    for ((q, src), scale) in blocks {
        let mut values = [0f32; SCALE_BLOCK];
        let values = &mut values[..q.len()];
        convert::widen_loops(dtype, src, values);
        let m = amax(values).max(AMAX_FLOOR);
        let factor = match kind {
            Quantize::F32 => {
                scale.copy_from_slice(&(m / E4M3_MAX).to_le_bytes());
                E4M3_MAX / m
            }
            Quantize::PowerOfTwo => {
                let exponent = ceil_log2(m / E4M3_MAX).clamp(-127, 127);
                scale[0] = (exponent + 127) as u8;
                power_of_two(-exponent)
            }
        };
        for (q, x) in q.iter_mut().zip(values) {
            *q = float::e4m3_from_f32(*x * factor);
        }
    }
}

/// Largest magnitude; NaN counts as 0. Magnitudes of floats order as their bits do, and integers vectorise.
#[inline(always)]
fn amax(values: &[f32]) -> f32 {
    let magnitude = |x: &f32| {
        let bits = x.to_bits() & 0x7FFF_FFFF;
        if bits > 0x7F80_0000 { 0 } else { bits }
    };
    f32::from_bits(values.iter().map(magnitude).fold(0, u32::max))
}

/// Exact ceil(log2(x)) of a positive normal number; 128 of infinity.
#[inline(always)]
fn ceil_log2(x: f32) -> i32 {
    let bits = x.to_bits();
    (bits >> 23) as i32 - 127 + i32::from(bits & 0x7F_FFFF != 0)
}

/// 2^n for n in -127..=127, subnormal at the lower end.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(if n == -127 { 1 << 22 } else { ((n + 127) as u32) << 23 })
}
