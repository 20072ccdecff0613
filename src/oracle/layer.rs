//! One token through a MoE block: router, experts, the shared expert, the sums, each rounding.
//!
//! Dots are sums of f32 products; `Sums` says how they are made. `round` is to the type of the tokens.
//!
//! `Fused`. expert(x): for each row i of gate and up, `h[i] = round(silu(gate[i] . x) * (up[i] . x))`; then `y[i] = round(down[i] . h)`. The shared expert is
//! the same without the last rounding, times `sigmoid(x . w)` in f32, and is added to the sum over experts in f32, before the one rounding of the result.
//!
//! `Framework`. expert(x): `h[i] = round(round(silu(round(gate[i] . x))) * round(up[i] . x))`; `y[i] = round(down[i] . h)`. Each row is multiplied by its
//! weight and rounded, unless the model keeps weights in f32; the f32 sum over experts is rounded. The shared expert is an expert, times
//! `round(sigmoid(round(x . w)))` and rounded; the result is the rounded sum of both. Logits and weights of the router are rounded, but for what the
//! model keeps in f32.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::ep::{Config, Layout};
use crate::layer::weights::{Matrix, Mlp};
use crate::layer::{BlockConfig, CommonWeights};
use crate::ops::gate::Rounding;
use crate::oracle::dispatch::Route;
use crate::oracle::{combine, exp, float, gate, router};
use crate::routing::{KeptInF32, RouterConfig};
use crate::tensor::DType;

/// How a dot product is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// In f64, then rounded to f32: nearly the true value, of which any order of an f32 sum is an approximation.
    F64,
    /// As the CPU backend does where it has fused multiply-add: `ceil(len / 512)` blocks of nearly equal length, longer ones first; in each an f32 fma
    /// chain from +0 over ascending elements; then the blocks' sums are added, ascending.
    Blocks,
}

/// The dot product of a row of weights with x.
pub fn dot(sums: Sums, w: &[f32], x: &[f32]) -> f32 {
    match sums {
        Sums::F64 => {
            // Eight partial sums, for speed; the order is of no account at this precision.
            let mut partial = [0f64; 8];
            for (w, x) in w.chunks(8).zip(x.chunks(8)) {
                for ((p, w), x) in partial.iter_mut().zip(w).zip(x) {
                    *p += *w as f64 * *x as f64;
                }
            }
            partial.iter().sum::<f64>() as f32
        }
        Sums::Blocks => {
            let num_blocks = w.len().div_ceil(512);
            let mut total = 0f32;
            let mut start = 0;
            for block in 0..num_blocks {
                let len = w.len() / num_blocks + usize::from(block < w.len() % num_blocks);
                let mut sum = 0f32;
                for i in start..start + len {
                    sum = f32::mul_add(w[i], x[i], sum);
                }
                total = if block == 0 { sum } else { total + sum };
                start += len;
            }
            total
        }
    }
}

/// A matrix as f32 values, row by row.
pub struct Values<'a> {
    matrix: &'a Matrix,
    /// The value of each bit pattern of f16 and fp8; empty otherwise, and for small matrices.
    table: Vec<f32>,
}

impl<'a> Values<'a> {
    /// Reads `matrix`.
    pub fn new(matrix: &'a Matrix) -> Self {
        // Where a value takes work, and the table is smaller than the matrix.
        let num_patterns = match matrix.dtype() {
            DType::F32 | DType::BF16 => 0,
            narrow => 1usize << (8 * narrow.size()),
        };
        let num_patterns = if num_patterns > matrix.bytes().len() { 0 } else { num_patterns };
        Values { matrix, table: (0..num_patterns as u32).map(|bits| float::widen(matrix.dtype(), bits)).collect() }
    }

    /// Row `row` of the matrix; e4m3 values are multiplied by the scale of their 128 x 128 block.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let cols = self.matrix.shape()[1];
        let size = self.matrix.dtype().size();
        let bytes = &self.matrix.bytes()[row * cols * size..][..cols * size];
        let mut values = match &self.table[..] {
            [] => float::values(self.matrix.dtype(), bytes),
            table => bytes.chunks_exact(size).map(|b| table[float::bits(b) as usize]).collect(),
        };
        if !self.matrix.scales().is_empty() {
            for (col, value) in values.iter_mut().enumerate() {
                *value *= self.matrix.scales()[row / 128 * cols.div_ceil(128) + col / 128];
            }
        }
        values
    }

    fn times(&self, sums: Sums, x: &[f32], rows: Range<usize>) -> Vec<f32> {
        rows.map(|row| dot(sums, &self.row(row), x)).collect()
    }
}

/// The product of a matrix with x.
pub fn linear(sums: Sums, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    Values::new(matrix).times(sums, x, 0..matrix.shape()[0])
}

/// What the router chooses for one token: ids, weights and the logits that decided.
pub fn route(sums: Sums, config: &BlockConfig, common: &CommonWeights, x: &[f32]) -> (Vec<i32>, Vec<f32>, Vec<f32>) {
    let mut logits = linear(sums, &common.router, x);
    let mut router_config = config.shape.router;
    if config.rounding == Rounding::Framework {
        if router_config.kept_in_f32 != KeptInF32::LogitsAndWeights {
            logits = logits.iter().map(|&v| float::round(config.dtype, v)).collect();
        }
        let keeps_weights = router_config.kept_in_f32 != KeptInF32::Nothing;
        router_config = RouterConfig { weight_dtype: if keeps_weights { DType::F32 } else { config.dtype }, ..router_config };
    }
    let (ids, weights) = router::route(&router_config, &logits, common.correction_bias.as_deref());
    (ids, weights, logits)
}

/// `down(silu(gate x) * up x)`, rounded inside, the result not.
pub fn mlp(sums: Sums, rounding: Rounding, mlp: &Mlp, dtype: DType, x: &[f32]) -> Vec<f32> {
    let (gate, up) = (linear(sums, &mlp.gate, x), linear(sums, &mlp.up, x));
    let mut h = Vec::new();
    for (&g, &u) in gate.iter().zip(&up) {
        h.push(match rounding {
            Rounding::Fused => float::round(dtype, exp::silu(g) * u),
            Rounding::Framework => {
                let activated = float::round(dtype, exp::silu(float::round(dtype, g)));
                float::round(dtype, activated * float::round(dtype, u))
            }
        });
    }
    linear(sums, &mlp.down, &h)
}

/// An expert's row, rounded: bytes of `dtype`.
pub fn expert(sums: Sums, rounding: Rounding, weights: &Mlp, dtype: DType, x: &[f32]) -> Vec<u8> {
    bytes(dtype, &mlp(sums, rounding, weights, dtype, x))
}

/// The shared expert, times its gate: f32 values, which `Framework` has rounded.
pub fn shared(sums: Sums, rounding: Rounding, weights: &Mlp, gate_weights: Option<&Matrix>, dtype: DType, x: &[f32]) -> Vec<f32> {
    let step = |v: f32| match rounding {
        Rounding::Fused => v,
        Rounding::Framework => float::round(dtype, v),
    };
    let y: Vec<f32> = mlp(sums, rounding, weights, dtype, x).into_iter().map(step).collect();
    let Some(matrix) = gate_weights else { return y };
    let g = step(exp::sigmoid(step(gate::dot(x, &Values::new(matrix).row(0)))));
    y.iter().map(|&y| step(g * y)).collect()
}

/// A token's unmasked routes: expert and weight. An id that is no expert is masked, and so is a later occurrence of an expert.
pub fn routes(num_experts: usize, topk_idx: &[i32], topk_weights: &[f32]) -> Vec<(usize, f32)> {
    let mut kept: Vec<(usize, f32)> = Vec::new();
    for (&id, &weight) in topk_idx.iter().zip(topk_weights) {
        let is_expert = id >= 0 && (id as usize) < num_experts;
        if is_expert && kept.iter().all(|(e, _)| *e != id as usize) {
            kept.push((id as usize, weight));
        }
    }
    kept
}

/// The token's result, bytes of the tokens' type: its experts' rows (expert, router weight, bytes of that type) and the shared expert's row.
///
/// `ByToken`: each rank first sums its experts' rows, ascending: `weight * row`, then `fma(weight, row, sum)`, and rounds once. The rest is combine. Where
/// `weight * row` is rounded, the rows of both layouts are so before they are summed, with a weight of 1.
pub fn result(block: &BlockConfig, owners: &[usize], rows: &[(usize, f32, Vec<u8>)], shared: Option<&[f32]>) -> Vec<u8> {
    let (config, dtype) = (block.ep(), block.dtype);
    if block.rounding == Rounding::Framework && block.shape.router.kept_in_f32 == KeptInF32::Nothing {
        let mut products = Vec::new();
        for (expert, weight, row) in rows {
            let product: Vec<f32> = float::values(dtype, row).iter().map(|&v| weight * v).collect();
            products.push((*expert, 1.0, bytes(dtype, &product)));
        }
        return sum(block, &Config { weighted: false, ..config }, owners, &products, shared);
    }
    let weighted = config.layout != Layout::ByToken;
    sum(block, &Config { weighted, ..config }, owners, rows, shared)
}

/// The sum over experts and the shared expert.
fn sum(block: &BlockConfig, config: &Config, owners: &[usize], rows: &[(usize, f32, Vec<u8>)], shared: Option<&[f32]>) -> Vec<u8> {
    let dtype = block.dtype;
    let world = owners.iter().max().map_or(0, |r| r + 1);
    let mut y = vec![Vec::new(); world];
    let mut routes = Vec::new();
    let mut ascending: Vec<&(usize, f32, Vec<u8>)> = rows.iter().collect();
    ascending.sort_by_key(|(expert, _, _)| *expert);
    if config.layout == Layout::ByToken {
        let mut sums: Vec<Option<Vec<f32>>> = vec![None; world];
        for &&(expert, weight, ref row) in &ascending {
            let rank = owners[expert];
            let row = float::values(dtype, row);
            sums[rank] = Some(match sums[rank].take() {
                None => row.iter().map(|&v| weight * v).collect(),
                Some(sum) => row.iter().zip(sum).map(|(&v, s)| f32::mul_add(weight, v, s)).collect(),
            });
            routes.push(Some(Route { expert, rank, weight, slot: Some(0) }));
        }
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = bytes(dtype, &sum.unwrap_or_default());
        }
    } else {
        let row_bytes = config.hidden * dtype.size();
        for &&(expert, weight, ref row) in &ascending {
            let rank = owners[expert];
            routes.push(Some(Route { expert, rank, weight, slot: Some(y[rank].len() / row_bytes) }));
            y[rank].extend(row);
        }
    }
    let mut routed = combine::sum(config, &routes, &y);
    if block.rounding == Rounding::Framework {
        // A sum of nothing is +0, and the shared expert is added to it.
        let rounded = routed.map(|sum| sum.iter().map(|&v| float::round(dtype, v)).collect());
        routed = Some(rounded.unwrap_or(vec![0.0; config.hidden]));
    }
    let sum = match (routed, shared) {
        (None, None) => vec![0.0; config.hidden],
        (None, Some(shared)) => shared.to_vec(),
        (Some(sum), None) => sum,
        (Some(sum), Some(shared)) => sum.iter().zip(shared).map(|(&a, &b)| a + b).collect(),
    };
    bytes(dtype, &sum)
}

fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    values.iter().for_each(|&v| float::push(dtype, v, &mut out));
    out
}
