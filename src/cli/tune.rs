//! `moe tune`: the geometry of dispatch and combine, searched on this GPU and written as a table.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::iter::once;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use moe_kernels::ep::{Launch, Launches, PhaseTuning, Provenance, RULE, Table, TableKey, TablePhase, TableRow, Tuning, World};
use moe_kernels::measure::{Environment, Statistics, report};
use moe_kernels::{Backend, Error, Result};

use crate::bench::Json;
use crate::bench::ep::case::Case;
use crate::bench::ep::options::{Programmatic, SUMS, Shape};
use crate::bench::ep::rank::{Arm, Gate, Plan, Rank, all};
use crate::bench::ep::{check_idle, launching};
use crate::output::{Output, Progress};

/// Options of `moe tune`.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// What is searched
    #[arg(long, value_enum, default_value_t = Phases::Both)]
    phase: Phases,
    /// Most multiprocessors of a phase, one search for each; 0: no limit
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "0")]
    sms: Vec<u32>,
    /// A geometry must be faster by so many per cent than what is chosen now
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, allow_negative_numbers = true)]
    margin: f64,
    /// Samples of each geometry, in turns with all others
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Most seconds in which a search takes up geometries, the nearest first: each compiles kernels of its own
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..))]
    seconds: u16,
    /// Kernels are launched programmatically
    #[arg(long, value_name = "WHEN", value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "on")]
    programmatic: Programmatic,
    /// Write the table to this file, which holds every row as soon as it is known
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Search on a busy GPU too
    #[arg(long)]
    allow_busy: bool,
    /// Instead: say how geometry is chosen, and which tables are shipped
    #[arg(long)]
    rule: bool,
}

/// What is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Phases {
    /// Dispatch alone
    Dispatch,
    /// Combine alone
    Combine,
    /// One after the other
    Both,
}

impl Phases {
    fn each(self) -> &'static [TablePhase] {
        match self {
            Phases::Dispatch => &[TablePhase::Dispatch],
            Phases::Combine => &[TablePhase::Combine],
            Phases::Both => &[TablePhase::Dispatch, TablePhase::Combine],
        }
    }
}

/// Threads of a block that are tried, beside those that are chosen now.
const THREADS: [u32; 3] = [128, 256, 512];
/// Warps of a grid that are tried, as parts of those that are chosen now; the nearest first.
const WARPS: [(u32, u32); 6] = [(1, 1), (3, 4), (3, 2), (1, 2), (2, 1), (1, 4)];
/// Most blocks (those of the rule: measured up to half of it).
const MOST_BLOCKS: u32 = 16384;
/// Geometries whose times differ by less are equal, and the smaller grid is taken (measured: medians of runs differ by about this much).
const SAME: f64 = 1.01;

fn invalid(what: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::Invalid { op: "tune", what: what.into(), got: got.to_string(), want: want.to_string() }
}

/// One search.
#[derive(Clone)]
struct Job {
    phase: TablePhase,
    sms: Option<u32>,
    /// The only number of threads that a row of this class may have, when a nearer one has chosen.
    threads: Option<u32>,
    /// How long geometries are taken up.
    bound: Duration,
}

/// A geometry as one rank has measured it.
#[derive(Debug, Clone)]
struct Measured {
    launch: Launch,
    /// Seconds of a round, one sample a replay: of dispatches, or of pairs.
    samples: Vec<f64>,
}

/// What one rank found: what is chosen now comes first. Dispatches alone go with pairs.
#[derive(Clone)]
struct Found {
    measured: Vec<Measured>,
    dispatch: Vec<f64>,
    wrong: Vec<String>,
}

/// Searches, prints and writes; `false` when a result was wrong.
pub fn tune(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    if arguments.rule {
        return rule(output).map(|()| true);
    }
    arguments.shape.check()?;
    if arguments.shape.processes {
        return Err(invalid("--processes", "given", "absent: ranks that share a GPU are searched as threads"));
    }
    if arguments.programmatic == Programmatic::Both {
        return Err(invalid("--programmatic", "both", "off or on"));
    }
    if !(0.0..=100.0).contains(&arguments.margin) {
        return Err(invalid("--margin", arguments.margin, "0 to 100"));
    }
    let Some(gpus) = Backend::ordinals(&arguments.shape.backend) else {
        let want = "cuda, cuda:N or cuda:N,M,..: a CPU has no geometry";
        return Err(invalid("--backend", format!("`{}`", arguments.shape.backend), want));
    };
    // A row is for ranks that are alike.
    if !arguments.shape.ranks.is_multiple_of(gpus.len()) {
        return Err(invalid("--ranks", arguments.shape.ranks, format!("as many on each of {} GPUs", gpus.len())));
    }
    let ranks_on_gpu = (arguments.shape.ranks / gpus.len()) as u32;
    check_idle(&arguments.shape.backend, arguments.allow_busy)?;
    let mut json = Json::create(arguments.table.as_deref())?;
    let backend = launching(&arguments.shape.backend()?, arguments.programmatic == Programmatic::On);
    let mut table = table(&backend)?;
    let (mut wrong, mut lines) = (Vec::new(), Vec::new());
    let bound = Duration::from_secs(arguments.seconds.into());
    let progress = Progress::new(arguments.phase.each().len() * arguments.sms.len() * arguments.shape.tokens.len(), "searching");
    for &phase in arguments.phase.each() {
        for &sms in &arguments.sms {
            let mut threads = HashMap::new();
            for tokens in by_distance(&arguments.shape.tokens) {
                let class = Table::class_of(tokens as u32);
                let job = Job { phase, sms: Some(sms).filter(|sms| *sms > 0), threads: threads.get(&class).copied(), bound };
                let case = Case::new(&arguments.shape, tokens)?;
                let gate = Gate::new(&backend, case.ranks)?;
                let plan = plan(arguments, &job, tokens);
                let found = World::run(&backend, case.ranks, |world| search(&world, &case, &plan, &job, gate.clone()))?;
                let found = all(found)?;
                wrong.extend(found.iter().flat_map(|found| found.wrong.clone()));
                let chosen = choose(&found, phase, arguments.margin, job.threads)?;
                threads.entry(class).or_insert(chosen.launch.threads);
                let config = &case.config;
                let key = TableKey::new(phase, config, &config.plan(case.ranks)?, ranks_on_gpu, job.sms);
                let Chosen { launch, seconds, before, before_seconds, num_tried } = chosen;
                lines.push(vec![
                    format!("{phase:?}").to_lowercase(),
                    sms.to_string(),
                    report::count(tokens as u64),
                    format!("{}x{}", before.blocks, before.threads),
                    format!("{:.2}", before_seconds * 1e6),
                    format!("{}x{}", launch.blocks, launch.threads),
                    format!("{:.2}", seconds * 1e6),
                    format!("{:+.1} %", 100.0 * (before_seconds / seconds - 1.0)),
                    num_tried.to_string(),
                ]);
                table.rows.push(TableRow {
                    key,
                    tokens: tokens as u32,
                    blocks: launch.blocks,
                    threads: launch.threads,
                    seconds,
                    before_seconds,
                });
                table.rows.sort_by_key(|row| (row.key.phase as u8, row.key.sms, row.tokens));
                json.write(&table)?;
                progress.step();
            }
        }
    }
    drop(progress);
    let header = ["<phase", "sms", "tokens", "now", "us", "best", "us", "faster", "tried"];
    output.table(&header, lines)?;
    for wrong in &wrong {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    Ok(wrong.is_empty())
}

/// A table without rows.
fn table(backend: &Backend) -> Result<Table> {
    let Backend::Cuda(cuda) = backend else { return Err(invalid("backend", backend.name(), "cuda")) };
    let environment = Environment::record();
    let (major, minor) = cuda.device().compute_capability();
    let command = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    let driver =
        environment.nvidia.as_ref().and_then(|nvidia| serde_json::to_value(nvidia).ok()).and_then(|nvidia| nvidia.get("driver").cloned());
    Ok(Table {
        gpu: cuda.device().properties().name.clone(),
        arch: format!("sm_{major}{minor}"),
        provenance: Provenance {
            time: environment.time,
            commit: environment
                .commit
                .and_then(|commit| serde_json::to_value(commit).ok())
                .map_or_else(String::new, |commit| commit.to_string()),
            command: format!("moe {command}"),
            note: driver.map_or_else(String::new, |driver| format!("driver {driver}")),
        },
        rows: Vec::new(),
    })
}

/// Tokens whose row decides the threads of their class first.
fn by_distance(tokens: &[usize]) -> Vec<usize> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted.sort_by_key(|&tokens| {
        let class = Table::class_of(tokens as u32);
        let (tokens, typical) = (tokens.max(1), Table::typical_tokens(class) as usize);
        (class, tokens.max(typical) * 1000 / tokens.min(typical))
    });
    sorted
}

fn plan(arguments: &Arguments, job: &Job, tokens: usize) -> Plan {
    let of_phase = PhaseTuning { geometry: None, sms: job.sms };
    let tuning = match job.phase {
        TablePhase::Dispatch => Tuning { dispatch: of_phase, sums: SUMS, ..Tuning::default() },
        TablePhase::Combine => Tuning { combine: of_phase, sums: SUMS, ..Tuning::default() },
    };
    Plan {
        arms: Vec::new(),
        tuning,
        rounds: if tokens < 512 { 60 } else { 20 },
        warmup: 1,
        repeats: arguments.repeats.into(),
        inputs: 1,
        staged: arguments.shape.staged,
        check_tokens: 64, // arbitrary: geometry changes no result, which others prove
        host_cost: false,
    }
}

/// Blocks and threads that are tried beside what is chosen now.
fn candidates(now: Launch, job: &Job) -> Vec<(u32, u32)> {
    let mut all = Vec::new();
    let warps = u64::from(now.blocks) * u64::from(now.threads);
    let others = THREADS.into_iter().filter(|threads| *threads != now.threads);
    let threads: Vec<u32> = once(now.threads).chain(others).filter(|threads| job.threads.is_none_or(|only| only == *threads)).collect();
    for (part, whole) in WARPS {
        for &threads in &threads {
            let blocks = (warps * u64::from(part)).div_ceil(u64::from(whole) * u64::from(threads));
            let blocks = u32::try_from(blocks).unwrap_or(MOST_BLOCKS).clamp(1, MOST_BLOCKS.min(job.sms.unwrap_or(MOST_BLOCKS)));
            if !all.contains(&(blocks, threads)) && (blocks, threads) != (now.blocks, now.threads) {
                all.push((blocks, threads));
            }
        }
    }
    all
}

/// One rank's part. Collective.
fn search(world: &World, case: &Case, plan: &Plan, job: &Job, gate: Option<std::sync::Arc<Gate>>) -> Result<Found> {
    let mut rank = Rank::new(world, case, plan, gate)?;
    let mut wrong = rank.check()?;
    let of = |launches: Launches| if job.phase == TablePhase::Dispatch { launches.dispatch } else { launches.combine };
    let launches = rank.launches().map(of);
    let Some(now) = launches else { return Err(invalid("backend", "cpu", "cuda")) };
    let arm = if job.phase == TablePhase::Dispatch { Arm::Dispatch } else { Arm::Pair };
    let mut graphs = Vec::new();
    if let Some(graph) = rank.graph(arm, plan.tuning)? {
        graphs.push((now, graph, Vec::new()));
    }
    let dispatches = if arm == Arm::Pair { rank.graph(Arm::Dispatch, plan.tuning)? } else { None };
    let start = Instant::now();
    for geometry in candidates(now, job) {
        // Ranks compile at their own pace, and must go on or stop together.
        let late = world.gather(Ok(vec![u8::from(start.elapsed() > job.bound)]))?;
        if late.iter().any(|late| late[0] != 0) {
            break;
        }
        let mut tuning = plan.tuning;
        let phase = if job.phase == TablePhase::Dispatch { &mut tuning.dispatch } else { &mut tuning.combine };
        phase.geometry = Some(geometry);
        match rank.retune(tuning) {
            Ok(()) => {}
            Err(error @ (Error::Poisoned { .. } | Error::Timeout { .. })) => return Err(error),
            // It does not fit beside the other ranks: so say all of them.
            Err(_) => continue,
        }
        let launch = rank.launches().map_or(now, of);
        // What does not fit is cut, and may be known then.
        if graphs.iter().any(|(known, ..)| (known.blocks, known.threads) == (launch.blocks, launch.threads)) {
            continue;
        }
        if let Some(graph) = rank.graph(arm, tuning)? {
            graphs.push((launch, graph, Vec::new()));
        }
    }
    rank.retune(plan.tuning)?;
    let mut dispatch = Vec::new();
    for repeat in 0..plan.warmup + plan.repeats {
        let order: Vec<usize> = if repeat % 2 == 0 { (0..graphs.len()).collect() } else { (0..graphs.len()).rev().collect() };
        for at in order {
            let seconds = rank.time(&graphs[at].1)?;
            if repeat >= plan.warmup {
                graphs[at].2.push(seconds);
            }
        }
        if let Some(graph) = &dispatches {
            let seconds = rank.time(graph)?;
            if repeat >= plan.warmup {
                dispatch.push(seconds);
            }
        }
    }
    let measured = graphs.into_iter().map(|(launch, _, samples)| Measured { launch, samples }).collect();
    drop(dispatches);
    rank.settle()?;
    wrong.extend(rank.check()?);
    rank.end()?;
    Ok(Found { measured, dispatch, wrong })
}

/// What a search comes to.
struct Chosen {
    launch: Launch,
    seconds: f64,
    before: Launch,
    before_seconds: f64,
    num_tried: usize,
}

/// The smallest grid among the fastest, or what is chosen now when that is not slower by more than the margin. With `threads` it must have those: another row
/// of its class has them, so others would not be used, what is chosen now among them.
fn choose(found: &[Found], phase: TablePhase, margin: f64, threads: Option<u32>) -> Result<Chosen> {
    let slowest = |of: &dyn Fn(&Found) -> &Vec<f64>| -> Result<f64> {
        let num = found.iter().map(|found| of(found).len()).min().unwrap_or(0);
        let samples: Vec<f64> = (0..num).map(|i| found.iter().map(|found| of(found)[i]).fold(0.0, f64::max)).collect();
        Statistics::of(&samples).map(|s| s.median).ok_or_else(|| invalid("samples", "none", "at least one"))
    };
    let dispatch = if phase == TablePhase::Combine { slowest(&|found| &found.dispatch)? } else { 0.0 };
    let num = found.iter().map(|found| found.measured.len()).min().unwrap_or(0);
    let times: Vec<(Launch, f64)> = (0..num)
        .map(|i| Ok((found[0].measured[i].launch, slowest(&|found| &found.measured[i].samples)? - dispatch)))
        .collect::<Result<_>>()?;
    let Some(&(before, before_seconds)) = times.first() else { return Err(invalid("geometries", 0, "at least one")) };
    let is_usable = |launch: &Launch| threads.is_none_or(|threads| launch.threads == threads);
    let usable: Vec<(Launch, f64)> = times.iter().filter(|(launch, _)| is_usable(launch)).copied().collect();
    let best = usable.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
    let is_kept = is_usable(&before) && before_seconds <= best * (1.0 + margin / 100.0);
    let smallest = usable.iter().filter(|(_, seconds)| *seconds <= best * SAME).min_by_key(|(launch, _)| launch.blocks * launch.threads);
    let (launch, seconds) = if is_kept { (before, before_seconds) } else { smallest.copied().unwrap_or((before, before_seconds)) };
    Ok(Chosen { launch, seconds, before, before_seconds, num_tried: num })
}

/// How geometry is chosen, and what is shipped.
fn rule(output: &mut Output) -> Result<()> {
    output.line(RULE)?;
    for table in Table::shipped() {
        output.heading(format_args!("{} ({}): {} rows, measured {}", table.gpu, table.arch, table.rows.len(), table.provenance.time))?;
        let row = |row: &TableRow| {
            let TableKey { phase, ranks, mode, wire, layout, dtype, hidden, k, sms, .. } = &row.key;
            let what = [layout, dtype, wire].into_iter().filter(|text| !text.is_empty()).cloned().collect::<Vec<_>>().join(", ");
            vec![
                format!("{phase:?}").to_lowercase(),
                ranks.to_string(),
                mode.clone(),
                what,
                hidden.to_string(),
                k.to_string(),
                sms.to_string(),
                report::count(u64::from(row.tokens)),
                format!("{}x{}", row.blocks, row.threads),
                format!("{:+.1} %", 100.0 * (row.before_seconds / row.seconds - 1.0)),
            ]
        };
        let header = ["<phase", "ranks", "<mode", "<what", "hidden", "k", "sms", "tokens", "geometry", "faster"];
        output.table(&header, table.rows.iter().map(row))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_kernels::ep::ChosenBy;

    fn launch(blocks: u32, threads: u32) -> Launch {
        Launch { blocks, threads, parts: 1, unroll: 1, route_blocks: 1, chosen_by: ChosenBy::Rule }
    }

    #[test]
    fn candidates_surround_what_is_chosen() {
        let job = Job { phase: TablePhase::Dispatch, sms: None, threads: None, bound: Duration::ZERO };
        let all = candidates(launch(64, 256), &job);
        assert!(all.contains(&(32, 256)) && all.contains(&(128, 128)) && all.contains(&(64, 512)) && !all.contains(&(64, 256)));
        let only = candidates(launch(64, 256), &Job { threads: Some(512), sms: Some(10), ..job });
        assert!(!only.is_empty() && only.iter().all(|&(blocks, threads)| threads == 512 && blocks <= 10));
        // Threads that none of ours are: their neighbours are tried too, and grids of many blocks.
        let quarters = candidates(launch(1639, 320), &Job { phase: TablePhase::Dispatch, sms: None, threads: None, bound: Duration::ZERO });
        assert!(quarters.contains(&(3278, 320)) && quarters.contains(&(8195, 128)) && quarters.len() == 23);
    }

    #[test]
    fn rows_that_decide_threads_come_first() {
        assert_eq!(by_distance(&[64, 8192, 4096, 1, 128, 512, 1024, 64]), [1, 128, 64, 512, 4096, 8192, 1024]);
    }

    #[test]
    fn little_gains_are_no_gains() {
        let measured = |blocks, seconds: f64| Measured { launch: launch(blocks, 256), samples: vec![seconds, seconds * 1.5, seconds] };
        let found = |of: &[(u32, f64)]| Found {
            measured: of.iter().map(|&(b, s)| measured(b, s)).collect(),
            dispatch: vec![1.0; 3],
            wrong: Vec::new(),
        };
        let chosen = |of: &[(u32, f64)], phase| choose(&[found(of), found(of)], phase, 2.0, None).unwrap();
        assert_eq!(chosen(&[(64, 10.0), (32, 9.9)], TablePhase::Dispatch).launch.blocks, 64);
        assert_eq!(chosen(&[(64, 10.0), (32, 9.0), (16, 9.05)], TablePhase::Dispatch).launch.blocks, 16);
        // Threads that another row of the class does not have are no choice, those of now neither.
        let mut of = found(&[(64, 10.0), (32, 10.5), (16, 9.0)]);
        of.measured[1].launch.threads = 128;
        let chosen_of = |threads| choose(&[of.clone(), of.clone()], TablePhase::Dispatch, 2.0, threads).unwrap();
        assert_eq!([None, Some(256), Some(128)].map(|threads| chosen_of(threads).launch.blocks), [16, 16, 32]);
        assert!((chosen_of(Some(128)).seconds - 10.5).abs() < 1e-9 && chosen_of(Some(128)).before.blocks == 64);
        assert_eq!(chosen_of(Some(512)).launch.blocks, 64, "nothing has them");
        // Of a combine what counts is beyond the dispatch.
        let combine = chosen(&[(64, 2.0), (32, 1.97)], TablePhase::Combine);
        assert_eq!(combine.launch.blocks, 32);
        assert!((combine.seconds - 0.97).abs() < 1e-9 && combine.num_tried == 2);
    }
}
