//! One rank's MoE block: router, dispatch, experts, combine, shared expert.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::ep::{Config, ExpertParallel, Layout, Reduce, Wire, World};
use crate::error::Result;
use crate::layer::{CommonWeights, ExpertWeights, Shape};
use crate::routing::Routes;
use crate::tensor::{DType, TensorView, TensorViewMut};

/// What a block is. Equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// Shape of the layer.
    pub shape: Shape,
    /// Type of tokens, of expert rows and of the result: f32, f16 or bf16.
    pub dtype: DType,
    /// Type of the weights: f32, f16, bf16 or e4m3.
    pub weight_dtype: DType,
    /// Most tokens of a rank.
    pub max_tokens: usize,
    /// How received rows are arranged.
    pub layout: Layout,
    /// Where the rows of an expert layout are summed.
    pub reduce: Reduce,
    /// In which form rows travel back.
    pub wire: Wire,
    /// Bound of every wait.
    pub timeout: Duration,
}

impl BlockConfig {
    /// `ByToken`, weights in the type of the tokens.
    pub fn new(shape: Shape, dtype: DType, max_tokens: usize) -> Self {
        let ep = Config::new(shape.hidden, dtype, shape.router.num_experts, shape.router.k, max_tokens);
        BlockConfig {
            shape,
            dtype,
            weight_dtype: dtype,
            max_tokens,
            layout: ep.layout,
            reduce: ep.reduce,
            wire: ep.wire,
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
            // The expert layouts leave the weights to combine; a ByToken row is already a weighted sum.
            weighted: self.layout.is_by_expert(),
            timeout: self.timeout,
            ..Config::new(hidden, self.dtype, router.num_experts, router.k, self.max_tokens)
        }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Stage {
    /// Wall-clock time.
    pub time: Duration,
    /// Bytes that it had to read and write.
    pub bytes: u64,
    /// Floating-point operations of its matrix products.
    pub flops: u64,
}

/// What a call did on one rank.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize)]
pub struct Report {
    /// Router logits and choice.
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
pub struct Block {
    backend: Backend,
    config: BlockConfig,
    ep: ExpertParallel,
    common: Arc<CommonWeights>,
    experts: Arc<ExpertWeights>,
}

impl Block {
    /// Collective. `experts` are those that the configuration places on this rank.
    pub fn new(
        world: &World,
        backend: &Backend,
        config: BlockConfig,
        common: Arc<CommonWeights>,
        experts: Arc<ExpertWeights>,
    ) -> Result<Self> {
        let ep = ExpertParallel::new(world, config.ep())?;
        Ok(Block { backend: backend.clone(), config, ep, common, experts })
    }

    /// The configuration.
    pub fn config(&self) -> &BlockConfig {
        &self.config
    }

    /// The block's result for `x [T, hidden]`, into `out [T, hidden]`. Collective.
    pub fn forward(&mut self, x: &TensorView<'_>, source: RouteSource<'_>, out: TensorViewMut<'_>) -> Result<Report> {
        let _ = (x, source, out, &self.backend, &self.ep, &self.common, &self.experts);
        todo!()
    }

    /// The routes of the last call.
    pub fn routes(&self) -> &Routes {
        todo!()
    }
}
