//! Expert parallelism on GPUs: memory that kernels share, kernels of an object, launches. What the host must know of the device code stands in
//! `docs/ep-gpu.md`.

pub(crate) mod context;
pub(crate) mod layout;
pub(crate) mod memory;
pub(crate) mod record;
pub(crate) mod shape;
pub(crate) mod tuning;
