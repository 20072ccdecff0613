//! The options of `moe run`, and what they come to.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use moe_kernels::ep::{self, MAX_RANKS, MAX_TOKENS};
use moe_kernels::layer::BlockConfig;
use moe_kernels::ops::gate::Rounding;
use moe_kernels::routing::synthetic::Kind;
use moe_kernels::{Backend, DType, Error, Result};

use super::model::Model;
use crate::names::{LayoutKind, ModeKind, ReduceKind, WireKind};

/// Tokens of a run that does not say how many.
pub const DEFAULT_TOKENS: usize = 2048;

/// Bound of a rank's waits. Arbitrary: ranks that share a busy machine's cores wait for each other's experts, a minute and more in the largest models.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Options of `moe run`.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Model whose layer is run, with its true shape [default: the one that a trace names, else Qwen1.5-MoE-A2.7B]
    #[arg(long, value_name = "PRESET")]
    pub model: Option<String>,
    /// Folder of a Hugging Face model: a layer with its own shape, router and weights
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub checkpoint: Option<PathBuf>,
    /// Layer to take from a checkpoint, counted from 0 [default: the first MoE layer]
    #[arg(long, value_name = "N", requires = "checkpoint")]
    pub layer: Option<usize>,
    /// Recorded input and output of that layer: compares with it, in every recorded type and with both roundings, instead of measuring
    /// [default: golden_layerN.safetensors in the checkpoint's folder, unless --trace, --routing or --tokens is given]
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    pub golden: Option<PathBuf>,
    /// Recorded routing: a file of JSON lines
    #[arg(long, value_name = "FILE", conflicts_with = "routing")]
    pub trace: Option<PathBuf>,
    /// Routing without a trace: router (the layer's own), uniform, even, one, zipf:S (for example zipf:0.7)
    #[arg(long, value_name = "KIND", default_value = "router")]
    pub routing: String,
    /// Layer to take from a trace of several
    #[arg(long, value_name = "N", requires = "trace")]
    pub trace_layer: Option<u32>,
    /// Keep the rows that an engine's warm-up left in a trace
    #[arg(long, requires = "trace")]
    pub keep_warmup: bool,
    /// Tokens of all ranks together [default: 2048, or the rows of a shorter trace]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Ranks, each with its own experts and tokens: threads of this process. Under torchrun the processes that it started are the ranks
    #[arg(long, value_name = "R", default_value_t = 4)]
    pub ranks: usize,
    /// Each rank is a process of its own
    #[arg(long)]
    pub processes: bool,
    /// Where it runs: auto or cpu
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// How received rows are arranged [default: by-token, or by-expert with a --reduce that needs it]
    #[arg(long)]
    pub layout: Option<LayoutKind>,
    /// Rows to a multiple of which a segment is padded (by-expert) [default: 1]
    #[arg(long, value_name = "N")]
    pub segment_align: Option<usize>,
    /// Rows of each expert's segment (by-expert-fixed) [default: all tokens]
    #[arg(long, value_name = "N")]
    pub rows_per_expert: Option<usize>,
    /// Where expert rows are summed [default: at-rank, or at-source for a comparison with a recording]
    #[arg(long)]
    pub reduce: Option<ReduceKind>,
    /// Where results of single steps are rounded; a comparison with a recording does both
    #[arg(long, value_enum, default_value_t = RoundingKind::Fused)]
    pub rounding: RoundingKind,
    /// Type of tokens and results: bf16, f16 or f32
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub dtype: String,
    /// Type of the weights: bf16, f16, f32 or fp8 (e4m3 with a scale per 128 x 128) [default: that of the tokens]
    #[arg(long, value_name = "TYPE", conflicts_with = "checkpoint")]
    pub weights: Option<String>,
    /// Protocol of dispatch and combine
    #[arg(long, value_enum, default_value_t = ModeKind::Throughput)]
    pub mode: ModeKind,
    /// In which form rows travel back
    #[arg(long, value_enum, default_value_t = WireKind::AsIs)]
    pub wire: WireKind,
    /// Measured iterations, after one that is not
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub iterations: usize,
    /// Tokens that are computed again and checked
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub check_tokens: usize,
    /// Seed of weights, tokens and synthetic routing
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write everything measured, and the environment, to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Names of [`Rounding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoundingKind {
    /// As few times as possible
    Fused,
    /// After each step, as transformers does
    Framework,
}

/// The name of a rounding on the command line.
pub fn rounding_name(rounding: Rounding) -> String {
    match rounding {
        Rounding::Fused => "fused",
        Rounding::Framework => "framework",
    }
    .into()
}

/// Where routes come from when there is no trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// The layer's router.
    Router,
    /// Drawn from a seed.
    Synthetic(Kind),
}

pub fn invalid(what: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::Invalid { op: "run", what: what.into(), got: got.to_string(), want: want.to_string() }
}

impl Arguments {
    /// Fails for a number that no run can have, before anything is read.
    pub fn check(&self) -> Result<()> {
        let numbers = [
            ("--ranks", self.ranks, MAX_RANKS),
            ("--tokens", self.tokens.unwrap_or(1), MAX_TOKENS),
            ("--check-tokens", self.check_tokens, MAX_TOKENS),
            // Arbitrary: more than anybody waits for, and few enough that the samples stay small.
            ("--iterations", self.iterations, 10_000),
        ];
        match numbers.into_iter().find(|&(_, got, most)| !(1..=most).contains(&got)) {
            Some((what, got, most)) => Err(invalid(what, got, format!("1 to {most}"))),
            None => Ok(()),
        }
    }

    pub fn backend(&self) -> Result<Backend> {
        Backend::from_name(&self.backend)
    }

    pub fn routing(&self) -> Result<Routing> {
        match self.routing.as_str() {
            "router" => Ok(Routing::Router),
            kind => kind.parse().map(Routing::Synthetic).map_err(|_| {
                invalid("--routing", format!("`{kind}`"), "router, uniform, even, one, or zipf:S with S from 0 to 10, for example zipf:0.7")
            }),
        }
    }

    /// The block of `model` for `num_tokens` tokens of all ranks; `is_compared`: with a recording.
    pub fn block(&self, model: &Model, num_tokens: usize, is_compared: bool) -> Result<BlockConfig> {
        let experts = model.shape.router.num_experts;
        if self.ranks > experts {
            return Err(invalid("--ranks", self.ranks, format!("at most the {experts} experts of {}", model.name)));
        }
        let dtype = float("--dtype", &self.dtype)?;
        let weight_dtype = match self.weights.as_deref() {
            None => model.layer.as_ref().map_or(dtype, |layer| layer.weight_dtype()),
            Some("fp8" | "e4m3") => DType::E4M3,
            Some(name) => float("--weights", name).map_err(|_| invalid("--weights", format!("`{name}`"), "bf16, f16, f32 or fp8"))?,
        };
        let reduce = self.reduce.unwrap_or(match self.layout {
            None | Some(LayoutKind::Expert | LayoutKind::ExpertFixed) if is_compared => ReduceKind::Source,
            _ => ReduceKind::Rank,
        });
        let layout = match self.layout {
            Some(layout) => layout,
            None if reduce == ReduceKind::Rank => LayoutKind::Token,
            None => LayoutKind::Expert,
        };
        let layout = match (layout, self.segment_align, self.rows_per_expert) {
            (LayoutKind::Token, None, None) => ep::Layout::ByToken,
            (LayoutKind::Expert, align, None) => ep::Layout::ByExpert { segment_align: align.unwrap_or(1) },
            (LayoutKind::ExpertFixed, None, rows) => ep::Layout::ByExpertFixed { rows_per_expert: rows.unwrap_or(num_tokens) },
            (LayoutKind::Token | LayoutKind::ExpertFixed, Some(align), _) => {
                return Err(invalid("--segment-align", align, "absent, unless the layout is by-expert"));
            }
            (_, _, Some(rows)) => return Err(invalid("--rows-per-expert", rows, "absent, unless the layout is by-expert-fixed")),
        };
        Ok(BlockConfig {
            weight_dtype,
            layout,
            rounding: match self.rounding {
                RoundingKind::Fused => Rounding::Fused,
                RoundingKind::Framework => Rounding::Framework,
            },
            reduce: reduce.value(),
            wire: self.wire.value(),
            mode: self.mode.value(),
            timeout: TIMEOUT,
            ..BlockConfig::new(model.shape, dtype, num_tokens.div_ceil(self.ranks).max(1))
        })
    }
}

fn float(what: &str, name: &str) -> Result<DType> {
    match name.parse() {
        Ok(dtype) if DType::is_float(dtype) => Ok(dtype),
        _ => Err(invalid(what, format!("`{name}`"), "bf16, f16 or f32")),
    }
}
