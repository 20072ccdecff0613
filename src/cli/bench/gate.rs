//! `moe bench gate`: the shared expert's gate at every size, beside what it replaces.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use moe_kernels::gpu::{Blas, Device, Stream};
use moe_kernels::measure::ceiling::{self, EmptyLaunch};
use moe_kernels::measure::timing::{Replay, eager, host_cost};
use moe_kernels::measure::{Arm, Cooldown, Environment, IdleReport, Statistics, idle, processes, rounds};
use moe_kernels::{DType, Error, Result};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::gate_arms::{Form, Inputs, Size, Way};
use super::{Common, Json, environment, note};
use crate::output::{Output, Progress};

/// Options of `moe bench gate`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Few sizes, one process
    #[arg(long)]
    quick: bool,
    /// Processes that measure everything anew; figures are medians of their medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=99))]
    processes: u8,
    /// Start no further process that would not end within this time
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    seconds: u64,
    /// This is one of those processes: it prints JSON lines
    #[arg(long, hide = true)]
    process: Option<usize>,
    /// Which of them; the ways are timed in reversed order in every second one
    #[arg(long, hide = true, default_value_t = 0)]
    turn: usize,
    /// It only compiles the kernels
    #[arg(long, hide = true)]
    compile: bool,
}

/// Calls in a graph, and replays: as in the recorded probes.
const NUM_NODES: usize = 200;
/// The same for calls of many tokens, which take long enough (arbitrary).
const NUM_NODES_LARGE: usize = 48;
/// Rounds in which all ways take turns, and replays of each in a round: 15 samples.
const NUM_ROUNDS: usize = 3;
/// See [`NUM_ROUNDS`].
const NUM_REPLAYS: usize = 5;
/// Launches in a row for the cost of the host (derived: 4 launches a call at most stay below `timing::MAX_QUEUED`; 40 use every tensor once).
const NUM_HOST_CALLS: usize = 40;
/// Samples of the eager time and of the host's (arbitrary: an odd number has a middle).
const NUM_SAMPLES: usize = 9;

/// What a line of a process is about.
const KEYS: [&str; 6] = ["form", "dtype", "t", "k", "n", "way"];
/// What it holds.
const FIELDS: [&str; 4] = ["graph", "eager", "host", "host_same"];

/// Seconds of one way at one size, per call.
#[derive(serde::Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    size: Size,
    way: &'a str,
    num_launches: usize,
    /// A node of a graph.
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<Statistics>,
    /// Between two events.
    #[serde(skip_serializing_if = "Option::is_none")]
    eager: Option<Statistics>,
    /// What the call costs the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Statistics>,
    /// The same with the same tensors every time.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_same: Option<Statistics>,
}

/// What the file holds.
#[derive(serde::Serialize)]
struct Record {
    bench: &'static str,
    unit: &'static str,
    environment: Environment,
    cublaslt: Option<String>,
    idle: IdleReport,
    num_processes: usize,
    num_nodes: usize,
    num_nodes_large: usize,
    /// One for each size and way; statistics over the processes' medians.
    results: Vec<Map<String, Value>>,
    /// Results that were wrong, before or after they were timed.
    wrong: Vec<String>,
}

/// Measures in processes of its own and prints the tables; `false` when a result was wrong.
pub fn bench(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    if arguments.process.is_some() {
        return if arguments.compile { compile(arguments) } else { measure(arguments, output) }.map(|()| true);
    }
    let mut json = Json::create(arguments.common.json.as_deref())?;
    // Before any process opens the device: afterwards it would be one of its users.
    let idle = idle::check(arguments.common.device, arguments.common.allow_busy)?;
    let start = Instant::now();
    let num_processes = if arguments.quick { 1 } else { usize::from(arguments.processes) };
    let progress = Progress::new(num_processes + 1, "compiling");
    let mut options = vec!["bench".to_owned(), "gate".into(), format!("--device={}", arguments.common.device)];
    options.extend(arguments.quick.then(|| "--quick".into()));
    let limit = Duration::from_secs(arguments.seconds);
    let left = || limit.saturating_sub(start.elapsed());
    processes::run(1, &[&options[..], &["--compile".into()]].concat(), left())?;
    progress.step();
    progress.message("measuring");
    progress.suspend(|| note(format_args!("compiled after {:.1} s", start.elapsed().as_secs_f64())));
    let (mut all, mut longest, mut failure) = (Vec::new(), Duration::ZERO, None);
    for turn in 0..num_processes {
        // With a tenth more than the longest so far.
        if turn > 0 && left() < longest * 11 / 10 {
            progress.suspend(|| note(format_args!("{turn} of {num_processes} processes fit into {} s", arguments.seconds)));
            break;
        }
        let begun = Instant::now();
        match processes::run(1, &[&options[..], &[format!("--turn={turn}")]].concat(), left()) {
            Ok(lines) => all.extend(lines),
            // What the others measured is worth keeping.
            Err(error) if turn > 0 => {
                failure = Some(error);
                break;
            }
            Err(error) => return Err(error),
        }
        longest = longest.max(begun.elapsed());
        progress.suspend(|| note(format_args!("process {} of {num_processes} took {:.1} s", turn + 1, begun.elapsed().as_secs_f64())));
        progress.step();
    }
    drop(progress);
    let num_processes = all.len();
    let mut wrong = Vec::new();
    for lines in &mut all {
        wrong.extend(lines.iter().filter_map(|line| Some(line.get("wrong")?.as_str()?.to_owned())));
        lines.retain(|line| !line.contains_key("wrong"));
    }
    let results = if wrong.is_empty() { combine(&all)? } else { Vec::new() };
    print(&results, output)?;
    for wrong in &wrong {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    let is_right = wrong.is_empty();
    let (environment, cublaslt) = environment(&arguments.common);
    json.write(&Record {
        bench: "gate",
        unit: "seconds per call",
        environment,
        cublaslt,
        idle,
        num_processes,
        num_nodes: NUM_NODES,
        num_nodes_large: NUM_NODES_LARGE,
        results,
        wrong,
    })?;
    failure.map_or(Ok(is_right), Err)
}

/// Statistics over the processes, one map for each size and way.
fn combine(all: &[Vec<Map<String, Value>>]) -> Result<Vec<Map<String, Value>>> {
    let mut results = all.first().cloned().unwrap_or_default();
    for field in FIELDS {
        let with_field = |lines: &Vec<Map<String, Value>>| lines.iter().filter(|line| line.contains_key(field)).cloned().collect();
        let all: Vec<Vec<_>> = all.iter().map(with_field).collect();
        let mut medians = processes::medians(&all, &KEYS, field)?.into_iter();
        for result in results.iter_mut().filter(|result| result.contains_key(field)) {
            let (_, statistics) = medians.next().ok_or_else(|| invalid(field, "fewer lines than the first process printed".into()))?;
            let value = serde_json::to_value(statistics).map_err(|error| invalid(field, error.to_string()))?;
            result.insert(field.to_owned(), value);
        }
    }
    Ok(results)
}

fn invalid(what: &str, got: String) -> Error {
    Error::Invalid { op: "bench gate", what: what.into(), got, want: "statistics".into() }
}

/// The sizes of the table.
fn sizes(is_quick: bool) -> Vec<Size> {
    let mut sizes = Vec::new();
    let ks: &[usize] = if is_quick { &[2048, 131072] } else { &[32, 1024, 2048, 4096, 16384, 65536, 131072, 262144] };
    let dtypes: &[DType] = if is_quick { &[DType::BF16] } else { &[DType::BF16, DType::F16] };
    for &dtype in dtypes {
        let of = move |form, t, k, n| Size { form, dtype, t, k, n };
        for form in [Form::Dot, Form::Gate] {
            sizes.extend(ks.iter().map(|&k| of(form, 1, k, 0)));
        }
        let ts: &[usize] = if is_quick { &[64] } else { &[2, 8, 64, 512, 4096] };
        sizes.extend(ts.iter().map(|&t| of(Form::Gate, t, 2048, 0)));
    }
    let ts: &[usize] = if is_quick { &[1, 4096] } else { &[1, 8, 64, 512, 4096] };
    for form in [Form::GateMul, Form::GateMulAdd] {
        sizes.extend(ts.iter().map(|&t| Size { form, dtype: DType::BF16, t, k: 2048, n: 2048 }));
    }
    sizes
}

/// Compiles what the others load: different kernels at the same time.
fn compile(arguments: &Arguments) -> Result<()> {
    let device = Device::open(arguments.common.device)?;
    sizes(arguments.quick).par_iter().try_for_each(|&size| Inputs::load(&device, size))
}

/// One process: a JSON line for each size and way, or for a wrong result.
fn measure(arguments: &Arguments, output: &mut Output) -> Result<()> {
    let stream = Stream::new(&Device::open(arguments.common.device)?)?;
    let blas = Blas::new(stream.device())?;
    let nothing = Size { form: Form::Gate, dtype: DType::BF16, t: 0, k: 0, n: 0 };
    let empty = ceiling::empty_launch(&stream)?;
    let EmptyLaunch { node, programmatic_node, between_events, host_cost, programmatic_host_cost, .. } = empty;
    line(output, nothing, "empty", 1, [Some(node), Some(between_events), Some(host_cost), None])?;
    line(output, nothing, "empty programmatic", 1, [Some(programmatic_node), None, Some(programmatic_host_cost), None])?;
    for size in sizes(arguments.quick) {
        let inputs = Inputs::new(&stream, size)?;
        measure_size(&inputs, &blas, size, processes::is_reversed(arguments.turn), output)?;
        // The least and the most that is moved.
        if size.n > 0 && (size.t == 1 || size.t == 4096) {
            let copy = ceiling::copy(&stream, size.moved_bytes())?;
            let ways = [copy.eager, copy.node, copy.streaming_kernel, copy.plain_kernel];
            let best = ways.into_iter().min_by(|a, b| a.median.total_cmp(&b.median));
            line(output, size, "copy", 1, [best, None, None, None])?;
        }
    }
    Ok(())
}

fn measure_size(inputs: &Inputs, blas: &Blas, size: Size, is_reversed: bool, output: &mut Output) -> Result<()> {
    let stream = inputs.stream();
    let ways = inputs.ways(blas)?;
    let expectations = inputs.expectations();
    if !are_right(inputs, &ways, &expectations, output)? {
        return Ok(());
    }
    let num_nodes = if size.t > 64 { NUM_NODES_LARGE } else { NUM_NODES };
    let replays: Vec<Replay> = ways.iter().map(|way| Replay::capture(stream, &way.run, num_nodes)).collect::<Result<_>>()?;
    let mut arms: Vec<Arm<'_>> =
        ways.iter().zip(&replays).map(|(way, replay)| Arm::new(way.name, move || replay.time(stream, NUM_REPLAYS))).collect();
    let measured = rounds(&mut arms, NUM_ROUNDS, is_reversed, &Cooldown::none())?;
    drop(arms);
    let mut figures = Vec::new();
    for (way, times) in ways.iter().zip(&measured.arms) {
        let eager = eager(stream, &way.run, 1, NUM_SAMPLES)?;
        let host = host_cost(stream, &way.run, NUM_HOST_CALLS, NUM_SAMPLES)?;
        let host_same = host_cost(stream, |_| (way.run)(0), NUM_HOST_CALLS, NUM_SAMPLES)?;
        figures.push([times.seconds, eager, host, host_same].map(Some));
    }
    if are_right(inputs, &ways, &expectations, output)? {
        for (way, figures) in ways.iter().zip(figures) {
            line(output, size, way.name, way.num_launches, figures)?;
        }
    }
    Ok(())
}

fn are_right(inputs: &Inputs, ways: &[Way<'_>], expectations: &[super::gate_arms::Expectation], output: &mut Output) -> Result<bool> {
    let mut is_right = true;
    for way in ways {
        if let Some(wrong) = inputs.check(way, expectations)? {
            is_right = false;
            output.line(serde_json::json!({ "wrong": wrong }))?;
        }
    }
    Ok(is_right)
}

fn line(
    output: &mut Output,
    size: Size,
    way: &str,
    num_launches: usize,
    [graph, eager, host, host_same]: [Option<Statistics>; 4],
) -> Result<()> {
    let line = Line { size, way, num_launches, graph, eager, host, host_same };
    let json = serde_json::to_string(&line).map_err(|error| invalid("line", error.to_string()))?;
    output.line(json)
}

/// A figure of the results.
fn figure(line: &Map<String, Value>, field: &str) -> Option<Statistics> {
    serde_json::from_value(line.get(field)?.clone()).ok()
}

/// Ways that have a column of their own in the tables of device times; the last only where something is copied.
const COLUMNS: [(&str, &str); 6] = [
    ("ours", "ours"),
    ("programmatic", "ours early"),
    ("empty, programmatic", "behind"),
    ("cublaslt chain", "cuBLASLt"),
    ("plain chain", "plain"),
    ("copy", "copy"),
];

fn text(line: &Map<String, Value>, key: &str) -> String {
    match line.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// Form, type, T, K and N.
fn label(line: &Map<String, Value>) -> [String; 5] {
    [KEYS[0], KEYS[1], KEYS[2], KEYS[3], KEYS[4]].map(|key| text(line, key))
}

/// Microseconds: the median, and under it the least and the greatest.
fn spread(figure: Statistics) -> String {
    let Statistics { median, min, max, .. } = figure.scaled(1e6);
    let digits = if median < 10.0 { 3 } else { 1 };
    format!("{median:.digits$}\n{min:.digits$}-{max:.digits$}")
}

fn print(results: &[Map<String, Value>], output: &mut Output) -> Result<()> {
    let find = |size: &[String; 5], way: &str, field: &str| {
        let line = results.iter().find(|line| label(line) == *size && text(line, "way") == way)?;
        figure(line, field)
    };
    let mut sizes: Vec<[String; 5]> = Vec::new();
    for label in results.iter().map(label) {
        if !sizes.contains(&label) {
            sizes.push(label);
        }
    }
    let Some((nothing, sizes)) = sizes.split_first() else { return Ok(()) };
    output.heading("An empty kernel: microseconds, median over least and greatest of the processes")?;
    let rows = ["empty", "empty programmatic"].map(|way| {
        let cells = FIELDS[..3].iter().map(|field| find(nothing, way, field).map_or("-".into(), spread));
        [way.to_owned()].into_iter().chain(cells).collect()
    });
    output.table(&["<launch", "graph node", "between events", "host"], rows)?;
    for (form, title) in [
        ("dot", "x . w"),
        ("gate", "sigmoid(x . w)"),
        ("gate_mul", "sigmoid(x . w) * s, K = N = 2048"),
        ("gate_mul_add", "out + sigmoid(x . w) * s, K = N = 2048"),
    ] {
        let of_form: Vec<_> = sizes.iter().filter(|size| size[0] == form).collect();
        if of_form.is_empty() {
            continue;
        }
        let has_copy = form.starts_with("gate_mul");
        let columns = &COLUMNS[..COLUMNS.len() - usize::from(!has_copy)];
        output.heading(format_args!(
            "{title}: microseconds per graph node (early: programmatic launch; behind: that after an empty kernel that triggers nothing, both)"
        ))?;
        let header: Vec<&str> = ["<type", "T", "K"].into_iter().chain(columns.iter().map(|(_, name)| *name)).collect();
        let rows = of_form.iter().map(|size| {
            let cells = columns.iter().map(|(way, _)| find(size, way, "graph").map_or("-".into(), spread));
            size[1..4].iter().cloned().chain(cells).collect()
        });
        output.table(&header, rows)?;
        output.heading(format_args!(
            "{title}: microseconds of one call between two events, and for the host (also with the same tensors every time)"
        ))?;
        let header = ["<type", "T", "K", "ours", "cuBLASLt", "plain", "host: ours", "same", "cuBLASLt", "plain"];
        let rows = of_form.iter().map(|size| {
            let cells = [
                ("ours", "eager"),
                ("cublaslt chain", "eager"),
                ("plain chain", "eager"),
                ("ours", "host"),
                ("ours", "host_same"),
                ("cublaslt chain", "host"),
                ("plain chain", "host"),
            ];
            let cells = cells.map(|(way, field)| find(size, way, field).map_or("-".into(), |f| format!("{:.2}", f.median * 1e6)));
            size[1..4].iter().cloned().chain(cells).collect()
        });
        output.table(&header, rows)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(t: usize, way: &str, seconds: f64) -> Map<String, Value> {
        let statistics = super::super::statistics(&[seconds]).unwrap();
        let size = Size { form: Form::Gate, dtype: DType::BF16, t, k: 2048, n: 0 };
        let [graph, eager, host, host_same] = [Some(statistics); 4];
        let line = Line { size, way, num_launches: 1, graph, eager, host, host_same };
        match serde_json::to_value(&line).unwrap() {
            Value::Object(map) => map,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn processes_are_brought_together() {
        let process = |seconds| vec![line(1, "ours", seconds), line(1, "plain chain", 9.0), line(2, "ours", 7.0)];
        let results = combine(&[process(1.0), process(3.0), process(2.0)]).unwrap();
        assert_eq!(results.len(), 3);
        for field in FIELDS {
            let ours = figure(&results[0], field).unwrap();
            assert_eq!((ours.median, ours.min, ours.max, ours.num_samples), (2.0, 1.0, 3.0, 3));
            assert_eq!(figure(&results[2], field).unwrap().median, 7.0);
        }
    }

    #[test]
    fn the_table_has_every_size_that_was_asked_for() {
        let sizes = sizes(false);
        let count = |form| sizes.iter().filter(|size| size.form == form).count();
        // 8 K and two types; with a sigmoid also 5 T.
        assert_eq!([Form::Dot, Form::Gate, Form::GateMul, Form::GateMulAdd].map(count), [16, 26, 5, 5]);
        // Read x, w, s; write out; gate_mul_add reads out too.
        let bytes = |form| Size { form, dtype: DType::BF16, t: 3, k: 5, n: 7 }.moved_bytes();
        assert_eq!([Form::Gate, Form::GateMul, Form::GateMulAdd].map(bytes), [46, 124, 166]);
    }
}
