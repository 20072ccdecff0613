//! `moe run --checkpoint` on a recorded input: is the layer what was recorded?
#![forbid(unsafe_code)]

use std::path::Path;

use moe_kernels::layer::{Comparison, Distance, Golden, Memory, Recording, golden};
use moe_kernels::measure::Environment;
use moe_kernels::{Backend, Result};

use super::execute::Weights;
use super::model::Model;
use super::options::{Arguments, rounding_name};
use super::print;
use super::record::{Job, Sink};
use crate::output::Output;

/// Everything that was compared.
#[derive(serde::Serialize)]
struct Record {
    environment: Environment,
    job: Job,
    memory: Memory,
    golden: String,
    comparisons: Vec<Comparison>,
    is_right: bool,
}

/// Runs the layer on every recorded input, with both roundings; `false` when something is past its bound.
pub fn run(arguments: &Arguments, backend: &Backend, model: &Model, path: &Path, output: &mut Output) -> Result<bool> {
    let golden = Golden::open(path, &model.shape)?;
    let num_tokens = golden.recordings().iter().map(Recording::num_tokens).max().unwrap_or(0);
    let config = arguments.block(model, num_tokens, true)?;
    let memory = Memory::of(&config, arguments.ranks)?;
    memory.check()?;
    let sink = arguments.json.as_deref().map(Sink::open).transpose()?;

    let environment = Environment::record();
    let job = Job::of_golden(arguments, &config, model, num_tokens, path, backend.name());
    print::job(output, &environment, &job, &memory)?;

    let weights = Weights::new(backend, &config, model, arguments.ranks, arguments.seed)?;
    let comparisons = golden::compare(backend, &config, &weights.common, &weights.experts, &golden)?;

    let pair = |Distance { error, bound }: Distance| format!("{error:.1e} / {bound:.0e}");
    output.heading("error / what it may be: norm of the difference from the recording, over the norm of what was recorded")?;
    let rows = comparisons.iter().map(|c| {
        let ids = match (c.num_wrong_ids, c.num_ties) {
            (0, 0) => "same".to_owned(),
            (0, 1) => "same, 1 tie".to_owned(),
            (0, ties) => format!("same, {ties} ties"),
            (wrong, _) => format!("{wrong} wrong"),
        };
        let distances = [c.logits, c.weights, c.routed, c.output].map(pair);
        [vec![c.run.clone(), rounding_name(c.rounding), ids], distances.to_vec()].concat()
    });
    output.table(&["<run", "<rounding", "<experts", "logits", "weights", "routed sum", "output"], rows)?;
    if comparisons.iter().any(|c| c.num_ties > 0) {
        output.line("a tie: recorded scores of two experts are the same for the last place, and either may be chosen")?;
    }
    output.line("")?;
    for comparison in &comparisons {
        let Comparison { run, rounding, problems, .. } = comparison;
        problems.iter().try_for_each(|problem| print::wrong(output, &format!("{run}, {}: {problem}", rounding_name(*rounding))))?;
    }
    let is_right = comparisons.iter().all(Comparison::is_right);
    print::is_right(output, is_right)?;
    if let Some(sink) = sink {
        sink.write(&Record { environment, job, memory, golden: path.display().to_string(), comparisons, is_right })?;
    }
    Ok(is_right)
}
