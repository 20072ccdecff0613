//! `moe stress`: many rounds of dispatch and combine with new data in each, ranks that are late, skewed or empty, and every output compared.
#![forbid(unsafe_code)]

mod round;

use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use moe_kernels::ep::Rendezvous;
use moe_kernels::ep::{self, Config, MAX_RANKS, MAX_TOKENS, Mode, Quantize, Reduce, Wire, World};
use moe_kernels::measure::report;
use moe_kernels::{Backend, DType, Error, Result};

use self::round::{NUM_FORMS, Walk};
use crate::bench::ep::options::Programmatic;
use crate::bench::ep::rank::all;
use crate::output::{Output, Progress};

/// Options of `moe stress`.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Where it runs: auto, cpu, cuda, cuda:N, or cuda:N,M,.. on whose GPUs the ranks take turns; those of one GPU share it
    #[arg(long, value_name = "NAME", default_value = "auto")]
    backend: String,
    /// Ranks: threads of this process. Under torchrun the processes that it started are the ranks
    #[arg(long, value_name = "R", default_value_t = 4)]
    ranks: usize,
    /// Each rank is a process of its own
    #[arg(long)]
    processes: bool,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rounds: u64,
    /// Go on for so long, whatever the number of rounds
    #[arg(long, value_name = "M", conflicts_with = "rounds")]
    minutes: Option<f64>,
    /// Most tokens of a rank in a round
    #[arg(long, value_name = "T", default_value_t = 48)]
    tokens: usize,
    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 256)]
    hidden: usize,
    /// Only these configurations, by name: plain, low-latency, by-expert, at-source, fixed, fp8 [default: all]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    only: Vec<String>,
    /// Kernels are launched programmatically
    #[arg(long, value_name = "WHEN", value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "on")]
    programmatic: Programmatic,
    /// Names all data and delays
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Rounds with one object: then another configuration takes its turn (arbitrary: enough for banks, epochs and graphs to be used again).
const ROUNDS_OF_OBJECT: u64 = 25;

/// Bound of a rank's waits: a hang is to be found while somebody looks (arbitrary; far beyond any delay here).
const TIMEOUT: Duration = Duration::from_secs(20);

/// Experts and routes of a token (arbitrary: a rank has several of each at 8 ranks, and K is no power of two).
const NUM_EXPERTS: usize = 48;
/// See [`NUM_EXPERTS`].
const K: usize = 6;

fn invalid(what: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::Invalid { op: "stress", what: what.into(), got: got.to_string(), want: want.to_string() }
}

impl Arguments {
    fn check(&self) -> Result<()> {
        for (what, got, most) in [("--ranks", self.ranks, MAX_RANKS), ("--tokens", self.tokens, MAX_TOKENS)] {
            if !(1..=most).contains(&got) {
                return Err(invalid(what, got, format!("1 to {most}")));
            }
        }
        if self.minutes.is_some_and(|minutes| !(minutes > 0.0 && minutes <= 1e6)) {
            return Err(invalid("--minutes", self.minutes.unwrap_or_default(), "above 0"));
        }
        if self.programmatic == Programmatic::Both {
            return Err(invalid("--programmatic", "both", "off or on"));
        }
        self.configs().and_then(|configs| configs.iter().try_for_each(|(_, config)| config.plan(self.ranks).map(|_| ())))
    }

    /// What takes turns.
    fn configs(&self) -> Result<Vec<(&'static str, Config)>> {
        let base = |dtype| Config { timeout: TIMEOUT, ..Config::new(self.hidden, dtype, NUM_EXPERTS, K, self.tokens) };
        let by_expert = |segment_align| ep::Layout::ByExpert { segment_align };
        let all = vec![
            ("plain", base(DType::BF16)),
            ("low-latency", Config { mode: Mode::LowLatency, expected_tokens: 1, ..base(DType::BF16) }),
            ("by-expert", Config { layout: by_expert(8), ..base(DType::F32) }), // 8: arbitrary, pads
            ("at-source", Config { layout: by_expert(1), reduce: Reduce::AtSource, in_flight: 2, ..base(DType::F16) }),
            (
                "fixed",
                Config {
                    layout: ep::Layout::ByExpertFixed { rows_per_expert: self.ranks * self.tokens },
                    quantize: Some(Quantize::F32),
                    ..base(DType::BF16)
                },
            ),
            (
                "fp8",
                Config { scale_bytes: 4 * self.hidden.div_ceil(ep::SCALE_BLOCK), wire: Wire::Fp8Block, in_flight: 2, ..base(DType::E4M3) },
            ),
        ];
        if let Some(unknown) = self.only.iter().find(|name| !all.iter().any(|(known, _)| *known == name.as_str())) {
            let known: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
            return Err(invalid("--only", format!("`{unknown}`"), known.join(", ")));
        }
        Ok(all.into_iter().filter(|(name, _)| self.only.is_empty() || self.only.iter().any(|only| only == name)).collect())
    }

    fn backend(&self) -> Result<Backend> {
        Ok(match Backend::from_name(&self.backend)? {
            Backend::Cuda(cuda) => Backend::Cuda(cuda.programmatic(self.programmatic == Programmatic::On)),
            other => other,
        })
    }
}

/// What one rank did.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    rounds: u64,
    /// Rounds of each form: see [`round::Form`].
    forms: [u64; NUM_FORMS],
    rows: u64,
    /// Differences, at most a few.
    wrong: Vec<String>,
}

/// Runs; `false` when an output was wrong.
pub fn stress(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    #[cfg(target_os = "linux")]
    if Rendezvous::is_in_env() {
        return run_rank(arguments, output);
    }
    arguments.check()?;
    if arguments.processes {
        return crate::run::launch(arguments.ranks);
    }
    let backend = arguments.backend()?;
    let start = Instant::now();
    let progress = Progress::new(usize::try_from(arguments.rounds).unwrap_or(usize::MAX), "rounds");
    let tallies = World::run(&backend, arguments.ranks, |world| {
        let progress = (world.rank().index() == 0).then_some(&progress);
        on_rank(arguments, &world, progress)
    })?;
    let tallies = all(tallies)?;
    drop(progress);
    print(arguments, &backend, &tallies, start.elapsed(), output)
}

/// One rank's rounds. Collective.
fn on_rank(arguments: &Arguments, world: &World, progress: Option<&Progress>) -> Result<Tally> {
    let configs = arguments.configs()?;
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut turn = 0;
    loop {
        // Rank 0 has the clock.
        let is_over = match arguments.minutes {
            None => tally.rounds >= arguments.rounds,
            Some(minutes) => {
                let mine = start.elapsed().as_secs_f64() >= 60.0 * minutes && tally.rounds > 0;
                world.gather(Ok(vec![u8::from(mine)]))?.first().is_some_and(|first| first == &[1])
            }
        };
        if is_over {
            return Ok(tally);
        }
        let left = if arguments.minutes.is_some() { ROUNDS_OF_OBJECT } else { ROUNDS_OF_OBJECT.min(arguments.rounds - tally.rounds) };
        let (name, config) = &configs[turn % configs.len()];
        let mut walk = Walk::new(world, name, config, arguments.seed ^ (turn as u64) << 32)?;
        walk.rounds(left, &mut tally, progress)?;
        walk.end()?;
        turn += 1;
        // All stop at the same place.
        let wrong = world.gather(Ok(vec![u8::from(!tally.wrong.is_empty())]))?;
        if wrong.iter().any(|wrong| wrong == &[1]) {
            return Ok(tally);
        }
    }
}

fn print(arguments: &Arguments, backend: &Backend, tallies: &[Tally], time: Duration, output: &mut Output) -> Result<bool> {
    let first = &tallies[0];
    let wrong: Vec<&String> = tallies.iter().flat_map(|tally| &tally.wrong).collect();
    for wrong in &wrong {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    let [eager, two_phase, replay, graph, dropped] = first.forms;
    let rows: u64 = tallies.iter().map(|tally| tally.rows).sum();
    output.line(format_args!(
        "{} rounds on {} {} ({}): {eager} in one call, {two_phase} in two, {replay} with a replay, {graph} of graphs, {dropped} without combine; {} rows in {}",
        report::count(first.rounds),
        tallies.len(),
        if arguments.processes { "processes" } else { "threads" },
        backend.name(),
        report::count(rows),
        report::duration(time.as_secs_f64()),
    ))?;
    output.line(if wrong.is_empty() { "every output was right" } else { "an output was wrong" })?;
    Ok(wrong.is_empty())
}

/// This process's part, as the rank that its environment says; rank 0 speaks for all.
#[cfg(target_os = "linux")]
fn run_rank(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    let rendezvous = Rendezvous::from_env("moe stress")?.timeout(Duration::from_secs(300))?; // arbitrary: compiling takes a while
    let arguments = Arguments { ranks: rendezvous.size(), processes: true, ..arguments.clone() };
    let is_first = rendezvous.rank().index() == 0;
    let mut as_rank = || {
        arguments.check()?;
        let backend = arguments.backend()?;
        let world = World::join(&backend, &rendezvous)?;
        let start = Instant::now();
        let tally = on_rank(&arguments, &world, None);
        let tallies: Vec<Tally> = crate::bench::ep::gather(&world, tally)?;
        if is_first { print(&arguments, &backend, &tallies, start.elapsed(), output) } else { Ok(true) }
    };
    match as_rank() {
        // Rank 0 says it for all, unless it is the one that ended.
        Err(Error::Poisoned { first }) if !is_first && first.rank.index() != 0 => Ok(false),
        Err(Error::Setup { .. } | Error::Mismatch { .. }) if !is_first => Ok(false),
        result => result,
    }
}
