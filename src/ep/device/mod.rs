//! Expert parallelism on GPUs: the memory of the ranks, the waiting grids that share a device, and the end of their waits when a world fails.

mod abort;
mod end;
mod memory;
pub mod registry;

pub use abort::AbortLine;
pub(crate) use end::End;
