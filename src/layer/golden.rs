//! A layer against its recording: what another implementation of the same layer took and gave.
//!
//! A recording is a safetensors file. For each run (`bf16`, `f32`, ..), with T tokens, E experts, k choices and H elements of a token, it has
//!
//! | tensor | shape | type |
//! |---|---|---|
//! | `<run>.input`, `<run>.output` | `[T, H]` or `[1, T, H]` | f32, f16 or bf16: the type of the run |
//! | `<run>.experts.0` | the same | the same: the sum over routed experts, without the shared one |
//! | `<run>.gate.0` | `[T, E]` | f32, f16 or bf16: router logits, without bias |
//! | `<run>.gate.1` | `[T, k]` | f32, f16 or bf16: weights as the experts use them |
//! | `<run>.gate.2` | `[T, k]` | integers: expert ids, in any order |
//!
//! and any others. Errors are normalised: the 2-norm of the difference over that of what was recorded.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backend::Backend;
use crate::ep::{Layout, MAX_TOKENS, Reduce, Wire, World};
use crate::error::{Error, Result};
use crate::layer::{Block, BlockConfig, CommonWeights, ExpertWeights, RouteSource, Shape, TensorFile};
use crate::ops::gate::Rounding;
use crate::oracle::{exp, float};
use crate::routing::Routes;
use crate::tensor::{DType, TensorView, TensorViewMut};

/// A file of recordings of one layer.
#[derive(Debug, Clone)]
pub struct Golden {
    path: PathBuf,
    recordings: Vec<Recording>,
}

/// One run of a layer.
#[derive(Debug, Clone)]
pub struct Recording {
    /// The run's name: the first part of its tensors' names.
    pub name: String,
    /// Type of tokens and results.
    pub dtype: DType,
    /// Tokens `[T, hidden]`.
    pub input: Vec<u8>,
    /// The block's result `[T, hidden]`.
    pub output: Vec<u8>,
    /// The sum over routed experts `[T, hidden]`.
    pub routed: Vec<u8>,
    /// Router logits `[T, num_experts]`.
    pub logits: Vec<f32>,
    /// Type of the logits.
    pub logits_dtype: DType,
    /// Ids and weights.
    pub routes: Routes,
}

impl Golden {
    /// Reads every run of a file for a layer of `shape`; the widest type first.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Format`] naming the tensor that is missing or not as this module says.
    pub fn open(path: &Path, shape: &Shape) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let runs = file.names().iter().filter_map(|name| name.strip_suffix(".input").filter(|run| !run.is_empty()));
        let mut recordings = runs.map(|run| Recording::read(&file, run, shape)).collect::<Result<Vec<_>>>()?;
        if recordings.is_empty() {
            return Err(wrong(path, "has no tensor `<run>.input`".into()));
        }
        recordings.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
        Ok(Golden { path: path.to_path_buf(), recordings })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its runs.
    pub fn recordings(&self) -> &[Recording] {
        &self.recordings
    }
}

fn wrong(path: &Path, why: String) -> Error {
    Error::Format { path: path.to_path_buf(), line: 0, why }
}

impl Recording {
    fn read(file: &TensorFile, run: &str, shape: &Shape) -> Result<Self> {
        let Shape { hidden, router, .. } = *shape;
        let input = file.tensor(&format!("{run}.input"))?;
        let (dtype, num_tokens) = match *input.shape() {
            [t, h] | [1, t, h] if h == hidden && (1..=MAX_TOKENS).contains(&t) && input.dtype().is_float() => (input.dtype(), t),
            _ => {
                let want = format!("[T, {hidden}] of f32, f16 or bf16, T at least 1 and at most {MAX_TOKENS}");
                return Err(wrong(
                    file.path(),
                    format!("tensor `{run}.input` is {:?} of {}, expected {want}", input.shape(), input.dtype()),
                ));
            }
        };
        let tensor = |name: &str, cols: usize, is_good: &dyn Fn(DType) -> bool, want: &str| {
            let tensor = file.tensor(&format!("{run}.{name}"))?;
            let has_shape = matches!(*tensor.shape(), [t, c] | [1, t, c] if (t, c) == (num_tokens, cols));
            if !has_shape || !is_good(tensor.dtype()) {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let want = format!("[{num_tokens}, {cols}] of {want}");
                return Err(wrong(file.path(), format!("tensor `{run}.{name}` is {shape:?} of {dtype}, expected {want}")));
            }
            Ok(tensor)
        };
        let rows = |name: &str| tensor(name, hidden, &|d| d == dtype, dtype.name());
        let floats = |name: &str, cols| tensor(name, cols, &DType::is_float, "f32, f16 or bf16");
        let logits = floats("gate.0", router.num_experts)?;
        let ids = tensor("gate.2", router.k, &|d| matches!(d, DType::I32 | DType::I64 | DType::U32), "integers")?;
        let mut topk_idx = Vec::new();
        for id in ids.to_i64()? {
            match i32::try_from(id) {
                Ok(id) if id >= 0 && (id as usize) < router.num_experts => topk_idx.push(id),
                _ => {
                    let want = format!("0 to {}", router.num_experts - 1);
                    return Err(wrong(file.path(), format!("tensor `{run}.gate.2` has the expert {id}, expected {want}")));
                }
            }
        }
        let topk_weights = floats("gate.1", router.k)?.to_f32()?;
        Ok(Recording {
            name: run.to_string(),
            dtype,
            input: input.bytes().to_vec(),
            output: rows("output")?.bytes().to_vec(),
            routed: rows("experts.0")?.bytes().to_vec(),
            logits: logits.to_f32()?,
            logits_dtype: logits.dtype(),
            routes: Routes { topk_idx, topk_weights, num_tokens, k: router.k },
        })
    }

    /// Tokens.
    pub fn num_tokens(&self) -> usize {
        self.routes.num_tokens
    }
}

/// How far something is from what was recorded.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Distance {
    /// Normalised error.
    pub error: f64,
    /// What it may be at most.
    pub bound: f64,
}

impl Distance {
    /// Not a number is too far.
    pub fn is_near(self) -> bool {
        self.error <= self.bound
    }
}

/// A run of a block beside a recorded one.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// The recorded run.
    pub run: String,
    /// Type of tokens and results.
    #[serde(serialize_with = "name_of")]
    pub dtype: DType,
    /// Where the block rounded.
    pub rounding: Rounding,
    /// Tokens.
    pub num_tokens: usize,
    /// Tokens with other experts.
    pub num_wrong_ids: usize,
    /// Tokens with other experts that are as good: their recorded scores tie for the last place.
    pub num_ties: usize,
    /// Router logits.
    pub logits: Distance,
    /// Weights of the experts that both chose.
    pub weights: Distance,
    /// The sum over routed experts.
    pub routed: Distance,
    /// The block's result.
    pub output: Distance,
    /// What is wrong.
    pub problems: Vec<String>,
}

fn name_of<S: serde::Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

impl Comparison {
    /// The same experts, and every distance within its bound.
    pub fn is_right(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Runs a block on every recorded input, with both roundings, and compares. `config` says how the ranks work together; type of tokens, rounding and
/// the number of tokens are those of each comparison. `experts`: the weights of every rank, in the order of ranks.
///
/// Logits, ids and weights are those of the block's router. Routed sum and output are computed with the recorded ids and weights: so the router's difference
/// does not hide that of the experts.
///
/// # Errors
/// [`Error::Invalid`] for weights or a configuration that do not fit, and the errors of the block.
pub fn compare(
    backend: &Backend,
    config: &BlockConfig,
    common: &Arc<CommonWeights>,
    experts: &[Arc<ExpertWeights>],
    golden: &Golden,
) -> Result<Vec<Comparison>> {
    let mut all = Vec::new();
    for recording in &golden.recordings {
        for rounding in [Rounding::Framework, Rounding::Fused] {
            let most = recording.num_tokens().div_ceil(experts.len().max(1));
            let mut config = BlockConfig { dtype: recording.dtype, rounding, max_tokens: most, ..config.clone() };
            if let Layout::ByExpertFixed { rows_per_expert } = &mut config.layout {
                // What was enough for other tokens may not be for these.
                *rows_per_expert = (*rows_per_expert).max(most * experts.len());
            }
            let got = run(backend, &config, common, experts, recording)?;
            all.push(got.beside(&config, experts.len(), common.correction_bias.as_deref(), recording));
        }
    }
    Ok(all)
}

/// What a block gave, of all ranks in the order of tokens.
#[derive(Default)]
struct Got {
    logits: Vec<f32>,
    routes: Routes,
    routed: Vec<u8>,
    output: Vec<u8>,
}

/// Experts of a token beside the recorded ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    Same,
    Tie,
    Other,
}

fn run(
    backend: &Backend,
    config: &BlockConfig,
    common: &Arc<CommonWeights>,
    experts: &[Arc<ExpertWeights>],
    recording: &Recording,
) -> Result<Got> {
    let num_tokens = recording.num_tokens();
    let ranks = World::run(backend, experts.len(), |world| {
        let rank = world.rank().index();
        let mut block = Block::new(&world, config.clone(), common.clone(), experts[rank].clone())?;
        let tokens = num_tokens * rank / experts.len()..num_tokens * (rank + 1) / experts.len();
        let row_bytes = config.shape.hidden * config.dtype.size();
        let shape = [tokens.len(), config.shape.hidden];
        // A copy, for its alignment.
        let mut x = vec![0u128; (tokens.len() * row_bytes).div_ceil(size_of::<u128>())];
        let mut out = x.clone();
        let len = tokens.len() * row_bytes;
        let x: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut x)[..len];
        let out: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut out)[..len];
        x.copy_from_slice(&recording.input[tokens.start * row_bytes..tokens.end * row_bytes]);
        let x = TensorView::from_bytes(x, config.dtype, &shape)?;

        block.forward(&x, RouteSource::Router, TensorViewMut::from_bytes(out, config.dtype, &shape)?)?;
        let mut got = Got { logits: block.logits().to_vec(), routes: block.routes().clone(), ..Got::default() };
        let at = tokens.start * got.routes.k..tokens.end * got.routes.k;
        let topk_idx = recording.routes.topk_idx[at.clone()].to_vec();
        let recorded = Routes { topk_idx, topk_weights: recording.routes.topk_weights[at].to_vec(), ..got.routes };
        let given = RouteSource::Given(&recorded);
        block.forward(&x, given, TensorViewMut::from_bytes(out, config.dtype, &shape)?)?;
        got.output = out.to_vec();
        block.forward_routed(&x, given, TensorViewMut::from_bytes(out, config.dtype, &shape)?)?;
        got.routed = out.to_vec();
        Ok(got)
    })?;
    let mut all = Got { routes: Routes { k: config.shape.router.k, ..Routes::default() }, ..Got::default() };
    for got in ranks {
        let got = got?;
        all.logits.extend(got.logits);
        all.routes.num_tokens += got.routes.num_tokens;
        all.routes.topk_idx.extend(got.routes.topk_idx);
        all.routes.topk_weights.extend(got.routes.topk_weights);
        all.routed.extend(got.routed);
        all.output.extend(got.output);
    }
    Ok(all)
}

fn choice(ids: &[i32], recording: &Recording, token: usize, bias: Option<&[f32]>) -> Choice {
    let recorded = recording.routes.idx_of(token);
    let num_experts = recording.logits.len() / recording.num_tokens();
    let score = |id: i32| {
        let logit = recording.logits[token * num_experts + id as usize];
        bias.map_or(logit, |bias| exp::sigmoid(logit) + bias[id as usize])
    };
    let ours = ids.iter().filter(|id| !recorded.contains(id));
    let theirs = recorded.iter().filter(|id| !ids.contains(id));
    let mut scores = ours.chain(theirs).map(|&id| score(id));
    match scores.next() {
        None => Choice::Same,
        Some(first) if scores.all(|score| score == first) => Choice::Tie,
        Some(_) => Choice::Other,
    }
}

impl Got {
    fn beside(&self, config: &BlockConfig, ranks: usize, bias: Option<&[f32]>, recording: &Recording) -> Comparison {
        let dtype = recording.dtype;
        let tokens = 0..recording.num_tokens();
        let choices: Vec<_> = tokens.clone().map(|token| choice(self.routes.idx_of(token), recording, token, bias)).collect();
        let count = |wanted: Choice| choices.iter().filter(|&&choice| choice == wanted).count();
        let rows = |got: &[u8], want: &[u8]| distance(&float::values(dtype, got), &float::values(dtype, want));
        let (mut got_weights, mut want_weights) = (Vec::new(), Vec::new());
        for token in tokens {
            for (id, &weight) in self.routes.idx_of(token).iter().zip(self.routes.weights_of(token)) {
                if let Some(at) = recording.routes.idx_of(token).iter().position(|recorded| recorded == id) {
                    got_weights.push(weight);
                    want_weights.push(recording.routes.weights_of(token)[at]);
                }
            }
        }
        let bounds = Bounds::new(config, ranks, recording);
        let mut comparison = Comparison {
            run: recording.name.clone(),
            dtype,
            rounding: config.rounding,
            num_tokens: recording.num_tokens(),
            num_wrong_ids: count(Choice::Other),
            num_ties: count(Choice::Tie),
            logits: Distance { error: distance(&self.logits, &recording.logits), bound: bounds.logits },
            weights: Distance { error: distance(&got_weights, &want_weights), bound: bounds.weights },
            routed: Distance { error: rows(&self.routed, &recording.routed), bound: bounds.rows },
            output: Distance { error: rows(&self.output, &recording.output), bound: bounds.rows },
            problems: Vec::new(),
        };
        if let Some(token) = choices.iter().position(|&choice| choice == Choice::Other) {
            let (ours, theirs) = (self.routes.idx_of(token), recording.routes.idx_of(token));
            let num = comparison.num_wrong_ids;
            comparison.problems.push(format!("{num} tokens have other experts; token {token}: {ours:?}, recorded {theirs:?}"));
        }
        let distances = [
            ("router logits", comparison.logits),
            ("router weights", comparison.weights),
            ("routed sum", comparison.routed),
            ("output", comparison.output),
        ];
        for (what, Distance { error, bound }) in distances.into_iter().filter(|(_, distance)| !distance.is_near()) {
            comparison.problems.push(format!("{what}: error {error:.2e}, at most {bound:.1e}"));
        }
        comparison
    }
}

/// |got - want| / |want|, or |got - want| where nothing was recorded.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(&a, &b)| a as f64 - b as f64));
    let size = norm(&mut want.iter().map(|&v| v as f64));
    if size > 0.0 { difference / size } else { difference }
}

/// What the errors may be at most.
struct Bounds {
    logits: f64,
    weights: f64,
    /// Of routed sum and output.
    rows: f64,
}

impl Bounds {
    fn new(config: &BlockConfig, ranks: usize, recording: &Recording) -> Self {
        // f32 sums in another order. Measured between implementations: up to 6e-7.
        const F32: f64 = 2e-6;
        // Rounding to bf16 changes a value by 2^-8 of it at most (spec), to f16 by an eighth of that. The other figures are for bf16 too.
        let scale = if recording.dtype == DType::F16 { 0.125 } else { 1.0 };
        let half_unit = scale * 2f64.powi(-8);
        // Both rounded: equal, but where f32 sums in other orders fall on two sides of a boundary. Derived: one of 64 values a unit, 2^-7, apart.
        let neighbours = half_unit / 4.0;
        let is_f32 = |dtype: DType| dtype == DType::F32;
        let (logits, weights) = match [config.logits_dtype(), recording.logits_dtype].map(is_f32) {
            [true, true] => (F32, F32),
            [false, false] => (neighbours, neighbours),
            // A weight is an exponential of its logit over a sum of others: what each changes by is what their logits do.
            _ => {
                let largest = recording.logits.iter().fold(0f32, |largest, logit| largest.max(logit.abs())) as f64;
                (half_unit, half_unit * (1.0 + 2.0 * largest))
            }
        };
        // Sums of a rank are rounded before they travel, unless they are whole or travel in f32.
        let is_rounded_again = ranks > 1 && !(config.layout.is_by_expert() && config.reduce != Reduce::AtRank);
        let rows = match (recording.dtype, config.rounding) {
            (DType::F32, _) => F32,
            // Measured: 4.8e-3 to 6.2e-3, of which the recording's own roundings are the larger part.
            (_, Rounding::Fused) => 8e-3 * scale,
            // Measured: up to 3e-3.
            (_, Rounding::Framework) if is_rounded_again => 5e-3 * scale,
            // Measured: up to 8e-5, a few elements at a boundary.
            (_, Rounding::Framework) => 2e-4 * scale,
        };
        // Half a unit of e4m3 is 2^-4 (spec); twice that, for rows that cancel.
        let wire = if config.wire == Wire::AsIs { 0.0 } else { 0.125 };
        Bounds { logits, weights, rows: rows + wire }
    }
}
