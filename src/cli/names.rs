//! Words of the command line for the choices of expert parallelism.
#![forbid(unsafe_code)]

use clap::ValueEnum;
use moe_kernels::ep::{Mode, Reduce, Wire};

/// Names of [`Layout`](moe_kernels::ep::Layout).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LayoutKind {
    /// One row per (token, rank)
    #[value(name = "by-token")]
    Token,
    /// One row per (token, expert), grouped by expert
    #[value(name = "by-expert")]
    Expert,
    /// The same, with room for a fixed number of rows per expert
    #[value(name = "by-expert-fixed")]
    ExpertFixed,
}

/// Names of [`Reduce`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReduceKind {
    /// Each rank sums a token's rows and rounds once
    #[value(name = "at-rank")]
    Rank,
    /// The same, and the sum travels as f32
    #[value(name = "at-rank-f32")]
    RankF32,
    /// Every row travels; the result does not depend on the number of ranks
    #[value(name = "at-source")]
    Source,
}

/// Names of [`Mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeKind {
    /// Counts first, then rows
    Throughput,
    /// Few rows travel together with the counts
    LowLatency,
}

/// Names of [`Wire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WireKind {
    /// As the experts wrote them
    AsIs,
    /// e4m3 without scales
    Fp8Direct,
    /// e4m3 with a scale per 128 elements
    Fp8Block,
}

impl ReduceKind {
    pub fn value(self) -> Reduce {
        match self {
            ReduceKind::Rank => Reduce::AtRank,
            ReduceKind::RankF32 => Reduce::AtRankF32,
            ReduceKind::Source => Reduce::AtSource,
        }
    }
}

impl ModeKind {
    pub fn value(self) -> Mode {
        match self {
            ModeKind::Throughput => Mode::Throughput,
            ModeKind::LowLatency => Mode::LowLatency,
        }
    }
}

impl WireKind {
    pub fn value(self) -> Wire {
        match self {
            WireKind::AsIs => Wire::AsIs,
            WireKind::Fp8Direct => Wire::Fp8Direct,
            WireKind::Fp8Block => Wire::Fp8Block,
        }
    }
}
