//! Which token goes to which expert: routers, synthetic routing, recorded routing, and their statistics.
#![forbid(unsafe_code)]

pub mod placement;

pub use placement::Placement;
