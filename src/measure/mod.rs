//! Measuring: the environment, statistics, interleaved pairs, and figures as people read them.
#![forbid(unsafe_code)]

pub mod environment;
mod pairs;
pub mod report;
mod statistics;

pub use environment::Environment;
pub use pairs::{Pairs, interleaved};
pub use statistics::Statistics;
