//! What fails, on GPUs: every rank says the same, in time, and goes on, or works again in a new world of the same process.

use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use moe_kernels::check::Shape;
use moe_kernels::ep::{Config, Tuning, World};
use moe_kernels::error::{Failure, FailureKind};
use moe_kernels::gpu::Buffer;
use moe_kernels::ops::combine::{self, ExpertRows};
use moe_kernels::ops::dispatch::{Input, NumTokens, Outputs, Payload, Routing};
use moe_kernels::tensor::Layout as Strides;
use moe_kernels::{Backend, DType, DeviceAddress, Error, Rank, Result, TensorView, TensorViewMut};

use super::super::kernels::delay;
use super::rig::{Options, Rig, run};
use super::rounds::with_modes;
use super::{Needs, Outcome, Test, base, ensure, failed, gpus, scale};
use crate::world::first_cause;

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("ep errors: a rank that never calls", Needs::GpuAlone, never_calls),
    ("ep errors: a rank that never combines", Needs::GpuAlone, never_combines),
    ("ep errors: a rank that panics", Needs::GpuAlone, panics),
    ("ep errors: a rank that leaves", Needs::GpuAlone, leaves),
    ("ep errors: a rank that leaves when it is done", Needs::GpuAlone, leaves_in_time),
    ("ep errors: a rank calls replay instead of dispatch", Needs::GpuAlone, different_calls),
    ("ep errors: more tokens than any call may have", Needs::GpuAlone, too_many_tokens),
    ("ep errors: bad arguments", Needs::GpuAlone, bad_arguments),
];

fn short() -> Config {
    Config { timeout: Duration::from_secs(4), ..base() }
}

pub fn shapes() -> Vec<Shape> {
    let mut all = [2, 3, 4, 8].map(|ranks| (ranks, base(), Tuning::default())).to_vec();
    all.extend(with_modes(base()).map(|config| (3, config, Tuning::default())));
    all.extend([base(), Config { max_tokens: base().max_tokens + 1, ..base() }].map(|config| (2, config, Tuning::default())));
    all
}

/// Results of all ranks, the culprit's too, and how long the others needed to fail.
fn outcome(
    ranks: usize,
    config: &Config,
    culprit: usize,
    its_part: impl Fn(World, Rig) -> Result<()> + Sync,
    others_part: impl Fn(&mut Rig) -> Result<()> + Sync,
) -> Result<(Vec<Result<()>>, f64), Failed> {
    let slowest = std::sync::Mutex::new(0f64);
    let results = World::run(&Backend::Cuda(gpus()?), ranks, |world| {
        let mut rig = Rig::new(&world, config, Options { full: true, ..Options::default() })?;
        rig.round(0)?;
        rig.verdict()?;
        world.barrier()?;
        if world.rank().index() == culprit {
            return its_part(world, rig);
        }
        let start = Instant::now();
        let result = others_part(&mut rig);
        let seconds = start.elapsed().as_secs_f64();
        let mut slowest = slowest.lock().expect("no panic holds it");
        *slowest = slowest.max(seconds);
        drop(slowest);
        // Later calls say the same, at once.
        let later = Instant::now();
        let again = rig.dispatch(0).map(drop).and_then(|()| rig.ep.synchronize());
        assert_eq!(again.as_ref().err().and_then(first_cause), result.as_ref().err().and_then(first_cause), "{again:?}");
        assert!(later.elapsed().as_secs_f64() < 0.2, "a poisoned world waited {:?}", later.elapsed());
        result
    })?;
    let slowest = *slowest.lock().expect("no panic holds it");
    Ok((results, slowest))
}

/// Every other rank failed with the same cause, which names the culprit; then a new world works.
fn all_blame(results: &[Result<()>], culprit: usize, kind: FailureKind) -> Result<Failure, Failed> {
    let others = results.iter().enumerate().filter(|(rank, _)| *rank != culprit);
    let causes = others.map(|(rank, result)| result.as_ref().err().and_then(first_cause).ok_or(format!("rank {rank}: {result:?}")));
    let causes = causes.collect::<Result<Vec<_>, _>>()?;
    let first = causes[0];
    ensure(causes.iter().all(|cause| *cause == first), format!("causes differ: {causes:?}"))?;
    let names_it = first.rank.index() == culprit || first.peer.index() == culprit;
    ensure(first.kind == kind && names_it, format!("{first:?} does not blame rank {culprit} with {kind:?}"))?;
    let again = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &base(), Options::default())?;
        (0..3).try_for_each(|_| rig.round(0))?;
        rig.finish()
    };
    run(results.len(), false, again).map_err(|error| failed("the rebuilt world", &error))?;
    Ok(first)
}

/// Bound of the waits of a configuration, as the environment scales it.
fn bound(config: &Config) -> f64 {
    config.timeout.as_secs_f64() * scale()
}

fn wait_for_bound(config: &Config) {
    std::thread::sleep(Duration::from_secs_f64(bound(config) + 0.5));
}

fn never_calls() -> Outcome {
    for ranks in [2, 4, 8] {
        let (config, culprit) = (short(), ranks - 1);
        let late = |_: World, rig: Rig| {
            wait_for_bound(&config);
            drop(rig);
            Ok(())
        };
        let (results, seconds) = outcome(ranks, &config, culprit, late, |rig| rig.round(0).and_then(|()| rig.verdict()))?;
        let first = all_blame(&results, culprit, FailureKind::Timeout)?;
        ensure((first.op, first.phase, first.peer.index()) == ("dispatch", "counts", culprit), format!("{first:?}"))?;
        ensure((first.epoch, first.seen) == (2, 0), format!("{first:?}: the second epoch was wanted"))?;
        ensure(seconds < bound(&config) + 0.4, format!("{ranks} ranks: {seconds} s, the bound is {} s", bound(&config)))?;
    }
    Ok(())
}

fn never_combines() -> Outcome {
    let config = short();
    let late = |_: World, mut rig: Rig| {
        let arrival = rig.dispatch(0)?;
        rig.stream.synchronize()?;
        wait_for_bound(&config);
        drop((arrival, rig));
        Ok(())
    };
    let (results, seconds) = outcome(3, &config, 1, late, |rig| rig.round(0).and_then(|()| rig.verdict()))?;
    let first = all_blame(&results, 1, FailureKind::Timeout)?;
    ensure((first.op, first.phase, first.peer) == ("combine", "ready", Rank(1)), format!("{first:?}"))?;
    ensure(seconds < bound(&config) + 0.4, format!("{seconds} s, the bound is {} s", bound(&config)))
}

fn panics() -> Outcome {
    let config = base();
    let part = |_: World, _rig: Rig| -> Result<()> { std::panic::resume_unwind(Box::new("a test's panic")) };
    let (results, seconds) = outcome(4, &config, 1, part, |rig| rig.round(0).and_then(|()| rig.verdict()))?;
    all_blame(&results, 1, FailureKind::Panicked)?;
    ensure(seconds < bound(&config) / 2.0, format!("{seconds} s: found by the bound of {} s", bound(&config)))
}

fn leaves() -> Outcome {
    for config in with_modes(base()) {
        // The world first: a rank that frees memory waits for all kernels of its process, and has not left before.
        let part = |world: World, rig: Rig| {
            drop(world);
            drop(rig);
            Ok(())
        };
        let (results, seconds) = outcome(3, &config, 0, part, |rig| rig.round(0).and_then(|()| rig.verdict()))?;
        let first = all_blame(&results, 0, FailureKind::Left)?;
        ensure((first.op, first.phase, first.rank) == ("dispatch", "counts", Rank(0)), format!("{first:?}"))?;
        ensure(seconds < bound(&config) / 4.0, format!("{seconds} s: found by the bound of {} s", bound(&config)))?;
        // Between dispatch and combine.
        let part = |world: World, mut rig: Rig| {
            let arrival = rig.dispatch(0)?;
            drop(arrival);
            drop(world);
            drop(rig);
            Ok(())
        };
        let (results, seconds) = outcome(3, &config, 2, part, |rig| rig.round(0).and_then(|()| rig.verdict()))?;
        let first = all_blame(&results, 2, FailureKind::Left)?;
        ensure((first.op, first.phase, first.rank) == ("combine", "ready", Rank(2)), format!("{first:?}"))?;
        ensure(seconds < bound(&config) / 4.0, format!("{seconds} s: found by the bound of {} s", bound(&config)))?;
    }
    Ok(())
}

/// A rank that has done its part may go: who waits for another rank then, longer than it takes to hear of it, is served.
fn leaves_in_time() -> Outcome {
    for config in with_modes(base()) {
        let work = |world: World| -> Result<()> {
            let mut rig = Rig::new(&world, &config, Options { full: true, ..Options::default() })?;
            delay(&rig.stream, 0)?; // loads it
            rig.round(0)?;
            rig.verdict()?;
            world.barrier()?;
            let arrival = rig.dispatch(0)?;
            if world.rank() == Rank(0) {
                // Its rows may be read, and it does not want its sums.
                drop(rig.combine_send(0, arrival)?);
                drop(world);
                drop(rig);
                return Ok(());
            }
            if world.rank() == Rank(1) {
                delay(&rig.stream, 300_000_000)?; // arbitrary: far above what it takes to hear that rank 0 has left
            }
            // Rank 2 waits for rank 1 while rank 0 is gone.
            rig.combine(0, arrival)?;
            rig.check_sums(0)?;
            rig.verdict()
        };
        run(3, false, work).map_err(|error| failed(&format!("{config:?}"), &error))?;
    }
    Ok(())
}

/// All ranks are told; the arrival of that call has no rows, its combine writes nothing, and the next call works.
fn different_calls() -> Outcome {
    let work = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &base(), Options::default())?;
        for _ in 0..2 {
            rig.round(0)?;
            rig.verdict()?;
            let arrival = if world.rank() == Rank(1) { rig.replay(0)? } else { rig.dispatch(0)? };
            // The next call says it, if the kernels have come so far.
            match rig.combine(0, arrival).and_then(|()| rig.ep.synchronize()) {
                Err(Error::Mismatch { first: Rank(0), second: Rank(1), what, .. }) if what == "call" => {}
                other => panic!("rank {}: {other:?}", world.rank()),
            }
            let _ = rig.ep.synchronize();
            assert!(rig.sums_are_untouched(0)?, "a refused call's combine wrote");
            world.barrier()?;
        }
        rig.round(0)?;
        rig.finish()
    };
    run(3, false, work).map(drop).map_err(|error| failed("replay against dispatch", &error))
}

/// A number of tokens above `max_tokens` on one rank: nobody writes, all know whose it is.
fn too_many_tokens() -> Outcome {
    let config = Config { max_tokens: 8, ..base() };
    let work = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &config, Options::default())?;
        rig.round(0)?;
        rig.verdict()?;
        world.barrier()?;
        let row = config.hidden * 4;
        let buffers = [Buffer::new(rig.stream.device(), 16 * row)?, Buffer::new(rig.stream.device(), 16 * config.k * 4)?];
        buffers.iter().try_for_each(|buffer| buffer.fill(&rig.stream, 0, buffer.len(), 0))?;
        let mut routing = Routing::new(&rig.ep)?;
        let num_tokens = if world.rank() == Rank(1) { 16 } else { 2 };
        let input = Input {
            x: buffers[0].view(0, Strides::contiguous("test", DType::F32, &[16, config.hidden])?)?,
            topk_idx: buffers[1].view(0, Strides::contiguous("test", DType::I32, &[16, config.k])?)?,
            topk_weights: None,
            scales: None,
            num_tokens: NumTokens::Host(num_tokens),
        };
        rig.stream.synchronize()?;
        world.barrier()?;
        drop(rig.ep.dispatch(&mut routing, &input, Outputs::default())?);
        match rig.ep.synchronize() {
            Err(Error::Capacity { demands, .. }) => {
                let found: Vec<_> = demands.iter().map(|d| (d.rank, d.demand, d.capacity)).collect();
                assert_eq!(found, [(Rank(1), 16, 8)]);
            }
            other => panic!("rank {}: {other:?}", world.rank()),
        }
        rig.round(0)?;
        rig.verdict()?;
        world.barrier()?;
        drop((routing, buffers));
        rig.finish()
    };
    run(3, false, work).map(drop).map_err(|error| failed("too many tokens", &error))
}

/// Fails unless the call was refused with `Invalid` for `what`.
fn refuses<T>(case: &str, result: Result<T>, what: &str) {
    match result {
        Err(Error::Invalid { what: got, .. }) if got.contains(what) => {}
        Err(error) => panic!("{case}: {error}; expected an error that names `{what}`"),
        Ok(_) => panic!("{case}: accepted"),
    }
}

#[repr(align(64))]
struct Host([u8; 4096]);

/// Each is refused on its rank before anything is written or sent: the next call works as if nothing had been.
fn bad_arguments() -> Outcome {
    let config = base();
    let (hidden, k) = (config.hidden, config.k);
    let work = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &config, Options::default())?;
        let mut other = Rig::new(&world, &Config { max_tokens: config.max_tokens + 1, ..config.clone() }, Options::default())?;
        let device = rig.stream.device().clone();
        let memory = Buffer::new(&device, 1 << 16)?;
        memory.fill(&rig.stream, 0, memory.len(), 0)?;
        let mut poisoned = Buffer::new(&device, 1 << 16)?;
        poisoned.fill(&rig.stream, 0, poisoned.len(), 0xFF)?;
        rig.stream.synchronize()?;
        let mut routing = Routing::new(&rig.ep)?;
        world.barrier()?;
        rig.round(0)?;
        rig.verdict()?;
        world.barrier()?;

        let host = Host([0; 4096]);
        let on_host = |dtype, shape: &[usize]| TensorView::from_bytes(&host.0, dtype, shape);
        let strided = |at: usize, dtype, shape: &[usize], strides: &[usize]| {
            Strides::strided("test", dtype, shape, strides).and_then(|layout| memory.view(at, layout))
        };
        let view = |dtype, shape: &[usize]| Strides::contiguous("test", dtype, shape).and_then(|layout| memory.view(0, layout));
        let elsewhere = |device: u32, address: u64, dtype, shape: &[usize]| {
            let layout = Strides::contiguous("test", dtype, shape)?;
            // SAFETY: no operation runs with this view: it is refused.
            unsafe { TensorView::from_device(DeviceAddress { device, address }, layout) }
        };
        let good = Input {
            x: view(DType::F32, &[3, hidden])?,
            topk_idx: view(DType::I32, &[3, k])?,
            topk_weights: None,
            scales: None,
            num_tokens: NumTokens::All,
        };
        let DeviceAddress { address: here, device: ordinal } = memory.address(); // 0, or of two GPUs 1
        let cases: Vec<(&str, &str, Input<'_>)> = vec![
            ("x on the host", "x", Input { x: on_host(DType::F32, &[3, hidden])?, ..good }),
            ("x on another device", "x", Input { x: elsewhere(1 - ordinal, here, DType::F32, &[3, hidden])?, ..good }),
            ("x nowhere", "x", Input { x: elsewhere(ordinal, 4096, DType::F32, &[3, hidden])?, ..good }),
            ("x misaligned", "x address", Input { x: strided(8, DType::F32, &[3, hidden], &[hidden, 1])?, ..good }),
            (
                "x with a stride of 8 bytes more",
                "x row stride",
                Input { x: strided(0, DType::F32, &[3, hidden], &[hidden + 2, 1])?, ..good },
            ),
            ("x of another type", "x dtype", Input { x: view(DType::BF16, &[3, hidden])?, ..good }),
            ("x of another width", "x shape", Input { x: view(DType::F32, &[3, hidden + 4])?, ..good }),
            ("ids on the host", "topk_idx", Input { topk_idx: on_host(DType::I32, &[3, k])?, ..good }),
            ("ids on another device", "topk_idx", Input { topk_idx: elsewhere(1 - ordinal, here, DType::I32, &[3, k])?, ..good }),
            ("short ids", "topk_idx shape", Input { topk_idx: view(DType::I32, &[2, k])?, ..good }),
            ("ids of another type", "topk_idx dtype", Input { topk_idx: view(DType::U32, &[3, k])?, ..good }),
            ("weights on the host", "topk_weights", Input { topk_weights: Some(on_host(DType::F32, &[3, k])?), ..good }),
            ("short weights", "topk_weights shape", Input { topk_weights: Some(view(DType::F32, &[3, k - 1])?), ..good }),
            ("weights of another type", "topk_weights dtype", Input { topk_weights: Some(view(DType::BF16, &[3, k])?), ..good }),
            ("scales that nobody expects", "scales", Input { scales: Some(view(DType::Bytes, &[3, 4])?), ..good }),
            ("a count on the host", "num_tokens", Input { num_tokens: NumTokens::Device(on_host(DType::U32, &[1])?), ..good }),
            ("a count of two", "num_tokens", Input { num_tokens: NumTokens::Device(view(DType::U32, &[2])?), ..good }),
            ("more tokens than rows", "num_tokens", Input { num_tokens: NumTokens::Host(4), ..good }),
        ];
        for (case, what, input) in &cases {
            refuses(case, rig.ep.dispatch(&mut routing, input, Outputs::default()), what);
            refuses(case, rig.ep.dispatch_send(&mut routing, input), what);
        }
        let mut of_other = Routing::new(&other.ep)?;
        refuses("another object's routing", rig.ep.dispatch(&mut of_other, &good, Outputs::default()), "routing");
        refuses("an empty routing", rig.ep.replay(&routing, &Payload { x: good.x, scales: None }), "routing");

        let local = rig.ep.num_local_experts();
        let mut counts = vec![0u32; local];
        let outputs = Outputs { expert_statistics: None, counts_host: Some(TensorViewMut::from_slice(&mut counts, &[local])?) };
        refuses("counts_host that is not pinned", rig.ep.dispatch(&mut routing, &good, outputs), "counts_host");
        let mut statistics = vec![0i64; local];
        let outputs = Outputs { expert_statistics: Some(TensorViewMut::from_slice(&mut statistics, &[local])?), counts_host: None };
        refuses("statistics on the host", rig.ep.dispatch(&mut routing, &good, outputs), "expert_statistics");

        // Combine gives the arrival back.
        let mut arrival = Some(rig.ep.dispatch(&mut routing, &good, Outputs::default())?);
        refuses_busy(rig.ep.dispatch(&mut routing, &good, Outputs::default()));
        let max_rows = rig.ep.plan().max_rows;
        let staged = |y| combine::Input { y: ExpertRows::Staged(y), row_weights: None };
        let in_place = combine::Input { y: ExpertRows::InPlace, row_weights: None };
        let inputs = [
            ("y on the host", "y", staged(on_host(DType::F32, &[8, hidden])?)),
            ("short y", "y shape", staged(view(DType::F32, &[max_rows - 1, hidden])?)),
            ("y misaligned", "y address", staged(strided(4, DType::F32, &[max_rows, hidden], &[hidden, 1])?)),
            ("y of another type", "y dtype", staged(view(DType::F16, &[max_rows, hidden])?)),
            (
                "weights that nobody folds",
                "row_weights",
                combine::Input { row_weights: Some(view(DType::F32, &[max_rows, k])?), ..in_place },
            ),
        ];
        for (case, what, input) in inputs {
            let out = poisoned.view_mut(0, Strides::contiguous("test", DType::F32, &[3, hidden])?)?;
            let output = combine::Output { out, add_to: None, topk_weights: None };
            let rejected = rig.ep.combine(&routing, arrival.take().expect("given back"), &input, output).expect_err(case);
            arrival = rejected.returned;
            refuses::<()>(case, Err(rejected.error), what);
        }
        let mut on_host_out = vec![0f32; 3 * hidden];
        let outs: [(&str, &str, TensorViewMut<'_>); 2] = [
            ("out on the host", "out", TensorViewMut::from_slice(&mut on_host_out, &[3, hidden])?),
            ("short out", "out shape", poisoned.view_mut(0, Strides::contiguous("test", DType::F32, &[2, hidden])?)?),
        ];
        for (case, what, out) in outs {
            let output = combine::Output { out, add_to: None, topk_weights: None };
            let rejected = rig.ep.combine(&routing, arrival.take().expect("given back"), &in_place, output).expect_err(case);
            arrival = rejected.returned;
            refuses::<()>(case, Err(rejected.error), what);
        }
        drop(arrival);
        let mut bytes = vec![0; poisoned.len()];
        poisoned.download(&rig.stream, 0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == 0xFF), "a refused call wrote");

        (0..3).try_for_each(|_| rig.round(0).and_then(|()| other.round(0)))?;
        let verdict = rig.verdict().and(other.verdict());
        world.barrier()?;
        drop((routing, of_other));
        verdict
    };
    run(2, false, work).map(drop).map_err(|error| failed("bad arguments", &error))
}

fn refuses_busy<T>(result: Result<T>) {
    assert!(matches!(result.as_ref().err(), Some(Error::Busy { .. })), "a bank was taken twice: {:?}", result.err());
}
