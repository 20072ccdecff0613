//! Measuring: the environment, whether a GPU is idle, statistics, variants in turns and over processes, and figures as people read them.

mod arms;
pub mod ceiling;
mod commit;
mod cooldown;
pub mod delay;
pub mod environment;
pub mod idle;
pub mod link;
mod memory;
pub mod nvidia;
mod pairs;
pub mod processes;
pub mod report;
mod statistics;
pub mod timing;

pub use arms::{Arm, ArmRun, ArmTimes, Rounds, rounds};
pub use commit::{Commit, Diff};
pub use cooldown::{Cooldown, Cooled};
pub use environment::Environment;
pub use idle::IdleReport;
pub use memory::available_bytes;
pub use nvidia::Nvidia;
pub use pairs::{Pairs, interleaved};
pub use statistics::Statistics;
