//! One rank's MoE block: router, dispatch, experts, combine, shared expert.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Backend, Cpu};
use crate::cpu::{convert, elementwise};
use crate::ep::{Config, ExpertParallel, Layout, Mode, Reduce, Wire, World};
use crate::error::{Error, Result};
use crate::id::Slot;
use crate::layer::experts::{Addend, Rows, Scratch, Selection, for_each_chunk, grown, tiles};
use crate::layer::weights::{Matrix, Mlp};
use crate::layer::{CommonWeights, ExpertWeights, Shape};
use crate::ops::combine;
use crate::ops::dispatch::{Arrival, Input, NumTokens, Outputs, Routing};
use crate::ops::gate::{GateOptions, Rounding, gate_mul};
use crate::routing::{KeptInF32, RouterConfig, Routes, route};
use crate::tensor::{DType, TensorView, TensorViewMut};

const OP: &str = "block";

/// What a block is. Equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// Shape of the layer.
    pub shape: Shape,
    /// Type of tokens, of expert rows and of the result: f32, f16 or bf16.
    pub dtype: DType,
    /// Type of the weights: f32, f16, bf16 or e4m3.
    pub weight_dtype: DType,
    /// Where the results of single steps are rounded: see [`Block::forward`].
    pub rounding: Rounding,
    /// Most tokens of a rank.
    pub max_tokens: usize,
    /// How received rows are arranged.
    pub layout: Layout,
    /// Where the rows of an expert layout are summed.
    pub reduce: Reduce,
    /// In which form rows travel back.
    pub wire: Wire,
    /// Protocol of dispatch and combine.
    pub mode: Mode,
    /// Bound of every wait.
    pub timeout: Duration,
}

impl BlockConfig {
    /// `ByToken`, `Fused`, weights in the type of the tokens.
    pub fn new(shape: Shape, dtype: DType, max_tokens: usize) -> Self {
        let ep = Config::new(shape.hidden, dtype, shape.router.num_experts, shape.router.k, max_tokens);
        BlockConfig {
            shape,
            dtype,
            weight_dtype: dtype,
            rounding: Rounding::Fused,
            max_tokens,
            layout: ep.layout,
            reduce: ep.reduce,
            wire: ep.wire,
            mode: ep.mode,
            timeout: ep.timeout,
        }
    }

    /// The configuration of the block's dispatch and combine.
    pub fn ep(&self) -> Config {
        let Shape { hidden, router, .. } = self.shape;
        Config {
            layout: self.layout,
            reduce: self.reduce,
            wire: self.wire,
            mode: self.mode,
            // The expert layouts leave the weights to combine, which does not round weight * row; a ByToken row is already a weighted sum.
            weighted: self.layout.is_by_expert() && !self.rounds_products(),
            timeout: self.timeout,
            ..Config::new(hidden, self.dtype, router.num_experts, router.k, self.max_tokens)
        }
    }

    /// The router as the block uses it: with `Framework`, weights are rounded to the type of the tokens unless the model keeps them in f32.
    pub fn router(&self) -> RouterConfig {
        let router = self.shape.router;
        match (self.rounding, router.kept_in_f32) {
            (Rounding::Fused, _) => router,
            (Rounding::Framework, KeptInF32::Nothing) => RouterConfig { weight_dtype: self.dtype, ..router },
            (Rounding::Framework, _) => RouterConfig { weight_dtype: DType::F32, ..router },
        }
    }

    /// The type to which router logits are rounded.
    pub fn logits_dtype(&self) -> DType {
        match (self.rounding, self.shape.router.kept_in_f32) {
            (Rounding::Framework, KeptInF32::Nothing | KeptInF32::Weights) => self.dtype,
            _ => DType::F32,
        }
    }

    /// Whether weight * row is rounded to the type of the tokens before it is added.
    pub fn rounds_products(&self) -> bool {
        self.rounding == Rounding::Framework && self.shape.router.kept_in_f32 == KeptInF32::Nothing
    }

    /// Fails when no block can be so in a world of `world` ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, world: usize) -> Result<()> {
        self.shape.check()?;
        if !self.dtype.is_float() {
            return Err(Error::invalid(OP, "dtype", self.dtype, "f32, f16 or bf16"));
        }
        if !self.weight_dtype.is_float() && self.weight_dtype != DType::E4M3 {
            return Err(Error::invalid(OP, "weight_dtype", self.weight_dtype, "f32, f16, bf16 or e4m3"));
        }
        self.ep().plan(world).map(|_| ())
    }
}

/// Where the routes of a call come from.
#[derive(Debug, Clone, Copy)]
pub enum RouteSource<'a> {
    /// The block's router, from the tokens.
    Router,
    /// Recorded or synthetic: one row of routes for each token.
    Given(&'a Routes),
}

/// One stage of a call on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Stage {
    /// Wall-clock time, waits for other ranks included.
    pub time: Duration,
    /// Bytes that it had to read and write at least.
    pub bytes: u64,
    /// Floating-point operations of its matrix products, padding not counted.
    pub flops: u64,
}

/// What a call did on one rank.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// Router logits and choice. With given routes only their copy.
    pub router: Stage,
    /// Dispatch.
    pub dispatch: Stage,
    /// Routed experts.
    pub experts: Stage,
    /// Shared expert and its gate.
    pub shared: Stage,
    /// Combine.
    pub combine: Stage,
    /// Rows that each local expert computed.
    pub num_rows_per_expert: Vec<u32>,
    /// Rows that arrived, padding included.
    pub num_rows: usize,
    /// Rows that this rank dropped.
    pub num_dropped: usize,
}

/// One rank's MoE block.
///
/// ```
/// use std::sync::Arc;
/// use moe_kernels::ep::World;
/// use moe_kernels::layer::{Block, BlockConfig, CommonWeights, ExpertWeights, RouteSource, Shape, tokens_from_seed};
/// use moe_kernels::routing::{Family, RouterConfig};
/// use moe_kernels::{Backend, DType, TensorView, TensorViewMut};
///
/// let router = RouterConfig::new(8, 2, Family::Softmax { renormalize: true });
/// let shape = Shape { hidden: 64, expert_width: 32, shared_width: 0, shared_gate: false, router };
/// let config = BlockConfig::new(shape, DType::BF16, 16);
/// let backend = Backend::cpu();
/// let common = Arc::new(CommonWeights::from_seed(&backend, &shape, DType::BF16, 7)?);
/// let reports = World::run(&backend, 2, |world| {
///     let placement = config.ep().placement(world.size())?;
///     let experts = ExpertWeights::from_seed(&backend, &shape, DType::BF16, 7, placement.experts_of(world.rank()))?;
///     let mut block = Block::new(&world, config.clone(), common.clone(), Arc::new(experts))?;
///     let x = tokens_from_seed(&backend, 64, DType::BF16, 7, 16 * world.rank().index(), 16)?;
///     let mut out = vec![0; x.len()];
///     let view = TensorViewMut::from_bytes(&mut out, DType::BF16, &[16, 64])?;
///     block.forward(&TensorView::from_bytes(&x, DType::BF16, &[16, 64])?, RouteSource::Router, view)
/// })?;
/// let rows: u32 = reports.into_iter().flat_map(|r| r.unwrap().num_rows_per_expert).sum();
/// assert_eq!(rows, 2 * 16 * 2); // each of 32 tokens has two experts
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct Block {
    cpu: Cpu,
    config: BlockConfig,
    ep: ExpertParallel,
    routing: Routing,
    common: Arc<CommonWeights>,
    experts: Arc<ExpertWeights>,
    shared: SharedExpert,
    scratch: Scratch,
    routes: Routes,
    /// Router logits `[T, E]`.
    logits: Vec<f32>,
    by_token: ByToken,
    /// Weights of the rows of one expert.
    row_weights: Vec<f32>,
}

impl Block {
    /// Collective. `experts` are those that the configuration places on this rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the weights are not those of the configuration, and the errors of [`ExpertParallel::new`].
    pub fn new(world: &World, config: BlockConfig, common: Arc<CommonWeights>, experts: Arc<ExpertWeights>) -> Result<Self> {
        world.exchange(OP, check_weights(world, &config, &common, &experts))?;
        let ep = ExpertParallel::new(world, config.ep())?;
        let routing = Routing::new(&ep)?;
        Ok(Block {
            cpu: world.cpu().clone(),
            shared: SharedExpert::new(world.cpu(), &common),
            config,
            ep,
            routing,
            common,
            experts,
            scratch: Scratch::default(),
            routes: Routes::default(),
            logits: Vec::new(),
            by_token: ByToken::default(),
            row_weights: Vec::new(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &BlockConfig {
        &self.config
    }

    /// The routes of the last call.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Router logits of the last call, `[T, num_experts]`, rounded to [`BlockConfig::logits_dtype`]; empty when its routes were given.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The block's result for `x [T, hidden]`, into `out [T, hidden]`. Collective.
    ///
    /// The result of a token is `sum over its experts of weight * expert(x) + gate * shared(x)`. Sums are f32, and the order of that over experts is that of
    /// combine. What is rounded to the type of the tokens:
    ///
    /// | step | [`Rounding::Fused`] | [`Rounding::Framework`] |
    /// |---|---|---|
    /// | router logits, router weights | no | yes, but for what [`RouterConfig::kept_in_f32`] names |
    /// | gate, up and SiLU(gate) of an expert | no | each |
    /// | SiLU(gate) * up, the expert's row | each | each |
    /// | weight * row | no | unless the weights are kept in f32 |
    /// | what travels: a row, or a rank's sum of rows (but with `AtRankF32`) | yes | yes |
    /// | the sum over experts | no | yes |
    /// | the shared expert: gate, up, SiLU(gate), row, its gate's logit and sigmoid, gate * row | no | each |
    /// | the shared expert: SiLU(gate) * up | yes | yes |
    /// | the result | yes | yes |
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the argument, before anything is sent; otherwise the errors of dispatch and combine.
    pub fn forward(&mut self, x: &TensorView<'_>, source: RouteSource<'_>, out: TensorViewMut<'_>) -> Result<Report> {
        self.run(x, source, true, out)
    }

    /// As [`forward`](Self::forward), but the sum over the routed experts alone. Collective.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_routed(&mut self, x: &TensorView<'_>, source: RouteSource<'_>, out: TensorViewMut<'_>) -> Result<Report> {
        self.run(x, source, false, out)
    }

    fn run(&mut self, x: &TensorView<'_>, source: RouteSource<'_>, with_shared: bool, mut out: TensorViewMut<'_>) -> Result<Report> {
        let cpu = self.cpu.clone();
        let num_tokens = self.check(x, &source, &out)?;
        let rows = Rows { bytes: x.host(OP, "x")?, dtype: x.dtype(), stride_bytes: x.strides()[0] * x.dtype().size() };
        let mut report = Report::default();
        timed(&mut report.router, || self.route(&cpu, rows, num_tokens, source))?;

        let (ids, weights) = (&self.routes.topk_idx, &self.routes.topk_weights);
        let shape = [num_tokens, self.routes.k];
        let input = Input {
            x: *x,
            topk_idx: TensorView::from_slice(ids, &shape)?,
            topk_weights: Some(TensorView::from_slice(weights, &shape)?),
            scales: None,
            num_tokens: NumTokens::All,
        };
        let mut arrival = timed(&mut report.dispatch, || self.ep.dispatch(&mut self.routing, &input, Outputs::default()))?;
        let received = arrival.on_host()?;
        report.num_rows_per_expert = received.num_rows_per_expert().to_vec();
        report.num_rows = received.num_rows();
        report.num_dropped = received.num_dropped();

        timed(&mut report.experts, || match self.config.layout.is_by_expert() {
            true => self.rows_by_expert(&cpu, &mut arrival),
            false => self.rows_by_token(&cpu, &mut arrival),
        })?;
        let (dtype, rounding) = (self.config.dtype, self.config.rounding);
        let common = &self.common;
        let shared = timed(&mut report.shared, || match with_shared {
            true => self.shared.rows(&cpu, common, dtype, rounding, &mut self.scratch, x, rows, num_tokens),
            false => Ok(None),
        })?;
        // Combine adds before its one rounding; a framework rounds the sum over experts first.
        let (add_to, add_after) = match rounding {
            Rounding::Fused => (shared, None),
            Rounding::Framework => (None, shared),
        };
        timed(&mut report.combine, || {
            let input = combine::Input { y: combine::ExpertRows::InPlace, row_weights: None };
            let output = combine::Output { out: out.reborrow(), add_to, topk_weights: None };
            self.ep.combine(&self.routing, arrival, &input, output)?;
            add_after.map_or(Ok(()), |shared| add_rows(&cpu, dtype, &shared, &mut out))
        })?;
        self.count(&mut report, num_tokens, with_shared, matches!(source, RouteSource::Router));
        Ok(report)
    }

    fn check(&self, x: &TensorView<'_>, source: &RouteSource<'_>, out: &TensorViewMut<'_>) -> Result<usize> {
        let Shape { hidden, router, .. } = self.config.shape;
        let want = format!("[T, {hidden}] of {}, T at most {}", self.config.dtype, self.config.max_tokens);
        let shown = |dtype: DType, shape: &[usize]| format!("{shape:?} of {dtype}");
        let num_tokens = match *x.shape() {
            [t, h] if h == hidden && t <= self.config.max_tokens && x.dtype() == self.config.dtype => t,
            _ => return Err(Error::invalid(OP, "x", shown(x.dtype(), x.shape()), want)),
        };
        if out.shape() != x.shape() || out.dtype() != x.dtype() {
            return Err(Error::invalid(OP, "out", shown(out.dtype(), out.shape()), shown(x.dtype(), x.shape())));
        }
        if let RouteSource::Given(routes) = source {
            let got = [routes.num_tokens, routes.k, routes.topk_idx.len(), routes.topk_weights.len()];
            let want = [num_tokens, router.k, num_tokens * router.k, num_tokens * router.k];
            if got != want {
                return Err(Error::invalid(OP, "routes", format!("{got:?} (T, k, ids, weights)"), format!("{want:?}")));
            }
        }
        Ok(num_tokens)
    }

    fn route(&mut self, cpu: &Cpu, x: Rows<'_>, num_tokens: usize, source: RouteSource<'_>) -> Result<()> {
        let (hidden, router) = (self.config.shape.hidden, self.config.router());
        self.logits.clear();
        let RouteSource::Given(routes) = source else {
            let logits = grown(&mut self.logits, num_tokens * router.num_experts);
            for tile in tiles(num_tokens) {
                let out = &mut logits[tile.start * router.num_experts..tile.end * router.num_experts];
                self.scratch.load(cpu, x, Selection::From(0), tile, hidden);
                self.scratch.linear(cpu, &self.common.router);
                self.scratch.store(cpu, router.num_experts, DType::F32, None, bytemuck::cast_slice_mut(out));
                elementwise::round(cpu.level(), self.config.logits_dtype(), out);
            }
            self.routes.num_tokens = num_tokens;
            self.routes.k = router.k;
            self.routes.topk_idx.resize(num_tokens * router.k, -1);
            self.routes.topk_weights.resize(num_tokens * router.k, 0.0);
            let logits = TensorView::from_slice(logits, &[num_tokens, router.num_experts])?;
            let bias = self.common.correction_bias.as_deref();
            return route(
                &Backend::Cpu(self.cpu.clone()),
                &router,
                &logits,
                bias,
                &mut self.routes.topk_idx,
                &mut self.routes.topk_weights,
            );
        };
        self.routes.clone_from(routes);
        Ok(())
    }

    /// Expert layouts: each expert's rows are one segment.
    fn rows_by_expert(&mut self, cpu: &Cpu, arrival: &mut Arrival) -> Result<()> {
        let (hidden, dtype, rounding) = (self.config.shape.hidden, self.config.dtype, self.config.rounding);
        let row_bytes = hidden * dtype.size();
        for (local, (_, mlp)) in self.experts.iter().enumerate() {
            let received = arrival.on_host()?;
            let first = received.segment_start()[local] as usize;
            let num_rows = received.num_rows_per_expert()[local] as usize;
            self.row_weights.clear();
            if self.config.rounds_products() {
                let weight = |slot: usize| received.metadata(Slot(slot as u32)).topk_weights.first().copied().unwrap_or(0.0);
                self.row_weights.extend((first..first + num_rows).map(weight));
            }
            let weights = self.config.rounds_products().then_some(&self.row_weights);
            let (x, mut out) = arrival.parts();
            let (x, out) = (x.host(OP, "x")?, out.host_mut(OP, "expert_output")?);
            for tile in tiles(num_rows) {
                let out = &mut out[(first + tile.start) * row_bytes..(first + tile.end) * row_bytes];
                let x = Rows { bytes: x, dtype, stride_bytes: row_bytes };
                self.scratch.load(cpu, x, Selection::From(first), tile.clone(), hidden);
                self.scratch.mlp(cpu, mlp, dtype, rounding);
                self.scratch.store(cpu, hidden, dtype, weights.map(|w| &w[tile]), out);
            }
        }
        Ok(())
    }

    /// `ByToken`: each row is the sum over this rank's experts, ascending, of weight * expert row, in f32, rounded once.
    fn rows_by_token(&mut self, cpu: &Cpu, arrival: &mut Arrival) -> Result<()> {
        let (hidden, dtype, rounding) = (self.config.shape.hidden, self.config.dtype, self.config.rounding);
        let row_bytes = hidden * dtype.size();
        let received = arrival.on_host()?;
        let num_rows = received.num_rows();
        let ByToken { gather, start, to, is_new, sum } = &mut self.by_token;
        let num_gathered = received.num_rows_per_expert().iter().map(|&n| n as usize).sum();
        let num_starts = self.experts.iter().len() + 1;
        let gather = &mut grown(gather, num_gathered)[..num_gathered];
        let start = &mut grown(start, num_starts)[..num_starts];
        let views = (TensorViewMut::from_slice(gather, &[num_gathered])?, TensorViewMut::from_slice(start, &[num_starts])?);
        arrival.gather_idx(1, views.0, views.1)?;
        let x = arrival.x();
        let x = x.host(OP, "x")?;
        is_new.clear();
        is_new.resize(num_rows, true);
        let sum = &mut grown(sum, num_rows * hidden)[..num_rows * hidden];
        for ((expert, mlp), segment) in self.experts.iter().zip(start.windows(2)) {
            let slots = &gather[segment[0] as usize..segment[1] as usize];
            to.clear();
            to.extend(slots.iter().map(|&slot| {
                let metadata = received.metadata(Slot(slot as u32));
                let at = metadata.topk_idx.iter().position(|&id| id == expert.0 as i32);
                let weight = at.map_or(0.0, |k| metadata.topk_weights[k]);
                Addend { row: slot as usize, weight, is_first: std::mem::take(&mut is_new[slot as usize]) }
            }));
            for tile in tiles(slots.len()) {
                let x = Rows { bytes: x, dtype, stride_bytes: row_bytes };
                self.scratch.load(cpu, x, Selection::List(slots), tile.clone(), hidden);
                self.scratch.mlp(cpu, mlp, dtype, rounding);
                self.scratch.add_to(cpu, hidden, dtype, self.config.rounds_products(), &to[tile], sum);
            }
        }
        let mut out = arrival.expert_output();
        let out = out.host_mut(OP, "expert_output")?;
        let (sum, is_new) = (&*sum, &*is_new);
        for_each_chunk(cpu, &mut out[..num_rows * row_bytes], row_bytes, |row, out| match is_new[row] {
            // Cannot be: a row arrives because it has an expert here.
            true => out.fill(0),
            false => convert::narrow(cpu.level(), dtype, &sum[row * hidden..][..hidden], out),
        });
        Ok(())
    }

    /// Bytes and operations of every stage.
    fn count(&self, report: &mut Report, num_tokens: usize, with_shared: bool, routed: bool) {
        let shape = &self.config.shape;
        let row_bytes = (shape.hidden * self.config.dtype.size()) as u64;
        let [tokens, num_experts, k, rows] = [num_tokens, shape.router.num_experts, shape.router.k, report.num_rows].map(|n| n as u64);
        let routes = tokens * k * 8; // an i32 and an f32
        report.router.bytes = 2 * routes;
        if routed {
            report.router.bytes = self.common.router.size_bytes() + tokens * (row_bytes + 2 * num_experts * 4) + routes;
            report.router.flops = 2 * tokens * num_experts * shape.hidden as u64;
        }
        report.dispatch.bytes = (tokens + rows) * row_bytes + routes;
        report.combine.bytes = (tokens + rows) * row_bytes;
        let used = self.experts.iter().zip(&report.num_rows_per_expert).filter(|(_, n)| **n > 0);
        let weight_bytes: u64 = used.map(|((_, mlp), _)| mlp.size_bytes()).sum();
        let expert_rows: u64 = report.num_rows_per_expert.iter().map(|&n| n as u64).sum();
        report.experts.bytes = weight_bytes + 2 * rows * row_bytes;
        report.experts.flops = expert_rows * shape.expert_flops();
        if let Some(shared) = self.common.shared.as_ref().filter(|_| with_shared) {
            // `Fused` hands f32 rows to combine; `Framework` reads and writes the result once more.
            let (shared_bytes, add_bytes) = match self.config.rounding {
                Rounding::Fused => (tokens * shape.hidden as u64 * 4, 0),
                Rounding::Framework => (tokens * row_bytes, 2 * tokens * row_bytes),
            };
            report.combine.bytes += shared_bytes + add_bytes;
            report.shared.bytes = shared.size_bytes() + tokens * row_bytes + shared_bytes;
            report.shared.flops = tokens * shape.shared_flops();
        }
    }
}

/// Buffers of [`Block::rows_by_token`].
#[derive(Debug, Default)]
struct ByToken {
    /// Slots of each expert's rows, expert after expert, and where each begins.
    gather: Vec<i32>,
    start: Vec<u32>,
    /// The same rows of one expert, with their weights.
    to: Vec<Addend>,
    /// Rows to which nothing was added yet.
    is_new: Vec<bool>,
    /// `[rows, hidden]`.
    sum: Vec<f32>,
}

/// The shared expert's rows.
#[derive(Debug)]
pub(crate) struct SharedExpert {
    /// Weights of the gate, widened: the gate takes f32 beside tokens of any type.
    gate: Option<Vec<f32>>,
    /// Both `[T, hidden]` of the type of the rows: f32 vectors for their alignment.
    rows: Vec<f32>,
    weighted: Vec<f32>,
}

impl SharedExpert {
    pub(crate) fn new(cpu: &Cpu, common: &CommonWeights) -> Self {
        let gate = common.shared_gate.as_ref().map(|gate| {
            let mut values = vec![0f32; gate.cols];
            convert::widen(cpu.level(), gate.dtype, &gate.bytes, &mut values);
            values
        });
        SharedExpert { gate, rows: Vec::new(), weighted: Vec::new() }
    }

    /// `gate(x) * shared(x)` of each token; `None` without a shared expert. `Fused`: f32, not rounded; `Framework`: each step rounded to `dtype`.
    #[allow(clippy::too_many_arguments)] // two views of x: one to read rows of, one for the gate
    pub(crate) fn rows<'a>(
        &'a mut self,
        cpu: &Cpu,
        common: &CommonWeights,
        dtype: DType,
        rounding: Rounding,
        scratch: &mut Scratch,
        x: &TensorView<'_>,
        x_rows: Rows<'_>,
        num_tokens: usize,
    ) -> Result<Option<TensorView<'a>>> {
        let Some(mlp) = &common.shared else { return Ok(None) };
        let hidden = mlp.gate.cols;
        let shape = [num_tokens, hidden];
        let rows_dtype = if rounding == Rounding::Fused { DType::F32 } else { dtype };
        let row_bytes = hidden * rows_dtype.size();
        let bytes = |values| &mut bytemuck::cast_slice_mut(grown(values, num_tokens * hidden))[..num_tokens * row_bytes];
        let rows: &mut [u8] = bytes(&mut self.rows);
        for tile in tiles(num_tokens) {
            let out = &mut rows[tile.start * row_bytes..tile.end * row_bytes];
            scratch.load(cpu, x_rows, Selection::From(0), tile, hidden);
            scratch.mlp(cpu, mlp, dtype, rounding);
            scratch.store(cpu, hidden, rows_dtype, None, out);
        }
        let rows = TensorView::from_bytes(rows, rows_dtype, &shape)?;
        let Some(gate) = &self.gate else { return Ok(Some(rows)) };
        let weighted = bytes(&mut self.weighted);
        let gate = TensorView::from_slice(gate, &[hidden])?;
        let out = TensorViewMut::from_bytes(weighted, rows_dtype, &shape)?;
        gate_mul(&Backend::Cpu(cpu.clone()), *x, gate, rows, &GateOptions { rounding, ..GateOptions::default() }, out)?;
        Ok(Some(TensorView::from_bytes(weighted, rows_dtype, &shape)?))
    }
}

/// `out = round(out + rows)`, all of `dtype`, rows of `rows` one after the other.
fn add_rows(cpu: &Cpu, dtype: DType, rows: &TensorView<'_>, out: &mut TensorViewMut<'_>) -> Result<()> {
    const PART_ROWS: usize = 32; // arbitrary: some 100 us of work at 7168 bf16
    let row_bytes = out.shape()[1] * dtype.size();
    let matrix = (out.shape()[0], row_bytes, out.strides()[0] * dtype.size());
    let rows = rows.host(OP, "shared")?;
    let add = |t: usize, out: &mut [u8]| elementwise::add_rows(cpu.level(), dtype, &rows[t * row_bytes..][..row_bytes], out);
    cpu.for_each_row(out.host_mut(OP, "out")?, matrix, PART_ROWS, add, || ());
    Ok(())
}

fn timed<T>(stage: &mut Stage, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let result = work();
    stage.time = start.elapsed();
    result
}

fn check_weights(world: &World, config: &BlockConfig, common: &CommonWeights, experts: &ExpertWeights) -> Result<()> {
    config.check(world.size())?;
    let shape = &config.shape;
    let matrix = |what: String, matrix: &Matrix, want: [usize; 2]| match matrix.shape() == want {
        true => Ok(()),
        false => Err(Error::invalid(OP, what, format!("{:?}", matrix.shape()), format!("{want:?}"))),
    };
    let mlp = |what: &str, mlp: &Mlp, width: usize| {
        matrix(format!("{what} gate"), &mlp.gate, [width, shape.hidden])?;
        matrix(format!("{what} up"), &mlp.up, [width, shape.hidden])?;
        matrix(format!("{what} down"), &mlp.down, [shape.hidden, width])
    };
    matrix("router".into(), &common.router, [shape.router.num_experts, shape.hidden])?;
    let has = [common.shared.is_some(), common.shared_gate.is_some(), common.correction_bias.is_some()];
    let want = [shape.shared_width > 0, shape.shared_gate, shape.has_correction_bias()];
    if has != want {
        return Err(Error::invalid(
            OP,
            "common weights",
            format!("{has:?}"),
            format!("{want:?} (shared expert, its gate, correction bias)"),
        ));
    }
    if let Some(shared) = &common.shared {
        mlp("shared", shared, shape.shared_width)?;
    }
    if let Some(gate) = &common.shared_gate {
        matrix("shared gate".into(), gate, [1, shape.hidden])?;
    }
    let placement = config.ep().placement(world.size())?;
    let ids: Vec<_> = experts.iter().map(|(expert, _)| expert).collect();
    if ids != placement.experts_of(world.rank()) {
        let want = format!("{:?} on rank {}", placement.experts_of(world.rank()), world.rank());
        return Err(Error::invalid(OP, "experts", format!("{ids:?}"), want));
    }
    experts.iter().try_for_each(|(expert, weights)| mlp(&format!("expert {expert}"), weights, shape.expert_width))
}
