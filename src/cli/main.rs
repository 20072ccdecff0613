//! The program `moe`: runs a Mixture-of-Experts layer across ranks, checks the operations of this library, describes the machine.
#![forbid(unsafe_code)]

mod bench;
mod check;
mod info;
mod inspect;
mod names;
mod output;
mod run;
mod stress;
mod tune;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moe_kernels::{Error, Result};

use output::Output;

/// Runs a Mixture-of-Experts layer across ranks, checks it, and says where the time went.
///
/// Without a subcommand it does what `moe run` does, and takes the same options.
///
/// Exit status: 0 when all is well, 1 when a result is wrong or a check fails, 2 for bad arguments or bad input.
#[derive(Parser)]
#[command(name = "moe", version, args_conflicts_with_subcommands = true, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: run::Arguments,
}

#[derive(Subcommand)]
enum Command {
    /// Run a layer across ranks, check it, and say where the time went: what the program does without a subcommand
    Run(Box<run::Arguments>),
    /// Check every operation, bit for bit, against its specification
    Check(check::Arguments),
    /// Time operations on a GPU, beside what they replace
    #[command(subcommand)]
    Bench(bench::Arguments),
    /// Many rounds of dispatch and combine between ranks that are late, skewed or empty; every output compared
    Stress(stress::Arguments),
    /// Search the geometry of dispatch and combine on this GPU, and write it as a table
    Tune(Box<tune::Arguments>),
    /// Describe the machine: CPU, memory, GPUs, versions, cache folder
    Info(info::Arguments),
    /// Registers, spills and sizes of each GPU kernel on each architecture, compiled here without a GPU
    Inspect(inspect::Arguments),
}

/// What NVIDIA's driver must find in the environment when it starts, for ranks that share a GPU: a queue of the hardware for each stream, so that no kernel
/// stands behind one of another rank that waits, and modules that are loaded as a whole, not inside a launch.
const DRIVER_VARIABLES: [(&str, &str); 2] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")];

/// Whether an option, of whichever subcommand, names a GPU: without one nothing whose ranks share a GPU runs there.
#[cfg(unix)]
fn asks_for_a_gpu(arguments: impl Iterator<Item = std::ffi::OsString>) -> bool {
    let mut arguments = arguments;
    arguments.any(|argument| {
        let argument = argument.to_string_lossy();
        let backend = argument.strip_prefix("--backend=").unwrap_or(&argument);
        backend == "cuda" || backend.starts_with("cuda:")
    })
}

/// Starts this program again, in this process, with those variables, if an option asks for a GPU and they are not set. What the caller has set stays.
#[cfg(unix)]
fn prepare_for_a_gpu() {
    use std::os::unix::process::CommandExt;
    let missing: Vec<_> = DRIVER_VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    if missing.is_empty() || !asks_for_a_gpu(std::env::args_os().skip(1)) {
        return;
    }
    if let Ok(program) = std::env::current_exe() {
        // It only comes back when it cannot: then the program goes on as it is.
        let _ = std::process::Command::new(program).args(std::env::args_os().skip(1)).envs(missing).exec();
    }
}

#[cfg(not(unix))]
fn prepare_for_a_gpu() {}

fn main() -> ExitCode {
    prepare_for_a_gpu();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help that nobody reads any more (`moe --help | head -1`) is no failure.
            let _ = error.print();
            return ExitCode::from(error.exit_code().clamp(0, 255) as u8);
        }
    };
    let mut output = Output::new();
    let verdict = match arguments.command {
        Some(Command::Bench(arguments)) => bench::bench(&arguments, &mut output),
        Some(Command::Check(arguments)) => check::check(&arguments, &mut output),
        Some(Command::Info(arguments)) => info::info(&arguments, &mut output),
        Some(Command::Inspect(arguments)) => inspect::inspect(&arguments, &mut output),
        Some(Command::Stress(arguments)) => stress::stress(&arguments, &mut output),
        Some(Command::Tune(arguments)) => tune::tune(&arguments, &mut output),
        Some(Command::Run(arguments)) => run::run(&arguments, &mut output),
        None => run::run(&arguments.run, &mut output),
    };
    if let Err(error) = &verdict {
        output::error(error);
    }
    ExitCode::from(exit_status(&verdict))
}

/// 0 when all is well, 1 when a result is wrong or the work failed, 2 when the request or its input cannot be served as it is.
fn exit_status(verdict: &Result<bool>) -> u8 {
    match verdict {
        Ok(true) => 0,
        Ok(false) | Err(Error::Timeout { .. } | Error::Poisoned { .. } | Error::Mismatch { .. } | Error::Busy { .. }) => 1,
        Err(_) => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn every_subcommand_prepares_for_the_gpu_that_it_is_asked_for() {
        let asks = |text: &str| asks_for_a_gpu(text.split(' ').map(Into::into));
        for command in ["check", "check dispatch", "check --processes", "bench pair", "stress", "tune", "run", "--model qwen"] {
            for option in ["--backend cuda", "--backend=cuda", "--backend cuda:3", "--backend=cuda:3"] {
                assert!(asks(&format!("{command} {option}")) && asks(&format!("{option} {command}")), "{command} {option}");
            }
            assert!(!asks(command) && !asks(&format!("{command} --backend cpu")) && !asks(&format!("{command} --backend=auto")));
        }
    }

    #[test]
    fn a_wrong_result_has_a_status_of_its_own() {
        let bad_input = Err(Error::Io { what: String::new(), why: String::new() });
        assert_eq!([Ok(true), Ok(false), bad_input].map(|verdict| exit_status(&verdict)), [0, 1, 2]);
    }
}
