//! What the CPU side of every operation shares: the choice of instructions, conversions, copies.

pub mod convert;
pub(crate) mod float;
pub(crate) mod level;

pub use level::Level;
