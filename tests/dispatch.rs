//! Tests of dispatch beyond the shared checks: random worlds, and bad input.

use libtest_mimic::{Failed, Trial};
use moe_kernels::check::ep::cases::{Traffic, dispatch_script, low_latency};
use moe_kernels::check::ep::inputs::Ids;
use moe_kernels::ep::{
    Config, ExpertParallel, IdSpace, Layout, MAX_K, MAX_TOKENS, Mode, Overflow, Quantize, Reduce, ScaleLayout, Wire, World,
};
use moe_kernels::error::Demand;
use moe_kernels::ops::dispatch::{Arrival, Input, NumTokens, Outputs, Payload, Routing};
use moe_kernels::tensor::Layout as Strides;
use moe_kernels::{Backend, Cpu, DType, DeviceAddress, Error, Rank, TensorView, TensorViewMut};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("dispatch::random worlds", random_worlds),
        Trial::test("dispatch::bad configurations", bad_configurations),
        Trial::test("dispatch::bad input", bad_input),
        Trial::test("dispatch::bad replay", bad_replay),
        Trial::test("dispatch::bad outputs", bad_outputs),
        Trial::test("dispatch::bad metadata slices", bad_slices),
        Trial::test("dispatch::a live arrival keeps its bank", busy_bank),
        Trial::test("dispatch::ranks that differ", ranks_that_differ),
        Trial::test("dispatch::more tokens than 20 bits hold", many_tokens),
    ]
}

/// A random world of up to 5 ranks, its experts and how they are drawn.
pub fn any_traffic() -> impl Strategy<Value = Traffic> {
    let ids = prop_oneof![3 => Just(Ids::Distinct), 3 => Just(Ids::Messy), 2 => Just(Ids::Wide), 1 => Just(Ids::Masked), 1 => Just(Ids::AllTo(0))];
    (prop::collection::vec(0usize..14, 1..=5), 1usize..=12, 0usize..30, ids, prop::option::of(any::<u64>())).prop_map(
        |(tokens, k, more_experts, ids, map)| {
            let world = tokens.len();
            let num_experts = k.max(world) + more_experts;
            // Base-`world` digits of a number, again and again: some ranks own much, some nothing.
            let map = map.map(|seed| (0..num_experts).map(|e| Rank((seed >> (e % 31) & 7) as u32 % world as u32)).collect());
            Traffic { tokens, k, num_experts, map, ids }
        },
    )
}

/// Layout, with its own numbers.
pub fn any_layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        Just(Layout::ByToken),
        (1usize..20).prop_map(|segment_align| Layout::ByExpert { segment_align }),
        (1usize..40).prop_map(|rows_per_expert| Layout::ByExpertFixed { rows_per_expert }),
    ]
}

/// `config` with the layout as drawn (the traffic would set its own capacity) and a capacity that may be too small.
pub fn squeeze(config: Config, layout: Layout, overflow: Overflow, rows: Option<usize>) -> Config {
    let by_expert = matches!(layout, Layout::ByExpert { .. });
    let fixed = matches!(layout, Layout::ByExpertFixed { .. });
    let per_expert = if by_expert && overflow == Overflow::Drop { rows } else { None };
    let max_rows = if fixed || per_expert.is_some() { None } else { rows };
    Config { layout, overflow, max_rows, max_rows_per_expert: per_expert, ..config }
}

/// Runs `test` on 400 random values (arbitrary: some seconds), the failing one shrunk and printed whole.
pub fn for_random<S: Strategy>(strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) -> Result<(), Failed>
where
    S::Value: std::fmt::Debug,
{
    let config =
        ProptestConfig { cases: 400, failure_persistence: None, rng_seed: proptest::test_runner::RngSeed::Fixed(1), ..Default::default() };
    TestRunner::new(config).run(&strategy, test).map_err(|e| Failed::from(e.to_string()))
}

fn random_worlds() -> Result<(), Failed> {
    let payload = prop_oneof![
        Just((DType::BF16, 0, None, ScaleLayout::RowMajor)),
        Just((DType::F32, 0, Some(Quantize::F32), ScaleLayout::ColumnMajor)),
        Just((DType::F16, 0, Some(Quantize::PowerOfTwo), ScaleLayout::PackedE8M0)),
        Just((DType::Bytes, 9, None, ScaleLayout::PackedE8M0)),
        Just((DType::E4M3, 4, None, ScaleLayout::RowMajor)),
    ];
    let overflow = prop_oneof![Just(Overflow::Error), Just(Overflow::Drop)];
    let strategy = (
        any_traffic(),
        any_layout(),
        payload,
        (1usize..20).prop_map(|n| 16 * n),
        overflow,
        prop::option::of(1usize..60),
        0usize..48,
        any::<bool>(),
    );
    for_random(strategy, |(traffic, layout, payload, hidden, overflow, rows, index, low)| {
        let (dtype, scale_bytes, quantize, scale_layout) = payload;
        let config = Config { scale_bytes, quantize, scale_layout, ..traffic.config(hidden, dtype, layout) };
        let script = dispatch_script("random", squeeze(config, layout, overflow, rows), &traffic, index);
        let script = if low { low_latency(script) } else { script };
        let backend = Backend::Cpu(Cpu::with_threads(1).map_err(|e| TestCaseError::fail(e.to_string()))?);
        script.prepare().and_then(|p| p.run(&backend)).map(|_| ()).map_err(|failed| TestCaseError::fail(failed.0))
    })
}

/// Fails unless `result` is `Error::Invalid` that names `what`, with what was got and wanted.
pub fn names<T>(case: &str, result: Result<T, Error>, what: &str, got: &str, want: &str) -> Result<(), Failed> {
    match result {
        Err(Error::Invalid { what: w, got: g, want: n, .. }) if w == what && g.contains(got) && n.contains(want) => Ok(()),
        Err(error) => Err(format!("{case}: {error}; expected an error that names `{what}`, got `{got}`, want `{want}`").into()),
        Ok(_) => Err(format!("{case}: accepted; expected an error that names `{what}`").into()),
    }
}

fn bad_configurations() -> Result<(), Failed> {
    let ok = || Config::new(64, DType::BF16, 8, 2, 16);
    let by_expert = Layout::ByExpert { segment_align: 4 };
    let scaled = || Config { dtype: DType::E4M3, scale_bytes: 6, ..ok() };
    let huge = usize::MAX / 64;
    let huge_text = huge.to_string();
    // Name of the field, what was got, what is wanted, world, configuration.
    let cases: Vec<(&str, &str, &str, usize, Config)> = vec![
        ("world", "0", "1 to 64", 0, ok()),
        ("world", "65", "1 to 64", 65, ok()),
        ("world", "9", "at most num_experts, 8", 9, ok()),
        ("hidden", "0", "1 to", 2, Config { hidden: 0, ..ok() }),
        ("hidden", "12 (24 bytes of bf16)", "a multiple of 16 bytes", 2, Config { hidden: 12, ..ok() }),
        ("hidden", "8", "a multiple of 16", 2, Config { hidden: 8, quantize: Some(Quantize::F32), ..ok() }),
        ("hidden", "a product of sizes", "addressed", 2, Config { hidden: usize::MAX / 2, ..ok() }),
        ("hidden", "4 (8 bytes of bf16)", "a row of y", 2, Config { hidden: 4, dtype: DType::F32, combine_dtype: DType::BF16, ..ok() }),
        ("num_experts", "0", "1 to", 2, Config { num_experts: 0, ..ok() }),
        ("num_experts", "65537", "1 to 65536", 2, Config { num_experts: 65537, ..ok() }),
        ("k", "0", "1 to 32", 2, Config { k: 0, ..ok() }),
        ("k", "33", "1 to 32", 2, Config { k: MAX_K + 1, num_experts: 64, ..ok() }),
        ("k", "9", "at most num_experts, 8", 2, Config { k: 9, ..ok() }),
        ("max_tokens", "0", "1 to", 2, Config { max_tokens: 0, ..ok() }),
        ("max_tokens", "524289", "1 to 524288", 2, Config { max_tokens: MAX_TOKENS + 1, ..ok() }),
        ("in_flight", "0", "1 to 2", 2, Config { in_flight: 0, ..ok() }),
        ("in_flight", "3", "1 to 2", 2, Config { in_flight: 3, ..ok() }),
        ("dtype", "i32", "f32, f16, bf16, an FP8 format or bytes", 2, Config { dtype: DType::I32, ..ok() }),
        ("dtype", "e8m0", "f32, f16, bf16, an FP8 format or bytes", 2, Config { dtype: DType::E8M0, ..ok() }),
        ("dtype", "e4m3", "with quantize", 2, Config { dtype: DType::E4M3, quantize: Some(Quantize::F32), ..ok() }),
        ("combine_dtype", "e4m3", "f32, f16 or bf16", 2, Config { combine_dtype: DType::E4M3, ..ok() }),
        ("max_rows", "0", "1 to", 2, Config { max_rows: Some(0), ..ok() }),
        ("max_rows", "4294967295", "slots are 32 bits", 2, Config { max_rows: Some(u32::MAX as usize), ..ok() }),
        ("max_rows", "4", "None", 2, Config { max_rows: Some(4), layout: Layout::ByExpertFixed { rows_per_expert: 4 }, ..ok() }),
        ("segment_align", "0", "1 to", 2, Config { layout: Layout::ByExpert { segment_align: 0 }, ..ok() }),
        ("segment_align", &huge_text, "1 to", 2, Config { layout: Layout::ByExpert { segment_align: huge }, ..ok() }),
        ("rows_per_expert", "0", "1 to", 2, Config { layout: Layout::ByExpertFixed { rows_per_expert: 0 }, ..ok() }),
        ("rows_per_expert", &huge_text, "1 to", 2, Config { layout: Layout::ByExpertFixed { rows_per_expert: huge }, ..ok() }),
        ("max_rows_per_expert", "5", "None, unless", 2, Config { max_rows_per_expert: Some(5), ..ok() }),
        ("max_rows_per_expert", "5", "None, unless", 2, Config { max_rows_per_expert: Some(5), layout: by_expert, ..ok() }),
        (
            "max_rows_per_expert",
            "0",
            "1 to",
            2,
            Config { max_rows_per_expert: Some(0), layout: by_expert, overflow: Overflow::Drop, ..ok() },
        ),
        ("scale_bytes", "4", "0 with quantize", 2, Config { scale_bytes: 4, quantize: Some(Quantize::F32), ..ok() }),
        ("scale_bytes", "1048577", "at most 1048576", 2, Config { scale_bytes: (1 << 20) + 1, ..scaled() }),
        ("scale_bytes", "6", "a multiple of 4", 2, Config { scale_layout: ScaleLayout::ColumnMajor, ..scaled() }),
        (
            "scale_layout",
            "ColumnMajor",
            "RowMajor or PackedE8M0",
            2,
            Config { scale_layout: ScaleLayout::ColumnMajor, quantize: Some(Quantize::PowerOfTwo), ..ok() },
        ),
        (
            "scale_layout",
            "PackedE8M0",
            "RowMajor or ColumnMajor",
            2,
            Config { scale_layout: ScaleLayout::PackedE8M0, quantize: Some(Quantize::F32), ..ok() },
        ),
        ("expert_map", "7 entries", "8 (num_experts)", 2, Config { expert_map: Some(vec![Rank(0); 7]), ..ok() }),
        ("map[7]", "rank 2", "a rank below world, 2", 2, {
            let mut map = vec![Rank(0); 8];
            map[7] = Rank(2);
            Config { expert_map: Some(map), ..ok() }
        }),
        ("weighted", "true with ByToken", "an expert layout", 2, Config { weighted: true, ..ok() }),
        ("reduce", "AtSource with ByToken", "AtRank", 2, Config { reduce: Reduce::AtSource, ..ok() }),
        ("reduce", "AtRankF32 with ByToken", "AtRank", 2, Config { reduce: Reduce::AtRankF32, ..ok() }),
        (
            "wire",
            "Fp8Block with AtRankF32",
            "AsIs",
            2,
            Config { wire: Wire::Fp8Block, reduce: Reduce::AtRankF32, layout: by_expert, ..ok() },
        ),
    ];
    for (what, got, want, world, config) in &cases {
        names(&format!("{config:?}"), config.plan(*world), what, got, want)?;
    }
    ok().plan(8).map_err(|e| Failed::from(format!("the configuration that the others are made from: {e}")))?;
    // Every product of sizes is checked: nothing panics, whatever the numbers.
    let sizes = [1, 16, MAX_TOKENS, u32::MAX as usize - 1, 1 << 40, isize::MAX as usize - 15];
    for hidden in sizes {
        for rows in sizes {
            for layout in [Layout::ByToken, Layout::ByExpert { segment_align: rows }, Layout::ByExpertFixed { rows_per_expert: rows }] {
                let max_rows = if matches!(layout, Layout::ByExpertFixed { .. }) { None } else { Some(rows) };
                for expected_tokens in [1, usize::MAX] {
                    let (mode, id_space) = (Mode::LowLatency, IdSpace::Local);
                    let c =
                        Config { hidden, layout, max_rows, mode, expected_tokens, id_space, max_tokens: MAX_TOKENS, in_flight: 2, ..ok() };
                    for config in
                        [c.clone(), Config { max_rows: None, ..c.clone() }, Config { wire: Wire::Fp8Block, fold_weights: true, ..c }]
                    {
                        if let Err(error) = config.plan(64.min(config.num_experts)) {
                            assert!(matches!(error, Error::Invalid { .. }), "{error}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// A world of two ranks, an object and a routing on each; every rank's result must be good.
pub fn in_world(
    config: &Config,
    work: impl Fn(&World, &mut ExpertParallel, &mut Routing) -> Result<(), Failed> + Sync,
) -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 2, |world| {
        let mut ep = ExpertParallel::new(&world, config.clone())?;
        let mut routing = Routing::new(&ep)?;
        Ok(work(&world, &mut ep, &mut routing))
    })?;
    for (rank, result) in results.into_iter().enumerate() {
        result?.map_err(|failed| Failed::from(format!("rank {rank}: {}", failed.message().unwrap_or("failed"))))?;
    }
    Ok(())
}

/// 64-byte aligned memory of zeros, which are valid rows, ids and weights.
#[repr(align(64))]
pub struct Zeros(pub [u8; 4096]);

/// The configuration of the tables below: 4 tokens of 16 bf16, 2 of 8 experts.
pub fn small() -> Config {
    Config::new(16, DType::BF16, 8, 2, 4)
}

/// A good input over `zeros`.
pub fn good(zeros: &Zeros) -> Result<Input<'_>, Error> {
    Ok(Input {
        x: TensorView::from_bytes(&zeros.0, DType::BF16, &[3, 16])?,
        topk_idx: TensorView::from_bytes(&zeros.0, DType::I64, &[3, 2])?,
        topk_weights: None,
        scales: None,
        num_tokens: NumTokens::All,
    })
}

fn dispatch_good(ep: &mut ExpertParallel, routing: &mut Routing) -> Result<Arrival, Error> {
    ep.dispatch(routing, &good(&Zeros([0; 4096]))?, Outputs::default())
}

fn bad_input() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let bytes = &zeros.0;
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(bytes, dtype, shape);
        let at = |offset: usize, dtype, shape: &[usize], strides: &[usize]| {
            Strides::strided("test", dtype, shape, strides).and_then(|layout| TensorView::new(&bytes[offset..], layout))
        };
        let address = DeviceAddress { device: 0, address: 4096 };
        let device = |dtype, shape: &[usize]| {
            Strides::contiguous("test", dtype, shape).and_then(|layout| {
                // SAFETY: no operation runs with this view: it is refused.
                unsafe { TensorView::from_device(address, layout) }
            })
        };
        let input = good(&zeros)?;
        let five = [5u32];
        let two = [1u32, 2];
        let cases: Vec<(&str, &str, &str, Input<'_>)> = vec![
            ("x dtype", "f16", "bf16", Input { x: view(DType::F16, &[3, 16])?, ..input }),
            ("x shape", "[48]", "[T, 16]", Input { x: view(DType::BF16, &[48])?, ..input }),
            ("x shape", "[3, 32]", "[3, 16]", Input { x: view(DType::BF16, &[3, 32])?, ..input }),
            ("x shape", "[1, 3, 16]", "[T, 16]", Input { x: view(DType::BF16, &[1, 3, 16])?, ..input }),
            ("x address", "0x", "a multiple of 16", Input { x: at(8, DType::BF16, &[3, 16], &[16, 1])?, ..input }),
            ("x row stride", "40 bytes", "a multiple of 16", Input { x: at(0, DType::BF16, &[3, 16], &[20, 1])?, ..input }),
            ("x", "device 0", "host memory", Input { x: device(DType::BF16, &[3, 16])?, ..input }),
            ("topk_idx dtype", "u32", "i32 or i64", Input { topk_idx: view(DType::U32, &[3, 2])?, ..input }),
            ("topk_idx dtype", "f32", "i32 or i64", Input { topk_idx: view(DType::F32, &[3, 2])?, ..input }),
            ("topk_idx shape", "[3, 3]", "[3, 2]", Input { topk_idx: view(DType::I32, &[3, 3])?, ..input }),
            ("topk_idx shape", "[2, 2]", "[3, 2]", Input { topk_idx: view(DType::I32, &[2, 2])?, ..input }),
            ("topk_idx shape", "[6]", "[3, 2]", Input { topk_idx: view(DType::I32, &[6])?, ..input }),
            ("topk_idx", "device 0", "host memory", Input { topk_idx: device(DType::I32, &[3, 2])?, ..input }),
            ("topk_weights dtype", "bf16", "f32", Input { topk_weights: Some(view(DType::BF16, &[3, 2])?), ..input }),
            ("topk_weights shape", "[2, 2]", "[3, 2]", Input { topk_weights: Some(view(DType::F32, &[2, 2])?), ..input }),
            ("topk_weights", "device 0", "host memory", Input { topk_weights: Some(device(DType::F32, &[3, 2])?), ..input }),
            ("scales", "a tensor", "no scale_bytes", Input { scales: Some(view(DType::Bytes, &[3, 4])?), ..input }),
            ("num_tokens", "4", "at most the rows of x, 3", Input { num_tokens: NumTokens::Host(4), ..input }),
            ("num_tokens", "i32 [1]", "u32 [1]", Input { num_tokens: NumTokens::Device(view(DType::I32, &[1])?), ..input }),
            ("num_tokens", "u32 [2]", "u32 [1]", Input { num_tokens: NumTokens::Device(TensorView::from_slice(&two, &[2])?), ..input }),
            ("num_tokens", "device 0", "host memory", Input { num_tokens: NumTokens::Device(device(DType::U32, &[1])?), ..input }),
        ];
        for (what, got, want, bad) in &cases {
            let result = ep.dispatch(routing, bad, Outputs::default());
            names(&format!("dispatch with a bad {what}"), result, what, got, want)?;
            names(&format!("send with a bad {what}"), ep.dispatch_send(routing, bad), what, got, want)?;
        }
        // Nothing was sent: the next call works, with the banks in step on both ranks.
        let arrival = dispatch_good(ep, routing)?;
        if arrival.on_host()?.num_rows() != if ep.rank() == Rank(0) { 6 } else { 0 } {
            return Err(format!("{} rows after refused calls", arrival.on_host()?.num_rows()).into());
        }
        drop(arrival);
        // Five tokens in a world of at most four is a matter of all ranks.
        let over = Input { num_tokens: NumTokens::Device(TensorView::from_slice(&five, &[1])?), ..input };
        match ep.dispatch(routing, &over, Outputs::default()) {
            Err(Error::Capacity { .. }) => {}
            other => return Err(format!("five tokens: {other:?}, expected a capacity error").into()),
        }
        names("replay after a refused dispatch", ep.replay(routing, &Payload { x: input.x, scales: None }), "routing", "empty", "filled")?;
        drop(dispatch_good(ep, routing)?);
        Ok(())
    })?;
    // Scales, when the configuration has them.
    in_world(&Config { dtype: DType::Bytes, hidden: 32, combine_dtype: DType::BF16, scale_bytes: 6, ..small() }, |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(&zeros.0, dtype, shape);
        let input = Input { x: view(DType::Bytes, &[3, 32])?, scales: Some(view(DType::Bytes, &[3, 6])?), ..good(&zeros)? };
        let cases: Vec<(&str, &str, &str, Input<'_>)> = vec![
            ("scales", "None", "[T, 6] bytes", Input { scales: None, ..input }),
            ("scales shape", "[3, 5]", "[3, 6]", Input { scales: Some(view(DType::Bytes, &[3, 5])?), ..input }),
            ("scales shape", "[2, 6]", "[3, 6]", Input { scales: Some(view(DType::Bytes, &[2, 6])?), ..input }),
            ("scales dtype", "i32", "bytes", Input { scales: Some(view(DType::I32, &[3, 6])?), ..input }),
        ];
        for (what, got, want, bad) in &cases {
            names(&format!("dispatch with bad {what}"), ep.dispatch(routing, bad, Outputs::default()), what, got, want)?;
        }
        drop(ep.dispatch(routing, &input, Outputs::default())?);
        let payload = Payload { x: input.x, scales: None };
        names("replay without scales", ep.replay(routing, &payload), "scales", "None", "[T, 6] bytes")
    })
}

fn bad_replay() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(&zeros.0, dtype, shape);
        let good = Payload { x: view(DType::BF16, &[3, 16])?, scales: None };
        names("an empty routing", ep.replay(routing, &good), "routing", "empty", "filled by a dispatch")?;
        drop(dispatch_good(ep, routing)?);
        let scales = Some(view(DType::Bytes, &[3, 4])?);
        for (what, got, want, bad) in [
            ("x dtype", "f32", "bf16", Payload { x: view(DType::F32, &[3, 16])?, ..good }),
            ("x shape", "[2, 16]", "[3, 16]", Payload { x: view(DType::BF16, &[2, 16])?, ..good }),
            ("x shape", "[3, 8]", "[3, 16]", Payload { x: view(DType::BF16, &[3, 8])?, ..good }),
            ("scales", "a tensor", "no scale_bytes", Payload { scales, ..good }),
        ] {
            names(&format!("replay with a bad {what}"), ep.replay(routing, &bad), what, got, want)?;
        }
        if ep.replay(routing, &good)?.on_host()?.num_rows() != if ep.rank() == Rank(0) { 6 } else { 0 } {
            return Err("other rows after refused calls".into());
        }
        Ok(())
    })?;
    // A routing of another configuration.
    in_world(&small(), |world, ep, routing| {
        drop(dispatch_good(ep, routing)?);
        let mut other = ExpertParallel::new(world, Config { max_tokens: 5, ..small() })?;
        let zeros = Zeros([0; 4096]);
        let x = TensorView::from_bytes(&zeros.0, DType::BF16, &[3, 16])?;
        names(
            "another object's routing",
            other.replay(routing, &Payload { x, scales: None }),
            "routing",
            "another configuration",
            "made by",
        )?;
        names("another object's routing", dispatch_good(&mut other, routing), "routing", "another configuration", "made by")
    })
}

fn bad_outputs() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let input = good(&zeros)?;
        let (mut short, mut long) = (vec![9i64; 3], vec![9u32; 5]);
        let mut wide = vec![9i64; 4];
        fn statistics(view: TensorViewMut<'_>) -> Outputs<'_> {
            Outputs { expert_statistics: Some(view), counts_host: None }
        }
        fn counts_of(view: TensorViewMut<'_>) -> Outputs<'_> {
            Outputs { expert_statistics: None, counts_host: Some(view) }
        }
        let outputs = statistics(TensorViewMut::from_slice(&mut short, &[3])?);
        names(
            "short statistics",
            ep.dispatch(routing, &input, outputs),
            "expert_statistics shape",
            "[3]",
            "[4], an entry per local expert",
        )?;
        let outputs = counts_of(TensorViewMut::from_slice(&mut long, &[5])?);
        names("long counts", ep.dispatch(routing, &input, outputs), "counts_host shape", "[5]", "[4], an entry per local expert")?;
        let outputs = counts_of(TensorViewMut::from_slice(&mut wide, &[4])?);
        names("wide counts", ep.dispatch(routing, &input, outputs), "counts_host dtype", "i64", "u32")?;
        for (what, dtype) in [("expert_statistics", DType::I64), ("counts_host", DType::U32)] {
            // SAFETY: no operation runs with this view: it is refused.
            let device = unsafe {
                TensorViewMut::from_device(DeviceAddress { device: 1, address: 4096 }, Strides::contiguous("test", dtype, &[4])?)
            }?;
            let outputs = if dtype == DType::I64 { statistics(device) } else { counts_of(device) };
            names("outputs on a device", ep.dispatch(routing, &input, outputs), what, "device 1", "in host memory")?;
        }
        // In the second half the call goes on with better outputs.
        let sent = ep.dispatch_send(routing, &input)?;
        let outputs = counts_of(TensorViewMut::from_slice(&mut long, &[5])?);
        let Err(rejected) = ep.dispatch_receive(routing, sent, outputs) else { return Err("long counts were accepted".into()) };
        names::<()>("long counts", Err(rejected.error), "counts_host shape", "[5]", "[4]")?;
        let Some(sent) = rejected.returned else { return Err("a refused receive kept what was sent".into()) };
        let mut counts = vec![9u32; 4];
        let outputs = counts_of(TensorViewMut::from_slice(&mut counts, &[4])?);
        let arrival = ep.dispatch_receive(routing, sent, outputs)?;
        if counts != arrival.on_host()?.num_rows_per_expert() || long != [9; 5] || short != [9; 3] || wide != [9; 4] {
            return Err(format!("counts {counts:?}, refused outputs {long:?} {short:?} {wide:?}").into());
        }
        Ok(())
    })
}

fn bad_slices() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let arrival = dispatch_good(ep, routing)?;
        let received = arrival.on_host()?;
        let rows = received.num_rows();
        if rows == 0 {
            return Ok(()); // every length is enough
        }
        let lengths = [("source", [1, 0, 0]), ("topk_idx", [0, 1, 0]), ("topk_weights", [0, 0, 1])];
        for (what, [s, i, w]) in lengths {
            let (mut source, mut ids, mut weights) = (vec![7; 2 * rows], vec![7; 2 * rows], vec![7.0f32; 2 * rows]);
            let result = arrival.contiguous_metadata(
                TensorViewMut::from_slice(&mut source, &[rows - s, 2])?,
                TensorViewMut::from_slice(&mut ids, &[rows - i, 2])?,
                TensorViewMut::from_slice(&mut weights, &[rows - w, 2])?,
            );
            names("a short tensor", result, what, "[5, 2]", "[6 or more, 2]")?;
            if source.iter().chain(&ids).any(|&v| v != 7) || weights.iter().any(|&v| v != 7.0) {
                return Err("a refused call wrote".into());
            }
        }
        let (mut idx, mut start) = ([7i32; 8], [7u32; 5]);
        let mut gather = |align: usize, num_idx: usize, num_start: usize| {
            let idx = TensorViewMut::from_slice(&mut idx, &[num_idx])?;
            arrival.gather_idx(align, idx, TensorViewMut::from_slice(&mut start, &[num_start])?)
        };
        names("align 0", gather(0, 8, 5), "align", "0", "at least 1")?;
        names("align too large", gather(usize::MAX, 8, 5), "align", "", "at least 1")?;
        names("a short index", gather(8, 7, 5), "gather_idx", "[7]", "[8] or more")?;
        names("a short start", gather(8, 8, 4), "segment_start", "[4]", "[5], one per local expert and one")?;
        if idx != [7; 8] || start != [7; 5] {
            return Err("a refused call wrote".into());
        }
        let beyond = received.metadata(moe_kernels::Slot(u32::MAX));
        if !received.row(moe_kernels::Slot(u32::MAX)).is_empty() || beyond.source.is_some() || !beyond.topk_idx.is_empty() {
            return Err("a slot beyond the buffer has a row".into());
        }
        Ok(())
    })
}

fn busy_bank() -> Result<(), Failed> {
    in_world(&Config { in_flight: 2, ..small() }, |_, ep, routing| {
        let first = dispatch_good(ep, routing)?;
        let second = dispatch_good(ep, routing)?;
        match dispatch_good(ep, routing) {
            Err(Error::Busy { what, .. }) if what.contains("bank") => {}
            other => return Err(format!("{other:?}, expected Busy").into()),
        }
        drop(first);
        let third = dispatch_good(ep, routing)?;
        drop((second, third));
        drop(dispatch_good(ep, routing)?);
        Ok(())
    })
}

/// Every rank gets the error, and it names both.
fn ranks_that_differ() -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 3, |world| {
        let config = if world.rank() == Rank(2) { Config { hidden: 32, ..small() } } else { small() };
        Ok(ExpertParallel::new(&world, config).map(|_| ()))
    })?;
    for result in results {
        match result? {
            Err(Error::Mismatch { first: Rank(0), second: Rank(2), what, first_value, second_value, .. })
                if what == "hidden" && first_value == "16" && second_value == "32" => {}
            other => return Err(format!("{other:?}, expected a mismatch of hidden").into()),
        }
    }
    Ok(())
}

/// A count of tokens above the 20 bits of a word reaches every rank whole.
fn many_tokens() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let tokens = if ep.rank() == Rank(1) { 3_000_000_007u32 } else { 2 };
        let count = [tokens];
        let input = Input { num_tokens: NumTokens::Device(TensorView::from_slice(&count, &[1])?), ..good(&zeros)? };
        match ep.dispatch(routing, &input, Outputs::default()) {
            Err(Error::Capacity { demands, .. }) if matches!(demands[..], [Demand { rank: Rank(1), demand: 3_000_000_007, .. }]) => Ok(()),
            other => Err(format!("{other:?}, expected 3000000007 tokens of rank 1").into()),
        }
    })
}
