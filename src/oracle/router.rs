//! The meaning of routers.

use crate::oracle::exp;
use crate::oracle::float;
use crate::routing::router::{Family, Groups, RouterConfig};

/// Ids and weights of every row of `logits` (`[T, num_experts]`, widened to f32), each `[T, k]`.
///
/// All arithmetic is f32, each step rounded once, no fma outside [`exp::exp`]. For one row:
/// 1. Scores. Softmax: m = the largest logit (NaN never is); `p[e] = exp(logit[e] - m)`; `d = p[0] + p[1] + ..` in ascending e;
///    `score[e] = p[e] / d`. Sigmoid (DeepSeek-V3): `score[e] = sigmoid(logit[e])`.
/// 2. Choice values: the scores; DeepSeek-V3: `score[e] + bias[e]`.
/// 3. Order: larger first, a NaN above everything (as torch.topk has it), equal ones (+0 and -0, NaN and NaN) by ascending id.
/// 4. Groups, where the family has them: a group is worth its first value in that order (DeepSeek-V2), or the sum of its first two
///    (DeepSeek-V3); the `topk_groups` first groups stay, by the same order, and experts of the others are not chosen.
/// 5. The first k experts, in that order.
/// 6. Weights: the scores (never with the bias). Renormalised: `s = w[0] + w[1] + ..` in the order of the choice, DeepSeek-V3 adds 1e-20 to s;
///    `w[j] / s`. Scaled by `scale`: always in DeepSeek-V3, in DeepSeek-V2 only when not renormalised. Rounded to `weight_dtype`.
pub fn route(config: &RouterConfig, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(config.num_experts) {
        let (row_ids, row_weights) = route_row(config, row, bias);
        ids.extend(row_ids);
        weights.extend(row_weights);
    }
    (ids, weights)
}

fn route_row(config: &RouterConfig, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
    let (scores, choice) = match config.family {
        Family::Softmax { .. } | Family::DeepSeekV2 { .. } => {
            let scores = softmax(logits);
            (scores.clone(), scores)
        }
        Family::DeepSeekV3 { .. } => {
            let scores: Vec<f32> = logits.iter().map(|&x| exp::sigmoid(x)).collect();
            let bias = bias.expect("DeepSeek-V3 has a bias");
            let biased = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
            (scores, biased)
        }
    };
    let everyone: Vec<usize> = (0..config.num_experts).collect();
    let candidates = match config.family {
        Family::Softmax { .. } | Family::DeepSeekV2 { groups: None, .. } => everyone,
        Family::DeepSeekV2 { groups: Some(groups), .. } => of_best_groups(groups, &choice, 1),
        Family::DeepSeekV3 { groups, .. } => of_best_groups(groups, &choice, 2),
    };
    let chosen = first_in_order(candidates, &choice, config.k);

    let mut weights: Vec<f32> = chosen.iter().map(|&e| scores[e]).collect();
    let mut sum = weights[0];
    for w in &weights[1..] {
        sum += w;
    }
    let (denominator, scale) = match config.family {
        Family::Softmax { renormalize: true } => (sum, 1.0),
        Family::Softmax { renormalize: false } => (1.0, 1.0),
        Family::DeepSeekV2 { renormalize: true, .. } => (sum, 1.0),
        Family::DeepSeekV2 { renormalize: false, scale, .. } => (1.0, scale),
        Family::DeepSeekV3 { renormalize: true, scale, .. } => (sum + 1e-20, scale),
        Family::DeepSeekV3 { renormalize: false, scale, .. } => (1.0, scale),
    };
    for w in &mut weights {
        *w = float::round(config.weight_dtype, *w / denominator * scale);
    }
    (chosen.iter().map(|&e| e as i32).collect(), weights)
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let mut largest = f32::NEG_INFINITY;
    for &x in logits {
        if x > largest {
            largest = x;
        }
    }
    let p: Vec<f32> = logits.iter().map(|&x| exp::exp(x - largest)).collect();
    let mut sum = 0.0;
    for x in &p {
        sum += x;
    }
    p.iter().map(|x| x / sum).collect()
}

/// The first `n` of `candidates` (ascending) in the order of step 3.
fn first_in_order(mut candidates: Vec<usize>, values: &[f32], n: usize) -> Vec<usize> {
    let mut first = Vec::new();
    for _ in 0..n {
        let mut best = 0;
        for i in 1..candidates.len() {
            if comes_before(values[candidates[i]], values[candidates[best]]) {
                best = i;
            }
        }
        first.push(candidates.remove(best));
    }
    first
}

fn comes_before(a: f32, b: f32) -> bool {
    a > b || a.is_nan() && !b.is_nan()
}

/// The experts of the best groups, ascending; a group is worth the sum of its first `num_summed` values.
fn of_best_groups(groups: Groups, values: &[f32], num_summed: usize) -> Vec<usize> {
    let size = values.len() / groups.num_groups;
    let members = |g: usize| (g * size..(g + 1) * size).collect::<Vec<_>>();
    let worth: Vec<f32> = (0..groups.num_groups)
        .map(|g| {
            first_in_order(members(g), values, num_summed).iter().map(|&e| values[e]).reduce(|a, b| a + b).expect("one value at least")
        })
        .collect();
    let mut best = first_in_order((0..groups.num_groups).collect(), &worth, groups.topk_groups);
    best.sort();
    best.into_iter().flat_map(members).collect()
}
