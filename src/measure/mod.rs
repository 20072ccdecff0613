//! Measuring: statistics and interleaved pairs.
#![forbid(unsafe_code)]

mod pairs;
mod statistics;

pub use pairs::{Pairs, interleaved};
pub use statistics::Statistics;
