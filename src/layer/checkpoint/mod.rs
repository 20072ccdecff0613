//! MoE layers from a Hugging Face folder.
//!
//! `config.json` says what the model is ([`Model`]); `model.safetensors`, or the files that `model.safetensors.index.json` names, have its weights.
//! Files are mapped: opening a layer reads headers, and weights are read where they are used.
//!
//! Names of tensors differ more than families do: a language model may be inside another (`model.language_model.layers.N`), experts may be one matrix
//! each or all in one tensor. What is there decides, not the family.
#![deny(unsafe_code)]

pub mod config;
mod files;
pub mod index;
mod json;
pub mod tensors;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

pub use config::{Architecture, Model};
pub use index::Index;
pub use tensors::{Tensor, TensorFile};

use self::files::Folder;
use self::json::{quoted, wrong};
use crate::error::{Error, Result};
use crate::id::Expert;
use crate::layer::Shape;
use crate::layer::preset::WEIGHT_BLOCK;
use crate::layer::weights::{CommonWeights, ExpertWeights, Matrix, Mlp};
use crate::tensor::DType;

const OP: &str = "checkpoint";

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where the decoder layers of a language model can be, the usual place first. Layers of other parts (`mtp.layers`) are none of these.
const PREFIXES: [&str; 5] = ["model.", "model.language_model.", "language_model.model.", "language_model.", ""];

/// A model's folder.
///
/// ```
/// use moe_kernels::Expert;
/// use moe_kernels::layer::Checkpoint;
/// let checkpoint = Checkpoint::open("tests/vectors/checkpoints/qwen2_moe".as_ref())?;
/// let layer = checkpoint.layer(1)?;
/// assert_eq!(layer.shape().router.num_experts, 16);
/// // What one of four ranks needs.
/// let common = layer.common()?;
/// let experts = layer.experts(&[Expert(4), Expert(5), Expert(6), Expert(7)])?;
/// assert_eq!((common.router.shape(), experts.iter().len()), ([16, 128], 4));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    folder: Folder,
    model: Model,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Single(TensorFile),
    /// Files are opened when a layer needs them.
    Sharded {
        index: Index,
        open: Mutex<HashMap<String, TensorFile>>,
    },
}

impl Checkpoint {
    /// Opens a folder: reads config.json and the index, or the header of the only file. No file may be changed while the checkpoint, or weights that
    /// come from it, are in use.
    ///
    /// Links may lead to files inside the folder, and in a cache of the Hugging Face hub to its `blobs`.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be opened, [`Error::Format`] for what is in it.
    pub fn open(dir: &Path) -> Result<Self> {
        let folder = Folder::open(dir)?;
        let config = files::read(&folder.resolve(CONFIG)?, config::MAX_CONFIG_BYTES)?;
        let model = Model::parse(&config, &folder.join(CONFIG))?;
        let weights = if folder.has(SINGLE) {
            Weights::Single(TensorFile::open(&folder.resolve(SINGLE)?)?)
        } else if folder.has(INDEX) {
            let bytes = files::read(&folder.resolve(INDEX)?, index::MAX_INDEX_BYTES)?;
            Weights::Sharded { index: Index::parse(&bytes, &folder.join(INDEX))?, open: Mutex::default() }
        } else {
            return Err(wrong(dir, format!("has neither {SINGLE} nor {INDEX}")));
        };
        Ok(Checkpoint { folder, model, weights })
    }

    /// What config.json says.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// One MoE layer: finds its tensors, and checks the type and shape of every one. Opens only files that have tensors of this layer.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a layer that is dense or beyond the end; [`Error::Format`] naming the tensor that is missing or not what it should be.
    pub fn layer(&self, n: usize) -> Result<MoeLayer> {
        let model = &self.model;
        if n >= model.num_layers {
            return Err(Error::invalid(OP, "layer", n, format!("less than {}, the layers of {}", model.num_layers, model.path.display())));
        }
        if !model.is_moe(n) {
            let mut moe = model.moe_layers();
            let some: Vec<_> = moe.by_ref().take(4).map(|layer| layer.to_string()).collect();
            let more = if moe.next().is_some() { ", ..." } else { "" };
            let want = format!("a MoE layer of {}: {}{more}", model.path.display(), some.join(", "));
            return Err(Error::invalid(OP, "layer", format!("{n}, which is dense"), want));
        }
        let names = Names::find(self, n)?;
        let Shape { hidden, expert_width: width, shared_width, router, .. } = model.shape;
        let num_experts = router.num_experts;

        let shared = |matrix: &str, rows, cols| self.matrix(&format!("{}.{matrix}_proj.weight", names.shared), rows, cols);
        let shared = match shared_width {
            0 => None,
            wide => Some([shared("gate", wide, hidden)?, shared("up", wide, hidden)?, shared("down", hidden, wide)?]),
        };
        let gate = || self.matrix(&format!("{}.shared_expert_gate.weight", names.mlp), 1, hidden);
        let bias = || self.vector(&format!("{}.gate.e_score_correction_bias", names.routed), &[num_experts]);
        Ok(MoeLayer {
            shape: model.shape,
            number: n,
            router: self.matrix(&format!("{}.gate.weight", names.routed), num_experts, hidden)?,
            bias: model.shape.has_correction_bias().then(bias).transpose()?,
            shared,
            shared_gate: model.shape.shared_gate.then(gate).transpose()?,
            experts: match names.experts {
                Experts::Fused => self.fused(&format!("{}.experts", names.routed), num_experts, hidden, width)?,
                Experts::Each([gate, up, down]) => (0..num_experts)
                    .map(|e| {
                        let matrix = |name, rows, cols| self.matrix(&format!("{}.experts.{e}.{name}.weight", names.routed), rows, cols);
                        Ok([matrix(gate, width, hidden)?, matrix(up, width, hidden)?, matrix(down, hidden, width)?])
                    })
                    .collect::<Result<_>>()?,
            },
        })
    }

    /// All experts in two tensors: gate over up `[E, 2 I, H]`, and down `[E, H, I]`.
    fn fused(&self, prefix: &str, num_experts: usize, hidden: usize, width: usize) -> Result<Vec<[Source; 3]>> {
        let up = self.stack(&format!("{prefix}.gate_up_proj"), num_experts, 2 * width, hidden)?;
        let down = self.stack(&format!("{prefix}.down_proj"), num_experts, hidden, width)?;
        if up.tensor.dtype().is_fp8() && !width.is_multiple_of(WEIGHT_BLOCK) {
            return Err(up
                .tensor
                .wrong(format!("is e4m3, and {width} rows of gate end inside a block of {WEIGHT_BLOCK} that has one scale")));
        }
        Ok((0..num_experts).map(|e| [up.rows(2 * e, width), up.rows(2 * e + 1, width), down.rows(e, hidden)]).collect())
    }

    /// A matrix `[rows, cols]`, and its scales if it is e4m3.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Source> {
        self.source(name, &[], rows, cols)
    }

    /// A stack of matrices `[num, rows, cols]`, the same.
    fn stack(&self, name: &str, num: usize, rows: usize, cols: usize) -> Result<Source> {
        self.source(name, &[num], rows, cols)
    }

    fn source(&self, name: &str, outer: &[usize], rows: usize, cols: usize) -> Result<Source> {
        let tensor = self.tensor(name)?;
        tensor.expect_shape(&[outer, &[rows, cols]].concat())?;
        tensor.expect_dtype(&[DType::F32, DType::F16, DType::BF16, DType::E4M3])?;
        let blocks = [rows, cols].map(|n| n.div_ceil(WEIGHT_BLOCK));
        let scales = || self.vector(&format!("{name}_scale_inv"), &[outer, &blocks].concat());
        let scales = tensor.dtype().is_fp8().then(scales).transpose()?;
        Ok(Source { tensor, scales, first_row: 0, rows, cols })
    }

    /// A tensor that is used as f32. spec: DeepSeek's biases and scales are f32, Qwen's scales bf16.
    fn vector(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        tensor.expect_shape(shape)?;
        tensor.expect_dtype(&[DType::F32, DType::F16, DType::BF16])?;
        Ok(tensor)
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        match &self.weights {
            Weights::Single(file) => file.tensor(name),
            Weights::Sharded { index, open } => {
                let Some(file) = index.file_of(name) else {
                    return Err(wrong(index.path(), format!("tensor `{}` is missing", quoted(name))));
                };
                let mut open = open.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if let Some(file) = open.get(file) {
                    return file.tensor(name);
                }
                if !self.folder.has(file) {
                    return Err(wrong(index.path(), format!("tensor `{}` is in `{}`, which is missing", quoted(name), quoted(file))));
                }
                let opened = TensorFile::open(&self.folder.resolve(file)?)?;
                open.entry(file.to_string()).or_insert(opened).tensor(name)
            }
        }
    }

    /// A tensor whose name begins so is there.
    fn has_prefix(&self, prefix: &str) -> bool {
        match &self.weights {
            Weights::Single(file) => file.has_prefix(prefix),
            Weights::Sharded { index, .. } => index.names().any(|name| name.starts_with(prefix)),
        }
    }

    /// The file that lists all tensors.
    fn list_path(&self) -> PathBuf {
        match &self.weights {
            Weights::Single(file) => file.path().to_path_buf(),
            Weights::Sharded { index, .. } => index.path().to_path_buf(),
        }
    }
}

/// Beginnings of the names of one layer's tensors.
struct Names {
    /// The layer's own block.
    mlp: String,
    /// Router and routed experts.
    routed: String,
    shared: String,
    experts: Experts,
}

enum Experts {
    /// `gate_up_proj` and `down_proj` of all.
    Fused,
    /// Gate, up and down of each.
    Each([&'static str; 3]),
}

impl Names {
    fn find(checkpoint: &Checkpoint, n: usize) -> Result<Self> {
        let model = &checkpoint.model;
        let Some(prefix) = PREFIXES.into_iter().find(|prefix| checkpoint.has_prefix(&format!("{prefix}layers.{n}."))) else {
            let tried = PREFIXES.map(|prefix| format!("`{prefix}layers.{n}.`")).join(", ");
            return Err(wrong(&checkpoint.list_path(), format!("no tensor begins with any of {tried}")));
        };
        let block = |name: &str| format!("{prefix}layers.{n}.{name}");
        // transformers has its own name for Mixtral's block, and saves the published one.
        let mixtral = block("block_sparse_moe");
        let is_mixtral = model.architecture == Architecture::Mixtral && !checkpoint.has_prefix(&block("mlp."));
        let mlp = if is_mixtral { mixtral } else { block("mlp") };
        let routed = match model.num_banks {
            Some(num) => format!("{prefix}meta_mlp.{}", n % num),
            None => mlp.clone(),
        };
        let shared = match model.architecture {
            Architecture::DeepSeekV2 | Architecture::DeepSeekV3 => format!("{mlp}.shared_experts"),
            _ => format!("{mlp}.shared_expert"),
        };
        let (usual, short) = (["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]);
        let has = |name: &str| checkpoint.has_prefix(&format!("{routed}.experts.{name}"));
        let experts = match () {
            () if has("gate_up_proj") => Experts::Fused,
            () if has("0.w1.") || is_mixtral && !has("0.gate_proj.") => Experts::Each(short),
            () => Experts::Each(usual),
        };
        Ok(Names { mlp, routed, shared, experts })
    }
}

/// A matrix in a file.
#[derive(Debug, Clone)]
struct Source {
    tensor: Tensor,
    scales: Option<Tensor>,
    /// Of the tensor's last two dimensions, with all before them as one.
    first_row: usize,
    rows: usize,
    cols: usize,
}

impl Source {
    /// The `i`th block of `rows` rows of this tensor.
    fn rows(&self, i: usize, rows: usize) -> Self {
        Source { first_row: i * rows, rows, ..self.clone() }
    }

    fn matrix(&self) -> Matrix {
        let part = |tensor: &Tensor, first: usize, rows: usize, cols: usize| {
            let row_bytes = cols * tensor.dtype().size();
            tensor.shared_bytes().part(first * row_bytes..(first + rows) * row_bytes)
        };
        let scales = self.scales.as_ref().map(|scales| {
            let [rows, cols] = [self.rows, self.cols].map(|n| n.div_ceil(WEIGHT_BLOCK));
            // Whole blocks, or the first row of a matrix of the stack: both begin at a row of scales.
            let first = self.first_row / self.rows * rows;
            tensors::widened(scales.dtype(), &part(scales, first, rows, cols))
        });
        Matrix {
            rows: self.rows,
            cols: self.cols,
            dtype: self.tensor.dtype(),
            bytes: part(&self.tensor, self.first_row, self.rows, self.cols),
            scales: scales.unwrap_or_default(),
        }
    }
}

fn mlp([gate, up, down]: &[Source; 3]) -> Mlp {
    Mlp { gate: gate.matrix(), up: up.matrix(), down: down.matrix() }
}

/// One MoE layer of a checkpoint. All its tensors have been found and have the right types and shapes; none has been read.
#[derive(Debug, Clone)]
pub struct MoeLayer {
    shape: Shape,
    number: usize,
    router: Source,
    bias: Option<Tensor>,
    shared: Option<[Source; 3]>,
    shared_gate: Option<Source>,
    experts: Vec<[Source; 3]>,
}

impl MoeLayer {
    /// Sizes and router.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its number in the model, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Type of the experts' matrices (of the first expert's, should they differ).
    pub fn weight_dtype(&self) -> DType {
        self.experts.first().map_or(self.router.tensor.dtype(), |expert| expert[0].tensor.dtype())
    }

    /// Router, correction bias, shared expert and its gate. Matrices stay in the file; biases and scales are copied.
    ///
    /// # Errors
    /// None today: the layer has been checked.
    pub fn common(&self) -> Result<CommonWeights> {
        Ok(CommonWeights {
            router: self.router.matrix(),
            correction_bias: self.bias.as_ref().map(Tensor::to_f32).transpose()?,
            shared: self.shared.as_ref().map(mlp),
            shared_gate: self.shared_gate.as_ref().map(Source::matrix),
        })
    }

    /// The matrices of `experts`, ascending ids; they stay in the file, scales are copied.
    ///
    /// # Errors
    /// [`Error::Invalid`] for ids that do not ascend or that the layer does not have.
    pub fn experts(&self, experts: &[Expert]) -> Result<ExpertWeights> {
        ExpertWeights::collect(&self.shape, experts, |expert| mlp(&self.experts[expert.index()]))
    }
}
