//! Ranks that are processes. A GPU that they share takes turns among them, so a wait takes milliseconds.

use std::time::Duration;

use moe_kernels::check::Shape;
use moe_kernels::ep::{Config, Mode, Rendezvous, Tuning, World};
use moe_kernels::{Backend, Rank, Result};

use super::rig::{Options, Rig};
use super::{Needs, Outcome, Test, base, gpus, report};
use crate::processes::{all_well, one_left, survivors_blame_of};

pub(super) const TRIALS: &[(&str, Needs, Test)] = &[
    ("ep processes: rounds of 2", Needs::GpuAlone, || timed("20", 2)),
    ("ep processes: rounds of 4", Needs::GpuAlone, || timed("6", 4)),
    ("ep processes: rounds of 8", Needs::GpuAlone, || timed("2", 8)),
    ("ep processes: one that leaves", Needs::GpuAlone, || one_left("gpu leave", 3)),
    ("ep processes: a killed one", Needs::GpuAlone, || survivors_blame_of("gpu killed", "gpu", &[1], 3).map(|_| ())),
];

fn timed(rounds: &str, ranks: usize) -> Outcome {
    let start = std::time::Instant::now();
    all_well("gpu rounds", rounds, ranks)?;
    report(format!("{rounds} rounds of {ranks} processes in each mode: {:.1} s with their start", start.elapsed().as_secs_f64()));
    Ok(())
}

fn configs() -> [Config; 2] {
    [base(), Config { mode: Mode::LowLatency, expected_tokens: 4, ..base() }]
}

pub fn shapes() -> Vec<Shape> {
    [2, 3, 4, 8].into_iter().flat_map(|ranks| configs().map(|config| (ranks, config, Tuning::default()))).collect()
}

/// One rank's part of `num` rounds in each mode.
pub fn rounds(world: &World, num: usize) -> Result<()> {
    for config in configs() {
        let mut rig = Rig::new(world, &config, Options::default())?;
        (0..num).try_for_each(|_| rig.round(0))?;
        rig.finish()?;
    }
    Ok(())
}

/// One rank's rounds until something fails.
pub fn endless(world: &World, enter: impl FnOnce()) -> Result<()> {
    let mut rig = Rig::new(world, &base(), Options::default())?;
    rig.round(0)?;
    rig.verdict()?;
    world.barrier()?;
    enter();
    loop {
        rig.round(0)?;
        rig.verdict()?;
    }
}

/// One rank's rounds until rank 0, which lives on, has left.
pub fn leave(world: World) -> Result<()> {
    let mut rig = Rig::new(&world, &base(), Options::default())?;
    rig.round(0)?;
    rig.verdict()?;
    world.barrier()?;
    if world.rank() == Rank(0) {
        drop(world);
        drop(rig);
        std::thread::sleep(Duration::from_secs(2)); // arbitrary: far above what it takes to hear of it
        return Ok(());
    }
    loop {
        rig.round(0)?;
        rig.verdict()?;
    }
}

/// A world of the survivors.
pub fn again(rank: usize, size: usize) -> Result<()> {
    let rendezvous = Rendezvous::from_env("survivors")?.generation(1).as_rank(Rank(rank as u32), size)?;
    rounds(&World::join(&Backend::Cuda(gpus()?), &rendezvous)?, 2)
}

/// The world of this process.
pub fn join() -> Result<World> {
    World::join(&Backend::Cuda(gpus()?), &Rendezvous::from_env("test")?)
}
