//! What a run needs, before anything is allocated.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::layer::BlockConfig;
use crate::layer::experts::Scratch;
use crate::measure::{available_bytes, report};
use crate::tensor::DType;

/// What is left to the machine: one part in this many (arbitrary).
const RESERVED_PART: u64 = 10;

/// Bytes that all ranks of a run need together, at most.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Weights: every expert once, the common weights once.
    pub weight_bytes: u64,
    /// Buffers through which tokens travel, of all ranks.
    pub symmetric_bytes: u64,
    /// Scratch of the blocks, of all ranks.
    pub scratch_bytes: u64,
    /// Tokens, results and routes of all ranks.
    pub token_bytes: u64,
    /// The sum, if the weights were e4m3; `None` when they are.
    fp8_total_bytes: Option<u64>,
    max_tokens: usize,
}

impl Memory {
    /// What a world of `world` ranks needs.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that no such world can use.
    pub fn of(config: &BlockConfig, world: usize) -> Result<Self> {
        config.check(world)?;
        let plan = config.ep().plan(world)?;
        let shape = &config.shape;
        let [hidden, k, num_experts, tokens] =
            [shape.hidden, shape.router.k, shape.router.num_experts, config.max_tokens].map(|n| n as u64);
        let ranks = world as u64;
        // Every factor is below 2^31, a row below 2^23 bytes: the products below fit, but for the plan's own, which it has checked.
        let sum_rows = if config.layout.is_by_expert() { 0 } else { plan.max_rows as u64 * (hidden * 4 + 1) };
        let shared_rows = tokens * hidden * 4 * ((shape.shared_width > 0) as u64 + shape.shared_gate as u64);
        let routing = tokens * k * 16 + plan.max_arrivals as u64 * (4 + 12 * k); // ids, weights, positions; slots, experts, weights
        let tile = Scratch::size_bytes(shape, plan.max_rows.max(config.max_tokens));
        let scratch = tile.saturating_add(sum_rows).saturating_add(shared_rows + routing + tokens * num_experts * 4);
        let weight_bytes = shape.layer_bytes(config.weight_dtype);
        let mut memory = Memory {
            weight_bytes,
            symmetric_bytes: ranks.saturating_mul(plan.regions.total_bytes as u64),
            scratch_bytes: ranks.saturating_mul(scratch),
            token_bytes: ranks * tokens * (2 * hidden * config.dtype.size() as u64 + 2 * k * 8),
            fp8_total_bytes: None,
            max_tokens: config.max_tokens,
        };
        if !config.weight_dtype.is_fp8() {
            let saved = weight_bytes - shape.layer_bytes(DType::E4M3).min(weight_bytes);
            memory.fp8_total_bytes = Some(memory.total_bytes() - saved);
        }
        Ok(memory)
    }

    /// The sum.
    pub fn total_bytes(&self) -> u64 {
        [self.weight_bytes, self.symmetric_bytes, self.scratch_bytes, self.token_bytes].into_iter().fold(0, u64::saturating_add)
    }

    /// Fails when the machine has less. A tenth of what is available is left to the machine: page tables, allocators and whoever else runs.
    ///
    /// # Errors
    /// [`Error::Memory`] with both figures and what to change. Never where the available memory is unknown.
    pub fn check(&self) -> Result<()> {
        available_bytes().map_or(Ok(()), |have| self.check_against(have - have / RESERVED_PART))
    }

    /// As [`check`](Self::check), with a given number of available bytes.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check_against(&self, have_bytes: u64) -> Result<()> {
        let need_bytes = self.total_bytes();
        if need_bytes <= have_bytes {
            return Ok(());
        }
        let mut changes = Vec::new();
        if let Some(fp8) = self.fp8_total_bytes {
            changes.push(format!("--weights fp8 ({} in all)", report::bytes(fp8)));
        }
        let per_token = (need_bytes - self.weight_bytes) / self.max_tokens as u64;
        if let Some(left) = have_bytes.checked_sub(self.weight_bytes).filter(|&left| left >= per_token && per_token > 0) {
            changes.push(format!("fewer tokens (about {} instead of {} on each rank)", left / per_token, self.max_tokens));
        }
        changes.push("a smaller model".into());
        Err(Error::Memory { what: "the layer".into(), need_bytes, have_bytes, change: format!("try {}", changes.join(", or ")) })
    }
}
