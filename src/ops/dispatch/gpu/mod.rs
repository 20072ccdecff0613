//! Dispatch and replay on GPUs: kernels as text and constants, their parameters, their geometry, the launches of a call. What each means stands in
//! `docs/ep-gpu.md`.

mod launch;
mod loaded;
mod params;
mod spec;
mod tuning;

pub(crate) use launch::{
    Call, IndexCall, IndexType, Payload, ReceiveCall, ReplayCall, ReportCall, dispatch, dispatch_around, dispatch_receive, dispatch_send,
    index_rows, payload_alone, replay, replay_receive, replay_send, report,
};
pub(crate) use loaded::Loaded;
pub(crate) use spec::shipped;
pub(crate) use tuning::programs;
