//! One rank's part of a measurement: buffers, graphs, times, checks.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use moe_kernels::ep::{ExpertParallel, Launches, Measure, Tuning, World};
use moe_kernels::gpu::{Event, Graph, Stream, plain};
use moe_kernels::measure::delay::{self, delay};
use moe_kernels::measure::timing::MAX_QUEUED;
use moe_kernels::ops::combine::{self, ExpertRows};
use moe_kernels::ops::dispatch::{Arrival, Input, NumTokens, Outputs, Payload, Routing};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, DType, Error, Result};

use super::case::Case;
use super::memory::Memory;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// Dispatches, one behind the other.
    Dispatch,
    /// Dispatch and combine in turns.
    Pair,
    /// The kernel that moves the rows of a dispatch, without routing and without a word to peers.
    Payload,
    /// Dispatches that move neither rows nor records.
    SkipPayload,
    /// Dispatches whose rows go to the rank's own memory.
    Local,
}

/// How something is measured.
#[derive(Debug, Clone)]
pub struct Plan {
    pub arms: Vec<Arm>,
    pub tuning: Tuning,
    /// Calls in a graph, or between two looks at the clock.
    pub rounds: usize,
    /// Samples before those that count.
    pub warmup: usize,
    /// Samples.
    pub repeats: usize,
    /// Copies of x that take turns.
    pub inputs: usize,
    /// Experts' rows lie in a tensor of the caller.
    pub staged: bool,
    /// Results that are computed again, of each rank.
    pub check_tokens: usize,
    /// Also what a call costs the host.
    pub host_cost: bool,
}

/// What one rank found.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct RankResult {
    pub rank: usize,
    /// Seconds of a round, one sample a replay, for each arm.
    pub samples: Vec<(Arm, Vec<f64>)>,
    pub host: Option<HostCost>,
    pub launches: Option<Launches>,
    /// Launches of a dispatch and of a combine.
    pub num_launches: Option<[usize; 2]>,
    /// Results that were wrong, before or after they were timed.
    pub wrong: Vec<String>,
}

/// Seconds that a call takes the host, while as many ranks make theirs.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct HostCost {
    pub dispatch: Vec<f64>,
    pub combine: Vec<f64>,
    /// A bare launch, of one kernel that does nothing.
    pub bare: Vec<f64>,
    /// The same of two kernels in turns, as a call that launches several has them.
    pub bare_in_turns: Vec<f64>,
}

/// Holds back the streams of all ranks of a process until each has its work.
pub struct Gate {
    stream: Stream,
    event: Event,
    time: Duration,
}

impl Gate {
    /// Nothing to hold back on a CPU, or for ranks in processes of their own.
    pub fn new(backend: &Backend, ranks: usize) -> Result<Option<Arc<Self>>> {
        let Backend::Cuda(cuda) = backend else { return Ok(None) };
        let stream = Stream::new(cuda.device())?;
        delay::load(&stream)?;
        // Arbitrary: longer than the threads need to wake up and queue a graph each.
        let time = Duration::from_micros(400 + 100 * ranks as u64);
        Ok(Some(Arc::new(Gate { event: Event::new(cuda.device())?, stream, time })))
    }
}

/// A rank with everything that its calls take.
pub struct Rank<'a> {
    world: &'a World,
    case: &'a Case,
    plan: Plan,
    gate: Option<Arc<Gate>>,
    ep: ExpertParallel,
    routing: Routing,
    stream: Option<Stream>,
    x: Memory,
    topk_idx: Memory,
    topk_weights: Memory,
    scales: Option<Memory>,
    y: Option<Memory>,
    out: Memory,
}

impl<'a> Rank<'a> {
    /// Collective.
    pub fn new(world: &'a World, case: &'a Case, plan: &Plan, gate: Option<Arc<Gate>>) -> Result<Self> {
        let (backend, rank, config) = (world.backend(), world.rank().index(), &case.config);
        let num_tokens = case.num_tokens(rank);
        // All memory before anything waits for a peer, and none is freed before nothing does.
        let x_bytes = num_tokens * config.hidden * config.dtype.size();
        let mut x = Memory::new(&backend, plan.inputs * x_bytes)?;
        for copy in 0..plan.inputs {
            case.x(rank, copy, |at, bytes| x.write(copy * x_bytes + at, bytes))?;
        }
        let filled = |bytes: &[u8]| -> Result<Memory> {
            let mut memory = Memory::new(&backend, bytes.len())?;
            memory.write(0, bytes)?;
            Ok(memory)
        };
        let routes = &case.routes[rank];
        let topk_idx = filled(bytemuck::cast_slice(&routes.topk_idx))?;
        let topk_weights = filled(bytemuck::cast_slice(&routes.topk_weights))?;
        let scales = if config.scale_bytes > 0 { Some(filled(&case.scales(rank))?) } else { None };
        let y_row_bytes = config.hidden * config.combine_dtype.size();
        let y = if plan.staged {
            let mut y = Memory::new(&backend, config.plan(case.ranks)?.max_rows * y_row_bytes)?;
            case.y(rank, |at, bytes| y.write(at, bytes))?;
            Some(y)
        } else {
            None
        };
        let out = Memory::new(&backend, num_tokens * y_row_bytes)?;
        let stream = match &backend {
            Backend::Cuda(cuda) => {
                // Loaded now: a module that is loaded later would wait for kernels that wait.
                delay::load(cuda.stream())?;
                plain::empty(cuda.stream(), cuda.is_programmatic())?;
                cuda.stream().synchronize()?;
                Some(cuda.stream().clone())
            }
            _ => None,
        };
        let ep = ExpertParallel::with_tuning(world, config.clone(), plan.tuning)?;
        let routing = Routing::new(&ep)?;
        world.barrier()?;
        Ok(Rank { world, case, plan: plan.clone(), gate, ep, routing, stream, x, topk_idx, topk_weights, scales, y, out })
    }

    /// Whether the low-latency form with one message is in use: it has no kernel for rows alone.
    fn is_one_message(&self) -> bool {
        self.case.config.plan(self.case.ranks).is_ok_and(|plan| plan.staged_rows > 0)
            && self.ep.launches(1).is_some_and(|l| l.dispatch.route_blocks == 0)
    }

    fn num_tokens(&self) -> usize {
        self.case.num_tokens(self.world.rank().index())
    }

    fn layouts(&self) -> Result<[Layout; 4]> {
        let (c, num_tokens) = (&self.case.config, self.num_tokens());
        Ok([
            Layout::contiguous("bench", c.dtype, &[num_tokens, c.hidden])?,
            Layout::contiguous("bench", DType::I32, &[num_tokens, c.k])?,
            Layout::contiguous("bench", DType::F32, &[num_tokens, c.k])?,
            Layout::contiguous("bench", DType::Bytes, &[num_tokens, c.scale_bytes])?,
        ])
    }

    fn dispatch(&mut self, round: usize) -> Result<Arrival> {
        let [x, idx, weights, scales] = self.layouts()?;
        let copy = round % self.plan.inputs;
        let input = Input {
            x: self.x.view(copy * x.extent_bytes(), x)?,
            topk_idx: self.topk_idx.view(0, idx)?,
            topk_weights: Some(self.topk_weights.view(0, weights)?),
            scales: self.scales.as_ref().map(|memory| memory.view(0, scales)).transpose()?,
            num_tokens: NumTokens::All,
        };
        self.ep.dispatch(&mut self.routing, &input, Outputs::default())
    }

    fn combine(&mut self, arrival: Arrival) -> Result<()> {
        let c = &self.case.config;
        let y = match &self.y {
            None => ExpertRows::InPlace,
            Some(y) => {
                let rows = self.ep.plan().max_rows;
                ExpertRows::Staged(y.view(0, Layout::contiguous("bench", c.combine_dtype, &[rows, c.hidden])?)?)
            }
        };
        let out = self.out.view_mut(Layout::contiguous("bench", c.combine_dtype, &[self.num_tokens(), c.hidden])?)?;
        let output = combine::Output { out, add_to: None, topk_weights: None };
        Ok(self.ep.combine(&self.routing, arrival, &combine::Input { y, row_weights: None }, output)?)
    }

    fn payload(&mut self, arrival: &Arrival, round: usize) -> Result<()> {
        let [x, _, _, scales] = self.layouts()?;
        let copy = round % self.plan.inputs;
        let payload = Payload {
            x: self.x.view(copy * x.extent_bytes(), x)?,
            scales: self.scales.as_ref().map(|memory| memory.view(0, scales)).transpose()?,
        };
        self.ep.payload_alone(&self.routing, arrival, &payload)
    }

    /// Puts the experts' rows into the bank, unless they are the caller's.
    fn write_expert_rows(&mut self, arrival: &mut Arrival) -> Result<()> {
        match self.y {
            Some(_) => Ok(()),
            None => write_expert_rows(self.case, self.world.rank().index(), self.stream.as_ref(), arrival),
        }
    }

    /// A round whose results are compared; what is wrong, if anything.
    pub fn check(&mut self) -> Result<Vec<String>> {
        let rank = self.world.rank().index();
        self.out.poison()?;
        let mut arrival = self.dispatch(0)?;
        let mut wrong: Vec<String> = self.case.check_arrival(rank, 0, &arrival)?.into_iter().collect();
        self.write_expert_rows(&mut arrival)?;
        self.combine(arrival)?;
        wrong.extend(self.check_out()?);
        self.settle()?;
        Ok(wrong)
    }

    fn check_out(&mut self) -> Result<Option<String>> {
        self.ep.synchronize()?;
        let c = &self.case.config;
        let out = self.out.read(self.num_tokens() * c.hidden * c.combine_dtype.size())?;
        Ok(self.case.check_out(self.world.rank().index(), &out, self.plan.check_tokens))
    }

    /// Nothing is queued on any rank.
    pub fn settle(&self) -> Result<()> {
        self.ep.synchronize()?;
        self.world.barrier()
    }

    fn queue(&mut self, arm: Arm, round: usize) -> Result<()> {
        match arm {
            Arm::Pair => {
                let arrival = self.dispatch(round)?;
                self.combine(arrival)
            }
            _ => self.dispatch(round).map(drop),
        }
    }

    /// A graph of an arm, launched as `tuning` says; `None` where the arm does not exist. Collective.
    pub fn graph(&mut self, arm: Arm, tuning: Tuning) -> Result<Option<Graph>> {
        let Some(stream) = self.stream.clone() else { return Ok(None) };
        let rounds = self.plan.rounds;
        let with = |measure| Tuning { measure, ..tuning };
        let graph = match arm {
            Arm::Dispatch | Arm::Pair => Graph::capture(&stream, || (0..rounds).try_for_each(|round| self.queue(arm, round)))?,
            Arm::Payload if self.is_one_message() => return Ok(None),
            Arm::Payload => {
                let arrival = self.dispatch(0)?;
                self.settle()?;
                self.ep.retune(self.world, with(Measure { skip_signals: true, ..Measure::default() }))?;
                Graph::capture(&stream, || (0..rounds).try_for_each(|round| self.payload(&arrival, round)))?
            }
            Arm::SkipPayload | Arm::Local => {
                let (skip_payload, local) = (arm == Arm::SkipPayload, arm == Arm::Local);
                self.settle()?;
                self.ep.retune(self.world, with(Measure { skip_payload, local, skip_signals: false }))?;
                Graph::capture(&stream, || (0..rounds).try_for_each(|round| self.queue(arm, round)))?
            }
        };
        if tuning.measure == Measure::default() && matches!(arm, Arm::Payload | Arm::SkipPayload | Arm::Local) {
            self.settle()?;
            self.ep.retune(self.world, tuning)?;
        }
        self.settle()?;
        Ok(Some(graph))
    }

    /// How calls are launched now.
    pub fn launches(&self) -> Option<Launches> {
        self.ep.launches(self.num_tokens())
    }

    /// Other launches from now on. Collective.
    pub fn retune(&mut self, tuning: Tuning) -> Result<()> {
        self.settle()?;
        self.ep.retune(self.world, tuning)
    }

    /// Seconds of a round of a graph, which all ranks replay at the same time. Collective.
    pub fn time(&self, graph: &Graph) -> Result<f64> {
        let Some(stream) = &self.stream else { return Ok(f64::NAN) };
        let device = stream.device();
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        self.world.barrier()?;
        if let Some(gate) = &self.gate {
            if self.world.rank().index() == 0 {
                delay(&gate.stream, gate.time)?;
                gate.event.record(&gate.stream)?;
            }
            self.world.barrier()?;
            stream.wait_for(&gate.event)?;
        }
        start.record(stream)?;
        graph.launch(stream)?;
        end.record(stream)?;
        stream.synchronize()?;
        Ok(end.seconds_since(&start)? / self.plan.rounds as f64)
    }

    /// Seconds of a round of an arm, call by call. Collective.
    fn time_eagerly(&mut self, arm: Arm) -> Result<f64> {
        self.world.barrier()?;
        let start = Instant::now();
        for round in 0..self.plan.rounds {
            self.queue(arm, round)?;
        }
        self.ep.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / self.plan.rounds as f64)
    }

    /// What calls cost the host, while every rank makes them. Collective.
    fn host_cost(&mut self, num_launches: [usize; 2]) -> Result<Option<HostCost>> {
        let Some(stream) = self.stream.clone() else { return Ok(None) };
        // All of them together stay below what the driver queues without waiting.
        let num_calls = (MAX_QUEUED / num_launches.iter().sum::<usize>().max(1)).clamp(1, 40); // 40: arbitrary
        let is_programmatic = matches!(self.world.backend(), Backend::Cuda(cuda) if cuda.is_programmatic());
        let mut cost = HostCost { dispatch: Vec::new(), combine: Vec::new(), bare: Vec::new(), bare_in_turns: Vec::new() };
        for sample in 0..=self.plan.repeats {
            self.settle()?;
            let (mut dispatch, mut combine) = (Duration::ZERO, Duration::ZERO);
            for round in 0..num_calls {
                let start = Instant::now();
                let arrival = self.dispatch(round)?;
                let between = Instant::now();
                self.combine(arrival)?;
                dispatch += between - start;
                combine += between.elapsed();
            }
            self.settle()?;
            let start = Instant::now();
            let num_bare = num_calls * num_launches.iter().sum::<usize>();
            (0..num_bare).try_for_each(|_| plain::empty(&stream, is_programmatic))?;
            let bare = start.elapsed();
            self.settle()?;
            let start = Instant::now();
            let in_turns =
                |i: usize| if i.is_multiple_of(2) { plain::empty(&stream, is_programmatic) } else { delay(&stream, Duration::ZERO) };
            (0..num_bare).try_for_each(in_turns)?;
            let bare_in_turns = start.elapsed();
            // The first warms up.
            if sample > 0 {
                cost.dispatch.push(dispatch.as_secs_f64() / num_calls as f64);
                cost.combine.push(combine.as_secs_f64() / num_calls as f64);
                cost.bare.push(bare.as_secs_f64() / num_bare.max(1) as f64);
                cost.bare_in_turns.push(bare_in_turns.as_secs_f64() / num_bare.max(1) as f64);
            }
        }
        self.settle()?;
        Ok(Some(cost))
    }

    /// Everything of the plan. Collective.
    pub fn measure(&mut self) -> Result<RankResult> {
        let plan = self.plan.clone();
        let mut wrong = self.check()?;
        let (mut samples, mut num_launches, mut host) = (Vec::new(), None, None);
        if self.stream.is_some() {
            let mut graphs = Vec::new();
            for &arm in &plan.arms {
                if let Some(graph) = self.graph(arm, plan.tuning)? {
                    graphs.push((arm, graph, Vec::new()));
                }
            }
            for repeat in 0..plan.warmup + plan.repeats {
                let order: Vec<usize> = if repeat % 2 == 0 { (0..graphs.len()).collect() } else { (0..graphs.len()).rev().collect() };
                for at in order {
                    let seconds = self.time(&graphs[at].1)?;
                    if repeat >= plan.warmup {
                        graphs[at].2.push(seconds);
                    }
                }
            }
            let nodes = |arm: Arm| graphs.iter().find(|(other, ..)| *other == arm).map(|(_, graph, _)| graph.num_nodes()).transpose();
            if let (Some(dispatch), pair) = (nodes(Arm::Dispatch)?, nodes(Arm::Pair)?) {
                let dispatch = dispatch / plan.rounds;
                num_launches = Some([dispatch, pair.map_or(1, |pair| (pair / plan.rounds).saturating_sub(dispatch))]);
            }
            // What the graph leaves behind is compared too.
            if let Some((_, graph, _)) = graphs.iter().find(|(arm, ..)| *arm == Arm::Pair)
                && (plan.staged || self.case.keeps_expert_rows())
            {
                self.out.poison()?;
                self.settle()?;
                self.time(graph)?;
                wrong.extend(self.check_out()?);
            }
            if let (Some(num_launches), true) = (num_launches, plan.host_cost) {
                host = self.host_cost(num_launches)?;
            }
            samples = graphs.into_iter().map(|(arm, _, samples)| (arm, samples)).collect();
            // Nobody waits in a kernel while another takes a graph down.
            self.settle()?;
        } else {
            let arms: Vec<Arm> = plan.arms.iter().copied().filter(|arm| matches!(arm, Arm::Dispatch | Arm::Pair)).collect();
            samples.extend(arms.iter().map(|&arm| (arm, Vec::new())));
            for repeat in 0..plan.warmup + plan.repeats {
                for (at, &arm) in arms.iter().enumerate() {
                    let seconds = self.time_eagerly(arm)?;
                    if repeat >= plan.warmup {
                        samples[at].1.push(seconds);
                    }
                }
            }
        }
        wrong.extend(self.check()?);
        let launches = self.launches();
        Ok(RankResult { rank: self.world.rank().index(), samples, host, launches, num_launches, wrong })
    }

    /// Ends together with the others: nobody frees memory while a peer's kernels may wait. Collective.
    pub fn end(self) -> Result<()> {
        self.settle()
    }
}

/// Puts the rows of a rank's experts into the bank.
pub fn write_expert_rows(case: &Case, rank: usize, stream: Option<&Stream>, arrival: &mut Arrival) -> Result<()> {
    let row_bytes = case.config.hidden * case.config.combine_dtype.size();
    case.y(rank, |at, bytes| {
        let mut rows = arrival.expert_rows(at / row_bytes, bytes.len() / row_bytes)?;
        match stream {
            Some(stream) => stream.write(&mut rows, bytes),
            None => {
                rows.host_mut("bench", "rows")?[..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    })
}

/// One rank's part, from its memory to its end. Collective.
pub fn run(world: &World, case: &Case, plan: &Plan, gate: Option<Arc<Gate>>) -> Result<RankResult> {
    let mut rank = Rank::new(world, case, plan, gate)?;
    let result = rank.measure()?;
    rank.end()?;
    Ok(result)
}

/// The results of all ranks, or the error that explains the others: that of the lowest rank that did not merely hear of it.
pub fn all<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let mut errors: Vec<Error> = bad.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(|error| matches!(error, Error::Poisoned { .. }));
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => good.into_iter().collect(),
    }
}
