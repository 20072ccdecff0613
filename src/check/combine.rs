//! Checks of combine.

use std::collections::HashSet;

use crate::Backend;
use crate::check::ep::cases::{Form, Part, Steps, Traffic, batch, combine_script, low_latency, many_tokens, traffics};
use crate::check::ep::inputs::{Draw, Ids, draw};
use crate::check::ep::script::Rows;
use crate::check::ep::{self, Batch, Count, Phase, Script};
use crate::check::{Failed, Group, variants};
use crate::ep::{Config, IdSpace, Layout, Reduce, Sums, Tuning, Wire};
use crate::oracle::dispatch::Tokens;
use crate::oracle::{compare, float};
use crate::random::SplitMix64;
use crate::tensor::DType;

/// Widths of rows: the least, one vector of 64 bytes and more, a scale block and a short one, two blocks.
const WIDTHS: [usize; 4] = [16, 64, 144, 256];

const LAYOUTS: [Layout; 3] =
    [Layout::ByToken, Layout::ByExpert { segment_align: 4 }, Layout::ByExpertFixed { rows_per_expert: 0 /* set by the traffic */ }];

const REDUCES: [Reduce; 3] = [Reduce::AtRank, Reduce::AtRankF32, Reduce::AtSource];
const WIRES: [Wire; 3] = [Wire::AsIs, Wire::Fp8Direct, Wire::Fp8Block];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::ByToken => "by token",
        Layout::ByExpert { .. } => "by expert",
        Layout::ByExpertFixed { .. } => "by expert fixed",
    }
}

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    for (l, layout) in LAYOUTS.into_iter().enumerate() {
        for (r, reduce) in REDUCES.into_iter().enumerate() {
            if layout == Layout::ByToken && reduce != Reduce::AtRank {
                continue; // refused by the configuration
            }
            for (d, dtype) in FLOATS.into_iter().enumerate() {
                let name = format!("{} {reduce:?} {dtype}", layout_name(layout));
                let scripts = move |is_gpu: bool| sum_scripts(layout, reduce, dtype, is_gpu.then_some(l + r + d));
                groups.push(ep::group("combine", name, scripts));
            }
        }
        let name = format!("{} rounds", layout_name(layout));
        groups.push(ep::group("combine", name, move |is_gpu| round_scripts(layout, Part::of(is_gpu, 3, l))));
        if layout.is_by_expert() {
            let name = format!("{} identity experts", layout_name(layout));
            let shapes =
                move || identity_shapes(layout, true).into_iter().map(|(_, traffic, config)| (traffic.world(), config, plain())).collect();
            groups.push(Group::new("combine", name, move |backend| identity_experts(backend, layout)).with_shapes(shapes));
        }
    }
    let shapes = || world_shapes(true).into_iter().flat_map(|(_, config)| WORLDS.map(|world| (world, config.clone(), plain()))).collect();
    groups.push(Group::new("combine", "independent of the world", independent_of_the_world).with_shapes(shapes));
    groups.push(ep::group("combine", "7168 wide, 256 experts".into(), |_| large_scripts()));
    for form in SANITIZED {
        groups.push(ep::group("combine", format!("under a sanitizer, {form}"), move |_| vec![sanitizer_script(form)]));
    }
    groups
}

/// Every wire, weighted and not, with and without folding, on a few worlds each. On a GPU a part, another one for each number `gpu`: every fifth traffic
/// with each wire and weighting.
fn sum_scripts(layout: Layout, reduce: Reduce, dtype: DType, gpu: Option<usize>) -> Vec<Script> {
    let mut scripts = Vec::new();
    let traffics = traffics();
    for (w, wire) in WIRES.into_iter().enumerate() {
        for weighted in [false, true] {
            if reduce == Reduce::AtRankF32 && wire != Wire::AsIs || weighted && !layout.is_by_expert() {
                continue; // refused by the configuration
            }
            let many = (weighted == layout.is_by_expert()).then(many_tokens);
            let part = Part::of(gpu.is_some(), 5, gpu.unwrap_or(0) + w + 2 * usize::from(weighted));
            for (i, traffic) in traffics.iter().chain(&many).enumerate().filter(|(i, _)| part.takes(*i)) {
                let index = i + 5 * w + weighted as usize; // 5: arbitrary, another width and form for each wire
                let base = traffic.config(WIDTHS[index % 4], DType::Bytes, layout);
                let config = Config { combine_dtype: dtype, wire, reduce, weighted, fold_weights: index.is_multiple_of(3), ..base };
                let script = combine_script(&format!("{wire:?}, weighted {weighted}"), config, traffic, index);
                scripts.push(if index % 5 == 4 { low_latency(script) } else { script });
            }
        }
    }
    scripts
}

/// Many rounds on one object, each with new tokens, every fourth without a combine, one routing kept to the end.
fn round_scripts(layout: Layout, part: Part) -> Vec<Script> {
    let mut scripts = Vec::new();
    for (i, traffic) in traffics().into_iter().enumerate().filter(|(i, _)| i % 2 == 0 && part.takes(i / 2)) {
        let config = Config { fold_weights: true, combine_dtype: DType::F32, ..traffic.config(WIDTHS[i % 4], DType::BF16, layout) };
        let sizes = |round: usize| -> Vec<usize> { traffic.tokens.iter().map(|&t| t.saturating_sub(round * 5 % 7)).collect() };
        let mut batches: Vec<Batch> =
            (0..10).map(|round| batch(&config, &traffic, &sizes(round), 50 + 11 * i + round, round % 4 == 1)).collect();
        batches.push(batch(&config, &traffic, &sizes(0), 999, false)); // new payload for the first round's routing
        let mut steps = Steps::default();
        let kept = steps.dispatch(0, 0, Phase::Both);
        steps.combine(kept, Form::of(0, &config));
        for round in 1..10 {
            let form = Form::of(round, &config);
            let arrival = steps.dispatch(round, 1, form.phase);
            if round % 4 == 3 {
                steps.drop_arrival(arrival);
            } else {
                steps.combine(arrival, form);
            }
        }
        let again = steps.replay(10, 0, Phase::Send);
        steps.combine(again, Form::of(6, &config));
        let name = format!("rounds {traffic:?}");
        let script = Script {
            name,
            world: traffic.world(),
            config,
            batches,
            steps: steps.steps,
            rows: Rows::BySlot,
            specials: false,
            delays: false,
        };
        scripts.push(if i % 4 == 0 { script } else { low_latency(script) });
    }
    scripts
}

/// Sums without anything added or folded.
fn plain() -> Tuning {
    Tuning { sums: Sums { plain: true, unfolded: true, ..Sums::NONE }, ..Tuning::default() }
}

/// Numbers, traffics and configurations of identity experts.
fn identity_shapes(layout: Layout, is_gpu: bool) -> Vec<(usize, Traffic, Config)> {
    let mut shapes = Vec::new();
    for (r, reduce) in REDUCES.into_iter().enumerate() {
        let part = Part::of(is_gpu, 5, r + 2 * usize::from(layout == LAYOUTS[1]));
        for (i, traffic) in traffics().into_iter().enumerate().filter(|(i, _)| part.takes(*i)) {
            let config = Config { weighted: true, reduce, ..traffic.config(64, DType::F32, layout) };
            shapes.push((i, traffic, config));
        }
    }
    shapes
}

/// Experts that give back what they get: the weighted combine is the sum of weights times x. Small integers, so every order gives these bits.
fn identity_experts(backend: &Backend, layout: Layout) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for (i, traffic, config) in identity_shapes(layout, ep::is_gpu(backend)) {
        let reduce = config.reduce;
        let mut ranks = draw(&config, &Draw { seed: 7, tokens: traffic.tokens.clone(), ids: traffic.ids, weights: true, specials: false });
        for (rank, tokens) in ranks.iter_mut().enumerate() {
            let mut random = SplitMix64::stream(rank as u64, i as u64);
            let mut small = |low: i64, n: u64| (low + random.below(n) as i64) as f32;
            tokens.x = (0..tokens.num_tokens * config.hidden).flat_map(|_| small(-8, 17).to_le_bytes()).collect();
            tokens.topk_weights = Some((0..tokens.num_tokens * config.k).map(|_| small(-3, 7) / 4.0).collect());
        }
        let want: Vec<Vec<u8>> = ranks.iter().map(|tokens| weighted_sums(&config, tokens)).collect();
        let mut steps = Steps::default();
        let arrival = steps.dispatch(0, 0, Phase::Both);
        steps.combine(arrival, Form::of(2 * i, &config));
        let (ids, count) = (DType::I64, Count::All);
        let name = format!("identity experts {reduce:?} {traffic:?}");
        let batches = vec![Batch { ranks, ids, count, padded: false }];
        // No add_to: it would be part of the sum.
        let steps = steps.steps.into_iter().map(|step| match step {
            ep::Step::Combine { arrival, in_place, fold, phase, .. } => ep::Step::Combine { arrival, in_place, add_to: None, fold, phase },
            other => other,
        });
        let (world, steps) = (traffic.world(), steps.collect());
        let script = Script { name, world, config: config.clone(), batches, steps, rows: Rows::Received, specials: false, delays: false };
        let report = script.prepare()?.run(&variants[i % variants.len()].1)?;
        for (rank, (got, want)) in report.out.iter().zip(&want).enumerate() {
            let shape = [traffic.tokens[rank], config.hidden];
            let what = format!("sum of weights times x of rank {rank}, {reduce:?} {traffic:?}");
            // A first term of -0 stays; the signs of zeros are the oracle's matter.
            let got: Vec<u8> = float::values(DType::F32, got).into_iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect();
            compare::equal(&what, DType::F32, &shape, &got, want)?;
        }
        num_cases += 1;
    }
    Ok(num_cases)
}

/// In f64, in the order of the routes.
fn weighted_sums(config: &Config, tokens: &Tokens) -> Vec<u8> {
    let x = float::values(DType::F32, &tokens.x);
    let weights = tokens.topk_weights.clone().unwrap_or_default();
    let mut out = Vec::new();
    for token in 0..tokens.num_tokens {
        let mut seen = HashSet::new();
        let routes = tokens.topk_idx.iter().zip(&weights).skip(token * config.k).take(config.k);
        let unmasked: Vec<f32> =
            routes.filter(|(id, _)| (0..config.num_experts as i64).contains(*id) && seen.insert(**id)).map(|(_, &w)| w).collect();
        for h in 0..config.hidden {
            let x = x[token * config.hidden + h] as f64;
            let sum = unmasked.iter().map(|&w| w as f64 * x).fold(0.0, |a, b| a + b);
            out.extend((sum as f32 + 0.0).to_le_bytes());
        }
    }
    out
}

/// Of the same tokens.
const WORLDS: [usize; 4] = [1, 2, 4, 8];

/// The configurations that must not depend on the world, with a number each: every wire with every type, in both layouts; on a GPU in one.
fn world_shapes(is_gpu: bool) -> Vec<(usize, Config)> {
    let layouts = [LAYOUTS[1], Layout::ByExpertFixed { rows_per_expert: 40 }]; // 40: all tokens
    let mut shapes = Vec::new();
    for (l, layout) in layouts.into_iter().enumerate() {
        for (w, wire) in WIRES.into_iter().enumerate() {
            for (d, dtype) in FLOATS.into_iter().enumerate().filter(|(d, _)| Part::of(is_gpu, 2, w + l).takes(*d)) {
                let weighted = (w + d) % 2 == 0;
                let base = Config::new(144, DType::F32, 60, 8, 40);
                shapes.push((w + d, Config { layout, combine_dtype: dtype, wire, reduce: Reduce::AtSource, weighted, ..base }));
            }
        }
    }
    shapes
}

/// `ByExpert` + `AtSource`: the same global tokens on 1, 2, 4 and 8 ranks give the same bytes.
fn independent_of_the_world(backend: &Backend) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for (at, config) in world_shapes(ep::is_gpu(backend)) {
        let Config { layout, wire, combine_dtype: dtype, weighted, .. } = config;
        let all = draw(&config, &Draw { seed: 5, tokens: vec![40], ids: Ids::Messy, weights: true, specials: false });
        let mut first: Option<Vec<u8>> = None;
        for (i, world) in WORLDS.into_iter().enumerate() {
            let script = split_script(&config, &all[0], world);
            let report = script.prepare()?.run(&variants[(at + i) % variants.len()].1)?;
            let out = report.out.concat();
            let shape = [40, config.hidden];
            let what = format!("world {world} against world 1, {layout:?} {wire:?} {dtype} weighted {weighted}");
            compare::equal(&what, dtype, &shape, &out, first.get_or_insert_with(|| out.clone()))?;
            num_cases += 1;
        }
    }
    Ok(num_cases)
}

/// The tokens of one rank spread over `world` ranks, unevenly, in order.
fn split_script(config: &Config, all: &Tokens, world: usize) -> Script {
    let mut first = Vec::new();
    let mut ranks = Vec::new();
    let mut at = 0;
    for rank in 0..world {
        let rest = all.num_tokens - at;
        let num_tokens = if rank + 1 == world { rest } else { (all.num_tokens / world + 3 * (rank % 2)).min(rest) }; // 3: arbitrary, uneven
        let (row, k) = (config.hidden * config.dtype.size(), config.k);
        let weights = all.topk_weights.as_ref().map(|w| w[at * k..][..num_tokens * k].to_vec());
        ranks.push(Tokens {
            num_tokens,
            x: all.x[at * row..][..num_tokens * row].to_vec(),
            topk_idx: all.topk_idx[at * k..][..num_tokens * k].to_vec(),
            topk_weights: weights,
            scales: Vec::new(),
        });
        first.push(at);
        at += num_tokens;
    }
    let mut steps = Steps::default();
    let arrival = steps.dispatch(0, 0, Phase::Both);
    steps.combine(arrival, Form { in_place: world.is_multiple_of(4), add_to: None, fold: false, phase: Phase::Both });
    Script {
        name: format!("world {world} of the same tokens"),
        world,
        config: Config { id_space: IdSpace::Global, ..config.clone() },
        batches: vec![Batch { ranks, ids: DType::I32, count: Count::All, padded: false }],
        steps: steps.steps,
        rows: Rows::ByGlobalToken(first),
        specials: false,
        delays: false,
    }
}

fn large_scripts() -> Vec<Script> {
    let traffic = Traffic { tokens: vec![4, 3, 0, 5], k: 8, num_experts: 256, map: None, ids: Ids::Distinct };
    let of = |layout, wire, reduce, i| {
        let base = traffic.config(7168, DType::BF16, layout);
        combine_script("large", Config { wire, reduce, weighted: layout.is_by_expert(), ..base }, &traffic, i)
    };
    vec![
        of(Layout::ByToken, Wire::AsIs, Reduce::AtRank, 0),
        of(Layout::ByToken, Wire::Fp8Block, Reduce::AtRank, 2),
        of(LAYOUTS[1], Wire::AsIs, Reduce::AtSource, 3),
        of(LAYOUTS[2], Wire::Fp8Direct, Reduce::AtRank, 5),
    ]
}

/// Forms of combine that tools look at which make kernels slow.
const SANITIZED: [&str; 3] = ["by token", "by expert, scaled", "by expert, at source"];

/// All of them, between processes.
pub(super) fn sanitizer_scripts() -> Vec<Script> {
    SANITIZED.into_iter().map(sanitizer_script).collect()
}

/// One of them once, small.
fn sanitizer_script(form: &str) -> Script {
    let name = format!("combine under a sanitizer, {form}");
    let traffic = Traffic { tokens: vec![5, 3], k: 3, num_experts: 8, map: None, ids: Ids::Messy };
    let of = |layout: Layout, wire, reduce, i| {
        let base = traffic.config(144, DType::BF16, layout);
        combine_script(&name, Config { wire, reduce, weighted: layout.is_by_expert(), fold_weights: true, ..base }, &traffic, i)
    };
    match form {
        "by token" => of(Layout::ByToken, Wire::AsIs, Reduce::AtRank, 0),
        "by expert, scaled" => of(LAYOUTS[1], Wire::Fp8Block, Reduce::AtRank, 1),
        _ => of(LAYOUTS[1], Wire::AsIs, Reduce::AtSource, 6),
    }
}
