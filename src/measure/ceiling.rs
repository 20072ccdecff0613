//! What this GPU can do at best: a copy of the same bytes, and an empty kernel. Measured in the run whose figures are compared with it.

use std::array;

use super::timing::{MAX_QUEUED, Replay, eager, eager_samples, graph_replay, host_cost, rotation};
use super::{Arm, Cooldown, Statistics, rounds};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Carveout, Constant, Geometry, Kernels, Program, Source, Spec, Stream, Targets};
use crate::kernel_source;
use crate::random::SplitMix64;

const OP: &str = "ceiling";

/// Threads of a block of the copy kernels (measured: see [`Shape`]).
const THREADS: u32 = 256;
/// Bytes of a vector (spec: the widest load of a thread up to compute capability 9.0).
const VECTOR_BYTES: usize = 16;

/// Copies end at a multiple of this (spec: alignment of the driver's allocations), with room for a guard behind them.
const ALIGNMENT: usize = 256;
/// Bytes behind each copy that must stay as they were (arbitrary: one vector).
const GUARD_BYTES: usize = VECTOR_BYTES;
/// What destinations hold before they are written (arbitrary).
const POISON: u8 = 0xFF;

/// Nodes of a graph at least and at most, and the bytes that its copies should move (arbitrary: a quarter of a millisecond at 4 TB/s, so that the step
/// from graph to graph vanishes; for small copies the most nodes keep that of a capture below milliseconds).
const MIN_NODES: u64 = 2;
/// See [`MIN_NODES`].
const MAX_NODES: u64 = 512;
/// See [`MIN_NODES`].
const GRAPH_BYTES: u64 = 1 << 30;

/// Turns of each way to copy, and samples of a turn (arbitrary: 15 samples an arm, as the recorded ceilings).
const NUM_ROUNDS: usize = 3;
/// See [`NUM_ROUNDS`].
const NUM_SAMPLES: usize = 5;

/// The best copy of some bytes; times in seconds of one copy.
#[derive(Debug, Clone, Copy, serde::Serialize)]
#[non_exhaustive]
pub struct CopyCeiling {
    /// Bytes read plus bytes written by one copy.
    pub moved_bytes: u64,
    /// Sources and destinations that took turns.
    pub num_copies: usize,
    /// They exceed twice the L2 cache; otherwise this is no figure of the memory.
    pub is_beyond_cache: bool,
    /// The driver's copy, queued call by call.
    pub eager: Statistics,
    /// The driver's copy as a node of a graph.
    pub node: Statistics,
    /// The kernel of [`Shape::Streaming`] as a node of a graph.
    pub streaming_kernel: Statistics,
    /// The kernel of [`Shape::Plain`] as a node of a graph.
    pub plain_kernel: Statistics,
    /// The least of the four medians.
    pub best_seconds: f64,
    /// `moved_bytes` in that time.
    pub bytes_per_second: f64,
}

/// The cost of doing nothing; seconds.
#[derive(Debug, Clone, Copy, serde::Serialize)]
#[non_exhaustive]
pub struct EmptyLaunch {
    /// An empty kernel as a node of a graph.
    pub node: Statistics,
    /// The same, launched programmatically: it may start while the one before it ends, and waits for it.
    pub programmatic_node: Statistics,
    /// Per kernel of many that the host queues in a row.
    pub eager: Statistics,
    /// One kernel between two events.
    pub between_events: Statistics,
    /// What the bare launch costs the host.
    pub host_cost: Statistics,
    /// The same with the programmatic attribute.
    pub programmatic_host_cost: Statistics,
}

/// How a copy kernel goes about it. Measured (H200, `moe info --ceilings`, 207 / 544 / 1090 / 2160 / 3800 MB read and written): streaming 3.86 / 3.94 /
/// 4.01 / 4.02 / 4.03 TB/s, plain 4.07 / 4.15 / 4.19 / 4.21 / 4.23, the driver's copy queued by itself 3.84 / 4.09 / 4.19 / 4.23 / 4.26. At 34 MB a probe
/// of 36 shapes (128 to 1024 threads, 1 to 16 vectors, five kinds of loads, three of stores, grids that loop) had streaming before plain, 3.61
/// against 3.56, and no shape more than 1 % above the better of the two at any size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Eight vectors of 16 bytes in flight in each thread, first to leave the caches.
    Streaming,
    /// One vector a thread, cached as any other.
    Plain,
}

impl Shape {
    /// Vectors of a thread.
    const fn num_vectors(self) -> u32 {
        match self {
            Shape::Streaming => 8,
            Shape::Plain => 1,
        }
    }
}

/// Kernels of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CeilingSpec {
    /// A copy.
    Copy(Shape),
    /// Waits for the kernel before it and ends.
    Empty(Parameters),
}

/// How many bytes of parameters an empty kernel takes, which the driver copies at each launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Parameters {
    /// 8.
    Few,
    /// 22 608: as many as a cast of a list of 256 matrices takes.
    Many,
}

/// Words of 8 bytes of [`Parameters::Many`].
const MANY_WORDS: usize = 22_608 / 8;

impl Parameters {
    /// Words of 8 bytes.
    const fn num_words(self) -> usize {
        match self {
            Parameters::Few => 1,
            Parameters::Many => MANY_WORDS,
        }
    }
}

impl CeilingSpec {
    /// Each of them.
    pub const ALL: [CeilingSpec; 4] = [
        CeilingSpec::Copy(Shape::Streaming),
        CeilingSpec::Copy(Shape::Plain),
        CeilingSpec::Empty(Parameters::Few),
        CeilingSpec::Empty(Parameters::Many),
    ];
}

impl Spec for CeilingSpec {
    fn program(&self) -> Program {
        const COPY: &[Source] =
            &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/copy.cuh"), kernel_source!("measure/copy.cu")];
        const EMPTY: &[Source] = &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("measure/empty.cu")];
        match *self {
            CeilingSpec::Copy(shape) => Program {
                name: format!("measure copy {}", if shape == Shape::Streaming { "streaming" } else { "plain" }),
                entry: "measure_copy",
                sources: COPY,
                constants: vec![
                    Constant::Int("THREADS", THREADS.into()),
                    Constant::Int("VECTORS", shape.num_vectors().into()),
                    Constant::Bool("STREAMING", shape == Shape::Streaming),
                ],
                threads: THREADS,
                smem_bytes: 0,
                // Derived: 4 registers a vector and 32 for addresses; 64 or fewer leave room for 1024 threads on an SM of 65536 registers.
                max_registers: 32 + 4 * shape.num_vectors(),
                carveout: Carveout::Shared,
                targets: Targets::All,
            },
            CeilingSpec::Empty(parameters) => Program {
                name: format!("measure empty{}", if parameters == Parameters::Many { ", many parameters" } else { "" }),
                entry: "measure_empty",
                sources: EMPTY,
                constants: vec![Constant::Int("THREADS", EMPTY_THREADS.into()), Constant::Int("WORDS", parameters.num_words() as i64)],
                threads: EMPTY_THREADS,
                smem_bytes: 0,
                max_registers: 32,
                carveout: Carveout::Shared,
                targets: Targets::All,
            },
        }
    }
}

static KERNELS: Kernels<CeilingSpec> = Kernels::new();

/// Threads of the empty kernel: one warp of NVIDIA.
const EMPTY_THREADS: u32 = 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct CopyParameters {
    from: u64,
    to: u64,
    num_vectors: u64,
}

/// Sources and destinations side by side, each with room for a guard.
struct Slots {
    from: Buffer,
    to: Buffer,
    /// What `from` holds: this again and again.
    pattern: Vec<u8>,
    num: usize,
    copy_bytes: usize,
    stride_bytes: usize,
}

/// Measures the ways to copy `moved_bytes / 2` bytes (rounded down to a multiple of 16) from one place of the device's memory to another, in turns:
/// the driver's copy queued call by call, the same as a node of a graph, and two copy kernels as nodes of a graph. The ceiling of a kernel that
/// moves the same bytes is the best of them: a copy node can be far slower than a copy queued by itself (2.7 against 4.2 TB/s on an H200). Each result is checked, before
/// and after.
///
/// Takes memory for `moved_bytes`, or for more than twice the L2 cache if that is more, and about a tenth of a second beside the set-up.
///
/// # Errors
/// [`Error::Invalid`] for less than 32 bytes, [`Error::Memory`], [`Error::Gpu`], and those of compiling the kernel.
pub fn copy(stream: &Stream, moved_bytes: u64) -> Result<CopyCeiling> {
    let l2_bytes = stream.device().properties().l2_bytes;
    let copy_bytes = usize::try_from(moved_bytes / 2).unwrap_or(usize::MAX) / VECTOR_BYTES * VECTOR_BYTES;
    if copy_bytes == 0 {
        return Err(Error::invalid(OP, "moved_bytes", moved_bytes, "at least 32, read and written"));
    }
    let moved_bytes = 2 * copy_bytes as u64;
    let rotation = rotation(moved_bytes, l2_bytes, MAX_NODES as usize);
    let num_nodes = (GRAPH_BYTES / moved_bytes).clamp(MIN_NODES, MAX_NODES).max(rotation.num_copies as u64) as usize;
    let slots = Slots::new(stream, copy_bytes, rotation.num_copies)?;
    let memcpy = |node: usize| slots.memcpy(stream, node);
    let streaming = |node: usize| slots.kernel(stream, Shape::Streaming, node);
    let plain = |node: usize| slots.kernel(stream, Shape::Plain, node);
    for way in [&memcpy as &dyn Fn(usize) -> Result<()>, &streaming, &plain] {
        slots.poison(stream)?;
        (0..rotation.num_copies).try_for_each(way)?;
        slots.verify(stream)?;
    }
    let nodes = [
        Replay::capture(stream, memcpy, num_nodes)?,
        Replay::capture(stream, streaming, num_nodes)?,
        Replay::capture(stream, plain, num_nodes)?,
    ];
    let mut arms = vec![Arm::new("eager memcpy", || eager_samples(stream, memcpy, num_nodes, NUM_SAMPLES))];
    for (name, node) in ["memcpy node", "streaming kernel", "plain kernel"].into_iter().zip(&nodes) {
        arms.push(Arm::new(name, || node.time(stream, NUM_SAMPLES)));
    }
    let measured = rounds(&mut arms, NUM_ROUNDS, false, &Cooldown::none())?;
    slots.verify(stream)?;
    let [eager, node, streaming_kernel, plain_kernel] = array::from_fn(|arm| measured.arms[arm].seconds);
    let best_seconds = [eager, node, streaming_kernel, plain_kernel].iter().fold(f64::INFINITY, |best, way| best.min(way.median));
    Ok(CopyCeiling {
        moved_bytes,
        num_copies: rotation.num_copies,
        is_beyond_cache: rotation.is_beyond_cache,
        eager,
        node,
        streaming_kernel,
        plain_kernel,
        best_seconds,
        bytes_per_second: moved_bytes as f64 / best_seconds,
    })
}

impl Slots {
    fn new(stream: &Stream, copy_bytes: usize, num: usize) -> Result<Self> {
        let too_large = || Error::invalid(OP, "moved_bytes", format!("{num} copies of {copy_bytes} bytes"), "fewer than 2^63 bytes in all");
        let stride_bytes = (copy_bytes + GUARD_BYTES).checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
        let len = stride_bytes.checked_mul(num).ok_or_else(too_large)?;
        let (from, to) = (Buffer::new(stream.device(), len)?, Buffer::new(stream.device(), len)?);
        // Random, because a GPU is faster on zeros; of a prime length, so that no other place of a source looks like the right one.
        let mut pattern = vec![0; 8_388_593.min(len)]; // arbitrary: the greatest prime below 8 MiB
        let mut random = SplitMix64::new(1);
        pattern.fill_with(|| random.next_u64() as u8);
        for at in (0..len).step_by(pattern.len()) {
            from.upload(stream, at, &pattern[..pattern.len().min(len - at)])?;
        }
        Ok(Slots { from, to, pattern, num, copy_bytes, stride_bytes })
    }

    fn memcpy(&self, stream: &Stream, node: usize) -> Result<()> {
        let at = node % self.num * self.stride_bytes;
        self.to.copy_from(stream, at, &self.from, at, self.copy_bytes)
    }

    fn kernel(&self, stream: &Stream, shape: Shape, node: usize) -> Result<()> {
        let at = (node % self.num * self.stride_bytes) as u64;
        let kernel = KERNELS.get(OP, stream, CeilingSpec::Copy(shape))?;
        let num_vectors = (self.copy_bytes / VECTOR_BYTES) as u64;
        let parameters = CopyParameters { from: self.from.address().address + at, to: self.to.address().address + at, num_vectors };
        let num_blocks = num_vectors.div_ceil(u64::from(THREADS * shape.num_vectors()));
        let num_blocks =
            u32::try_from(num_blocks).map_err(|_| Error::invalid(OP, "moved_bytes", self.copy_bytes, "fewer blocks than 2^32"))?;
        let geometry = Geometry { grid: [num_blocks, 1, 1], threads: THREADS, ..Geometry::default() };
        // SAFETY: the kernel takes `CopyParameters`; the slot lies in both buffers, whose freeing waits for the device's work.
        unsafe { kernel.launch(stream, &geometry, &parameters) }
    }

    fn poison(&self, stream: &Stream) -> Result<()> {
        let len = self.to.len();
        self.to.fill(stream, 0, len, POISON)
    }

    /// Checks the first and the last destination: their beginning, middle, end and guard.
    fn verify(&self, stream: &Stream) -> Result<()> {
        let len = self.copy_bytes.min(1 << 20); // arbitrary: enough to see every thread of many blocks
        for slot in [0, self.num - 1] {
            let start = slot * self.stride_bytes;
            for at in [0, (self.copy_bytes - len) / 2, self.copy_bytes - len] {
                let mut got = vec![0; len];
                self.to.download(stream, start + at, &mut got)?;
                let want = |i: usize| self.pattern[(start + at + i) % self.pattern.len()];
                if let Some(i) = (0..len).find(|&i| got[i] != want(i)) {
                    return Err(Error::invalid(OP, format!("byte {} of copy {slot}", at + i), got[i], want(i)));
                }
            }
            let mut guard = [0; GUARD_BYTES];
            self.to.download(stream, start + self.copy_bytes, &mut guard)?;
            if let Some(byte) = guard.iter().find(|byte| **byte != POISON) {
                return Err(Error::invalid(OP, format!("byte behind copy {slot}"), byte, POISON));
            }
        }
        Ok(())
    }
}

/// Loads an empty kernel of one warp that takes so many parameters: what launches it.
///
/// # Errors
/// [`Error::Gpu`], and those of compiling the kernel; those of the launch from what is returned.
pub fn empty_kernel(stream: &Stream, parameters: Parameters, programmatic: bool) -> Result<impl Fn(usize) -> Result<()> + '_> {
    let kernel = KERNELS.get(OP, stream, CeilingSpec::Empty(parameters))?;
    let geometry = Geometry { threads: EMPTY_THREADS, programmatic, ..Geometry::default() };
    let words = [0u64; MANY_WORDS];
    Ok(move |_| match parameters {
        // SAFETY: the kernel takes one word and touches no memory.
        Parameters::Few => unsafe { kernel.launch(stream, &geometry, &words[0]) },
        // SAFETY: the kernel takes these words and touches no memory.
        Parameters::Many => unsafe { kernel.launch(stream, &geometry, &words) },
    })
}

/// Measures an empty kernel of one warp: as a node of a graph with and without programmatic launch, queued by the host, and what the launch costs the
/// host. The floor of every small kernel, and of every call of this crate.
///
/// # Errors
/// [`Error::Gpu`], and those of compiling the kernel.
pub fn empty_launch(stream: &Stream) -> Result<EmptyLaunch> {
    const NUM_NODES: usize = 200; // as the recorded figures: see docs of `Replay`
    const NUM_REPLAYS: usize = 25; // arbitrary: an odd number has a middle
    let launch = |programmatic| empty_kernel(stream, Parameters::Few, programmatic);
    let node = |programmatic: bool| graph_replay(stream, launch(programmatic)?, NUM_NODES, NUM_REPLAYS);
    Ok(EmptyLaunch {
        node: node(false)?,
        programmatic_node: node(true)?,
        eager: eager(stream, launch(false)?, MAX_QUEUED, NUM_REPLAYS)?,
        between_events: eager(stream, launch(false)?, 1, NUM_REPLAYS)?,
        host_cost: host_cost(stream, launch(false)?, MAX_QUEUED, NUM_REPLAYS)?,
        programmatic_host_cost: host_cost(stream, launch(true)?, MAX_QUEUED, NUM_REPLAYS)?,
    })
}
