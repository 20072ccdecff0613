//! The weights of one layer: their types, and weights from a seed. Those of a model come from [`checkpoint`](super::checkpoint).
//!
//! From a seed: element i of a matrix is a function of (seed, matrix, i): a rank makes its own experts and no others, in parallel, and every world has the same bits.
#![forbid(unsafe_code)]

use rayon::prelude::*;

use crate::backend::{Backend, Cpu};
use crate::cpu::{convert, elementwise};
use crate::error::{Error, Result};
use crate::id::Expert;
use crate::layer::Shape;
use crate::layer::bytes::Bytes;
use crate::layer::preset::{WEIGHT_BLOCK, vector_dtype};
use crate::random::SplitMix64;
use crate::tensor::DType;

const OP: &str = "weights";

/// A matrix `[rows, cols]`, row-major: each row makes one output element.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: Bytes,
    /// With e4m3: `[ceil(rows / 128), ceil(cols / 128)]`, element = f32(q) * scale.
    pub(crate) scales: Vec<f32>,
}

impl Matrix {
    fn zeros(rows: usize, cols: usize, dtype: DType) -> Self {
        let num_scales = if dtype.is_fp8() { rows.div_ceil(WEIGHT_BLOCK) * cols.div_ceil(WEIGHT_BLOCK) } else { 0 };
        Matrix { rows, cols, dtype, bytes: Bytes::Owned(vec![0; rows * cols * dtype.size()]), scales: vec![0.0; num_scales] }
    }

    /// Output elements and input elements.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements, row-major, little endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// With e4m3: a factor for each 128 x 128 block, row-major. Otherwise empty.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Bytes of elements and scales.
    pub fn size_bytes(&self) -> u64 {
        (self.bytes.len() + size_of_val(&self.scales[..])) as u64
    }

    /// The work of filling the matrix from a stream, in pieces of 128 rows.
    fn fill<'a>(&'a mut self, random: SplitMix64, work: &mut Vec<Piece<'a>>) {
        // A uniform value in [-b, b) has variance b^2 / 3: with b^2 = 3 / cols the product with a vector of variance 1 has variance 1.
        let bound = (3.0 / self.cols as f32).sqrt();
        let (cols, dtype) = (self.cols, self.dtype);
        let mut scales = self.scales.chunks_mut(cols.div_ceil(WEIGHT_BLOCK));
        for (i, bytes) in self.bytes.owned_mut().chunks_mut(WEIGHT_BLOCK * cols * dtype.size()).enumerate() {
            let scales = scales.next().unwrap_or_default();
            work.push(Piece { bytes, scales, random: random.clone(), first: i * WEIGHT_BLOCK * cols, cols, dtype, bound });
        }
    }
}

/// Up to 128 rows of a matrix to be made.
struct Piece<'a> {
    bytes: &'a mut [u8],
    scales: &'a mut [f32],
    random: SplitMix64,
    /// Index of the first element.
    first: usize,
    cols: usize,
    dtype: DType,
    bound: f32,
}

impl Piece<'_> {
    fn make(self, cpu: &Cpu) {
        let mut values = [[0f32; WEIGHT_BLOCK]; WEIGHT_BLOCK];
        let row_bytes = self.cols * self.dtype.size();
        for start in (0..self.cols).step_by(WEIGHT_BLOCK) {
            let width = WEIGHT_BLOCK.min(self.cols - start);
            let rows = self.bytes.chunks_exact_mut(row_bytes);
            let mut amax = 0f32;
            for (r, values) in values.iter_mut().enumerate().take(rows.len()) {
                // Columns are multiples of 8, so every piece of a row starts at a multiple of the generator's four values.
                let first = (self.first + r * self.cols + start) / 4;
                elementwise::uniform(cpu.level(), &self.random, first as u64, self.bound, &mut values[..width]);
                amax = if self.dtype.is_fp8() { values[..width].iter().fold(amax, |a, x| a.max(x.abs())) } else { amax };
            }
            for (values, row) in values.iter_mut().zip(rows) {
                if self.dtype.is_fp8() {
                    // 448 is the largest e4m3 (spec: OCP FP8). A block of zeros keeps its scale of 0.
                    let inverse = if amax > 0.0 { 448.0 / amax } else { 0.0 };
                    elementwise::scale(cpu.level(), inverse, &mut values[..width]);
                }
                let row = &mut row[start * self.dtype.size()..][..width * self.dtype.size()];
                convert::narrow(cpu.level(), self.dtype, &values[..width], row);
            }
            if let Some(scale) = self.scales.get_mut(start / WEIGHT_BLOCK) {
                *scale = amax / 448.0;
            }
        }
    }
}

fn make_all(cpu: &Cpu, work: Vec<Piece<'_>>) {
    if cpu.is_serial() {
        work.into_iter().for_each(|piece| piece.make(cpu));
    } else {
        cpu.install(|| work.into_par_iter().for_each(|piece| piece.make(cpu)));
    }
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

impl Mlp {
    fn zeros(width: usize, hidden: usize, dtype: DType) -> Self {
        let matrix = |rows, cols| Matrix::zeros(rows, cols, dtype);
        Mlp { gate: matrix(width, hidden), up: matrix(width, hidden), down: matrix(hidden, width) }
    }

    fn fill<'a>(&'a mut self, stream: impl Fn(u64) -> SplitMix64, work: &mut Vec<Piece<'a>>) {
        for (i, matrix) in [&mut self.gate, &mut self.up, &mut self.down].into_iter().enumerate() {
            matrix.fill(stream(i as u64), work);
        }
    }

    /// Bytes of the three matrices.
    pub fn size_bytes(&self) -> u64 {
        [&self.gate, &self.up, &self.down].map(Matrix::size_bytes).iter().sum()
    }
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

/// Streams of the seed. Expert e has streams `8 * (e + 1)..`, so the first eight are left for what is not an expert.
const ROUTER: u64 = 0;
const SHARED_GATE: u64 = 1;
const SHARED: u64 = 2;
const BIAS: u64 = 5;
const TOKENS: u64 = 6;

fn check(shape: &Shape, dtype: DType) -> Result<()> {
    shape.check()?;
    if !dtype.is_float() && dtype != DType::E4M3 {
        return Err(Error::invalid(OP, "dtype", dtype, "f32, f16, bf16 or e4m3"));
    }
    Ok(())
}

fn check_ids(shape: &Shape, experts: &[Expert]) -> Result<()> {
    let num_experts = shape.router.num_experts;
    if !experts.is_sorted_by(|a, b| a < b) || experts.last().is_some_and(|e| e.index() >= num_experts) {
        return Err(Error::invalid(OP, "experts", format!("{experts:?}"), format!("ascending ids below {num_experts}")));
    }
    Ok(())
}

impl CommonWeights {
    /// Weights of `shape` in `dtype` (f32, f16, bf16; with e4m3 the shared expert's matrices are e4m3, router and gate bf16).
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such layer.
    pub fn from_seed(backend: &Backend, shape: &Shape, dtype: DType, seed: u64) -> Result<Self> {
        let cpu = backend.as_cpu("weights")?;
        check(shape, dtype)?;
        let vectors = vector_dtype(dtype);
        let num_experts = shape.router.num_experts;
        let bias = SplitMix64::stream(seed, BIAS);
        // 0.1 is arbitrary: of the order of the differences between scores, so that it changes choices.
        let correction_bias = (0..num_experts as u64).map(|e| 0.1 * crate::random::symmetric_f32(bias.at(e)));
        let mut common = CommonWeights {
            router: Matrix::zeros(num_experts, shape.hidden, vectors),
            correction_bias: shape.has_correction_bias().then(|| correction_bias.collect()),
            shared: (shape.shared_width > 0).then(|| Mlp::zeros(shape.shared_width, shape.hidden, dtype)),
            shared_gate: shape.shared_gate.then(|| Matrix::zeros(1, shape.hidden, vectors)),
        };
        let mut work = Vec::new();
        common.router.fill(SplitMix64::stream(seed, ROUTER), &mut work);
        if let Some(gate) = &mut common.shared_gate {
            gate.fill(SplitMix64::stream(seed, SHARED_GATE), &mut work);
        }
        if let Some(shared) = &mut common.shared {
            shared.fill(|i| SplitMix64::stream(seed, SHARED + i), &mut work);
        }
        make_all(cpu, work);
        Ok(common)
    }

    /// Bytes of everything.
    pub fn size_bytes(&self) -> u64 {
        let bias = self.correction_bias.as_ref().map_or(0, |b| size_of_val(&b[..]) as u64);
        let gate = self.shared_gate.as_ref().map_or(0, Matrix::size_bytes);
        self.router.size_bytes() + bias + gate + self.shared.as_ref().map_or(0, Mlp::size_bytes)
    }
}

/// The experts of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertWeights {
    experts: Vec<(Expert, Mlp)>,
}

impl ExpertWeights {
    /// Weights of `experts`, which ascend. An expert's bits depend on shape, type, seed and its id, and on nothing else.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such layer, or the ids are not ascending ids of it.
    pub fn from_seed(backend: &Backend, shape: &Shape, dtype: DType, seed: u64, experts: &[Expert]) -> Result<Self> {
        let cpu = backend.as_cpu("weights")?;
        check(shape, dtype)?;
        check_ids(shape, experts)?;
        let mut made: Vec<_> = experts.iter().map(|&e| (e, Mlp::zeros(shape.expert_width, shape.hidden, dtype))).collect();
        let mut work = Vec::new();
        for (expert, mlp) in &mut made {
            let first = 8 * (expert.0 as u64 + 1);
            mlp.fill(|i| SplitMix64::stream(seed, first + i), &mut work);
        }
        make_all(cpu, work);
        Ok(ExpertWeights { experts: made })
    }

    /// The weights that `of` gives for `experts`, which ascend.
    pub(crate) fn collect(shape: &Shape, experts: &[Expert], of: impl Fn(Expert) -> Mlp) -> Result<Self> {
        check_ids(shape, experts)?;
        Ok(ExpertWeights { experts: experts.iter().map(|&expert| (expert, of(expert))).collect() })
    }

    /// The experts, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Expert, &Mlp)> {
        self.experts.iter().map(|(expert, mlp)| (*expert, mlp))
    }

    /// An expert's matrices, if it is here.
    pub fn get(&self, expert: Expert) -> Option<&Mlp> {
        self.experts.binary_search_by_key(&expert, |(e, _)| *e).ok().map(|i| &self.experts[i].1)
    }

    /// Bytes of all matrices.
    pub fn size_bytes(&self) -> u64 {
        self.experts.iter().map(|(_, mlp)| mlp.size_bytes()).sum()
    }
}

/// Tokens `first..first + num_tokens` of a made-up batch, `[num_tokens, hidden]` of `dtype` (f32, f16, bf16): uniform with variance 1. A token's bits
/// depend on seed and index only.
///
/// # Errors
/// [`Error::Invalid`] for another type, or a hidden size that no layer has.
pub fn tokens_from_seed(backend: &Backend, hidden: usize, dtype: DType, seed: u64, first: usize, num_tokens: usize) -> Result<Vec<u8>> {
    const OP: &str = "tokens";
    let cpu = backend.as_cpu(OP)?;
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "dtype", dtype, "f32, f16 or bf16"));
    }
    if hidden == 0 || !hidden.is_multiple_of(super::preset::WIDTH_ALIGN) {
        return Err(Error::invalid(OP, "hidden", hidden, format!("a positive multiple of {}", super::preset::WIDTH_ALIGN)));
    }
    let size = num_tokens.checked_mul(hidden * dtype.size()).filter(|&n| n <= isize::MAX as usize);
    let Some(size) = size.filter(|_| first.checked_add(num_tokens).is_some_and(|n| n.checked_mul(hidden).is_some())) else {
        return Err(Error::invalid(OP, "num_tokens", num_tokens, "tokens whose bytes can be addressed"));
    };
    let random = SplitMix64::stream(seed, TOKENS);
    let mut bytes = vec![0; size];
    let mut values = vec![0f32; hidden];
    for (t, row) in bytes.chunks_exact_mut(hidden * dtype.size()).enumerate() {
        elementwise::uniform(cpu.level(), &random, ((first + t) * hidden / 4) as u64, 3f32.sqrt(), &mut values);
        convert::narrow(cpu.level(), dtype, &values, row);
    }
    Ok(bytes)
}
