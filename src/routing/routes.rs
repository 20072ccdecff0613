//! The one form of a routing: what routers, synthetic kinds and traces make, and dispatch takes.
#![forbid(unsafe_code)]

/// Most experts of one token (spec: the limit of dispatch, which sizes its masks by it).
pub const MAX_K: usize = 32;

/// Chosen experts and their weights, row-major `[num_tokens, k]`.
///
/// A negative id is a masked route: it goes nowhere, and its weight means nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Routes {
    /// Expert ids, `[num_tokens, k]`.
    pub topk_idx: Vec<i32>,
    /// Router weights, `[num_tokens, k]`.
    pub topk_weights: Vec<f32>,
    /// Tokens.
    pub num_tokens: usize,
    /// Routes of each token.
    pub k: usize,
}

impl Routes {
    /// All masked, with weight 0: to be filled by [`route`](super::route).
    ///
    /// # Panics
    /// As `vec!` does when `num_tokens * k` is more than the memory.
    pub fn masked(num_tokens: usize, k: usize) -> Self {
        let len = num_tokens.saturating_mul(k);
        Routes { topk_idx: vec![-1; len], topk_weights: vec![0.0; len], num_tokens, k }
    }

    /// Ids of one token. Empty beyond the last.
    pub fn idx_of(&self, token: usize) -> &[i32] {
        row(&self.topk_idx, token, self.k)
    }

    /// Weights of one token. Empty beyond the last.
    pub fn weights_of(&self, token: usize) -> &[f32] {
        row(&self.topk_weights, token, self.k)
    }
}

fn row<T>(all: &[T], token: usize, k: usize) -> &[T] {
    let start = token.saturating_mul(k).min(all.len());
    &all[start..start.saturating_add(k).min(all.len())]
}
