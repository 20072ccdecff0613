//! Load statistics: against a naive count, and against the table that comes with the recorded traces.

use std::collections::BTreeSet;
use std::path::PathBuf;

use libtest_mimic::{Failed, Trial};
use moe_kernels::routing::trace::Options;
use moe_kernels::routing::{Load, Placement, Routes, Trace};
use moe_kernels::{Expert, Rank};
use proptest::prelude::*;

use super::{property, same};

pub fn trials() -> Vec<Trial> {
    let mut trials = vec![Trial::test("load::any routes", any_routes), Trial::test("load::no routes", no_routes)];
    for table in TABLES {
        let path = traces().join(table.file);
        let there = path.exists();
        trials.push(Trial::test(format!("load::recorded {}", table.file), move || table.check(&path)).with_ignored_flag(!there));
    }
    trials
}

/// Recorded traces lie beside the checkout, when they are there at all: they may not be copied into it.
fn traces() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "shared", "traces"].iter().collect()
}

fn any_routes() -> Result<(), Failed> {
    // Ids from -2 to 2 beyond the last expert, repetitions included; ranks without experts.
    let cases = (1usize..70, 1usize..20, 1usize..10).prop_flat_map(|(num_experts, world, k)| {
        let map = prop::collection::vec(0..world as u32, num_experts);
        let ids = prop::collection::vec(-2..num_experts as i32 + 2, 0..300usize);
        (Just(world), map, Just(k), ids)
    });
    property(&cases, |(world, map, k, mut ids)| {
        ids.truncate(ids.len() / k * k);
        let owners: Vec<Rank> = map.iter().copied().map(Rank).collect();
        let placement = Placement::from_map(&owners, world).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let routes = Routes { topk_weights: vec![1.0; ids.len()], num_tokens: ids.len() / k, k, topk_idx: ids.clone() };
        let load = Load::new(&routes, &placement);
        let (mut experts, mut ranks, mut rows) = (vec![0; owners.len()], vec![0; world], vec![0; world]);
        for row in ids.chunks(k) {
            let distinct: BTreeSet<usize> = row.iter().filter_map(|&id| usize::try_from(id).ok()).filter(|&e| e < owners.len()).collect();
            distinct.iter().for_each(|&e| experts[e] += 1);
            distinct.iter().for_each(|&e| ranks[map[e] as usize] += 1);
            distinct.iter().map(|&e| map[e]).collect::<BTreeSet<_>>().into_iter().for_each(|r| rows[r as usize] += 1);
        }
        let sum: u64 = experts.iter().sum();
        prop_assert_eq!((&load.routes_per_expert, &load.routes_per_rank, &load.rows_per_rank), (&experts, &ranks, &rows));
        prop_assert_eq!((load.num_masked, load.num_routes()), (ids.len() as u64 - sum, sum));
        Ok(())
    })
}

fn no_routes() -> Result<(), Failed> {
    let load = Load::new(&Routes::masked(3, 2), &Placement::blocks(4, 2)?);
    same("masked", load.num_masked, 6)?;
    same("imbalance", (load.route_imbalance(), load.row_imbalance(), load.expert_imbalance()), (1.0, 1.0, 1.0))?;
    same("ranks per token", load.ranks_per_token(), 0.0)?;
    same("top expert", load.top_expert(), (Expert(0), 0.0))?;
    same("fullest rank", load.fullest_rank(), (Rank(0), 0))?;
    same("ranks per token, no tokens", Load::new(&Routes::masked(0, 2), &Placement::blocks(4, 2)?).ranks_per_token(), 0.0)
}

/// Figures of one trace, with and without its warm-up.
#[derive(Clone, Copy)]
struct Table {
    file: &'static str,
    layer: u32,
    num_experts: usize,
    k: usize,
    num_rows: usize,
    num_warmup: usize,
    with_warmup: Figures,
    without: Figures,
}

/// The table of the traces' README, rounded once, to two decimals (it has 17.0, 1.5 and 3.43 for 17.05, 1.45 and 3.42).
#[derive(Clone, Copy)]
struct Figures {
    top_percent: f64,
    top_times_mean: f64,
    fewest: u64,
    /// Imbalance of routes and of rows, and distinct ranks a token, on 4 and on 8 ranks.
    ranks: [[f64; 3]; 2],
}

const TABLES: [Table; 2] = [
    Table {
        file: "qwen1.5-moe-a2.7b-layer12.jsonl",
        layer: 12,
        num_experts: 60,
        k: 4,
        num_rows: 12805,
        num_warmup: 8448,
        with_warmup: Figures { top_percent: 17.05, top_times_mean: 10.23, fewest: 194, ranks: [[1.01, 1.01, 3.61], [1.69, 1.70, 3.80]] },
        without: Figures { top_percent: 2.42, top_times_mean: 1.45, fewest: 194, ranks: [[1.03, 1.03, 2.86], [1.11, 1.10, 3.42]] },
    },
    Table {
        file: "olmoe-1b-7b-layer0.jsonl",
        layer: 0,
        num_experts: 64,
        k: 8,
        num_rows: 6519,
        num_warmup: 2048,
        with_warmup: Figures { top_percent: 9.37, top_times_mean: 6.00, fewest: 181, ranks: [[2.00, 1.34, 2.87], [3.31, 1.67, 4.14]] },
        without: Figures { top_percent: 7.94, top_times_mean: 5.08, fewest: 181, ranks: [[1.08, 1.02, 3.73], [1.16, 1.15, 5.58]] },
    },
];

impl Table {
    fn check(&self, path: &std::path::Path) -> Result<(), Failed> {
        for (keep_warmup, figures, rows) in
            [(true, self.with_warmup, self.num_rows), (false, self.without, self.num_rows - self.num_warmup)]
        {
            let trace = Trace::read(path, &Options { keep_warmup, ..Options::default() })?;
            same("layer and experts", (trace.layer, trace.num_experts), (self.layer, self.num_experts))?;
            same("rows", (trace.num_rows, trace.num_warmup), (self.num_rows, self.num_warmup))?;
            same("rows taken", (trace.routes.num_tokens, trace.routes.k), (rows, self.k))?;
            for (world, [route_imbalance, row_imbalance, ranks]) in [4, 8].into_iter().zip(figures.ranks) {
                let load = Load::new(&trace.routes, &Placement::blocks(trace.num_experts, world)?);
                // Compared as printed.
                let two = |x: f64| format!("{x:.2}");
                same("route imbalance", two(load.route_imbalance()), two(route_imbalance))?;
                same("row imbalance", two(load.row_imbalance()), two(row_imbalance))?;
                same("ranks per token", two(load.ranks_per_token()), two(ranks))?;
                same("share of the top expert", two(load.top_expert().1 * 100.0), two(figures.top_percent))?;
                same("top expert over mean", two(load.expert_imbalance()), two(figures.top_times_mean))?;
                same("least used expert", load.fewest_routes(), figures.fewest)?;
                same("masked", load.num_masked, 0)?;
            }
        }
        Ok(())
    }
}
