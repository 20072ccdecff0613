//! Checks of the MoE block: experts against the oracle to the bit, whole blocks over worlds, layouts and reductions.

use std::sync::Arc;

use crate::backend::Backend;
use crate::check::guarded::Guarded;
use crate::check::{Failed, Group, variants};
use crate::cpu::gemm;
use crate::ensure;
use crate::ep::{Layout, Reduce, Wire, World};
use crate::id::Expert;
use crate::layer::experts::{Rows, Scratch, Selection, TILE_ROWS, tiles};
use crate::layer::{Block, BlockConfig, CommonWeights, ExpertWeights, Report, RouteSource, Shape, Verifier, tokens_from_seed};
use crate::ops::gate::Rounding;
use crate::oracle::layer::{self as oracle, Sums};
use crate::oracle::{compare, float};
use crate::random::SplitMix64;
use crate::routing::{Family, Groups, KeptInF32, RouterConfig, Routes};
use crate::tensor::{DType, TensorView, TensorViewMut};

const OP: &str = "layer";
const SEED: u64 = 20261130; // arbitrary

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = vec![
        Group::new(OP, "an expert's rows are the oracle's", expert_rows),
        Group::new(OP, "a row's bits do not depend on the rows beside it", independent_rows),
        Group::new(OP, "worlds agree with ByExpert and AtSource", worlds_agree),
        Group::new(OP, "layouts agree", layouts_agree),
        Group::new(OP, "the routed sum is that of a layer without shared expert", routed_alone),
    ];
    let layouts = [
        ("ByToken", Layout::ByToken),
        ("ByExpert", Layout::ByExpert { segment_align: 4 }),
        ("ByExpertFixed", Layout::ByExpertFixed { rows_per_expert: 8 * MAX_TOKENS }),
    ];
    for (name, layout) in layouts {
        for world in [1, 2, 4, 8] {
            groups.push(Group::new(OP, format!("block {name}, world of {world}"), move |backend| blocks(backend, layout, world)));
        }
    }
    groups
}

fn softmax(num_experts: usize, k: usize) -> RouterConfig {
    RouterConfig::new(num_experts, k, Family::Softmax { renormalize: true })
}

const ROUNDINGS: [Rounding; 2] = [Rounding::Fused, Rounding::Framework];

/// An expert's rows, computed as the block does, with weights if there are any.
fn rows_of(
    backend: &Backend,
    weights: &ExpertWeights,
    (dtype, rounding): (DType, Rounding),
    x: &[u8],
    num_rows: usize,
    factors: Option<&[f32]>,
) -> Result<Guarded, Failed> {
    let cpu = backend.as_cpu("layer")?;
    let hidden = x.len() / num_rows / dtype.size();
    let row_bytes = hidden * dtype.size();
    let mut out = Guarded::new(num_rows * row_bytes);
    let mut scratch = Scratch::default();
    let mlp = weights.get(Expert(1)).ok_or_else(|| Failed("expert 1 was not made".into()))?;
    for tile in tiles(num_rows) {
        let rows = Rows { bytes: x, dtype, stride_bytes: row_bytes };
        scratch.load(cpu, rows, Selection::From(0), tile.clone(), hidden);
        scratch.mlp(cpu, mlp, dtype, rounding);
        let out = &mut out.bytes_mut()[tile.start * row_bytes..tile.end * row_bytes];
        scratch.store(cpu, hidden, dtype, factors.map(|f| &f[tile]), out);
    }
    out.check("expert rows")?;
    Ok(out)
}

fn expert_rows(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    // Widths around a scale block, a patch of columns and a block of the sum; 1032 = 3 blocks of 344, whose starts are inside scale blocks.
    for (hidden, width) in [(64, 8), (136, 72), (520, 264), (1032, 136)] {
        let shape = Shape { hidden, expert_width: width, shared_width: 0, shared_gate: false, router: softmax(2, 1) };
        for (dtype, weight_dtype) in [
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::F32, DType::F32),
            (DType::BF16, DType::E4M3),
            (DType::F32, DType::BF16),
        ] {
            let weights = ExpertWeights::from_seed(backend, &shape, weight_dtype, SEED, &[Expert(1)])?;
            let x = tokens_from_seed(backend, hidden, dtype, SEED, 0, 3)?;
            let mlp = weights.get(Expert(1)).ok_or_else(|| Failed("expert 1 was not made".into()))?;
            let rows: Vec<_> = x.chunks_exact(hidden * dtype.size()).map(|x| float::values(dtype, x)).collect();
            let factors = [0.3, -1.0, 1e-3];
            for (rounding, has_factors) in [(Rounding::Fused, false), (Rounding::Framework, false), (Rounding::Framework, true)] {
                let mut want = Vec::new();
                for (x, factor) in rows.iter().zip(factors) {
                    let row = oracle::expert(Sums::Blocks, rounding, mlp, dtype, x);
                    if has_factors {
                        float::values(dtype, &row).iter().for_each(|&v| float::push(dtype, factor * v, &mut want));
                    } else {
                        want.extend(row);
                    }
                }
                for (name, backend) in variants(backend)? {
                    let got = rows_of(&backend, &weights, (dtype, rounding), &x, 3, has_factors.then_some(&factors))?;
                    let what = format!("{hidden} x {width}, {dtype} tokens, {weight_dtype} weights, {rounding:?}, {name}");
                    if gemm::is_fused() {
                        compare::equal(&what, dtype, &[3, hidden], got.bytes(), &want)?;
                    }
                    num_cases += 1;
                }
            }
        }
    }
    Ok(num_cases)
}

fn independent_rows(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    // 64 and fewer output elements are where the products' crate would choose other kernels and blocks.
    for (hidden, width) in [(64, 40), (600, 136)] {
        let shape = Shape { hidden, expert_width: width, shared_width: 0, shared_gate: false, router: softmax(2, 1) };
        let weights = ExpertWeights::from_seed(backend, &shape, DType::BF16, SEED, &[Expert(1)])?;
        let most = TILE_ROWS + 8;
        let row_bytes = hidden * 4;
        let x = tokens_from_seed(backend, hidden, DType::F32, SEED, 0, most)?;
        let all = rows_of(backend, &weights, (DType::F32, Rounding::Fused), &x, most, None)?;
        for (name, backend) in variants(backend)? {
            for num_rows in [1, 2, 3, 7, 8, 63, 64, 65, 200, TILE_ROWS, TILE_ROWS + 1] {
                for first in [0, 5, most - num_rows].into_iter().filter(|first| first + num_rows <= most) {
                    let part = first * row_bytes..(first + num_rows) * row_bytes;
                    let got = rows_of(&backend, &weights, (DType::F32, Rounding::Fused), &x[part.clone()], num_rows, None)?;
                    let what = format!("{hidden} x {width}, {num_rows} rows from {first}, {name}");
                    compare::equal(&what, DType::F32, &[num_rows, hidden], got.bytes(), &all.bytes()[part])?;
                    num_cases += 1;
                }
            }
        }
    }
    Ok(num_cases)
}

/// Most tokens of a rank in these checks.
const MAX_TOKENS: usize = 12;

/// What one rank had and got.
struct RankRun {
    x: Vec<u8>,
    routes: Routes,
    logits: Vec<f32>,
    out: Vec<u8>,
    report: Report,
}

/// One run of a block over a world.
struct Run {
    ranks: Vec<RankRun>,
    common: Arc<CommonWeights>,
    experts: Vec<ExpertWeights>,
}

/// `counts`: tokens of each rank. Tokens are numbered over all ranks, so that worlds see the same batch. `given`: routes of all tokens; without, the
/// router chooses.
fn run(backend: &Backend, config: &BlockConfig, counts: &[usize], given: Option<&Routes>) -> Result<Run, Failed> {
    let (world_size, shape) = (counts.len(), &config.shape);
    let placement = config.ep().placement(world_size)?;
    let common = Arc::new(CommonWeights::from_seed(backend, shape, config.weight_dtype, SEED)?);
    let ranks = World::run(backend, world_size, |world| {
        let rank = world.rank().index();
        let (first, num_tokens) = (counts[..rank].iter().sum::<usize>(), counts[rank]);
        let experts = placement.experts_of(world.rank());
        let experts = Arc::new(ExpertWeights::from_seed(backend, shape, config.weight_dtype, SEED, experts)?);
        let mut block = Block::new(&world, config.clone(), common.clone(), experts)?;
        let x = tokens_from_seed(backend, shape.hidden, config.dtype, SEED, first, num_tokens)?;
        let routes = given.map(|all| {
            let range = first * all.k..(first + num_tokens) * all.k;
            let (topk_idx, topk_weights) = (all.topk_idx[range.clone()].to_vec(), all.topk_weights[range].to_vec());
            Routes { topk_idx, topk_weights, num_tokens, k: all.k }
        });
        let source = routes.as_ref().map_or(RouteSource::Router, RouteSource::Given);
        let dims = [num_tokens, shape.hidden];
        let view = TensorView::from_bytes(&x, config.dtype, &dims)?;
        let mut out = Guarded::new(x.len());
        // Twice: the second call finds every buffer used.
        for _ in 0..2 {
            out.poison();
            block.forward(&view, source, TensorViewMut::from_bytes(out.bytes_mut(), config.dtype, &dims)?)?;
        }
        let report = block.forward(&view, source, TensorViewMut::from_bytes(out.bytes_mut(), config.dtype, &dims)?)?;
        Ok((x, block.routes().clone(), block.logits().to_vec(), out, report))
    })?;
    let mut all = Vec::new();
    for rank in ranks {
        let (x, routes, logits, out, report) = rank?;
        out.check("result of a block")?;
        all.push(RankRun { x, routes, logits, out: out.bytes().to_vec(), report });
    }
    let mut experts = Vec::new();
    for rank in 0..world_size {
        let ids = placement.experts_of(crate::id::Rank(rank as u32));
        experts.push(ExpertWeights::from_seed(backend, shape, config.weight_dtype, SEED, ids)?);
    }
    Ok(Run { ranks: all, common, experts })
}

/// Every token against the oracle, every count against the routes.
fn check_run(backend: &Backend, config: &BlockConfig, run: &Run, what: &str) -> Result<usize, Failed> {
    let verifier = Verifier::new(backend, config, &run.common, &run.experts)?;
    let row_bytes = config.shape.hidden * config.dtype.size();
    let mut num_tokens = 0;
    for (rank, RankRun { x, routes, out, .. }) in run.ranks.iter().enumerate() {
        for (token, (x, got)) in x.chunks_exact(row_bytes).zip(out.chunks_exact(row_bytes)).enumerate() {
            let what = format!("{what}: token {token} of rank {rank}");
            let (ids, weights) = (routes.idx_of(token), routes.weights_of(token));
            let found = verifier.token(x, ids, weights, got)?;
            ensure!(found.is_equal, "{what}: {}", found.difference.unwrap_or_default());
            ensure!(found.is_right(), "{what}: error {} against the f64 oracle, at most {}", found.error, found.bound);
            if gemm::is_fused() {
                let kept = oracle::routes(config.shape.router.num_experts, ids, weights);
                let want = verifier.oracle(Sums::Blocks, x, &kept)?;
                compare::equal(&what, config.dtype, &[config.shape.hidden], got, &want)?;
            }
            num_tokens += 1;
        }
    }
    let want = verifier.num_rows_per_expert(run.ranks.iter().map(|r| &r.routes));
    let got: Vec<u32> = run.ranks.iter().flat_map(|r| r.report.num_rows_per_expert.iter().copied()).collect();
    ensure!(got == want, "{what}: rows per expert {got:?}, the routes say {want:?}");
    Ok(num_tokens)
}

/// Random routes with what models never have: masked, duplicate and out-of-range ids, and a token without any.
fn odd_routes(num_tokens: usize, num_experts: usize, k: usize) -> Routes {
    let mut random = SplitMix64::new(SEED);
    let mut routes = Routes::masked(num_tokens, k);
    for id in &mut routes.topk_idx[k.min(num_tokens * k)..] {
        *id = random.below(num_experts as u64 + 2) as i32 - 1;
    }
    routes.topk_weights.iter_mut().for_each(|w| *w = random.next_f32());
    routes
}

/// Tokens of each rank: different, the second rank has none.
fn counts(world: usize) -> Vec<usize> {
    (0..world).map(|rank| if rank == 1 { 0 } else { MAX_TOKENS - 3 * (rank % 4) }).collect()
}

fn blocks(backend: &Backend, layout: Layout, world: usize) -> Result<usize, Failed> {
    let v3 = Family::DeepSeekV3 { groups: Groups { num_groups: 4, topk_groups: 2 }, renormalize: true, scale: 2.5 };
    let qwen = Shape { hidden: 64, expert_width: 40, shared_width: 72, shared_gate: true, router: softmax(9, 3) };
    let mixtral = Shape { router: RouterConfig { kept_in_f32: KeptInF32::Weights, ..qwen.router }, ..qwen };
    let plain = Shape { hidden: 128, expert_width: 24, shared_width: 0, shared_gate: false, router: softmax(16, 4) };
    let deepseek = Shape { hidden: 136, expert_width: 136, shared_width: 16, shared_gate: false, router: RouterConfig::new(16, 4, v3) };
    let mut num_tokens = 0;
    let mut check = |config: &BlockConfig, is_odd: bool| -> Result<(), Failed> {
        let counts = counts(world);
        let routes = odd_routes(counts.iter().sum(), config.shape.router.num_experts, config.shape.router.k);
        let what =
            format!("{:?}, {} tokens, {} weights, {layout:?}, {:?}", config.rounding, config.dtype, config.weight_dtype, config.reduce);
        let what = format!("{what}, {:?}, {:?}", config.wire, config.shape.router.kept_in_f32);
        let run = run(backend, config, &counts, is_odd.then_some(&routes))?;
        num_tokens += check_run(backend, config, &run, &what)?;
        if !is_odd && gemm::is_fused() {
            check_routes(config, &run)?;
        }
        Ok(())
    };
    let reduces: &[Reduce] = match layout.is_by_expert() {
        true => &[Reduce::AtRank, Reduce::AtRankF32, Reduce::AtSource],
        false => &[Reduce::AtRank],
    };
    for &reduce in reduces {
        let config = |shape, dtype| BlockConfig { layout, reduce, ..BlockConfig::new(shape, dtype, MAX_TOKENS) };
        check(&config(qwen, DType::BF16), false)?;
        check(&config(plain, DType::F32), true)?;
        check(&BlockConfig { weight_dtype: DType::E4M3, ..config(deepseek, DType::BF16) }, false)?;
        let framework = |shape, dtype| BlockConfig { rounding: Rounding::Framework, ..config(shape, dtype) };
        check(&framework(qwen, DType::BF16), false)?;
        check(&framework(qwen, DType::BF16), true)?;
        check(&framework(mixtral, DType::F16), true)?;
        check(&framework(mixtral, DType::BF16), false)?;
        check(&framework(deepseek, DType::BF16), false)?;
        check(&framework(plain, DType::F32), false)?;
    }
    let f16 = BlockConfig { layout, weight_dtype: DType::BF16, ..BlockConfig::new(plain, DType::F16, MAX_TOKENS) };
    check(&f16, false)?;
    check(&BlockConfig { rounding: Rounding::Framework, wire: Wire::Fp8Block, ..f16.clone() }, true)?;
    check(&BlockConfig { wire: Wire::Fp8Block, ..f16 }, true)?;
    Ok(num_tokens)
}

/// The router's choice, from logits that the oracle sums in the stated order.
fn check_routes(config: &BlockConfig, run: &Run) -> Result<(), Failed> {
    let row_bytes = config.shape.hidden * config.dtype.size();
    let num_experts = config.shape.router.num_experts;
    for RankRun { x, routes, logits: got_logits, .. } in &run.ranks {
        ensure!(got_logits.len() == routes.num_tokens * num_experts, "{} logits of {} tokens", got_logits.len(), routes.num_tokens);
        for (token, x) in x.chunks_exact(row_bytes).enumerate() {
            let (ids, weights, logits) = oracle::route(Sums::Blocks, config, &run.common, &float::values(config.dtype, x));
            let got = &got_logits[token * num_experts..][..num_experts];
            ensure!(got == logits, "token {token}: logits {got:?}, the oracle's {logits:?}");
            ensure!(routes.idx_of(token) == ids, "token {token}: experts {:?}, the oracle's {ids:?}", routes.idx_of(token));
            let [got, want] = [routes.weights_of(token), &weights].map(|w| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>());
            ensure!(got == want, "token {token}: weights {:?}, the oracle's {weights:?}", routes.weights_of(token));
        }
    }
    Ok(())
}

/// One batch of tokens, over all ranks.
fn results(backend: &Backend, config: &BlockConfig, world: usize) -> Result<Vec<u8>, Failed> {
    let counts: Vec<usize> = (0..world).map(|rank| MAX_TOKENS / world + usize::from(rank < MAX_TOKENS % world)).collect();
    Ok(run(backend, config, &counts, None)?.ranks.into_iter().flat_map(|rank| rank.out).collect())
}

fn worlds_agree(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    let shape = Shape { hidden: 72, expert_width: 48, shared_width: 24, shared_gate: true, router: softmax(12, 5) };
    let (qwen, mixtral) = (KeptInF32::Nothing, KeptInF32::Weights);
    for (dtype, rounding, kept_in_f32) in [
        (DType::BF16, Rounding::Fused, qwen),
        (DType::F32, Rounding::Fused, qwen),
        (DType::BF16, Rounding::Framework, qwen),
        (DType::BF16, Rounding::Framework, mixtral),
    ] {
        let shape = Shape { router: RouterConfig { kept_in_f32, ..shape.router }, ..shape };
        let by_expert = Layout::ByExpert { segment_align: 1 };
        let config = BlockConfig { layout: by_expert, reduce: Reduce::AtSource, rounding, ..BlockConfig::new(shape, dtype, MAX_TOKENS) };
        let want = results(backend, &config, 1)?;
        for world in [2, 3, 4, 8] {
            let got = results(backend, &config, world)?;
            compare::equal(
                &format!("{dtype}, {rounding:?}, {kept_in_f32:?}, world of {world}"),
                dtype,
                &[MAX_TOKENS, shape.hidden],
                &got,
                &want,
            )?;
            num_cases += 1;
        }
    }
    Ok(num_cases)
}

fn layouts_agree(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    let shape = Shape { hidden: 72, expert_width: 48, shared_width: 24, shared_gate: true, router: softmax(12, 5) };
    for (world, rounding) in [1, 3, 4].into_iter().flat_map(|world| ROUNDINGS.map(|rounding| (world, rounding))) {
        let config = BlockConfig { rounding, ..BlockConfig::new(shape, DType::BF16, MAX_TOKENS) };
        let want = results(backend, &config, world)?;
        for layout in [Layout::ByExpert { segment_align: 16 }, Layout::ByExpertFixed { rows_per_expert: MAX_TOKENS }] {
            let got = results(backend, &BlockConfig { layout, ..config.clone() }, world)?;
            compare::equal(&format!("{layout:?}, {rounding:?}, world of {world}"), DType::BF16, &[MAX_TOKENS, shape.hidden], &got, &want)?;
            num_cases += 1;
        }
    }
    Ok(num_cases)
}

/// The shared expert's weights are made of streams of their own, so that a layer without it has the same others.
fn routed_alone(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    let shape = Shape { hidden: 72, expert_width: 48, shared_width: 24, shared_gate: true, router: softmax(12, 5) };
    let ids: Vec<_> = (0..12).map(Expert).collect();
    let dims = [MAX_TOKENS, shape.hidden];
    let x = tokens_from_seed(backend, shape.hidden, DType::BF16, SEED, 0, MAX_TOKENS)?;
    for rounding in ROUNDINGS {
        let run = |shape: Shape, routed_only: bool| -> Result<Guarded, Failed> {
            let world = World::threads(backend, 1)?.remove(0);
            let common = Arc::new(CommonWeights::from_seed(backend, &shape, DType::BF16, SEED)?);
            let experts = Arc::new(ExpertWeights::from_seed(backend, &shape, DType::BF16, SEED, &ids)?);
            let config = BlockConfig { rounding, ..BlockConfig::new(shape, DType::BF16, MAX_TOKENS) };
            let mut block = Block::new(&world, config, common, experts)?;
            let mut out = Guarded::new(x.len());
            let x = TensorView::from_bytes(&x, DType::BF16, &dims)?;
            let view = TensorViewMut::from_bytes(out.bytes_mut(), DType::BF16, &dims)?;
            match routed_only {
                true => block.forward_routed(&x, RouteSource::Router, view)?,
                false => block.forward(&x, RouteSource::Router, view)?,
            };
            out.check("result of a block")?;
            Ok(out)
        };
        let without = run(Shape { shared_width: 0, shared_gate: false, ..shape }, false)?;
        let (routed, whole) = (run(shape, true)?, run(shape, false)?);
        compare::equal(&format!("{rounding:?}"), DType::BF16, &dims, routed.bytes(), without.bytes())?;
        ensure!(whole.bytes() != routed.bytes(), "{rounding:?}: the shared expert adds nothing");
        num_cases += 1;
    }
    Ok(num_cases)
}
