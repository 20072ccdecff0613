//! One rank's walk through a script.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::arrival::{check_arrival, check_rows};
use super::buffer::{HostNumbers, Matrix, Place, in_setup};
use super::script::{Batch, Count, Expected, Phase, Prepared, Step, Sums};
use crate::check::Failed;
use crate::check::guarded::Guarded;
use crate::ep::{Config, ExpertParallel, Tuning, World};
use crate::error::{Demand, Error, Result};
use crate::ops::combine::{self, ExpertRows};
use crate::ops::dispatch::{self, Arrival, NumTokens, Outputs, Payload, Routing};
use crate::oracle::dispatch::Dispatched;
use crate::oracle::{compare, float};
use crate::random::SplitMix64;
use crate::tensor::{DType, Layout, TensorViewMut};

/// Rows behind the last token of an input or output that may have such (arbitrary, above 1).
const EXTRA_ROWS: usize = 2;

/// What one rank saw.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct RankReport {
    /// What differs from the oracle.
    pub(super) faults: Vec<String>,
    pub(super) out: Vec<u8>,
    pub(super) digest: u64,
}

/// What was in a bank's buffers before the dispatch that is compared now: the library starts with zeros.
#[derive(Default)]
pub(super) struct Before {
    pub(super) x: Vec<u8>,
    pub(super) column_scales: Vec<u8>,
}

struct Live {
    arrival: Arrival,
    routing: usize,
    expected: Arc<Dispatched>,
}

enum Pending {
    Dispatch { sent: Option<dispatch::Sent>, routing: usize, step: usize },
    Replay { sent: dispatch::Sent, routing: usize, step: usize },
    Combine { sent: combine::Sent, routing: usize, sums: Arc<Sums> },
}

struct Walk<'a> {
    prepared: &'a Prepared,
    rank: usize,
    place: Place,
    ep: ExpertParallel,
    routings: Vec<Routing>,
    arrivals: Vec<Option<Live>>,
    pending: VecDeque<Pending>,
    /// By the address of the bank's rows.
    before: HashMap<usize, Before>,
    statistics: Guarded,
    want_statistics: Vec<i64>,
    counts_host: HostNumbers,
    out: Vec<u8>,
    hasher: DefaultHasher,
}

/// Every step, as `world`'s rank. Differences do not stop the rank: its peers wait for it.
pub(super) fn run_rank(prepared: &Prepared, world: &World, tuning: Tuning) -> Result<RankReport> {
    let script = &prepared.script;
    let place = Place::new(world.backend()).map_err(in_setup)?;
    let ep = ExpertParallel::with_tuning(world, script.config.clone(), tuning)?;
    let num_routings = script.steps.iter().map(|step| match step {
        Step::Dispatch { routing, .. } => routing + 1,
        _ => 0,
    });
    let num_local = ep.plan().placement.num_local(world.rank());
    let mut statistics = place.guarded(8 * num_local);
    let want_statistics = vec![7; num_local]; // 7: arbitrary, statistics run on from any value
    statistics.bytes_mut().copy_from_slice(bytemuck::cast_slice(&want_statistics));
    let mut walk = Walk {
        prepared,
        rank: world.rank().index(),
        routings: (0..num_routings.max().unwrap_or(0)).map(|_| Routing::new(&ep)).collect::<Result<_>>()?,
        ep,
        arrivals: Vec::new(),
        pending: VecDeque::new(),
        before: HashMap::new(),
        statistics,
        want_statistics,
        counts_host: HostNumbers::new(&place, num_local)?,
        place,
        out: Vec::new(),
        hasher: DefaultHasher::new(),
    };
    // Where ranks share a GPU, nobody allocates while another's kernels may wait.
    world.barrier()?;
    let mut faults = Vec::new();
    for (s, step) in script.steps.iter().enumerate() {
        // One step in four, for longer than the other ranks need for several (arbitrary).
        if script.delays && SplitMix64::stream(s as u64, walk.rank as u64).below(4) == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut step_faults = Vec::new();
        walk.step(s, step, &mut step_faults)?;
        faults.extend(step_faults.into_iter().map(|Failed(text)| format!("rank {}, step {s} ({step:?}): {text}", walk.rank)));
    }
    let statistics: &[i64] = bytemuck::cast_slice(walk.statistics.bytes());
    if statistics != walk.want_statistics {
        faults.push(format!("rank {}: statistics are {statistics:?}, expected {:?}", walk.rank, walk.want_statistics));
    }
    if let Err(Failed(text)) = walk.statistics.check("expert_statistics") {
        faults.push(format!("rank {}: {text}", walk.rank));
    }
    // Where ranks share a GPU, nobody frees memory while another's kernels may wait.
    walk.ep.synchronize()?;
    world.barrier()?;
    Ok(RankReport { faults, out: walk.out, digest: walk.hasher.finish() })
}

impl Walk<'_> {
    fn config(&self) -> &Config {
        &self.prepared.script.config
    }

    fn step(&mut self, s: usize, step: &Step, faults: &mut Vec<Failed>) -> Result<()> {
        match *step {
            Step::Dispatch { batch, routing, phase } => self.dispatch(s, &self.prepared.script.batches[batch], routing, phase, faults),
            Step::Replay { batch, routing, phase } => {
                let batch = &self.prepared.script.batches[batch];
                let tensors = Inputs::new(&self.place, self.config(), batch, self.rank, self.routings[routing].num_tokens());
                let payload = Payload { x: tensors.x.view()?, scales: tensors.scales.as_ref().map(Matrix::view).transpose()? };
                if phase == Phase::Send {
                    let sent = self.ep.replay_send(&self.routings[routing], &payload)?;
                    self.pending.push_back(Pending::Replay { sent, routing, step: s });
                    return Ok(());
                }
                let arrival = self.ep.replay(&self.routings[routing], &payload)?;
                self.received(s, routing, arrival, faults)
            }
            Step::Receive => self.receive(faults),
            Step::Combine { arrival, in_place, phase, .. } => self.combine(s, arrival, in_place, phase, faults),
            Step::Drop { arrival } => {
                if let Some(live) = self.arrivals[arrival].take() {
                    check_rows(&live.arrival.on_host()?, &live.expected.ranks[self.rank], faults);
                }
                Ok(())
            }
        }
    }

    fn dispatch(&mut self, s: usize, batch: &Batch, routing: usize, phase: Phase, faults: &mut Vec<Failed>) -> Result<()> {
        let tensors = Inputs::new(&self.place, self.config(), batch, self.rank, 0);
        let input = tensors.dispatch_input()?;
        if phase == Phase::Send {
            let mut sent = self.ep.dispatch_send(&mut self.routings[routing], &input);
            if matches!(self.prepared.expected[s], Expected::Arrival(Err(_))) {
                // A GPU finds out behind the call.
                sent = sent.and_then(|sent| self.ep.synchronize().map(|()| sent));
            }
            let sent = self.expect_capacity(s, sent, faults)?;
            self.pending.push_back(Pending::Dispatch { sent, routing, step: s });
            return Ok(());
        }
        let outputs = outputs(&self.place, s, self.want_statistics.len(), &mut self.statistics, &mut self.counts_host)?;
        let arrival = self.ep.dispatch(&mut self.routings[routing], &input, outputs);
        self.dispatched(s, routing, arrival, faults)
    }

    /// The error that every rank must get, or what was made.
    fn expect_capacity<T>(&self, s: usize, got: Result<T>, faults: &mut Vec<Failed>) -> Result<Option<T>> {
        let Expected::Arrival(expected) = &self.prepared.expected[s] else { unreachable!("a dispatch has an outcome") };
        match (got, expected) {
            (Err(Error::Capacity { demands, .. }), Err(want)) => {
                if demands != *want {
                    faults.push(Failed(format!("demands are {}, expected {}", show(&demands), show(want))));
                }
                Ok(None)
            }
            (Err(Error::Capacity { demands, .. }), Ok(_)) => {
                faults.push(Failed(format!("capacity error {}, expected an arrival", show(&demands))));
                Ok(None)
            }
            (Err(error), _) => Err(error),
            (Ok(made), _) => Ok(Some(made)),
        }
    }

    fn dispatched(&mut self, s: usize, routing: usize, arrival: Result<Arrival>, faults: &mut Vec<Failed>) -> Result<()> {
        let arrival = arrival.and_then(|arrival| arrival.on_host().map(|_| ()).map(|()| arrival));
        let arrival = self.expect_capacity(s, arrival, faults)?;
        self.statistics.fetch(&self.place.backend).map_err(in_setup)?;
        let has_outputs = has_outputs(s);
        let Expected::Arrival(expected) = &self.prepared.expected[s] else { unreachable!("a dispatch has an outcome") };
        match (arrival, expected) {
            (Some(arrival), Ok(expected)) => {
                let arrived = &expected.ranks[self.rank];
                self.check_counts_host(Some(&arrived.num_rows_per_expert).filter(|_| has_outputs), faults);
                if has_outputs {
                    self.want_statistics.iter_mut().zip(&arrived.num_rows_per_expert).for_each(|(w, &n)| *w += i64::from(n));
                }
                let kept = &self.routings[routing];
                let (got, want) = (kept.num_dropped(&self.ep)?, expected.num_dropped[self.rank]);
                if got != want {
                    faults.push(Failed(format!("routing.num_dropped is {got}, expected {want}")));
                }
                let (got, want) = (kept.num_tokens(), expected.routes[self.rank].len());
                // Of a count that only the device knows the host has a bound.
                if got != want && (self.place.cuda().is_none() || got < want) {
                    faults.push(Failed(format!("routing.num_tokens is {got}, expected {want}")));
                }
                self.received(s, routing, arrival, faults)
            }
            (Some(_), Err(want)) => {
                faults.push(Failed(format!("an arrival, expected a capacity error {}", show(want))));
                Ok(())
            }
            (None, _) => {
                self.check_counts_host(None, faults);
                Ok(())
            }
        }
    }

    /// `None`: nothing was asked for, or the call failed, so nothing was written.
    fn check_counts_host(&self, want: Option<&Vec<u32>>, faults: &mut Vec<Failed>) {
        let num_local = self.want_statistics.len();
        let untouched = vec![u32::MAX; num_local];
        let (got, want) = (self.counts_host.get(num_local), want.unwrap_or(&untouched));
        if got != want {
            faults.push(Failed(format!("counts_host is {got:?}, expected {want:?}")));
        }
    }

    fn received(&mut self, s: usize, routing: usize, arrival: Arrival, faults: &mut Vec<Failed>) -> Result<()> {
        let Expected::Arrival(Ok(expected)) = &self.prepared.expected[s] else { unreachable!("the oracle gave an arrival") };
        let mut live = Live { arrival, routing, expected: expected.clone() };
        let x = live.arrival.x();
        let bank = x.device().map_or_else(|| x.host("check", "x").map(|bytes| bytes.as_ptr().addr()), |at| Ok(at.address as usize))?;
        let before = self.before.entry(bank).or_default();
        let place = &self.place;
        check_arrival(place, &self.ep, self.rank, &mut live.arrival, &live.expected.ranks[self.rank], before, &mut self.hasher, faults);
        self.arrivals.push(Some(live));
        Ok(())
    }

    fn receive(&mut self, faults: &mut Vec<Failed>) -> Result<()> {
        match self.pending.pop_front().expect("the script has a first phase") {
            Pending::Dispatch { sent: None, .. } => Ok(()),
            Pending::Dispatch { sent: Some(sent), routing, step } => {
                let outputs = outputs(&self.place, step, self.want_statistics.len(), &mut self.statistics, &mut self.counts_host)?;
                let arrival = self.ep.dispatch_receive(&mut self.routings[routing], sent, outputs);
                self.dispatched(step, routing, arrival.map_err(Error::from), faults)
            }
            Pending::Replay { sent, routing, step } => {
                let arrival = self.ep.replay_receive(&self.routings[routing], sent)?;
                self.received(step, routing, arrival, faults)
            }
            Pending::Combine { sent, routing, sums } => {
                let mut output = Output::new(&self.place, self.config(), &sums, self.rank, self.routings[routing].num_tokens());
                self.ep.combine_receive(&self.routings[routing], sent, output.tensors()?)?;
                output.fetch()?;
                output.check(&sums, self.rank, &mut self.out, &mut self.hasher, faults);
                Ok(())
            }
        }
    }

    fn combine(&mut self, s: usize, arrival: usize, in_place: bool, phase: Phase, faults: &mut Vec<Failed>) -> Result<()> {
        // Missing only after a difference that was noted.
        let Some(mut live) = self.arrivals.get_mut(arrival).and_then(Option::take) else { return Ok(()) };
        let Expected::Sums(sums) = &self.prepared.expected[s] else { unreachable!("a combine has sums") };
        check_rows(&live.arrival.on_host()?, &live.expected.ranks[self.rank], faults);
        let config = &self.prepared.script.config;
        let (rows, y) = (live.expected.ranks[self.rank].rows.len(), &sums.y[self.rank]);
        let padded = s % 2 == 1;
        // The host of a GPU must not know how many rows there are.
        let rows = if self.place.cuda().is_some() { self.ep.plan().max_rows } else { rows };
        let shape = (rows + if padded { EXTRA_ROWS } else { 0 }, config.hidden);
        let staged = Matrix::filled(&self.place, config.combine_dtype, shape, padded, 16, y);
        let y = if in_place {
            write_in_place(&self.place, &mut live.arrival, config, y)?;
            ExpertRows::InPlace
        } else {
            ExpertRows::Staged(staged.view()?)
        };
        let row_k = if config.layout.is_by_expert() { 1 } else { config.k };
        let weights = sums.row_weights.as_ref().map(|w| &w[self.rank]);
        let weights = weights.map(|w| Matrix::filled(&self.place, DType::F32, (rows, row_k), padded, 4, bytemuck::cast_slice(w)));
        let input = combine::Input { y, row_weights: weights.as_ref().map(Matrix::view).transpose()? };
        let routing = &self.routings[live.routing];
        if phase == Phase::Send {
            let sent = self.ep.combine_send(routing, live.arrival, &input)?;
            self.pending.push_back(Pending::Combine { sent, routing: live.routing, sums: sums.clone() });
            return Ok(());
        }
        let mut output = Output::new(&self.place, config, sums, self.rank, routing.num_tokens());
        self.ep.combine(routing, live.arrival, &input, output.tensors()?)?;
        output.fetch()?;
        output.check(sums, self.rank, &mut self.out, &mut self.hasher, faults);
        Ok(())
    }
}

fn show(demands: &[Demand]) -> String {
    demands.iter().map(Demand::to_string).collect::<Vec<_>>().join("; ")
}

/// Writes the experts' rows into the bank.
fn write_in_place(place: &Place, arrival: &mut Arrival, config: &Config, y: &[u8]) -> Result<()> {
    let mut view = arrival.expert_output();
    if let Some(cuda) = place.cuda() {
        let mut bytes = vec![0; view.layout().extent_bytes()];
        bytes[..y.len()].copy_from_slice(y);
        return cuda.stream().write(&mut view, &bytes);
    }
    let stride_bytes = view.strides()[0] * config.combine_dtype.size();
    let row_bytes = config.hidden * config.combine_dtype.size();
    let bytes = view.host_mut("check", "expert_output")?;
    for (r, row) in y.chunks_exact(row_bytes).enumerate() {
        bytes[r * stride_bytes..][..row_bytes].copy_from_slice(row);
    }
    Ok(())
}

/// One rank's tensors of a batch.
struct Inputs {
    x: Matrix,
    topk_idx: Matrix,
    topk_weights: Option<Matrix>,
    scales: Option<Matrix>,
    count: Count,
    num_tokens: usize,
    device_count: Matrix,
}

impl Inputs {
    /// With at least `min_rows` rows: as many as a host must reckon with that does not know how many there are.
    fn new(place: &Place, config: &Config, batch: &Batch, rank: usize, min_rows: usize) -> Self {
        let Batch { ranks, ids, count, padded, .. } = batch;
        let tokens = &ranks[rank];
        let extra = if *count == Count::All { 0 } else { EXTRA_ROWS };
        let extra = extra.max(min_rows.saturating_sub(tokens.num_tokens));
        let rows = tokens.num_tokens + extra;
        // Routes behind the last token are valid, so that reading them changes counts.
        let topk_idx: Vec<i64> = tokens.topk_idx.iter().copied().chain(std::iter::repeat_n(0, extra * config.k)).collect();
        let id_bytes: Vec<u8> = match ids {
            DType::I32 => topk_idx.iter().flat_map(|&id| i32::try_from(id).expect("an id of 32 bits").to_le_bytes()).collect(),
            _ => topk_idx.iter().flat_map(|id| id.to_le_bytes()).collect(),
        };
        let matrix = |dtype, cols, gap_bytes, bytes: &[u8]| Matrix::filled(place, dtype, (rows, cols), *padded, gap_bytes, bytes);
        Inputs {
            x: matrix(config.dtype, config.hidden, 16, &tokens.x),
            topk_idx: matrix(*ids, config.k, 8, &id_bytes),
            topk_weights: tokens.topk_weights.as_ref().map(|w| matrix(DType::F32, config.k, 12, bytemuck::cast_slice(w))),
            scales: (config.scale_bytes > 0).then(|| matrix(DType::Bytes, config.scale_bytes, 3, &tokens.scales)),
            count: *count,
            num_tokens: tokens.num_tokens,
            device_count: Matrix::filled(place, DType::U32, (1, 1), false, 0, &(tokens.num_tokens as u32).to_le_bytes()),
        }
    }

    fn dispatch_input(&self) -> Result<dispatch::Input<'_>> {
        Ok(dispatch::Input {
            x: self.x.view()?,
            topk_idx: self.topk_idx.view()?,
            topk_weights: self.topk_weights.as_ref().map(Matrix::view).transpose()?,
            scales: self.scales.as_ref().map(Matrix::view).transpose()?,
            num_tokens: match self.count {
                Count::All => NumTokens::All,
                Count::Host => NumTokens::Host(self.num_tokens),
                Count::Device => NumTokens::Device(self.device_count.vector()?),
            },
        })
    }
}

/// What a dispatch reports beside the arrival is asked for in every second step.
fn has_outputs(step: usize) -> bool {
    step.is_multiple_of(2)
}

fn outputs<'a>(
    place: &Place,
    step: usize,
    num_local: usize,
    statistics: &'a mut Guarded,
    counts_host: &'a mut HostNumbers,
) -> Result<Outputs<'a>> {
    let counts = counts_host.get_mut(num_local);
    counts.fill(u32::MAX);
    if !has_outputs(step) {
        return Ok(Outputs::default());
    }
    let layout = Layout::contiguous("check", DType::I64, &[num_local])?;
    Ok(Outputs {
        expert_statistics: Some(statistics.view_mut(&place.backend, 0, layout).map_err(in_setup)?),
        counts_host: Some(TensorViewMut::from_slice(counts, &[num_local])?),
    })
}

/// Sums are of types with more than one NaN, of which backends may give any.
fn hash_values(dtype: DType, bytes: &[u8], hasher: &mut DefaultHasher) {
    let of = |value: f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    float::values(dtype, bytes).into_iter().map(of).for_each(|bits| bits.hash(hasher));
}

/// One rank's outputs of a combine, poisoned.
struct Output {
    out: Matrix,
    add_to: Option<Matrix>,
    topk_weights: Option<Matrix>,
    num_tokens: usize,
    k: usize,
    hidden: usize,
    dtype: DType,
}

impl Output {
    fn new(place: &Place, config: &Config, sums: &Sums, rank: usize, min_rows: usize) -> Self {
        let (dtype, hidden, k) = (config.combine_dtype, config.hidden, config.k);
        let num_tokens = sums.out[rank].len() / (hidden * dtype.size());
        let padded = num_tokens % 2 == 1;
        let rows = min_rows.max(num_tokens + if padded { EXTRA_ROWS } else { 0 });
        Output {
            out: Matrix::poisoned(place, dtype, rows, hidden, padded, 16),
            add_to: sums.add_to[rank]
                .as_ref()
                .map(|(add_dtype, bytes)| Matrix::filled(place, *add_dtype, (rows, hidden), padded, 32, bytes)),
            topk_weights: sums.folded.as_ref().map(|_| Matrix::poisoned(place, DType::F32, rows, k, padded, 4)),
            num_tokens,
            k,
            hidden,
            dtype,
        }
    }

    fn tensors(&mut self) -> Result<combine::Output<'_>> {
        Ok(combine::Output {
            out: self.out.view_mut()?,
            add_to: self.add_to.as_ref().map(Matrix::view).transpose()?,
            topk_weights: self.topk_weights.as_mut().map(Matrix::view_mut).transpose()?,
        })
    }

    /// Waits, and brings back what was written.
    fn fetch(&mut self) -> Result<()> {
        self.out.fetch()?;
        self.topk_weights.as_mut().map_or(Ok(()), Matrix::fetch)
    }

    fn check(&self, sums: &Sums, rank: usize, out: &mut Vec<u8>, hasher: &mut DefaultHasher, faults: &mut Vec<Failed>) {
        let mut note = |result: Result<(), Failed>| faults.extend(result.err());
        let got = self.out.contiguous(self.num_tokens);
        note(compare::equal("out", self.dtype, &[self.num_tokens, self.hidden], &got, &sums.out[rank]).map_err(Failed::from));
        note(self.out.check("out", self.num_tokens));
        hash_values(self.dtype, &got, hasher);
        out.extend(got);
        if let (Some(folded), Some(want)) = (&self.topk_weights, &sums.folded) {
            let got = folded.contiguous(self.num_tokens);
            let want = bytemuck::cast_slice(&want[rank]);
            note(compare::equal("topk_weights", DType::F32, &[self.num_tokens, self.k], &got, want).map_err(Failed::from));
            note(folded.check("topk_weights", self.num_tokens));
            hash_values(DType::F32, &got, hasher);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_nan_is_one_value() {
        let of = |values: [u32; 2]| {
            let mut hasher = DefaultHasher::new();
            hash_values(DType::F32, bytemuck::cast_slice(&values), &mut hasher);
            hasher.finish()
        };
        assert_eq!(of([0x7FC0_0000, 1]), of([0xFFFF_FFFF, 1]));
        assert_ne!(of([0x7FC0_0000, 1]), of([0x7F80_0000, 1]));
        assert_ne!(of([0, 1]), of([0x8000_0000, 1]));
    }
}
