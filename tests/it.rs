//! The one integration binary: a named trial per operation, backend and group of cases, and a module per operation.

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::PoisonError;
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};
use moe_kernels::check::precompile::{self, Share};
use moe_kernels::gpu::Program;
use moe_kernels::{Backend, check, check::Group};

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
    let is_cuda = std::env::var("MOE_BACKEND").is_ok_and(|name| name.starts_with("cuda"));
    if is_cuda {
        // Ranks that share a GPU must not wait for each other's queues, nor for the loading of a kernel that is launched first.
        for (name, value) in [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")] {
            // SAFETY: this thread is the only one yet.
            unsafe { std::env::set_var(name, value) };
        }
    }
    let arguments = Arguments::from_args();
    if is_cuda && !arguments.list {
        if let Some(share) = Share::of_this_process() {
            return ExitCode::from(u8::from(share.compile(&programs(&arguments)).is_err()));
        }
        let programs = programs(&arguments);
        if let (false, Ok(Backend::Cuda(cuda))) = (programs.is_empty(), Backend::from_name(&backend_name())) {
            let start = Instant::now();
            precompile::compile(&cuda, &programs);
            eprintln!("{} kernels of expert parallelism are compiled after {:.1} s", programs.len(), start.elapsed().as_secs_f64());
        }
    }
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

fn backend_name() -> String {
    std::env::var("MOE_BACKEND").unwrap_or_else(|_| "cpu".into())
}

fn name_of(group: &Group) -> String {
    format!("{}::{}::{}", group.op, backend_name(), group.name)
}

/// What the trials that the arguments choose load on a GPU for objects of expert parallelism.
fn programs(arguments: &Arguments) -> Vec<Program> {
    let is_chosen = |name: &str| {
        let is = |text: &String| if arguments.exact { name == text } else { name.contains(text.as_str()) };
        arguments.filter.as_ref().is_none_or(is) && !arguments.skip.iter().any(is)
    };
    let groups = check::groups();
    let chosen = groups.iter().filter(|group| check::runs_on(group.op, &backend_name()) && is_chosen(&name_of(group)));
    let mut all: Vec<Program> = chosen.filter_map(|group| group.programs().ok()).flatten().collect();
    all.extend(gpu::ep::programs(is_chosen));
    let mut seen = HashSet::new();
    all.retain(|program| seen.insert(format!("{} {:?}", program.entry, program.constants)));
    all
}

/// The library's checkers as trials. `MOE_BACKEND` names a backend that must be there: a missing one fails, it does not skip.
fn shared_checks() -> Vec<Trial> {
    let name = backend_name();
    check::groups()
        .into_iter()
        .filter(|group| check::runs_on(group.op, &name))
        .map(|group| {
            let name = name.clone();
            Trial::test(name_of(&group), move || {
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
