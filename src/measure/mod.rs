//! Measuring: the environment, statistics, interleaved pairs, and figures as people read them.
#![forbid(unsafe_code)]

pub mod environment;
mod memory;
mod pairs;
pub mod report;
mod statistics;

pub use environment::Environment;
pub use memory::available_bytes;
pub use pairs::{Pairs, interleaved};
pub use statistics::Statistics;
