//! Models made by the tests: samples taken apart and written in another form.

use std::collections::BTreeMap;
use std::path::Path;

use libtest_mimic::Failed;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use super::folder;

/// One tensor: type, shape, bytes.
pub type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// A model that is not yet written.
#[derive(Clone)]
pub struct Draft {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Draft {
    pub fn of(sample: &str) -> Result<Self, Failed> {
        let config = serde_json::from_slice(&std::fs::read(folder(sample).join("config.json"))?)?;
        let bytes = std::fs::read(folder(sample).join("model.safetensors"))?;
        let tensors = SafeTensors::deserialize(&bytes)?.tensors().into_iter();
        Ok(Draft { config, tensors: tensors.map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect() })
    }

    /// A model of one MoE layer so small that a test can make thousands: 2 experts, hidden size and width 8.
    pub fn toy() -> Self {
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 8, "moe_intermediate_size": 8, "num_experts": 2,
            "num_experts_per_tok": 1, "norm_topk_prob": true, "torch_dtype": "bfloat16",
        });
        let mut draft = Draft { config, tensors: BTreeMap::new() };
        draft.put("model.layers.0.mlp.gate.weight", Dtype::BF16, &[2, 8]);
        for e in 0..2 {
            for name in ["gate_proj", "up_proj", "down_proj"] {
                draft.put(&format!("model.layers.0.mlp.experts.{e}.{name}.weight"), Dtype::BF16, &[8, 8]);
            }
        }
        draft
    }

    /// Adds a tensor of bytes that differ from tensor to tensor.
    pub fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let seed = name.bytes().fold(0u64, |h, b| h.wrapping_mul(31).wrapping_add(b as u64));
        let random = moe_kernels::random::SplitMix64::stream(seed, 0);
        // 0x3B: exponents that make ordinary numbers of every type.
        let bytes = (0..len).map(|i| (random.at(i as u64) as u8) & 0x3B).collect();
        self.tensors.insert(name.into(), (dtype, shape.to_vec(), bytes));
    }

    /// Changes names; a tensor without a new name goes.
    pub fn rename(&mut self, new: impl Fn(&str) -> Option<String>) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().filter_map(|(name, tensor)| Some((new(&name)?, tensor))).collect();
    }

    /// Sets or, with null, removes a key of the configuration.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        let object = self.config.as_object_mut().expect("a configuration is an object");
        if value.is_null() {
            object.remove(key)
        } else {
            object.insert(key.into(), value)
        };
        self
    }

    pub fn write_config(&self, dir: &Path) -> Result<(), Failed> {
        Ok(std::fs::write(dir.join("config.json"), self.config.to_string())?)
    }

    /// Config and one file.
    pub fn write(&self) -> Result<TempDir, Failed> {
        let dir = tempfile::tempdir()?;
        self.write_config(dir.path())?;
        save(self.tensors.iter(), &dir.path().join("model.safetensors"))?;
        Ok(dir)
    }

    /// Config, an index, and a file for each value of `file`.
    pub fn write_sharded(&self, file: impl Fn(&str) -> String) -> Result<TempDir, Failed> {
        let dir = tempfile::tempdir()?;
        self.write_config(dir.path())?;
        let mut files = BTreeMap::<String, BTreeMap<_, _>>::new();
        for (name, tensor) in &self.tensors {
            files.entry(file(name)).or_default().insert(name, tensor);
        }
        for (file, tensors) in &files {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap_or(dir.path()))?;
            save(tensors.iter().map(|(name, tensor)| (*name, *tensor)), &path)?;
        }
        let weight_map: BTreeMap<_, _> = self.tensors.keys().map(|name| (name, file(name))).collect();
        let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
        std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string())?;
        Ok(dir)
    }
}

fn save<'a>(tensors: impl Iterator<Item = (&'a String, &'a Tensor)>, path: &Path) -> Result<(), Failed> {
    let views: Result<Vec<_>, _> =
        tensors.map(|(name, (dtype, shape, bytes))| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))).collect();
    let views: Vec<_> = views.map_err(|error: safetensors::SafeTensorError| error.to_string())?;
    Ok(std::fs::write(path, safetensors::serialize(views, None)?)?)
}
