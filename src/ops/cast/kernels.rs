//! The loops over one row: scale, round, greatest magnitude. One source, compiled once for each [`Level`].

#[cfg(target_arch = "x86_64")]
use super::ocp;
use super::tile::{Beside, prefetch, store};
use crate::cpu::Level;
use crate::cpu::float;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;
use crate::tensor::DType;

/// Bits of f32 infinity: a magnitude above them is a NaN.
const INFINITY: u32 = 0x7F80_0000;

/// Defines a function that runs its body at a level, as `cpu::convert` does.
macro_rules! at_each_level {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:ident, $avx2:ident, $avx512:ident) => {
        $(#[$doc])*
        pub(super) fn $name(level: Level, $($arg: $ty),*) $(-> $ret)? {
            match level.0 {
                // SAFETY: a Level is only made after the features of its instruction set were detected.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { $avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { $avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
        fn $avx512($($arg: $ty),*) $(-> $ret)? {
            $body($($arg),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,bmi2")]
        fn $avx2($($arg: $ty),*) $(-> $ret)? {
            $body($($arg),*)
        }
    };
}

at_each_level! {
    /// `cast_row` without instructions of our own.
    fn cast_row_compiled(from: DType, to: DType, src: &[u8], scale: f32, dst: &mut [u8]) -> u32
        = cast_row_loops, cast_row_avx2, cast_row_avx512
}

/// Writes round(scale * x) for a row to `dst` and to `beside.row`, and returns the bits of its greatest magnitude before scaling; NaN drops out.
///
/// # Panics
/// If `dst` has not as many elements as `src`.
pub(super) fn cast_row(level: Level, from: DType, to: DType, src: &[u8], scale: f32, dst: &mut [u8], beside: &mut Beside<'_>) -> u32 {
    assert_eq!(src.len() / from.size(), dst.len() / to.size(), "cast_row: elements");
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the level proves the instructions, and `dst` has as many elements as `src` (asserted).
        let vectors = unsafe {
            match (level.0, from, to) {
                (Isa::Avx512, DType::BF16, DType::E4M3) => Some((ocp::cast_avx512(ocp::E4M3, src, scale, dst, beside), 64)),
                (Isa::Avx512, DType::BF16, DType::E5M2) => Some((ocp::cast_avx512(ocp::E5M2, src, scale, dst, beside), 64)),
                (Isa::Avx2, DType::BF16, DType::E4M3) => Some((ocp::cast_avx2(ocp::E4M3, src, scale, dst, beside), 32)),
                (Isa::Avx2, DType::BF16, DType::E5M2) => Some((ocp::cast_avx2(ocp::E5M2, src, scale, dst, beside), 32)),
                _ => None,
            }
        };
        if let Some((amax, width)) = vectors {
            let done = dst.len() / width * width;
            let amax = cast_row_compiled(level, from, to, &src[done * from.size()..], scale, &mut dst[done..]).max((amax as u32) << 16);
            let stored = if beside.is_aligned_stream() { done } else { 0 };
            store_rest(level, dst, stored, beside);
            return amax;
        }
    }
    prefetch(beside.next);
    let amax = cast_row_compiled(level, from, to, src, scale, dst);
    store_rest(level, dst, 0, beside);
    amax
}

/// Stores what is not yet in the row copy.
fn store_rest(level: Level, dst: &[u8], stored: usize, beside: &mut Beside<'_>) {
    if !beside.row.is_empty() {
        store(level, &mut beside.row[stored..], &dst[stored..], beside.stream);
    }
}

at_each_level! {
    /// The bits of the greatest magnitude of a row; NaN drops out.
    fn amax_row(from: DType, src: &[u8]) -> u32 = amax_row_loops, amax_row_avx2, amax_row_avx512
}

at_each_level! {
    /// Raises `columns[i]` to the magnitude bits of `x[i]` and returns the greatest of the row; NaN drops out.
    fn amax_columns(x: &[f32], columns: &mut [u32]) -> u32 = amax_columns_loops, amax_columns_avx2, amax_columns_avx512
}

at_each_level! {
    /// Writes round(scale[i] * x[i]) for a row.
    fn scale_row(to: DType, x: &[f32], scale: &[f32], dst: &mut [u8]) = scale_row_loops, scale_row_avx2, scale_row_avx512
}

/// Bits of |x|; 0 for a NaN.
#[inline(always)]
fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > INFINITY { 0 } else { bits }
}

#[inline(always)]
fn cast_elements<const I: usize, const O: usize>(
    src: &[u8],
    scale: f32,
    dst: &mut [u8],
    widen: impl Fn([u8; I]) -> f32,
    narrow: impl Fn(f32) -> [u8; O],
) -> u32 {
    let mut amax = 0;
    for (s, d) in src.as_chunks::<I>().0.iter().zip(dst.as_chunks_mut::<O>().0) {
        let x = widen(*s);
        amax = amax.max(magnitude(x));
        *d = narrow(scale * x);
    }
    amax
}

#[inline(always)]
fn cast_from<const I: usize>(to: DType, src: &[u8], scale: f32, dst: &mut [u8], widen: impl Fn([u8; I]) -> f32) -> u32 {
    match to {
        DType::F32 => cast_elements(src, scale, dst, widen, f32::to_le_bytes),
        DType::F16 => cast_elements(src, scale, dst, widen, |x| float::f16_from_f32(x).to_le_bytes()),
        DType::BF16 => cast_elements(src, scale, dst, widen, |x| float::bf16_from_f32(x).to_le_bytes()),
        DType::E4M3 => cast_elements(src, scale, dst, widen, |x| [float::e4m3_from_f32(x)]),
        DType::E5M2 => cast_elements(src, scale, dst, widen, |x| [float::e5m2_from_f32(x)]),
        DType::E4M3Fnuz => cast_elements(src, scale, dst, widen, |x| [float::e4m3fnuz_from_f32(x)]),
        DType::E5M2Fnuz => cast_elements(src, scale, dst, widen, |x| [float::e5m2fnuz_from_f32(x)]),
        _ => unreachable!("the validator accepts no other output"),
    }
}

#[inline(always)]
fn cast_row_loops(from: DType, to: DType, src: &[u8], scale: f32, dst: &mut [u8]) -> u32 {
    match from {
        DType::F32 => cast_from(to, src, scale, dst, f32::from_le_bytes),
        DType::F16 => cast_from(to, src, scale, dst, |b| float::f32_from_f16(u16::from_le_bytes(b))),
        _ => cast_from(to, src, scale, dst, |b| float::f32_from_bf16(u16::from_le_bytes(b))),
    }
}

#[inline(always)]
fn amax_elements<const I: usize>(src: &[u8], widen: impl Fn([u8; I]) -> f32) -> u32 {
    src.as_chunks::<I>().0.iter().fold(0, |amax, &b| amax.max(magnitude(widen(b))))
}

#[inline(always)]
fn amax_row_loops(from: DType, src: &[u8]) -> u32 {
    match from {
        DType::F32 => amax_elements(src, f32::from_le_bytes),
        DType::F16 => amax_elements(src, |b| float::f32_from_f16(u16::from_le_bytes(b))),
        _ => amax_elements(src, |b| float::f32_from_bf16(u16::from_le_bytes(b))),
    }
}

#[inline(always)]
fn amax_columns_loops(x: &[f32], columns: &mut [u32]) -> u32 {
    let mut amax = 0;
    for (c, &x) in columns.iter_mut().zip(x) {
        let m = magnitude(x);
        *c = m.max(*c);
        amax = m.max(amax);
    }
    amax
}

#[inline(always)]
fn scale_elements<const O: usize>(x: &[f32], scale: &[f32], dst: &mut [u8], narrow: impl Fn(f32) -> [u8; O]) {
    for ((x, s), d) in x.iter().zip(scale).zip(dst.as_chunks_mut::<O>().0) {
        *d = narrow(s * x);
    }
}

#[inline(always)]
fn scale_row_loops(to: DType, x: &[f32], scale: &[f32], dst: &mut [u8]) {
    match to {
        DType::E4M3 => scale_elements(x, scale, dst, |x| [float::e4m3_from_f32(x)]),
        DType::E5M2 => scale_elements(x, scale, dst, |x| [float::e5m2_from_f32(x)]),
        DType::E4M3Fnuz => scale_elements(x, scale, dst, |x| [float::e4m3fnuz_from_f32(x)]),
        DType::E5M2Fnuz => scale_elements(x, scale, dst, |x| [float::e5m2fnuz_from_f32(x)]),
        _ => unreachable!("the validator accepts only fp8 for block scales"),
    }
}
