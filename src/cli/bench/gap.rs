//! `moe bench gap`: how far dispatch and combine are apart, on a GPU that is verified to be idle, with everything kept in a folder.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use moe_kernels::ep::{Launches, World};
use moe_kernels::measure::{Environment, IdleReport, Statistics};
use moe_kernels::{Error, Result};

use super::ep::case::{Case, Traffic};
use super::ep::options::{Launching, Programmatic, Shape, invalid};
use super::ep::rank::{Arm, Gate, Plan, RankResult, all};
use super::ep::record::name;
use super::ep::{backend, check_idle, launching, rank, samples};
use super::{environment_with, statistics};
use crate::output::{Output, Progress};

/// Options of `moe bench gap`.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    launching: Launching,
    /// Name of the folder under --results in which everything is kept; it must not be there yet
    #[arg(long, value_name = "LABEL")]
    label: String,
    /// Where the folder is made
    #[arg(long, value_name = "DIR", default_value = "bench_results")]
    results: PathBuf,
    /// Replays before those that count
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    warmup: u32,
    /// Replays that count
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    iterations: u32,
    /// Calls in a graph, or between two looks at the clock
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    rounds: u16,
    /// Measure on a busy GPU too, and say that it was
    #[arg(long)]
    allow_busy: bool,
}

/// What the summary holds.
#[derive(serde::Serialize)]
struct Summary {
    bench: &'static str,
    label: String,
    unit: &'static str,
    command: String,
    layout: String,
    mode: String,
    wire: String,
    is_programmatic: bool,
    warmup: usize,
    iterations: usize,
    rounds: usize,
    runs: Vec<Run>,
}

/// One number of tokens; seconds of a call of the slowest rank.
#[derive(serde::Serialize)]
struct Run {
    num_tokens: usize,
    dispatch: Statistics,
    combine: Statistics,
    /// Dispatch less combine, iteration by iteration.
    gap: Statistics,
    /// The mean gap in per cent of the mean of combine.
    gap_percent_of_combine: f64,
    traffic: Traffic,
    launches: Option<Launches>,
    wrong: Vec<String>,
}

/// The machine, as it was.
#[derive(serde::Serialize)]
struct Machine {
    environment: Environment,
    idle: Vec<IdleReport>,
}

/// Measures, prints and keeps; `false` when a result was wrong.
pub fn bench(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    arguments.shape.check()?;
    let tuning = arguments.launching.tuning()?;
    if arguments.shape.processes {
        return Err(invalid("--processes", "given", "absent: ranks that share a GPU are compared as threads"));
    }
    if arguments.launching.programmatic == Programmatic::Both {
        return Err(invalid("--programmatic", "both", "off or on"));
    }
    let is_name = !arguments.label.is_empty()
        && arguments.label.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && !arguments.label.starts_with('.');
    if !is_name {
        return Err(invalid("--label", format!("`{}`", arguments.label), "letters, digits, `-`, `_` and `.`"));
    }
    let idle = check_idle(&arguments.shape.backend, arguments.allow_busy)?;
    let is_programmatic = arguments.launching.programmatic == Programmatic::On;
    let backend = launching(&backend(&arguments.shape, &arguments.launching)?, is_programmatic);
    let folder = arguments.results.join(&arguments.label);
    fs::create_dir_all(&arguments.results).map_err(|e| io("creating", &arguments.results, &e))?;
    fs::create_dir(&folder).map_err(|e| io("creating", &folder, &e))?;

    let plan = Plan {
        arms: vec![Arm::Dispatch, Arm::Pair],
        tuning,
        rounds: arguments.rounds.into(),
        warmup: arguments.warmup as usize,
        repeats: arguments.iterations as usize,
        inputs: 1,
        staged: arguments.shape.staged,
        check_tokens: 256, // arbitrary: of arrived rows all are compared
        host_cost: false,
    };
    let progress = Progress::new(arguments.shape.tokens.len(), "measuring");
    let (mut runs, mut raw) = (Vec::new(), String::from("num_tokens,rank,iteration,dispatch_seconds,pair_seconds,combine_seconds\n"));
    for &tokens in &arguments.shape.tokens {
        let case = Case::new(&arguments.shape, tokens)?;
        let gate = Gate::new(&backend, case.ranks)?;
        let results = World::run(&backend, case.ranks, |world| rank::run(&world, &case, &plan, gate.clone()))?;
        let results = all(results)?;
        write_raw(&mut raw, tokens, &results);
        runs.push(Run::new(&case, &results)?);
        progress.step();
    }
    drop(progress);
    let is_right = runs.iter().all(|run| run.wrong.is_empty());
    let command = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    let summary = Summary {
        bench: "gap",
        label: arguments.label.clone(),
        unit: "seconds per call of the slowest rank",
        command,
        layout: name(&arguments.shape.layout),
        mode: name(&arguments.shape.mode),
        wire: name(&arguments.shape.wire),
        is_programmatic,
        warmup: plan.warmup,
        iterations: plan.repeats,
        rounds: plan.rounds,
        runs,
    };
    print(&summary, output)?;
    write(&folder.join("raw.csv"), raw.as_bytes())?;
    write(&folder.join("summary.json"), &json(&summary)?)?;
    write(&folder.join("environment.json"), &json(&Machine { environment: environment_with(0), idle })?)?;
    output.line(format_args!("kept in {}: raw.csv, summary.json, environment.json", folder.display()))?;
    Ok(is_right)
}

fn io(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::Io { what: format!("{what} {}", path.display()), why: error.to_string() }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| io("writing", path, &e))
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut json = serde_json::to_vec_pretty(value).map_err(|e| Error::Io { what: "writing JSON".into(), why: e.to_string() })?;
    json.push(b'\n');
    Ok(json)
}

/// Every iteration of every rank.
fn write_raw(raw: &mut String, tokens: usize, results: &[RankResult]) {
    for result in results {
        let (Some(dispatch), Some(pair)) = (samples(result, Arm::Dispatch), samples(result, Arm::Pair)) else { continue };
        for (i, (dispatch, pair)) in dispatch.iter().zip(pair).enumerate() {
            // A String takes whatever is written.
            let _ = writeln!(raw, "{tokens},{},{i},{dispatch:e},{pair:e},{:e}", result.rank, pair - dispatch);
        }
    }
}

impl Run {
    fn new(case: &Case, results: &[RankResult]) -> Result<Self> {
        let slowest = |arm: Arm| -> Vec<f64> {
            let all: Vec<&[f64]> = results.iter().filter_map(|result| samples(result, arm)).collect();
            let num = all.iter().map(|samples| samples.len()).min().unwrap_or(0);
            (0..num).map(|i| all.iter().map(|samples| samples[i]).fold(0.0, f64::max)).collect()
        };
        let (dispatch, pair) = (slowest(Arm::Dispatch), slowest(Arm::Pair));
        let combine: Vec<f64> = pair.iter().zip(&dispatch).map(|(pair, dispatch)| pair - dispatch).collect();
        let gap: Vec<f64> = dispatch.iter().zip(&combine).map(|(dispatch, combine)| dispatch - combine).collect();
        let mut traffic = Traffic::default();
        for rank in 0..case.ranks {
            traffic += case.traffic(rank)?;
        }
        let (combine, gap) = (statistics(&combine)?, statistics(&gap)?);
        Ok(Run {
            num_tokens: case.num_tokens(0),
            dispatch: statistics(&dispatch)?,
            gap_percent_of_combine: 100.0 * gap.mean / combine.mean,
            combine,
            gap,
            traffic,
            launches: results.first().and_then(|result| result.launches),
            wrong: results.iter().flat_map(|result| result.wrong.clone()).collect(),
        })
    }
}

fn print(summary: &Summary, output: &mut Output) -> Result<()> {
    output.line(format_args!(
        "{}: {} iterations of {} calls after {} to warm up; us per call of the slowest rank, mean and standard deviation",
        summary.label, summary.iterations, summary.rounds, summary.warmup
    ))?;
    let us = |s: &Statistics| [format!("{:.2}", s.mean * 1e6), format!("{:.2}", s.sd * 1e6)];
    let row = |run: &Run| {
        let mut cells = vec![run.num_tokens.to_string()];
        cells.extend([us(&run.dispatch), us(&run.combine), us(&run.gap)].into_iter().flatten());
        cells.push(format!("{:+.1} %", run.gap_percent_of_combine));
        cells.push(run.launches.map_or_else(|| "-".into(), |l| format!("{}; {}", l.dispatch, l.combine)));
        cells
    };
    let header = ["tokens", "dispatch", "sd", "combine", "sd", "gap", "sd", "of combine", "launches"];
    output.table(&header, summary.runs.iter().map(row))?;
    for wrong in summary.runs.iter().flat_map(|run| &run.wrong) {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    Ok(())
}
