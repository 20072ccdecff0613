//! `moe bench cast`: the grouped FP8 cast + transpose, beside a copy of the same bytes and what is commonly done.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use moe_kernels::gpu::plain_cast::PeerCast;
use moe_kernels::gpu::{Device, Stream};
use moe_kernels::measure::ceiling::{self, Parameters};
use moe_kernels::measure::timing::{MAX_QUEUED, Replay, eager_samples, host_cost};
use moe_kernels::measure::{Arm, Cooldown, Environment, IdleReport, Statistics, idle, processes, rounds};
use moe_kernels::ops::cast::{Block, Scaling};
use moe_kernels::{DType, Error, Result};
use serde_json::{Map, Value};

use super::cast_case::{Case, Held, ListMemory, Memory, NUM_LISTS, NUM_SETS, Way, check_list};
use super::{Common, Json, environment, note};
use crate::output::{Output, Progress};

/// Options of `moe bench cast`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Every sixth shape and few of the others, one process
    #[arg(long)]
    quick: bool,
    /// Only cases of these groups: shapes, types, scales, current, padding, counts, host
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    only: Vec<String>,
    /// Also time the cast of this shared library (see `moe_kernels::gpu::plain_cast::PeerCast` for its one function)
    #[arg(long, value_name = "LIB")]
    peer: Option<PathBuf>,
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
}

/// Seconds that a graph should take, and its nodes at most (arbitrary: so that the step from graph to graph vanishes).
const GRAPH_SECONDS: f64 = 1.5e-3;
/// See [`GRAPH_SECONDS`].
const MAX_NODES: usize = 64;
/// Rounds in which all ways take turns, and replays of each in a round (arbitrary: 9 samples).
const NUM_ROUNDS: usize = 3;
/// See [`NUM_ROUNDS`].
const NUM_REPLAYS: usize = 3;
/// Calls in a row for the eager time and for the cost of the host (arbitrary).
const NUM_CALLS: usize = 6;
/// Samples of the eager time and of the host's (arbitrary: an odd number has a middle).
const NUM_SAMPLES: usize = 5;
/// Rounds in which calls whose cost for the host is compared take turns (arbitrary: an odd number has a middle).
const NUM_HOST_ROUNDS: usize = 15;
/// Bytes a second of the memory by the datasheets (spec: NVIDIA H200, H100 SXM, A100 80 GB SXM, B200).
const PEAKS: [(&str, f64); 4] = [("H200", 4.8e12), ("H100", 3.35e12), ("A100", 2.039e12), ("B200", 8e12)];

/// What a line of a process is about.
const KEYS: [&str; 4] = ["group", "set", "name", "way"];
/// What it holds.
const FIELDS: [&str; 3] = ["graph", "eager", "host"];

/// The shapes: set, name, columns, rows.
const SHAPES: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/shapes/cast_shapes.csv"));

/// Seconds of one way of one case, per call.
#[derive(serde::Serialize)]
struct Line<'a> {
    group: &'a str,
    set: &'a str,
    name: &'a str,
    way: &'a str,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<Statistics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eager: Option<Statistics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Statistics>,
}

/// What the file holds.
#[derive(serde::Serialize)]
struct Record {
    bench: &'static str,
    unit: &'static str,
    environment: Environment,
    idle: IdleReport,
    num_processes: usize,
    /// One for each case and way; statistics over the processes' medians.
    results: Vec<Map<String, Value>>,
    /// Results that were wrong.
    wrong: Vec<String>,
}

/// Measures in processes of its own and prints the tables; `false` when a result was wrong.
pub fn bench(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    if arguments.process.is_some() {
        return measure(arguments, output).map(|()| true);
    }
    let mut json = Json::create(arguments.common.json.as_deref())?;
    // Before any process opens the device: afterwards it would be one of its users.
    let idle = idle::check(arguments.common.device, arguments.common.allow_busy)?;
    let start = Instant::now();
    let num_processes = if arguments.quick { 1 } else { usize::from(arguments.processes) };
    let progress = Progress::new(num_processes, "measuring");
    let mut options = vec!["bench".to_owned(), "cast".into(), format!("--device={}", arguments.common.device)];
    options.extend(arguments.quick.then(|| "--quick".into()));
    options.extend((!arguments.only.is_empty()).then(|| format!("--only={}", arguments.only.join(","))));
    options.extend(arguments.peer.as_ref().map(|path| format!("--peer={}", path.display())));
    let limit = Duration::from_secs(arguments.seconds);
    let left = || limit.saturating_sub(start.elapsed());
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
        // The first one compiles too.
        longest = begun.elapsed();
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
    let (environment, _) = environment(&arguments.common);
    let gpu = environment.nvidia.as_ref().and_then(|nvidia| nvidia.gpus.get(arguments.common.device as usize)).map(|gpu| gpu.name.clone());
    print(&results, peak(gpu.as_deref().unwrap_or("")), output)?;
    for wrong in &wrong {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    let is_right = wrong.is_empty();
    json.write(&Record { bench: "cast", unit: "seconds per call", environment, idle, num_processes, results, wrong })?;
    failure.map_or(Ok(is_right), Err)
}

fn peak(gpu: &str) -> Option<f64> {
    PEAKS.iter().find(|(name, _)| gpu.contains(name)).map(|(_, peak)| *peak)
}

/// Statistics over the processes, one map for each case and way.
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
    Error::Invalid { op: "bench cast", what: what.into(), got, want: "statistics".into() }
}

/// The rows of the file of shapes.
fn shapes() -> Result<Vec<Case>> {
    let bad = |line: usize, why: &str| Error::Format { path: "benches/shapes/cast_shapes.csv".into(), line: line as u64, why: why.into() };
    let lines = SHAPES.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines
        .map(|(i, line)| {
            let number = |text: &str| text.parse::<usize>().map_err(|error| bad(i + 1, &format!("{text}: {error}")));
            let fields: Vec<&str> = line.split(',').collect();
            let &[set, name, columns, ref rows @ ..] = &fields[..] else { return Err(bad(i + 1, "fewer than three fields")) };
            let rows = match rows {
                [equal] => {
                    let (num, each) = equal.split_once('x').ok_or_else(|| bad(i + 1, "one field that is not NUMxROWS"))?;
                    vec![number(each)?; number(num)?]
                }
                rows => rows.iter().map(|text| number(text)).collect::<Result<_>>()?,
            };
            Ok(Case { set: set.into(), name: name.into(), rows, columns: number(columns)?, ..Case::bf16_to_e4m3("shapes") })
        })
        .collect()
}

/// Everything that is measured, by the type of the input.
fn cases(is_quick: bool, only: &[String]) -> Result<Vec<Case>> {
    let mut all = shapes()?;
    let find = |set: &str, name: &str| {
        all.iter().find(|case| case.set == set && case.name == name).cloned().ok_or_else(|| invalid("shapes", name.into()))
    };
    let even = |group, num: usize, rows: usize, columns: usize, name: &str| Case {
        set: "even".into(),
        name: name.into(),
        rows: vec![rows; num],
        columns,
        ..Case::bf16_to_e4m3(group)
    };
    // One shape of a middle size for what else there is.
    let middle = find("uniform", "256exp/4096cols/MBS1")?;
    let small = find("uniform", "128exp/1536cols/MBS1")?;
    let mut others = Vec::new();
    for (from, to) in [(DType::F32, DType::E4M3), (DType::F16, DType::E4M3), (DType::BF16, DType::E5M2), (DType::BF16, DType::BF16)] {
        others.push(Case { group: "types", set: "uniform".into(), name: format!("{from} to {to}"), from, to, ..middle.clone() });
    }
    let scalings = [
        ("1x128, DeepGEMM", Scaling::deep_gemm(Block::Row128)),
        ("1x128, Transformer Engine", Scaling::transformer_engine(Block::Row128, 0.0, true)),
        ("128x128, Transformer Engine", Scaling::transformer_engine(Block::Square128, 0.0, true)),
        ("MXFP8", Scaling::MXFP8),
    ];
    for (name, scaling) in scalings {
        for (set, shape) in [("even", find("even", "256exp/4096cols/MBS2")?), ("uniform", middle.clone())] {
            others.push(Case { group: "scales", set: set.into(), name: name.into(), scaling, ..shape });
        }
    }
    // The second read comes from the cache while a call's input fits there.
    let current = Scaling::Current { epsilon: 0.0, power_of_two: false };
    for rows in [512, 1024, 2048, 4096, 8192, 16384] {
        let case = even("current", 8, rows / 8, 4096, &format!("8 matrices, {} MiB of input", (rows * 4096 * 2) >> 20));
        others.push(Case { scaling: current, ..case });
    }
    others.push(Case { group: "current", scaling: current, ..small });
    for pad_rows in [32, 128] {
        others.push(Case { group: "padding", set: "uniform".into(), name: format!("to {pad_rows} rows"), pad_rows, ..middle.clone() });
    }
    for num in [8, 64, 256, 1024] {
        others.push(even("counts", num, 65536 / num, 4096, &format!("{num} matrices")));
    }
    // So small that the host's cost shows.
    others.push(even("host", 8, 16, 256, "8 matrices"));
    others.push(even("host", 256, 16, 256, "256 matrices"));
    if is_quick {
        all = all.into_iter().step_by(6).collect();
        others.retain(|case| !case.name.contains("f32") && !case.name.contains("Engine") && case.rows.len() != 64);
    }
    all.extend(others);
    all.retain(|case| only.is_empty() || only.iter().any(|group| group == case.group));
    // The inputs are filled anew for each type.
    all.sort_by_key(|case| case.from as u8);
    Ok(all)
}

/// One process: a JSON line for each case and way, or for a wrong result.
fn measure(arguments: &Arguments, output: &mut Output) -> Result<()> {
    let cases = cases(arguments.quick, &arguments.only)?;
    let stream = Stream::new(&Device::open(arguments.common.device)?)?;
    let peer = arguments.peer.as_deref().map(PeerCast::load).transpose()?;
    let mut memory = Memory::new(&stream, &cases)?;
    let of_host: Vec<Case> = cases.iter().filter(|case| case.group == "host").cloned().collect();
    let lists = (0..NUM_LISTS).map(|_| ListMemory::new(&stream, &cases));
    let mut lists = lists.chain((0..NUM_SETS).map(|_| ListMemory::new(&stream, &of_host))).collect::<Result<Vec<_>>>()?;
    for case in &cases {
        memory.fill(case.from)?;
        if case.has_list() {
            // `operands` reads nothing but the inputs.
            if let Some(wrong) = check_list(case, &memory, &mut lists)? {
                output.line(serde_json::json!({ "wrong": wrong }))?;
            }
        }
        measure_case(&stream, case, &memory, &mut lists, peer.as_ref(), processes::is_reversed(arguments.turn), output)?;
    }
    Ok(())
}

fn measure_case(
    stream: &Stream,
    case: &Case,
    memory: &Memory,
    lists: &mut [ListMemory],
    peer: Option<&PeerCast>,
    is_reversed: bool,
    output: &mut Output,
) -> Result<()> {
    let held = Held::new(case, memory, lists)?;
    let ways = held.ways(peer);
    if !are_right(&held, &ways, output)? {
        return Ok(());
    }
    let nodes = (GRAPH_SECONDS / (case.moved_bytes() as f64 / 3e12 + 3e-6)) as usize; // 3e12, 3e-6: arbitrary, a rate and a launch
    let turns = case.num_turns();
    let num_nodes = nodes.clamp(turns, MAX_NODES.max(turns)) / turns * turns;
    let copy = |i| held.copy(i);
    let mut replays: Vec<Replay> = ways.iter().map(|way| Replay::capture(stream, &way.run, num_nodes)).collect::<Result<_>>()?;
    replays.push(Replay::capture(stream, copy, num_nodes)?);
    let names = ways.iter().map(|way| way.name).chain(["copy"]);
    let mut arms: Vec<Arm<'_>> =
        names.clone().zip(&replays).map(|(name, replay)| Arm::new(name, move || replay.time(stream, NUM_REPLAYS))).collect();
    arms.push(Arm::new("copy, eager", || eager_samples(stream, copy, turns, NUM_REPLAYS)));
    let measured = rounds(&mut arms, NUM_ROUNDS, is_reversed, &Cooldown::none())?;
    drop(arms);
    let eager = |way: &Way<'_>| Ok(Statistics::of(&eager_samples(stream, &way.run, 1, NUM_SAMPLES)?));
    let eager: Vec<_> = ways.iter().map(eager).collect::<Result<_>>()?;
    let hosts = if case.group == "host" {
        host_in_turns(stream, case, &ways, is_reversed, output)?
    } else {
        ways.iter().map(|way| host_cost(stream, &way.run, NUM_CALLS, NUM_SAMPLES).map(Some)).collect::<Result<_>>()?
    };
    if are_right(&held, &ways, output)? {
        for (((way, times), eager), host) in ways.iter().zip(&measured.arms).zip(eager).zip(hosts) {
            line(output, case, way.name, [Some(times.seconds), eager, host])?;
        }
        let [node, eager] = [0, 1].map(|i| Some(measured.arms[ways.len() + i].seconds));
        line(output, case, "copy", [node, eager, None])?;
    }
    Ok(())
}

/// Queues call `i`.
type Call<'a> = &'a dyn Fn(usize) -> Result<()>;

/// What calls cost the host, all ways in turns with launches of kernels that do nothing: the clock of a core, and who shares it, changes more than they differ.
/// As many calls in a row of each: a first one wakes up what the next ones find awake.
fn host_in_turns(
    stream: &Stream,
    case: &Case,
    ways: &[Way<'_>],
    is_reversed: bool,
    output: &mut Output,
) -> Result<Vec<Option<Statistics>>> {
    let [few, early, many, many_early] =
        [(Parameters::Few, false), (Parameters::Few, true), (Parameters::Many, false), (Parameters::Many, true)]
            .map(|(parameters, early)| ceiling::empty_kernel(stream, parameters, early));
    let (few, early, many, many_early) = (few?, early?, many?, many_early?);
    let bare: [(&str, Call<'_>); 4] =
        [("empty", &few), ("empty, early", &early), ("empty, 22 KiB", &many), ("empty, 22 KiB, early", &many_early)];
    let mut calls: Vec<Call<'_>> = bare.iter().map(|(_, call)| *call).collect();
    calls.extend(ways.iter().map(|way| &*way.run as Call<'_>));
    let mut samples = vec![Vec::new(); calls.len()];
    for round in 0..NUM_HOST_ROUNDS {
        for turn in 0..calls.len() {
            let i = if is_reversed == (round % 2 == 0) { calls.len() - 1 - turn } else { turn };
            samples[i].push(host_cost(stream, calls[i], MAX_QUEUED, 1)?.median);
        }
    }
    let mut hosts = samples.iter().map(|samples| Statistics::of(samples));
    for ((way, _), host) in bare.iter().zip(&mut hosts) {
        line(output, case, way, [None, None, host])?;
    }
    Ok(hosts.collect())
}

fn are_right(held: &Held<'_>, ways: &[Way<'_>], output: &mut Output) -> Result<bool> {
    let mut is_right = true;
    for way in ways {
        if let Some(wrong) = held.check(way)? {
            is_right = false;
            output.line(serde_json::json!({ "wrong": wrong }))?;
        }
    }
    Ok(is_right)
}

fn line(output: &mut Output, case: &Case, way: &str, [graph, eager, host]: [Option<Statistics>; 3]) -> Result<()> {
    let (group, set, name, bytes) = (case.group, case.set.as_str(), case.name.as_str(), case.moved_bytes());
    let json = serde_json::to_string(&Line { group, set, name, way, bytes, graph, eager, host });
    output.line(json.map_err(|error| invalid("line", error.to_string()))?)
}

/// A figure of the results.
fn figure(line: &Map<String, Value>, field: &str) -> Option<Statistics> {
    serde_json::from_value(line.get(field)?.clone()).ok()
}

fn text<'a>(line: &'a Map<String, Value>, key: &str) -> &'a str {
    line.get(key).and_then(Value::as_str).unwrap_or("")
}

/// Figures of one case.
struct Figures<'a> {
    lines: Vec<&'a Map<String, Value>>,
}

impl Figures<'_> {
    fn get(&self, way: &str, field: &str) -> Option<f64> {
        let line = self.lines.iter().find(|line| text(line, "way") == way)?;
        figure(line, field).map(|statistics| statistics.median)
    }

    fn bytes(&self) -> f64 {
        self.lines.first().and_then(|line| line.get("bytes")?.as_f64()).unwrap_or(0.0)
    }

    /// Bytes a second of the better copy.
    fn ceiling(&self) -> Option<f64> {
        let best = ["graph", "eager"].into_iter().filter_map(|field| self.get("copy", field)).min_by(f64::total_cmp)?;
        Some(self.bytes() / best)
    }

    fn rate(&self, way: &str) -> Option<f64> {
        self.get(way, "graph").map(|seconds| self.bytes() / seconds)
    }

    /// Of the ceiling.
    fn ratio(&self, way: &str) -> Option<f64> {
        Some(self.rate(way)? / self.ceiling()?)
    }
}

fn print(results: &[Map<String, Value>], peak: Option<f64>, output: &mut Output) -> Result<()> {
    let mut labels: Vec<[&str; 3]> = Vec::new();
    for line in results {
        let label = [text(line, "group"), text(line, "set"), text(line, "name")];
        if !labels.contains(&label) {
            labels.push(label);
        }
    }
    let of = |label: &[&str; 3]| Figures {
        lines: results.iter().filter(|line| [text(line, "group"), text(line, "set"), text(line, "name")] == *label).collect(),
    };
    let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    let us = |value: Option<f64>| number(value.map(|seconds| seconds * 1e6), 1);
    let has_peer = results.iter().any(|line| text(line, "way") == "peer");
    let groups = [
        ("shapes", "Shapes, bf16 to e4m3, both copies, greatest magnitudes"),
        ("types", "Other types"),
        ("scales", "Scales of blocks, both copies from one read"),
        ("current", "Current scaling"),
        ("padding", "Fused padding"),
        ("counts", "Numbers of matrices of one total"),
    ];
    for (group, title) in groups {
        let of_group: Vec<_> = labels.iter().filter(|label| label[0] == group).collect();
        if of_group.is_empty() {
            continue;
        }
        output.heading(format_args!("{title}: us a graph node and (eager) between events; ratio: to the better copy of the same bytes"))?;
        let mut header =
            vec!["<set", "<case", "MB", "us", "eager", "TB/s", "TiB/s", "of peak", "ratio", "list", "made once", "base", "x base"];
        if group == "padding" {
            header[9..].copy_from_slice(&["two steps", "-", "-", "-"]);
        }
        header.extend(has_peer.then_some("peer"));
        let row = |label: &&[&str; 3]| {
            let figures = of(label);
            let rate = figures.rate("grouped");
            let speedup = || Some(figures.get("base", "graph")? / figures.get("grouped", "graph")?);
            let list = if group == "padding" { "pad, then cast" } else { "list" };
            let mut cells = vec![
                label[1].to_owned(),
                label[2].to_owned(),
                format!("{:.0}", figures.bytes() / 1e6),
                us(figures.get("grouped", "graph")),
                us(figures.get("grouped", "eager")),
                number(rate.map(|rate| rate / 1e12), 3),
                number(rate.map(|rate| rate / 2f64.powi(40)), 3),
                number(rate.zip(peak).map(|(rate, peak)| 100.0 * rate / peak), 1),
                number(figures.ratio("grouped"), 3),
                number(figures.ratio(list), 3),
                number(figures.ratio("prepared"), 3),
                number(figures.ratio("base"), 3),
                number(speedup(), 2),
            ];
            cells.extend(has_peer.then(|| number(figures.ratio("peer"), 3)));
            cells
        };
        output.table(&header, of_group.iter().map(row))?;
        if group == "shapes" {
            output.heading("Means of each set, and the least")?;
            let mut sets: Vec<&str> = Vec::new();
            of_group.iter().for_each(|label| {
                if !sets.contains(&label[1]) {
                    sets.push(label[1])
                }
            });
            let rows = sets.iter().map(|set| {
                let of_set: Vec<Figures<'_>> = of_group.iter().filter(|label| label[1] == *set).map(|label| of(label)).collect();
                let mean = |value: &dyn Fn(&Figures<'_>) -> Option<f64>| {
                    let values: Vec<f64> = of_set.iter().filter_map(value).collect();
                    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
                };
                let least = of_set.iter().filter_map(|figures| figures.ratio("grouped")).min_by(f64::total_cmp);
                let rate = mean(&|figures| figures.rate("grouped"));
                let mut cells = vec![
                    (*set).to_owned(),
                    number(rate.map(|rate| rate / 1e12), 3),
                    number(rate.map(|rate| rate / 2f64.powi(40)), 3),
                    number(rate.zip(peak).map(|(rate, peak)| 100.0 * rate / peak), 1),
                    number(mean(&|figures| figures.ratio("grouped")), 3),
                    number(least, 3),
                    number(mean(&|figures| figures.ratio("list")), 3),
                    number(mean(&|figures| figures.ratio("prepared")), 3),
                    number(of_set.iter().filter_map(|figures| figures.ratio("prepared")).min_by(f64::total_cmp), 3),
                    number(mean(&|figures| figures.ratio("base")), 3),
                    number(mean(&|figures| Some(figures.get("base", "graph")? / figures.get("grouped", "graph")?)), 2),
                ];
                cells.extend(has_peer.then(|| number(mean(&|figures| figures.ratio("peer")), 3)));
                cells
            });
            let mut header = vec!["<set", "TB/s", "TiB/s", "of peak", "ratio", "least", "list", "made once", "least", "base", "x base"];
            header.extend(has_peer.then_some("peer"));
            output.table(&header, rows)?;
        }
    }
    let hosts: Vec<_> = labels.iter().filter(|label| label[0] == "host").collect();
    if !hosts.is_empty() {
        output.heading("Microseconds of the host a call, and of a graph node of small matrices")?;
        let rows = hosts.iter().flat_map(|label| {
            let figures = of(label);
            let [bare, early] = ["empty", "empty, early"].map(|way| figures.get(way, "host"));
            let lines = figures.lines.into_iter().filter(|line| line.contains_key("host"));
            let get = |line: &Map<String, Value>, field| figure(line, field).map(|statistics| statistics.median);
            let cell = |seconds: Option<f64>| number(seconds.map(|seconds| seconds * 1e6), 2);
            lines
                .map(|line| {
                    let (way, host) = (text(line, "way"), get(line, "host"));
                    let bare = if way.ends_with("early") { early } else { bare };
                    let above = host.zip(bare).map(|(host, bare)| host - bare);
                    vec![text(line, "name").to_owned(), way.to_owned(), cell(host), cell(above), cell(get(line, "graph"))]
                })
                .collect::<Vec<_>>()
        });
        output.table(&["<case", "<way", "host", "above empty", "node"], rows)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_there() {
        let shapes = shapes().unwrap();
        let of = |set: &str| shapes.iter().filter(|case| case.set == set).count();
        assert_eq!((shapes.len(), of("even"), of("uniform"), of("skewed")), (54, 18, 18, 18));
        assert!(shapes.iter().all(|case| case.rows.iter().all(|rows| rows % 16 == 0 && *rows > 0)));
        // 32768 rows of 4096 columns: 2 bytes read and 2 written for each element.
        assert_eq!((shapes[0].total_rows(), shapes[0].moved_bytes()), (32768, 32768 * 4096 * 4));
        let all = cases(false, &[]).unwrap();
        let groups = ["shapes", "types", "scales", "current", "padding", "counts", "host"];
        assert!(groups.iter().all(|group| all.iter().any(|case| case.group == *group)));
        assert_eq!(cases(true, &["counts".into()]).unwrap().len(), 3);
    }

    #[test]
    fn ratios_are_to_the_better_copy() {
        let line = |way: &str, graph: f64, eager: f64| {
            let [graph, eager] = [graph, eager].map(|seconds| Statistics::of(&[seconds]));
            let line = Line { group: "shapes", set: "even", name: "a", way, bytes: 12, graph, eager, host: None };
            serde_json::to_value(&line).unwrap().as_object().unwrap().clone()
        };
        let lines = [line("grouped", 4.0, 5.0), line("copy", 3.0, 2.0)];
        let figures = Figures { lines: lines.iter().collect() };
        assert_eq!((figures.ceiling(), figures.rate("grouped"), figures.ratio("grouped")), (Some(6.0), Some(3.0), Some(0.5)));
        assert_eq!(figures.ratio("base"), None);
        assert_eq!((peak("NVIDIA H200"), peak("another")), (Some(4.8e12), None));
    }
}
