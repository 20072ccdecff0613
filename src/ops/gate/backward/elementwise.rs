//! What the backward does to each element, compiled for each instruction set.

use super::super::Rounding;
use super::super::elementwise::{Bf16, F16, F32, Format, at_each_level, with_format};
use super::super::view::Rows;
use crate::cpu::Level;
use crate::cpu::copy::prefetch;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;
use crate::tensor::DType;

at_each_level! {
    /// Gradients of gates become those of their logits, in place. `s` has an activation for each, or none at all when it was the logit itself.
    dlogits = dlogits_loops(dtype: DType, rounding: Rounding, scale: f32, s: &[f32], values: &mut [f32])
}

at_each_level! {
    /// `out = factor * w`, rounded once to `dtype`.
    product_row = product_row_loops(dtype: DType, w_dtype: DType, factor: f32, w: &[u8], out: &mut [u8])
}

at_each_level! {
    /// `sums[i]` = the sum over the rows of `x` of `dlogit` times column `first + i`, in the order of `oracle::gate_backward`. At most [`BLOCK`] columns.
    column_sums = column_sums_loops(dlogit: &Rows<&[u8]>, x: &Rows<&[u8]>, first: usize, sums: &mut [f32])
}

#[inline(always)]
fn dlogits_loops(dtype: DType, rounding: Rounding, scale: f32, s: &[f32], values: &mut [f32]) {
    #[inline(always)]
    fn each(scale: f32, s: &[f32], values: &mut [f32], round: impl Fn(f32) -> f32) {
        values.iter_mut().for_each(|v| *v = round(*v * scale));
        values.iter_mut().zip(s).for_each(|(v, s)| *v = round(round(*v * round(1.0 - s)) * s));
    }
    #[inline(always)]
    fn framework<F: Format>(scale: f32, s: &[f32], values: &mut [f32]) {
        each(scale, s, values, F::round);
    }
    match rounding {
        Rounding::Fused => each(scale, s, values, |v| v),
        Rounding::Framework => with_format!(dtype => framework<>(scale, s, values)),
    }
}

#[inline(always)]
fn product_row_loops(dtype: DType, w_dtype: DType, factor: f32, w: &[u8], out: &mut [u8]) {
    #[inline(always)]
    fn row<W: Format, X: Format>(factor: f32, w: &[u8], out: &mut [u8]) {
        out.chunks_exact_mut(X::SIZE).zip(w.chunks_exact(W::SIZE)).for_each(|(out, w)| X::write(factor * W::read(w), out));
    }
    #[inline(always)]
    fn with_w<W: Format>(dtype: DType, factor: f32, w: &[u8], out: &mut [u8]) {
        with_format!(dtype => row<W>(factor, w, out));
    }
    with_format!(w_dtype => with_w<>(dtype, factor, w, out));
}

/// Partial sums of a column (spec: the order of the sum).
const NUM_R: usize = 256;
/// Bits of [`NUM_R`], and one: sums of 1, 2, 4, .., 256 partial sums.
const NUM_LEVELS: usize = 9;
/// Neighbouring rows that are walked together, so that there is time to prefetch (measured with 512 columns, Zen 4, T = 16384, K = 2048, bf16, one
/// thread, GB/s read: 8.6 with 4 rows, 9.8 with 8, 7.0 with 16).
const GROUP: usize = 8;
/// Columns that are summed together: 1 KiB of a row of 16-bit numbers, and 16 KiB of sums, half of a first-level cache (measured as above: 6.9 with
/// 256 columns, 9.8 with 512, 8.5 with 1024; 6.2 with 256 and no prefetch).
pub(super) const BLOCK: usize = 512;

/// Absent terms are left out and not added as +0: this changes a sum only from one zero to the other, and the last step, + 0, makes every zero +0.
#[inline(always)]
fn column_sums_loops(dlogit: &Rows<&[u8]>, x: &Rows<&[u8]>, first: usize, sums: &mut [f32]) {
    #[inline(always)]
    fn of<F: Format>(dlogit: &Rows<&[u8]>, x: &Rows<&[u8]>, first: usize, sums: &mut [f32]) {
        let (num_tokens, width) = (x.num_rows, sums.len());
        let num_r = num_tokens.min(NUM_R);
        // `pending[n]`: the sums of the last 2^n partial sums that are not part of a larger sum yet.
        let mut pending = [[0f32; BLOCK]; NUM_LEVELS];
        let mut group = [[0f32; BLOCK]; GROUP];
        for first_r in (0..num_r).step_by(GROUP) {
            group.as_flattened_mut().fill(0.0);
            for first_token in (first_r..num_tokens).step_by(NUM_R) {
                for (sum, t) in group.iter_mut().zip(first_token..num_tokens) {
                    let piece = |t: usize| &x.row(t)[first * F::SIZE..][..width * F::SIZE];
                    // A group later: the next step of j, or the next r.
                    let next = if t + NUM_R < num_tokens { t + NUM_R } else { t % NUM_R + GROUP };
                    prefetch(piece(next.min(num_tokens - 1)));
                    let (d, row) = (F32::read(dlogit.row(t)), piece(t));
                    sum[..width].iter_mut().zip(row.chunks_exact(F::SIZE)).for_each(|(sum, x)| *sum = d.mul_add(F::read(x), *sum));
                }
            }
            for (node, r) in group.iter_mut().zip(first_r..num_r) {
                let mut level = 0;
                while r >> level & 1 == 1 {
                    add_into(&pending[level], node);
                    level += 1;
                }
                pending[level] = *node;
            }
        }
        // From the lowest level up: a missing right-hand side is absent, so the left-hand side stands for the sum.
        let mut sum = [0f32; BLOCK];
        let mut any = false;
        for (level, left) in pending.iter().enumerate().filter(|(level, _)| num_r >> level & 1 == 1) {
            if any {
                add_into(left, &mut sum);
            } else {
                (sum, any) = (pending[level], true);
            }
        }
        sums.iter_mut().zip(sum).for_each(|(out, sum)| *out = sum + 0.0);
    }
    with_format!(x.dtype => of<>(dlogit, x, first, sums));
}

/// `node = left + node`.
#[inline(always)]
fn add_into(left: &[f32; BLOCK], node: &mut [f32; BLOCK]) {
    node.iter_mut().zip(left).for_each(|(node, left)| *node += left);
}
