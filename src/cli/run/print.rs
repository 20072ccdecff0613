//! What a run looks like on a terminal, or in a file.
#![forbid(unsafe_code)]

use moe_kernels::Result;
use moe_kernels::layer::Memory;
use moe_kernels::measure::{Environment, report};

use super::record::{Job, LoadRecord, Record, StageRecord};
use super::verdict::Verdict;
use crate::output::Output;

/// Columns of a line's first word.
const HEAD: usize = 9;

/// Cells of a bar of the load table (arbitrary: the table stays within 80 columns).
const BAR: usize = 30;

/// What is about to be run, before it takes its time.
pub fn job(output: &mut Output, environment: &Environment, job: &Job, memory: &Memory) -> Result<()> {
    let e = environment;
    let commit = e.commit.as_ref().map(|commit| format!(", {commit}")).unwrap_or_default();
    let shared = if job.shared_width > 0 { format!(", shared expert of {}", job.shared_width) } else { String::new() };
    let bytes = report::bytes;
    let lines = [
        ("machine", format!("{}, {} cores, {}; {}", e.cpu, e.num_cores, e.level, e.system)),
        ("program", format!("moe-kernels {}{commit}, {}, {}", e.version, e.profile, e.time)),
        (
            "model",
            format!(
                "{}: hidden {}, {} experts of {}, {} a token{shared}; weights {}",
                job.model, job.hidden, job.num_experts, job.expert_width, job.k, job.weight_dtype
            ),
        ),
        (
            "tokens",
            match job.is_recorded {
                true => format!("{} of {}", report::count(job.num_tokens as u64), job.dtype),
                false => format!("{} of {}, random values, seed {}", report::count(job.num_tokens as u64), job.dtype, job.seed),
            },
        ),
        ("routing", job.routing.clone()),
        (
            "ranks",
            format!(
                "{}{} on {}; layout {}, reduce {}, rounding {}, mode {}, wire {}",
                job.num_ranks,
                if job.is_processes { " processes" } else { "" },
                job.backend,
                job.layout,
                job.reduce,
                job.rounding,
                job.mode,
                job.wire
            ),
        ),
        (
            "memory",
            format!(
                "{}: weights {}, buffers between ranks {}, scratch {}, tokens {}; {} available",
                bytes(memory.total_bytes()),
                bytes(memory.weight_bytes),
                bytes(memory.symmetric_bytes),
                bytes(memory.scratch_bytes),
                bytes(memory.token_bytes),
                bytes(e.memory.available_bytes)
            ),
        ),
    ];
    lines.into_iter().try_for_each(|(name, value)| output.paragraph(name, HEAD, &value))
}

/// What came out.
pub fn results(output: &mut Output, record: &Record) -> Result<()> {
    stages(output, record)?;
    load(output, &record.load)?;
    if !record.notes.is_empty() {
        output.line("")?;
    }
    record.notes.iter().try_for_each(|note| output.paragraph("note", HEAD, note))?;
    output.line("")?;
    verdict(output, &record.verdict, record.job.num_iterations)
}

fn stages(output: &mut Output, record: &Record) -> Result<()> {
    let sum: f64 = record.stages.iter().map(|stage| stage.slowest.median).sum();
    let row = |stage: &StageRecord, share: String| {
        let seconds = stage.slowest.median;
        vec![
            stage.name.to_owned(),
            report::duration(seconds),
            report::duration(stage.fastest.median),
            report::bytes(stage.bytes),
            report::rate(stage.bytes, seconds),
            report::rate(stage.flops, seconds),
            share,
        ]
    };
    let mut rows: Vec<_> = record.stages.iter().map(|stage| row(stage, report::percent(stage.slowest.median, sum))).collect();
    rows.push(row(&record.total, String::new()));
    let n = record.job.num_iterations;
    output.heading(format_args!(
        "time of a stage on its slowest and fastest rank, median of {n} iteration{}",
        if n == 1 { "" } else { "s" }
    ))?;
    output.table(&["<stage", "slowest", "fastest", "bytes", "GB/s", "GFLOP/s", "share"], rows)?;
    output.line(format_args!("{} tokens/s", report::count(record.tokens_per_second as u64)))
}

fn load(output: &mut Output, load: &LoadRecord) -> Result<()> {
    let most = load.rows_per_rank.iter().copied().max().unwrap_or(0).max(1);
    let mean = load.rows_per_rank.iter().sum::<u64>() as f64 / load.rows_per_rank.len().max(1) as f64;
    let ascii = output.is_plain();
    let rows = load.rows_per_rank.iter().zip(&load.routes_per_rank).zip(&load.num_local_experts).enumerate();
    let rows = rows.map(|(rank, ((&rows, &routes), &experts))| {
        vec![
            rank.to_string(),
            experts.to_string(),
            report::count(routes),
            report::count(rows),
            if mean > 0.0 { format!("{:.2}", rows as f64 / mean) } else { "-".into() },
            report::bar(rows as f64 / most as f64, BAR, ascii),
        ]
    });
    output.heading("load per rank (a row is a token, once per rank that has one of its experts)")?;
    output.table(&["rank", "experts", "routes", "rows", "of mean", "<rows"], rows)?;
    let routes: u64 = load.routes_per_expert.iter().sum();
    let (top, most) = load.routes_per_expert.iter().enumerate().fold((0, 0), |best, (e, &n)| if n > best.1 { (e, n) } else { best });
    output.line(format_args!(
        "imbalance (max / mean): rows {:.2}, routes {:.2}, experts {:.2}; ranks per token {:.2}",
        load.row_imbalance, load.route_imbalance, load.expert_imbalance, load.ranks_per_token
    ))?;
    let masked =
        if load.num_masked_routes > 0 { format!("; {} routes masked", report::count(load.num_masked_routes)) } else { String::new() };
    output.line(format_args!("busiest expert: {top}, {} of all routes{masked}", report::percent(most as f64, routes as f64)))
}

fn verdict(output: &mut Output, verdict: &Verdict, num_iterations: usize) -> Result<()> {
    let Verdict { num_tokens, num_wrong_tokens, worst_error, bound, num_counts, digest, .. } = verdict;
    let checked = format!(
        "{num_tokens} tokens computed again and compared bit for bit, {num_wrong_tokens} wrong; distance to the oracle at most {worst_error:.1e}, \
         allowed {bound:.1e}; {num_counts} row counts; the same bytes in {} iterations",
        num_iterations + 1
    );
    output.paragraph("checked", HEAD, &checked)?;
    output.paragraph("digest", HEAD, &format!("{digest} of all results"))?;
    verdict.problems.iter().try_for_each(|problem| wrong(output, problem))?;
    is_right(output, verdict.is_right)
}

/// One thing that is wrong.
pub fn wrong(output: &mut Output, problem: &str) -> Result<()> {
    output.paragraph("wrong", HEAD, problem)
}

/// The last line.
pub fn is_right(output: &mut Output, is_right: bool) -> Result<()> {
    output.paragraph("verdict", HEAD, if is_right { "right" } else { "WRONG" })
}
