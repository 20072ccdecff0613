//! Top-k choice from router logits.
#![deny(unsafe_code)]

mod cpu;

use super::placement::MAX_EXPERTS;
use super::routes::MAX_K;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorView};

const OP: &str = "router";

/// How a family of models scores and chooses.
///
/// In every family a NaN comes before all other values and ties go to the lower id, so ids are always valid and distinct, and a NaN among the
/// chosen shows in the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Family {
    /// Softmax over all experts, the k best. Qwen2-MoE and OLMoE do not renormalise; Qwen3-MoE, Qwen3-Next, Qwen3.5 and Mixtral do.
    Softmax {
        /// Divide the k weights by their sum.
        renormalize: bool,
    },
    /// Softmax, the k best, from the groups with the largest maxima if there are groups.
    ///
    /// Published models do not renormalise. DeepSeek's own code scales only then; transformers has no renormalisation here.
    DeepSeekV2 {
        /// `None`: greedy over all experts (V2-Lite).
        groups: Option<Groups>,
        /// Divide the k weights by their sum, and do not scale.
        renormalize: bool,
        /// Factor of the weights unless they are renormalised (16 in V2).
        scale: f32,
    },
    /// Sigmoid; the choice looks at score + bias, the weights are the scores without it. Only groups with the largest sums of their two best are
    /// looked at. DeepSeek-V3 and R1, Kimi-K2 (one group), GLM-4.5.
    ///
    /// Experts of other groups are never chosen: transformers fills them with -inf since its pull request 45441 (2026), as DeepSeek's code, vLLM and
    /// SGLang do. Older versions filled with 0, which beats an expert whose biased score is negative. With the published bias (at least +2) both agree.
    DeepSeekV3 {
        /// Groups; one group for models without.
        groups: Groups,
        /// Divide the k weights by (their sum + 1e-20).
        renormalize: bool,
        /// Factor of the weights (2.5 in V3).
        scale: f32,
    },
}

/// Experts in equal groups of contiguous ids, of which only some are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups of all experts.
    pub num_groups: usize,
    /// Groups that are looked at for one token.
    pub topk_groups: usize,
}

/// What a model's code in transformers keeps in f32 although tokens are f16 or bf16; the rest it rounds to their type. A fact of the model: a block that
/// rounds as a framework does reads it, [`route`] does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KeptInF32 {
    /// Nothing: logits, weights and weight * row are rounded (Qwen, OLMoE).
    #[default]
    Nothing,
    /// Weights, and so weight * row (Mixtral).
    Weights,
    /// Logits too (DeepSeek).
    LogitsAndWeights,
}

/// A router: experts, choices, family and the rounding of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Experts of the model.
    pub num_experts: usize,
    /// Experts of one token, 1 to 32.
    pub k: usize,
    /// How it scores and chooses.
    pub family: Family,
    /// The weights are rounded to this type (and still stored as f32): f32 keeps them, f16 or bf16 is what transformers does in most models.
    pub weight_dtype: DType,
    /// What the model's own code does not round.
    pub kept_in_f32: KeptInF32,
}

impl RouterConfig {
    /// A router whose weights stay f32, of a model that keeps in f32 what most of its family do: DeepSeek logits and weights, others nothing.
    pub fn new(num_experts: usize, k: usize, family: Family) -> Self {
        let kept_in_f32 = match family {
            Family::Softmax { .. } => KeptInF32::Nothing,
            Family::DeepSeekV2 { .. } | Family::DeepSeekV3 { .. } => KeptInF32::LogitsAndWeights,
        };
        RouterConfig { num_experts, k, family, weight_dtype: DType::F32, kept_in_f32 }
    }

    /// Fails when no token could be routed so.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        let Self { num_experts, k, family, weight_dtype, .. } = *self;
        if !(1..=MAX_EXPERTS).contains(&num_experts) {
            return Err(Error::invalid(OP, "num_experts", num_experts, format!("1 to {MAX_EXPERTS}")));
        }
        if !(1..=MAX_K.min(num_experts)).contains(&k) {
            return Err(Error::invalid(OP, "k", k, format!("1 to {} (at most {MAX_K}, at most num_experts)", MAX_K.min(num_experts))));
        }
        if !weight_dtype.is_float() {
            return Err(Error::invalid(OP, "weight_dtype", weight_dtype, "f32, f16 or bf16"));
        }
        let (groups, scale, least_size) = match family {
            Family::Softmax { .. } => (None, 1.0, 1),
            Family::DeepSeekV2 { groups, scale, .. } => (groups, scale, 1),
            Family::DeepSeekV3 { groups, scale, .. } => (Some(groups), scale, 2), // a sum of two needs two
        };
        if !scale.is_finite() {
            return Err(Error::invalid(OP, "scale", scale, "a finite number"));
        }
        let Some(Groups { num_groups, topk_groups }) = groups else { return Ok(()) };
        if num_groups == 0 || !num_experts.is_multiple_of(num_groups) || num_experts / num_groups < least_size {
            let want = format!("a divisor of num_experts, {num_experts}, with at least {least_size} experts a group");
            return Err(Error::invalid(OP, "num_groups", num_groups, want));
        }
        if !(1..=num_groups).contains(&topk_groups) || topk_groups * (num_experts / num_groups) < k {
            let want = format!("1 to num_groups, {num_groups}, with at least k, {k}, experts in them");
            return Err(Error::invalid(OP, "topk_groups", topk_groups, want));
        }
        Ok(())
    }
}

/// Chooses `k` experts for each row of `logits [T, num_experts]` (f32, f16 or bf16, any row stride) and writes ids and weights, each `[T, k]`.
///
/// Ids descend by the value that chose them: the score, in DeepSeek-V3 the score with its bias; ties: the lower id first. The formula, with the order
/// of every sum, is [`oracle::router::route`](crate::oracle::router::route). `bias` is given for DeepSeek-V3 and only then.
///
/// A NaN logit makes all weights of its row NaN in the softmax families; in DeepSeek-V3 its expert is chosen, with weight NaN.
///
/// # Errors
/// [`Error::Invalid`] naming the argument; nothing is written then.
///
/// ```
/// use moe_kernels::routing::{Family, RouterConfig, Routes, route};
/// use moe_kernels::{Backend, TensorView};
/// let logits = [0.0f32, 3.0, 1.0, 3.0];
/// let config = RouterConfig::new(4, 2, Family::Softmax { renormalize: true });
/// let mut routes = Routes::masked(1, 2);
/// let logits = TensorView::from_slice(&logits, &[1, 4])?;
/// route(&Backend::cpu(), &config, &logits, None, &mut routes.topk_idx, &mut routes.topk_weights)?;
/// assert_eq!((&routes.topk_idx[..], &routes.topk_weights[..]), (&[1, 3][..], &[0.5, 0.5][..]));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn route(
    backend: &Backend,
    config: &RouterConfig,
    logits: &TensorView,
    bias: Option<&[f32]>,
    topk_idx: &mut [i32],
    topk_weights: &mut [f32],
) -> Result<()> {
    let args = check(config, logits, bias, topk_idx.len(), topk_weights.len())?;
    cpu::route(backend.as_cpu(OP)?, &args, logits.host(OP, "logits")?, topk_idx, topk_weights);
    Ok(())
}

/// Arguments that [`check`] has found good.
#[derive(Debug, Clone, Copy)]
struct Args<'a> {
    num_experts: usize,
    k: usize,
    logits_dtype: DType,
    /// Bytes from one row of logits to the next.
    row_stride_bytes: usize,
    scores: Scores<'a>,
    groups: Option<Groups>,
    /// `Some(epsilon)`: divide by the sum plus epsilon.
    renormalize: Option<f32>,
    scale: f32,
    weight_dtype: DType,
}

#[derive(Debug, Clone, Copy)]
enum Scores<'a> {
    Softmax,
    /// With the bias of the choice; a group is worth its two best.
    Sigmoid(&'a [f32]),
}

fn check<'a>(config: &RouterConfig, logits: &TensorView, bias: Option<&'a [f32]>, num_idx: usize, num_weights: usize) -> Result<Args<'a>> {
    config.check()?;
    let RouterConfig { num_experts, k, family, weight_dtype, .. } = *config;
    if !logits.dtype().is_float() {
        return Err(Error::invalid(OP, "logits dtype", logits.dtype(), "f32, f16 or bf16"));
    }
    let &[num_tokens, width] = logits.shape() else {
        return Err(Error::invalid(OP, "logits shape", format!("{:?}", logits.shape()), format!("[T, {num_experts}]")));
    };
    if width != num_experts {
        return Err(Error::invalid(OP, "logits shape", format!("{:?}", logits.shape()), format!("[T, {num_experts}]")));
    }
    // Fits: the layout of a view proves that T * num_experts does, and k <= num_experts.
    let len = num_tokens * k;
    for (what, got) in [("topk_idx length", num_idx), ("topk_weights length", num_weights)] {
        if got != len {
            return Err(Error::invalid(OP, what, got, format!("T * k = {num_tokens} * {k} = {len}")));
        }
    }
    let scores = match (family, bias) {
        (Family::DeepSeekV3 { .. }, Some(bias)) if bias.len() == num_experts => Scores::Sigmoid(bias),
        (Family::DeepSeekV3 { .. }, bias) => {
            let got = bias.map_or("absent".into(), |b| format!("of length {}", b.len()));
            return Err(Error::invalid(OP, "bias", got, format!("of length num_experts, {num_experts}")));
        }
        (_, None) => Scores::Softmax,
        (_, Some(bias)) => return Err(Error::invalid(OP, "bias", format!("of length {}", bias.len()), "absent in this family")),
    };
    let (groups, renormalize, scale) = match family {
        Family::Softmax { renormalize } => (None, renormalize.then_some(0.0), 1.0),
        Family::DeepSeekV2 { groups, renormalize: true, .. } => (groups, Some(0.0), 1.0),
        Family::DeepSeekV2 { groups, renormalize: false, scale } => (groups, None, scale),
        // spec: 1e-20 is DeepSeek's guard against a sum of 0.
        Family::DeepSeekV3 { groups, renormalize, scale } => (Some(groups), renormalize.then_some(1e-20), scale),
    };
    let row_stride_bytes = logits.strides()[0] * logits.dtype().size();
    Ok(Args { num_experts, k, logits_dtype: logits.dtype(), row_stride_bytes, scores, groups, renormalize, scale, weight_dtype })
}
