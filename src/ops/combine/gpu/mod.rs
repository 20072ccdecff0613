//! Combine on GPUs: kernels as text and constants, their parameters, their geometry, the launches of a call. What each means stands in
//! `docs/ep-gpu.md`.

mod launch;
mod params;
mod spec;
mod tuning;

pub(crate) use launch::{Addend, Folded, Receive, RowWeights, Send, Staged, check, check_send, combine, combine_receive, combine_send};
pub(crate) use spec::shipped;
pub(crate) use tuning::{Loaded, programs};
