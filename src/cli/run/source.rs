//! Which model, and where its routes come from: the layer's router, a synthetic kind, or a recorded trace.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use moe_kernels::layer::{PRESETS, Preset, TINY};
use moe_kernels::measure::report::count;
use moe_kernels::routing::synthetic::Synthetic;
use moe_kernels::routing::trace::{MAX_LINE_BYTES, Options, WARMUP_ROWS};
use moe_kernels::routing::{Routes, Trace};
use moe_kernels::{Error, Result};
use serde_json::Value;

use super::model::Model;
use super::options::{Arguments, DEFAULT_TOKENS, Routing, invalid};

/// What is routed, and how.
pub struct Source {
    /// The model.
    pub model: Model,
    /// Tokens of all ranks.
    pub num_tokens: usize,
    /// Recorded or synthetic routes of each rank's tokens; `None`: the router makes them.
    pub routes: Option<Vec<Routes>>,
    /// For people.
    pub text: String,
    /// For the record.
    pub recorded: Option<Recorded>,
    /// What a reader of the figures should know.
    pub notes: Vec<String>,
}

/// What was taken from a trace.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Recorded {
    file: String,
    model_id: Option<String>,
    layer: u32,
    num_rows: usize,
    num_warmup_rows: usize,
    warmup_kept: bool,
}

impl Source {
    /// Chooses model and tokens, and reads or draws the routes. The layer of a checkpoint is the model if there is one.
    ///
    /// # Errors
    /// An unknown model or kind; a trace that cannot be read, is malformed, or does not fit the model.
    pub fn choose(arguments: &Arguments, checkpoint: Option<Model>) -> Result<Source> {
        match &arguments.trace {
            Some(path) => Self::recorded(arguments, path, checkpoint),
            None => Self::made(arguments, checkpoint),
        }
    }

    fn made(arguments: &Arguments, checkpoint: Option<Model>) -> Result<Source> {
        let named = || arguments.model.as_deref().map_or(Ok(Preset::default().into()), Model::named);
        let model = checkpoint.map_or_else(named, Ok)?;
        let num_tokens = arguments.tokens.unwrap_or(DEFAULT_TOKENS);
        let (routes, text) = match arguments.routing()? {
            Routing::Router => (None, "the layer's router, on random tokens".to_owned()),
            Routing::Synthetic(kind) => {
                let router = model.shape.router;
                let of_rank = |rank: usize| {
                    let synthetic =
                        Synthetic { kind, num_experts: router.num_experts, k: router.k, seed: arguments.seed, stream: rank as u64 };
                    synthetic.routes(share(num_tokens, arguments.ranks, rank).len())
                };
                let routes: Result<Vec<Routes>> = (0..arguments.ranks).map(of_rank).collect();
                (Some(routes?), format!("synthetic, {kind}, seed {}", arguments.seed))
            }
        };
        Ok(Source { model, num_tokens, routes, text, recorded: None, notes: Vec::new() })
    }

    fn recorded(arguments: &Arguments, path: &Path, checkpoint: Option<Model>) -> Result<Source> {
        let mut notes = Vec::new();
        let model_id = recorded_model(path);
        let named = model_id.as_deref().and_then(preset_of);
        let asked = match (checkpoint, arguments.model.as_deref()) {
            (Some(model), _) => Some(model),
            (None, name) => name.map(Model::named).transpose()?,
        };
        let model = match (asked, named) {
            (Some(model), named) => {
                if let (Some(named), Some(id)) = (named, &model_id)
                    && named.name != model.name
                {
                    notes.push(format!("the trace was recorded from {id}, and runs as {}, as asked", model.name));
                }
                model
            }
            (None, Some(named)) => named.into(),
            (None, None) => {
                let preset = Preset::default();
                let id = model_id.as_deref().map_or("no model".to_owned(), |id| format!("{id}, which is no preset"));
                notes.push(format!("the trace names {id}: it runs as {}; --model chooses another one", preset.name));
                preset.into()
            }
        };
        let trace = read(arguments, path, &model)?;
        let kept = trace.routes.num_tokens;
        let num_tokens = arguments.tokens.unwrap_or_else(|| kept.min(DEFAULT_TOKENS));
        let all = trace.tokens(num_tokens)?;
        if num_tokens > kept {
            notes.push(format!(
                "the trace has {} rows for {} tokens: it starts again after its last one",
                count(kept as u64),
                count(num_tokens as u64)
            ));
        }
        if trace.num_warmup > 0 {
            let what = if arguments.keep_warmup { "kept, as asked" } else { "left out; --keep-warmup keeps them" };
            notes.push(format!(
                "{} of the trace's {} rows are an engine's warm-up (runs of {WARMUP_ROWS} and more identical rows): {what}",
                count(trace.num_warmup as u64),
                count(trace.num_rows as u64)
            ));
        }
        let k = all.k;
        let of_rank = |rank: usize| {
            let tokens = share(num_tokens, arguments.ranks, rank);
            let routes = tokens.start * k..tokens.end * k;
            Routes {
                topk_idx: all.topk_idx[routes.clone()].to_vec(),
                topk_weights: all.topk_weights[routes].to_vec(),
                num_tokens: tokens.len(),
                k,
            }
        };
        Ok(Source {
            model,
            num_tokens,
            routes: Some((0..arguments.ranks).map(of_rank).collect()),
            text: format!("recorded, {}, layer {}", path.display(), trace.layer),
            recorded: Some(Recorded {
                file: path.display().to_string(),
                model_id,
                layer: trace.layer,
                num_rows: trace.num_rows,
                num_warmup_rows: trace.num_warmup,
                warmup_kept: arguments.keep_warmup,
            }),
            notes,
        })
    }
}

/// The tokens of `rank`: contiguous, as even as they divide.
pub fn share(num_tokens: usize, ranks: usize, rank: usize) -> std::ops::Range<usize> {
    // At most 2^19 tokens and 64 ranks (checked), so the products fit.
    rank * num_tokens / ranks..(rank + 1) * num_tokens / ranks
}

/// Reads a trace for a model, and says what to change when it is another model's.
fn read(arguments: &Arguments, path: &Path, model: &Model) -> Result<Trace> {
    let router = model.shape.router;
    let options = Options { num_experts: Some(router.num_experts), layer: arguments.trace_layer, keep_warmup: arguments.keep_warmup };
    let of_any_model = || Trace::read(path, &Options { num_experts: None, ..options });
    match Trace::read(path, &options) {
        Ok(trace) if trace.routes.num_tokens > 0 && trace.routes.k != router.k => {
            let got = format!("{} experts a token", trace.routes.k);
            let want = format!("{}, as {} has; {}", router.k, model.name, others(&of_any_model()?));
            Err(invalid(&format!("{}: topk_ids", path.display()), got, want))
        }
        // Sound for more experts than this model has: then the model is what does not fit.
        Err(Error::Format { path, line, why }) => match of_any_model() {
            Ok(trace) => {
                let why = format!("{why}, as {} has ({} a token); {}", model.name, router.k, others(&trace));
                Err(Error::Format { path, line, why })
            }
            Err(_) => Err(Error::Format { path, line, why }),
        },
        result => result,
    }
}

/// Which presets a trace fits: as many experts a token, and as many experts, of which a trace may not have used the last ones.
fn others(trace: &Trace) -> String {
    let k = trace.routes.k;
    let fits = |preset: &&Preset| preset.shape.router.k == k && preset.shape.router.num_experts >= trace.num_experts;
    let nearest = PRESETS.iter().filter(fits).min_by_key(|preset| preset.shape.router.num_experts);
    let choice = nearest.map_or("no preset has that".to_owned(), |preset| format!("--model {} would fit", preset.name));
    format!("the trace uses {} experts and {k} a token: {choice}", trace.num_experts)
}

/// The model that the meta line of a trace names. A file without one, or with a broken one, is the reader's business.
fn recorded_model(path: &Path) -> Option<String> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line).ok()?;
    let meta: Value = serde_json::from_slice(&line).ok()?;
    (meta.get("type")? == "meta").then_some(())?;
    meta.get("model_id")?.as_str().map(str::to_owned)
}

/// The preset that a model id such as `Qwen/Qwen1.5-MoE-A2.7B-Chat` is a variant of: the longest name with which its last part begins.
fn preset_of(model_id: &str) -> Option<Preset> {
    let id = model_id.rsplit('/').next().unwrap_or_default().to_lowercase();
    let is_variant = |preset: &&Preset| {
        let rest = id.strip_prefix(&preset.name.to_lowercase());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_']))
    };
    PRESETS.iter().chain([&TINY]).filter(is_variant).max_by_key(|preset| preset.name.len()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_of_a_model_have_its_shape() {
        let name = |id| preset_of(id).map(|preset| preset.name);
        assert_eq!(name("Qwen/Qwen1.5-MoE-A2.7B-Chat"), Some("Qwen1.5-MoE-A2.7B"));
        assert_eq!(name("allenai/OLMoE-1B-7B-0924"), Some("OLMoE-1B-7B"));
        assert_eq!(name("deepseek-v3"), Some("DeepSeek-V3"));
        assert_eq!(name("deepseek-ai/DeepSeek-V3.1"), None);
        assert_eq!(name(""), None);
    }

    #[test]
    fn every_token_has_one_rank() {
        for (num_tokens, ranks) in [(0, 3), (1, 4), (7, 3), (2048, 64)] {
            let shares: Vec<usize> = (0..ranks).flat_map(|rank| share(num_tokens, ranks, rank)).collect();
            assert_eq!(shares, (0..num_tokens).collect::<Vec<_>>());
        }
    }
}
