//! The shared-expert gate: the order of the sum, and each rounding.
//!
//! # The dot product
//!
//! Element `i` of K has four numbers: `e = i % 8`, `l = (i / 8) % 32`, `w = (i / 256) % 32`, `j = i / 8192`.
//!
//! 1. `a[w][l][e]` starts at +0; for ascending j it becomes `fma(x[i], w[i], a[w][l][e])`.
//! 2. Neighbours are added in pairs over e, which halves their number, three times (bits 0, 1, 2 of e): `b[w][l]`.
//! 3. The same over w, five times (bits 0 to 4): `c[l]`.
//! 4. The same over l, five times: one number.
//! 5. That number + 0 (so a negative zero never leaves).
//!
//! Absent terms are +0. Every addition and fma is f32, to nearest even.
//!
//! # From the dot product to the result
//!
//! `Fused`: `linear = dot + bias`, `logit = linear + addend`, `g = activation(logit) * scale`, `p = g * s`, each an f32 operation of its own; the
//! result `g`, `p` or `out + p` (f32) is rounded once to its type. What is absent is not added.
//!
//! `Framework`: `linear`, `logit` and `activation(logit)` are each rounded to the type of x; `g = activation * scale` is rounded to the type of
//! the result where g is the result, else to the type of x; `p` is rounded to the type of s; `out + p` is rounded once to the type of out.
#![forbid(unsafe_code)]

use crate::ops::gate::{Activation, Rounding};
use crate::oracle::{exp, float};
use crate::tensor::DType;

/// Sizes of the accumulators: `[w][l][e]`.
const NUM_E: usize = 8;
const NUM_L: usize = 32;
const NUM_W: usize = 32;

/// `x . w` in the order that this module states.
///
/// ```
/// use moe_kernels::oracle::gate::dot;
/// assert_eq!(dot(&[1.0, 2.0, 3.0], &[0.5, 0.25, -0.5]), -0.5);
/// assert_eq!(dot(&[], &[]).to_bits(), 0);
/// ```
///
/// # Panics
/// If the lengths differ.
pub fn dot(x: &[f32], w: &[f32]) -> f32 {
    assert_eq!(x.len(), w.len(), "dot: lengths");
    let mut a = vec![0.0f32; NUM_W * NUM_L * NUM_E];
    // Ascending i visits each accumulator's terms in ascending j.
    for i in 0..x.len() {
        let (e, l, w_idx) = (i % 8, (i / 8) % 32, (i / 256) % 32);
        let at = (w_idx * NUM_L + l) * NUM_E + e;
        a[at] = f32::mul_add(x[i], w[i], a[at]);
    }
    // b[w * 32 + l]: e is the fastest index, so its bits 0, 1, 2 are three halvings of neighbours.
    let b = halve(halve(halve(a)));
    // l is the fastest index now; w is made the fastest.
    let mut w_fastest = vec![0.0f32; NUM_W * NUM_L];
    for w_idx in 0..NUM_W {
        for l in 0..NUM_L {
            w_fastest[l * NUM_W + w_idx] = b[w_idx * NUM_L + l];
        }
    }
    let c = halve(halve(halve(halve(halve(w_fastest)))));
    let sum = halve(halve(halve(halve(halve(c)))));
    sum[0] + 0.0
}

/// Sums of neighbours.
fn halve(terms: Vec<f32>) -> Vec<f32> {
    terms.chunks(2).map(|pair| pair[0] + pair[1]).collect()
}

/// The arguments that decide the gates; all numbers are values, exact in their types.
#[derive(Debug, Clone)]
pub struct Gates<'a> {
    /// `[T, K]`, row-major.
    pub x: &'a [f32],
    /// `[K]`.
    pub w: &'a [f32],
    /// T.
    pub num_tokens: usize,
    /// Type of `x`, which `Framework` rounds to.
    pub x_dtype: DType,
    /// Added to every dot product.
    pub bias: Option<f32>,
    /// `[T]`, added to each logit.
    pub addend: Option<&'a [f32]>,
    /// Applied to the logit.
    pub activation: Activation,
    /// Multiplies the gate.
    pub scale: f32,
    /// Where the roundings are.
    pub rounding: Rounding,
}

impl Gates<'_> {
    /// `g [T]`, not rounded to a result's type by `Fused`, rounded to `g_dtype` by `Framework`.
    fn values(&self, g_dtype: DType) -> Vec<f32> {
        let k = self.w.len();
        let step = |dtype: DType, value: f32| match self.rounding {
            Rounding::Fused => value,
            Rounding::Framework => float::round(dtype, value),
        };
        let mut all = Vec::new();
        for t in 0..self.num_tokens {
            let mut v = dot(&self.x[t * k..(t + 1) * k], self.w);
            if let Some(bias) = self.bias {
                v += bias;
            }
            v = step(self.x_dtype, v);
            if let Some(addend) = self.addend {
                v = step(self.x_dtype, v + addend[t]);
            }
            if self.activation == Activation::Sigmoid {
                v = step(self.x_dtype, exp::sigmoid(v));
            }
            all.push(step(g_dtype, v * self.scale));
        }
        all
    }
}

/// `g [T]` as bytes of `out_dtype`.
pub fn gate(gates: &Gates<'_>, out_dtype: DType) -> Vec<u8> {
    let mut out = Vec::new();
    for g in gates.values(out_dtype) {
        float::push(out_dtype, g, &mut out);
    }
    out
}

/// `g * s [T, N]` as bytes of `s_dtype`.
pub fn gate_mul(gates: &Gates<'_>, s: &[f32], s_dtype: DType) -> Vec<u8> {
    let mut out = Vec::new();
    for (t, g) in gates.values(gates.x_dtype).into_iter().enumerate() {
        for s in row(s, gates.num_tokens, t) {
            float::push(s_dtype, g * s, &mut out);
        }
    }
    out
}

/// `out + g * s [T, N]` as bytes of `s_dtype`; `before` is what `out` held.
pub fn gate_mul_add(gates: &Gates<'_>, s: &[f32], s_dtype: DType, before: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    for (t, g) in gates.values(gates.x_dtype).into_iter().enumerate() {
        for (s, before) in row(s, gates.num_tokens, t).iter().zip(row(before, gates.num_tokens, t)) {
            let product = match gates.rounding {
                Rounding::Fused => g * s,
                Rounding::Framework => float::round(s_dtype, g * s),
            };
            float::push(s_dtype, before + product, &mut out);
        }
    }
    out
}

/// The last column of `topk_weights`, and of `topk_idx` (the same number for each token).
pub fn gate_append_topk(gates: &Gates<'_>, shared_expert: u32) -> (Vec<f32>, Vec<i64>) {
    (gates.values(DType::F32), vec![i64::from(shared_expert); gates.num_tokens])
}

/// `s * sigmoid(g)` as bytes of `s_dtype`. `s` is `[T, N]`; `g` is `[T, 1]` or `[T, N]`.
pub fn sigmoid_mul(s: &[f32], s_dtype: DType, g: &[f32], g_dtype: DType, num_tokens: usize, rounding: Rounding) -> Vec<u8> {
    let mut out = Vec::new();
    for t in 0..num_tokens {
        let g = row(g, num_tokens, t);
        for (n, s) in row(s, num_tokens, t).iter().enumerate() {
            let sigmoid = exp::sigmoid(if g.len() == 1 { g[0] } else { g[n] });
            let sigmoid = match rounding {
                Rounding::Fused => sigmoid,
                Rounding::Framework => float::round(g_dtype, sigmoid),
            };
            float::push(s_dtype, s * sigmoid, &mut out);
        }
    }
    out
}

/// Row `t` of a row-major matrix of `num_rows` rows.
fn row(matrix: &[f32], num_rows: usize, t: usize) -> &[f32] {
    let n = matrix.len() / num_rows;
    &matrix[t * n..(t + 1) * n]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2^24: the smallest number to which 1 cannot be added in f32, so a sum of it, its negative and 1 shows its order.
    const BIG: f32 = 16777216.0;

    #[test]
    fn three_elements_pair_over_e() {
        // (1 + BIG) + (-BIG + 0): the 1 is lost.
        assert_eq!(dot(&[1.0, BIG, -BIG], &[1.0; 3]), 0.0);
        // (BIG - BIG) + (1 + 0).
        assert_eq!(dot(&[BIG, -BIG, 1.0], &[1.0; 3]), 1.0);
        // (BIG + 1) + (-BIG + 1) = BIG + (1 - BIG).
        assert_eq!(dot(&[BIG, 1.0, -BIG, 1.0], &[1.0; 4]), 1.0);
        // Bit 1 before bit 2: ((BIG + 0) + (-BIG + 0)) + 1, and ((BIG + 0) + (1 + 0)) - BIG.
        assert_eq!(dot(&[BIG, 0.0, -BIG, 0.0, 1.0], &[1.0; 5]), 1.0);
        assert_eq!(dot(&[BIG, 0.0, 1.0, 0.0, -BIG], &[1.0; 5]), 0.0);
    }

    /// A row of zeros of length `k` but for some elements.
    fn sparse(k: usize, elements: &[(usize, f32)]) -> f32 {
        let mut x = vec![0.0; k];
        for &(i, value) in elements {
            x[i] = value;
        }
        dot(&x, &vec![1.0; k])
    }

    #[test]
    fn w_comes_before_l() {
        // Elements 0 and 256 share l = 0 and differ in w; 8 has l = 1. (0 with 256) first, then l.
        assert_eq!(sparse(300, &[(0, BIG), (256, -BIG), (8, 1.0)]), 1.0);
        // (0 with 256) loses the 1, then l = 1 takes BIG away. With l before w: (BIG - BIG) + 1 = 1.
        assert_eq!(sparse(300, &[(0, BIG), (256, 1.0), (8, -BIG)]), 0.0);
        // e before w: 0 and 7 share (w, l).
        assert_eq!(sparse(300, &[(0, BIG), (7, -BIG), (256, 1.0)]), 1.0);
        assert_eq!(sparse(300, &[(0, BIG), (7, 1.0), (256, -BIG)]), 0.0);
    }

    #[test]
    fn bits_of_each_index_ascend() {
        // For each index: the partner over a lower bit is added before the one over a higher bit.
        for (unit, num_bits) in [(1usize, 3), (256, 5), (8, 5)] {
            for low in 0..num_bits {
                for high in low + 1..num_bits {
                    let (low, high) = (unit << low, unit << high);
                    assert_eq!(sparse(8192, &[(0, BIG), (low, -BIG), (high, 1.0)]), 1.0, "{low} {high}");
                    assert_eq!(sparse(8192, &[(0, BIG), (low, 1.0), (high, -BIG)]), 0.0, "{low} {high}");
                }
            }
        }
    }

    #[test]
    fn j_comes_first_by_fma() {
        // 0 and 8192 share an accumulator; 1 is its neighbour over e.
        assert_eq!(sparse(9000, &[(0, BIG), (8192, 1.0), (1, -BIG)]), 0.0);
        assert_eq!(sparse(9000, &[(0, BIG), (8192, -BIG), (1, 1.0)]), 1.0);
        // One rounding: (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term a rounded product would lose.
        let (mut x, mut w) = (vec![0.0; 9000], vec![0.0; 9000]);
        let a = 1.0 + 1.0 / 4096.0;
        (x[0], w[0]) = (-(1.0 + 1.0 / 2048.0), 1.0);
        (x[8192], w[8192]) = (a, a);
        assert_eq!(dot(&x, &w), 2f32.powi(-24));
    }

    #[test]
    fn a_negative_zero_never_leaves() {
        for k in [0, 1, 8, 9000] {
            assert_eq!(dot(&vec![-0.0; k], &vec![1.0; k]).to_bits(), 0);
        }
        // The exact product is below the smallest subnormal and negative: the fma gives -0, and + 0 makes it +0.
        assert_eq!(dot(&[-1e-30], &[1e-30]).to_bits(), 0);
    }

    #[test]
    fn a_dot_is_near_the_exact_one() {
        let stream = crate::random::SplitMix64::new(1);
        for k in [3, 300, 2048, 9000, 70_001] {
            let value = |n: u64| crate::random::symmetric_f32(stream.at(n));
            let x: Vec<f32> = (0..k as u64).map(|i| value(2 * i)).collect();
            let w: Vec<f32> = (0..k as u64).map(|i| value(2 * i + 1)).collect();
            let exact: f64 = x.iter().zip(&w).map(|(x, w)| *x as f64 * *w as f64).sum();
            let magnitude: f64 = x.iter().zip(&w).map(|(x, w)| (*x as f64 * *w as f64).abs()).sum();
            // Each term passes through at most k / 8192 + 1 fma and 13 + 1 additions, each of relative error 2^-24.
            let bound = (k as f64 / 8192.0 + 15.0) * 2f64.powi(-24) * magnitude;
            assert!((dot(&x, &w) as f64 - exact).abs() <= bound, "k = {k}");
        }
    }

    #[test]
    fn roundings_fall_where_they_are_said_to() {
        // The dot is 1 + 3/512. bf16 has steps of 4/512 from 1 on, so it becomes 1 + 4/512.
        const UNIT: f32 = 1.0 / 512.0;
        let gates = |rounding| Gates {
            x: &[1.0, 3.0 * UNIT],
            w: &[1.0, 1.0],
            num_tokens: 1,
            x_dtype: DType::BF16,
            bias: None,
            addend: None,
            activation: Activation::Linear,
            scale: 1.0,
            rounding,
        };
        let (fused, framework) = (gates(Rounding::Fused), gates(Rounding::Framework));
        let f32_of = |bytes: Vec<u8>| f32::from_le_bytes(bytes.try_into().unwrap());
        let bf16_of = |bytes: Vec<u8>| float::values(DType::BF16, &bytes)[0];
        assert_eq!(f32_of(gate(&fused, DType::F32)), 1.0 + 3.0 * UNIT);
        assert_eq!(f32_of(gate(&framework, DType::F32)), 1.0 + 4.0 * UNIT);
        // In f32 the product is not rounded further.
        assert_eq!(f32_of(gate_mul(&fused, &[3.0], DType::F32)), 3.0 + 9.0 * UNIT);
        assert_eq!(f32_of(gate_mul(&framework, &[3.0], DType::F32)), 3.0 + 12.0 * UNIT);
        // From 2 on the steps are 8/512: 3 + 12/512 is a tie and goes to 3 + 16/512 before the sum; fused, only the sum is rounded.
        assert_eq!(bf16_of(gate_mul_add(&framework, &[3.0], DType::BF16, &[-3.0])), 16.0 * UNIT);
        assert_eq!(bf16_of(gate_mul_add(&fused, &[3.0], DType::BF16, &[-3.0])), 9.0 * UNIT);
        // The bias comes before the first rounding: 1 + 3/512 - 1/512 is a tie and goes to 1. The addend comes after it.
        let with_bias = Gates { bias: Some(-UNIT), ..framework.clone() };
        assert_eq!(f32_of(gate(&with_bias, DType::F32)), 1.0);
        let with_both = Gates { addend: Some(&[4.0 * UNIT]), ..with_bias };
        assert_eq!(f32_of(gate(&with_both, DType::F32)), 1.0 + 4.0 * UNIT);
        assert_eq!(f32_of(gate(&Gates { rounding: Rounding::Fused, ..with_both }, DType::F32)), 1.0 + 6.0 * UNIT);
        // The sum with the addend is rounded too: 1 + 4/512 + 3/512 goes to 1 + 8/512.
        let with_addend = Gates { addend: Some(&[3.0 * UNIT]), ..framework.clone() };
        assert_eq!(f32_of(gate(&with_addend, DType::F32)), 1.0 + 8.0 * UNIT);
        // The scaled gate: rounded to the type of x on the way to a product, to the type of the result where it is the result.
        let scaled = Gates { scale: 1.0 + 3.0 * UNIT, ..framework };
        assert_eq!(f32_of(gate(&scaled, DType::F32)), (1.0 + 4.0 * UNIT) * (1.0 + 3.0 * UNIT));
        assert_eq!(gate_append_topk(&scaled, 7).0, [(1.0 + 4.0 * UNIT) * (1.0 + 3.0 * UNIT)]);
        assert_eq!(bf16_of(gate(&scaled, DType::BF16)), 1.0 + 8.0 * UNIT);
        assert_eq!(f32_of(gate_mul(&scaled, &[1.0], DType::F32)), 1.0 + 8.0 * UNIT);
        // The sigmoid: sigmoid(0.5) lies between two bf16.
        let half = |rounding| Gates { x: &[0.5, 0.0], activation: Activation::Sigmoid, ..gates(rounding) };
        let exact = exp::sigmoid(0.5);
        assert_ne!(exact, float::round(DType::BF16, exact));
        assert_eq!(f32_of(gate(&half(Rounding::Fused), DType::F32)), exact);
        assert_eq!(f32_of(gate(&half(Rounding::Framework), DType::F32)), float::round(DType::BF16, exact));
        assert_eq!(f32_of(sigmoid_mul(&[1.0], DType::F32, &[0.5], DType::BF16, 1, Rounding::Framework)), float::round(DType::BF16, exact));
        assert_eq!(f32_of(sigmoid_mul(&[1.0], DType::F32, &[0.5], DType::BF16, 1, Rounding::Fused)), exact);
    }

    #[test]
    fn large_negative_logits_give_zero() {
        let g = |w: f32| {
            Gates {
                x: &[1.0],
                w: &[w],
                num_tokens: 1,
                x_dtype: DType::F32,
                bias: None,
                addend: None,
                activation: Activation::Sigmoid,
                scale: 2.5,
                rounding: Rounding::Fused,
            }
            .values(DType::F32)[0]
        };
        assert_eq!(g(-1e30), 0.0);
        assert_eq!(g(f32::NEG_INFINITY), 0.0);
        assert_eq!(g(f32::INFINITY), 2.5);
        assert!(g(f32::NAN).is_nan());
    }
}
