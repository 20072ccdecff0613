//! The comparator that tests, the program and benchmarks use: bit for bit, a NaN equals any NaN, fp8 by byte.

use crate::oracle::float;
use crate::tensor::DType;

/// What differs, for a message that can be acted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Name of the tensor.
    pub what: String,
    /// Elements that differ; 0 when the sizes differ.
    pub num_different: usize,
    /// The first difference, or the two sizes.
    pub first: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.num_different {
            0 => write!(f, "{}: {}", self.what, self.first),
            n => write!(f, "{}: {n} elements differ, first {}", self.what, self.first),
        }
    }
}

/// Compares the bytes of two tensors of `shape`.
///
/// # Errors
/// The first difference in row-major order and how many there are, or that a side has not the bytes of `shape`.
pub fn equal(what: &str, dtype: DType, shape: &[usize], got: &[u8], want: &[u8]) -> Result<(), Difference> {
    let size = dtype.size();
    let bytes = shape.iter().product::<usize>() * size;
    if got.len() != bytes || want.len() != bytes {
        let first = format!("shape {shape:?} of {dtype} is {bytes} bytes, got {} and expected {}", got.len(), want.len());
        return Err(Difference { what: what.into(), num_different: 0, first });
    }
    let different = |i: &usize| !same(dtype, &got[i * size..][..size], &want[i * size..][..size]);
    if got == want {
        return Ok(());
    }
    let mut all = (0..bytes / size).filter(different);
    let Some(first) = all.next() else { return Ok(()) };
    let show = |b: &[u8]| {
        let bits = b[first * size..][..size].iter().rev().map(|x| format!("{x:02x}")).collect::<String>();
        match dtype {
            DType::Bytes | DType::I32 | DType::I64 | DType::U32 => format!("0x{bits}"),
            _ => format!("{} (0x{bits})", float::widen(dtype, float::bits(&b[first * size..][..size]))),
        }
    };
    let first_text = format!("at {:?}: got {}, expected {}", position(first, shape), show(got), show(want));
    Err(Difference { what: what.into(), num_different: 1 + all.count(), first: first_text })
}

fn same(dtype: DType, got: &[u8], want: &[u8]) -> bool {
    got == want || dtype.is_float() && is_nan(dtype, got) && is_nan(dtype, want)
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    float::widen(dtype, float::bits(bytes)).is_nan()
}

fn position(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut position = vec![0; shape.len()];
    for (p, &size) in position.iter_mut().zip(shape).rev() {
        *p = index % size;
        index /= size;
    }
    position
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 2] = [3, 4];

    fn sample() -> Vec<u8> {
        (0..12u8).flat_map(|i| (i as f32 + 0.5).to_le_bytes()).collect()
    }

    fn differs(got: &[u8]) -> Difference {
        equal("x", DType::F32, &SHAPE, got, &sample()).unwrap_err()
    }

    #[test]
    fn equal_bytes_are_equal() {
        equal("x", DType::F32, &SHAPE, &sample(), &sample()).unwrap();
    }

    #[test]
    fn one_wrong_row_is_found() {
        let mut got = sample();
        got[16..32].fill(0);
        let d = differs(&got);
        assert_eq!(d.num_different, 4);
        assert!(d.first.starts_with("at [1, 0]: got 0 (0x00000000), expected 4.5"), "{d}");
    }

    #[test]
    fn one_ulp_is_found() {
        let mut got = sample();
        got[44] ^= 1;
        assert_eq!(differs(&got).num_different, 1);
    }

    #[test]
    fn swapped_rows_are_found() {
        let mut got = sample();
        got.rotate_left(16);
        assert_eq!(differs(&got).num_different, 12);
    }

    #[test]
    fn a_wrong_shape_is_found() {
        let d = differs(&sample()[..44]);
        assert_eq!(d.num_different, 0);
        assert!(d.first.contains("48 bytes, got 44"), "{d}");
    }

    #[test]
    fn an_unexpected_nan_is_found_and_an_expected_one_is_not() {
        let nan = f32::NAN.to_le_bytes();
        let other_nan = f32::from_bits(0xFFC0_0001).to_le_bytes();
        let mut got = sample();
        got[..4].copy_from_slice(&nan);
        assert_eq!(differs(&got).num_different, 1);
        equal("x", DType::F32, &[1], &nan, &other_nan).unwrap();
    }

    #[test]
    fn fp8_nans_count_by_byte_and_zeros_have_signs() {
        assert!(equal("x", DType::E4M3, &[1], &[0x7F], &[0xFF]).is_err());
        assert!(equal("x", DType::F32, &[1], &0f32.to_le_bytes(), &(-0f32).to_le_bytes()).is_err());
    }
}
