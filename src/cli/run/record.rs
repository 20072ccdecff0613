//! Everything that a run measured: what the tables show and `--json` writes.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use clap::ValueEnum;
use moe_kernels::ep::{Layout, Reduce};
use moe_kernels::layer::{BlockConfig, Memory, Report, Shape, Stage};
use moe_kernels::measure::{Environment, Statistics};
use moe_kernels::routing::{Load, Placement};
use moe_kernels::{Error, Rank, Result};

use super::execute::RankRun;
use super::model::Model;
use super::options::{Arguments, rounding_name};
use super::source::{Recorded, Source};
use super::verdict::Verdict;
use crate::names::{LayoutKind, ReduceKind};

/// One run.
#[derive(serde::Serialize)]
pub struct Record {
    pub environment: Environment,
    pub job: Job,
    pub memory: Memory,
    pub stages: Vec<StageRecord>,
    /// The whole call; its bytes and operations are the sums of the stages.
    pub total: StageRecord,
    pub tokens_per_second: f64,
    pub load: LoadRecord,
    pub notes: Vec<String>,
    pub verdict: Verdict,
}

/// What was run.
#[derive(serde::Serialize)]
pub struct Job {
    pub model: String,
    pub hidden: usize,
    pub expert_width: usize,
    pub shared_width: usize,
    pub num_experts: usize,
    pub k: usize,
    pub num_tokens: usize,
    /// Tokens are those of a recording.
    pub is_recorded: bool,
    pub num_ranks: usize,
    /// Each rank is a process, not a thread.
    pub is_processes: bool,
    pub num_iterations: usize,
    pub seed: u64,
    pub backend: &'static str,
    pub routing: String,
    pub trace: Option<Recorded>,
    /// Folder of the weights.
    pub checkpoint: Option<String>,
    pub dtype: String,
    pub weight_dtype: String,
    /// These five as the command line names them.
    pub rounding: String,
    pub layout: String,
    pub reduce: String,
    pub mode: String,
    pub wire: String,
}

/// One stage over all iterations. Times are seconds, of the slowest and of the fastest rank of each iteration.
#[derive(serde::Serialize)]
pub struct StageRecord {
    pub name: &'static str,
    pub slowest: Statistics,
    pub fastest: Statistics,
    /// `[iteration][rank]`.
    pub seconds: Vec<Vec<f64>>,
    /// Bytes of all ranks in one iteration.
    pub bytes: u64,
    /// Floating-point operations of all ranks in one iteration.
    pub flops: u64,
}

/// Load of experts and ranks.
#[derive(serde::Serialize)]
pub struct LoadRecord {
    pub num_local_experts: Vec<usize>,
    pub rows_per_rank: Vec<u64>,
    pub routes_per_rank: Vec<u64>,
    pub routes_per_expert: Vec<u64>,
    pub row_imbalance: f64,
    pub route_imbalance: f64,
    pub expert_imbalance: f64,
    pub ranks_per_token: f64,
    pub num_masked_routes: u64,
}

impl Job {
    pub fn new(arguments: &Arguments, config: &BlockConfig, source: &Source, backend: &'static str) -> Self {
        let routing = source.text.clone();
        let job = Self::of_model(arguments, config, &source.model, source.num_tokens, routing, backend);
        Job { trace: source.recorded.clone(), ..job }
    }

    /// A comparison with what a file recorded.
    pub fn of_golden(
        arguments: &Arguments,
        config: &BlockConfig,
        model: &Model,
        num_tokens: usize,
        path: &Path,
        backend: &'static str,
    ) -> Self {
        let routing = format!("the layer's router, then the recorded routes of {}", path.display());
        let job = Self::of_model(arguments, config, model, num_tokens, routing, backend);
        Job { dtype: "each recorded type".into(), rounding: "framework and fused".into(), is_recorded: true, num_iterations: 1, ..job }
    }

    fn of_model(
        arguments: &Arguments,
        config: &BlockConfig,
        model: &Model,
        num_tokens: usize,
        routing: String,
        backend: &'static str,
    ) -> Self {
        let Shape { hidden, expert_width, shared_width, router, .. } = config.shape;
        Job {
            model: model.name.clone(),
            hidden,
            expert_width,
            shared_width,
            num_experts: router.num_experts,
            k: router.k,
            num_tokens,
            is_recorded: false,
            num_ranks: arguments.ranks,
            is_processes: arguments.processes,
            num_iterations: arguments.iterations,
            seed: arguments.seed,
            backend,
            routing,
            trace: None,
            checkpoint: arguments.checkpoint.as_ref().map(|dir| dir.display().to_string()),
            dtype: config.dtype.to_string(),
            weight_dtype: config.weight_dtype.to_string(),
            layout: layout_name(config.layout),
            rounding: rounding_name(config.rounding),
            reduce: reduce_name(config.reduce),
            mode: name(&arguments.mode),
            wire: name(&arguments.wire),
        }
    }
}

/// The name of a value on the command line.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn reduce_name(reduce: Reduce) -> String {
    name(&match reduce {
        Reduce::AtRankF32 => ReduceKind::RankF32,
        Reduce::AtSource => ReduceKind::Source,
        _ => ReduceKind::Rank,
    })
}

fn layout_name(layout: Layout) -> String {
    match layout {
        Layout::ByExpert { segment_align } => format!("{} (segments padded to {segment_align})", name(&LayoutKind::Expert)),
        Layout::ByExpertFixed { rows_per_expert } => format!("{} ({rows_per_expert} rows each)", name(&LayoutKind::ExpertFixed)),
        _ => name(&LayoutKind::Token),
    }
}

impl LoadRecord {
    pub fn new(load: &Load, placement: &Placement) -> Self {
        LoadRecord {
            num_local_experts: (0..placement.world()).map(|rank| placement.num_local(Rank(rank as u32))).collect(),
            rows_per_rank: load.rows_per_rank.clone(),
            routes_per_rank: load.routes_per_rank.clone(),
            routes_per_expert: load.routes_per_expert.clone(),
            row_imbalance: load.row_imbalance(),
            route_imbalance: load.route_imbalance(),
            expert_imbalance: load.expert_imbalance(),
            ranks_per_token: load.ranks_per_token(),
            num_masked_routes: load.num_masked,
        }
    }
}

/// A stage of a report.
type Of = fn(&Report) -> Stage;

const STAGES: [(&str, Of); 5] = [
    ("router", |report| report.router),
    ("dispatch", |report| report.dispatch),
    ("experts", |report| report.experts),
    ("shared expert", |report| report.shared),
    ("combine", |report| report.combine),
];

/// The stages that did something, in the order in which they ran, and the whole call.
pub fn stages(runs: &[RankRun]) -> (Vec<StageRecord>, StageRecord) {
    let of_each = |name, of: Of| {
        let first = runs.iter().filter_map(|run| run.iterations.first()).map(|(_, report)| of(report));
        let (bytes, flops) = first.fold((0, 0), |(bytes, flops), stage| (bytes + stage.bytes, flops + stage.flops));
        StageRecord::new(name, runs, |(_, report)| of(report).time.as_secs_f64(), bytes, flops)
    };
    let stages: Vec<StageRecord> = STAGES.iter().map(|&(name, of)| of_each(name, of)).filter(StageRecord::is_used).collect();
    let (bytes, flops) = stages.iter().fold((0, 0), |(bytes, flops), stage| (bytes + stage.bytes, flops + stage.flops));
    let total = StageRecord::new("whole layer", runs, |(time, _)| time.as_secs_f64(), bytes, flops);
    (stages, total)
}

type Iteration = (std::time::Duration, Report);

impl StageRecord {
    fn new(name: &'static str, runs: &[RankRun], seconds: impl Fn(&Iteration) -> f64, bytes: u64, flops: u64) -> Self {
        let num_iterations = runs.iter().map(|run| run.iterations.len()).min().unwrap_or(0);
        let seconds: Vec<Vec<f64>> = (0..num_iterations).map(|i| runs.iter().map(|run| seconds(&run.iterations[i])).collect()).collect();
        let over = |choose: fn(f64, f64) -> f64, from: f64| {
            let samples: Vec<f64> = seconds.iter().map(|ranks| ranks.iter().copied().fold(from, choose)).collect();
            Statistics::of(&samples).or_else(|| Statistics::of(&[0.0])).expect("one sample, which is a number")
        };
        StageRecord { name, slowest: over(f64::max, 0.0), fastest: over(f64::min, f64::INFINITY), seconds, bytes, flops }
    }

    fn is_used(&self) -> bool {
        self.bytes > 0 || self.flops > 0
    }
}

/// A file for the record, opened before the run: a path that cannot be written is better known early.
pub struct Sink {
    file: File,
    name: String,
}

impl Sink {
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        match OpenOptions::new().create(true).truncate(false).write(true).open(path) {
            Ok(file) => Ok(Sink { file, name }),
            Err(error) => Err(Error::Io { what: format!("opening {name}"), why: error.to_string() }),
        }
    }

    /// Writes the record as JSON, instead of what the file held before.
    pub fn write(mut self, record: &impl serde::Serialize) -> Result<()> {
        let failed = |why: String| Error::Io { what: format!("writing {}", self.name), why };
        let mut json = serde_json::to_vec_pretty(record).map_err(|error| failed(error.to_string()))?;
        json.push(b'\n');
        // A pipe or a terminal has no length to cut.
        let cut = self.file.metadata().map(|data| data.is_file()).and_then(|is_file| if is_file { self.file.set_len(0) } else { Ok(()) });
        cut.and_then(|()| self.file.write_all(&json)).map_err(|error| failed(error.to_string()))
    }
}
