//! `moe run`: routes tokens, runs a layer across ranks, checks it, and says where the time went.
#![forbid(unsafe_code)]

mod execute;
mod options;
mod print;
mod record;
mod source;
mod verdict;

pub use options::Arguments;

use moe_kernels::Result;
use moe_kernels::layer::Memory;
use moe_kernels::measure::Environment;
use moe_kernels::routing::{Load, Routes};

use self::execute::{RankRun, Weights, execute};
use self::record::{Job, LoadRecord, Record, Sink, stages};
use self::source::Source;
use self::verdict::verify;
use crate::output::Output;

/// Runs the job; `false` when its result is wrong.
pub fn run(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    arguments.check()?;
    let backend = arguments.backend()?;
    let source = Source::choose(arguments)?;
    let config = arguments.block(&source.preset, source.num_tokens)?;
    let placement = config.ep().placement(arguments.ranks)?;
    let memory = Memory::of(&config, arguments.ranks)?;
    memory.check()?;
    let sink = arguments.json.as_deref().map(Sink::open).transpose()?;

    let environment = Environment::record();
    let job = Job::new(arguments, &config, &source, backend.name());
    print::job(output, &environment, &job, &memory)?;

    let weights = Weights::new(&backend, &config, arguments.ranks, arguments.seed)?;
    let runs = execute(&backend, &config, &weights, &source, arguments.iterations, arguments.seed)?;
    let load = Load::new(&all_routes(&runs, job.k), &placement);
    let verdict = verify(&backend, &config, &weights, &runs, &placement, &load, arguments.check_tokens)?;

    let (stages, total) = stages(&runs);
    let mut notes = source.notes;
    if !job.num_experts.is_multiple_of(arguments.ranks) {
        notes.push(format!(
            "{} experts do not divide by {} ranks: expert e is on rank floor(e * {} / {}), so ranks own {} or {}",
            job.num_experts,
            arguments.ranks,
            arguments.ranks,
            job.num_experts,
            job.num_experts / arguments.ranks,
            job.num_experts.div_ceil(arguments.ranks)
        ));
    }
    if arguments.ranks > environment.num_cores {
        notes.push(format!(
            "{} ranks share {} cores, so a stage's time includes the turns of other ranks",
            arguments.ranks, environment.num_cores
        ));
    }
    if environment.profile != "release" {
        notes.push("this is a debug build: its times mean nothing".into());
    }
    let record = Record {
        tokens_per_second: job.num_tokens as f64 / total.slowest.median.max(f64::MIN_POSITIVE),
        environment,
        job,
        memory,
        stages,
        total,
        load: LoadRecord::new(&load, &placement),
        notes,
        verdict,
    };
    print::results(output, &record)?;
    if let Some(sink) = sink {
        sink.write(&record)?;
    }
    Ok(record.verdict.is_right)
}

/// The routes of all ranks, in the order of ranks.
fn all_routes(runs: &[RankRun], k: usize) -> Routes {
    let mut all = Routes { k, ..Routes::default() };
    for RankRun { routes, .. } in runs {
        all.num_tokens += routes.num_tokens;
        all.topk_idx.extend_from_slice(&routes.topk_idx);
        all.topk_weights.extend_from_slice(&routes.topk_weights);
    }
    all
}
