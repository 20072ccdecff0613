//! Is a block's result right? Sampled tokens are computed again, alone, and by the oracle.
#![forbid(unsafe_code)]

use crate::backend::Backend;
use crate::error::Result;
use crate::layer::{BlockConfig, CommonWeights, ExpertWeights};
use crate::routing::Routes;

/// Checks results of a block against a second computation.
pub struct Verifier<'a> {
    backend: &'a Backend,
    config: &'a BlockConfig,
    common: &'a CommonWeights,
    experts: Vec<&'a ExpertWeights>,
}

/// What [`Verifier::token`] found.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TokenCheck {
    /// The result equals bit for bit that of the token computed alone and combined by the oracle.
    pub is_equal: bool,
    /// The first difference, if there is one.
    pub difference: Option<String>,
    /// |got - f64 oracle| / |f64 oracle| (2-norms).
    pub error: f64,
    /// What `error` may be at most, derived from the roundings.
    pub bound: f64,
}

impl TokenCheck {
    /// Equal, and near enough to the oracle.
    pub fn is_right(&self) -> bool {
        self.is_equal && self.error <= self.bound
    }
}

impl<'a> Verifier<'a> {
    /// `experts`: the weights of every rank, in the order of ranks.
    pub fn new(
        backend: &'a Backend,
        config: &'a BlockConfig,
        common: &'a CommonWeights,
        experts: impl IntoIterator<Item = &'a ExpertWeights>,
    ) -> Result<Self> {
        Ok(Verifier { backend, config, common, experts: experts.into_iter().collect() })
    }

    /// Checks one token: its row of x, its routes, and the block's result.
    pub fn token(&self, x: &[u8], topk_idx: &[i32], topk_weights: &[f32], got: &[u8]) -> Result<TokenCheck> {
        let _ = (self.backend, self.config, self.common, &self.experts, x, topk_idx, topk_weights, got);
        todo!()
    }

    /// Rows that each global expert must have computed, for the routes of all ranks.
    pub fn num_rows_per_expert<'r>(&self, routes: impl IntoIterator<Item = &'r Routes>) -> Vec<u32> {
        let _ = routes.into_iter();
        todo!()
    }
}
