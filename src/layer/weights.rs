//! The weights of one layer, from a seed.
#![forbid(unsafe_code)]

use crate::backend::Backend;
use crate::error::Result;
use crate::id::Expert;
use crate::layer::Shape;
use crate::tensor::DType;

/// A matrix `[rows, cols]`, row-major: each row makes one output element.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: Vec<u8>,
    /// With e4m3: `[ceil(rows / 128), ceil(cols / 128)]`, element = f32(q) * scale.
    pub(crate) scales: Vec<f32>,
}

/// One expert: `down(SiLU(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    /// `[width, hidden]`.
    pub gate: Matrix,
    /// `[width, hidden]`.
    pub up: Matrix,
    /// `[hidden, width]`.
    pub down: Matrix,
}

/// What every rank needs: router, correction bias, shared expert and its gate.
#[derive(Debug, Clone, PartialEq)]
pub struct CommonWeights {
    /// `[num_experts, hidden]`.
    pub router: Matrix,
    /// Added to the scores before the choice (DeepSeek-V3).
    pub correction_bias: Option<Vec<f32>>,
    /// The shared expert.
    pub shared: Option<Mlp>,
    /// `[1, hidden]`: the shared expert is weighted by `sigmoid(x . w)`.
    pub shared_gate: Option<Matrix>,
}

/// The experts of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertWeights {
    pub(crate) experts: Vec<(Expert, Mlp)>,
}

impl CommonWeights {
    /// Weights of `shape` in `dtype` (f32, f16, bf16; e4m3 for the shared expert's matrices).
    pub fn from_seed(backend: &Backend, shape: &Shape, dtype: DType, seed: u64) -> Result<Self> {
        let _ = (backend, shape, dtype, seed);
        todo!()
    }
}

impl ExpertWeights {
    /// Weights of `experts`, ascending. An expert's bits depend on shape, type, seed and its id, and on nothing else.
    pub fn from_seed(backend: &Backend, shape: &Shape, dtype: DType, seed: u64, experts: &[Expert]) -> Result<Self> {
        let _ = (backend, shape, dtype, seed, experts);
        todo!()
    }

    /// An expert's matrices, if it is here.
    pub fn get(&self, expert: Expert) -> Option<&Mlp> {
        self.experts.binary_search_by_key(&expert, |(e, _)| *e).ok().map(|i| &self.experts[i].1)
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> u64 {
        todo!()
    }
}

/// Tokens `first..first + num_tokens` of a made-up batch, `[num_tokens, hidden]` of `dtype`: variance 1, a token's bits depend on seed and index only.
pub fn tokens_from_seed(backend: &Backend, hidden: usize, dtype: DType, seed: u64, first: usize, num_tokens: usize) -> Result<Vec<u8>> {
    let _ = (backend, hidden, dtype, seed, first, num_tokens);
    todo!()
}
