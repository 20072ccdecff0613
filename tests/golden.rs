//! Tests of the comparison with recordings: it accepts what is right, finds what is wrong, and names what is broken.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::{Layout, Reduce, Wire};
use moe_kernels::layer::{BlockConfig, Checkpoint, CommonWeights, Comparison, Golden, MoeLayer, golden};
use moe_kernels::ops::gate::Rounding;
use moe_kernels::{Backend, DType, Error};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

type Outcome = Result<(), Failed>;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let models = ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral", "olmoe", "qwen3_next", "qwen3_5_moe", "deepseek_v2"];
    let mut all: Vec<_> =
        models.map(|model| Trial::test(format!("golden::{model} is right in every form"), move || every_form(model))).into();
    all.push(Trial::test("golden::what is wrong is found", wrong_is_found));
    all.push(Trial::test("golden::broken files name the tensor", broken_files));
    all
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(message().into()) }
}

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/checkpoints").join(model)
}

fn layer(model: &str) -> Result<MoeLayer, Error> {
    Checkpoint::open(&folder(model))?.layer(1)
}

fn compare(layer: &MoeLayer, config: &BlockConfig, ranks: usize, golden: &Golden) -> Result<Vec<Comparison>, Error> {
    let placement = config.ep().placement(ranks)?;
    let of_rank = |rank: usize| layer.experts(placement.experts_of(moe_kernels::Rank(rank as u32))).map(Arc::new);
    let experts = (0..ranks).map(of_rank).collect::<Result<Vec<_>, _>>()?;
    let common: Arc<CommonWeights> = Arc::new(layer.common()?);
    golden::compare(&Backend::cpu(), config, &common, &experts, golden)
}

fn every_form(model: &str) -> Outcome {
    let layer = layer(model)?;
    let golden = Golden::open(&folder(model).join("golden_layer1.safetensors"), layer.shape())?;
    // One token at most, and other types: those of the recording count.
    let config = BlockConfig::new(*layer.shape(), DType::F16, 1);
    let by_expert = Layout::ByExpert { segment_align: 4 };
    let forms = [
        (1, config.clone()),
        (3, config.clone()),
        (8, BlockConfig { layout: by_expert, reduce: Reduce::AtSource, ..config.clone() }),
        (2, BlockConfig { layout: by_expert, reduce: Reduce::AtRankF32, ..config.clone() }),
        (4, BlockConfig { layout: Layout::ByExpertFixed { rows_per_expert: 1 }, ..config.clone() }),
        (2, BlockConfig { wire: Wire::Fp8Block, ..config }),
    ];
    for (ranks, config) in forms {
        let found = compare(&layer, &config, ranks, &golden)?;
        let ways: Vec<_> = found.iter().map(|c| (c.dtype, c.rounding, c.num_tokens, c.num_wrong_ids)).collect();
        let ways_of = |dtype| [Rounding::Framework, Rounding::Fused].map(|rounding| (dtype, rounding, 48, 0));
        ensure(ways == [ways_of(DType::F32), ways_of(DType::BF16)].concat(), || format!("{ways:?}"))?;
        ensure(found.iter().all(Comparison::is_right), || format!("{ranks} ranks, {config:?}: {found:#?}"))?;
        // Of all samples only these two have a token whose recorded logits tie for the last place.
        let ties: usize = found.iter().map(|c| c.num_ties).sum();
        ensure(ties == 0 || model == "qwen2_moe" || model == "mixtral", || format!("{ties} ties: {found:#?}"))?;
    }
    Ok(())
}

/// Tensors of a file: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The recording of a model after `change`, read for its layer.
fn changed(model: &str, layer: &MoeLayer, change: impl Fn(&mut Tensors)) -> Result<Result<Golden, Error>, Failed> {
    let bytes = std::fs::read(folder(model).join("golden_layer1.safetensors"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let mut tensors: Tensors =
        file.iter().map(|(name, t)| (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    change(&mut tensors);
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name, view)))
        .collect::<Result<_, _>>()?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("changed.safetensors");
    std::fs::write(&path, safetensors::serialize(views, None)?)?;
    Ok(Golden::open(&path, layer.shape()))
}

fn bytes<'a>(tensors: &'a mut Tensors, name: &str) -> &'a mut [u8] {
    &mut tensors.get_mut(name).expect("the recording has this tensor").2
}

/// Flips the sign of `num` values of `size` bytes from value `first` on.
fn negate(tensors: &mut Tensors, name: &str, size: usize, first: usize, num: usize) {
    for i in first..first + num {
        bytes(tensors, name)[(i + 1) * size - 1] ^= 0x80;
    }
}

type Change = fn(&mut Tensors);

fn wrong_is_found() -> Outcome {
    let layer = layer("qwen2_moe")?;
    let config = BlockConfig::new(*layer.shape(), DType::BF16, 48);
    // What is changed, in which run, and what must be named.
    let changes: [(Change, DType, &str); 6] = [
        (|t| negate(t, "bf16.output", 2, 5 * 128, 128), DType::BF16, "output"),
        (|t| negate(t, "bf16.experts.0", 2, 5 * 128, 128), DType::BF16, "routed sum"),
        (|t| negate(t, "f32.gate.0", 4, 77, 1), DType::F32, "router logits"),
        (|t| negate(t, "f32.gate.1", 4, 7, 1), DType::F32, "router weights"),
        (|t| negate(t, "f32.input", 4, 128, 1), DType::F32, "output"),
        // Token 3's first choice becomes an expert that it has not chosen, whose logit is another.
        (
            |t| {
                let chosen: Vec<u8> = (0..4).map(|j| bytes(t, "f32.gate.2")[8 * (3 * 4 + j)]).collect();
                let other = (0..16).find(|id| !chosen.contains(id)).expect("twelve are free");
                bytes(t, "f32.gate.2")[8 * 3 * 4] = other;
            },
            DType::F32,
            "1 tokens have other experts; token 3",
        ),
    ];
    for (change, dtype, named) in changes {
        let golden = changed("qwen2_moe", &layer, change)??;
        for comparison in compare(&layer, &config, 1, &golden)? {
            let is_named = comparison.problems.iter().any(|problem| problem.starts_with(named));
            ensure(is_named == (comparison.dtype == dtype), || format!("{named} in {dtype}: {comparison:#?}"))?;
            ensure(comparison.is_right() != is_named, || format!("{named} in {dtype}: {comparison:#?}"))?;
        }
    }
    // Not a number is no small error.
    let golden = changed("qwen2_moe", &layer, |t| bytes(t, "f32.output")[..4].fill(0xFF))??;
    ensure(!compare(&layer, &config, 1, &golden)?[0].is_right(), || "NaN was accepted".into())?;
    // Another family's router.
    let mut shape = *layer.shape();
    shape.router.family = moe_kernels::routing::Family::Softmax { renormalize: true };
    let golden = changed("qwen2_moe", &layer, |_| ())??;
    let found = compare(&layer, &BlockConfig::new(shape, DType::BF16, 48), 1, &golden)?;
    let is_found = |c: &Comparison| c.problems.len() == 1 && c.problems[0].starts_with("router weights");
    ensure(found.iter().all(is_found), || format!("renormalised: {found:#?}"))
}

/// A change, and the words of the error that it must lead to.
type Broken = (Box<dyn Fn(&mut Tensors)>, &'static [&'static str]);

fn broken_files() -> Outcome {
    let layer = layer("mixtral")?;
    let as_type = |name: &'static str, dtype: Dtype| move |t: &mut Tensors| t.get_mut(name).expect("is there").0 = dtype;
    let as_shape = |name: &'static str, shape: &[usize]| {
        let shape = shape.to_vec();
        move |t: &mut Tensors| t.get_mut(name).expect("is there").1 = shape.clone()
    };
    let without = |name: &'static str| {
        move |t: &mut Tensors| {
            t.remove(name).expect("is there");
        }
    };
    let cases: Vec<Broken> = vec![
        (Box::new(|t: &mut Tensors| t.retain(|name, _| !name.ends_with(".input"))), &["<run>.input"]),
        (Box::new(without("f32.output")), &["f32.output", "missing"]),
        (Box::new(without("bf16.experts.0")), &["bf16.experts.0", "missing"]),
        (Box::new(without("bf16.gate.0")), &["bf16.gate.0", "missing"]),
        (Box::new(without("bf16.gate.1")), &["bf16.gate.1", "missing"]),
        (Box::new(without("bf16.gate.2")), &["bf16.gate.2", "missing"]),
        (Box::new(as_shape("f32.input", &[96, 64])), &["f32.input", "[96, 64]", "[T, 128]"]),
        (Box::new(as_shape("f32.input", &[48, 128, 1])), &["f32.input", "[48, 128, 1]"]),
        (Box::new(as_shape("f32.output", &[2, 24, 128])), &["f32.output", "[2, 24, 128]", "[48, 128]"]),
        (Box::new(as_shape("f32.gate.0", &[8, 48])), &["f32.gate.0", "[8, 48]", "[48, 8]"]),
        (Box::new(as_shape("f32.gate.2", &[24, 4])), &["f32.gate.2", "[24, 4]", "[48, 2]"]),
        (Box::new(as_type("bf16.input", Dtype::I16)), &["bf16.input"]),
        (Box::new(as_type("bf16.output", Dtype::F16)), &["bf16.output", "f16", "bf16"]),
        (Box::new(as_type("f32.gate.1", Dtype::U32)), &["f32.gate.1", "u32"]),
        (Box::new(as_type("f32.gate.2", Dtype::F64)), &["f32.gate.2"]),
        (Box::new(|t: &mut Tensors| bytes(t, "f32.gate.2")[8] = 8), &["f32.gate.2", "8", "0 to 7"]),
        (Box::new(|t: &mut Tensors| bytes(t, "f32.gate.2")[..8].fill(0xFF)), &["f32.gate.2", "-1", "0 to 7"]),
        (
            Box::new(|t: &mut Tensors| {
                t.insert("f32.input".into(), (Dtype::F32, vec![0, 128], Vec::new()));
            }),
            &["f32.input", "[0, 128]"],
        ),
    ];
    for (change, words) in cases {
        let message = match changed("mixtral", &layer, change)? {
            Ok(_) => return Err(format!("accepted, expected an error with {words:?}").into()),
            Err(error @ Error::Format { .. }) => error.to_string(),
            Err(error) => return Err(format!("another error: {error}, expected one with {words:?}").into()),
        };
        let missing = words.iter().chain(&["changed.safetensors"]).find(|&&word| !message.contains(word));
        ensure(missing.is_none(), || format!("`{message}`, expected {missing:?} in it"))?;
    }
    ensure(matches!(Golden::open(Path::new("no/such/file"), layer.shape()), Err(Error::Io { .. })), || "no file".into())
}
