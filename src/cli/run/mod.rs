//! `moe run`: routes tokens, runs a layer across ranks, checks it, and says where the time went.
#![forbid(unsafe_code)]

mod execute;
mod golden;
mod model;
mod options;
mod print;
mod processes;
mod record;
mod source;
mod verdict;

pub use options::Arguments;
pub use processes::launch;

#[cfg(target_os = "linux")]
use moe_kernels::ep::Rendezvous;
use moe_kernels::layer::{BlockConfig, Memory};
use moe_kernels::measure::Environment;
use moe_kernels::routing::{Load, Routes};
use moe_kernels::{Backend, Result};

use self::execute::{RankRun, Weights, execute};
use self::model::Model;
use self::record::{Job, LoadRecord, Record, Sink, stages};
use self::source::Source;
use self::verdict::verify;
use crate::output::Output;

/// Runs the job; `false` when its result is wrong.
pub fn run(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    arguments.check()?;
    #[cfg(target_os = "linux")]
    if Rendezvous::is_in_env() {
        return processes::run_rank(arguments, output);
    }
    let backend = arguments.backend()?;
    let checkpoint = Model::of_checkpoint(arguments)?;
    if let Some(model) = &checkpoint
        && let Some(path) = model.recording(arguments)?
    {
        processes::refuse_recording(arguments)?;
        return golden::run(arguments, &backend, model, &path, output);
    }
    let task = Task::new(arguments, backend, checkpoint)?;
    if arguments.processes {
        return processes::launch(arguments.ranks);
    }
    let start = task.announce(output)?;
    let Task { backend, source, config, .. } = &task;
    let weights = Weights::new(backend, config, &source.model, arguments.ranks, arguments.seed)?;
    let runs = execute(backend, config, &weights, source, arguments.iterations, arguments.seed)?;
    task.finish(start, &weights, &runs, output)
}

/// What is to be run.
struct Task<'a> {
    arguments: &'a Arguments,
    backend: Backend,
    source: Source,
    config: BlockConfig,
    memory: Memory,
}

/// What is known and open before the run.
struct Start {
    environment: Environment,
    job: Job,
    sink: Option<Sink>,
}

impl<'a> Task<'a> {
    fn new(arguments: &'a Arguments, backend: Backend, checkpoint: Option<Model>) -> Result<Self> {
        let source = Source::choose(arguments, checkpoint)?;
        let config = arguments.block(&source.model, source.num_tokens, false)?;
        let memory = Memory::of(&config, arguments.ranks)?;
        memory.check()?;
        Ok(Task { arguments, backend, source, config, memory })
    }

    /// Says what will be run.
    fn announce(&self, output: &mut Output) -> Result<Start> {
        let sink = self.arguments.json.as_deref().map(Sink::open).transpose()?;
        let environment = Environment::record();
        let job = Job::new(self.arguments, &self.config, &self.source, self.backend.name());
        print::job(output, &environment, &job, &self.memory)?;
        Ok(Start { environment, job, sink })
    }

    /// Checks what all ranks did, and says how it went; `false` when a result is wrong.
    fn finish(self, start: Start, weights: &Weights, runs: &[RankRun], output: &mut Output) -> Result<bool> {
        let Task { arguments, backend, source, config, memory } = self;
        let Start { environment, job, sink } = start;
        let placement = config.ep().placement(arguments.ranks)?;
        let load = Load::new(&all_routes(runs, job.k), &placement);
        let verdict = verify(&backend, &config, weights, &source, runs, &load, arguments.check_tokens)?;

        let (stages, total) = stages(runs);
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::verdict::Verdict;
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: Arguments,
    }

    /// A finished run of 24 tokens on 3 ranks, to be spoilt.
    struct Finished {
        backend: Backend,
        config: BlockConfig,
        weights: Weights,
        source: Source,
        runs: Vec<RankRun>,
    }

    fn finished(routing: &str) -> Finished {
        let line = format!("moe --model tiny --tokens 24 --ranks 3 --iterations 2 --routing {routing}");
        let arguments = Line::try_parse_from(line.split(' ')).unwrap().run;
        let (backend, source) = (arguments.backend().unwrap(), Source::choose(&arguments, None).unwrap());
        let config = arguments.block(&source.model, source.num_tokens, false).unwrap();
        let weights = Weights::new(&backend, &config, &source.model, 3, 1).unwrap();
        let runs = execute(&backend, &config, &weights, &source, 2, 1).unwrap();
        Finished { backend, config, weights, source, runs }
    }

    impl Finished {
        fn verdict(&self) -> Verdict {
            let placement = self.config.ep().placement(3).unwrap();
            let load = Load::new(&all_routes(&self.runs, self.config.shape.router.k), &placement);
            verify(&self.backend, &self.config, &self.weights, &self.source, &self.runs, &load, 24).unwrap()
        }

        /// The verdict is wrong and names `part`.
        fn is_wrong(&self, part: &str) {
            let verdict = self.verdict();
            assert!(!verdict.is_right && verdict.problems.iter().any(|problem| problem.contains(part)), "{verdict:?}");
        }
    }

    #[test]
    fn a_good_run_is_right() {
        let run = finished("router");
        let verdict = run.verdict();
        assert!(verdict.is_right && verdict.problems.is_empty(), "{verdict:?}");
        // 16 experts and 3 ranks, each in 2 iterations.
        assert_eq!((verdict.num_tokens, verdict.num_wrong_tokens, verdict.num_counts), (24, 0, 38));
    }

    #[test]
    fn one_wrong_bit_is_found() {
        let mut run = finished("router");
        let row_bytes = run.config.shape.hidden * run.config.dtype.size();
        run.runs[1].out.bytes_mut()[2 * row_bytes] ^= 1;
        run.is_wrong("token 2 of rank 1");
        assert_eq!(run.verdict().num_wrong_tokens, 1);
    }

    #[test]
    fn wrong_counts_are_found() {
        let mut run = finished("router");
        run.runs[2].iterations[1].1.num_rows += 1;
        run.is_wrong("rank 2, iteration 1");
        let mut run = finished("router");
        run.runs[0].iterations[0].1.num_rows_per_expert[3] += 1;
        run.is_wrong("rank 0, iteration 0");
    }

    #[test]
    fn wrong_routes_are_found() {
        let mut run = finished("router");
        let weight = &mut run.runs[1].routes.topk_weights[5 * 4]; // of token 5
        *weight = f32::from_bits(weight.to_bits() ^ 1);
        run.is_wrong("token 5 of rank 1: its routes");
        let mut run = finished("uniform");
        run.runs[2].routes.topk_idx.swap(0, 1);
        run.is_wrong("rank 2: the routes are not those that were given");
    }

    #[test]
    fn iterations_that_differ_are_found() {
        let mut run = finished("router");
        run.runs[0].is_repeatable = false;
        run.is_wrong("iterations differ");
    }
}
