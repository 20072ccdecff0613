//! The run itself: weights, ranks, iterations.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use moe_kernels::ep::World;
use moe_kernels::layer::{Block, BlockConfig, CommonWeights, ExpertWeights, Report, RouteSource, tokens_from_seed};
use moe_kernels::routing::Routes;
use moe_kernels::{Backend, Error, Rank, Result, TensorView, TensorViewMut};

use super::model::Model;
use super::source::{Source, share};
use crate::output::Progress;

/// The weights of all ranks.
pub struct Weights {
    /// What every rank has.
    pub common: Arc<CommonWeights>,
    /// Each rank's experts.
    pub experts: Vec<Arc<ExpertWeights>>,
}

/// What one rank did.
pub struct RankRun {
    /// Wall-clock time and report of each measured iteration.
    pub iterations: Vec<(Duration, Report)>,
    /// The routes of its tokens.
    pub routes: Routes,
    /// Its tokens `[T, hidden]`.
    pub x: Vec<u8>,
    /// Its results `[T, hidden]`.
    pub out: Buffer,
    /// Every iteration gave the same bytes.
    pub is_repeatable: bool,
}

/// Bytes that start at a multiple of 16.
#[derive(Clone, PartialEq)]
pub struct Buffer(Vec<u128>);

impl Buffer {
    pub fn new(len: usize, fill: u128) -> Self {
        Buffer(vec![fill; len.div_ceil(size_of::<u128>())])
    }

    /// All of them; up to 15 more than were asked for.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    /// The same, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

impl Weights {
    /// Makes the weights of every rank, or takes them from the model's file.
    pub fn new(backend: &Backend, config: &BlockConfig, model: &Model, ranks: usize, seed: u64) -> Result<Self> {
        let progress = Progress::new(ranks + 1, "making weights");
        let common = Self::common(backend, config, model, seed)?;
        progress.step();
        let of_rank = |rank: usize| {
            let weights = Self::experts(backend, config, model, ranks, rank, seed);
            progress.step();
            weights
        };
        Ok(Weights { common, experts: (0..ranks).map(of_rank).collect::<Result<_>>()? })
    }

    /// What every rank has.
    pub fn common(backend: &Backend, config: &BlockConfig, model: &Model, seed: u64) -> Result<Arc<CommonWeights>> {
        let common = match &model.layer {
            Some(layer) => layer.common(),
            None => CommonWeights::from_seed(backend, &config.shape, config.weight_dtype, seed),
        };
        common.map(Arc::new)
    }

    /// The experts of one of `ranks`.
    pub fn experts(
        backend: &Backend,
        config: &BlockConfig,
        model: &Model,
        ranks: usize,
        rank: usize,
        seed: u64,
    ) -> Result<Arc<ExpertWeights>> {
        let placement = config.ep().placement(ranks)?;
        let ids = placement.experts_of(Rank(rank as u32));
        let weights = match &model.layer {
            Some(layer) => layer.experts(ids),
            None => ExpertWeights::from_seed(backend, &config.shape, config.weight_dtype, seed, ids),
        };
        weights.map(Arc::new)
    }
}

/// Runs one unmeasured and `num_iterations` measured iterations on every rank.
pub fn execute(
    backend: &Backend,
    config: &BlockConfig,
    weights: &Weights,
    source: &Source,
    num_iterations: usize,
    seed: u64,
) -> Result<Vec<RankRun>> {
    let progress = Progress::new(num_iterations + 1, "running");
    let work = Work { backend, config, source, num_iterations, seed };
    let results = World::run(backend, weights.experts.len(), |world| {
        let progress = (world.rank() == Rank(0)).then_some(&progress);
        work.on_rank(&world, &weights.common, &weights.experts[world.rank().index()], progress)
    })?;
    all(results)
}

/// What every rank does.
pub struct Work<'a> {
    pub backend: &'a Backend,
    pub config: &'a BlockConfig,
    pub source: &'a Source,
    pub num_iterations: usize,
    pub seed: u64,
}

impl Work<'_> {
    /// One rank's part; it shows `progress` if it has one.
    pub fn on_rank(
        &self,
        world: &World,
        common: &Arc<CommonWeights>,
        experts: &Arc<ExpertWeights>,
        progress: Option<&Progress>,
    ) -> Result<RankRun> {
        let Work { backend, config, source, num_iterations, seed } = *self;
        let rank = world.rank().index();
        let tokens = share(source.num_tokens, world.size(), rank);
        let (hidden, shape) = (config.shape.hidden, [tokens.len(), config.shape.hidden]);
        let x = tokens_from_seed(backend, hidden, config.dtype, seed, tokens.start, tokens.len())?;
        let mut block = Block::new(world, config.clone(), common.clone(), experts.clone())?;
        let routes = source.routes.as_ref().map_or(RouteSource::Router, |routes| RouteSource::Given(&routes[rank]));
        let mut out = Buffer::new(x.len(), u128::MAX); // not a number in any float type
        let mut first: Option<Buffer> = None;
        let mut is_repeatable = true;
        let mut iterations = Vec::with_capacity(num_iterations);
        for iteration in 0..=num_iterations {
            let start = Instant::now();
            let view = TensorViewMut::from_bytes(&mut out.bytes_mut()[..x.len()], config.dtype, &shape)?;
            let report = block.forward(&TensorView::from_bytes(&x, config.dtype, &shape)?, routes, view)?;
            let time = start.elapsed();
            if iteration > 0 {
                iterations.push((time, report));
            }
            match &first {
                Some(first) => is_repeatable &= *first == out,
                None => first = Some(out.clone()),
            }
            if let Some(progress) = progress {
                progress.step();
            }
        }
        let routes = block.routes().clone();
        Ok(RankRun { iterations, routes, x, out, is_repeatable })
    }
}

/// The results of all ranks, or the error that explains the others: that of the lowest rank that did not merely hear of it.
fn all<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let mut errors: Vec<Error> = bad.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(|error| matches!(error, Error::Poisoned { .. }));
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => good.into_iter().collect(),
    }
}
