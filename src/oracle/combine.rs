//! Combine: the order of every sum and the place of every rounding. All ranks at once, without any communication.

use crate::ep::{Config, Quantize, Reduce, Wire};
use crate::oracle::dispatch::{Dispatched, Route, quantize_row};
use crate::oracle::float;
use crate::tensor::DType;

/// Every rank's sums `[T, H]` of the combine type.
///
/// `y`: for each receiving rank its rows `[rows, H]` by slot. `add_to`: for each source rank `[T, H]` of a type, or nothing.
pub fn combine(config: &Config, dispatched: &Dispatched, y: &[Vec<u8>], add_to: &[Option<(DType, Vec<u8>)>]) -> Vec<Vec<u8>> {
    let row_bytes = config.hidden * config.combine_dtype.size();
    let mut all = Vec::new();
    for (source, tokens) in dispatched.routes.iter().enumerate() {
        let mut out = Vec::new();
        for (token, routes) in tokens.iter().enumerate() {
            let add_to = add_to[source].as_ref().map(|(dtype, bytes)| {
                let row_bytes = config.hidden * dtype.size();
                (*dtype, &bytes[token * row_bytes..][..row_bytes])
            });
            match (sum(config, routes, y), add_to) {
                (None, None) => out.extend(std::iter::repeat_n(0, row_bytes)),
                (None, Some((dtype, add_to))) if dtype == config.combine_dtype => out.extend(add_to),
                (None, Some((dtype, add_to))) => {
                    float::values(dtype, add_to).iter().for_each(|&a| float::push(config.combine_dtype, a, &mut out));
                }
                (Some(sum), None) => sum.iter().for_each(|&v| float::push(config.combine_dtype, v, &mut out)),
                (Some(sum), Some((dtype, add_to))) => {
                    for (&v, a) in sum.iter().zip(float::values(dtype, add_to)) {
                        float::push(config.combine_dtype, v + a, &mut out);
                    }
                }
            }
        }
        all.push(out);
    }
    all
}

/// Every source rank's `[T, K]`: each route's value from its row, 0 where masked or dropped. `row_weights`: for each receiving rank
/// `[rows, row_k]`.
pub fn fold(config: &Config, dispatched: &Dispatched, row_weights: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for tokens in &dispatched.routes {
        let mut folded = Vec::new();
        for routes in tokens {
            for (k, route) in routes.iter().enumerate() {
                folded.push(match route {
                    Some(Route { rank, slot: Some(slot), .. }) if config.layout.is_by_expert() => row_weights[*rank][*slot],
                    Some(Route { rank, slot: Some(slot), .. }) => row_weights[*rank][slot * config.k + k],
                    _ => 0.0,
                });
            }
        }
        all.push(folded);
    }
    all
}

/// The f32 sum of a token's rows, not yet rounded; `None` when no row contributes.
pub fn sum(config: &Config, routes: &[Option<Route>], y: &[Vec<u8>]) -> Option<Vec<f32>> {
    let mut kept: Vec<(Route, usize)> = routes.iter().flatten().filter_map(|route| route.slot.map(|slot| (*route, slot))).collect();
    kept.sort_by_key(|(route, _)| route.expert);
    let row = |rank: usize, slot: usize| {
        let row_bytes = config.hidden * config.combine_dtype.size();
        float::values(config.combine_dtype, &y[rank][slot * row_bytes..][..row_bytes])
    };
    let mut acc: Option<Vec<f32>> = None;
    if config.layout.is_by_expert() && config.reduce == Reduce::AtSource {
        for (route, slot) in &kept {
            let value = on_the_wire(config, row(route.rank, *slot));
            acc = Some(add_row(config, acc, route.weight, &value));
        }
        return acc;
    }
    for rank in 0..y.len() {
        let here: Vec<&(Route, usize)> = kept.iter().filter(|(route, _)| route.rank == rank).collect();
        let Some((_, slot)) = here.first() else { continue };
        let partial = if config.layout.is_by_expert() {
            let mut partial = None;
            for (route, slot) in here {
                partial = Some(add_row(config, partial, route.weight, &row(rank, *slot)));
            }
            partial.expect("the rank has a row")
        } else {
            row(rank, *slot)
        };
        let value = on_the_wire(config, partial);
        acc = Some(match acc {
            None => value,
            Some(acc) => acc.iter().zip(&value).map(|(&a, &v)| a + v).collect(),
        });
    }
    acc
}

/// One more expert row: taken as it is when first.
fn add_row(config: &Config, acc: Option<Vec<f32>>, weight: f32, row: &[f32]) -> Vec<f32> {
    match (acc, config.weighted) {
        (None, false) => row.to_vec(),
        (None, true) => row.iter().map(|&v| weight * v).collect(),
        (Some(acc), false) => acc.iter().zip(row).map(|(&a, &v)| a + v).collect(),
        (Some(acc), true) => acc.iter().zip(row).map(|(&a, &v)| weight.mul_add(v, a)).collect(),
    }
}

/// A row as the source reads it.
fn on_the_wire(config: &Config, row: Vec<f32>) -> Vec<f32> {
    match config.wire {
        Wire::AsIs if config.reduce == Reduce::AtRankF32 => row,
        Wire::AsIs => row.iter().map(|&v| float::round(config.combine_dtype, v)).collect(),
        Wire::Fp8Direct => row.iter().map(|&v| float::round(DType::E4M3, v)).collect(),
        Wire::Fp8Block => {
            let (q, scales) = quantize_row(Quantize::F32, &row);
            let scales = float::values(DType::F32, &scales);
            q.iter().enumerate().map(|(i, &q)| float::widen(DType::E4M3, q as u32) * scales[i / 128]).collect() // 128: as quantize_row
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::Layout;
    use crate::oracle::dispatch::{Tokens, dispatch};

    /// One token, three experts on three ranks of four elements each (f32), the values chosen so that every order of the sum differs.
    fn case(config: &Config, world: usize, weights: [f32; 3], values: [f32; 3]) -> f32 {
        let mut inputs = vec![Tokens::default(); world];
        let (x, topk_idx) = (vec![0; 16], vec![2, 0, 1]);
        let topk_weights = Some(vec![weights[2], weights[0], weights[1]]);
        inputs[0] = Tokens { num_tokens: 1, x, topk_idx, topk_weights, scales: Vec::new() };
        let d = dispatch(config, world, &inputs).unwrap();
        let mut y = Vec::new();
        for arrived in &d.ranks {
            let mut rows = Vec::new();
            for row in arrived.rows.iter().flatten() {
                let value = values[row.topk_idx.iter().copied().max().unwrap() as usize];
                (0..4).for_each(|_| rows.extend(value.to_le_bytes()));
            }
            y.push(rows);
        }
        float::values(DType::F32, &combine(config, &d, &y, &vec![None; world])[0])[0]
    }

    #[test]
    fn order_of_sums_by_hand() {
        let values = [1.0, f32::EPSILON / 2.0, f32::EPSILON / 2.0];
        let config = Config { layout: Layout::ByExpert { segment_align: 1 }, ..Config::new(4, DType::F32, 3, 3, 1) };
        let left = (values[0] + values[1]) + values[2];
        assert_eq!(left, 1.0);
        assert_eq!(case(&config, 3, [1.0; 3], values), left);
        // Experts 1 and 2 on rank 1: they are added first there.
        let map = [0, 1, 1].map(crate::id::Rank).to_vec();
        let two = Config { expert_map: Some(map), ..config.clone() };
        assert_eq!(case(&two, 2, [1.0; 3], values), 1.0 + f32::EPSILON);
        let at_source = Config { reduce: Reduce::AtSource, ..two };
        assert_eq!(case(&at_source, 2, [1.0; 3], values), left);
        // fma: 3 * (1/3) is 1 in f32, but its exact product is not.
        let third = 1.0f32 / 3.0;
        let weighted = Config { weighted: true, ..config };
        let want = 3f32.mul_add(third, -1.0);
        assert_ne!(want, 0.0);
        assert_eq!(case(&weighted, 1, [-1.0, 3.0, 0.0], [1.0, third, 0.0]), want);
    }

    #[test]
    fn wires_by_hand() {
        let config = Config { wire: Wire::Fp8Direct, ..Config::new(4, DType::F32, 3, 3, 1) };
        // e4m3 has steps of 2 at 17..32: 17 is a tie to the even mantissa, 16.
        assert_eq!(case(&config, 1, [1.0; 3], [0.0, 0.0, 17.0]), 16.0);
        let block = Config { wire: Wire::Fp8Block, ..config };
        // amax is 17 itself, so it becomes 448 and comes back as 448 * (17 / 448).
        assert_eq!(case(&block, 1, [1.0; 3], [0.0, 0.0, 17.0]), 448.0 * (17.0 / 448.0));
    }
}
