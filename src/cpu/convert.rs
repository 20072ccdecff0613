//! Rows of elements to and from f32, at the speed of the machine's vectors.
//!
//! One loop per format over the branchless functions of `float.rs`, compiled once for each [`Level`]: the compiler makes the vector code, and
//! every level gives the same bits because each step is one IEEE operation.

use super::Level;
use super::float;
#[cfg(target_arch = "x86_64")]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle;
    use crate::oracle::float::table;

    #[test]
    fn narrow_is_the_nearest_entry_of_the_table_at_every_level() {
        for table in table::tables() {
            let dtype = table.dtype;
            let mut inputs = table::every_16_bit_value();
            inputs.extend(table.edges());
            let want: Vec<u32> = inputs.iter().map(|&x| table.nearest(x)).collect();
            for level in Level::available() {
                let mut got = vec![0; inputs.len() * dtype.size()];
                narrow(level, dtype, &inputs, &mut got);
                for ((&x, &want), got) in inputs.iter().zip(&want).zip(got.chunks(dtype.size())) {
                    let got = oracle::float::bits(got);
                    let same = got == want || dtype.is_float() && x.is_nan() && oracle::float::widen(dtype, got).is_nan();
                    assert!(same, "{level:?} {dtype} of {x:e}: got {got:#x}, expected {want:#x}");
                }
            }
        }
    }

    #[test]
    fn widen_is_the_entry_of_the_table_at_every_level() {
        let e8m0 = (0..=0xFF).map(|b| (b, oracle::float::widen(DType::E8M0, b) as f64)).collect();
        let mut all = vec![(DType::E8M0, e8m0)];
        all.extend(table::tables().iter().map(|t| (t.dtype, t.patterns())));
        for (dtype, patterns) in all {
            let bytes: Vec<u8> = patterns.iter().flat_map(|(b, _)| b.to_le_bytes()[..dtype.size()].to_vec()).collect();
            for level in Level::available() {
                let mut got = vec![0.0; patterns.len()];
                widen(level, dtype, &bytes, &mut got);
                for (&(bits, want), got) in patterns.iter().zip(got) {
                    let got = got as f64;
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{level:?} {dtype} {bits:#x}: {got} is not {want}");
                }
            }
        }
    }

    #[test]
    fn f32_passes_unchanged() {
        let x: Vec<f32> = table::every_16_bit_value().into_iter().filter(|x| !x.is_nan()).collect();
        for level in Level::available() {
            let mut bytes = vec![0; x.len() * 4];
            narrow(level, DType::F32, &x, &mut bytes);
            let mut back = vec![0.0; x.len()];
            widen(level, DType::F32, &bytes, &mut back);
            assert!(x.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()), "{level:?}");
        }
    }

    /// The same loop as the kernels make of it: inlined where wider instructions are allowed.
    #[inline(always)]
    fn functions(x: &[f32], out: &mut [[f32; 3]]) {
        for (o, &x) in out.iter_mut().zip(x) {
            *o = [float::exp(x), float::sigmoid(x), float::silu(x)];
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
    fn functions_avx512(x: &[f32], out: &mut [[f32; 3]]) {
        functions(x, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    fn functions_avx2(x: &[f32], out: &mut [[f32; 3]]) {
        functions(x, out);
    }

    #[test]
    fn exp_sigmoid_and_silu_are_the_oracles_at_every_level() {
        // 997 is arbitrary, odd and prime, so that mantissas vary; the range ends above 104, where the clamp is. Then the edges and NaN.
        let dense = (0..=0x4300_0000u32).step_by(997).flat_map(|b| [f32::from_bits(b), -f32::from_bits(b)]);
        let ends = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, -104.0, 89.0, 88.72284, -87.33655, -103.97208];
        let x: Vec<f32> = dense.chain(ends.into_iter().flat_map(|v| [v.next_down(), v, v.next_up()])).collect();
        let want: Vec<[f32; 3]> = x.iter().map(|&x| [oracle::exp::exp(x), oracle::exp::sigmoid(x), oracle::exp::silu(x)]).collect();
        for level in Level::available() {
            let mut got = vec![[0.0; 3]; x.len()];
            match level.0 {
                // SAFETY: a Level is only made after the features of its instruction set were detected.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { functions_avx512(&x, &mut got) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { functions_avx2(&x, &mut got) },
                _ => functions(&x, &mut got),
            }
            for ((x, got), want) in x.iter().zip(&got).zip(&want) {
                let same = got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan());
                assert!(same, "{level:?} of {x:e}: {got:?} is not {want:?}");
            }
        }
    }
}
