//! `config.json`: family, sizes, and which layers are MoE.
//!
//! Keys, their other names and their defaults are those of the configuration classes of transformers; sizes have no default here.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::json::{self, Json, quoted, wrong};
use crate::error::{Error, Result};
use crate::layer::Shape;
use crate::layer::preset::WEIGHT_BLOCK;
use crate::routing::{Family, Groups, KeptInF32, RouterConfig};
use crate::tensor::DType;

/// Longest config.json (arbitrary: a thousand times the usual; those of quantised models list every matrix).
pub(super) const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Most layers, and largest size (arbitrary: far above any model).
const MAX_SIZE: u64 = 1 << 20;

/// A family of models whose MoE layer can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Qwen1.5-MoE, Qwen2-57B-A14B: shared expert with a gate.
    Qwen2Moe,
    /// Qwen3-30B-A3B, Qwen3-235B-A22B: no shared expert.
    Qwen3Moe,
    /// Qwen3-Next-80B-A3B: as Qwen2-MoE, renormalised.
    Qwen3Next,
    /// Qwen3.5-MoE: as Qwen3-Next, inside a model of several modalities.
    Qwen35Moe,
    /// Intern-S2-Mobius: as Qwen3.5-MoE, but routers and routed experts are banks that layers share in turn.
    InternS2Mobius,
    /// Mixtral: no shared expert.
    Mixtral,
    /// OLMoE: no shared expert.
    Olmoe,
    /// DeepSeek-V2: shared experts without a gate, groups by their maximum.
    DeepSeekV2,
    /// DeepSeek-V3, R1, Kimi-K2, Moonlight: sigmoid with a correction bias.
    DeepSeekV3,
}

/// A family's `model_type`s and the beginning of its class names in `architectures`.
const KNOWN: [(Architecture, &[&str], &str); 9] = [
    (Architecture::Qwen2Moe, &["qwen2_moe"], "Qwen2Moe"),
    (Architecture::Qwen3Moe, &["qwen3_moe"], "Qwen3Moe"),
    (Architecture::Qwen3Next, &["qwen3_next"], "Qwen3Next"),
    (Architecture::Qwen35Moe, &["qwen3_5_moe", "qwen3_5_moe_text"], "Qwen3_5Moe"),
    (Architecture::InternS2Mobius, &["interns2_mobius", "interns2_mobius_text"], "InternS2Mobius"),
    (Architecture::Mixtral, &["mixtral"], "Mixtral"),
    (Architecture::Olmoe, &["olmoe"], "Olmoe"),
    (Architecture::DeepSeekV2, &["deepseek_v2"], "DeepseekV2"),
    (Architecture::DeepSeekV3, &["deepseek_v3", "deepseek_v32", "kimi_k2"], "DeepseekV3"),
];

impl Architecture {
    /// `model_type` of its checkpoints.
    pub fn name(self) -> &'static str {
        KNOWN.iter().find(|known| known.0 == self).map_or("", |known| known.1[0])
    }

    fn from_model_type(name: &str) -> Option<Self> {
        KNOWN.iter().find(|known| known.1.contains(&name)).map(|known| known.0)
    }

    /// From a class such as `Qwen3MoeForCausalLM`.
    fn from_class(name: &str) -> Option<Self> {
        let is_class = |rest: &str| rest == "Model" || rest.strip_prefix("For").is_some_and(|task| task.starts_with(char::is_uppercase));
        KNOWN.iter().find(|known| name.strip_prefix(known.2).is_some_and(is_class)).map(|known| known.0)
    }

    /// transformers computes the router's logits in f32 and does not round them to the model's type.
    pub fn has_f32_logits(self) -> bool {
        matches!(self, Self::DeepSeekV2 | Self::DeepSeekV3)
    }

    /// transformers leaves the routing weights, and their products with the experts' rows, in f32.
    pub fn has_f32_weights(self) -> bool {
        matches!(self, Self::DeepSeekV2 | Self::DeepSeekV3 | Self::Mixtral)
    }

    fn is_deepseek(self) -> bool {
        matches!(self, Self::DeepSeekV2 | Self::DeepSeekV3)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a model's config.json says about its MoE layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The family.
    pub architecture: Architecture,
    /// The file's own `model_type`.
    pub model_type: String,
    /// The type that the model computes in, if the file says so.
    pub dtype: Option<DType>,
    /// Decoder layers, dense ones included; layers for the prediction of several tokens are not among them.
    pub num_layers: usize,
    /// Shape and router of every MoE layer, and what the model's own code does not round.
    pub shape: Shape,
    /// Intern-S2-Mobius: banks of experts; layer n uses bank n modulo this.
    pub num_banks: Option<usize>,
    /// Where the file is.
    pub path: PathBuf,
    dense: Dense,
}

/// Which layers are dense.
#[derive(Debug, Clone, PartialEq)]
enum Dense {
    None,
    /// DeepSeek: those before the first, and those that are no multiple of the step.
    First {
        num: usize,
        step: usize,
    },
    /// Qwen: those listed (sorted here), and those whose number counted from 1 is no multiple of the step.
    Listed {
        layers: Vec<usize>,
        step: usize,
    },
}

impl Model {
    /// Parses a config.json; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Format`] naming the key: an unknown family (the known ones are listed), a missing or impossible value, a key twice.
    ///
    /// ```
    /// use moe_kernels::layer::Model;
    /// let config = br#"{"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    ///     "num_local_experts": 8, "num_experts_per_tok": 2}"#;
    /// let model = Model::parse(config, "config.json".as_ref())?;
    /// assert_eq!((model.shape.expert_width, model.shape.router.num_experts, model.moe_layers().count()), (14336, 8, 32));
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let Json::Object(top) = json::parse(bytes, path)? else {
            return Err(wrong(path, "is not an object"));
        };
        // The language model's part, in models of several modalities.
        let (language, prefix) = match top.get("text_config") {
            Some(Json::Object(text)) => (text, "text_config."),
            None | Some(Json::Null) => (&top, ""),
            Some(other) => return Err(wrong(path, format!("`text_config` is {other}, expected an object"))),
        };
        let (architecture, model_type) = architecture(language, &top, path)?;
        let fields = Fields { object: language, prefix, path };
        if let Some(act) = fields.text("hidden_act")?.filter(|&act| act != "silu" && act != "swish") {
            return Err(fields.wrong("hidden_act", format!("`{}`", quoted(act)), "silu"));
        }
        quantization(&top, language, path)?;
        let dtype = match fields.dtype()? {
            None => Fields { object: &top, prefix: "", path }.dtype()?,
            dtype => dtype,
        };
        let shape = shape(architecture, &fields)?;
        shape.check().map_err(|error| match error {
            Error::Invalid { what, got, want, .. } => wrong(path, format!("{what} is {got}, expected {want}")),
            error => error,
        })?;
        let banks = || fields.size_or("num_blocks", 1..=MAX_SIZE, 4);
        Ok(Model {
            architecture,
            model_type,
            dtype,
            num_layers: fields.size(&["num_hidden_layers"])?,
            shape,
            num_banks: (architecture == Architecture::InternS2Mobius).then(banks).transpose()?,
            path: path.to_path_buf(),
            dense: dense(architecture, &fields)?,
        })
    }

    /// Layer `n` exists and is a MoE layer.
    pub fn is_moe(&self, n: usize) -> bool {
        n < self.num_layers
            && match &self.dense {
                Dense::None => true,
                Dense::First { num, step } => n >= *num && n.is_multiple_of(*step),
                Dense::Listed { layers, step } => (n + 1).is_multiple_of(*step) && layers.binary_search(&n).is_err(),
            }
    }

    /// The MoE layers, ascending.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.num_layers).filter(|&n| self.is_moe(n))
    }
}

/// The family, and the name by which it was found: the language model's own comes first, since the whole may be a wrapper that nobody knows.
fn architecture(language: &HashMap<String, Json>, top: &HashMap<String, Json>, path: &Path) -> Result<(Architecture, String)> {
    let text = |object: &HashMap<String, Json>| match object.get("model_type") {
        Some(Json::Text(name)) => Some(name.clone()),
        _ => None,
    };
    let model_type = text(language).or_else(|| text(top));
    for name in [text(language), text(top)].into_iter().flatten() {
        if let Some(found) = Architecture::from_model_type(&name) {
            return Ok((found, name));
        }
    }
    for object in [language, top] {
        let Some(Json::List(classes)) = object.get("architectures") else { continue };
        for class in classes {
            if let Json::Text(class) = class
                && let Some(found) = Architecture::from_class(class)
            {
                return Ok((found, model_type.unwrap_or_else(|| class.clone())));
            }
        }
    }
    let known: Vec<_> = KNOWN.iter().map(|known| known.1[0]).collect();
    let got = model_type.map_or("is missing".into(), |name| format!("is `{}`", quoted(&name)));
    Err(wrong(path, format!("`model_type` {got}, expected one of {}", known.join(", "))))
}

/// Fails for weights in a form that is not read here.
fn quantization(top: &HashMap<String, Json>, language: &HashMap<String, Json>, path: &Path) -> Result<()> {
    let Some(config) = top.get("quantization_config").or_else(|| language.get("quantization_config")) else { return Ok(()) };
    let Json::Object(config) = config else {
        let is_null = *config == Json::Null;
        return if is_null { Ok(()) } else { Err(wrong(path, format!("`quantization_config` is {config}, expected an object"))) };
    };
    let fields = Fields { object: config, prefix: "quantization_config.", path };
    let method = fields.text("quant_method")?.unwrap_or("missing");
    if method != "fp8" {
        return Err(fields.wrong("quant_method", format!("`{}`", quoted(method)), "fp8: e4m3 with a scale for each block"));
    }
    let block = fields.list("weight_block_size")?.unwrap_or_default();
    if block != [WEIGHT_BLOCK, WEIGHT_BLOCK] {
        return Err(fields.wrong(
            "weight_block_size",
            format!("{:?}", &block[..block.len().min(4)]),
            format!("[{WEIGHT_BLOCK}, {WEIGHT_BLOCK}]"),
        ));
    }
    Ok(())
}

fn shape(architecture: Architecture, fields: &Fields<'_>) -> Result<Shape> {
    use Architecture as A;
    let hidden = fields.size(&["hidden_size"])?;
    let num_experts = fields.size(&["num_experts", "num_local_experts", "n_routed_experts"])?;
    let k = fields.size(&["num_experts_per_tok"])?;
    let expert_width = match architecture {
        A::Mixtral | A::Olmoe => fields.size(&["intermediate_size"])?,
        _ => fields.size(&["moe_intermediate_size"])?,
    };
    let shared_width = match architecture {
        A::Qwen3Moe | A::Mixtral | A::Olmoe => 0,
        A::DeepSeekV2 | A::DeepSeekV3 => {
            let default = if architecture == A::DeepSeekV2 { 2 } else { 1 };
            // Null means none, which is not the default. The experts are one wide one.
            let num = if fields.is_null("n_shared_experts") { 0 } else { fields.size_or("n_shared_experts", 0..=MAX_SIZE, default)? };
            num * expert_width
        }
        _ => fields.size_from("shared_expert_intermediate_size", 0..=MAX_SIZE)?,
    };
    let family = match architecture {
        A::Qwen35Moe | A::Mixtral => Family::Softmax { renormalize: true }, // their classes have no choice
        A::Qwen3Next | A::InternS2Mobius => Family::Softmax { renormalize: fields.flag("norm_topk_prob", true)? },
        A::Qwen2Moe | A::Qwen3Moe | A::Olmoe => Family::Softmax { renormalize: fields.flag("norm_topk_prob", false)? },
        A::DeepSeekV2 => {
            fields.expect_text("scoring_func", "softmax")?;
            let groups = match fields.text("topk_method")?.unwrap_or("greedy") {
                "greedy" => None,
                "group_limited_greedy" => {
                    Some(Groups { num_groups: fields.size(&["n_group"])?, topk_groups: fields.size(&["topk_group"])? })
                }
                other => return Err(fields.wrong("topk_method", format!("`{}`", quoted(other)), "greedy or group_limited_greedy")),
            };
            // transformers has the key norm_topk_prob and does not look at it; published models say false.
            Family::DeepSeekV2 { groups, renormalize: false, scale: fields.number("routed_scaling_factor", 1.0)? }
        }
        A::DeepSeekV3 => {
            fields.expect_text("scoring_func", "sigmoid")?;
            fields.expect_text("topk_method", "noaux_tc")?;
            let group = |key, default| match fields.is_null(key) {
                true => Ok(1),
                false => fields.size_or(key, 1..=MAX_SIZE, default),
            };
            Family::DeepSeekV3 {
                groups: Groups { num_groups: group("n_group", 8)?, topk_groups: group("topk_group", 4)? },
                renormalize: fields.flag("norm_topk_prob", true)?,
                scale: fields.number("routed_scaling_factor", 2.5)?,
            }
        }
    };
    let shared_gate = shared_width > 0 && !architecture.is_deepseek();
    let kept_in_f32 = match (architecture.has_f32_logits(), architecture.has_f32_weights()) {
        (true, _) => KeptInF32::LogitsAndWeights,
        (false, true) => KeptInF32::Weights,
        (false, false) => KeptInF32::Nothing,
    };
    let router = RouterConfig { kept_in_f32, ..RouterConfig::new(num_experts, k, family) };
    Ok(Shape { hidden, expert_width, shared_width, shared_gate, router })
}

fn dense(architecture: Architecture, fields: &Fields<'_>) -> Result<Dense> {
    use Architecture as A;
    Ok(match architecture {
        A::Qwen2Moe | A::Qwen3Moe | A::Qwen3Next => {
            let mut layers = fields.list("mlp_only_layers")?.unwrap_or_default();
            layers.sort_unstable();
            Dense::Listed { layers, step: fields.size_or("decoder_sparse_step", 1..=MAX_SIZE, 1)? }
        }
        A::DeepSeekV2 | A::DeepSeekV3 => Dense::First {
            num: fields.size_or("first_k_dense_replace", 0..=MAX_SIZE, if architecture == A::DeepSeekV3 { 3 } else { 0 })?,
            step: fields.size_or("moe_layer_freq", 1..=MAX_SIZE, 1)?,
        },
        A::Qwen35Moe | A::InternS2Mobius | A::Mixtral | A::Olmoe => Dense::None,
    })
}

/// The keys of one object.
struct Fields<'a> {
    object: &'a HashMap<String, Json>,
    /// Where the object is, for messages.
    prefix: &'static str,
    path: &'a Path,
}

impl<'a> Fields<'a> {
    fn wrong(&self, key: &str, got: impl fmt::Display, want: impl fmt::Display) -> Error {
        wrong(self.path, format!("`{}{key}` is {got}, expected {want}", self.prefix))
    }

    /// A value that is there and not null.
    fn get(&self, key: &str) -> Option<&'a Json> {
        self.object.get(key).filter(|value| **value != Json::Null)
    }

    fn is_null(&self, key: &str) -> bool {
        self.object.get(key) == Some(&Json::Null)
    }

    fn count(&self, key: &str, value: &Json, range: RangeInclusive<u64>) -> Result<usize> {
        let count = match value {
            Json::Number(number) => number.as_u64().filter(|count| range.contains(count)),
            _ => None,
        };
        count
            .map(|count| count as usize)
            .ok_or_else(|| self.wrong(key, value, format!("an integer from {} to {}", range.start(), range.end())))
    }

    /// A size of at least 1 under one of several names; all that are there agree.
    fn size(&self, keys: &[&str]) -> Result<usize> {
        let mut found = None;
        for key in keys {
            let Some(value) = self.get(key) else { continue };
            let size = self.count(key, value, 1..=MAX_SIZE)?;
            match found {
                Some((first, other)) if size != other => {
                    return Err(self.wrong(key, size, format!("{other} as in `{}{first}`", self.prefix)));
                }
                _ => found = Some((key, size)),
            }
        }
        found.map(|(_, size)| size).ok_or_else(|| wrong(self.path, format!("`{}{}` is missing", self.prefix, keys.join("` or `"))))
    }

    fn size_from(&self, key: &str, range: RangeInclusive<u64>) -> Result<usize> {
        match self.get(key) {
            Some(value) => self.count(key, value, range),
            None => Err(wrong(self.path, format!("`{}{key}` is missing", self.prefix))),
        }
    }

    fn size_or(&self, key: &str, range: RangeInclusive<u64>, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |value| self.count(key, value, range))
    }

    fn list(&self, key: &str) -> Result<Option<Vec<usize>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::List(values)) => values.iter().map(|value| self.count(key, value, 0..=MAX_SIZE)).collect::<Result<_>>().map(Some),
            Some(other) => Err(self.wrong(key, other, "a list of integers")),
        }
    }

    /// Null counts as false, as in Python.
    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.object.get(key) {
            None => Ok(default),
            Some(Json::Null) => Ok(false),
            Some(Json::Bool(value)) => Ok(*value),
            Some(other) => Err(self.wrong(key, other, "true or false")),
        }
    }

    fn number(&self, key: &str, default: f32) -> Result<f32> {
        match self.get(key) {
            None => Ok(default),
            Some(Json::Number(number)) => match number.as_f64().map(|value| value as f32) {
                Some(value) if value.is_finite() => Ok(value),
                _ => Err(self.wrong(key, number, "a number that f32 holds")),
            },
            Some(other) => Err(self.wrong(key, other, "a number")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, other, "a string")),
        }
    }

    fn expect_text(&self, key: &str, want: &str) -> Result<()> {
        match self.text(key)? {
            Some(got) if got != want => Err(self.wrong(key, format!("`{}`", quoted(got)), want)),
            _ => Ok(()),
        }
    }

    /// The model's type, under its new or its old key.
    fn dtype(&self) -> Result<Option<DType>> {
        for key in ["dtype", "torch_dtype"] {
            let Some(name) = self.text(key)? else { continue };
            return match name.strip_prefix("torch.").unwrap_or(name) {
                "bfloat16" => Ok(Some(DType::BF16)),
                "float16" => Ok(Some(DType::F16)),
                "float32" => Ok(Some(DType::F32)),
                "auto" => Ok(None),
                _ => Err(self.wrong(key, format!("`{}`", quoted(name)), "bfloat16, float16 or float32")),
            };
        }
        Ok(None)
    }
}
