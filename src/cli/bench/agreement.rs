//! Whether greedy decoding chooses the same token with either gate, on hidden states that transformers recorded.
#![forbid(unsafe_code)]

use std::path::Path;

use moe_kernels::gpu::{Blas, Stream, plain};
use moe_kernels::layer::Checkpoint;
use moe_kernels::ops::gate::{GateOptions, Rounding, gate_mul_add};
use moe_kernels::random::SplitMix64;
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, Cuda, DType, Error, Result};
use safetensors::SafeTensors;

use super::slots::{self, Slots};

const DTYPE: DType = DType::BF16;
/// Recordings with a gated shared expert.
const MODELS: [&str; 3] = ["qwen2_moe", "qwen3_next", "qwen3_5_moe"];
/// Rows of the seeded head (arbitrary: of the size of small vocabularies).
const VOCABULARY: usize = 32768;

/// How often two ways choose the same token.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Agreement {
    /// The two ways.
    pub between: [&'static str; 2],
    pub num_tokens: usize,
    pub num_equal: usize,
    pub share: f64,
    /// Of the share: `sqrt(share * (1 - share) / num_tokens)`.
    pub standard_error: f64,
    /// The true share is at least this with a confidence of 95 % (Wilson's interval, one side).
    pub at_least: f64,
    /// Elements of the blocks' outputs that differ, of all.
    pub num_different_elements: usize,
    pub num_elements: usize,
}

/// What is compared, in words.
pub const WHAT: &str = "per token: block output = routed sum + gate * shared output, with hidden state, routed sum, shared output (bf16, layer 1) as transformers \
recorded them and the gate's weights of the checkpoint; logits = seeded head [32768, hidden] . rmsnorm(hidden state + block output) in f32; the token is the largest logit";

/// Compares the gate of a BLAS (product, sigmoid, multiply, add, each rounded), ours in both roundings, and transformers' own output.
pub fn compare(stream: &Stream, blas: &Blas, folder: &Path) -> Result<Vec<Agreement>> {
    const WAYS: [&str; 4] = ["cublaslt chain", "ours, fused", "ours, framework", "transformers"];
    let (mut outputs, mut tokens): ([Vec<f32>; 4], [Vec<usize>; 4]) = Default::default();
    for model in MODELS {
        let recorded = Recorded::read(&folder.join(model))?;
        let hidden = recorded.hidden;
        let of_ways = [
            recorded.blas(stream, blas)?,
            recorded.ours(stream, Rounding::Fused)?,
            recorded.ours(stream, Rounding::Framework)?,
            recorded.output.clone(),
        ];
        let head = head(hidden);
        for (way, output) in of_ways.into_iter().enumerate() {
            for (state, output) in recorded.input.chunks(hidden).zip(output.chunks(hidden)) {
                tokens[way].push(choice(&head, state, output));
            }
            outputs[way].extend(output);
        }
    }
    let pair = |a: usize, b: usize| {
        let num_tokens = tokens[a].len();
        let num_equal = tokens[a].iter().zip(&tokens[b]).filter(|(a, b)| a == b).count();
        let share = num_equal as f64 / num_tokens as f64;
        let num_different_elements = outputs[a].iter().zip(&outputs[b]).filter(|(a, b)| a != b).count();
        Agreement {
            between: [WAYS[a], WAYS[b]],
            num_tokens,
            num_equal,
            share,
            standard_error: (share * (1.0 - share) / num_tokens as f64).sqrt(),
            at_least: wilson(share, num_tokens as f64),
            num_different_elements,
            num_elements: outputs[a].len(),
        }
    };
    Ok([(0, 1), (0, 2), (3, 0), (3, 1), (3, 2)].map(|(a, b)| pair(a, b)).into())
}

/// One model's recording.
struct Recorded {
    hidden: usize,
    input: Vec<f32>,
    routed: Vec<f32>,
    shared: Vec<f32>,
    output: Vec<f32>,
    w: Vec<f32>,
}

impl Recorded {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("golden_layer1.safetensors");
        let format = |why: String| Error::Format { path: path.clone(), line: 0, why };
        let bytes =
            std::fs::read(&path).map_err(|error| Error::Io { what: format!("reading {}", path.display()), why: error.to_string() })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| format(error.to_string()))?;
        let tensor = |name: &str| {
            let tensor = file.tensor(name).map_err(|error| format(error.to_string()))?;
            match tensor.dtype() {
                safetensors::Dtype::BF16 => Ok(slots::values(DTYPE, tensor.data())),
                other => Err(format(format!("{name} is of type {other:?}, expected BF16"))),
            }
        };
        let common = Checkpoint::open(folder)?.layer(1)?.common()?;
        let gate = common.shared_gate.ok_or_else(|| format("the layer has no shared gate".into()))?;
        let w: Vec<f32> = slots::values(gate.dtype(), gate.bytes()).into_iter().map(|x| slots::rounded(DTYPE, x)).collect();
        let recorded = Recorded {
            hidden: w.len(),
            input: tensor("bf16.input")?,
            routed: tensor("bf16.experts.0")?,
            shared: tensor("bf16.shared_expert.0")?,
            output: tensor("bf16.output")?,
            w,
        };
        let lengths = [&recorded.routed, &recorded.shared, &recorded.output].map(Vec::len);
        if lengths != [recorded.input.len(); 3] || !recorded.input.len().is_multiple_of(recorded.hidden) {
            return Err(format(format!("its tensors have {lengths:?} elements, the input {}", recorded.input.len())));
        }
        Ok(recorded)
    }

    /// One slot for each token.
    fn rows(&self, stream: &Stream, values: &[f32]) -> Result<Slots> {
        let layout = Layout::contiguous("bench", DTYPE, &[1, self.hidden])?;
        let rows: Vec<Vec<f32>> = values.chunks(self.hidden).map(<[f32]>::to_vec).collect();
        Slots::new(stream, layout, rows.len(), rows)
    }

    fn num_tokens(&self) -> usize {
        self.input.len() / self.hidden
    }

    fn fetch(&self, stream: &Stream, out: &Slots) -> Result<Vec<f32>> {
        let rows = (0..self.num_tokens()).map(|i| Ok(slots::values(DTYPE, &out.fetch(stream, i)?)));
        Ok(rows.collect::<Result<Vec<_>>>()?.concat())
    }

    fn blas(&self, stream: &Stream, blas: &Blas) -> Result<Vec<f32>> {
        let (x, s, out) = (self.rows(stream, &self.input)?, self.rows(stream, &self.shared)?, self.rows(stream, &self.routed)?);
        let (w, product) = (self.rows(stream, &self.w)?, self.rows(stream, &self.w)?);
        let one = Layout::contiguous("bench", DTYPE, &[1, 1])?;
        let (logit, gate) = (Slots::new(stream, one, 1, vec![vec![0.0]])?, Slots::new(stream, one, 1, vec![vec![0.0]])?);
        let kernels = blas.products(x.layout(), w.layout(), &one, 1)?;
        for i in 0..self.num_tokens() {
            for kernel in &kernels {
                kernel.run(stream, x.read().slot(i)?, w.read().slot(0)?, &mut logit.write().slot(0)?, 1.0, 0.0)?;
            }
            plain::sigmoid(stream, logit.read().slot(0)?, &mut gate.write().slot(0)?)?;
            plain::scale(stream, gate.read().slot(0)?, s.read().slot(i)?, &mut product.write().slot(0)?)?;
            plain::add(stream, product.read().slot(0)?, &mut out.write().slot(i)?)?;
        }
        self.fetch(stream, &out)
    }

    fn ours(&self, stream: &Stream, rounding: Rounding) -> Result<Vec<f32>> {
        let backend = Backend::Cuda(Cuda::on(stream.clone()));
        let (x, s, out) = (self.rows(stream, &self.input)?, self.rows(stream, &self.shared)?, self.rows(stream, &self.routed)?);
        let w = self.rows(stream, &self.w)?;
        let options = GateOptions { rounding, ..GateOptions::default() };
        for i in 0..self.num_tokens() {
            gate_mul_add(&backend, x.read().slot(i)?, w.read().slot(0)?, s.read().slot(i)?, &options, out.write().slot(i)?)?;
        }
        self.fetch(stream, &out)
    }
}

/// Lower end of Wilson's interval for a share of `n`, at 95 % on one side.
fn wilson(share: f64, n: f64) -> f64 {
    const Z: f64 = 1.6449; // derived: the normal distribution's 95 % point
    let spread = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    (share + Z * Z / (2.0 * n) - spread) / (1.0 + Z * Z / n)
}

/// A seeded head: `[VOCABULARY, hidden]`, uniform in [-1, 1).
fn head(hidden: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(11);
    (0..VOCABULARY * hidden).map(|_| random.next_f32()).collect()
}

/// The row of the head with the largest logit; of equal ones the first.
fn choice(head: &[f32], state: &[f32], output: &[f32]) -> usize {
    let sum: Vec<f32> = state.iter().zip(output).map(|(a, b)| a + b).collect();
    let mean_square = sum.iter().map(|x| x * x).sum::<f32>() / sum.len() as f32;
    let norm: Vec<f32> = sum.iter().map(|x| x / (mean_square + 1e-6).sqrt()).collect(); // 1e-6 is the epsilon of Qwen's configurations
    let logit = |row: &[f32]| row.iter().zip(&norm).map(|(a, b)| a * b).sum::<f32>();
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, row) in head.chunks(sum.len()).enumerate() {
        let logit = logit(row);
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logit_is_chosen() {
        // Rows of two elements; the sum is (3, 4), normalised to lengths of sqrt(2).
        let head = [1.0, 0.0, 0.0, 1.0, 0.6, 0.8, 0.6, 0.8, -1.0, -1.0];
        assert_eq!(choice(&head, &[1.0, 1.0], &[2.0, 3.0]), 2);
        assert_eq!(choice(&head, &[-1.0, -1.0], &[-2.0, -3.0]), 4);
    }

    #[test]
    fn a_share_of_all_is_no_certainty() {
        assert!((wilson(1.0, 144.0) - 0.98156).abs() < 1e-5);
        // Half of 100: Wilson's formula by hand, 0.5 - 1.6449 / 2 / sqrt(100 + 1.6449^2).
        assert!((wilson(0.5, 100.0) - 0.41884).abs() < 1e-5);
    }

    #[test]
    fn recordings_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/checkpoints");
        for model in MODELS {
            let recorded = Recorded::read(&folder.join(model)).unwrap();
            assert_eq!((recorded.hidden, recorded.num_tokens()), (128, 48));
        }
        assert!(matches!(Recorded::read(&folder.join("nowhere")), Err(Error::Io { .. })));
    }
}
