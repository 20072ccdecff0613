//! What the checks of dispatch and combine share: inputs, scripts of calls that all ranks make alike, and the comparison with the oracle.
#![forbid(unsafe_code)]

mod arrival;
mod buffer;
pub mod cases;
pub mod inputs;
mod rank;
pub mod script;

pub use script::{Batch, Count, Phase, Report, Script, Step};

use crate::backend::{Backend, Cpu};
use crate::check::Failed;
use crate::cpu::Level;

/// The backend with every instruction set of this machine, on the calling thread and on 3 threads (3: neither one nor a power of two).
pub fn variants(backend: &Backend) -> Result<Vec<Backend>, Failed> {
    match backend {
        Backend::Cpu(_) => {
            let (one, three) = (Cpu::with_threads(1)?, Cpu::with_threads(3)?);
            let at = |level: &Level| [&one, &three].map(|cpu| Backend::Cpu(cpu.clone().at_level(*level)));
            Ok(Level::available().iter().flat_map(at).collect())
        }
    }
}

/// Runs every script, each on the next variant of the backend, and returns how many there were.
pub fn run_all(backend: &Backend, scripts: impl IntoIterator<Item = Script>) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_scripts = 0;
    for script in scripts {
        script.prepare()?.run(&variants[num_scripts % variants.len()])?;
        num_scripts += 1;
    }
    Ok(num_scripts)
}
