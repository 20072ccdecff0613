//! Shapes of one MoE layer of published models.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::routing::{Family, Groups, KeptInF32, RouterConfig};
use crate::tensor::DType;

const OP: &str = "preset";

/// Rows, and columns, of a block of an fp8 weight matrix that shares one scale (spec: DeepSeek-V3's `weight_block_size`).
pub const WEIGHT_BLOCK: usize = 128;

/// Expert widths and hidden sizes are multiples of this (derived: one row of 16-bit elements is then a multiple of the 16 bytes that dispatch asks
/// for, and no matrix product has the one or two columns for which its sum would have another order).
pub const WIDTH_ALIGN: usize = 8;

/// The shape of one MoE layer, and how it routes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Elements of a token.
    pub hidden: usize,
    /// Rows of an expert's gate and up matrices.
    pub expert_width: usize,
    /// Rows of the shared expert's gate and up matrices; 0 without a shared expert.
    pub shared_width: usize,
    /// The shared expert is weighted by `sigmoid(x . w)`.
    pub shared_gate: bool,
    /// Experts, choices and family.
    pub router: RouterConfig,
}

impl Shape {
    /// Fails when no layer has this shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        // 2^20 is arbitrary: far above any model, and small enough that no product of three sizes overflows 64 bits.
        let widths = [("hidden", self.hidden, 1), ("expert_width", self.expert_width, 1), ("shared_width", self.shared_width, 0)];
        for (what, got, least) in widths {
            if got < least || got > 1 << 20 || !got.is_multiple_of(WIDTH_ALIGN) {
                return Err(Error::invalid(OP, what, got, format!("a multiple of {WIDTH_ALIGN}, at most {}", 1 << 20)));
            }
        }
        if self.shared_gate && self.shared_width == 0 {
            return Err(Error::invalid(OP, "shared_gate", true, "false without a shared expert"));
        }
        if self.router.num_experts < 2 {
            return Err(Error::invalid(OP, "num_experts", self.router.num_experts, "2 or more"));
        }
        self.router.check()
    }

    /// The router adds a bias to the scores before it chooses.
    pub fn has_correction_bias(&self) -> bool {
        matches!(self.router.family, Family::DeepSeekV3 { .. })
    }

    /// Bytes of an expert's three matrices in `dtype`.
    pub fn expert_bytes(&self, dtype: DType) -> u64 {
        mlp_bytes(self.expert_width, self.hidden, dtype)
    }

    /// Bytes of what every rank needs: router, correction bias, shared expert and its gate.
    pub fn common_bytes(&self, dtype: DType) -> u64 {
        let [hidden, num_experts] = [self.hidden, self.router.num_experts].map(|n| n as u64);
        let vectors = hidden * (num_experts + self.shared_gate as u64) * vector_dtype(dtype).size() as u64;
        let bias = if self.has_correction_bias() { num_experts * 4 } else { 0 };
        vectors + bias + mlp_bytes(self.shared_width, self.hidden, dtype)
    }

    /// Bytes of all weights of the layer in `dtype` (f32, f16, bf16, or e4m3 with a scale per 128 x 128 block).
    pub fn layer_bytes(&self, dtype: DType) -> u64 {
        self.common_bytes(dtype) + self.router.num_experts as u64 * self.expert_bytes(dtype)
    }

    /// Floating-point operations of the experts' matrices for one route; a multiplication and an addition each count.
    pub fn expert_flops(&self) -> u64 {
        6 * self.hidden as u64 * self.expert_width as u64
    }

    /// The same for the shared expert and one token.
    pub fn shared_flops(&self) -> u64 {
        6 * self.hidden as u64 * self.shared_width as u64
    }
}

/// The type of router and shared gate beside matrices of `dtype`: fp8 checkpoints keep them in bf16.
pub(crate) fn vector_dtype(dtype: DType) -> DType {
    if dtype.is_fp8() { DType::BF16 } else { dtype }
}

fn mlp_bytes(width: usize, hidden: usize, dtype: DType) -> u64 {
    let scales = match dtype.is_fp8() {
        true => (width.div_ceil(WEIGHT_BLOCK) * hidden.div_ceil(WEIGHT_BLOCK) * 4) as u64,
        false => 0,
    };
    3 * ((width * hidden * dtype.size()) as u64 + scales)
}

/// A published model's layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// Name, as its publisher writes it.
    pub name: &'static str,
    /// Shape of one layer.
    pub shape: Shape,
}

const fn softmax(num_experts: usize, k: usize, renormalize: bool) -> RouterConfig {
    let family = Family::Softmax { renormalize };
    RouterConfig { num_experts, k, family, weight_dtype: DType::F32, kept_in_f32: KeptInF32::Nothing }
}

const fn preset(
    name: &'static str,
    hidden: usize,
    expert_width: usize,
    shared_width: usize,
    shared_gate: bool,
    router: RouterConfig,
) -> Preset {
    Preset { name, shape: Shape { hidden, expert_width, shared_width, shared_gate, router } }
}

/// Every preset; the first is the default. Sources: `config.json` of the model of that name on Hugging Face, fields `hidden_size`,
/// `moe_intermediate_size` (Mixtral, OLMoE: `intermediate_size`), `shared_expert_intermediate_size`, `num_experts` (or `n_routed_experts`,
/// `num_local_experts`), `num_experts_per_tok`, `norm_topk_prob`.
pub const PRESETS: [Preset; 8] = [
    // Qwen/Qwen1.5-MoE-A2.7B
    preset("Qwen1.5-MoE-A2.7B", 2048, 1408, 5632, true, softmax(60, 4, false)),
    // allenai/OLMoE-1B-7B-0924
    preset("OLMoE-1B-7B", 2048, 1024, 0, false, softmax(64, 8, false)),
    // Qwen/Qwen3-30B-A3B
    preset("Qwen3-30B-A3B", 2048, 768, 0, false, softmax(128, 8, true)),
    // Qwen/Qwen3.5-35B-A3B, text_config; the model's class always renormalises
    preset("Qwen3.5-35B-A3B", 2048, 512, 512, true, softmax(256, 8, true)),
    // mistralai/Mixtral-8x7B-v0.1; the model's class always renormalises
    preset("Mixtral-8x7B", 4096, 14336, 0, false, RouterConfig { kept_in_f32: KeptInF32::Weights, ..softmax(8, 2, true) }),
    // Qwen/Qwen3-Next-80B-A3B-Instruct
    preset("Qwen3-Next-80B-A3B", 2048, 512, 512, true, softmax(512, 10, true)),
    // Qwen/Qwen3-235B-A22B
    preset("Qwen3-235B-A22B", 4096, 1536, 0, false, softmax(128, 8, true)),
    // deepseek-ai/DeepSeek-V3: n_shared_experts 1, n_group 8, topk_group 4, routed_scaling_factor 2.5
    preset(
        "DeepSeek-V3",
        7168,
        2048,
        2048,
        false,
        RouterConfig {
            num_experts: 256,
            k: 8,
            family: Family::DeepSeekV3 { groups: Groups { num_groups: 8, topk_groups: 4 }, renormalize: true, scale: 2.5 },
            weight_dtype: DType::F32,
            kept_in_f32: KeptInF32::LogitsAndWeights,
        },
    ),
];

/// For tests: no model's layer, and one that runs in a moment. Not among [`PRESETS`]; [`Preset::named`] knows it as `Tiny`.
pub const TINY: Preset = preset("Tiny", 64, 32, 64, true, softmax(16, 4, false));

impl Preset {
    /// The preset of that name; upper and lower case are the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists the names.
    ///
    /// ```
    /// let preset = moe_kernels::layer::Preset::named("mixtral-8x7b")?;
    /// assert_eq!((preset.shape.hidden, preset.shape.router.num_experts), (4096, 8));
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    pub fn named(name: &str) -> Result<Self> {
        PRESETS.into_iter().chain([TINY]).find(|p| p.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
            let names = PRESETS.map(|p| p.name).join(", ");
            Error::invalid(OP, "name", format!("`{name}`"), names)
        })
    }
}

impl Default for Preset {
    fn default() -> Self {
        PRESETS[0]
    }
}
