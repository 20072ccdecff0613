//! Ranks, their symmetric memory and the protocol between them.
//!
//! A [`World`] is one rank's membership; an [`ExpertParallel`] is one rank's end of the buffers through which tokens travel to experts and
//! back. `PROTOCOL.md` beside this file says in numbered steps who may write what, and when.

#[doc(hidden)]
pub mod bell;
mod config;
#[doc(hidden)]
pub mod device;
mod meeting;
pub(crate) mod object;
mod page;
mod plan;
#[cfg(target_os = "linux")]
mod processes;
#[doc(hidden)]
pub mod signal;
#[doc(hidden)]
pub mod steps;
pub(crate) mod symmetric;
pub(crate) mod wait;
pub(crate) mod world;

pub use config::{
    Config, IdSpace, Layout, MAX_K, MAX_RANKS, MAX_TOKENS, Mode, Overflow, Quantize, ROW_ALIGN, Reduce, SCALE_BLOCK, ScaleLayout, Wire,
};
pub use device::memory::DevicePlan;
pub use device::table::{Key as TableKey, Provenance, RULE, Row as TableRow, Table, TablePhase};
pub use device::tuning::{ChosenBy, Launch, Launches, Measure, PhaseTuning, Sums, Tuning};
pub use object::ExpertParallel;
pub use plan::{Plan, Regions};
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub use processes::launch_command;
#[cfg(target_os = "linux")]
pub use processes::{Launched, Rendezvous, Secret, launch};
pub use world::World;
