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

#[cfg(test)]
pub(crate) mod table {
    //! The formats again, derived independently: by walking up from zero one step at a time.

    use super::*;

    /// Every finite magnitude in order of its bits, and what lies above.
    pub(crate) struct Table {
        pub(crate) dtype: DType,
        values: Vec<f64>,
        /// Bits of a magnitude that rounds above the largest.
        above: u32,
        sign: u32,
        nan: u32,
        negative_zero: bool,
    }

    pub(crate) fn tables() -> Vec<Table> {
        // Smallest step, steps in a binade, finite magnitudes, the largest of them: the limits in the tables of OCP OFP8 1.0, IEEE 754 and the
        // FNUZ paper (spec).
        let make = |dtype, step: i32, binade: usize, num: usize, largest: f64, above: u32, sign, nan, negative_zero| {
            let mut step = 2f64.powi(step);
            let mut values = vec![0.0];
            while values.len() < num {
                // The first binade and the subnormals below it share a step; each later binade doubles it.
                if values.len() > 2 * binade && (values.len() - 1) % binade == 0 {
                    step *= 2.0;
                }
                values.push(values[values.len() - 1] + step);
            }
            assert_eq!(values[num - 1], largest, "{dtype}");
            Table { dtype, values, above, sign, nan, negative_zero }
        };
        let bf16_largest = (2.0 - 2f64.powi(-7)) * 2f64.powi(127);
        vec![
            make(DType::E4M3, -9, 8, 127, 448.0, 0x7E, 0x80, 0x7F, true),
            make(DType::E5M2, -16, 4, 124, 57344.0, 0x7B, 0x80, 0x7F, true),
            make(DType::E4M3Fnuz, -10, 8, 128, 240.0, 0x7F, 0x80, 0x80, false),
            make(DType::E5M2Fnuz, -17, 4, 128, 57344.0, 0x7F, 0x80, 0x80, false),
            make(DType::F16, -24, 1024, 0x7C00, 65504.0, 0x7C00, 0x8000, 0x7E00, true),
            make(DType::BF16, -133, 128, 0x7F80, bf16_largest, 0x7F80, 0x8000, 0x7FC0, true),
        ]
    }

    impl Table {
        /// The nearest entry by search; of two equally near ones the even.
        pub(crate) fn nearest(&self, x: f32) -> u32 {
            if x.is_nan() {
                return self.nan;
            }
            let magnitude = x.abs() as f64;
            let last = self.values.len() - 1;
            let upper = self.values.partition_point(|&v| v < magnitude);
            let bits = if upper == 0 {
                0
            } else if upper <= last {
                let middle = (self.values[upper - 1] + self.values[upper]) / 2.0; // exact: one bit more than the format has
                match magnitude.total_cmp(&middle) {
                    std::cmp::Ordering::Less => upper - 1,
                    std::cmp::Ordering::Greater => upper,
                    std::cmp::Ordering::Equal => upper - upper % 2,
                }
            } else {
                let half_step = (self.values[last] - self.values[last - 1]) / 2.0;
                if magnitude < self.values[last] + half_step { last } else { self.above as usize }
            } as u32;
            if bits == 0 && !self.negative_zero {
                0
            } else if x.is_sign_negative() {
                self.sign | bits
            } else {
                bits
            }
        }

        /// Every representable value and every tie, each with its two f32 neighbours, of both signs.
        pub(crate) fn edges(&self) -> Vec<f32> {
            let ties = self.values.windows(2).map(|w| (w[0] + w[1]) / 2.0);
            let last = self.values.len() - 1;
            let past = self.values[last] + (self.values[last] - self.values[last - 1]) / 2.0;
            let points = self.values.iter().copied().chain(ties).chain([past, 2.0 * past]).map(|v| v as f32);
            points.flat_map(|v| [v.next_down(), v, v.next_up()]).flat_map(|v| [v, -v]).collect()
        }

        /// Every value with its bits: finite ones of both signs, then infinities if the format has them, then the NaNs.
        pub(crate) fn patterns(&self) -> Vec<(u32, f64)> {
            (0..2 * self.sign)
                .map(|bits| {
                    let magnitude = (bits & (self.sign - 1)) as usize;
                    let sign = if bits & self.sign != 0 { -1.0 } else { 1.0 };
                    let infinite = matches!((self.dtype, magnitude), (DType::F16, 0x7C00) | (DType::BF16, 0x7F80) | (DType::E5M2, 0x7C));
                    let nan = !self.negative_zero && bits == self.sign;
                    let value = if nan || magnitude >= self.values.len() && !infinite {
                        f64::NAN
                    } else if infinite {
                        f64::INFINITY
                    } else {
                        self.values[magnitude]
                    };
                    (bits, sign * value)
                })
                .collect()
        }
    }

    /// All 65536 bf16 and f16 patterns as f32.
    pub(crate) fn every_16_bit_value() -> Vec<f32> {
        (0..=u16::MAX).flat_map(|b| [half::bf16::from_bits(b).to_f32(), half::f16::from_bits(b).to_f32()]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_is_the_nearest_entry_of_the_table() {
        let all = table::every_16_bit_value();
        for table in table::tables() {
            let dtype = table.dtype;
            for x in all.iter().copied().chain(table.edges()) {
                let (got, want) = (narrow(dtype, x), table.nearest(x));
                assert_eq!(got, want, "{dtype} of {x:e}: got {got:#x}, expected {want:#x}");
            }
        }
    }

    #[test]
    fn widen_is_the_entry_of_the_table() {
        for table in table::tables() {
            for (bits, want) in table.patterns() {
                let got = widen(table.dtype, bits) as f64;
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{} {bits:#x}: {got} is not {want}", table.dtype);
            }
        }
        for bits in 0..0xFF {
            // 2^(bits - 127) by repeated halving or doubling from 1 (spec: OCP MX 1.0).
            let factor = if bits < 127 { 0.5f64 } else { 2.0 };
            let want = (0..(bits as i32 - 127).abs()).fold(1.0f64, |v, _| v * factor);
            assert_eq!(widen(DType::E8M0, bits) as f64, want, "e8m0 {bits:#x}");
        }
        assert!(widen(DType::E8M0, 0xFF).is_nan());
    }

    /// Other people's conversions: `half` for the 16-bit formats, `float8` for OCP fp8. `float8` keeps the sign of a NaN and `half` its payload.
    #[test]
    fn other_crates_agree() {
        let edges = table::tables().iter().flat_map(|t| t.edges()).collect::<Vec<_>>();
        for x in table::every_16_bit_value().into_iter().chain(edges).filter(|x| !x.is_nan()) {
            assert_eq!(narrow(DType::E4M3, x), float8::F8E4M3::from_f32(x).to_bits() as u32, "e4m3 {x:e}");
            assert_eq!(narrow(DType::E5M2, x), float8::F8E5M2::from_f32(x).to_bits() as u32, "e5m2 {x:e}");
            assert_eq!(narrow(DType::F16, x), half::f16::from_f32(x).to_bits() as u32, "f16 {x:e}");
            assert_eq!(narrow(DType::BF16, x), half::bf16::from_f32(x).to_bits() as u32, "bf16 {x:e}");
        }
    }
}
