//! Backward of the shared-expert gate: the formula, the order of the sum over tokens, and each rounding.
//!
//! # The gradient of a logit
//!
//! `s` is the forward's activation of token t, made again in the forward's order with the forward's options. With
//! [`Activation::Sigmoid`]
//!
//! `dlogit = ((dg * scale) * (1 - s)) * s`
//!
//! and with [`Activation::Linear`] `dlogit = dg * scale`; the logit does not matter there. Each operation is one of f32. `Fused` rounds nothing further.
//! `Framework` rounds `s`, `dg * scale`, `1 - s` and both products to the type of x: what autograd does with sigmoid and product as operations of
//! their own in that type. The gradient of an addend is `dlogit` itself.
//!
//! # The gradient of x
//!
//! `dx[t][k] = dlogit[t] * w[k]`: a product of f32, rounded once to the type of dx.
//!
//! # The gradients of w and of the bias: the sum over tokens
//!
//! Token `t` has two numbers: `r = t % 256` and `j = t / 256`. For each column k
//!
//! 1. `a[r]` starts at +0; for ascending j it becomes `fma(dlogit[t], x[t][k], a[r])`.
//! 2. Neighbours are added in pairs over r, which halves their number, eight times (bits 0 to 7 of r).
//! 3. That number + 0 (so a negative zero never leaves), rounded once to the type of dw.
//!
//! Absent terms are +0. `dbias` is the same sum with 1 in the place of x.
//!
//! Why 256: a step of j is 256 neighbouring rows, whole and contiguous, and the 256 partial sums of a column are independent of each other. So a
//! device keeps every column of two of them in the registers of each of 128 blocks, with the columns of a thread those of the forward's dot product,
//! and reads x once for the dot product and for this sum; or gives a piece of some columns to a cluster of 8 or 16 blocks. The chain of
//! T / 256 steps is also what bounds the error: at most `T / 256 + 10` roundings of 2^-24 for each term.
//!
//! # The product
//!
//! Of `g * s`, given the gradient dout of the result: `dg[t]` = the dot product of `dout[t]` and `s[t]` in the forward's order, with both roundings in f32;
//! `ds[t][n] = g[t] * dout[t][n]`, with g as the forward made it, rounded once to the type of s.
#![forbid(unsafe_code)]

use crate::ops::gate::{Activation, Rounding};
use crate::oracle::float;
use crate::oracle::gate::{self, Gates};
use crate::tensor::DType;

/// Partial sums of a column.
const NUM_R: usize = 256;

/// `dlogit [T]` from `dg [T]`.
pub fn dlogit(gates: &Gates<'_>, dg: &[f32]) -> Vec<f32> {
    let round = |value: f32| match gates.rounding {
        Rounding::Fused => value,
        Rounding::Framework => float::round(gates.x_dtype, value),
    };
    let dactivation: Vec<f32> = dg.iter().map(|dg| round(dg * gates.scale)).collect();
    if gates.activation == Activation::Linear {
        return dactivation;
    }
    // The activation is the gate whose scale is 1, before any rounding to a result's type.
    let unscaled = Gates { scale: 1.0, ..gates.clone() };
    let s = float::values(DType::F32, &gate::gate(&unscaled, DType::F32));
    let mut all = Vec::new();
    for (d, s) in dactivation.into_iter().zip(s) {
        let rest = round(1.0 - s);
        all.push(round(round(d * rest) * s));
    }
    all
}

/// `dx [T, K]` as bytes of `dtype`.
pub fn dx(dlogit: &[f32], w: &[f32], dtype: DType) -> Vec<u8> {
    let mut out = Vec::new();
    for d in dlogit {
        for w in w {
            float::push(dtype, d * w, &mut out);
        }
    }
    out
}

/// `dw [K]` as bytes of `dtype`; `x` is `[T, K]`, row-major.
pub fn dw(dlogit: &[f32], x: &[f32], k: usize, dtype: DType) -> Vec<u8> {
    let mut out = Vec::new();
    for column in 0..k {
        let x_column: Vec<f32> = (0..dlogit.len()).map(|t| x[t * k + column]).collect();
        float::push(dtype, sum_over_tokens(dlogit, &x_column), &mut out);
    }
    out
}

/// `dbias [1]` as bytes of `dtype`.
pub fn dbias(dlogit: &[f32], dtype: DType) -> Vec<u8> {
    let mut out = Vec::new();
    float::push(dtype, sum_over_tokens(dlogit, &vec![1.0; dlogit.len()]), &mut out);
    out
}

/// `dg [T]` of a product, from rows of `dout` and `s` of `n` numbers.
pub fn dg(dout: &[f32], s: &[f32], num_tokens: usize, n: usize) -> Vec<f32> {
    (0..num_tokens).map(|t| gate::dot(&dout[t * n..(t + 1) * n], &s[t * n..(t + 1) * n])).collect()
}

/// `ds [T, N]` of a product as bytes of `dtype`.
pub fn ds(gates: &Gates<'_>, dout: &[f32], dtype: DType) -> Vec<u8> {
    gate::gate_mul(gates, dout, dtype)
}

/// `sum over t of dlogit[t] * x[t]` in the order that this module states.
///
/// ```
/// use moe_kernels::oracle::gate_backward::sum_over_tokens;
/// assert_eq!(sum_over_tokens(&[1.0, 2.0, 3.0], &[0.5, 0.25, -0.5]), -0.5);
/// assert_eq!(sum_over_tokens(&[], &[]).to_bits(), 0);
/// ```
///
/// # Panics
/// If the lengths differ.
pub fn sum_over_tokens(dlogit: &[f32], x: &[f32]) -> f32 {
    assert_eq!(dlogit.len(), x.len(), "sum_over_tokens: lengths");
    let mut a = vec![0.0f32; NUM_R];
    // Ascending t visits each partial sum's terms in ascending j.
    for t in 0..x.len() {
        a[t % NUM_R] = f32::mul_add(dlogit[t], x[t], a[t % NUM_R]);
    }
    while a.len() > 1 {
        a = a.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    a[0] + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2^24: the smallest number to which 1 cannot be added in f32, so a sum of it, its negative and 1 shows its order.
    const BIG: f32 = 16777216.0;

    /// The sum of `num_tokens` zeros but for some terms.
    fn sparse(num_tokens: usize, terms: &[(usize, f32)]) -> f32 {
        let mut x = vec![0.0; num_tokens];
        for &(t, value) in terms {
            x[t] = value;
        }
        sum_over_tokens(&vec![1.0; num_tokens], &x)
    }

    #[test]
    fn j_comes_first_by_fma() {
        // 0 and 256 share a partial sum; 1 is its neighbour.
        assert_eq!(sparse(300, &[(0, BIG), (256, 1.0), (1, -BIG)]), 0.0);
        assert_eq!(sparse(300, &[(0, BIG), (256, -BIG), (1, 1.0)]), 1.0);
        // j ascends: the 1 is lost if it comes between, and not if it comes last.
        assert_eq!(sparse(600, &[(0, BIG), (256, 1.0), (512, -BIG)]), 0.0);
        assert_eq!(sparse(600, &[(0, BIG), (256, -BIG), (512, 1.0)]), 1.0);
        // One rounding: (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term a rounded product would lose.
        let (mut d, mut x) = (vec![0.0; 300], vec![0.0; 300]);
        let a = 1.0 + 1.0 / 4096.0;
        (d[0], x[0]) = (-(1.0 + 1.0 / 2048.0), 1.0);
        (d[256], x[256]) = (a, a);
        assert_eq!(sum_over_tokens(&d, &x), 2f32.powi(-24));
    }

    #[test]
    fn bits_of_r_ascend() {
        for low in 0..8 {
            for high in low + 1..8 {
                assert_eq!(sparse(256, &[(0, BIG), (1 << low, -BIG), (1 << high, 1.0)]), 1.0, "{low} {high}");
                assert_eq!(sparse(256, &[(0, BIG), (1 << low, 1.0), (1 << high, -BIG)]), 0.0, "{low} {high}");
            }
        }
    }

    #[test]
    fn a_negative_zero_never_leaves() {
        for t in [0, 1, 8, 600] {
            assert_eq!(sum_over_tokens(&vec![-0.0; t], &vec![1.0; t]).to_bits(), 0);
        }
        // The exact products are below the smallest subnormal and negative: the fma gives -0, in every partial sum when there are 256 tokens.
        for t in [1, 255, 256, 600] {
            assert_eq!(sum_over_tokens(&vec![-1e-30; t], &vec![1e-30; t]).to_bits(), 0);
        }
        assert_eq!(dw(&[-0.0], &[1.0, 2.0], 2, DType::BF16), [0; 4]);
    }

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = crate::random::SplitMix64::new(seed);
        (0..len).map(|_| random.next_f32()).collect()
    }

    #[test]
    fn a_sum_is_near_the_exact_one() {
        for t in [3, 255, 256, 257, 5000, 70_001] {
            let (d, x) = (random(t, 1), random(t, 2));
            let exact: f64 = d.iter().zip(&x).map(|(d, x)| *d as f64 * *x as f64).sum();
            let magnitude: f64 = d.iter().zip(&x).map(|(d, x)| (*d as f64 * *x as f64).abs()).sum();
            // Each term passes through at most T / 256 + 1 fma and 8 + 1 additions, each of relative error 2^-24.
            let bound = (t as f64 / 256.0 + 10.0) * 2f64.powi(-24) * magnitude;
            assert!((sum_over_tokens(&d, &x) as f64 - exact).abs() <= bound, "T = {t}");
        }
    }

    const T: usize = 7;
    const K: usize = 19;
    const SCALE: f32 = 0.75;
    const BIAS: f32 = 0.3;

    fn gates<'a>(x: &'a [f32], w: &'a [f32], addend: &'a [f32], activation: Activation) -> Gates<'a> {
        let (bias, addend) = (Some(BIAS), Some(addend));
        Gates { x, w, num_tokens: T, x_dtype: DType::F32, bias, addend, activation, scale: SCALE, rounding: Rounding::Fused }
    }

    /// `sum over t of dg[t] * g[t]` in f64, whose derivatives the gradients are.
    fn loss(x: &[f64], w: &[f64], bias: f64, addend: &[f32], dg: &[f32], activation: Activation) -> f64 {
        let mut loss = 0.0;
        for t in 0..T {
            let dot: f64 = x[t * K..(t + 1) * K].iter().zip(w).map(|(x, w)| x * w).sum();
            let logit = dot + bias + addend[t] as f64;
            let activation = if activation == Activation::Sigmoid { 1.0 / (1.0 + (-logit).exp()) } else { logit };
            loss += dg[t] as f64 * activation * SCALE as f64;
        }
        loss
    }

    #[test]
    fn gradients_are_the_slopes_of_the_forward() {
        let (x, w, addend, dg) = (random(T * K, 3), random(K, 4), random(T, 5), random(T, 6));
        let wide = |v: &[f32]| v.iter().map(|v| *v as f64).collect::<Vec<_>>();
        let (x64, w64) = (wide(&x), wide(&w));
        for activation in [Activation::Sigmoid, Activation::Linear] {
            let dlogit = dlogit(&gates(&x, &w, &addend, activation), &dg);
            let values = |bytes: Vec<u8>| float::values(DType::F32, &bytes);
            let (dx, dw) = (values(dx(&dlogit, &w, DType::F32)), values(dw(&dlogit, &x, K, DType::F32)));
            let dbias = values(dbias(&dlogit, DType::F32))[0];
            // A central difference is off by h^2 / 6 of the third derivative (below 0.13 * |dg| * |x|^3 for a sigmoid) and by 2^-52 / h of the loss:
            // both below 1e-9 here. The gradient has T * 2^-24 of its terms, each below 1, and the logit's own error: below 1e-5 together.
            const H: f64 = 1e-4;
            let near = |what: &str, got: f32, above: f64, below: f64| {
                let slope = (above - below) / (2.0 * H);
                assert!((got as f64 - slope).abs() < 1e-5, "{activation:?} {what}: {got} is not {slope}");
            };
            let moved =
                |v: &[f64], i: usize, by: f64| v.iter().enumerate().map(|(j, v)| if i == j { v + by } else { *v }).collect::<Vec<_>>();
            let at = |x: &[f64], w: &[f64], bias: f64| loss(x, w, bias, &addend, &dg, activation);
            for (i, &dx) in dx.iter().enumerate() {
                near("dx", dx, at(&moved(&x64, i, H), &w64, BIAS as f64), at(&moved(&x64, i, -H), &w64, BIAS as f64));
            }
            for (i, &dw) in dw.iter().enumerate() {
                near("dw", dw, at(&x64, &moved(&w64, i, H), BIAS as f64), at(&x64, &moved(&w64, i, -H), BIAS as f64));
            }
            near("dbias", dbias, at(&x64, &w64, BIAS as f64 + H), at(&x64, &w64, BIAS as f64 - H));
        }
    }

    #[test]
    fn a_gradient_is_near_the_one_of_f64() {
        // One column: the logit is exact, and only the steps from it to dlogit count.
        let dg = random(2000, 7);
        let x: Vec<f32> = random(2000, 8).iter().map(|x| x * 12.0).collect();
        let gates = Gates {
            x: &x,
            w: &[1.0],
            num_tokens: x.len(),
            x_dtype: DType::F32,
            bias: None,
            addend: None,
            activation: Activation::Sigmoid,
            scale: SCALE,
            rounding: Rounding::Fused,
        };
        for ((x, dg), got) in x.iter().zip(&dg).zip(dlogit(&gates, &dg)) {
            let s = 1.0 / (1.0 + (-*x as f64).exp());
            let factor = *dg as f64 * SCALE as f64;
            // s is off by 4 * 2^-24 of itself: 1 ulp of the exponential, the sum and the quotient. That goes into 1 - s as it is and into the last
            // factor; the difference and the three products add 2^-24 of the result each.
            let bound = (4.0 * s * s + 4.0 * (1.0 - s) * s + 4.0 * (1.0 - s) * s) * 2f64.powi(-24) * factor.abs();
            assert!((got as f64 - factor * (1.0 - s) * s).abs() <= bound, "x {x}: {got}");
        }
    }

    #[test]
    fn roundings_fall_where_they_are_said_to() {
        // bf16 has steps of 2^-8 below 1 and of 2^-9 below 1/2. The logit is 1: s = 0.73106 lies between bf16's 0.73047 and 0.734.
        let gates = |rounding| Gates {
            x: &[1.0],
            w: &[1.0],
            num_tokens: 1,
            x_dtype: DType::BF16,
            bias: None,
            addend: None,
            activation: Activation::Sigmoid,
            scale: 1.0 + 1.0 / 512.0,
            rounding,
        };
        let dg = [1.0 + 1.0 / 128.0];
        let s = crate::oracle::exp::sigmoid(1.0);
        let fused = ((dg[0] * (1.0 + 1.0 / 512.0)) * (1.0 - s)) * s;
        assert_eq!(dlogit(&gates(Rounding::Fused), &dg), [fused]);
        // By hand: dg * scale = 1 + 5.02/512 goes to 1 + 4/512; s to 187/256; 1 - s = 69/256, exact; 129/128 * 69/256 = 69.539/256 goes to
        // 69.5/256; times 187/256 = 50.767/256, to 203/1024.
        assert_eq!(dlogit(&gates(Rounding::Framework), &dg), [203.0 / 1024.0]);
        // A logit of -2.5, where each of the roundings after s decides: s is 155/2048; 1 - s goes to 237/256; 141/128 * 237/256 = 130.54/128 goes to
        // 131/128; times 155/2048 = 158.63/2048, to 159/2048. Without the first of them it is 157/2048, without the second 158/2048.
        let low = Gates { x: &[-2.5], scale: 1.0, ..gates(Rounding::Framework) };
        assert_eq!(dlogit(&low, &[141.0 / 128.0]), [159.0 / 2048.0]);
        // Without a sigmoid only the scale is left.
        let linear = |rounding| Gates { activation: Activation::Linear, ..gates(rounding) };
        assert_eq!(dlogit(&linear(Rounding::Fused), &dg), [dg[0] * (1.0 + 1.0 / 512.0)]);
        assert_eq!(dlogit(&linear(Rounding::Framework), &dg), [1.0 + 4.0 / 512.0]);
        // dx and dw: one rounding to their types.
        assert_eq!(float::values(DType::BF16, &dx(&[1.0 + 3.0 / 512.0], &[1.0], DType::BF16)), [1.0 + 4.0 / 512.0]);
        assert_eq!(float::values(DType::BF16, &dw(&[1.0, 3.0 / 512.0], &[1.0, 1.0], 1, DType::BF16)), [1.0 + 4.0 / 512.0]);
        assert_eq!(float::values(DType::F32, &dw(&[1.0, 3.0 / 512.0], &[1.0, 1.0], 1, DType::F32)), [1.0 + 3.0 / 512.0]);
        assert_eq!(float::values(DType::BF16, &dbias(&[1.0, 3.0 / 512.0], DType::BF16)), [1.0 + 4.0 / 512.0]);
    }

    #[test]
    fn a_product_gives_a_dot_and_a_product() {
        let gates = Gates {
            x: &[0.0, 0.0],
            w: &[1.0],
            num_tokens: 2,
            x_dtype: DType::F32,
            bias: None,
            addend: None,
            activation: Activation::Sigmoid,
            scale: 1.0,
            rounding: Rounding::Fused,
        };
        let (dout, s) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
        assert_eq!(dg(&dout, &s, 2, 2), [17.0, 53.0]);
        assert_eq!(float::values(DType::F32, &ds(&gates, &dout, DType::F32)), [0.5, 1.0, 1.5, 2.0]);
    }
}
