//! `moe bench dispatch`, `combine` and `pair`: the calls of expert parallelism, timed on every rank at the same time.
#![forbid(unsafe_code)]

pub mod case;
pub mod memory;
pub mod options;
mod print;
pub mod rank;
pub mod record;

use std::path::PathBuf;

#[cfg(target_os = "linux")]
use moe_kernels::ep::Rendezvous;
use moe_kernels::ep::World;
use moe_kernels::gpu::Stream;
use moe_kernels::measure::ceiling::{self, CopyCeiling};
use moe_kernels::measure::{IdleReport, idle};
use moe_kernels::{Backend, Result};

use self::case::Case;
use self::options::{Launching, Programmatic, Shape, invalid};
use self::rank::{Arm, Gate, Plan, RankResult};
use self::record::{Job, Record, Run};
use super::{Json, environment_with};
use crate::output::{Output, Progress};

/// Which phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Dispatch,
    Combine,
    Pair,
}

/// Options of `moe bench dispatch`, `combine` and `pair`.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    pub shape: Shape,
    #[command(flatten)]
    pub launching: Launching,
    /// Also dispatches that move neither rows nor records: routing and words alone
    #[arg(long)]
    pub skip_payload: bool,
    /// Also dispatches whose rows go to the rank's own memory: everything but the fabric
    #[arg(long)]
    pub local: bool,
    /// Instead of --sms: the same with each of these numbers of multiprocessors for both phases, one after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', conflicts_with_all = ["sms", "processes"])]
    pub sweep_sms: Vec<u32>,
    /// Calls between two looks at the clock: on a GPU a graph of so many [default: 60 below 512 tokens, 30 below 4096, else 20; on a CPU 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub rounds: Option<u16>,
    /// Samples, after one that does not count
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub repeats: u16,
    /// Copies of x that take turns; with one, few rows are read from the cache, as rows that were just written
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub inputs: u16,
    /// Results that are computed again and compared, of each rank; of arrived rows all are compared
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub check_tokens: usize,
    /// Write everything that was measured, and the machine that it was measured on, to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Measure on a busy GPU too, and say that it was
    #[arg(long)]
    pub allow_busy: bool,
    /// Keep up to this many bytes of the changes since the commit in the JSON (`git diff HEAD`)
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "json")]
    pub diff: usize,
}

impl Arguments {
    /// What is measured of a call of so many tokens.
    pub fn plan(&self, phase: Phase, tokens: usize, backend: &Backend) -> Result<Plan> {
        let is_gpu = matches!(backend, Backend::Cuda(_));
        let rounds = self.rounds.map_or_else(
            || match tokens {
                _ if !is_gpu => 10,
                0..=511 => 60,
                512..=4095 => 30,
                _ => 20,
            },
            usize::from,
        );
        let mut arms = vec![Arm::Dispatch];
        arms.extend((phase != Phase::Dispatch).then_some(Arm::Pair));
        arms.extend((phase != Phase::Combine).then_some(Arm::Payload));
        arms.extend(self.skip_payload.then_some(Arm::SkipPayload));
        arms.extend(self.local.then_some(Arm::Local));
        if (self.skip_payload || self.local) && !is_gpu {
            return Err(invalid("--skip-payload and --local", "given", "absent on a CPU, whose calls move rows and words as one"));
        }
        Ok(Plan {
            arms,
            tuning: self.launching.tuning()?,
            rounds,
            warmup: 1,
            repeats: self.repeats.into(),
            inputs: self.inputs.into(),
            staged: self.shape.staged,
            check_tokens: self.check_tokens,
            host_cost: true,
        })
    }

    pub fn check(&self) -> Result<()> {
        self.shape.check()?;
        if self.sweep_sms.contains(&0) {
            return Err(invalid("--sweep-sms", 0, "numbers from 1 on"));
        }
        self.launching.tuning().map(|_| ())
    }

    /// The plan for each number of multiprocessors; the plan itself without any.
    fn swept(&self, plan: &Plan) -> Vec<Plan> {
        let with = |&sms: &u32| {
            let mut plan = plan.clone();
            plan.tuning.dispatch.sms = Some(sms);
            plan.tuning.combine.sms = Some(sms);
            plan
        };
        if self.sweep_sms.is_empty() { vec![plan.clone()] } else { self.sweep_sms.iter().map(with).collect() }
    }
}

/// The backend of the options.
pub fn backend(shape: &Shape, launching: &Launching) -> Result<Backend> {
    match shape.backend()? {
        Backend::Cuda(cuda) => Ok(Backend::Cuda(cuda)),
        other if launching.programmatic != Programmatic::Off => {
            Err(invalid("--programmatic", "given", format!("absent on {}, which launches nothing", other.name())))
        }
        other => Ok(other),
    }
}

/// The same, launching programmatically or not.
pub fn launching(backend: &Backend, is_programmatic: bool) -> Backend {
    match backend {
        Backend::Cuda(cuda) => Backend::Cuda(cuda.clone().programmatic(is_programmatic)),
        other => other.clone(),
    }
}

/// That the GPUs of a backend are idle, before any process opens them: afterwards it would be one of their users.
pub fn check_idle(backend: &str, allow_busy: bool) -> Result<Vec<IdleReport>> {
    Backend::ordinals(backend).unwrap_or_default().into_iter().map(|gpu| idle::check(gpu, allow_busy)).collect()
}

/// Measures and prints; `false` when a result was wrong.
pub fn bench(phase: Phase, arguments: &Arguments, output: &mut Output) -> Result<bool> {
    #[cfg(target_os = "linux")]
    if Rendezvous::is_in_env() {
        return processes::run_rank(phase, arguments, output);
    }
    arguments.check()?;
    let idle = check_idle(&arguments.shape.backend, arguments.allow_busy)?;
    if arguments.shape.processes {
        arguments.plan(phase, 0, &arguments.shape.backend()?)?;
        return crate::run::launch(arguments.shape.ranks);
    }
    let backend = backend(&arguments.shape, &arguments.launching)?;
    let json = Json::create(arguments.json.as_deref())?;
    let progress = Progress::new(arguments.shape.tokens.len(), "measuring");
    let mut runs = Vec::new();
    for &tokens in &arguments.shape.tokens {
        let plan = arguments.plan(phase, tokens, &backend)?;
        let case = Case::new(&arguments.shape, tokens)?;
        let copies = copies(&backend, &case)?;
        let gate = Gate::new(&backend, case.ranks)?;
        for &is_programmatic in arguments.launching.programmatic.each() {
            let backend = launching(&backend, is_programmatic);
            for plan in arguments.swept(&plan) {
                let results = World::run(&backend, case.ranks, |world| rank::run(&world, &case, &plan, gate.clone()))?;
                runs.push(Run::new(&case, &plan, is_programmatic, rank::all(results)?, copies)?);
            }
        }
        progress.step();
    }
    drop(progress);
    finish(phase, arguments, &backend, idle, runs, json, output)
}

/// Prints and writes what all ranks found.
fn finish(
    phase: Phase,
    arguments: &Arguments,
    backend: &Backend,
    idle: Vec<IdleReport>,
    runs: Vec<Run>,
    mut json: Json,
    output: &mut Output,
) -> Result<bool> {
    let environment = environment_with(arguments.diff);
    let record = Record { bench: "ep", unit: "seconds per call", environment, idle, job: Job::new(phase, arguments, backend), runs };
    print::print(&record, output)?;
    let is_right = record.runs.iter().all(|run| run.wrong.is_empty());
    json.write(&record)?;
    Ok(is_right)
}

/// The best copies of what all ranks of a GPU move in a dispatch and in a combine; nothing on a CPU.
pub fn copies(backend: &Backend, case: &Case) -> Result<Option<[CopyCeiling; 2]>> {
    let Backend::Cuda(cuda) = backend else { return Ok(None) };
    let mut all = case::Traffic::default();
    for rank in 0..case.ranks {
        all += case.traffic(rank)?;
    }
    let stream = Stream::new(cuda.device())?;
    let least = 32; // what the ceiling's copy takes at least
    let [dispatch, combine] = [all.dispatch_moved_bytes, all.combine_moved_bytes].map(|bytes| bytes.max(least));
    let first = ceiling::copy(&stream, dispatch)?;
    let second = if combine == dispatch { first } else { ceiling::copy(&stream, combine)? };
    Ok(Some([first, second]))
}

#[cfg(target_os = "linux")]
mod processes {
    use moe_kernels::{Error, Result};

    use super::*;

    /// What the ranks get to meet and to compile (arbitrary).
    const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(300);

    /// This process's part, as the rank that its environment says; rank 0 speaks for all.
    pub fn run_rank(phase: Phase, arguments: &Arguments, output: &mut Output) -> Result<bool> {
        let rendezvous = Rendezvous::from_env("moe bench")?.timeout(TIMEOUT)?;
        let mut arguments = arguments.clone();
        arguments.shape = Shape { ranks: rendezvous.size(), processes: true, ..arguments.shape };
        let is_first = rendezvous.rank().index() == 0;
        let result = as_rank(phase, &arguments, &rendezvous, output);
        match &result {
            // Rank 0 says it for all, unless it is the one that ended.
            Err(Error::Poisoned { first }) if !is_first && first.rank.index() != 0 => Ok(false),
            Err(Error::Setup { .. } | Error::Mismatch { .. }) if !is_first => Ok(false),
            _ => result,
        }
    }

    fn as_rank(phase: Phase, arguments: &Arguments, rendezvous: &Rendezvous, output: &mut Output) -> Result<bool> {
        arguments.check()?;
        let is_first = rendezvous.rank().index() == 0;
        let json = if is_first { Some(Json::create(arguments.json.as_deref())?) } else { None };
        let backend = backend(&arguments.shape, &arguments.launching)?;
        let cases: Vec<Case> = arguments.shape.tokens.iter().map(|&tokens| Case::new(&arguments.shape, tokens)).collect::<Result<_>>()?;
        // Alone on the GPU, as far as this program goes: the others wait for rank 0.
        let copies: Vec<_> = cases.iter().map(|case| if is_first { copies(&backend, case) } else { Ok(None) }).collect::<Result<_>>()?;
        let mut runs = Vec::new();
        let [is_programmatic] = *arguments.launching.programmatic.each() else {
            return Err(invalid("--programmatic", "both", "on or off with --processes, which meet once"));
        };
        let world = World::join(&launching(&backend, is_programmatic), rendezvous)?;
        for (case, copies) in cases.iter().zip(copies) {
            let plan = arguments.plan(phase, case.num_tokens(0), &backend)?;
            let result = rank::run(&world, case, &plan, None);
            let all = gather(&world, result)?;
            if is_first {
                runs.push(Run::new(case, &plan, is_programmatic, all, copies)?);
            }
        }
        let Some(json) = json else { return Ok(true) };
        finish(phase, arguments, &backend, Vec::new(), runs, json, output)
    }
}

/// What every rank found, on every rank. Collective.
pub fn gather<T: serde::Serialize + serde::de::DeserializeOwned>(world: &World, own: Result<T>) -> Result<Vec<T>> {
    let io = |error: serde_json::Error| moe_kernels::Error::Io { what: "passing on a rank's results".into(), why: error.to_string() };
    let bytes = own.and_then(|own| serde_json::to_vec(&own).map_err(io));
    world.gather(bytes)?.iter().map(|bytes| serde_json::from_slice(bytes).map_err(io)).collect()
}

/// The results of one rank by arm.
pub fn samples(result: &RankResult, arm: Arm) -> Option<&[f64]> {
    result.samples.iter().find(|(other, _)| *other == arm).map(|(_, samples)| samples.as_slice())
}
