//! A kernel that takes its time: what stands in for work of others, and what holds streams back until all of them are full.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::gpu::{Carveout, Constant, Geometry, Kernels, Program, Source, Spec, Stream, Targets};
use crate::kernel_source;

/// Threads of the kernel: one warp of NVIDIA.
const THREADS: u32 = 32;

/// Longest delay (arbitrary: far beyond any test, and no machine is lost to it).
const MOST: Duration = Duration::from_secs(10);

/// The kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DelaySpec;

impl Spec for DelaySpec {
    fn program(&self) -> Program {
        const SOURCES: &[Source] =
            &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/sync.cuh"), kernel_source!("measure/delay.cu")];
        Program {
            name: "measure delay".into(),
            entry: "measure_delay",
            sources: SOURCES,
            constants: vec![Constant::Int("THREADS", THREADS.into())],
            threads: THREADS,
            smem_bytes: 0,
            max_registers: 32,
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

static KERNELS: Kernels<DelaySpec> = Kernels::new();

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    nanoseconds: u64,
}

/// The kernel, for the table of resources.
pub fn programs() -> Vec<Program> {
    vec![DelaySpec.program()]
}

/// Loads the kernel, so that no later call does.
///
/// # Errors
/// Those of the compiler and of the driver.
pub fn load(stream: &Stream) -> Result<()> {
    KERNELS.load(stream.device(), DelaySpec).map(|_| ())
}

/// Queues one warp that watches the clock for so long.
///
/// # Errors
/// `Invalid` for more than 10 seconds; those of the compiler and of the driver.
pub fn delay(stream: &Stream, time: Duration) -> Result<()> {
    const OP: &str = "delay";
    if time > MOST {
        return Err(Error::invalid(OP, "time", format!("{time:?}"), format!("at most {MOST:?}")));
    }
    let kernel = KERNELS.get(OP, stream, DelaySpec)?;
    let geometry = Geometry { threads: THREADS, ..Geometry::default() };
    // SAFETY: the kernel takes `Parameters` and touches no memory.
    unsafe { kernel.launch(stream, &geometry, &Parameters { nanoseconds: time.as_nanos() as u64 }) }
}
