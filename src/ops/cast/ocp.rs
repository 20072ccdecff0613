//! bf16 to the OCP FP8 formats, the common case, in x86 instructions: about twice as fast as what the compiler makes of the loop (measured).
//!
//! The steps are those of `cpu::float`, rearranged: magnitudes of bf16 are compared as 16-bit integers; unpacking against zeros widens and packing
//! narrows in the same lane order; a NaN stays a NaN through the minimum with the largest value and saturates to 0xFF when it is packed, which
//! marks it until signs are added.

use std::arch::x86_64::*;

use super::tile::{Beside, prefetch};

/// OCP E4M3 for the functions below.
pub(super) const E4M3: Format<3, 7, 0x43E0_0000> = Format; // 448.0 (spec: OCP FP8)
/// OCP E5M2 for the functions below.
pub(super) const E5M2: Format<2, 15, 0x4760_0000> = Format; // 57344.0 (spec: OCP FP8)

/// Mantissa bits, exponent bias and the bits of the largest finite value as f32.
#[derive(Clone, Copy)]
pub(super) struct Format<const MANTISSA: u32, const BIAS: i32, const LARGEST: u32>;

impl<const MANTISSA: u32, const BIAS: i32, const LARGEST: u32> Format<MANTISSA, BIAS, LARGEST> {
    /// Mantissa bits of f32 that are rounded away.
    const SHIFT: u32 = 23 - MANTISSA;
    /// Half a unit less one, and the change of the exponent's bias.
    const HALF_AND_BIAS: i32 = (1 << (Self::SHIFT - 1)) - 1 - ((127 - BIAS) << 23);
    /// Smallest normal value as f32 bits.
    const SMALLEST_NORMAL: i32 = (127 - BIAS + 1) << 23;
    /// A power of two whose unit in the last place is the format's smallest step, as f32 bits.
    const MAGIC: i32 = (127 - BIAS + 1 + Self::SHIFT as i32) << 23;
}

/// Bits of bf16 infinity.
const INFINITY: i16 = 0x7F80;

/// Casts the first `src.len() / 128 * 64` elements and returns the greatest magnitude among them, as bf16 bits.
///
/// The bytes go to `beside.row` too if that can be streamed.
///
/// # Safety
/// AVX-512 F, BW and VBMI; `dst` holds a byte for each two bytes of `src`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2")]
pub(super) unsafe fn cast_avx512<const M: u32, const B: i32, const L: u32>(
    _: Format<M, B, L>,
    src: &[u8],
    scale: f32,
    dst: &mut [u8],
    beside: &mut Beside<'_>,
) -> u16 {
    let factor = _mm512_set1_ps(scale);
    let round = |x: __m512i| {
        let y = _mm512_castps_si512(_mm512_mul_ps(factor, _mm512_castsi512_ps(x)));
        let magnitude = _mm512_and_si512(y, _mm512_set1_epi32(0x7FFF_FFFF));
        // The second operand is the result when one is a NaN.
        let m = _mm512_min_ps(_mm512_castsi512_ps(_mm512_set1_epi32(L as i32)), _mm512_castsi512_ps(magnitude));
        let bits = _mm512_castps_si512(m);
        // Not the intrinsic with a constant count: SHIFT is no literal.
        let shift = _mm_cvtsi32_si128(Format::<M, B, L>::SHIFT as i32);
        let odd = _mm512_and_si512(_mm512_srl_epi32(bits, shift), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(bits, _mm512_set1_epi32(Format::<M, B, L>::HALF_AND_BIAS));
        let normal = _mm512_srl_epi32(_mm512_add_epi32(half, odd), shift);
        let magic = _mm512_set1_epi32(Format::<M, B, L>::MAGIC);
        let sum = _mm512_castps_si512(_mm512_add_ps(m, _mm512_castsi512_ps(magic)));
        let is_subnormal = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(Format::<M, B, L>::SMALLEST_NORMAL));
        _mm512_mask_sub_epi32(normal, is_subnormal, sum, magic)
    };
    let scale_sign = _mm512_set1_epi8(if scale.is_sign_negative() { i8::MIN } else { 0 });
    // Upper bytes of 64 bf16: where the signs are.
    let upper: [u8; 64] = std::array::from_fn(|i| 2 * i as u8 + 1);
    // SAFETY: 64 bytes.
    let upper = unsafe { _mm512_loadu_si512(upper.as_ptr().cast()) };
    let in_order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0); // packing leaves the 8-byte groups of two registers in turns
    let zero = _mm512_setzero_si512();
    let mut amax = zero;
    let stream = if beside.is_aligned_stream() { &mut *beside.row } else { &mut [] };
    for (i, (s, d)) in src.chunks_exact(128).zip(dst.chunks_exact_mut(64)).enumerate() {
        if let Some(next) = beside.next.as_chunks::<128>().0.get(i) {
            prefetch(next);
        }
        // SAFETY: the chunk has 128 bytes.
        let (a, b) = unsafe { (_mm512_loadu_si512(s.as_ptr().cast()), _mm512_loadu_si512(s.as_ptr().add(64).cast())) };
        for x in [a, b] {
            let magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
            let is_number = _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(INFINITY));
            amax = _mm512_mask_max_epu16(amax, is_number, amax, magnitude);
        }
        let signs = _mm512_xor_si512(_mm512_permutex2var_epi8(a, upper, b), scale_sign);
        let a = _mm512_packus_epi32(round(_mm512_unpacklo_epi16(zero, a)), round(_mm512_unpackhi_epi16(zero, a)));
        let b = _mm512_packus_epi32(round(_mm512_unpacklo_epi16(zero, b)), round(_mm512_unpackhi_epi16(zero, b)));
        let rounded = _mm512_permutexvar_epi64(in_order, _mm512_packus_epi16(a, b));
        // Bit 7: the sign unless the byte is the mark of a NaN; other bits: the byte. As a table over (0x80, sign, byte): 0b0100_1010 from the top.
        let bytes = _mm512_ternarylogic_epi32::<0b0100_1010>(_mm512_set1_epi8(i8::MIN), signs, rounded);
        // SAFETY: the chunk has 64 bytes.
        unsafe { _mm512_storeu_si512(d.as_mut_ptr().cast(), bytes) }
        if let Some(line) = stream.as_chunks_mut::<64>().0.get_mut(i) {
            // SAFETY: 64 bytes, aligned to 64.
            unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), bytes) }
        }
    }
    let mut lanes = [0u16; 32];
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), amax) }
    lanes.into_iter().max().unwrap_or(0)
}

/// As [`cast_avx512`], for the first `src.len() / 64 * 32` elements.
///
/// # Safety
/// AVX2; `dst` holds a byte for each two bytes of `src`.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn cast_avx2<const M: u32, const B: i32, const L: u32>(
    _: Format<M, B, L>,
    src: &[u8],
    scale: f32,
    dst: &mut [u8],
    beside: &mut Beside<'_>,
) -> u16 {
    let factor = _mm256_set1_ps(scale);
    let round = |x: __m256i| {
        let y = _mm256_castps_si256(_mm256_mul_ps(factor, _mm256_castsi256_ps(x)));
        let magnitude = _mm256_and_si256(y, _mm256_set1_epi32(0x7FFF_FFFF));
        // The second operand is the result when one is a NaN.
        let m = _mm256_min_ps(_mm256_castsi256_ps(_mm256_set1_epi32(L as i32)), _mm256_castsi256_ps(magnitude));
        let bits = _mm256_max_epi32(_mm256_castps_si256(m), _mm256_set1_epi32(Format::<M, B, L>::SMALLEST_NORMAL));
        let shift = _mm_cvtsi32_si128(Format::<M, B, L>::SHIFT as i32);
        let odd = _mm256_and_si256(_mm256_srl_epi32(bits, shift), _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(bits, _mm256_set1_epi32(Format::<M, B, L>::HALF_AND_BIAS));
        let normal = _mm256_srl_epi32(_mm256_add_epi32(half, odd), shift);
        let magic = _mm256_set1_epi32(Format::<M, B, L>::MAGIC);
        let sum = _mm256_castps_si256(_mm256_add_ps(m, _mm256_castsi256_ps(magic)));
        _mm256_min_epi32(_mm256_sub_epi32(sum, magic), normal)
    };
    let scale_sign = _mm256_set1_epi8(if scale.is_sign_negative() { i8::MIN } else { 0 });
    let zero = _mm256_setzero_si256();
    let mut amax = zero;
    let stream = if beside.is_aligned_stream() { &mut *beside.row } else { &mut [] };
    for (i, (s, d)) in src.chunks_exact(64).zip(dst.chunks_exact_mut(32)).enumerate() {
        if let Some(next) = beside.next.as_chunks::<64>().0.get(i) {
            prefetch(next);
        }
        // SAFETY: the chunk has 64 bytes.
        let (a, b) = unsafe { (_mm256_loadu_si256(s.as_ptr().cast()), _mm256_loadu_si256(s.as_ptr().add(32).cast())) };
        for x in [a, b] {
            let magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
            let is_nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(INFINITY));
            amax = _mm256_max_epi16(amax, _mm256_andnot_si256(is_nan, magnitude));
        }
        let signs = _mm256_packus_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
        let a = _mm256_packus_epi32(round(_mm256_unpacklo_epi16(zero, a)), round(_mm256_unpackhi_epi16(zero, a)));
        let b = _mm256_packus_epi32(round(_mm256_unpacklo_epi16(zero, b)), round(_mm256_unpackhi_epi16(zero, b)));
        let rounded = _mm256_packus_epi16(a, b);
        // Bit 7: the sign unless the byte is the mark of a NaN; other bits: the byte.
        let signs = _mm256_and_si256(_mm256_andnot_si256(rounded, _mm256_xor_si256(signs, scale_sign)), _mm256_set1_epi8(i8::MIN));
        let bytes = _mm256_or_si256(_mm256_and_si256(rounded, _mm256_set1_epi8(0x7F)), signs);
        // Packing leaves the 8-byte groups of two registers in turns: 0, 2, 1, 3.
        let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
        // SAFETY: the chunk has 32 bytes.
        unsafe { _mm256_storeu_si256(d.as_mut_ptr().cast(), bytes) }
        if let Some(line) = stream.as_chunks_mut::<32>().0.get_mut(i) {
            // SAFETY: 32 bytes, aligned to 32.
            unsafe { _mm256_stream_si256(line.as_mut_ptr().cast(), bytes) }
        }
    }
    let mut lanes = [0u16; 16];
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), amax) }
    lanes.into_iter().max().unwrap_or(0)
}
