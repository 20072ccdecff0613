//! The one integration binary: a named trial per operation, backend and group of cases, and a module per operation.

use std::process::ExitCode;
use std::sync::PoisonError;

use libtest_mimic::{Arguments, Failed, Trial};
use moe_kernels::{Backend, check};

mod allocations;
mod bad_input;
mod blas;
mod capi;
mod cast;
mod checkpoint;
mod cli;
mod combine;
mod dispatch;
mod equality;
mod gate;
mod gate_torch;
mod golden;
mod gpu;
mod hygiene;
mod inspect;
mod layer;
mod model;
#[cfg(target_os = "linux")]
mod processes;
mod router;
mod world;

#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;

fn main() -> ExitCode {
    if let Ok(work) = std::env::var(gpu::child::VARIABLE) {
        return gpu::child::main(&work);
    }
    #[cfg(target_os = "linux")]
    if let Ok(work) = std::env::var(processes::VARIABLE) {
        return processes::child(&work);
    }
    let arguments = Arguments::from_args();
    let mut trials = shared_checks();
    for module in [
        allocations::trials,
        bad_input::trials,
        blas::trials,
        capi::trials,
        cast::trials,
        checkpoint::trials,
        cli::trials,
        combine::trials,
        dispatch::trials,
        equality::trials,
        gate::trials,
        gate_torch::trials,
        golden::trials,
        gpu::trials,
        hygiene::trials,
        inspect::trials,
        layer::trials,
        model::trials,
        router::trials,
        world::trials,
    ] {
        trials.extend(module());
    }
    #[cfg(target_os = "linux")]
    trials.extend(processes::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The library's checkers as trials. `MOE_BACKEND` names a backend that must be there: a missing one fails, it does not skip.
fn shared_checks() -> Vec<Trial> {
    let name = std::env::var("MOE_BACKEND").unwrap_or_else(|_| "cpu".into());
    check::groups()
        .into_iter()
        .filter(|group| check::runs_on(group.op, &name))
        .map(|group| {
            let name = name.clone();
            Trial::test(format!("{}::{name}::{}", group.op, group.name), move || {
                // Where ranks share a GPU one waits for another, and for no other work.
                let turn = (group.op == "dispatch" || group.op == "combine", &gpu::TURN);
                let _alone = (turn.0).then(|| turn.1.write().unwrap_or_else(PoisonError::into_inner));
                let _together = (!turn.0).then(|| turn.1.read().unwrap_or_else(PoisonError::into_inner));
                let backend = Backend::from_name(&name)?;
                group.run(&backend).map(|_| ()).map_err(|failed| Failed::from(failed.0))
            })
        })
        .collect()
}
