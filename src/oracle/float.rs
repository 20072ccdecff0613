//! Formats narrower than f32, by arithmetic on values and not on bits.

use crate::tensor::DType;

/// A binary floating-point format, described.
struct Format {
    mantissa_bits: i32,
    bias: i32,
    /// Largest finite value.
    largest: f64,
    /// Bits of +infinity, for formats that keep it; the others saturate.
    infinity: Option<u32>,
    /// Bits of the NaN that a conversion writes.
    nan: u32,
    /// Bit of the sign.
    sign: u32,
    /// FNUZ: the pattern of -0 is the NaN, so a negative zero becomes +0.
    negative_zero: bool,
}

fn format(dtype: DType) -> Format {
    let fp8 = |mantissa_bits, bias, largest, nan, negative_zero| Format {
        mantissa_bits,
        bias,
        largest,
        infinity: None,
        nan,
        sign: 0x80,
        negative_zero,
    };
    match dtype {
        DType::F16 => {
            Format { mantissa_bits: 10, bias: 15, largest: 65504.0, infinity: Some(0x7C00), nan: 0x7E00, sign: 0x8000, negative_zero: true }
        }
        DType::BF16 => Format {
            mantissa_bits: 7,
            bias: 127,
            largest: f32::from_bits(0x7F7F_0000) as f64,
            infinity: Some(0x7F80),
            nan: 0x7FC0,
            sign: 0x8000,
            negative_zero: true,
        },
        DType::E4M3 => fp8(3, 7, 448.0, 0x7F, true),
        DType::E5M2 => fp8(2, 15, 57344.0, 0x7F, true),
        DType::E4M3Fnuz => fp8(3, 8, 240.0, 0x80, false),
        DType::E5M2Fnuz => fp8(2, 16, 57344.0, 0x80, false),
        _ => panic!("oracle: {dtype} is not a narrow floating-point format"),
    }
}

/// The bits of `x` rounded once, half to even. FP8 saturates (infinities too), f16 and bf16 overflow to infinity. NaN is the format's
/// canonical NaN (fp8: 0x7F, FNUZ 0x80).
pub fn narrow(dtype: DType, x: f32) -> u32 {
    if dtype == DType::F32 {
        return x.to_bits();
    }
    let f = format(dtype);
    if x.is_nan() {
        return f.nan;
    }
    let sign = if x.is_sign_negative() { f.sign } else { 0 };
    let magnitude = (x as f64).abs();
    // Not below the exponent of the smallest normal number: subnormals share its step.
    let exponent = binade(magnitude).max(1 - f.bias);
    let step = pow2(exponent - f.mantissa_bits);
    let rounded = (magnitude / step).round_ties_even() * step;
    let magnitude_bits = if rounded > f.largest { f.infinity.unwrap_or_else(|| bits_of(&f, f.largest)) } else { bits_of(&f, rounded) };
    if magnitude_bits == 0 && !f.negative_zero { 0 } else { sign | magnitude_bits }
}

/// `2^e`, exactly. A double's exponent field is the quickest way to it: checks spend most of their time here.
fn pow2(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52) // 1023, 52: spec (binary64)
}

/// The `e` of `2^e <= x < 2^(e + 1)`; far below every format for 0, 128 (above every finite f32) for infinity.
fn binade(x: f64) -> i32 {
    // log2 may be off by an ulp beside a power of two: it is where the search starts, not where it ends.
    let mut exponent = (x.log2().floor() as i32).clamp(-200, 128); // -200: below the smallest f32, 2^-149
    while exponent < 128 && x >= pow2(exponent + 1) {
        exponent += 1;
    }
    while exponent > -200 && x < pow2(exponent) {
        exponent -= 1;
    }
    exponent
}

/// The bits of a value that the format holds exactly.
fn bits_of(f: &Format, value: f64) -> u32 {
    let smallest_normal = pow2(1 - f.bias);
    if value < smallest_normal {
        return (value / pow2(1 - f.bias - f.mantissa_bits)) as u32;
    }
    let exponent = binade(value);
    let mantissa = (value / pow2(exponent) - 1.0) * pow2(f.mantissa_bits);
    ((exponent + f.bias) as u32) << f.mantissa_bits | mantissa as u32
}

/// The value of `bits`, exactly.
pub fn widen(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::F32 => return f32::from_bits(bits),
        DType::BF16 => return f32::from_bits(bits << 16),
        DType::E8M0 if bits == 0xFF => return f32::NAN,
        DType::E8M0 => return pow2(bits as i32 - 127) as f32,
        _ => {}
    }
    let f = format(dtype);
    let magnitude = bits & (f.sign - 1);
    let sign = if bits & f.sign != 0 { -1.0 } else { 1.0 };
    let exponent = (magnitude >> f.mantissa_bits) as i32;
    let mantissa = (magnitude & ((1 << f.mantissa_bits) - 1)) as f64 / pow2(f.mantissa_bits);
    let is_nan = match dtype {
        DType::F16 => magnitude > 0x7C00,
        DType::E5M2 => magnitude > 0x7C,
        DType::E4M3 => magnitude == 0x7F,
        _ => bits == 0x80,
    };
    let is_infinite = matches!((dtype, magnitude), (DType::F16, 0x7C00) | (DType::E5M2, 0x7C));
    let value = if is_nan {
        f64::NAN
    } else if is_infinite {
        f64::INFINITY
    } else if exponent == 0 {
        mantissa * pow2(1 - f.bias)
    } else {
        (1.0 + mantissa) * pow2(exponent - f.bias)
    };
    (sign * value) as f32
}

/// `x` rounded to `dtype` and back: one rounding of a chain.
pub fn round(dtype: DType, x: f32) -> f32 {
    widen(dtype, narrow(dtype, x))
}

/// Elements of `bytes` (little endian) as values.
pub fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(dtype.size()).map(|b| widen(dtype, bits(b))).collect()
}

/// The element's bytes as a number.
pub fn bits(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |acc, &b| acc << 8 | b as u32)
}

/// Appends `x`, rounded to `dtype`, to `out`.
pub fn push(dtype: DType, x: f32, out: &mut Vec<u8>) {
    out.extend_from_slice(&narrow(dtype, x).to_le_bytes()[..dtype.size()]);
}
