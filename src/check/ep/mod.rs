//! What the checks of dispatch and combine share: inputs, scripts of calls that all ranks make alike, and the comparison with the oracle.
#![forbid(unsafe_code)]

mod arrival;
pub(super) mod buffer;
pub mod cases;
pub mod inputs;
pub mod processes;
mod rank;
pub mod script;

pub use script::{Batch, Count, Phase, Report, Script, Step};

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::backend::Backend;
use crate::check::{Failed, Group, variants};

/// A group of the scripts that `scripts` makes for a CPU or, `true`, for a GPU.
pub fn group(op: &'static str, name: String, scripts: impl Fn(bool) -> Vec<Script> + Clone + Send + Sync + 'static) -> Group {
    let of_gpu = scripts.clone();
    let run = move |backend: &Backend| run_all(backend, scripts(is_gpu(backend)));
    Group::new(op, name, run).with_shapes(move || of_gpu(true).into_iter().map(|script| script.shape()).collect())
}

/// Whether kernels are compiled for what runs there.
pub fn is_gpu(backend: &Backend) -> bool {
    matches!(backend, Backend::Cuda(_))
}

/// Runs every script, each on one variant of the backend, and returns how many there were. The variant follows from the script, so that
/// neither a world nor a width always meets the same one.
pub fn run_all(backend: &Backend, scripts: impl IntoIterator<Item = Script>) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_scripts = 0;
    for script in scripts {
        let mut hasher = DefaultHasher::new();
        (&script.name, &script.config).hash(&mut hasher);
        let (_, variant) = &variants[hasher.finish() as usize % variants.len()];
        script.prepare()?.run(variant)?;
        num_scripts += 1;
    }
    Ok(num_scripts)
}
