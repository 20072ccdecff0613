//! The round trip of a signal between two GPUs.

use std::cell::Cell;
use std::time::Duration;

use super::{OP, statistics};
use crate::error::{Error, Result};
use crate::gpu::{Carveout, Constant, Device, Geometry, Kernels, Program, Shareable, Source, Spec, Stream, Targets};
use crate::kernel_source;
use crate::measure::Statistics;

/// Round trips of a sample (arbitrary: 2 ms between two H200), samples, and the longest wait for a word (arbitrary: a thousand times what all take).
const NUM_TRIPS: u64 = 1000;
/// See [`NUM_TRIPS`].
const NUM_SAMPLES: usize = 15;
/// See [`NUM_TRIPS`].
const TIMEOUT: Duration = Duration::from_secs(2);
/// Threads of the kernel: one warp of NVIDIA.
const THREADS: u32 = 32;
/// Where the kernel leaves its time (arbitrary: not in the line of the word that is polled).
const RESULT_AT: usize = 256;

/// The kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SignalSpec;

impl Spec for SignalSpec {
    fn program(&self) -> Program {
        const SOURCES: &[Source] =
            &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/sync.cuh"), kernel_source!("measure/link/signal.cu")];
        Program {
            name: "measure link signal".into(),
            entry: "measure_link_signal",
            sources: SOURCES,
            constants: vec![Constant::Int("THREADS", THREADS.into()), Constant::Int("NUM_ROUNDS", NUM_TRIPS as i64)],
            threads: THREADS,
            smem_bytes: 0,
            max_registers: 32,
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

static KERNELS: Kernels<SignalSpec> = Kernels::new();

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    own: u64,
    other: u64,
    result: u64,
    epoch: u64,
    timeout_ns: u64,
    begins: u64,
}

/// One of the GPUs.
struct End {
    stream: Stream,
    /// The word that it polls, and at [`RESULT_AT`] its time.
    words: Shareable,
}

/// Both; the first begins.
struct Pair {
    ends: [End; 2],
    next_epoch: Cell<u64>,
}

/// Seconds of a word to the other GPU and one back.
///
/// # Errors
/// [`Error::Invalid`] when a word has not come within two seconds; those of memory, of access to it, and of compiling the kernel.
pub fn round_trip(devices: [&Device; 2]) -> Result<Statistics> {
    let end = |device: &Device| -> Result<End> {
        KERNELS.load(device, SignalSpec)?;
        let words = Shareable::new(device, 2 * RESULT_AT)?;
        devices.iter().try_for_each(|other| words.allow(other))?;
        Ok(End { stream: Stream::new(device)?, words })
    };
    let pair = Pair { ends: [end(devices[0])?, end(devices[1])?], next_epoch: Cell::new(1) };
    // The first warms up.
    let samples: Vec<f64> = (0..=NUM_SAMPLES).map(|_| pair.seconds()).collect::<Result<_>>()?;
    statistics("round trips", &samples[1..])
}

impl Pair {
    fn seconds(&self) -> Result<f64> {
        let epoch = self.next_epoch.get();
        self.next_epoch.set(epoch + NUM_TRIPS + 1);
        self.ends.iter().try_for_each(|end| end.words.write(&end.stream, RESULT_AT, &[0; 8]))?;
        // The one that answers first: it waits for the other.
        for at in [1, 0] {
            let End { stream, words } = &self.ends[at];
            let own = words.address().address;
            let parameters = Parameters {
                own,
                other: self.ends[1 - at].words.address().address,
                result: own + RESULT_AT as u64,
                epoch,
                timeout_ns: TIMEOUT.as_nanos() as u64,
                begins: u64::from(at == 0),
            };
            let geometry = Geometry { threads: THREADS, ..Geometry::default() };
            let kernel = KERNELS.get(OP, stream, SignalSpec)?;
            // SAFETY: the kernel takes `Parameters`; the words are open to both GPUs and live until `drop` has waited for the streams.
            unsafe { kernel.launch(stream, &geometry, &parameters) }?;
        }
        self.ends.iter().try_for_each(|end| end.stream.synchronize())?;
        let End { stream, words } = &self.ends[0];
        let nanoseconds = words.read(stream, RESULT_AT, 8)?.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        if nanoseconds == 0 {
            return Err(Error::invalid(OP, "a word of the other GPU", "absent", format!("there within {TIMEOUT:?}")));
        }
        Ok(nanoseconds as f64 / 1e9 / NUM_TRIPS as f64)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // The memory goes next, and does not wait for kernels itself. A failure leaves nothing to do.
        for end in &self.ends {
            let _ = end.stream.synchronize();
        }
    }
}
