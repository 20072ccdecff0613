//! `moe info`: the machine, as this program sees it.
#![forbid(unsafe_code)]

use std::env;
use std::path::{Path, PathBuf};

use moe_kernels::measure::{Commit, Environment, environment, report};
use moe_kernels::{Error, Result};

use crate::output::Output;

/// Options of `moe info`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Info {
    environment: Environment,
    /// Backends of this build.
    backends: &'static [&'static str],
    gpu_libraries: Vec<GpuLibrary>,
    cache_folder: Option<PathBuf>,
}

/// Whether a GPU's run-time library is there. Only looked for, never loaded.
#[derive(serde::Serialize)]
struct GpuLibrary {
    vendor: &'static str,
    name: &'static str,
    path: Option<PathBuf>,
}

/// Prints what there is.
pub fn info(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    let info = Info {
        environment: Environment::record(),
        backends: &["cpu"],
        gpu_libraries: vec![gpu_library("NVIDIA", "libcuda.so.1"), gpu_library("AMD", "libamdhip64.so")],
        cache_folder: environment::cache_folder(),
    };
    if arguments.json {
        let json = serde_json::to_string_pretty(&info)
            .map_err(|error| Error::Io { what: "writing the machine as JSON".into(), why: error.to_string() })?;
        output.line(json)?;
    } else {
        for (name, value) in lines(&info) {
            output.paragraph(name, 11, &value)?;
        }
    }
    Ok(true)
}

fn lines(info: &Info) -> Vec<(&'static str, String)> {
    let e = &info.environment;
    let or_unknown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
    let version =
        [Some(format!("moe-kernels {}", e.version)), e.commit.as_ref().map(Commit::to_string), Some(e.profile.into()), e.rustc.clone()];
    let mut lines = vec![
        ("program", version.into_iter().flatten().collect::<Vec<_>>().join(", ")),
        ("system", or_unknown(&e.system)),
        ("cpu", format!("{}, {}, {} cores", or_unknown(&e.cpu), e.architecture, e.num_cores)),
        ("features", or_unknown(&e.features.join(" "))),
        ("level", format!("{} (of {})", e.level, e.levels.join(", "))),
        ("memory", format!("{}, {} available", report::bytes(e.memory.total_bytes), report::bytes(e.memory.available_bytes))),
        ("backends", info.backends.join(", ")),
    ];
    lines.push(("gpu", "not used: this version has no GPU backend".into()));
    for library in &info.gpu_libraries {
        let found = match &library.path {
            Some(path) => format!("{}: {} is installed", library.vendor, path.display()),
            None => format!("{}: {} was not found", library.vendor, library.name),
        };
        lines.push(("", found));
    }
    let cache = match &info.cache_folder {
        Some(folder) => format!("{} (for compiled GPU kernels; the cpu backend keeps nothing)", folder.display()),
        None => "none: neither MOE_CACHE_DIR, XDG_CACHE_HOME nor HOME is set".into(),
    };
    lines.push(("cache", cache));
    lines
}

/// Looks for `name` where a loader would, without loading it.
fn gpu_library(vendor: &'static str, name: &'static str) -> GpuLibrary {
    // The loader's usual folders, and where the vendors' installers and WSL put their libraries.
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
        "/opt/rocm/lib",
    ];
    let searched = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let path = env::split_paths(&searched)
        .filter(|folder| folder.is_absolute())
        .chain(usual.iter().map(PathBuf::from))
        .map(|folder: PathBuf| folder.join(name))
        .find(|path: &PathBuf| Path::exists(path));
    GpuLibrary { vendor, name, path }
}
