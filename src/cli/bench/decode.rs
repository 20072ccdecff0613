//! `moe bench decode`: a decode step with the gate of a BLAS and with ours.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use moe_kernels::gpu::{Blas, Device, Graph, Stream};
use moe_kernels::layer::{Preset, Shape};
use moe_kernels::measure::timing::Replay;
use moe_kernels::measure::{Arm, Cooldown, Environment, IdleReport, Rounds, idle, report, rounds};
use moe_kernels::{Backend, Cuda, Result};

use super::agreement::{self, Agreement};
use super::decode_step::{Experts, Gate, Step};
use super::{Common, Json, environment};
use crate::output::{Output, Progress};

/// Options of `moe bench decode`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// The model whose MoE blocks are run
    #[arg(long, value_name = "NAME", default_value = "Qwen3.5-35B-A3B")]
    preset: String,
    /// Layers of a step
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=1000))]
    layers: u16,
    /// Measured runs of each arm
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Longest wait before a run until the GPU is as cool as at the start
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    cooldown: u64,
    /// Recorded checkpoints (tests/vectors/checkpoints), to compare the choice of tokens on them
    #[arg(long, value_name = "FOLDER")]
    recorded: Option<PathBuf>,
}

/// Steps of a run (arbitrary: a quarter of a second at 5 ms a step).
const NUM_STEPS: usize = 50;

/// One way to run the experts.
#[derive(serde::Serialize)]
struct Measured {
    experts: Experts,
    /// Launches of a step, one for each arm.
    num_launches: Vec<usize>,
    /// Seconds of a step.
    rounds: Rounds,
    /// `100 * (BLAS / ours - 1)` of the medians, without and with programmatic launch.
    percent_faster: [f64; 2],
}

/// What the file holds.
#[derive(serde::Serialize)]
struct Record {
    bench: &'static str,
    environment: Environment,
    cublaslt: Option<String>,
    idle: IdleReport,
    preset: &'static str,
    num_layers: usize,
    weight_bytes: usize,
    num_steps: usize,
    measured: Vec<Measured>,
    agreement_of: &'static str,
    agreement: Vec<Agreement>,
    wrong: Vec<String>,
}

/// Measures and prints; `false` when a result was wrong.
pub fn bench(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    let mut json = Json::create(arguments.common.json.as_deref())?;
    let preset = Preset::named(&arguments.preset)?;
    check_shape(&preset)?;
    let device = arguments.common.device;
    let idle = idle::check(device, arguments.common.allow_busy)?;
    let stream = Stream::new(&Device::open(device)?)?;
    // Before anything warms the GPU.
    let cooldown = Cooldown::new(stream.device(), Duration::from_secs(arguments.cooldown));
    let progress = Progress::new(1, "making the weights");
    let blas = Blas::new(stream.device())?;
    let num_layers = usize::from(arguments.layers);
    let step = Step::new(&stream, &blas, &preset.shape, num_layers)?;
    let (mut measured, mut wrong) = (Vec::new(), Vec::new());
    for experts in [Experts::Each, Experts::Grouped] {
        progress.message(format!("measuring, experts {experts:?}"));
        let gates = gates(&stream);
        wrong.extend(step.check(experts, &gates)?);
        measured.push(measure(&stream, &step, experts, &gates, usize::from(arguments.runs), &cooldown)?);
        wrong.extend(step.check(experts, &gates)?);
    }
    progress.message("comparing tokens");
    let agreement = match &arguments.recorded {
        Some(folder) => agreement::compare(&stream, &blas, folder)?,
        None => Vec::new(),
    };
    drop(progress);
    print(&measured, &agreement, &preset, num_layers, output)?;
    for wrong in &wrong {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    let is_right = wrong.is_empty();
    let (environment, cublaslt) = environment(&arguments.common);
    json.write(&Record {
        bench: "decode",
        environment,
        cublaslt,
        idle,
        preset: preset.name,
        num_layers,
        weight_bytes: step.weight_bytes(),
        num_steps: NUM_STEPS,
        measured,
        agreement_of: agreement::WHAT,
        agreement,
        wrong,
    })?;
    Ok(is_right)
}

fn check_shape(preset: &Preset) -> Result<()> {
    let Shape { shared_gate, .. } = preset.shape;
    if shared_gate {
        return Ok(());
    }
    let (got, want) = (preset.name.to_owned(), "a model whose shared expert has a gate".to_owned());
    Err(moe_kernels::Error::Invalid { op: "bench decode", what: "preset".into(), got, want })
}

/// The arms, the one to compare with first, the rest of the step last.
fn gates(stream: &Stream) -> [(&'static str, Gate); 4] {
    let ours = |programmatic| Gate::Ours(Backend::Cuda(Cuda::on(stream.clone()).programmatic(programmatic)));
    [("cublaslt chain", Gate::Blas), ("ours", ours(false)), ("ours, programmatic", ours(true)), ("no gate", Gate::Nobody)]
}

fn measure(
    stream: &Stream,
    step: &Step,
    experts: Experts,
    gates: &[(&'static str, Gate)],
    num_runs: usize,
    cooldown: &Cooldown,
) -> Result<Measured> {
    let num_launches = gates.iter().map(|(_, gate)| Graph::capture(stream, || step.run(experts, gate))?.num_nodes());
    let num_launches = num_launches.collect::<Result<_>>()?;
    let capture = |(_, gate): &(&str, Gate)| Replay::capture(stream, |_| step.run(experts, gate), 1);
    let replays: Vec<Replay> = gates.iter().map(capture).collect::<Result<_>>()?;
    let arm = |((name, _), replay): (&(&'static str, Gate), _)| {
        let replay: &Replay = replay;
        Arm::new(*name, move || replay.time(stream, NUM_STEPS))
    };
    let mut arms: Vec<Arm<'_>> = gates.iter().zip(&replays).map(arm).collect();
    let rounds = rounds(&mut arms, num_runs, false, cooldown)?;
    drop(arms);
    let median = |arm: usize| rounds.arms[arm].seconds.median;
    let percent_faster = [1, 2].map(|arm| 100.0 * (median(0) / median(arm) - 1.0));
    Ok(Measured { experts, num_launches, rounds, percent_faster })
}

fn print(measured: &[Measured], agreement: &[Agreement], preset: &Preset, num_layers: usize, output: &mut Output) -> Result<()> {
    let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
    for Measured { experts, rounds, percent_faster, num_launches } in measured {
        output.heading(format_args!(
            "{}, {num_layers} layers, one token, experts {}: microseconds per step (MoE blocks without router and attention)",
            preset.name,
            match experts {
                Experts::Each => "one by one",
                Experts::Grouped => "grouped",
            }
        ))?;
        let percent = [None, Some(percent_faster[0]), Some(percent_faster[1]), None];
        let gate_of = |arm: usize| (rounds.arms[arm].seconds.median - rounds.arms[3].seconds.median) / num_layers as f64;
        let row = |arm: usize| {
            let times = &rounds.arms[arm];
            let runs = rounds.runs.iter().filter(|run| run.arm == arm);
            let celsius: Vec<String> = runs.clone().map(|run| run.cooled.celsius.map_or("?".into(), |c| c.to_string())).collect();
            let medians: Vec<String> = runs.map(|run| us(run.median_seconds)).collect();
            vec![
                times.name.clone(),
                num_launches[arm].to_string(),
                us(times.seconds.median),
                medians.join(" "),
                celsius.join(" "),
                if arm == 3 { "-".into() } else { format!("{:.2}", gate_of(arm) * 1e6) },
                percent[arm].map_or("-".into(), |percent| format!("{percent:+.2} %")),
            ]
        };
        let header = ["<gate", "launches", "median", "runs", "start C", "gate, per layer", "faster"];
        output.table(&header, (0..rounds.arms.len()).map(row))?;
    }
    if agreement.is_empty() {
        return output.line("\nTokens were not compared: --recorded names no folder.");
    }
    output.heading("Greedy choice of tokens")?;
    output.paragraph("", 0, agreement::WHAT)?;
    let row = |a: &Agreement| {
        vec![
            a.between.join(" and "),
            format!("{} of {}", a.num_equal, a.num_tokens),
            report::percent(a.num_equal as f64, a.num_tokens as f64),
            format!("{:.2} %", 100.0 * a.standard_error),
            format!("{:.1} %", 100.0 * a.at_least),
            format!("{} of {}", a.num_different_elements, a.num_elements),
        ]
    };
    output.table(&["<between", "same token", "share", "std error", "at least", "elements differ"], agreement.iter().map(row))
}
