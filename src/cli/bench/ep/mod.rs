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
use moe_kernels::measure::link::{LinkCeiling, MAX_GPUS, link_ceiling};
use moe_kernels::measure::{IdleReport, idle};
use moe_kernels::{Backend, Result};

use self::case::{Case, LinkBytes};
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
        let ceilings = Ceilings::measure(&backend, &case)?;
        let gate = Gate::new(&backend, case.ranks)?;
        for &is_programmatic in arguments.launching.programmatic.each() {
            let backend = launching(&backend, is_programmatic);
            for plan in arguments.swept(&plan) {
                let results = World::run(&backend, case.ranks, |world| rank::run(&world, &case, &plan, gate.clone()))?;
                runs.push(Run::new(&case, &plan, is_programmatic, rank::all(results)?, &ceilings)?);
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

/// What the GPUs of a run can do at best, measured in the same run. Of each pair the first is for dispatch, the second for combine.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// GPUs on which ranks take turns; 1 on a CPU.
    pub num_gpus: usize,
    /// The best copies of what all ranks of the first GPU move; nothing on a CPU.
    pub copies: Option<[CopyCeiling; 2]>,
    /// The best that links do with as many bytes as leave the GPU of which most do; nothing where all ranks share one.
    pub links: Option<[LinkCeiling; 2]>,
}

impl Ceilings {
    /// Those of a CPU, and of ranks that leave it to another to measure.
    pub fn absent() -> Self {
        Ceilings { num_gpus: 1, copies: None, links: None }
    }

    pub fn measure(backend: &Backend, case: &Case) -> Result<Self> {
        let Backend::Cuda(cuda) = backend else { return Ok(Ceilings::absent()) };
        let gpus = &cuda.gpus()[..cuda.gpus().len().min(case.ranks)];
        let mut all = case::Traffic::default();
        for rank in (0..case.ranks).step_by(gpus.len()) {
            all += case.traffic(rank)?;
        }
        let stream = Stream::new(cuda.device())?;
        let least = 32; // what the ceiling's copy takes at least
        let moved = [all.dispatch_moved_bytes, all.combine_moved_bytes].map(|bytes| bytes.max(least));
        let copies = twice(moved, 0, |bytes| ceiling::copy(&stream, bytes))?;
        let links = match gpus.len() {
            1 => None,
            2..=MAX_GPUS => {
                let most = most_link_bytes(case, gpus.len())?;
                // Arbitrary: about what one token sends. Ceilings of sizes that differ by less than 3 % are the same.
                let bytes = [most.dispatch, most.combine].map(|bytes| bytes.max(64 << 10));
                Some(twice(bytes, bytes[0] / 32, |bytes| link_ceiling(gpus, bytes))?)
            }
            num => return Err(invalid("--backend", format!("{num} GPUs"), format!("at most {MAX_GPUS}"))),
        };
        Ok(Ceilings { num_gpus: gpus.len(), copies: Some(copies), links })
    }
}

/// The bytes of dispatch and of combine that leave the GPU from which most do.
fn most_link_bytes(case: &Case, num_gpus: usize) -> Result<LinkBytes> {
    let mut most = LinkBytes::default();
    for gpu in 0..num_gpus {
        let mut own = LinkBytes::default();
        for rank in (gpu..case.ranks).step_by(num_gpus) {
            own += case.link_bytes(rank, num_gpus)?;
        }
        most = LinkBytes { dispatch: most.dispatch.max(own.dispatch), combine: most.combine.max(own.combine) };
    }
    Ok(most)
}

/// A measurement of both sizes; one for both when they are no further apart than that.
fn twice<T: Copy>([first, second]: [u64; 2], apart: u64, measure: impl Fn(u64) -> Result<T>) -> Result<[T; 2]> {
    let of_first = measure(first)?;
    Ok([of_first, if first.abs_diff(second) <= apart { of_first } else { measure(second)? }])
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
        let ceilings: Vec<_> = cases
            .iter()
            .map(|case| if is_first { Ceilings::measure(&backend, case) } else { Ok(Ceilings::absent()) })
            .collect::<Result<_>>()?;
        let mut runs = Vec::new();
        let [is_programmatic] = *arguments.launching.programmatic.each() else {
            return Err(invalid("--programmatic", "both", "on or off with --processes, which meet once"));
        };
        let world = World::join(&launching(&backend, is_programmatic), rendezvous)?;
        for (case, ceilings) in cases.iter().zip(&ceilings) {
            let plan = arguments.plan(phase, case.num_tokens(0), &backend)?;
            let result = rank::run(&world, case, &plan, None);
            let all = gather(&world, result)?;
            if is_first {
                runs.push(Run::new(case, &plan, is_programmatic, all, ceilings)?);
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

#[cfg(test)]
mod tests {
    use moe_kernels::DType;
    use moe_kernels::ep::Config;
    use moe_kernels::routing::Routes;

    use super::*;

    /// Rank 0 has more tokens than rank 1, which has the only expert that they go to.
    #[test]
    fn the_busiest_gpu_counts() {
        let routes = |num_tokens: usize| Routes { topk_idx: vec![3; num_tokens], topk_weights: vec![1.0; num_tokens], num_tokens, k: 1 };
        let case = Case::of(Config::new(64, DType::BF16, 4, 1, 20), 1, vec![routes(20), routes(5)]).unwrap();
        let plan = case.config.plan(2).unwrap();
        let most = most_link_bytes(&case, 2).unwrap();
        assert_eq!(most.combine, 20 * plan.wire_row_bytes as u64);
        assert_eq!(most.dispatch, (20 * (plan.row_bytes + plan.record_bytes) + 8 * plan.num_count_words) as u64);
    }

    #[test]
    fn sizes_that_are_alike_are_measured_once() {
        let measured = std::cell::RefCell::new(Vec::new());
        let measure = |bytes| {
            measured.borrow_mut().push(bytes);
            Ok(bytes)
        };
        assert_eq!(twice([100, 100], 0, measure).unwrap(), [100, 100]);
        assert_eq!(twice([100, 97], 3, measure).unwrap(), [100, 100]);
        assert_eq!(twice([100, 104], 3, measure).unwrap(), [100, 104]);
        assert_eq!(measured.into_inner(), [100, 100, 100, 104]);
    }
}
