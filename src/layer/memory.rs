//! What a run needs, before anything is allocated.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::layer::BlockConfig;

/// Bytes that all ranks of a run need together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Weights: every expert once, the common weights once.
    pub weight_bytes: u64,
    /// Buffers through which tokens travel, of all ranks.
    pub symmetric_bytes: u64,
    /// Scratch of the experts, of all ranks.
    pub scratch_bytes: u64,
    /// Inputs and outputs, of all ranks.
    pub token_bytes: u64,
}

impl Memory {
    /// What a world of `world` ranks needs.
    pub fn of(config: &BlockConfig, world: usize) -> Result<Self> {
        let _ = (config, world);
        todo!()
    }

    /// The sum.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes + self.symmetric_bytes + self.scratch_bytes + self.token_bytes
    }

    /// Fails when the machine has less.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory) with both figures and what to change. Never when the available memory is unknown.
    pub fn check(&self) -> Result<()> {
        todo!()
    }
}

/// Bytes that this process may still allocate: the kernel's estimate, or what is left of the control group's limit if that is lower. `None` where
/// neither is known.
pub fn available_bytes() -> Option<u64> {
    todo!()
}
