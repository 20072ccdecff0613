//! What is run: a preset with weights from a seed, or a layer of a checkpoint with its own.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use moe_kernels::layer::{Checkpoint, MoeLayer, Preset, Shape};
use moe_kernels::{Error, Result};

use super::options::{Arguments, invalid};

/// A layer to be run.
#[derive(Debug, Clone)]
pub struct Model {
    /// For people.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Where the weights are; `None`: they come from a seed.
    pub layer: Option<MoeLayer>,
}

impl From<Preset> for Model {
    fn from(preset: Preset) -> Self {
        Model { name: preset.name.into(), shape: preset.shape, layer: None }
    }
}

impl Model {
    /// The preset of that name.
    pub fn named(name: &str) -> Result<Self> {
        let preset = Preset::named(name).map_err(|error| match error {
            Error::Invalid { got, want, .. } => invalid("--model", got, want),
            other => other,
        });
        preset.map(Model::from)
    }

    /// The layer of the checkpoint that was asked for, if one was: without a number the first MoE layer.
    pub fn of_checkpoint(arguments: &Arguments) -> Result<Option<Self>> {
        let Some(dir) = &arguments.checkpoint else { return Ok(None) };
        let checkpoint = Checkpoint::open(dir)?;
        let model = checkpoint.model();
        let number = arguments.layer.unwrap_or_else(|| model.moe_layers().next().unwrap_or(0));
        let layer = checkpoint.layer(number)?;
        let name = format!("{}, layer {number} of {}", model.model_type, dir.display());
        Ok(Some(Model { name, shape: *layer.shape(), layer: Some(layer) }))
    }

    /// The recording that the layer is compared with. An option that gives other tokens or routes takes its place.
    pub fn recording(&self, arguments: &Arguments) -> Result<Option<PathBuf>> {
        let Some(layer) = &self.layer else { return Ok(None) };
        let replaced = [
            ("--trace", arguments.trace.is_some()),
            ("--routing", arguments.routing != "router"),
            ("--tokens", arguments.tokens.is_some()),
        ];
        let replaced = replaced.into_iter().find(|(_, is_given)| *is_given);
        match (&arguments.golden, replaced) {
            (Some(path), Some((option, _))) => {
                Err(invalid("--golden", path.display(), format!("absent beside {option}: a recording has its own tokens and routes")))
            }
            (Some(path), None) => Ok(Some(path.clone())),
            (None, Some(_)) => Ok(None),
            (None, None) => {
                let dir = arguments.checkpoint.as_deref().unwrap_or(Path::new("."));
                Ok(Some(dir.join(format!("golden_layer{}.safetensors", layer.number()))).filter(|path| path.exists()))
            }
        }
    }
}
