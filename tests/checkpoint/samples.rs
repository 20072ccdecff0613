//! The recorded models: shapes, routers, and every weight against the file's bytes, found here by other means.

use std::collections::HashMap;

use libtest_mimic::{Failed, Trial};
use moe_kernels::layer::{Architecture, Shape, TensorFile};
use moe_kernels::routing::{Family, Groups, RouterConfig};
use moe_kernels::{DType, Expert};
use safetensors::SafeTensors;

use super::{SAMPLES, folder, ids, open, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::samples: models", models),
        Trial::test("checkpoint::samples: weights", weights),
        Trial::test("checkpoint::samples: golden files", golden),
    ]
}

fn models() -> Result<(), Failed> {
    let plain = |renormalize| RouterConfig::new(16, 4, Family::Softmax { renormalize });
    let shape = |shared_width, shared_gate, router| Shape { hidden: 128, expert_width: 64, shared_width, shared_gate, router };
    let groups = Groups { num_groups: 4, topk_groups: 2 };
    let deepseek = RouterConfig::new(16, 4, Family::DeepSeekV3 { groups, renormalize: true, scale: 2.5 });
    let mixtral = RouterConfig::new(8, 2, Family::Softmax { renormalize: true });
    let want = [
        (Architecture::Qwen2Moe, shape(192, true, plain(false))),
        (Architecture::Qwen3Moe, shape(0, false, plain(true))),
        (Architecture::DeepSeekV3, shape(64, false, deepseek)),
        (Architecture::Mixtral, shape(0, false, mixtral)),
    ];
    for (sample, (architecture, shape)) in SAMPLES.into_iter().zip(want) {
        let checkpoint = open(sample)?;
        let model = checkpoint.model();
        same(sample, model.architecture, architecture)?;
        same(sample, model.model_type.as_str(), sample)?;
        same(sample, model.shape, shape)?;
        same(sample, (model.dtype, model.num_layers), (Some(DType::BF16), 2))?;
        same(sample, model.moe_layers().collect::<Vec<_>>(), vec![0, 1])?;
        let layer = checkpoint.layer(1)?;
        same(sample, (*layer.shape(), layer.number(), layer.weight_dtype()), (shape, 1, DType::BF16))?;
    }
    Ok(())
}

fn weights() -> Result<(), Failed> {
    for sample in SAMPLES {
        let checkpoint = open(sample)?;
        let bytes = std::fs::read(folder(sample).join("model.safetensors"))?;
        let file = SafeTensors::deserialize(&bytes)?;
        for n in 0..2 {
            let layer = checkpoint.layer(n)?;
            let block = if sample == "mixtral" { "block_sparse_moe" } else { "mlp" };
            let tensor =
                |name: &str| file.tensor(&format!("model.layers.{n}.{block}.{name}")).map(|t| (t.shape().to_vec(), t.data().to_vec()));
            let check = |name: &str, matrix: &moe_kernels::layer::Matrix| -> Result<(), Failed> {
                let (shape, bytes) = tensor(name)?;
                same(&format!("{sample} {n} {name}"), (matrix.shape().to_vec(), matrix.dtype()), (shape, DType::BF16))?;
                if matrix.bytes() != bytes || !matrix.scales().is_empty() {
                    return Err(format!("{sample} {n} {name}: other bytes").into());
                }
                Ok(())
            };
            let common = layer.common()?;
            check("gate.weight", &common.router)?;
            let shared = if sample == "deepseek_v3" { "shared_experts" } else { "shared_expert" };
            same(sample, common.shared.is_some(), matches!(sample, "qwen2_moe" | "deepseek_v3"))?;
            if let Some(mlp) = &common.shared {
                for (name, matrix) in [("gate", &mlp.gate), ("up", &mlp.up), ("down", &mlp.down)] {
                    check(&format!("{shared}.{name}_proj.weight"), matrix)?;
                }
            }
            same(sample, common.shared_gate.is_some(), sample == "qwen2_moe")?;
            if let Some(gate) = &common.shared_gate {
                check("shared_expert_gate.weight", gate)?;
            }
            same(sample, common.correction_bias.is_some(), sample == "deepseek_v3")?;
            if let Some(bias) = &common.correction_bias {
                let (_, bytes) = tensor("gate.e_score_correction_bias")?;
                let want: Vec<_> = bytes.as_chunks().0.iter().map(|b| f32::from_bits((u16::from_le_bytes(*b) as u32) << 16)).collect();
                same(sample, bias.clone(), want)?;
            }
            let names = if sample == "mixtral" { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
            let all = layer.experts(&ids(layer.shape().router.num_experts))?;
            for (expert, mlp) in all.iter() {
                for (name, matrix) in names.into_iter().zip([&mlp.gate, &mlp.up, &mlp.down]) {
                    check(&format!("experts.{expert}.{name}.weight"), matrix)?;
                }
            }
            // A rank's own, in gaps.
            let some = layer.experts(&[Expert(1), Expert(6)])?;
            same(sample, some.iter().map(|(e, _)| e).collect::<Vec<_>>(), vec![Expert(1), Expert(6)])?;
            same(sample, some.get(Expert(6)), all.get(Expert(6)))?;
            for bad in [&[Expert(2), Expert(2)][..], &[Expert(3), Expert(1)], &[Expert(16)]] {
                super::refused("ids", layer.experts(bad), &["experts", "ascending ids below"])?;
            }
        }
    }
    Ok(())
}

fn golden() -> Result<(), Failed> {
    for sample in SAMPLES {
        let path = folder(sample).join("golden_layer1.safetensors");
        let file = TensorFile::open(&path)?;
        let bytes = std::fs::read(&path)?;
        let want: HashMap<_, _> = SafeTensors::deserialize(&bytes)?.tensors().into_iter().map(|(n, t)| (n, t.data().to_vec())).collect();
        same(sample, file.names().len(), want.len())?;
        for (name, bytes) in &want {
            same(&format!("{sample} {name}"), file.tensor(name)?.bytes() == bytes, true)?;
        }
        let input = file.tensor("f32.input")?;
        same(sample, (input.shape(), input.dtype()), (&[1, 48, 128][..], DType::F32))?;
        same(sample, input.to_f32()?.len(), 48 * 128)?;
        let idx = file.tensor("bf16.gate.2")?.to_i64()?;
        same(sample, idx.iter().all(|id| (0..16).contains(id)), true)?;
        super::refused(sample, file.tensor("bf16.gate.2")?.to_f32(), &["gate.2", "i64"])?;
        super::refused(sample, input.to_i64(), &["f32.input", "expected i32, i64 or u32"])?;
        super::refused(sample, file.tensor("nothing"), &["golden_layer1", "tensor `nothing` is missing"])?;
    }
    Ok(())
}
