//! A script: calls that every rank of a world makes alike, and what the oracle says of each.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::inputs::elements;
use super::rank::{RankReport, run_rank};
use crate::backend::Backend;
use crate::check::{Failed, Shape};
use crate::ep::{Config, Sums as Forms, Tuning, World};
use crate::error::{Demand, Error};
use crate::oracle::combine::{combine, fold};
use crate::oracle::dispatch::{Dispatched, Row, Tokens, dispatch, replay};
use crate::random::SplitMix64;
use crate::tensor::DType;

/// How a call says how many tokens it has. `Host` and `Device` have rows behind the last token that must not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// The rows of `x`.
    All,
    /// A number.
    Host,
    /// A `u32` in the device's memory.
    Device,
}

/// What all ranks pass in one call, and in which form.
#[derive(Debug, Clone)]
pub struct Batch {
    /// By rank.
    pub ranks: Vec<Tokens>,
    /// I32 or I64.
    pub ids: DType,
    /// Form of T.
    pub count: Count,
    /// Strided tensors that start 16 bytes after a 64-byte boundary.
    pub padded: bool,
}

/// One-phase, or the first of two phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The one call.
    Both,
    /// The send call; a later [`Step::Receive`] is its partner.
    Send,
}

/// One call of every rank. Arrivals are numbered in the order in which they were received.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// Dispatches a batch into a routing.
    Dispatch {
        /// Index into the script's batches.
        batch: usize,
        /// Index of the routing.
        routing: usize,
        /// One call or two.
        phase: Phase,
    },
    /// Sends a batch's payload along a routing.
    Replay {
        /// Index into the script's batches.
        batch: usize,
        /// Index of the routing.
        routing: usize,
        /// One call or two.
        phase: Phase,
    },
    /// The second phase of the oldest call that has not had it.
    Receive,
    /// Combines an arrival.
    Combine {
        /// Number of the arrival.
        arrival: usize,
        /// Rows are written into the bank, not passed.
        in_place: bool,
        /// With `add_to`, of this type.
        add_to: Option<DType>,
        /// With per-row weights to be folded.
        fold: bool,
        /// One call or two.
        phase: Phase,
    },
    /// Drops an arrival.
    Drop {
        /// Number of the arrival.
        arrival: usize,
    },
}

/// Where the experts' rows come from.
#[derive(Debug, Clone)]
pub enum Rows {
    /// A row of its own for each (rank, slot) of each combine.
    BySlot,
    /// A function of (global token, expert): the first global token of each rank.
    ByGlobalToken(Vec<usize>),
    /// Identity experts: the received row, of the same type.
    Received,
}

/// A world, its configuration, and what it does.
#[derive(Debug, Clone)]
pub struct Script {
    /// Names the case.
    pub name: String,
    /// Ranks.
    pub world: usize,
    /// Equal on all ranks.
    pub config: Config,
    /// Inputs.
    pub batches: Vec<Batch>,
    /// Calls.
    pub steps: Vec<Step>,
    /// Experts' rows.
    pub rows: Rows,
    /// NaN, infinities and the like among the experts' rows.
    pub specials: bool,
    /// Ranks sleep before some of their steps, each before others.
    pub delays: bool,
}

/// What a combine reads and gives, by rank.
pub(super) struct Sums {
    pub(super) y: Vec<Vec<u8>>,
    pub(super) row_weights: Option<Vec<Vec<f32>>>,
    pub(super) add_to: Vec<Option<(DType, Vec<u8>)>>,
    pub(super) out: Vec<Vec<u8>>,
    pub(super) folded: Option<Vec<Vec<f32>>>,
}

/// What the oracle says of a step.
pub(super) enum Expected {
    Arrival(Result<Arc<Dispatched>, Vec<Demand>>),
    Sums(Arc<Sums>),
    /// As the partner of a `Receive`, or nothing to compare.
    Nothing,
}

/// A script with the oracle's answers.
pub struct Prepared {
    pub(super) script: Script,
    pub(super) expected: Vec<Expected>,
}

/// What a run gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// By rank: the sums of every combine, one after the other.
    pub out: Vec<Vec<u8>>,
    /// Of everything that was compared.
    pub digest: u64,
}

impl Script {
    /// Asks the oracle.
    ///
    /// # Errors
    /// A script that makes no sense, such as one that combines an arrival that is not there.
    pub fn prepare(mut self) -> Result<Prepared, Failed> {
        // Longer than any step takes on a busy machine, short enough that a rank that fails does not stall the rest (arbitrary).
        self.config.timeout = Duration::from_secs(20);
        let wrong = |step: usize| Failed(format!("{}: step {step} of the script makes no sense", self.name));
        let mut routings: Vec<Option<Arc<Dispatched>>> = Vec::new();
        let mut arrivals: Vec<Option<Arc<Dispatched>>> = Vec::new();
        let mut pending = VecDeque::new();
        let mut expected = Vec::new();
        for (s, step) in self.steps.iter().enumerate() {
            let (outcome, phase) = match *step {
                Step::Dispatch { batch, routing, phase } => {
                    let outcome = dispatch(&self.config, self.world, &self.batches[batch].ranks).map(Arc::new);
                    routings.resize(routings.len().max(routing + 1), None);
                    routings[routing] = outcome.clone().ok();
                    (Expected::Arrival(outcome), phase)
                }
                Step::Replay { batch, routing, phase } => {
                    let kept = routings.get(routing).cloned().flatten().ok_or_else(|| wrong(s))?;
                    (Expected::Arrival(Ok(Arc::new(replay(&self.config, &kept, &self.batches[batch].ranks)))), phase)
                }
                Step::Receive => {
                    if let Some(arrived) = pending.pop_front().ok_or_else(|| wrong(s))? {
                        arrivals.push(Some(arrived));
                    }
                    (Expected::Nothing, Phase::Both)
                }
                Step::Combine { arrival, add_to, fold, phase, .. } => {
                    let taken = arrivals.get_mut(arrival).and_then(Option::take).ok_or_else(|| wrong(s))?;
                    (Expected::Sums(Arc::new(self.sums(s as u64, &taken, add_to, fold))), phase)
                }
                Step::Drop { arrival } => {
                    arrivals.get_mut(arrival).and_then(Option::take).ok_or_else(|| wrong(s))?;
                    (Expected::Nothing, Phase::Both)
                }
            };
            match (&outcome, phase) {
                (Expected::Arrival(Ok(arrived)), Phase::Both) => arrivals.push(Some(arrived.clone())),
                (Expected::Arrival(outcome), Phase::Send) => pending.push_back(outcome.clone().ok()),
                (Expected::Sums(_), Phase::Send) => pending.push_back(None),
                _ => {}
            }
            expected.push(outcome);
        }
        Ok(Prepared { script: self, expected })
    }

    /// What its objects are.
    pub fn shape(&self) -> Shape {
        (self.world, self.config.clone(), self.tuning())
    }

    /// How objects are made for it: what its combines ask for, and nothing else.
    pub fn tuning(&self) -> Tuning {
        let mut sums = Forms::NONE;
        for step in &self.steps {
            match step {
                Step::Combine { add_to: None, .. } => sums.plain = true,
                Step::Combine { add_to: Some(dtype), .. } if *dtype == self.config.combine_dtype => sums.add_to = true,
                Step::Combine { .. } => sums.add_to_f32 = true,
                _ => {}
            }
            sums.unfolded |= matches!(step, Step::Combine { fold: false, .. });
        }
        Tuning { sums, ..Tuning::default() }
    }

    fn sums(&self, step: u64, dispatched: &Dispatched, add_to: Option<DType>, with_fold: bool) -> Sums {
        let row_bytes = self.config.hidden * self.config.combine_dtype.size();
        let mut y = Vec::new();
        let mut row_weights = Vec::new();
        for (rank, arrived) in dispatched.ranks.iter().enumerate() {
            let mut of_rank = Vec::new();
            let mut weights = Vec::new();
            let row_k = if self.config.layout.is_by_expert() { 1 } else { self.config.k };
            for (slot, row) in arrived.rows.iter().enumerate() {
                match row {
                    Some(row @ Row { source: Some(source), .. }) => {
                        let mut random = self.row_stream(step, rank, slot, row, *source);
                        of_rank.extend(match self.rows {
                            Rows::Received => row.x.clone(),
                            _ => elements(&mut random, self.config.combine_dtype, self.config.hidden, self.specials),
                        });
                        weights.extend((0..row_k).map(|_| random.next_f32()));
                    }
                    // Padding and rows that did not arrive must not be read: all NaN.
                    _ => {
                        of_rank.extend(std::iter::repeat_n(0xFF, row_bytes));
                        weights.extend(std::iter::repeat_n(f32::NAN, row_k));
                    }
                }
            }
            y.push(of_rank);
            row_weights.push(weights);
        }
        let add_to_of = |(source, routes): (usize, &Vec<_>)| {
            let mut random = SplitMix64::stream(step ^ 0xADD, source as u64); // 0xADD: arbitrary, another stream than the rows'
            add_to.map(|dtype| (dtype, elements(&mut random, dtype, routes.len() * self.config.hidden, self.specials)))
        };
        let add_to: Vec<_> = dispatched.routes.iter().enumerate().map(add_to_of).collect();
        let out = combine(&self.config, dispatched, &y, &add_to);
        let folded = with_fold.then(|| fold(&self.config, dispatched, &row_weights));
        Sums { y, row_weights: with_fold.then_some(row_weights), add_to, out, folded }
    }

    fn row_stream(&self, step: u64, rank: usize, slot: usize, row: &Row, (source, token): (usize, usize)) -> SplitMix64 {
        match &self.rows {
            Rows::BySlot | Rows::Received => SplitMix64::stream(step << 32 | rank as u64, slot as u64),
            Rows::ByGlobalToken(first) => SplitMix64::stream((first[source] + token) as u64, row.topk_idx[0] as u64),
        }
    }
}

impl Prepared {
    /// Runs the script on a world of threads and compares everything that any rank sees with the oracle.
    ///
    /// # Errors
    /// What differs, on which rank, in which step.
    pub fn run(&self, backend: &Backend) -> Result<Report, Failed> {
        self.run_tuned(backend, self.script.tuning())
    }

    /// As [`run`](Self::run), with launches as the caller says.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_tuned(&self, backend: &Backend, tuning: Tuning) -> Result<Report, Failed> {
        let script = &self.script;
        let fail = |text: String| Failed(format!("{} [{backend:?}, world {}]: {text}", script.name, script.world));
        let results = World::run(backend, script.world, |world| run_rank(self, &world, tuning)).map_err(|e| fail(e.to_string()))?;
        report_of(results, fail)
    }
}

/// Runs a script as one rank of `world`, whose other ranks do the same, and reports what all saw. Collective; every rank returns the same.
///
/// # Errors
/// As [`Prepared::run`].
pub(super) fn run_joined(prepared: &Prepared, world: &World) -> Result<Report, Failed> {
    let script = &prepared.script;
    let fail = |text: String| Failed(format!("{} [world {} of processes]: {text}", script.name, script.world));
    let mine = run_rank(prepared, world, script.tuning());
    // A rank that could not go on has told the others, or is told by the exchange.
    let all: Vec<Result<RankReport, Error>> = world.exchange("check", Ok(mine)).map_err(|e| fail(e.to_string()))?;
    report_of(all, fail)
}

fn report_of(results: Vec<Result<RankReport, Error>>, fail: impl Fn(String) -> Failed) -> Result<Report, Failed> {
    // A rank that differs is the cause; ranks that waited for one that failed are not.
    let cause = |e: &Error| !matches!(e, Error::Timeout { .. } | Error::Poisoned { .. });
    if let Some(text) = results.iter().flatten().find_map(|r| r.faults.first()) {
        return Err(fail(text.clone()));
    }
    let mut errors: Vec<(usize, &Error)> = results.iter().enumerate().filter_map(|(r, x)| x.as_ref().err().map(|e| (r, e))).collect();
    errors.sort_by_key(|(_, e)| !cause(e));
    if let Some((rank, error)) = errors.first() {
        return Err(fail(format!("rank {rank}: {error}")));
    }
    let mut report = Report { out: Vec::new(), digest: 0 };
    let mut hasher = DefaultHasher::new();
    for rank in results.into_iter().flatten() {
        rank.digest.hash(&mut hasher);
        report.out.push(rank.out);
    }
    report.digest = hasher.finish();
    Ok(report)
}
