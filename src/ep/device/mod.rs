//! Expert parallelism on GPUs: the memory of the ranks, the waiting grids that share a device, the end of their waits when a world fails; kernels of an
//! object and their launches. What the host must know of the device code stands in `docs/ep-gpu.md`.

mod abort;
mod claims;
pub(crate) mod context;
mod end;
mod exchange;
pub(crate) mod layout;
pub(crate) mod memory;
pub(crate) mod record;
pub mod registry;
pub(crate) mod shape;
pub mod table;
pub(crate) mod tuning;

pub use abort::AbortLine;
pub(crate) use end::End;
