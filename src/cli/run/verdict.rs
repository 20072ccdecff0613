//! Is the result right? Sampled tokens against a second computation, every count against the routing.
#![forbid(unsafe_code)]

use moe_kernels::cpu::Level;
use moe_kernels::ep::Layout;
use moe_kernels::layer::{BlockConfig, TokenCheck, Verifier};
use moe_kernels::oracle::float;
use moe_kernels::oracle::layer::{Sums, route};
use moe_kernels::routing::{Load, Placement};
use moe_kernels::{Backend, Rank, Result};
use rayon::prelude::*;

use super::execute::{RankRun, Weights};
use super::source::{Source, share};
use crate::output::Progress;

/// What was checked and found.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Verdict {
    /// Everything below is as it should be.
    pub is_right: bool,
    /// Sampled tokens.
    pub num_tokens: usize,
    /// Of these, wrong ones.
    pub num_wrong_tokens: usize,
    /// Relative error, against the oracle, of the sampled token that came nearest to its bound.
    pub worst_error: f64,
    /// The bound of that token, derived from the roundings.
    pub bound: f64,
    /// Counts that were compared with the routing.
    pub num_counts: usize,
    /// Every iteration gave the same bytes on every rank.
    pub is_repeatable: bool,
    /// Hash (FNV-1a, 64 bits, hexadecimal) of the results of all tokens in their order: equal bytes, equal digest.
    pub digest: String,
    /// What is wrong, at most a few lines.
    pub problems: Vec<String>,
}

/// Most problems that are listed (arbitrary: one screen).
const MAX_PROBLEMS: usize = 8;

/// Checks `num_samples` tokens, spread over all ranks: their routes (of all tokens when they were given) and results; and the counts of every iteration.
pub fn verify(
    backend: &Backend,
    config: &BlockConfig,
    weights: &Weights,
    source: &Source,
    runs: &[RankRun],
    load: &Load,
    num_samples: usize,
) -> Result<Verdict> {
    let verifier = Verifier::new(backend, config, &weights.common, weights.experts.iter().map(|experts| &**experts))?;
    let num_tokens: usize = runs.iter().map(|run| run.routes.num_tokens).sum();
    let samples = sample(num_tokens, num_samples);
    let progress = Progress::new(samples.len(), "checking tokens");
    let row_bytes = config.shape.hidden * config.dtype.size();
    // The specification of the logits' sum is that of machines with fused multiply-add: every level above scalar has it.
    let is_fused = Level::available().len() > 1;
    let check = |&token: &usize| -> Result<(usize, TokenCheck, bool)> {
        let (rank, start) = owner(token, num_tokens, runs.len());
        let (run, local) = (&runs[rank], token - start);
        let row = local * row_bytes..(local + 1) * row_bytes;
        let got = &run.out.bytes()[row.clone()];
        let (x, ids, weights_of_ids) = (&run.x[row], run.routes.idx_of(local), run.routes.weights_of(local));
        let is_routed = source.routes.is_some() || !is_fused || {
            let wanted = route(Sums::Blocks, config, &weights.common, &float::values(config.dtype, x));
            let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            wanted.0 == ids && bits(&wanted.1) == bits(weights_of_ids)
        };
        let checked = verifier.token(x, ids, weights_of_ids, got);
        progress.step();
        Ok((token, checked?, is_routed))
    };
    let checks: Vec<(usize, TokenCheck, bool)> = samples.par_iter().map(check).collect::<Result<_>>()?;

    let mut problems = Vec::new();
    let wrong: Vec<_> = checks.iter().filter(|(_, check, is_routed)| !check.is_right() || !is_routed).collect();
    for (token, check, is_routed) in &wrong {
        let (rank, start) = owner(*token, num_tokens, runs.len());
        let difference = match &check.difference {
            _ if !is_routed => "its routes are not those of the router's specification".into(),
            Some(difference) => difference.clone(),
            None => format!("error {:.3e}, at most {:.3e}", check.error, check.bound),
        };
        problems.push(format!("token {} of rank {rank}: {difference}", token - start));
    }
    for (rank, (given, run)) in source.routes.iter().flatten().zip(runs).enumerate() {
        if *given != run.routes {
            problems.push(format!("rank {rank}: the routes are not those that were given"));
        }
    }
    let num_counts = compare_counts(config, runs, &config.ep().placement(runs.len())?, load, &verifier, &mut problems);
    for (rank, _) in runs.iter().enumerate().filter(|(_, run)| !run.is_repeatable) {
        problems.push(format!("rank {rank}: iterations differ"));
    }
    let is_right = problems.is_empty();
    if problems.len() > MAX_PROBLEMS {
        let more = problems.len() - MAX_PROBLEMS;
        problems.truncate(MAX_PROBLEMS);
        problems.push(format!("and {more} more"));
    }
    let nearness = |check: &TokenCheck| check.error / check.bound;
    let worst = checks.iter().map(|(_, check, _)| check).max_by(|a, b| nearness(a).total_cmp(&nearness(b)));
    Ok(Verdict {
        is_right,
        num_tokens: checks.len(),
        num_wrong_tokens: wrong.len(),
        worst_error: worst.map_or(0.0, |check| check.error),
        bound: worst.map_or(0.0, |check| check.bound),
        num_counts,
        is_repeatable: runs.iter().all(|run| run.is_repeatable),
        digest: format!("{:016x}", digest(runs.iter().map(|run| &run.out.bytes()[..run.x.len()]))),
        problems,
    })
}

fn digest<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u64 {
    // Offset and prime are those of FNV-1a (spec: Fowler, Noll, Vo).
    parts.flatten().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3))
}

/// Compares rows per expert and per rank, of every iteration, with what the routes ask for; returns how many numbers were compared.
fn compare_counts(
    config: &BlockConfig,
    runs: &[RankRun],
    placement: &Placement,
    load: &Load,
    verifier: &Verifier<'_>,
    problems: &mut Vec<String>,
) -> usize {
    let wanted = verifier.num_rows_per_expert(runs.iter().map(|run| &run.routes));
    if wanted.iter().map(|&n| u64::from(n)).ne(load.routes_per_expert.iter().copied()) {
        problems.push("the statistics and the verifier count the routes differently".into());
    }
    let mut num_counts = 0;
    for (rank, run) in runs.iter().enumerate() {
        let experts = placement.experts_of(Rank(rank as u32));
        let of_rank: Vec<u32> = experts.iter().filter_map(|expert| wanted.get(expert.index()).copied()).collect();
        let num_rows = match config.layout {
            Layout::ByExpert { segment_align } => of_rank.iter().map(|&n| (n as usize).next_multiple_of(segment_align)).sum(),
            Layout::ByExpertFixed { rows_per_expert } => experts.len() * rows_per_expert,
            _ => load.rows_per_rank[rank] as usize,
        };
        for (iteration, (_, report)) in run.iterations.iter().enumerate() {
            num_counts += of_rank.len() + 1;
            if report.num_rows_per_expert != of_rank {
                problems.push(format!(
                    "rank {rank}, iteration {iteration}: rows per expert are {:?}, routed were {of_rank:?}",
                    report.num_rows_per_expert
                ));
            }
            if report.num_rows != num_rows {
                problems.push(format!("rank {rank}, iteration {iteration}: {} rows arrived, routed were {num_rows}", report.num_rows));
            }
        }
    }
    num_counts
}

/// Up to `num_samples` tokens of `num_tokens`, evenly spread, first and last among them.
fn sample(num_tokens: usize, num_samples: usize) -> Vec<usize> {
    let num_samples = num_samples.min(num_tokens);
    (0..num_samples).map(|i| i * (num_tokens - 1) / (num_samples - 1).max(1)).collect()
}

/// The rank of a token, and that rank's first token.
fn owner(token: usize, num_tokens: usize, ranks: usize) -> (usize, usize) {
    let owner = (0..ranks).map(|rank| (rank, share(num_tokens, ranks, rank))).find(|(_, tokens)| tokens.contains(&token));
    owner.map_or((0, 0), |(rank, tokens)| (rank, tokens.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_and_distinct() {
        assert_eq!(sample(5, 3), [0, 2, 4]);
        assert_eq!(sample(3, 32), [0, 1, 2]);
        assert_eq!(sample(1, 1), [0]);
        assert!(sample(0, 32).is_empty() && sample(7, 0).is_empty());
        assert_eq!(owner(6, 7, 3), (2, 4));
    }

    #[test]
    fn digest_is_fnv() {
        // From the authors' table of test vectors.
        assert_eq!(digest([&b"foo"[..], b"bar"].into_iter()), 0x8594_4171_F739_67E8);
        assert_eq!(digest([&b"a"[..]].into_iter()), 0xAF63_DC4C_8601_EC8C);
    }
}
