//! What a call costs its host.

use std::time::Instant;

use moe_kernels::check::Shape;
use moe_kernels::ep::{Config, Mode, Tuning, World};
use moe_kernels::gpu::{Geometry, Stream};
use moe_kernels::{Error, Result};

use super::super::kernels::{KERNELS, Nothing, Test as Kernel, delay};
use super::rig::{Options, Rig, run};
use super::{Needs, Outcome, Test, base, ensure, failed, report};
use crate::allocations::count;

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("ep costs: calls allocate nothing and wait for nothing", Needs::GpuAlone, nothing),
    ("ep costs: calls against bare launches", Needs::GpuAlone, launches),
];

fn configs() -> [(usize, Config); 2] {
    // Launches of a dispatch and a combine of rows in place.
    [(3, base()), (2, Config { mode: Mode::LowLatency, expected_tokens: 4, ..base() })]
}

pub fn shapes() -> Vec<Shape> {
    [1, 2, 4, 8].into_iter().flat_map(|ranks| configs().map(|(_, config)| (ranks, config, Tuning::default()))).collect()
}

fn nothing() -> Outcome {
    for (_, config) in configs() {
        let work = |world: World| -> Result<(u64, f64)> {
            let mut rig = Rig::new(&world, &config, Options::default())?;
            delay(&rig.stream, 0)?;
            rig.round(0)?;
            rig.verdict()?;
            world.barrier()?;
            // Behind a kernel of 50 ms (arbitrary: far above what launches take).
            delay(&rig.stream, 50_000_000)?;
            let start = Instant::now();
            let mut result = Ok(());
            let num_allocations = count(|| {
                result = rig.dispatch(0).and_then(|arrival| rig.combine(0, arrival));
            });
            let seconds = start.elapsed().as_secs_f64();
            result?;
            rig.check_sums(0)?;
            rig.advance(0)?;
            rig.round(0)?;
            rig.finish().map(|()| (num_allocations, seconds))
        };
        for (rank, (num_allocations, seconds)) in run(2, false, work).map_err(|error| failed("costs", &error))?.into_iter().enumerate() {
            ensure(num_allocations == 0, format!("rank {rank}: {num_allocations} allocations, {:?}", config.mode))?;
            ensure(seconds < 0.02, format!("rank {rank}: calls took {seconds} s behind a kernel of 50 ms, {:?}", config.mode))?;
        }
    }
    Ok(())
}

/// Seconds of a call in the fastest of several batches on this rank, while all ranks make them.
fn fastest(stream: &Stream, world: &World, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    const NUM: usize = 20; // queues stay short, so that nobody waits for room in them
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        stream.synchronize()?;
        world.barrier()?;
        let start = Instant::now();
        (0..NUM).try_for_each(|_| call())?;
        best = best.min(start.elapsed().as_secs_f64() / NUM as f64);
    }
    stream.synchronize()?;
    world.barrier()?;
    Ok(best)
}

fn launches() -> Outcome {
    for ranks in [1, 2, 8] {
        for (num_launches, config) in configs() {
            let work = |world: World| -> Result<(f64, f64)> {
                let mut rig = Rig::new(&world, &config, Options::default())?;
                let stream = rig.stream.clone();
                let kernel = KERNELS.get("test", &stream, Kernel::Nothing)?;
                rig.round(0)?;
                rig.verdict()?;
                world.barrier()?;
                let bare = || {
                    for _ in 0..num_launches {
                        // SAFETY: the kernel is `nothing`, and `Nothing` its struct.
                        unsafe { kernel.launch(&stream, &Geometry { threads: 256, ..Geometry::default() }, &Nothing::default()) }?;
                    }
                    Ok::<(), Error>(())
                };
                let bare = fastest(&stream, &world, bare)?;
                let ours = fastest(&stream, &world, || rig.bare_round(0))?;
                rig.finish().map(|()| (bare, ours))
            };
            let all = run(ranks, false, work).map_err(|error| failed("costs", &error))?;
            let mean = |of: fn(&(f64, f64)) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64 * 1e6;
            let (bare, ours) = (mean(|pair| pair.0), mean(|pair| pair.1));
            report(format!(
                "{ranks} ranks, {:?}: dispatch and combine {ours:.1} us, {num_launches} bare launches {bare:.1} us",
                config.mode
            ));
            // Twice: arbitrary, other work of the machine disturbs both.
            ensure(ours < 2.0 * bare + 2.0, format!("{ours} us for {num_launches} launches, bare {bare} us"))?;
        }
    }
    Ok(())
}
