//! Tests of combine beyond the shared checks: random worlds, and bad input.

use libtest_mimic::{Failed, Trial};
use moe_kernels::check::ep::cases::{combine_script, low_latency};
use moe_kernels::ep::{Config, ExpertParallel, Layout, Overflow, Reduce, Wire};
use moe_kernels::ops::combine::{ExpertRows, Input, Output};
use moe_kernels::ops::dispatch::{Outputs, Routing};
use moe_kernels::tensor::Layout as Strides;
use moe_kernels::{Backend, Cpu, DType, DeviceAddress, Error, TensorView, TensorViewMut};
use proptest::prelude::*;

use crate::dispatch::{Zeros, any_layout, any_traffic, for_random, good, in_world, names, small, squeeze};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("combine::random worlds", random_worlds),
        Trial::test("combine::bad input", bad_input),
        Trial::test("combine::bad output", bad_output),
        Trial::test("combine::an arrival of another dispatch", another_dispatch),
        Trial::test("combine::bad weights to be folded", bad_fold),
    ]
}

fn random_worlds() -> Result<(), Failed> {
    let wire = prop_oneof![Just(Wire::AsIs), Just(Wire::Fp8Direct), Just(Wire::Fp8Block)];
    let reduce = prop_oneof![Just(Reduce::AtRank), Just(Reduce::AtRankF32), Just(Reduce::AtSource)];
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let overflow = prop_oneof![Just(Overflow::Error), Just(Overflow::Drop)];
    let form = (any::<bool>(), any::<bool>(), any::<bool>(), 0usize..48);
    let capacity = (overflow, prop::option::of(1usize..60));
    let width = (1usize..20).prop_map(|n| 16 * n);
    let strategy = (any_traffic(), any_layout(), width, wire, reduce, dtype, capacity, form);
    for_random(strategy, |(traffic, layout, hidden, wire, reduce, combine_dtype, (overflow, rows), form)| {
        let (weighted, fold_weights, low, index) = form;
        let by_expert = layout.is_by_expert();
        let wire = if reduce == Reduce::AtRankF32 { Wire::AsIs } else { wire };
        let reduce = if by_expert { reduce } else { Reduce::AtRank };
        let base = traffic.config(hidden, DType::Bytes, layout);
        let config = Config { combine_dtype, wire, reduce, weighted: weighted && by_expert, fold_weights, ..base };
        let script = combine_script("random", squeeze(config, layout, overflow, rows), &traffic, index);
        let script = if low { low_latency(script) } else { script };
        let backend = Backend::Cpu(Cpu::with_threads(1).map_err(|e| TestCaseError::fail(e.to_string()))?);
        script.prepare().and_then(|p| p.run(&backend)).map(|_| ()).map_err(|failed| TestCaseError::fail(failed.0))
    })
}

/// A dispatch of three tokens of each rank, all to expert 0: 6 rows on rank 0 and none on rank 1.
fn dispatched(ep: &mut ExpertParallel, routing: &mut Routing, zeros: &Zeros) -> Result<moe_kernels::ops::dispatch::Arrival, Error> {
    ep.dispatch(routing, &good(zeros)?, Outputs::default())
}

/// A view of rows apart, or at an odd place.
fn strided<'a>(bytes: &'a [u8], dtype: DType, shape: &[usize], strides: &[usize]) -> Result<TensorView<'a>, Error> {
    TensorView::new(bytes, Strides::strided("test", dtype, shape, strides)?)
}

fn bad_input() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(&zeros.0, dtype, shape);
        let address = DeviceAddress { device: 1, address: 4096 };
        let device = {
            // SAFETY: no operation runs with this view: it is refused.
            unsafe { TensorView::from_device(address, Strides::contiguous("test", DType::BF16, &[6, 16])?) }
        }?;
        let staged = |y| Input { y: ExpertRows::Staged(y), row_weights: None };
        let mut arrival = dispatched(ep, routing, &zeros)?;
        let rows = arrival.on_host()?.num_rows();
        let mut cases = vec![
            ("y dtype", "f32", "bf16", staged(view(DType::F32, &[6, 16])?)),
            ("y shape", "[6, 8]", ", 16]", staged(view(DType::BF16, &[6, 8])?)),
            ("y shape", "[96]", ", 16]", staged(view(DType::BF16, &[96])?)),
            ("y", "device 1", "host memory", staged(device)),
            ("row_weights", "a tensor", "no fold_weights", Input { y: ExpertRows::InPlace, row_weights: Some(view(DType::F32, &[6, 2])?) }),
        ];
        if rows > 0 {
            cases.push(("y shape", "[5, 16]", "[6, 16]", staged(view(DType::BF16, &[5, 16])?)));
            cases.push(("y address", "0x", "a multiple of 16", staged(strided(&zeros.0[2..], DType::BF16, &[6, 16], &[16, 1])?)));
            cases.push(("y row stride", "34 bytes", "a multiple of 16", staged(strided(&zeros.0, DType::BF16, &[6, 16], &[17, 1])?)));
        }
        for (what, got, want, bad) in &cases {
            let mut out = Zeros([3; 4096]);
            let output = Output { out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?, add_to: None, topk_weights: None };
            let Err(rejected) = ep.combine(routing, arrival, bad, output) else { return Err(format!("a bad {what} was accepted").into()) };
            names::<()>(&format!("combine with a bad {what}"), Err(rejected.error), what, got, want)?;
            arrival = rejected.returned.ok_or(format!("combine with a bad {what} kept the arrival"))?;
            if out.0 != [3; 4096] {
                return Err(format!("combine with a bad {what} wrote").into());
            }
        }
        finish(ep, routing, arrival)
    })
}

/// After refused calls the good one works.
fn finish(ep: &mut ExpertParallel, routing: &Routing, arrival: moe_kernels::ops::dispatch::Arrival) -> Result<(), Failed> {
    let mut out = Zeros([3; 4096]);
    let output = Output { out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?, add_to: None, topk_weights: None };
    let zeros = Zeros([0; 4096]);
    let y = ExpertRows::Staged(TensorView::from_bytes(&zeros.0, DType::BF16, &[arrival.on_host()?.num_rows(), 16])?);
    let row_weights = TensorView::from_bytes(&zeros.0, DType::F32, &[arrival.on_host()?.num_rows(), 2])?;
    let row_weights = ep.config().fold_weights.then_some(row_weights);
    ep.combine(routing, arrival, &Input { y, row_weights }, output).map_err(Error::from)?;
    // Three rows of 32 bytes are zero now, and nothing behind them.
    if out.0[..96] != [0; 96] || out.0[96..] != [3; 4000] {
        return Err("other sums after refused calls".into());
    }
    Ok(())
}

fn bad_output() -> Result<(), Failed> {
    in_world(&small(), |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(&zeros.0, dtype, shape);
        let mut arrival = dispatched(ep, routing, &zeros)?;
        let input = Input { y: ExpertRows::InPlace, row_weights: None };
        // (name, got, want), offset, type, shape and stride of out.
        let outs = [
            ("out dtype", "f32", "bf16", 0, DType::F32, [3, 16], 16),
            ("out shape", "[2, 16]", "[3, 16]", 0, DType::BF16, [2, 16], 16),
            ("out shape", "[3, 24]", "[3, 16]", 0, DType::BF16, [3, 24], 24),
            ("out address", "0x", "a multiple of 16", 2, DType::BF16, [3, 16], 16),
            ("out row stride", "34 bytes", "a multiple of 16", 0, DType::BF16, [3, 16], 17),
            ("out row stride", "8", "at least 16", 0, DType::BF16, [3, 16], 8),
        ];
        for (what, got, want, offset, dtype, shape, stride) in outs {
            let mut out = Zeros([3; 4096]);
            let strides = Strides::strided("test", dtype, &shape, &[stride, 1])?;
            let output = Output { out: TensorViewMut::new(&mut out.0[offset..], strides)?, add_to: None, topk_weights: None };
            let Err(rejected) = ep.combine(routing, arrival, &input, output) else {
                return Err(format!("a bad {what} was accepted").into());
            };
            names::<()>(&format!("a bad {what}"), Err(rejected.error), what, got, want)?;
            arrival = rejected.returned.ok_or(format!("combine with a bad {what} kept the arrival"))?;
        }
        for (what, got, want, add_to) in [
            ("add_to dtype", "f16", "bf16 or f32", view(DType::F16, &[3, 16])?),
            ("add_to shape", "[2, 16]", "[3, 16]", view(DType::BF16, &[2, 16])?),
            ("add_to address", "0x", "a multiple of 16", strided(&zeros.0[2..], DType::BF16, &[3, 16], &[16, 1])?),
            ("add_to row stride", "36 bytes", "a multiple of 16", strided(&zeros.0, DType::BF16, &[3, 16], &[18, 1])?),
        ] {
            let mut out = Zeros([3; 4096]);
            let out = TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?;
            let output = Output { out, add_to: Some(add_to), topk_weights: None };
            let Err(rejected) = ep.combine(routing, arrival, &input, output) else {
                return Err(format!("a bad {what} was accepted").into());
            };
            names::<()>(&format!("a bad {what}"), Err(rejected.error), what, got, want)?;
            arrival = rejected.returned.ok_or(format!("combine with a bad {what} kept the arrival"))?;
        }
        // The second half refuses too, and gives back what was sent.
        let mut sent = ep.combine_send(routing, arrival, &input).map_err(Error::from)?;
        let mut out = Zeros([3; 4096]);
        for (what, shape) in [("out shape", [2, 16]), ("out shape", [3, 32])] {
            let output = Output { out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &shape)?, add_to: None, topk_weights: None };
            let Err(rejected) = ep.combine_receive(routing, sent, output) else { return Err(format!("a bad {what} was accepted").into()) };
            names::<()>(&format!("a bad {what}"), Err(rejected.error), what, "", "[3, 16]")?;
            sent = rejected.returned.ok_or("a refused receive kept what was sent")?;
        }
        let output = Output { out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?, add_to: None, topk_weights: None };
        Ok(ep.combine_receive(routing, sent, output).map_err(Error::from)?)
    })
}

fn another_dispatch() -> Result<(), Failed> {
    in_world(&Config { in_flight: 2, ..small() }, |world, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let first = dispatched(ep, routing, &zeros)?;
        let mut second_routing = Routing::new(ep)?;
        let second = dispatched(ep, &mut second_routing, &zeros)?;
        let input = Input { y: ExpertRows::InPlace, row_weights: None };
        let Err(rejected) = ep.combine_send(&second_routing, first, &input) else { return Err("accepted".into()) };
        names::<()>("an arrival of another dispatch", Err(rejected.error), "arrival", "of dispatch 1", "dispatch 2")?;
        let first = rejected.returned.ok_or("the arrival was kept")?;
        let empty = Routing::new(ep)?;
        let Err(rejected) = ep.combine_send(&empty, first, &input) else { return Err("accepted".into()) };
        names::<()>("an empty routing", Err(rejected.error), "routing", "empty", "filled by a dispatch")?;
        let first = rejected.returned.ok_or("the arrival was kept")?;
        let mut other = ExpertParallel::new(world, Config { in_flight: 2, ..small() })?;
        let mut other_routing = Routing::new(&other)?;
        drop(dispatched(&mut other, &mut other_routing, &zeros)?);
        let Err(rejected) = other.combine_send(&other_routing, first, &input) else { return Err("accepted".into()) };
        names::<()>("an arrival of another object", Err(rejected.error), "arrival", "of another object", "made by this object")?;
        let first = rejected.returned.ok_or("the arrival was kept")?;
        finish(ep, &second_routing, second)?;
        finish(ep, routing, first)
    })
}

fn bad_fold() -> Result<(), Failed> {
    in_world(&Config { fold_weights: true, ..small() }, |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let view = |dtype, shape: &[usize]| TensorView::from_bytes(&zeros.0, dtype, shape);
        let mut arrival = dispatched(ep, routing, &zeros)?;
        let with = |row_weights| Input { y: ExpertRows::InPlace, row_weights };
        let mut cases = vec![
            ("row_weights", "None", "fold_weights", with(None)),
            ("row_weights dtype", "bf16", "f32", with(Some(view(DType::BF16, &[6, 2])?))),
            ("row_weights shape", "[6, 3]", ", 2]", with(Some(view(DType::F32, &[6, 3])?))),
        ];
        if arrival.on_host()?.num_rows() > 0 {
            cases.push(("row_weights shape", "[5, 2]", "[6, 2]", with(Some(view(DType::F32, &[5, 2])?))));
        }
        for (what, got, want, bad) in &cases {
            let Err(rejected) = ep.combine_send(routing, arrival, bad) else { return Err(format!("a bad {what} was accepted").into()) };
            names::<()>(&format!("combine with bad {what}"), Err(rejected.error), what, got, want)?;
            arrival = rejected.returned.ok_or(format!("combine with bad {what} kept the arrival"))?;
        }
        let good = with(Some(view(DType::F32, &[6, 2])?));
        for (what, got, want, dtype, shape) in
            [("topk_weights dtype", "bf16", "f32", DType::BF16, [3, 2]), ("topk_weights shape", "[2, 2]", "[3, 2]", DType::F32, [2, 2])]
        {
            let (mut out, mut folded) = (Zeros([3; 4096]), Zeros([3; 4096]));
            let output = Output {
                out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?,
                add_to: None,
                topk_weights: Some(TensorViewMut::from_bytes(&mut folded.0, dtype, &shape)?),
            };
            let Err(rejected) = ep.combine(routing, arrival, &good, output) else {
                return Err(format!("a bad {what} was accepted").into());
            };
            names::<()>(&format!("combine with bad {what}"), Err(rejected.error), what, got, want)?;
            arrival = rejected.returned.ok_or(format!("combine with bad {what} kept the arrival"))?;
        }
        finish(ep, routing, arrival)
    })?;
    // Without fold_weights there is nothing to fold.
    in_world(&Config { layout: Layout::ByExpert { segment_align: 1 }, ..small() }, |_, ep, routing| {
        let zeros = Zeros([0; 4096]);
        let arrival = dispatched(ep, routing, &zeros)?;
        let (mut out, mut folded) = (Zeros([3; 4096]), Zeros([3; 4096]));
        let output = Output {
            out: TensorViewMut::from_bytes(&mut out.0, DType::BF16, &[3, 16])?,
            add_to: None,
            topk_weights: Some(TensorViewMut::from_bytes(&mut folded.0, DType::F32, &[3, 2])?),
        };
        let input = Input { y: ExpertRows::InPlace, row_weights: None };
        let Err(rejected) = ep.combine(routing, arrival, &input, output) else { return Err("topk_weights were accepted".into()) };
        names::<()>("nothing to fold", Err(rejected.error), "topk_weights", "a tensor", "no fold_weights")
    })
}
