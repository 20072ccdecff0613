//! Layers of real checkpoints beside what transformers recorded of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::{Layout, Reduce, World};
use moe_kernels::layer::{Block, BlockConfig, Checkpoint, CommonWeights, Golden, Matrix, Mlp, MoeLayer, Recording, RouteSource};
use moe_kernels::ops::gate::Rounding;
use moe_kernels::routing::{Family, Routes};
use moe_kernels::{Backend, DType, Error, Expert, TensorView, TensorViewMut};

const MODELS: [&str; 4] = ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral"];

type Outcome = Result<(), Failed>;
type Test = fn(&Sample) -> Outcome;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let all: [(&str, Test); 6] = [
        ("router", router),
        ("f32", f32_run),
        ("bf16 framework", framework),
        ("bf16 fused", fused),
        ("by token", by_token),
        ("ranks and rows at a time", independence),
    ];
    let trial = |(name, test): (&str, Test), model: &'static str| {
        Trial::test(format!("equality::{model}, {name}"), move || test(&Sample::open(model)?))
    };
    all.into_iter().flat_map(|named| MODELS.map(|model| trial(named, model))).collect()
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(message().into()) }
}

/// A model's layer 1 and its recording.
struct Sample {
    model: &'static str,
    layer: MoeLayer,
    common: Arc<CommonWeights>,
    golden: Golden,
}

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/checkpoints").join(model)
}

/// How a block is run.
#[derive(Debug, Clone, Copy)]
struct Way {
    rounding: Rounding,
    is_by_token: bool,
    ranks: usize,
    /// Rows of a rank in one call, at most.
    rows_at_a_time: usize,
}

const ROUNDINGS: [Rounding; 2] = [Rounding::Framework, Rounding::Fused];

const WAYS: [(DType, Rounding); 4] =
    [(DType::F32, Rounding::Framework), (DType::F32, Rounding::Fused), (DType::BF16, Rounding::Framework), (DType::BF16, Rounding::Fused)];

/// One rank, all tokens at once, expert rows summed at the source.
const WHOLE: Way = Way { rounding: Rounding::Framework, is_by_token: false, ranks: 1, rows_at_a_time: 48 };

#[derive(Debug, Default, Clone, PartialEq)]
struct Got {
    logits: Vec<f32>,
    routes: Routes,
    routed: Vec<u8>,
    output: Vec<u8>,
}

impl Sample {
    fn open(model: &'static str) -> Result<Self, Error> {
        let layer = Checkpoint::open(&folder(model))?.layer(1)?;
        let golden = Golden::open(&folder(model).join("golden_layer1.safetensors"), layer.shape())?;
        Ok(Sample { model, common: Arc::new(layer.common()?), layer, golden })
    }

    fn recorded(&self, dtype: DType) -> Result<&Recording, Failed> {
        self.golden.recordings().iter().find(|run| run.dtype == dtype).ok_or_else(|| format!("no run in {dtype}").into())
    }

    /// The layer on a recorded input; `given`: the routes of all tokens, else the router chooses.
    fn run(&self, recording: &Recording, way: Way, given: Option<&Routes>) -> Result<Got, Failed> {
        let shape = *self.layer.shape();
        let (hidden, num_tokens) = (shape.hidden, recording.num_tokens());
        let mut config = BlockConfig { rounding: way.rounding, ..BlockConfig::new(shape, recording.dtype, way.rows_at_a_time) };
        if !way.is_by_token {
            (config.layout, config.reduce) = (Layout::ByExpert { segment_align: 1 }, Reduce::AtSource);
        }
        let placement = config.ep().placement(way.ranks)?;
        let most = num_tokens.div_ceil(way.ranks);
        let ranks = World::run(&Backend::cpu(), way.ranks, |world| {
            let rank = world.rank().index();
            let experts = Arc::new(self.layer.experts(placement.experts_of(world.rank()))?);
            let mut block = Block::new(&world, config.clone(), self.common.clone(), experts)?;
            let tokens = (rank * most).min(num_tokens)..((rank + 1) * most).min(num_tokens);
            let row_bytes = hidden * recording.dtype.size();
            let mut got = Got { routes: Routes { k: shape.router.k, ..Routes::default() }, ..Got::default() };
            // Every rank makes as many calls, some perhaps without tokens.
            for first in (0..most).step_by(way.rows_at_a_time) {
                let first = (tokens.start + first).min(tokens.end);
                let last = (first + way.rows_at_a_time).min(tokens.end);
                let x = aligned(&recording.input[first * row_bytes..last * row_bytes]);
                let x = TensorView::from_bytes(
                    &bytemuck::cast_slice(&x)[..(last - first) * row_bytes],
                    recording.dtype,
                    &[last - first, hidden],
                )?;
                let routes = given.map(|all| {
                    let at = first * all.k..last * all.k;
                    let (topk_idx, topk_weights) = (all.topk_idx[at.clone()].to_vec(), all.topk_weights[at].to_vec());
                    Routes { topk_idx, topk_weights, num_tokens: last - first, k: all.k }
                });
                let source = routes.as_ref().map_or(RouteSource::Router, RouteSource::Given);
                let mut out = aligned(&vec![0xFF; (last - first) * row_bytes]);
                for is_routed in [true, false] {
                    let out: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut out)[..(last - first) * row_bytes];
                    let view = TensorViewMut::from_bytes(out, recording.dtype, &[last - first, hidden])?;
                    if is_routed {
                        block.forward_routed(&x, source, view)?;
                        got.routed.extend_from_slice(out);
                    } else {
                        block.forward(&x, source, view)?;
                        got.output.extend_from_slice(out);
                    }
                }
                got.logits.extend(block.logits());
                got.routes.num_tokens += last - first;
                got.routes.topk_idx.extend(&block.routes().topk_idx);
                got.routes.topk_weights.extend(&block.routes().topk_weights);
            }
            Ok(got)
        })?;
        let mut all = Got { routes: Routes { k: shape.router.k, ..Routes::default() }, ..Got::default() };
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
}

/// Bytes at a multiple of 16.
fn aligned(bytes: &[u8]) -> Vec<u128> {
    let mut all = vec![0u128; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut::<_, u8>(&mut all)[..bytes.len()].copy_from_slice(bytes);
    all
}

fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect(),
        // A bf16 is the upper half of an f32.
        _ => bytes.chunks_exact(2).map(|b| f32::from_bits((u16::from_le_bytes([b[0], b[1]]) as u32) << 16) as f64).collect(),
    }
}

/// |got - want| / |want|.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

fn near(what: &str, got: &[f64], want: &[f64], bound: f64) -> Outcome {
    let error = error(got, want);
    ensure(error <= bound, || format!("{what}: error {error:.3e}, at most {bound:.0e}"))
}

/// Routed sum and output.
fn rows_near(what: &str, recording: &Recording, got: &Got, bound: f64) -> Outcome {
    let dtype = recording.dtype;
    near(&format!("{what}, routed sum"), &values(dtype, &got.routed), &values(dtype, &recording.routed), bound)?;
    near(&format!("{what}, output"), &values(dtype, &got.output), &values(dtype, &recording.output), bound)
}

/// Tokens with other experts than recorded.
fn other_experts(got: &Routes, recorded: &Routes) -> Vec<usize> {
    let sorted = |routes: &Routes, token| {
        let mut ids = routes.idx_of(token).to_vec();
        ids.sort();
        ids
    };
    (0..recorded.num_tokens).filter(|&token| sorted(got, token) != sorted(recorded, token)).collect()
}

/// Weights of the experts that both chose.
fn weights_by_id(got: &Routes, recorded: &Routes) -> (Vec<f64>, Vec<f64>) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for token in 0..recorded.num_tokens {
        for (id, &weight) in got.idx_of(token).iter().zip(got.weights_of(token)) {
            if let Some(at) = recorded.idx_of(token).iter().position(|recorded| recorded == id) {
                ours.push(weight as f64);
                theirs.push(recorded.weights_of(token)[at] as f64);
            }
        }
    }
    (ours, theirs)
}

fn router(sample: &Sample) -> Outcome {
    for (dtype, rounding) in WAYS {
        let recording = sample.recorded(dtype)?;
        let got = sample.run(recording, Way { rounding, ..WHOLE }, None)?;
        let what = format!("{dtype}, {rounding:?}");
        // Of all four models only these tokens have two logits that tie for the last place.
        let ties: &[usize] = match (sample.model, dtype) {
            ("qwen2_moe", DType::BF16) => &[22],
            ("mixtral", DType::BF16) => &[6],
            _ => &[],
        };
        let others = other_experts(&got.routes, &recording.routes);
        ensure(others.iter().all(|token| ties.contains(token)), || format!("{what}: other experts for tokens {others:?}"))?;
        for token in others {
            // What one has and the other has not, is one expert each, and their logits are the same.
            let (ids, recorded) = (got.routes.idx_of(token), recording.routes.idx_of(token));
            let num_experts = sample.layer.shape().router.num_experts;
            let only = |ids: &[i32], others: &[i32]| -> Vec<f32> {
                let ids = ids.iter().filter(|id| !others.contains(id));
                ids.map(|&id| recording.logits[token * num_experts + id as usize]).collect()
            };
            let (ours, theirs) = (only(ids, recorded), only(recorded, ids));
            ensure(ours.len() == 1 && ours == theirs, || format!("{what}, token {token}: experts {ids:?}, recorded {recorded:?}"))?;
        }
        let wide = |values: &[f32]| values.iter().map(|&v| v as f64).collect::<Vec<_>>();
        let (weights, recorded_weights) = weights_by_id(&got.routes, &recording.routes);
        // `Fused` does not round logits: the error is that of the recorded ones (measured: logits 1.7e-3, weights 3.4e-3).
        let is_rounded = dtype == DType::BF16 && sample.model != "deepseek_v3";
        let [logits_bound, weights_bound] = match rounding {
            _ if !is_rounded => [2e-6; 2],
            Rounding::Framework => [2e-4; 2],
            Rounding::Fused => [4e-3, 8e-3],
        };
        near(&format!("{what}, logits"), &wide(&got.logits), &wide(&recording.logits), logits_bound)?;
        near(&format!("{what}, weights"), &weights, &recorded_weights, weights_bound)?;
    }
    Ok(())
}

fn f32_run(sample: &Sample) -> Outcome {
    let recording = sample.recorded(DType::F32)?;
    for rounding in ROUNDINGS {
        for routes in [None, Some(&recording.routes)] {
            let got = sample.run(recording, Way { rounding, ..WHOLE }, routes)?;
            rows_near(&format!("{rounding:?}, routes given: {}", routes.is_some()), recording, &got, 2e-6)?;
        }
    }
    Ok(())
}

/// The block's own routes, but the recorded row where it chose other experts.
fn own_routes(sample: &Sample, recording: &Recording, rounding: Rounding) -> Result<Routes, Failed> {
    let mut routes = sample.run(recording, Way { rounding, ..WHOLE }, None)?.routes;
    for token in other_experts(&routes, &recording.routes) {
        let at = token * routes.k..(token + 1) * routes.k;
        routes.topk_idx[at.clone()].copy_from_slice(recording.routes.idx_of(token));
        routes.topk_weights[at].copy_from_slice(recording.routes.weights_of(token));
    }
    Ok(routes)
}

fn framework(sample: &Sample) -> Outcome {
    let recording = sample.recorded(DType::BF16)?;
    for routes in [recording.routes.clone(), own_routes(sample, recording, Rounding::Framework)?] {
        rows_near("Framework", recording, &sample.run(recording, WHOLE, Some(&routes))?, 2e-4)?;
    }
    Ok(())
}

fn fused(sample: &Sample) -> Outcome {
    let recording = sample.recorded(DType::BF16)?;
    let way = Way { rounding: Rounding::Fused, ..WHOLE };
    rows_near("Fused, routes given", recording, &sample.run(recording, way, Some(&recording.routes))?, 8e-3)?;
    let got = sample.run(recording, way, Some(&own_routes(sample, recording, Rounding::Fused)?))?;
    rows_near("Fused", recording, &got, 8e-3)?;
    let (routed, output) = evaluate(sample, recording)?;
    near("Fused to f64, routed sum", &values(DType::BF16, &got.routed), &routed, 4e-3)?;
    near("Fused to f64, output", &values(DType::BF16, &got.output), &output, 4e-3)?;
    // The evaluation itself, in the run that rounds nothing.
    let recording = sample.recorded(DType::F32)?;
    let (routed, output) = evaluate(sample, recording)?;
    near("f32 recording to f64, routed sum", &values(DType::F32, &recording.routed), &routed, 2e-6)?;
    near("f32 recording to f64, output", &values(DType::F32, &recording.output), &output, 2e-6)
}

fn by_token(sample: &Sample) -> Outcome {
    let recording = sample.recorded(DType::BF16)?;
    for ranks in [1, 2, 4, 8] {
        for (rounding, bound) in [(Rounding::Framework, 5e-3), (Rounding::Fused, 8e-3)] {
            let got = sample.run(recording, Way { is_by_token: true, rounding, ranks, ..WHOLE }, Some(&recording.routes))?;
            rows_near(&format!("{rounding:?}, {ranks} ranks"), recording, &got, bound)?;
        }
    }
    Ok(())
}

fn independence(sample: &Sample) -> Outcome {
    for (dtype, rounding) in WAYS {
        let recording = sample.recorded(dtype)?;
        let want = sample.run(recording, Way { rounding, ..WHOLE }, None)?;
        for ranks in [1, 2, 4, 8] {
            for rows_at_a_time in [1, 3, 12, 48] {
                let got = sample.run(recording, Way { rounding, ranks, rows_at_a_time, ..WHOLE }, None)?;
                ensure(got == want, || format!("{dtype}, {rounding:?}: other bits with {ranks} ranks, {rows_at_a_time} rows at a time"))?;
            }
        }
    }
    Ok(())
}

/// The layer in f64, with the recorded choice of experts: routed sum and output.
fn evaluate(sample: &Sample, recording: &Recording) -> Result<(Vec<f64>, Vec<f64>), Failed> {
    let shape = sample.layer.shape();
    let ids: Vec<_> = (0..shape.router.num_experts as u32).map(Expert).collect();
    let experts = sample.layer.experts(&ids)?;
    let (mut all_routed, mut all) = (Vec::new(), Vec::new());
    for (token, x) in values(recording.dtype, &recording.input).chunks_exact(shape.hidden).enumerate() {
        let logits = product(&sample.common.router, x);
        let chosen = recording.routes.idx_of(token);
        let (scores, renormalize, scale): (Vec<f64>, bool, f64) = match shape.router.family {
            Family::Softmax { renormalize } => {
                let all: f64 = logits.iter().map(|l| l.exp()).sum();
                (logits.iter().map(|l| l.exp() / all).collect(), renormalize, 1.0)
            }
            Family::DeepSeekV3 { renormalize, scale, .. } => (logits.iter().map(|&l| sigmoid(l)).collect(), renormalize, scale as f64),
            other => return Err(format!("no sample is of {other:?}").into()),
        };
        let sum: f64 = chosen.iter().map(|&id| scores[id as usize]).sum();
        let mut routed = vec![0.0; shape.hidden];
        for &id in chosen {
            let weight = scores[id as usize] * scale / if renormalize { sum } else { 1.0 };
            let expert = experts.get(Expert(id as u32)).ok_or("an expert is missing")?;
            routed.iter_mut().zip(mlp(expert, x)).for_each(|(sum, y)| *sum += weight * y);
        }
        let mut output = routed.clone();
        if let Some(shared) = &sample.common.shared {
            let gate = sample.common.shared_gate.as_ref().map_or(1.0, |gate| sigmoid(product(gate, x)[0]));
            output.iter_mut().zip(mlp(shared, x)).for_each(|(sum, y)| *sum += gate * y);
        }
        all_routed.extend(routed);
        all.extend(output);
    }
    Ok((all_routed, all))
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn product(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    let weights = values(matrix.dtype(), matrix.bytes());
    weights.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn mlp(weights: &Mlp, x: &[f64]) -> Vec<f64> {
    let (gate, up) = (product(&weights.gate, x), product(&weights.up, x));
    let h: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g * sigmoid(*g) * u).collect();
    product(&weights.down, &h)
}
