//! `moe bench`: operations timed on a GPU, beside what they replace.
#![forbid(unsafe_code)]

mod agreement;
mod cast;
mod cast_case;
mod decode;
mod decode_step;
pub mod ep;
mod gap;
mod gate;
mod gate_arms;
mod slots;

use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

use moe_kernels::gpu::{CublasLt, Nvrtc};
use moe_kernels::measure::{Environment, Statistics};
use moe_kernels::{Error, Result};

use crate::output::Output;

/// What is timed.
#[derive(clap::Subcommand)]
pub enum Arguments {
    /// The shared expert's gate, at every size, beside cuBLASLt and the chain of single steps
    Gate(gate::Arguments),
    /// The grouped FP8 cast + transpose, beside a copy of the same bytes and what is commonly done
    Cast(cast::Arguments),
    /// A whole decode step of a model with 40 layers, with the gate of a BLAS and with ours
    Decode(decode::Arguments),
    /// Dispatch between ranks: the whole, the movement of rows alone, and what is beside it
    Dispatch(Box<ep::Arguments>),
    /// Combine between ranks
    Combine(Box<ep::Arguments>),
    /// Dispatch and combine in turns, and each of them
    Pair(Box<ep::Arguments>),
    /// How far dispatch and combine are apart, on a GPU that is verified to be idle; raw data, summary and machine are kept
    Gap(Box<gap::Arguments>),
}

/// Measures; `false` when a result was wrong.
pub fn bench(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    match arguments {
        Arguments::Gate(arguments) => gate::bench(arguments, output),
        Arguments::Cast(arguments) => cast::bench(arguments, output),
        Arguments::Decode(arguments) => decode::bench(arguments, output),
        Arguments::Dispatch(arguments) => ep::bench(ep::Phase::Dispatch, arguments, output),
        Arguments::Combine(arguments) => ep::bench(ep::Phase::Combine, arguments, output),
        Arguments::Gap(arguments) => gap::bench(arguments, output),
        Arguments::Pair(arguments) => ep::bench(ep::Phase::Pair, arguments, output),
    }
}

/// Options of every benchmark.
#[derive(clap::Args)]
struct Common {
    /// Write everything that was measured, and the machine that it was measured on, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The GPU
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    device: u32,
    /// Measure on a busy GPU too, and say that it was
    #[arg(long)]
    allow_busy: bool,
    /// Keep up to this many bytes of the changes since the commit in the JSON (`git diff HEAD`)
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "json")]
    diff: usize,
}

/// A file that was opened before the work, so that a bad path is known at once.
pub struct Json(Option<(PathBuf, File)>);

impl Json {
    pub fn create(path: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| match File::create(path) {
            Ok(file) => Ok((path.to_owned(), file)),
            Err(error) => Err(Error::Io { what: format!("creating {}", path.display()), why: error.to_string() }),
        };
        Ok(Json(path.map(create).transpose()?))
    }

    /// Replaces what is in the file.
    pub fn write(&mut self, record: &impl serde::Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.0 else { return Ok(()) };
        let failed = |why: String| Error::Io { what: format!("writing {}", path.display()), why };
        let mut json = serde_json::to_vec_pretty(record).map_err(|error| failed(error.to_string()))?;
        json.push(b'\n');
        file.rewind().and_then(|()| file.set_len(0)).and_then(|()| file.write_all(&json)).map_err(|error| failed(error.to_string()))
    }
}

/// The machine, with the compiler of its kernels, and the version of cuBLASLt.
fn environment(common: &Common) -> (Environment, Option<String>) {
    let cublaslt = || CublasLt::get().ok()?.version().ok();
    (environment_with(common.diff), cublaslt().map(|(major, minor, patch)| format!("cuBLASLt {major}.{minor}.{patch}")))
}

/// The machine, with the compiler of its kernels.
fn environment_with(diff: usize) -> Environment {
    let nvrtc = || Nvrtc::get().ok()?.version().ok();
    let nvrtc = nvrtc().map(|(major, minor)| format!("NVRTC {major}.{minor}"));
    let mut environment = Environment::record_with_diff(diff);
    environment.nvrtc = nvrtc;
    environment
}

/// A line on stderr about how far the work is.
fn note(text: impl std::fmt::Display) {
    // With stderr gone there is nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn statistics(samples: &[f64]) -> Result<Statistics> {
    Statistics::of(samples).ok_or_else(|| Error::Invalid {
        op: "bench",
        what: "samples".into(),
        got: format!("{samples:?}"),
        want: "at least one, and each a number".into(),
    })
}
