//! What the CPU side of every operation shares: the choice of instructions, conversions, copies.

pub mod convert;
pub(crate) mod copy;
pub(crate) mod elementwise;
pub(crate) mod float;
pub(crate) mod gemm;
pub(crate) mod level;
pub(crate) mod quantize;

#[cfg(target_arch = "x86_64")]
pub(crate) use level::Isa;
pub use level::Level;
