//! Rows of elements to and from f32, at the speed of the machine's vectors.
//!
//! One loop per format over the branchless functions of `float.rs`, compiled once for each [`Level`]: the compiler makes the vector code, and
//! every level gives the same bits because each step is one IEEE operation.

use super::Level;
use super::float;
use super::level::Isa;
use crate::tensor::DType;

/// Widens a row to f32. `src` holds `dst.len()` elements of `dtype` (f32, f16, bf16, any FP8, E8M0), little endian.
///
/// # Panics
/// If `src` has another length or `dtype` is no number of these: the validators of the operations exclude both.
pub fn widen(level: Level, dtype: DType, src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len() * dtype.size(), "widen: bytes of the source");
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { widen_avx512(dtype, src, dst) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { widen_avx2(dtype, src, dst) },
        _ => widen_loops(dtype, src, dst),
    }
}

/// Narrows a row of f32, nearest even. FP8 saturates, f16 and bf16 do not. `dst` holds `src.len()` elements of `dtype`.
///
/// # Panics
/// As [`widen`]; E8M0 is not a destination.
pub fn narrow(level: Level, dtype: DType, src: &[f32], dst: &mut [u8]) {
    assert_eq!(dst.len(), src.len() * dtype.size(), "narrow: bytes of the destination");
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { narrow_avx512(dtype, src, dst) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { narrow_avx2(dtype, src, dst) },
        _ => narrow_loops(dtype, src, dst),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn widen_avx512(dtype: DType, src: &[u8], dst: &mut [f32]) {
    widen_loops(dtype, src, dst);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn widen_avx2(dtype: DType, src: &[u8], dst: &mut [f32]) {
    widen_loops(dtype, src, dst);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn narrow_avx512(dtype: DType, src: &[f32], dst: &mut [u8]) {
    narrow_loops(dtype, src, dst);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn narrow_avx2(dtype: DType, src: &[f32], dst: &mut [u8]) {
    narrow_loops(dtype, src, dst);
}

#[inline(always)]
pub(crate) fn widen_loops(dtype: DType, src: &[u8], dst: &mut [f32]) {
    fn wide2(src: &[u8]) -> impl Iterator<Item = u16> + '_ {
        src.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
    }
    match dtype {
        DType::F32 => dst.iter_mut().zip(src.chunks_exact(4)).for_each(|(d, b)| *d = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::BF16 => dst.iter_mut().zip(wide2(src)).for_each(|(d, b)| *d = float::f32_from_bf16(b)),
        DType::F16 => dst.iter_mut().zip(wide2(src)).for_each(|(d, b)| *d = float::f32_from_f16(b)),
        DType::E4M3 => dst.iter_mut().zip(src).for_each(|(d, &b)| *d = float::f32_from_e4m3(b)),
        DType::E5M2 => dst.iter_mut().zip(src).for_each(|(d, &b)| *d = float::f32_from_e5m2(b)),
        DType::E4M3Fnuz => dst.iter_mut().zip(src).for_each(|(d, &b)| *d = float::f32_from_e4m3fnuz(b)),
        DType::E5M2Fnuz => dst.iter_mut().zip(src).for_each(|(d, &b)| *d = float::f32_from_e5m2fnuz(b)),
        DType::E8M0 => dst.iter_mut().zip(src).for_each(|(d, &b)| *d = float::f32_from_e8m0(b)),
        DType::Bytes | DType::I32 | DType::I64 | DType::U32 => panic!("widen: {dtype} is no floating-point format"),
    }
}

#[inline(always)]
pub(crate) fn narrow_loops(dtype: DType, src: &[f32], dst: &mut [u8]) {
    match dtype {
        DType::F32 => {
            dst.chunks_exact_mut(4).zip(src).for_each(|(d, s)| d.copy_from_slice(&s.to_le_bytes()));
        }
        DType::BF16 => dst.chunks_exact_mut(2).zip(src).for_each(|(d, &s)| d.copy_from_slice(&float::bf16_from_f32(s).to_le_bytes())),
        DType::F16 => dst.chunks_exact_mut(2).zip(src).for_each(|(d, &s)| d.copy_from_slice(&float::f16_from_f32(s).to_le_bytes())),
        DType::E4M3 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = float::e4m3_from_f32(s)),
        DType::E5M2 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = float::e5m2_from_f32(s)),
        DType::E4M3Fnuz => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = float::e4m3fnuz_from_f32(s)),
        DType::E5M2Fnuz => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = float::e5m2fnuz_from_f32(s)),
        DType::E8M0 | DType::Bytes | DType::I32 | DType::I64 | DType::U32 => {
            panic!("narrow: {dtype} is no destination of a rounding")
        }
    }
}
