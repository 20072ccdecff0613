//! The samples in other forms: fused experts, other names, several files, other types. The same layer must come out.

use libtest_mimic::{Failed, Trial};
use moe_kernels::layer::{Checkpoint, CommonWeights, ExpertWeights, MoeLayer};
use moe_kernels::routing::{Family, Groups};
use moe_kernels::{DType, Expert};
use safetensors::Dtype;
use serde_json::json;

use super::write::{Draft, Tensor};
use super::{SAMPLES, ids, open, refused, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::variants: fused experts", fused),
        Trial::test("checkpoint::variants: nested language model", nested),
        Trial::test("checkpoint::variants: shared banks of experts", banks),
        Trial::test("checkpoint::variants: DeepSeek-V2", deepseek_v2),
        Trial::test("checkpoint::variants: f32 and f16", floats),
        Trial::test("checkpoint::variants: e4m3", e4m3),
        Trial::test("checkpoint::variants: fused e4m3", fused_e4m3),
        Trial::test("checkpoint::variants: several files", sharded),
        Trial::test("checkpoint::variants: cache of the hub", hub_cache),
    ]
}

fn all(layer: &MoeLayer) -> Result<(CommonWeights, ExpertWeights), Failed> {
    Ok((layer.common()?, layer.experts(&ids(layer.shape().router.num_experts))?))
}

/// Fails unless layer `n` of the folder has the weights of layer `of` of the sample.
fn equal(what: &str, dir: &std::path::Path, n: usize, sample: &str, of: usize) -> Result<(), Failed> {
    let (got, want) = (all(&Checkpoint::open(dir)?.layer(n)?)?, all(&open(sample)?.layer(of)?)?);
    if got != want {
        return Err(format!("{what}, {sample}: layer {n} is not layer {of} of the sample").into());
    }
    Ok(())
}

/// Experts `prefix.E.*` as the two tensors `prefix.gate_up_proj` and `prefix.down_proj`.
fn fuse(draft: &mut Draft, prefix: &str, names: [&str; 3]) {
    let part = |draft: &mut Draft, e: usize, name: &str| draft.tensors.remove(&format!("{prefix}.{e}.{name}.weight"));
    let (mut wide, mut down): (Vec<Tensor>, Vec<Tensor>) = Default::default();
    while let Some((dtype, shape, mut bytes)) = part(draft, down.len(), names[0]) {
        let e = down.len();
        let (_, _, up) = part(draft, e, names[1]).expect("up");
        bytes.extend(up);
        wide.push((dtype, vec![2 * shape[0], shape[1]], bytes));
        down.push(part(draft, e, names[2]).expect("down"));
    }
    for (name, parts) in [("gate_up_proj", wide), ("down_proj", down)] {
        let shape = [&[parts.len()], &parts[0].1[..]].concat();
        draft.tensors.insert(format!("{prefix}.{name}"), (parts[0].0, shape, parts.into_iter().flat_map(|p| p.2).collect()));
    }
}

fn fuse_sample(sample: &str) -> Result<Draft, Failed> {
    let mut draft = Draft::of(sample)?;
    // transformers has its own name for Mixtral's block.
    draft.rename(|name| Some(name.replace("block_sparse_moe", "mlp")));
    for n in 0..2 {
        let experts = format!("model.layers.{n}.mlp.experts");
        let names = if sample == "mixtral" { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        fuse(&mut draft, &experts, names);
    }
    Ok(draft)
}

fn fused() -> Result<(), Failed> {
    for sample in SAMPLES {
        let draft = fuse_sample(sample)?;
        let dir = draft.write()?;
        for n in 0..2 {
            equal("fused", dir.path(), n, sample, n)?;
        }
        let dir = draft.write_sharded(|name| format!("part-{}.safetensors", name.len() % 3))?;
        equal("fused and sharded", dir.path(), 1, sample, 1)?;
    }
    // Mixtral with the names of its tensors in transformers, one tensor for each matrix; and with gate, up and down in its own block.
    for (from, to) in [("block_sparse_moe", "mlp"), ("none", "none")] {
        let mut draft = Draft::of("mixtral")?;
        let usual = |name: &str| name.replace(".w1.", ".gate_proj.").replace(".w3.", ".up_proj.").replace(".w2.", ".down_proj.");
        draft.rename(|name| Some(usual(name).replace(from, to)));
        equal("usual names", draft.write()?.path(), 1, "mixtral", 1)?;
    }
    Ok(())
}

/// The draft inside a model of several modalities.
fn nest(draft: Draft, model_type: &str, language: &str, prefix: &str) -> Draft {
    let Draft { config, tensors } = draft.set("model_type", json!(language));
    let vision = json!({"model_type": "vision", "hidden_size": 1152});
    let config = json!({"model_type": model_type, "dtype": "float16", "hidden_size": 9, "text_config": config, "vision_config": vision});
    let mut nested = Draft { config, tensors };
    nested.rename(|name| Some(name.replacen("model.", prefix, 1)));
    nested.put("mtp.layers.1.mlp.gate.weight", Dtype::BF16, &[16, 128]);
    nested.put("visual.layers.1.mlp.gate.weight", Dtype::BF16, &[3]);
    nested
}

fn nested() -> Result<(), Failed> {
    for prefix in ["model.", "model.language_model.", "language_model.model.", "language_model.", ""] {
        for draft in [Draft::of("qwen2_moe")?, fuse_sample("qwen2_moe")?] {
            let draft = Draft { config: draft.clone().set("norm_topk_prob", json!(null)).config, ..draft };
            let dir = nest(draft, "qwen3_5_moe", "qwen3_5_moe_text", prefix).write()?;
            equal(prefix, dir.path(), 1, "qwen2_moe", 1)?;
            let model = Checkpoint::open(dir.path())?.model().clone();
            same(prefix, model.shape.router.family, Family::Softmax { renormalize: true })?;
            same(prefix, model.dtype, Some(DType::BF16))?;
        }
    }
    // A wrapper that nobody knows around a language model that is known.
    let dir = nest(Draft::of("qwen3_moe")?, "something_vl", "qwen3_moe", "model.language_model.").write()?;
    equal("wrapper", dir.path(), 0, "qwen3_moe", 0)?;
    let mut lost = Draft::of("qwen3_moe")?;
    lost.rename(|name| Some(name.replacen("model.", "decoder.", 1)));
    refused("lost", Checkpoint::open(lost.write()?.path())?.layer(1), &["no tensor begins with", "`model.language_model.layers.1.`"])
}

/// Intern-S2-Mobius: layer n has its own shared expert, and router and experts of bank n modulo the number of banks.
fn banks() -> Result<(), Failed> {
    let mut draft = fuse_sample("qwen2_moe")?;
    draft.rename(|name| {
        let bank = |n: usize| {
            [("gate.", "gate."), ("experts.", "experts.")]
                .map(|(from, to)| (format!("model.layers.{n}.mlp.{from}"), format!("model.meta_mlp.{n}.{to}")))
        };
        let new = bank(0).into_iter().chain(bank(1)).find_map(|(from, to)| name.strip_prefix(&from).map(|rest| format!("{to}{rest}")));
        Some(new.unwrap_or_else(|| name.to_string()))
    });
    for n in [2, 3] {
        for name in ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"] {
            let name = |n| format!("model.layers.{n}.mlp.{name}.weight");
            let tensor = draft.tensors[&name(n % 2)].clone();
            draft.tensors.insert(name(n), tensor);
        }
    }
    let draft = draft.set("num_hidden_layers", json!(4)).set("num_blocks", json!(2)).set("norm_topk_prob", json!(null));
    let dir = nest(draft, "interns2_mobius", "interns2_mobius_text", "model.language_model.").write()?;
    for n in 0..4 {
        equal("banks", dir.path(), n, "qwen2_moe", n % 2)?;
    }
    let model = Checkpoint::open(dir.path())?.model().clone();
    same("banks", (model.num_banks, model.shape.router.family), (Some(2), Family::Softmax { renormalize: true }))
}

fn deepseek_v2() -> Result<(), Failed> {
    let mut draft = Draft::of("deepseek_v3")?;
    draft.rename(|name| (!name.contains("e_score")).then(|| name.to_string()));
    let draft = draft.set("model_type", json!("deepseek_v2")).set("routed_scaling_factor", json!(16)).set("norm_topk_prob", json!(false));
    let groups = Groups { num_groups: 4, topk_groups: 2 };
    for (method, groups) in [(json!("group_limited_greedy"), Some(groups)), (json!("greedy"), None), (json!(null), None)] {
        let dir = draft.clone().set("topk_method", method).write()?;
        let layer = Checkpoint::open(dir.path())?.layer(1)?;
        same("V2", layer.shape().router.family, Family::DeepSeekV2 { groups, renormalize: false, scale: 16.0 })?;
        let (common, experts) = all(&layer)?;
        let (want, want_experts) = all(&open("deepseek_v3")?.layer(1)?)?;
        same("V2", common, CommonWeights { correction_bias: None, ..want })?;
        same("V2", experts == want_experts, true)?;
    }
    // Two shared experts are one wide one; none has no tensors.
    let mut wide = draft.clone().set("n_shared_experts", json!(2));
    for (name, shape) in [("gate_proj", [128, 128]), ("up_proj", [128, 128]), ("down_proj", [128, 128])] {
        wide.put(&format!("model.layers.1.mlp.shared_experts.{name}.weight"), Dtype::BF16, &shape);
    }
    let shared = Checkpoint::open(wide.write()?.path())?.layer(1)?.common()?.shared;
    same("two shared", shared.map(|mlp| mlp.down.shape()), Some([128, 128]))?;
    let mut none = draft;
    none.config["n_shared_experts"] = json!(null);
    none.rename(|name| (!name.contains("shared")).then(|| name.to_string()));
    same("no shared", Checkpoint::open(none.write()?.path())?.layer(1)?.common()?.shared.is_none(), true)
}

fn floats() -> Result<(), Failed> {
    for (dtype, want) in [(Dtype::F32, DType::F32), (Dtype::F16, DType::F16)] {
        let mut draft = Draft::of("qwen2_moe")?;
        for (_, tensor) in draft.tensors.iter_mut() {
            let values = tensor.2.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32());
            tensor.2 = match dtype {
                Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
                _ => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
            };
            tensor.0 = dtype;
        }
        let dir = draft.write()?;
        let layer = Checkpoint::open(dir.path())?.layer(1)?;
        same("type", layer.weight_dtype(), want)?;
        let (common, experts) = all(&layer)?;
        let tensor = |name: &str| &draft.tensors[&format!("model.layers.1.mlp.{name}.weight")].2;
        same("router", common.router.bytes() == tensor("gate"), true)?;
        let mlp = experts.get(Expert(3)).ok_or("expert 3")?;
        same("expert", (mlp.down.bytes() == tensor("experts.3.down_proj"), mlp.down.dtype()), (true, want))?;
    }
    Ok(())
}

/// Turns a bf16 matrix into e4m3 with a scale for each 128 x 128 block; returns the scales.
fn quantize(tensor: &Tensor) -> (Tensor, Vec<f32>) {
    let [rows, cols] = tensor.1[..] else { panic!("a matrix") };
    let values: Vec<f32> = tensor.2.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect();
    let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
    let mut scales = vec![0f32; blocks[0] * blocks[1]];
    for (i, value) in values.iter().enumerate() {
        let scale = &mut scales[i / cols / 128 * blocks[1] + i % cols / 128];
        *scale = scale.max(value.abs() / 448.0);
    }
    let scale = |i: usize| scales[i / cols / 128 * blocks[1] + i % cols / 128];
    let bytes = values.iter().enumerate().map(|(i, value)| float8::F8E4M3::from_f32(value / scale(i)).to_bits()).collect();
    ((Dtype::F8_E4M3, tensor.1.clone(), bytes), scales)
}

fn e4m3() -> Result<(), Failed> {
    for sample in SAMPLES {
        let mut draft = Draft::of(sample)?;
        let names: Vec<_> = draft.tensors.keys().filter(|name| name.contains("expert") && !name.contains("gate.weight")).cloned().collect();
        let mut scales_of = std::collections::HashMap::new();
        for name in names.into_iter().filter(|name| !name.contains("e_score")) {
            let (tensor, scales) = quantize(&draft.tensors[&name]);
            let shape = vec![tensor.1[0].div_ceil(128), tensor.1[1].div_ceil(128)];
            let bytes = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            draft.tensors.insert(name.replace(".weight", ".weight_scale_inv"), (Dtype::F32, shape, bytes));
            draft.tensors.insert(name.clone(), tensor);
            scales_of.insert(name, scales);
        }
        let draft = draft.set("quantization_config", json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}));
        let dir = draft.write()?;
        let layer = Checkpoint::open(dir.path())?.layer(1)?;
        same(sample, layer.weight_dtype(), DType::E4M3)?;
        let (common, experts) = all(&layer)?;
        let (block, down) = if sample == "mixtral" { ("block_sparse_moe", "w2") } else { ("mlp", "down_proj") };
        let check = |name: String, matrix: &moe_kernels::layer::Matrix| {
            let (_, shape, bytes) = &draft.tensors[&name];
            same(&name, (matrix.shape().to_vec(), matrix.bytes() == bytes), (shape.clone(), true))?;
            same(&name, matrix.scales(), &scales_of[&name][..])
        };
        for (expert, mlp) in experts.iter() {
            check(format!("model.layers.1.{block}.experts.{expert}.{down}.weight"), &mlp.down)?;
        }
        same(sample, common.router.dtype(), DType::BF16)?;
        if let (Some(shared), "qwen2_moe") = (&common.shared, sample) {
            same("scales of 192 rows", shared.gate.scales().len(), 2)?;
            check("model.layers.1.mlp.shared_expert.gate_proj.weight".into(), &shared.gate)?;
        }
        // Scales in bf16, as Qwen has them; and a matrix without.
        let name = format!("model.layers.1.{block}.experts.3.{down}.weight_scale_inv");
        let mut short = draft.clone();
        let value = half::bf16::from_f32(scales_of[&name.replace("_scale_inv", "")][0]);
        short.tensors.insert(name.clone(), (Dtype::BF16, vec![1, 1], value.to_le_bytes().to_vec()));
        let experts = Checkpoint::open(short.write()?.path())?.layer(1)?.experts(&[Expert(3)])?;
        same("bf16 scale", experts.get(Expert(3)).map(|mlp| mlp.down.scales().to_vec()), Some(vec![value.to_f32()]))?;
        short.tensors.insert(name.clone(), (Dtype::F32, vec![1, 2], vec![0; 8]));
        refused("scales", Checkpoint::open(short.write()?.path())?.layer(1), &[&name, "[1, 2]", "expected [1, 1]"])?;
        short.tensors.remove(&name);
        refused("no scales", Checkpoint::open(short.write()?.path())?.layer(1), &[&name, "is missing"])?;
        let other = draft.set("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [64, 128]}));
        refused("blocks", Checkpoint::open(other.write()?.path()), &["weight_block_size", "[64, 128]", "expected [128, 128]"])?;
    }
    Ok(())
}

fn fused_e4m3() -> Result<(), Failed> {
    let (experts, hidden, width) = (3, 384, 256);
    let config = json!({"model_type": "qwen3_5_moe_text", "num_hidden_layers": 1, "hidden_size": hidden, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": 0, "num_experts": experts, "num_experts_per_tok": 2});
    let mut draft = Draft { config, tensors: Default::default() };
    let prefix = "model.language_model.layers.0.mlp.experts";
    draft.put("model.language_model.layers.0.mlp.gate.weight", Dtype::BF16, &[experts, hidden]);
    draft.put(&format!("{prefix}.gate_up_proj"), Dtype::F8_E4M3, &[experts, 2 * width, hidden]);
    draft.put(&format!("{prefix}.gate_up_proj_scale_inv"), Dtype::F32, &[experts, 2 * width / 128, hidden / 128]);
    draft.put(&format!("{prefix}.down_proj"), Dtype::F8_E4M3, &[experts, hidden, width]);
    draft.put(&format!("{prefix}.down_proj_scale_inv"), Dtype::F32, &[experts, hidden / 128, width / 128]);
    let dir = draft.write()?;
    let layer = Checkpoint::open(dir.path())?.layer(0)?;
    let floats = |name: &str| -> Vec<f32> {
        draft.tensors[&format!("{prefix}.{name}")].2.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    };
    let [wide, down] = ["gate_up_proj", "down_proj"].map(|name| &draft.tensors[&format!("{prefix}.{name}")].2);
    let [wide_scales, down_scales] = ["gate_up_proj_scale_inv", "down_proj_scale_inv"].map(floats);
    for (expert, mlp) in layer.experts(&ids(experts))?.iter() {
        // Every element and its scale, by index.
        for (what, matrix, bytes, scales, rows, first) in [
            ("gate", &mlp.gate, wide, &wide_scales, 2 * width, 0),
            ("up", &mlp.up, wide, &wide_scales, 2 * width, width),
            ("down", &mlp.down, down, &down_scales, hidden, 0),
        ] {
            let [own_rows, cols] = matrix.shape();
            for row in 0..own_rows {
                let at = expert.index() * rows + first + row;
                same(what, &matrix.bytes()[row * cols..][..cols], &bytes[at * cols..][..cols])?;
                let own = &matrix.scales()[row / 128 * (cols / 128)..][..cols / 128];
                let all = &scales[(expert.index() * (rows / 128) + (first + row) / 128) * (cols / 128)..][..cols / 128];
                same(what, own, all)?;
            }
        }
    }
    // 64 rows of gate: the second half of their block of scales is up's.
    let mut odd = draft.set("moe_intermediate_size", json!(64));
    odd.put(&format!("{prefix}.gate_up_proj"), Dtype::F8_E4M3, &[experts, 128, hidden]);
    odd.put(&format!("{prefix}.gate_up_proj_scale_inv"), Dtype::F32, &[experts, 1, hidden / 128]);
    odd.put(&format!("{prefix}.down_proj"), Dtype::F8_E4M3, &[experts, hidden, 64]);
    odd.put(&format!("{prefix}.down_proj_scale_inv"), Dtype::F32, &[experts, hidden / 128, 1]);
    refused("odd", Checkpoint::open(odd.write()?.path())?.layer(0), &["gate_up_proj", "64 rows of gate end inside a block of 128"])
}

fn sharded() -> Result<(), Failed> {
    let file = |name: &str| match name.len() % 2 {
        _ if name.contains("layers.0") => "model-00001-of-00003.safetensors".to_string(),
        0 => "model-00002-of-00003.safetensors".to_string(),
        _ => "deeper/model-00003-of-00003.safetensors".to_string(),
    };
    for sample in SAMPLES {
        let draft = Draft::of(sample)?;
        let dir = draft.write_sharded(file)?;
        for n in 0..2 {
            equal("sharded", dir.path(), n, sample, n)?;
        }
        // Files of other layers are not touched.
        std::fs::remove_file(dir.path().join("model-00001-of-00003.safetensors"))?;
        equal("sharded", dir.path(), 1, sample, 1)?;
        let checkpoint = Checkpoint::open(dir.path())?;
        refused("missing file", checkpoint.layer(0), &["index.json", "layers.0.", "`model-00001-of-00003.safetensors`, which is missing"])?;
        // A tensor that the index puts into a file that does not have it.
        let two = dir.path().join("model-00002-of-00003.safetensors");
        std::fs::write(dir.path().join("model-00001-of-00003.safetensors"), std::fs::read(&two)?)?;
        refused("wrong file", Checkpoint::open(dir.path())?.layer(0), &["model-00001-of-00003.safetensors", "layers.0.", "is missing"])?;
    }
    Ok(())
}

/// As the hub's cache keeps a model: every file of a snapshot is a link to a blob.
fn hub_cache() -> Result<(), Failed> {
    let draft = Draft::of("qwen3_moe")?;
    let dir = tempfile::tempdir()?;
    let [blobs, snapshot] = ["blobs", "snapshots/0123abcd"].map(|name| dir.path().join(name));
    std::fs::create_dir_all(&blobs)?;
    std::fs::create_dir_all(&snapshot)?;
    let made = draft.write_sharded(|name| format!("{}.safetensors", name.len() % 2))?;
    for (i, entry) in std::fs::read_dir(made.path())?.enumerate() {
        let entry = entry?;
        std::fs::copy(entry.path(), blobs.join(i.to_string()))?;
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), snapshot.join(entry.file_name()))?;
    }
    equal("hub cache", &snapshot, 1, "qwen3_moe", 1)?;
    // The same links in a folder that is no snapshot.
    let other = dir.path().join("other/0123abcd");
    std::fs::create_dir_all(dir.path().join("other"))?;
    std::fs::rename(&snapshot, &other)?;
    refused("links", Checkpoint::open(&other), &["config.json", "leads out of the folder"])
}
