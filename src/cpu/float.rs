//! Branchless conversions of one element, on bits, so that loops over them become vector code at every [`Level`](super::Level).
#![forbid(unsafe_code)]

/// bf16 bits to f32: exact.
#[inline(always)]
pub fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 to bf16 bits, nearest even; a NaN becomes a quiet NaN of the same sign.
#[inline(always)]
pub fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if x.is_nan() { nan } else { rounded }) as u16
}

/// f16 bits to f32: exact. A NaN becomes a quiet NaN.
#[inline(always)]
pub fn f32_from_f16(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = (bits as u32 & 0x7FFF) << 13;
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals exactly.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = magnitude | 0x7F80_0000 | if magnitude > 0x0F80_0000 { 0x40_0000 } else { 0 };
    let value = if magnitude >= 0x0F80_0000 { special } else { scaled.to_bits() };
    f32::from_bits(sign | value)
}

/// f32 to f16 bits, nearest even, overflow to infinity; a NaN becomes a quiet NaN.
#[inline(always)]
pub fn f16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = round_magnitude::<10, 15>(magnitude);
    let infinity_or_nan = 0x7C00 | if magnitude > 0x7F80_0000 { 0x200 | ((magnitude >> 13) & 0x3FF) } else { 0 };
    let value = if rounded >= 0x7C00 || magnitude >= 0x7F80_0000 { infinity_or_nan } else { rounded };
    (sign | value) as u16
}

/// Rounds the magnitude of a finite f32 to a format with `MANTISSA` bits and the given bias, nearest even, with subnormals; the exponent
/// runs on above the format's largest, so the caller compares and saturates.
#[inline(always)]
fn round_magnitude<const MANTISSA: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let shift = 23 - MANTISSA;
    // Normal: add half a unit (less one when the last kept bit is even), cut, move the bias.
    let at_least_normal = magnitude.max((127 - BIAS + 1) << 23);
    let half = (1 << (shift - 1)) - 1 + ((at_least_normal >> shift) & 1);
    let normal = (at_least_normal.wrapping_add(half) >> shift).wrapping_sub((127 - BIAS) << MANTISSA);
    // Subnormal: adding a power of two whose unit in the last place is the format's smallest step lets the adder round.
    let magic = (127 - BIAS + 1 + shift) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
    // Below the smallest normal number `normal` is that number; above it `subnormal` goes on counting in smallest steps, so it is never less.
    subnormal.min(normal)
}

/// f32 to OCP E4M3: nearest even, saturates at 448 (infinities too), every NaN is 0x7F, -0 stays.
#[inline(always)]
pub fn e4m3_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = round_magnitude::<3, 7>(magnitude.min(0x43E0_0000)).min(0x7E); // 0x43E00000 is 448.0 (spec: OCP FP8)
    let signed = (bits >> 24) & 0x80 | rounded;
    (if magnitude > 0x7F80_0000 { 0x7F } else { signed }) as u8
}

/// f32 to OCP E5M2: nearest even, saturates at 57344 (infinities too), every NaN is 0x7F, -0 stays.
#[inline(always)]
pub fn e5m2_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = round_magnitude::<2, 15>(magnitude.min(0x4760_0000)).min(0x7B); // 0x47600000 is 57344.0 (spec: OCP FP8)
    let signed = (bits >> 24) & 0x80 | rounded;
    (if magnitude > 0x7F80_0000 { 0x7F } else { signed }) as u8
}

/// f32 to E4M3 FNUZ: nearest even, saturates at 240, every NaN is 0x80, both zeros are 0.
#[inline(always)]
pub fn e4m3fnuz_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = round_magnitude::<3, 8>(magnitude.min(0x4370_0000)).min(0x7F); // 0x43700000 is 240.0
    let signed = if rounded == 0 { 0 } else { (bits >> 24) & 0x80 | rounded };
    (if magnitude > 0x7F80_0000 { 0x80 } else { signed }) as u8
}

/// f32 to E5M2 FNUZ: nearest even, saturates at 57344, every NaN is 0x80, both zeros are 0.
#[inline(always)]
pub fn e5m2fnuz_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = round_magnitude::<2, 16>(magnitude.min(0x4760_0000)).min(0x7F);
    let signed = if rounded == 0 { 0 } else { (bits >> 24) & 0x80 | rounded };
    (if magnitude > 0x7F80_0000 { 0x80 } else { signed }) as u8
}

/// OCP E4M3 to f32: exact; 0x7F and 0xFF are NaN.
#[inline(always)]
pub fn f32_from_e4m3(bits: u8) -> f32 {
    let value = widen_fp8::<3, 7>(bits);
    f32::from_bits(if bits & 0x7F == 0x7F { 0x7FC0_0000 } else { value })
}

/// OCP E5M2 to f32: exact.
#[inline(always)]
pub fn f32_from_e5m2(bits: u8) -> f32 {
    f32_from_f16((bits as u16) << 8)
}

/// E4M3 FNUZ to f32: exact; 0x80 is NaN.
#[inline(always)]
pub fn f32_from_e4m3fnuz(bits: u8) -> f32 {
    f32::from_bits(if bits == 0x80 { 0x7FC0_0000 } else { widen_fp8::<3, 8>(bits) })
}

/// E5M2 FNUZ to f32: exact; 0x80 is NaN.
#[inline(always)]
pub fn f32_from_e5m2fnuz(bits: u8) -> f32 {
    f32::from_bits(if bits == 0x80 { 0x7FC0_0000 } else { widen_fp8::<2, 16>(bits) })
}

#[inline(always)]
fn widen_fp8<const MANTISSA: u32, const BIAS: u32>(bits: u8) -> u32 {
    let sign = (bits as u32 & 0x80) << 24;
    let magnitude = (bits as u32 & 0x7F) << (23 - MANTISSA);
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 127 - BIAS) << 23);
    sign | scaled.to_bits()
}

/// E8M0 bits to f32: 2^(bits - 127); 0xFF is NaN, 0 is 2^-127 (subnormal in f32).
#[inline(always)]
pub fn f32_from_e8m0(bits: u8) -> f32 {
    let value = if bits == 0 { 0x40_0000 } else { (bits as u32) << 23 };
    f32::from_bits(if bits == 0xFF { 0x7FC0_0000 } else { value })
}

/// exp(x) of DESIGN 3: the same bits on every backend, at most 1 ulp.
///
/// n = round(x log2 e); r = x - n ln 2 by two fma; a polynomial of degree 7 in fma (Taylor, Horner); times 2^n in two exact steps.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Outside, the result is 0 or infinity whatever the polynomial says; the clamp keeps n in range. NaN passes through both.
    let clamped = x.clamp(-104.0, 89.0);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_HI, clamped);
    let r = (-n).mul_add(LN2_LO, r);
    let mut p = EXP_POLYNOMIAL[0];
    for &c in &EXP_POLYNOMIAL[1..] {
        p = p.mul_add(r, c);
    }
    // 2^n in two factors, each normal: a subnormal result is rounded once, by the last product.
    // The integer is in the low bits of n + 1.5 * 2^23 (exact, |n| < 2^22): `n as i32` saturates and is not vectorised. NaN gives some integer; p is NaN.
    let n = (n + INTEGER).to_bits() as i32 - INTEGER.to_bits() as i32;
    let first = n >> 1;
    let second = n - first;
    p * f32::from_bits(((first + 127) << 23) as u32) * f32::from_bits(((second + 127) << 23) as u32)
}

/// 1.5 * 2^23: f32 of this size have steps of 1 (derived).
const INTEGER: f32 = 12_582_912.0;
/// Upper part of ln 2, with trailing zeros so that n * LN2_HI is exact for |n| < 2^9 (derived).
const LN2_HI: f32 = f32::from_bits(0x3F31_7200);
/// ln 2 - LN2_HI, rounded (derived).
const LN2_LO: f32 = f32::from_bits(0x35BF_BE8E);
/// 1/7!, 1/6!, .., 1/0! (derived).
const EXP_POLYNOMIAL: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// 1 / (1 + exp(-x)); a large negative x gives 0, NaN stays.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + exp(-x)).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}
