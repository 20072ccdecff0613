//! The one matrix product of the CPU backend: f32, by the `gemm` crate, with one order of every sum.
//!
//! `gemm` splits a long sum by cache sizes, and takes other kernels for one row, one column or a tiny result. Here the sum is split before it gets
//! there, at the same places for any number of rows, and no call has one row or column: then each element is, in every kernel of `gemm` that has
//! fused multiply-add (AVX-512, AVX2 with FMA, NEON),
//!
//! `out = s_0; out = out + s_1; ..`, where `s_b` is the f32 fma chain from +0 over the ascending elements of block b of [`blocks`].
//!
//! So a row's bits do not depend on the rows beside it, on its position, on threads, or on the machine. On an x86-64 machine without FMA, products are
//! rounded before they are added, and the bits are others.

use std::ops::Range;

use gemm::Parallelism;

/// Longest part of a sum that `gemm` does not split (spec: in 0.19 the depth of a pass is at least `min(k, 512)` whatever the caches).
pub const MAX_BLOCK: usize = 512;

/// The number of rows is a multiple of this (derived: the lanes of the widest vector, so that no kernel has a tail and rows need no packing).
pub const ROW_ALIGN: usize = 16;

/// The parts of a sum of `len` terms: `ceil(len / 512)` blocks, the first `len % num` of them one longer than the others.
pub fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    parts(len, len.div_ceil(MAX_BLOCK))
}

/// `0..len` in `num` parts whose lengths differ by one at most, longer ones first.
pub fn parts(len: usize, num: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let (least, longer) = (len / num.max(1), len % num.max(1));
    (0..num).map(move |i| {
        let start = i * least + i.min(longer);
        start..start + least + usize::from(i < longer)
    })
}

/// `out[n, m] = w[n, k] * x[k, m]`, or `out += ..` unless `is_first`: one block of the sum, all row-major and contiguous.
///
/// # Panics
/// If a slice has another size, `m` is no positive multiple of [`ROW_ALIGN`], `n` is 1, or `k` is not in `3..=512`.
pub fn product(w: &[f32], x: &[f32], out: &mut [f32], k: usize, m: usize, is_first: bool) {
    let n = w.len() / k;
    assert!((3..=MAX_BLOCK).contains(&k) && m > 0 && m.is_multiple_of(ROW_ALIGN) && n > 1, "product: m {m}, n {n}, k {k}");
    assert!(w.len() == n * k && x.len() == k * m && out.len() == n * m, "product: sizes {}, {}, {}", w.len(), x.len(), out.len());
    // The slices' lengths fit isize, so do these factors of them.
    let (m_stride, k_stride) = (m as isize, k as isize);
    // SAFETY: `gemm` reads x as [m, k] with strides (1, m) and w as [k, n] with strides (1, k), and reads and writes out as [m, n] with strides (1, m):
    // the largest offset of each is its length - 1, asserted above; `out` is borrowed alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            m_stride,
            1,
            !is_first,
            x.as_ptr(),
            m_stride,
            1,
            w.as_ptr(),
            k_stride,
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// `true` when `gemm` uses fused multiply-add here, so that the order of the module's docs holds to the bit.
pub fn is_fused() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("fma");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("neon");
    #[allow(unreachable_code)]
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = SplitMix64::new(seed);
        (0..len).map(|_| random.next_f32()).collect()
    }

    /// All blocks of `w [n, k] x [k, m]`, the weights packed block by block as the experts do.
    fn whole(w: &[f32], x: &[f32], n: usize, k: usize, m: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; n * m];
        for cols in blocks(k) {
            let block: Vec<f32> = w.chunks_exact(k).flat_map(|row| &row[cols.clone()]).copied().collect();
            product(&block, &x[cols.start * m..cols.end * m], &mut out, cols.len(), m, cols.start == 0);
        }
        out
    }

    #[test]
    fn the_order_of_the_sum_is_the_stated_one() {
        if !is_fused() {
            return; // the module's docs claim nothing there
        }
        // Around the thresholds of the crate: 16 * 16 results, 64 rows and columns, 512 deep, its vectors of 48 and 64 rows.
        for (n, k, m) in [(2, 8, 16), (7, 64, 16), (16, 512, 16), (64, 513, 64), (65, 1408, 80), (96, 1024, 144), (97, 1040, 512)] {
            let (w, x) = (random(n * k, 1), random(k * m, 2));
            let got = whole(&w, &x, n, k, m);
            for (i, got) in got.iter().enumerate() {
                let (row, col) = (i / m, i % m);
                let mut want = None;
                for block in blocks(k) {
                    let sum = block.fold(0f32, |sum, j| w[row * k + j].mul_add(x[j * m + col], sum));
                    want = Some(want.map_or(sum, |earlier: f32| earlier + sum));
                }
                assert_eq!(got.to_bits(), want.unwrap().to_bits(), "n {n}, k {k}, m {m}: element [{row}, {col}]");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_others() {
        let (n, k) = (40, 700);
        let w = random(n * k, 3);
        let all = random(k * 512, 4);
        let want = whole(&w, &all, n, k, 512);
        for m in [16, 32, 48, 64, 80, 208, 496] {
            for first in [0, 3, 512 - m] {
                let x: Vec<f32> = all.chunks_exact(512).flat_map(|row| &row[first..first + m]).copied().collect();
                let got = whole(&w, &x, n, k, m);
                for (got, want) in got.chunks_exact(m).zip(want.chunks_exact(512)) {
                    assert!(got.iter().zip(&want[first..]).all(|(a, b)| a.to_bits() == b.to_bits()), "m {m} from {first}");
                }
            }
        }
    }

    #[test]
    fn blocks_cover_the_sum() {
        for len in [1, 511, 512, 513, 1024, 1025, 7168] {
            let ends: Vec<_> = blocks(len).map(|b| (b.start, b.end)).collect();
            assert_eq!((ends[0].0, ends.last().unwrap().1), (0, len));
            assert!(ends.windows(2).all(|w| w[0].1 == w[1].0) && ends.iter().all(|(a, b)| (1..=MAX_BLOCK).contains(&(b - a))));
        }
    }
}
