//! Expert parallelism on GPUs.
mod end;
pub(crate) use end::End;
