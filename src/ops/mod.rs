//! The operations: API, docs and the one validator in each `mod.rs`, a backend in each file beside it.

pub mod cast;
pub mod combine;
pub mod dispatch;
pub mod gate;
