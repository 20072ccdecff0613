//! Rounds of one object: new data, a form, delays, comparisons.
#![forbid(unsafe_code)]

use std::time::Duration;

use moe_kernels::ep::{Config, ExpertParallel, Tuning, World};
use moe_kernels::gpu::{Graph, Stream};
use moe_kernels::measure::delay::{self, delay};
use moe_kernels::ops::combine::{self, ExpertRows};
use moe_kernels::ops::dispatch::{Arrival, Input, NumTokens, Outputs, Payload, Routing};
use moe_kernels::random::SplitMix64;
use moe_kernels::routing::Routes;
use moe_kernels::routing::synthetic::{Kind, Synthetic};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, DType, Result};

use super::Tally;
use crate::bench::ep::case::Case;
use crate::bench::ep::memory::Memory;
use crate::bench::ep::options::SUMS;
use crate::bench::ep::rank::write_expert_rows;
use crate::output::Progress;

/// How a round is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Dispatch and combine.
    OneCall = 0,
    /// Each in two calls.
    TwoCalls = 1,
    /// Then the same routing with other rows, and its combine.
    Replay = 2,
    /// Both as graphs that were captured before the round's data was known; on a CPU as `OneCall`.
    Graph = 3,
    /// The arrival is dropped.
    Dropped = 4,
}

/// Forms.
pub const NUM_FORMS: usize = 5;
const FORMS: [Form; NUM_FORMS] = [Form::OneCall, Form::TwoCalls, Form::Replay, Form::Graph, Form::Dropped];

/// Differences that are kept of a rank (arbitrary: the first ones say it).
const MOST_WRONG: usize = 4;

/// Purposes of the streams of numbers of a round.
const SHARED: u64 = 0;
const OF_RANK: u64 = 1;
const DELAYS: u64 = 1 << 20;

/// One rank with an object.
pub struct Walk<'a> {
    world: &'a World,
    name: &'a str,
    config: &'a Config,
    seed: u64,
    ep: ExpertParallel,
    routing: Routing,
    stream: Option<Stream>,
    tensors: Tensors,
    out: Memory,
    /// Dispatch, its arrival, and combine.
    graphs: Option<(Graph, Arrival, Graph)>,
}

/// What a rank sends, with room for the most tokens.
struct Tensors {
    most: usize,
    x: Memory,
    topk_idx: Memory,
    topk_weights: Memory,
    scales: Memory,
    count: Memory,
}

impl Tensors {
    fn write(&mut self, case: &Case, rank: usize) -> Result<()> {
        let routes = &case.routes[rank];
        case.x(rank, 0, |at, bytes| self.x.write(at, bytes))?;
        self.topk_idx.write(0, bytemuck::cast_slice(&routes.topk_idx))?;
        self.topk_weights.write(0, bytemuck::cast_slice(&routes.topk_weights))?;
        self.scales.write(0, &case.scales(rank))?;
        self.count.write(0, &(routes.num_tokens as u32).to_le_bytes())
    }

    /// `None`: as many tokens as the memory of the backend says.
    fn input(&self, c: &Config, num_tokens: Option<usize>) -> Result<Input<'_>> {
        let layout = |dtype, columns: usize| Layout::contiguous("stress", dtype, &[self.most, columns]);
        Ok(Input {
            x: self.x.view(0, layout(c.dtype, c.hidden)?)?,
            topk_idx: self.topk_idx.view(0, layout(DType::I32, c.k)?)?,
            topk_weights: Some(self.topk_weights.view(0, layout(DType::F32, c.k)?)?),
            scales: match c.scale_bytes {
                0 => None,
                n => Some(self.scales.view(0, layout(DType::Bytes, n)?)?),
            },
            num_tokens: match num_tokens {
                Some(num_tokens) => NumTokens::Host(num_tokens),
                None => NumTokens::Device(self.count.view(0, Layout::contiguous("stress", DType::U32, &[1])?)?),
            },
        })
    }

    fn payload(&self, c: &Config) -> Result<Payload<'_>> {
        let input = self.input(c, Some(0))?;
        Ok(Payload { x: input.x, scales: input.scales })
    }
}

impl<'a> Walk<'a> {
    /// Collective.
    pub fn new(world: &'a World, name: &'a str, config: &'a Config, seed: u64) -> Result<Self> {
        let backend = world.backend();
        let stream = match &backend {
            Backend::Cuda(cuda) => {
                delay::load(cuda.stream())?;
                Some(cuda.stream().clone())
            }
            _ => None,
        };
        let (t, c) = (config.max_tokens, config);
        // All memory before anything waits for a peer, and none is freed before nothing does.
        let memory = |bytes: usize| Memory::new(&backend, bytes);
        let (x, out) = (memory(t * c.hidden * c.dtype.size())?, memory(t * c.hidden * c.combine_dtype.size())?);
        let (topk_idx, topk_weights, scales, count) = (memory(4 * t * c.k)?, memory(4 * t * c.k)?, memory(t * c.scale_bytes)?, memory(4)?);
        let ep = ExpertParallel::with_tuning(world, config.clone(), Tuning { sums: SUMS, ..Tuning::default() })?;
        let routing = Routing::new(&ep)?;
        world.barrier()?;
        let tensors = Tensors { most: t, x, topk_idx, topk_weights, scales, count };
        Ok(Walk { world, name, config, seed, ep, routing, stream, tensors, out, graphs: None })
    }

    /// So many rounds, or fewer when this rank finds a difference: the others learn of it behind the last one, so it goes on.
    pub fn rounds(&mut self, num: u64, tally: &mut Tally, progress: Option<&Progress>) -> Result<()> {
        for round in 0..num {
            let mut shared = self.random(round, SHARED);
            // Some rounds in a row are of graphs: captured once, replayed with changing data.
            let form =
                if self.graphs.is_some() && shared.below(4) != 0 { Form::Graph } else { FORMS[shared.below(NUM_FORMS as u64) as usize] };
            // Two banks: a graph holds one of them, and an object of two alternates.
            let form = if form == Form::Graph && (self.stream.is_none() || self.config.in_flight > 1) { Form::OneCall } else { form };
            let case = Case::of(self.config.clone(), shared.next_u64(), self.routes(round, &mut shared)?)?;
            let wrong = self.round(form, round, &case)?;
            let rank = self.world.rank().index();
            tally.rows += case.num_slots(rank) as u64;
            tally.forms[form as usize] += 1;
            tally.rounds += 1;
            let left = MOST_WRONG.saturating_sub(tally.wrong.len());
            tally
                .wrong
                .extend(wrong.into_iter().take(left).map(|wrong| format!("{}, round {}, {form:?}: {wrong}", self.name, tally.rounds)));
            if let Some(progress) = progress {
                progress.step();
            }
        }
        Ok(())
    }

    fn random(&self, round: u64, purpose: u64) -> SplitMix64 {
        SplitMix64::stream(SplitMix64::stream(self.seed, round).at(purpose), purpose)
    }

    /// Every rank's routes of a round: of any number of tokens, some of none; uniform, skewed, even, or all to one; with masked, repeated and impossible ids.
    fn routes(&self, round: u64, shared: &mut SplitMix64) -> Result<Vec<Routes>> {
        let (c, most) = (self.config, self.config.max_tokens as u64);
        let kind = [Kind::Uniform, Kind::Zipf(1.2), Kind::Even, Kind::One][shared.below(4) as usize]; // 1.2: arbitrary, a strong skew
        let is_messy = shared.below(2) == 0;
        let is_empty = shared.below(16) == 0;
        let of_rank = |rank: usize| {
            let mut random = self.random(round, OF_RANK + rank as u64);
            let num_tokens = match random.below(4) {
                0 => 0,
                1 => most,
                _ => random.below(most + 1),
            };
            let num_tokens = if is_empty { 0 } else { num_tokens as usize };
            let mut routes =
                Synthetic { kind, num_experts: c.num_experts, k: c.k, seed: self.seed ^ round, stream: rank as u64 }.routes(num_tokens)?;
            if is_messy {
                for at in 0..routes.topk_idx.len() {
                    match random.below(16) {
                        0 => routes.topk_idx[at] = -1,
                        1 => routes.topk_idx[at] = c.num_experts as i32 + 3, // arbitrary: beyond the last
                        2 if at > 0 => routes.topk_idx[at] = routes.topk_idx[at - 1],
                        _ => {}
                    }
                }
            }
            Ok(routes)
        };
        (0..self.world.size()).map(of_rank).collect()
    }

    /// A late rank: the host sleeps, or a kernel takes its time.
    fn late(&self, round: u64, step: u64) -> Result<()> {
        let rank = self.world.rank().index() as u64;
        let mut random = self.random(round, DELAYS + (step << 8) + rank);
        // Arbitrary: one in eight for longer than the others need for a round, one in four of the kernels.
        if random.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(2000)));
        }
        match &self.stream {
            Some(stream) if random.below(4) == 0 => delay(stream, Duration::from_micros(random.below(300))),
            _ => Ok(()),
        }
    }

    fn write(&mut self, case: &Case) -> Result<()> {
        self.tensors.write(case, self.world.rank().index())?;
        self.out.poison()
    }

    fn combine(&mut self, arrival: Arrival, in_two: bool) -> Result<()> {
        let c = self.config;
        let input = combine::Input { y: ExpertRows::InPlace, row_weights: None };
        let layout = Layout::contiguous("stress", c.combine_dtype, &[c.max_tokens, c.hidden])?;
        let output = combine::Output { out: self.out.view_mut(layout)?, add_to: None, topk_weights: None };
        if in_two {
            let sent = self.ep.combine_send(&self.routing, arrival, &input)?;
            return Ok(self.ep.combine_receive(&self.routing, sent, output)?);
        }
        Ok(self.ep.combine(&self.routing, arrival, &input, output)?)
    }

    /// A round; what is wrong.
    fn round(&mut self, form: Form, round: u64, case: &Case) -> Result<Vec<String>> {
        let rank = self.world.rank().index();
        let mut wrong = Vec::new();
        if form != Form::Graph && self.graphs.is_some() {
            self.take_graphs_down()?;
        }
        if form == Form::Graph && self.graphs.is_none() {
            self.capture(case)?;
        }
        self.write(case)?;
        let num_tokens = case.num_tokens(rank);
        self.late(round, 0)?;
        if let (Form::Graph, Some(stream)) = (form, self.stream.clone()) {
            let Some((dispatch, mut arrival, combine)) = self.graphs.take() else { return Ok(wrong) };
            dispatch.launch(&stream)?;
            wrong.extend(case.check_arrival(rank, 0, &arrival)?);
            write_expert_rows(case, rank, Some(&stream), &mut arrival)?;
            self.late(round, 1)?;
            combine.launch(&stream)?;
            wrong.extend(self.check_out(case)?);
            self.graphs = Some((dispatch, arrival, combine));
            return Ok(wrong);
        }
        let input = self.tensors.input(self.config, if round.is_multiple_of(3) { None } else { Some(num_tokens) })?;
        let arrival = if form == Form::TwoCalls {
            let sent = self.ep.dispatch_send(&mut self.routing, &input)?;
            self.late(round, 2)?;
            self.ep.dispatch_receive(&mut self.routing, sent, Outputs::default())?
        } else {
            self.ep.dispatch(&mut self.routing, &input, Outputs::default())?
        };
        wrong.extend(self.finish(form, round, case, arrival, 1)?);
        if form == Form::Replay {
            let again = case.replayed(case.seed ^ 0x5EED); // arbitrary: other rows
            self.write(&again)?;
            self.late(round, 3)?;
            let arrival = self.ep.replay(&self.routing, &self.tensors.payload(self.config)?)?;
            wrong.extend(self.finish(form, round, &again, arrival, 4)?);
        }
        Ok(wrong)
    }

    /// From an arrival to its sums.
    fn finish(&mut self, form: Form, round: u64, case: &Case, mut arrival: Arrival, step: u64) -> Result<Vec<String>> {
        let rank = self.world.rank().index();
        let mut wrong: Vec<String> = case.check_arrival(rank, 0, &arrival)?.into_iter().collect();
        if form == Form::Dropped {
            return Ok(wrong);
        }
        write_expert_rows(case, rank, self.stream.as_ref(), &mut arrival)?;
        self.late(round, step)?;
        self.combine(arrival, form == Form::TwoCalls)?;
        wrong.extend(self.check_out(case)?);
        Ok(wrong)
    }

    fn check_out(&mut self, case: &Case) -> Result<Option<String>> {
        self.ep.synchronize()?;
        let (rank, row_bytes) = (self.world.rank().index(), self.config.hidden * self.config.combine_dtype.size());
        let out = self.out.read(self.config.max_tokens * row_bytes)?;
        let behind = out[case.num_tokens(rank) * row_bytes..].iter().any(|&byte| byte != 0xFF);
        Ok(case
            .check_out(rank, &out, usize::MAX)
            .or_else(|| behind.then(|| format!("rank {rank}: a row behind the last token was written"))))
    }

    /// Captures dispatch and combine of whatever the buffers will hold. Collective.
    fn capture(&mut self, case: &Case) -> Result<()> {
        let Some(stream) = self.stream.clone() else { return Ok(()) };
        self.write(case)?;
        // An arrival for the combine; the graph's own dispatch comes later, into the same bank.
        let arrival = {
            let input = self.tensors.input(self.config, None)?;
            self.ep.dispatch(&mut self.routing, &input, Outputs::default())?
        };
        self.settle()?;
        let mut arrival = Some(arrival);
        let combine = Graph::capture(&stream, || match arrival.take() {
            Some(arrival) => self.combine(arrival, false),
            None => Ok(()),
        })?;
        let mut arrival = None;
        let dispatch = Graph::capture(&stream, || {
            let input = self.tensors.input(self.config, None)?;
            arrival = Some(self.ep.dispatch(&mut self.routing, &input, Outputs::default())?);
            Ok(())
        })?;
        self.settle()?;
        self.graphs = arrival.map(|arrival| (dispatch, arrival, combine));
        Ok(())
    }

    fn take_graphs_down(&mut self) -> Result<()> {
        self.settle()?;
        self.graphs = None;
        self.settle()
    }

    fn settle(&self) -> Result<()> {
        self.ep.synchronize()?;
        self.world.barrier()
    }

    /// Ends together with the others. Collective.
    pub fn end(mut self) -> Result<()> {
        self.take_graphs_down()
    }
}
