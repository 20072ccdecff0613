//! The recorded models: shapes, routers, and every weight against the file's bytes, found here by other means.

use std::collections::HashMap;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::World;
use moe_kernels::layer::{Architecture, Block, BlockConfig, Checkpoint, MoeLayer, RouteSource, Shape, TensorFile};
use moe_kernels::routing::{Family, Groups, KeptInF32, RouterConfig};
use moe_kernels::{Backend, DType, Expert, TensorView, TensorViewMut};
use safetensors::SafeTensors;

use super::{SAMPLES, folder, ids, open, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::samples: models", models),
        Trial::test("checkpoint::samples: weights", weights),
        Trial::test("checkpoint::samples: golden files", golden),
        Trial::test("checkpoint::samples: blocks", blocks),
        Trial::test("checkpoint::samples: tensors at odd addresses", odd_addresses),
    ]
}

fn models() -> Result<(), Failed> {
    let plain = |renormalize| RouterConfig::new(16, 4, Family::Softmax { renormalize });
    let shape = |shared_width, shared_gate, router| Shape { hidden: 128, expert_width: 64, shared_width, shared_gate, router };
    let groups = Groups { num_groups: 4, topk_groups: 2 };
    let deepseek = RouterConfig::new(16, 4, Family::DeepSeekV3 { groups, renormalize: true, scale: 2.5 });
    let mixtral = RouterConfig { kept_in_f32: KeptInF32::Weights, ..RouterConfig::new(8, 2, Family::Softmax { renormalize: true }) };
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

/// The layer's result for the recorded f32 input, over two ranks.
fn output(layer: &MoeLayer, input: &[u8]) -> Result<Vec<f32>, Failed> {
    let shape = *layer.shape();
    let half = input.len() / 2;
    let num_tokens = half / (4 * shape.hidden);
    let config = BlockConfig { weight_dtype: layer.weight_dtype(), ..BlockConfig::new(shape, DType::F32, num_tokens) };
    let outputs = World::run(&Backend::cpu(), 2, |world| {
        let placement = config.ep().placement(2)?;
        let experts = layer.experts(placement.experts_of(world.rank()))?;
        let mut block = Block::new(&world, config.clone(), layer.common()?.into(), experts.into())?;
        let x = TensorView::from_bytes(&input[world.rank().index() * half..][..half], DType::F32, &[num_tokens, shape.hidden])?;
        let mut out = vec![0f32; half / 4];
        block.forward(&x, RouteSource::Router, TensorViewMut::from_slice(&mut out, &[num_tokens, shape.hidden])?)?;
        Ok::<_, moe_kernels::Error>(out)
    })?;
    let outputs: Result<Vec<_>, _> = outputs.into_iter().collect();
    Ok(outputs?.concat())
}

/// The right matrices at the right places: the block gives what transformers recorded.
fn blocks() -> Result<(), Failed> {
    for sample in SAMPLES {
        let file = TensorFile::open(&folder(sample).join("golden_layer1.safetensors"))?;
        let got = output(&open(sample)?.layer(1)?, &aligned(file.tensor("f32.input")?.to_f32()?))?;
        let want = file.tensor("f32.output")?.to_f32()?;
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let difference = square(&mut got.iter().zip(&want).map(|(a, b)| *a as f64 - *b as f64));
        let error = difference / square(&mut want.iter().map(|v| *v as f64));
        // 2e-6: three times what another order of f32 sums makes (measured by who recorded it).
        if got.len() != want.len() || !(0.0..=2e-6).contains(&error) {
            return Err(format!("{sample}: error {error:.2e}").into());
        }
    }
    Ok(())
}

/// Bytes of f32 as the block takes them, aligned.
fn aligned(values: Vec<f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// A header of odd length: no tensor begins at a multiple of its element.
fn odd_addresses() -> Result<(), Failed> {
    for sample in SAMPLES {
        let bytes = std::fs::read(folder(sample).join("model.safetensors"))?;
        let (length, rest) = bytes.split_first_chunk().ok_or("length")?;
        let length = u64::from_le_bytes(*length);
        let (header, data) = rest.split_at(length as usize);
        let dir = tempfile::tempdir()?;
        std::fs::copy(folder(sample).join("config.json"), dir.path().join("config.json"))?;
        let odd = [&(length + 1).to_le_bytes()[..], header, b" ", data].concat();
        std::fs::write(dir.path().join("model.safetensors"), odd)?;
        let (moved, layer) = (Checkpoint::open(dir.path())?.layer(1)?, open(sample)?.layer(1)?);
        same(sample, moved.common()?.router.bytes().as_ptr().addr() % 2, 1)?;
        let input = aligned(TensorFile::open(&folder(sample).join("golden_layer1.safetensors"))?.tensor("f32.input")?.to_f32()?);
        same(sample, output(&moved, &input)? == output(&layer, &input)?, true)?;
    }
    Ok(())
}
