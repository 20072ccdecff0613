//! Expert parallelism on a GPU that ranks share: beyond the shared checks, what only GPUs have.

use std::time::Duration;

use libtest_mimic::Failed;
use moe_kernels::check::Shape;
use moe_kernels::ep::Config;
use moe_kernels::gpu::Program;
use moe_kernels::{Backend, Cuda, DType, Error};

use super::{Needs, Outcome, Test, ensure, report};

mod costs;
mod errors;
mod graphs;
#[cfg(target_os = "linux")]
pub mod processes;
pub mod rig;
mod rounds;

type Module = (&'static [(&'static str, Needs, Test)], fn() -> Vec<Shape>);

/// Trials of each module, and the objects that they make.
const MODULES: &[Module] = &[
    (costs::TRIALS, costs::shapes),
    (errors::TRIALS, errors::shapes),
    (graphs::TRIALS, graphs::shapes),
    #[cfg(target_os = "linux")]
    (processes::TRIALS, processes::shapes),
    (rounds::TRIALS, rounds::shapes),
];

/// All trials.
pub(super) fn trials() -> impl Iterator<Item = (&'static str, Needs, Test)> {
    MODULES.iter().flat_map(|(trials, _)| trials.iter().copied())
}

/// The kernels of those modules of which a trial is chosen.
pub fn programs(is_chosen: impl Fn(&str) -> bool) -> Vec<Program> {
    let chosen = MODULES.iter().filter(|(trials, _)| trials.iter().any(|(name, ..)| is_chosen(&format!("gpu::{name}"))));
    chosen.flat_map(|(_, shapes)| shapes()).flat_map(|shape| rig::programs(&shape)).collect()
}

/// Few small tokens: what most trials use.
pub fn base() -> Config {
    Config { timeout: Duration::from_secs(20), ..Config::new(64, DType::F32, 16, 4, 24) }
}

/// What ranks run on: the GPUs that `MOE_BACKEND` names, or the first.
pub fn gpus() -> moe_kernels::Result<Cuda> {
    let name = std::env::var("MOE_BACKEND").unwrap_or_default();
    match Backend::from_name(if Backend::ordinals(&name).is_some() { &name } else { "cuda" })? {
        Backend::Cuda(cuda) => Ok(cuda),
        _ => unreachable!("a GPU was asked for"),
    }
}

/// By which the environment scales bounds.
fn scale() -> f64 {
    std::env::var("MOE_TIMEOUT_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1.0)
}

fn failed(case: &str, error: &Error) -> Failed {
    format!("{case}: {error}").into()
}
