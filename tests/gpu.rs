//! The GPU runtime, on a GPU. Without one (or without NVRTC, for trials that only compile) these trials are ignored; when `MOE_BACKEND` asks for
//! CUDA they fail instead. They need no files.

use std::sync::{PoisonError, RwLock};

use libtest_mimic::{Failed, Trial};
use moe_kernels::Backend;
use moe_kernels::gpu::{Device, Nvrtc, Stream};

mod cast;
pub mod child;
mod compile;
mod costs;
#[cfg(feature = "cudarc")]
mod cudarc;
mod entries;
pub mod ep;
mod gate;
mod graphs;
mod kernels;
mod launches;
mod links;
mod memory;
mod raw;
mod shapes;
mod shareable;
mod streams;
mod waiting;

type Outcome = Result<(), Failed>;
type Test = fn() -> Outcome;

/// What a trial needs beside this program.
#[derive(Clone, Copy)]
enum Needs {
    /// A GPU and NVRTC.
    Gpu,
    /// The same, and nothing of this process on the GPU beside it: for figures, and for what concerns the whole context.
    GpuAlone,
    /// The same of two GPUs. Ignored with fewer, unless `MOE_BACKEND` names several.
    TwoGpusAlone,
    /// NVRTC.
    Compiler,
    /// Nothing.
    Nothing,
}

/// Held by every trial while it runs: alone, or together with others.
pub static TURN: RwLock<()> = RwLock::new(());

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let backend = std::env::var("MOE_BACKEND").unwrap_or_default();
    let (is_asked_for, num_asked_for) = (backend.starts_with("cuda"), Backend::ordinals(&backend).map_or(0, |gpus| gpus.len()));
    let has_compiler = Nvrtc::get().is_ok();
    let num_gpus = if has_compiler { Device::count().unwrap_or(0) } else { 0 };
    let modules: [&[(&str, Needs, Test)]; 13] = [
        cast::TRIALS,
        compile::TRIALS,
        costs::TRIALS,
        entries::TRIALS,
        gate::TRIALS,
        graphs::TRIALS,
        launches::TRIALS,
        links::TRIALS,
        memory::TRIALS,
        shapes::TRIALS,
        shareable::TRIALS,
        streams::TRIALS,
        waiting::TRIALS,
    ];
    #[cfg(not(feature = "cudarc"))]
    let adapters: &[(&str, Needs, Test)] = &[];
    #[cfg(feature = "cudarc")]
    let adapters = cudarc::TRIALS;
    let all = modules.into_iter().flatten().chain(adapters).copied().chain(ep::trials());
    all.map(|(name, needs, test)| {
        let is_possible = match needs {
            Needs::Gpu | Needs::GpuAlone => num_gpus > 0 || is_asked_for,
            Needs::TwoGpusAlone => num_gpus > 1 || num_asked_for > 1,
            Needs::Compiler => has_compiler || is_asked_for,
            Needs::Nothing => true,
        };
        let run = move || match needs {
            Needs::GpuAlone | Needs::TwoGpusAlone => {
                let _turn = TURN.write().unwrap_or_else(PoisonError::into_inner);
                test()
            }
            Needs::Gpu | Needs::Compiler | Needs::Nothing => {
                let _turn = TURN.read().unwrap_or_else(PoisonError::into_inner);
                test()
            }
        };
        Trial::test(format!("gpu::{name}"), run).with_ignored_flag(!is_possible)
    })
    .collect()
}

/// A figure, for whoever reads the output.
fn report(line: impl std::fmt::Display) {
    println!("    gpu: {line}");
}

fn ensure(condition: bool, message: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(message.into().into()) }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Outcome {
    if got == want { Ok(()) } else { Err(format!("{what} is {got:?}, expected {want:?}").into()) }
}

/// The first GPU, with a stream of the trial's own.
fn gpu() -> Result<(Device, Stream), Failed> {
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    Ok((device, stream))
}
