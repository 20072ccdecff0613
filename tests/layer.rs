//! Tests of the MoE block beyond the shared checks.

use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::{Layout, World};
use moe_kernels::layer::{
    Block, BlockConfig, CommonWeights, ExpertWeights, Memory, PRESETS, Preset, RouteSource, Shape, Verifier, tokens_from_seed,
};
use moe_kernels::routing::{Family, RouterConfig, Routes};
use moe_kernels::tensor::{Layout as Strides, TensorView, TensorViewMut};
use moe_kernels::{Backend, Cpu, DType, Error, Expert};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("layer::presets have the sizes of their models", preset_sizes),
        Trial::test("layer::preset names", preset_names),
        Trial::test("layer::weights depend on seed and id only", weights_by_seed),
        Trial::test("layer::weights have variance 1 / columns", weights_variance),
        Trial::test("layer::fp8 weights are near the others", fp8_weights),
        Trial::test("layer::size of weights is as computed", weight_sizes),
        Trial::test("layer::memory errors say what to change", memory),
        Trial::test("layer::bad input names the argument", bad_input),
        Trial::test("layer::strided tokens", strided),
        Trial::test("layer::the verifier finds one wrong bit and wrong counts", verifier),
        Trial::test("layer::too few rows per expert fail on every rank", capacity),
    ]
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

fn shape(num_experts: usize, k: usize) -> Shape {
    let router = RouterConfig::new(num_experts, k, Family::Softmax { renormalize: true });
    Shape { hidden: 64, expert_width: 40, shared_width: 24, shared_gate: true, router }
}

fn preset_sizes() -> Result<(), Failed> {
    let gib = |bytes: u64| format!("{:.2}", bytes as f64 / (1u64 << 30) as f64);
    let want = ["1.03", "0.75", "1.13", "1.51", "2.63", "3.01", "4.50", "21.09"];
    for (preset, want) in PRESETS.iter().zip(want) {
        preset.shape.check()?;
        let got = gib(preset.shape.layer_bytes(DType::BF16));
        ensure(got == want, || format!("{}: {got} GiB, expected {want}", preset.name))?;
    }
    let fp8 = gib(Preset::named("DeepSeek-V3")?.shape.layer_bytes(DType::E4M3));
    ensure(fp8 == "10.55", || format!("DeepSeek-V3 in fp8: {fp8} GiB"))
}

fn preset_names() -> Result<(), Failed> {
    ensure(Preset::default().name == "Qwen1.5-MoE-A2.7B", || "another default".into())?;
    for preset in PRESETS {
        for name in [preset.name.to_string(), preset.name.to_lowercase(), preset.name.to_uppercase()] {
            ensure(Preset::named(&name)? == preset, || format!("{name} is another preset"))?;
        }
    }
    let Err(Error::Invalid { want, .. }) = Preset::named("Qwen") else { return Err("an unknown name was found".into()) };
    ensure(PRESETS.iter().all(|p| want.contains(p.name)), || format!("not all names in: {want}"))
}

fn weights_by_seed() -> Result<(), Failed> {
    let shape = shape(8, 2);
    let ids: Vec<_> = [1, 3, 6].map(Expert).to_vec();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::E4M3] {
        let make = |backend: &Backend, seed, ids: &[Expert]| ExpertWeights::from_seed(backend, &shape, dtype, seed, ids);
        let first = make(&Backend::cpu(), 5, &ids)?;
        for threads in [1, 3] {
            let backend = Backend::Cpu(Cpu::with_threads(threads)?);
            ensure(make(&backend, 5, &ids)? == first, || format!("{dtype}, {threads} threads: other weights"))?;
            let alone = make(&backend, 5, &ids[1..2])?;
            ensure(alone.get(Expert(3)) == first.get(Expert(3)), || format!("{dtype}: expert 3 alone is another"))?;
        }
        ensure(make(&Backend::cpu(), 6, &ids)?.get(Expert(1)) != first.get(Expert(1)), || "another seed, the same weights".into())?;
        ensure(first.get(Expert(1)) != first.get(Expert(3)), || "two experts are the same".into())?;
        let mlp = first.get(Expert(1)).ok_or("expert 1 was not made")?;
        ensure(mlp.gate != mlp.up, || "gate and up are the same".into())?;
        let common = |seed| CommonWeights::from_seed(&Backend::cpu(), &shape, dtype, seed);
        ensure(common(5)? == common(5)? && common(5)? != common(6)?, || format!("{dtype}: common weights and seeds"))?;
    }
    let all = tokens_from_seed(&Backend::cpu(), 64, DType::BF16, 5, 0, 10)?;
    let some = tokens_from_seed(&Backend::cpu(), 64, DType::BF16, 5, 4, 3)?;
    ensure(all[4 * 128..7 * 128] == some[..], || "tokens depend on where the batch begins".into())
}

/// Elements of an f32 matrix.
fn values(matrix: &moe_kernels::layer::Matrix) -> Vec<f64> {
    matrix.bytes().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect()
}

fn weights_variance() -> Result<(), Failed> {
    let shape = Shape { hidden: 256, expert_width: 512, ..shape(4, 1) };
    let weights = ExpertWeights::from_seed(&Backend::cpu(), &shape, DType::F32, 1, &[Expert(0)])?;
    let mlp = weights.get(Expert(0)).ok_or("expert 0 was not made")?;
    for matrix in [&mlp.gate, &mlp.up, &mlp.down] {
        let values = values(matrix);
        let n = values.len() as f64;
        let (mean, square) = (values.iter().sum::<f64>() / n, values.iter().map(|v| v * v).sum::<f64>() / n);
        let want = 1.0 / matrix.shape()[1] as f64;
        // 131072 values: the mean has a standard error of 0.0028 standard deviations, the variance of about 0.0025 of itself; 5 of each.
        ensure(mean.abs() < 0.014 * want.sqrt(), || format!("mean {mean}"))?;
        ensure((square / want - 1.0).abs() < 0.0125, || format!("variance {square}, expected {want}"))?;
    }
    Ok(())
}

fn fp8_weights() -> Result<(), Failed> {
    let shape = Shape { hidden: 264, expert_width: 136, ..shape(4, 1) };
    let make = |dtype| ExpertWeights::from_seed(&Backend::cpu(), &shape, dtype, 1, &[Expert(2)]);
    let (exact, fp8) = (make(DType::F32)?, make(DType::E4M3)?);
    let (exact, fp8) = (exact.get(Expert(2)).ok_or("no expert")?, fp8.get(Expert(2)).ok_or("no expert")?);
    for (exact, fp8) in [(&exact.gate, &fp8.gate), (&exact.down, &fp8.down)] {
        let [rows, cols] = exact.shape();
        let scales_per_row = cols.div_ceil(128);
        ensure(fp8.scales().len() == rows.div_ceil(128) * scales_per_row, || format!("{} scales", fp8.scales().len()))?;
        for (i, want) in values(exact).into_iter().enumerate() {
            let scale = fp8.scales()[i / cols / 128 * scales_per_row + i % cols / 128] as f64;
            let q = moe_kernels::oracle::float::widen(DType::E4M3, fp8.bytes()[i] as u32) as f64;
            // Half a unit of 3 mantissa bits, or half the smallest step, and a little for the rounding of the scaling.
            let bound = (want.abs() / 16.0).max(scale / 1024.0) * 1.0001;
            ensure((q * scale - want).abs() <= bound, || format!("element {i}: {want} became {}", q * scale))?;
        }
    }
    Ok(())
}

fn weight_sizes() -> Result<(), Failed> {
    let v3 = Preset::named("DeepSeek-V3")?.shape.router;
    let small_v3 = Shape { shared_gate: false, router: RouterConfig { num_experts: 16, k: 2, ..v3 }, hidden: 136, ..shape(8, 2) };
    for shape in [shape(8, 2), small_v3] {
        for dtype in [DType::F32, DType::BF16, DType::E4M3] {
            let ids: Vec<_> = (0..shape.router.num_experts as u32).map(Expert).collect();
            let experts = ExpertWeights::from_seed(&Backend::cpu(), &shape, dtype, 1, &ids)?.size_bytes();
            let common = CommonWeights::from_seed(&Backend::cpu(), &shape, dtype, 1)?.size_bytes();
            let want = shape.layer_bytes(dtype);
            ensure(experts + common == want, || format!("{dtype}: {experts} + {common} bytes, computed {want}"))?;
        }
    }
    Ok(())
}

fn memory() -> Result<(), Failed> {
    let config = BlockConfig::new(Preset::named("DeepSeek-V3")?.shape, DType::BF16, 512);
    let memory = Memory::of(&config, 4)?;
    let need = memory.total_bytes();
    memory.check_against(need)?;
    // 20 GiB: too little for 21.1 GiB of weights, enough for 10.5.
    let Err(Error::Memory { need_bytes, have_bytes, change, .. }) = memory.check_against(20 << 30) else {
        return Err("21 GiB fitted into 20".into());
    };
    ensure((need_bytes, have_bytes) == (need, 20 << 30), || format!("{need_bytes} and {have_bytes} bytes"))?;
    ensure(change.contains("--weights fp8") && change.contains("smaller model"), || change.clone())?;
    ensure(!change.contains("fewer tokens"), || format!("fewer tokens do not help: {change}"))?;

    let fp8 = Memory::of(&BlockConfig { weight_dtype: DType::E4M3, ..config.clone() }, 4)?;
    fp8.check_against(20 << 30)?;
    let have = fp8.weight_bytes + (1 << 28);
    let Err(Error::Memory { change, .. }) = fp8.check_against(have) else { return Err("no error".into()) };
    ensure(change.contains("fewer tokens") && !change.contains("fp8"), || change.clone())?;
    let tokens = change.split("about ").nth(1).and_then(|s| s.split(' ').next()).and_then(|n| n.parse().ok());
    let tokens = tokens.ok_or_else(|| format!("no number of tokens in: {change}"))?;
    Memory::of(&BlockConfig { weight_dtype: DType::E4M3, max_tokens: tokens, ..config.clone() }, 4)?.check_against(have + (1 << 28))?;

    let Err(Error::Memory { change, .. }) = fp8.check_against(fp8.weight_bytes + 1) else { return Err("no error".into()) };
    ensure(!change.contains("fewer tokens"), || format!("one byte is left for tokens: {change}"))?;

    let more = Memory::of(&BlockConfig { max_tokens: 1024, ..config.clone() }, 4)?;
    ensure(more.symmetric_bytes > memory.symmetric_bytes && more.weight_bytes == memory.weight_bytes, || "tokens and buffers".into())?;
    ensure(Memory::of(&BlockConfig { max_tokens: 0, ..config }, 4).is_err(), || "no tokens were accepted".into())
}

/// The argument that an error names.
fn argument<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Invalid { what, .. }) => what,
        Err(Error::Setup { error, .. }) => argument::<T>(Err(*error)),
        Err(error) => format!("another error: {error}"),
        Ok(_) => "no error".into(),
    }
}

fn bad_input() -> Result<(), Failed> {
    let backend = Backend::cpu();
    let good = shape(8, 2);
    let shapes = [
        ("hidden", Shape { hidden: 0, ..good }),
        ("hidden", Shape { hidden: 60, ..good }),
        ("hidden", Shape { hidden: usize::MAX, ..good }),
        ("expert_width", Shape { expert_width: 0, ..good }),
        ("expert_width", Shape { expert_width: 12, ..good }),
        ("shared_width", Shape { shared_width: 4, ..good }),
        ("shared_gate", Shape { shared_width: 0, ..good }),
        ("num_experts", shape(1, 1)),
        ("k", shape(8, 9)),
    ];
    for (want, shape) in shapes {
        let config = BlockConfig::new(shape, DType::BF16, 16);
        for got in [
            argument(shape.check()),
            argument(Memory::of(&config, 2)),
            argument(CommonWeights::from_seed(&backend, &shape, DType::BF16, 1)),
            argument(ExpertWeights::from_seed(&backend, &shape, DType::BF16, 1, &[])),
        ] {
            ensure(got == want, || format!("{shape:?}: {got} is named, expected {want}"))?;
        }
    }
    let config = BlockConfig::new(good, DType::BF16, 16);
    let configs = [
        ("dtype", BlockConfig { dtype: DType::E4M3, ..config.clone() }, 2),
        ("weight_dtype", BlockConfig { weight_dtype: DType::E5M2, ..config.clone() }, 2),
        ("max_tokens", BlockConfig { max_tokens: 0, ..config.clone() }, 2),
        ("world", config.clone(), 9),
        ("world", config.clone(), 0),
    ];
    for (want, config, world) in configs {
        let got = argument(Memory::of(&config, world));
        ensure(got == want, || format!("world of {world}, {config:?}: {got} is named, expected {want}"))?;
    }
    let experts = |dtype, ids: &[u32]| {
        let ids: Vec<_> = ids.iter().map(|&e| Expert(e)).collect();
        argument(ExpertWeights::from_seed(&backend, &good, dtype, 1, &ids))
    };
    let got = [experts(DType::I32, &[]), experts(DType::BF16, &[1, 1]), experts(DType::BF16, &[8]), experts(DType::BF16, &[2, 1])];
    ensure(got == ["dtype", "experts", "experts", "experts"], || format!("{got:?}"))?;
    let tokens = |hidden, dtype, num| argument(tokens_from_seed(&backend, hidden, dtype, 1, 0, num));
    let got = [tokens(0, DType::BF16, 1), tokens(12, DType::BF16, 1), tokens(64, DType::U32, 1), tokens(64, DType::F32, usize::MAX)];
    ensure(got == ["hidden", "hidden", "dtype", "num_tokens"], || format!("{got:?}"))?;

    let common = Arc::new(CommonWeights::from_seed(&backend, &good, DType::BF16, 1)?);
    let other = Arc::new(CommonWeights::from_seed(&backend, &Shape { shared_width: 0, shared_gate: false, ..good }, DType::BF16, 1)?);
    let results = World::run(&backend, 2, |world| {
        let ids = |rank: u32| (4 * rank..4 * rank + 4).map(Expert).collect::<Vec<_>>();
        let make = |ids: &[Expert]| ExpertWeights::from_seed(&backend, &good, DType::BF16, 1, ids).map(Arc::new);
        let rank = world.rank().0;
        let mut named = vec![
            argument(Block::new(&world, config.clone(), common.clone(), make(&ids(0))?)),
            argument(Block::new(&world, config.clone(), other.clone(), make(&ids(rank))?)),
        ];
        let mut block = Block::new(&world, config.clone(), common.clone(), make(&ids(rank))?)?;
        let (x, mut out) = (vec![0u8; 17 * 128], vec![0u8; 17 * 128]);
        let routes = Routes::masked(3, 2);
        let wrong = Routes { topk_idx: vec![0; 5], ..Routes::masked(4, 2) };
        for (t, out_t, dtype, routes) in [
            (17, 17, DType::BF16, None),
            (4, 4, DType::F16, None),
            (4, 3, DType::BF16, None),
            (4, 4, DType::BF16, Some(&routes)),
            (4, 4, DType::BF16, Some(&wrong)),
        ] {
            let view = TensorView::from_bytes(&x[..t * 128], dtype, &[t, 64])?;
            let out = TensorViewMut::from_bytes(&mut out[..out_t * 128], DType::BF16, &[out_t, 64])?;
            named.push(argument(block.forward(&view, routes.map_or(RouteSource::Router, RouteSource::Given), out)));
        }
        Ok(named)
    })?;
    for named in results {
        let named = named?;
        ensure(named == ["experts", "common weights", "x", "x", "out", "routes", "routes"], || format!("{named:?}"))?;
    }
    Ok(())
}

/// The block of one rank on `x`, with its router.
fn forward(config: &BlockConfig, x: &TensorView<'_>) -> Result<Vec<u8>, Error> {
    let backend = Backend::cpu();
    let ids: Vec<_> = (0..config.shape.router.num_experts as u32).map(Expert).collect();
    let world = World::threads(&backend, 1)?.remove(0);
    let common = Arc::new(CommonWeights::from_seed(&backend, &config.shape, config.weight_dtype, 1)?);
    let experts = Arc::new(ExpertWeights::from_seed(&backend, &config.shape, config.weight_dtype, 1, &ids)?);
    let mut block = Block::new(&world, config.clone(), common, experts)?;
    let mut out = vec![0xFF; x.shape().iter().product::<usize>() * config.dtype.size()];
    let view = TensorViewMut::from_bytes(&mut out, config.dtype, x.shape())?;
    block.forward(x, RouteSource::Router, view)?;
    Ok(out)
}

fn strided() -> Result<(), Failed> {
    let config = BlockConfig::new(shape(8, 2), DType::BF16, 8);
    let x = tokens_from_seed(&Backend::cpu(), 64, DType::BF16, 1, 0, 8)?;
    let want = forward(&config, &TensorView::from_bytes(&x, DType::BF16, &[8, 64])?)?;
    let mut wide = vec![0xFF; 8 * 160];
    for (to, from) in wide.chunks_exact_mut(160).zip(x.chunks_exact(128)) {
        to[..128].copy_from_slice(from);
    }
    // A row every 80 elements, 160 bytes.
    let view = TensorView::new(&wide, Strides::strided("test", DType::BF16, &[8, 64], &[80, 1])?)?;
    ensure(forward(&config, &view)? == want, || "strided tokens give another result".into())?;
    let few = forward(&config, &TensorView::from_bytes(&x[..3 * 128], DType::BF16, &[3, 64])?)?;
    ensure(few == want[..3 * 128], || "three tokens of eight give another result".into())
}

fn verifier() -> Result<(), Failed> {
    let backend = Backend::cpu();
    let config = BlockConfig::new(shape(8, 2), DType::BF16, 8);
    let ids: Vec<_> = (0..8).map(Expert).collect();
    let common = CommonWeights::from_seed(&backend, &config.shape, DType::BF16, 1)?;
    let experts = ExpertWeights::from_seed(&backend, &config.shape, DType::BF16, 1, &ids)?;
    let verifier = Verifier::new(&backend, &config, &common, [&experts])?;
    let x = tokens_from_seed(&backend, 64, DType::BF16, 1, 0, 1)?;
    let (ids, weights) = ([5, 2], [0.75, 0.25]);
    let good = verifier.oracle(moe_kernels::oracle::layer::Sums::Blocks, &x, &[(5, 0.75), (2, 0.25)])?;
    let found = verifier.token(&x, &ids, &weights, &good)?;
    ensure(found.error <= found.bound, || format!("{found:?}"))?;
    let exact = verifier.token(&x, &ids, &weights, &good)?.is_equal;
    for i in [0, 77, 127] {
        let mut bad = good.clone();
        bad[i] ^= 1;
        let found = verifier.token(&x, &ids, &weights, &bad)?;
        ensure(!(exact && found.is_equal) && !found.is_right(), || format!("byte {i} was changed: {found:?}"))?;
    }
    // A lost expert is far from the f64 oracle too.
    let lost = verifier.oracle(moe_kernels::oracle::layer::Sums::Blocks, &x, &[(5, 0.75)])?;
    let found = verifier.token(&x, &ids, &weights, &lost)?;
    ensure(found.error > found.bound, || format!("expert 2 was left out: {found:?}"))?;
    ensure(argument(verifier.token(&x[1..], &ids, &weights, &good)) == "x", || "a short row".into())?;
    ensure(argument(verifier.token(&x, &ids, &weights, &good[2..])) == "got", || "a short result".into())?;
    let without = ExpertWeights::from_seed(&backend, &config.shape, DType::BF16, 1, &[Expert(5)])?;
    let verifier = Verifier::new(&backend, &config, &common, [&without])?;
    ensure(argument(verifier.token(&x, &ids, &weights, &good)) == "experts", || "weights of expert 2 are missing".into())?;

    let routes = Routes { topk_idx: vec![5, 2, 5, 5, -1, 8, 0, 7], topk_weights: vec![1.0; 8], num_tokens: 4, k: 2 };
    let counts = verifier.num_rows_per_expert([&routes, &routes]);
    ensure(counts == [2, 0, 2, 0, 0, 4, 0, 2], || format!("{counts:?}"))
}

fn capacity() -> Result<(), Failed> {
    let backend = Backend::cpu();
    let layout = Layout::ByExpertFixed { rows_per_expert: 7 };
    let config = BlockConfig { layout, ..BlockConfig::new(shape(4, 1), DType::BF16, 8) };
    let common = Arc::new(CommonWeights::from_seed(&backend, &config.shape, DType::BF16, 1)?);
    let results = World::run(&backend, 2, |world| {
        let ids = [2 * world.rank().0, 2 * world.rank().0 + 1].map(Expert);
        let experts = Arc::new(ExpertWeights::from_seed(&backend, &config.shape, DType::BF16, 1, &ids)?);
        let mut block = Block::new(&world, config.clone(), common.clone(), experts)?;
        let x = tokens_from_seed(&backend, 64, DType::BF16, 1, 0, 4)?;
        let view = TensorView::from_bytes(&x, DType::BF16, &[4, 64])?;
        let mut out = vec![0xFF; 4 * 128];
        // Eight rows of expert 3, then seven.
        let mut routes = Routes { topk_idx: vec![3; 4], topk_weights: vec![1.0; 4], num_tokens: 4, k: 1 };
        let out_view = TensorViewMut::from_bytes(&mut out, DType::BF16, &[4, 64])?;
        let first = block.forward(&view, RouteSource::Given(&routes), out_view);
        let is_capacity = matches!(first, Err(Error::Capacity { .. })) && out.iter().all(|&b| b == 0xFF);
        routes.topk_idx[0] = if world.rank().0 == 0 { 1 } else { 3 };
        let out_view = TensorViewMut::from_bytes(&mut out, DType::BF16, &[4, 64])?;
        block.forward(&view, RouteSource::Given(&routes), out_view)?;
        Ok(is_capacity)
    })?;
    for result in results {
        ensure(result?, || "eight rows fitted into seven, or something was written".into())?;
    }
    Ok(())
}
