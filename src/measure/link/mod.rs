//! What the links between GPUs can do at best: copies of the same bytes by a kernel that writes, by one that reads and by the copy engine, in one
//! direction alone and between all GPUs at once, and the round trip of a signal. Measured in the run whose figures are compared with it.

mod copies;
mod pattern;
mod signal;

use self::copies::{CopySpec, Job, Links, Means};
use self::pattern::Pattern;
use self::signal::SignalSpec;
use super::{Arm, Cooldown, Statistics, rounds};
use crate::error::{Error, Result};
use crate::gpu::{Device, Program, Spec};

pub use self::pattern::MAX_GPUS;

const OP: &str = "link ceiling";

/// Turns of each way to copy (arbitrary: 9 samples a way).
const NUM_ROUNDS: usize = 3;

/// What the links of some GPUs can do at best; times in seconds of one call, of the slowest GPU.
#[derive(Debug, Clone, Copy, serde::Serialize)]
#[non_exhaustive]
pub struct LinkCeiling {
    /// GPUs that took part.
    pub num_gpus: usize,
    /// Bytes that leave each GPU (or, one direction alone, the first) in one call.
    pub bytes: u64,
    /// Sources and destinations that took turns.
    pub num_copies: usize,
    /// The sources exceed twice the L2 cache.
    pub is_beyond_cache: bool,
    /// A kernel stores to the memory of other GPUs.
    pub write: Way,
    /// A kernel loads from the memory of other GPUs.
    pub read: Way,
    /// The driver's copy.
    pub copy_engine: Way,
    /// A word to the other GPU and one back, between the first two GPUs.
    pub round_trip: Statistics,
}

/// One way to move bytes.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Way {
    /// From the first GPU to the second, nothing else on any link.
    pub alone: Transfer,
    /// All GPUs at once, each to all others.
    pub together: Transfer,
}

/// A time and what it comes to.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Transfer {
    /// Of a call.
    pub seconds: Statistics,
    /// [`LinkCeiling::bytes`] in the median.
    pub bytes_per_second: f64,
    /// Blocks of the kernel: the best of those that were tried.
    pub num_blocks: Option<u32>,
}

/// The kernels, for the table of resources.
pub fn programs() -> Vec<Program> {
    vec![CopySpec.program(), SignalSpec.program()]
}

/// Measures what the links between `devices` (2 to 8, with access to each other) can do at best with `bytes` (rounded down to a multiple of 16) leaving each
/// GPU in a call: a copy kernel that writes to the others, one that reads from them (each the best of a few grids, as nodes of graphs), and the driver's
/// copies, queued one by one; in one direction alone, from the first to the second, and from all to all at once, in equal parts. All GPUs begin at the same
/// moment, and the slowest counts. Every way's result is checked, before and after.
///
/// Takes memory for twice `bytes` on each GPU, or for four times the L2 cache if that is more, and about half a second beside the compiler.
///
/// ```no_run
/// use moe_kernels::gpu::Device;
/// use moe_kernels::measure::link::link_ceiling;
///
/// let links = link_ceiling(&[Device::open(0)?, Device::open(1)?], 64 << 20)?;
/// println!("{} GB/s written, {} us round trip", links.write.together.bytes_per_second / 1e9, links.round_trip.median * 1e6);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for another number of GPUs, one that is there twice, and fewer bytes than a vector for each other GPU; [`Error::Unsupported`] when one
/// has no access to another's memory; [`Error::Memory`], [`Error::Gpu`], and those of compiling the kernels.
pub fn link_ceiling(devices: &[Device], bytes: u64) -> Result<LinkCeiling> {
    let links = Links::new(devices, bytes)?;
    let jobs: Vec<Job> = links.jobs()?;
    jobs.iter().try_for_each(|job| links.verify(job))?;
    let mut arms: Vec<Arm<'_>> = jobs.iter().map(|job| Arm::new(job.name(), || links.samples(job))).collect();
    let measured = rounds(&mut arms, NUM_ROUNDS, false, &Cooldown::none())?;
    drop(arms);
    jobs.iter().try_for_each(|job| links.verify(job))?;
    let transfer = |means: Means, pattern: Pattern| -> Result<Transfer> {
        let of_kind = jobs.iter().zip(&measured.arms).filter(|(job, _)| job.means == means && job.pattern == pattern);
        let best = of_kind.min_by(|a, b| a.1.seconds.median.total_cmp(&b.1.seconds.median));
        let (job, times) = best.ok_or_else(|| Error::invalid(OP, "ways to copy", 0, "at least 1"))?;
        Ok(Transfer { seconds: times.seconds, bytes_per_second: links.bytes() as f64 / times.seconds.median, num_blocks: job.num_blocks() })
    };
    let way = |means| -> Result<Way> { Ok(Way { alone: transfer(means, Pattern::Alone)?, together: transfer(means, Pattern::Together)? }) };
    Ok(LinkCeiling {
        num_gpus: devices.len(),
        bytes: links.bytes(),
        num_copies: links.rotation.num_copies,
        is_beyond_cache: links.rotation.is_beyond_cache,
        write: way(Means::Write)?,
        read: way(Means::Read)?,
        copy_engine: way(Means::Engine)?,
        round_trip: signal::round_trip([&devices[0], &devices[1]])?,
    })
}

fn statistics(what: &str, samples: &[f64]) -> Result<Statistics> {
    Statistics::of(samples).ok_or_else(|| Error::invalid(OP, what, format!("{samples:?}"), "at least one, and each a number"))
}
