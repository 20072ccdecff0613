//! Copies between GPUs that begin at the same moment.

use std::cell::Cell;
use std::time::Duration;

use super::OP;
use super::pattern::{MAX_GPUS, Move, Pattern, grids};
use crate::error::{Error, Result};
use crate::gpu::{Carveout, Constant, Device, Event, Geometry, Graph, Kernels, Program, Shareable, Source, Spec, Stream, Targets};
use crate::kernel_source;
use crate::measure::delay::{self, delay};
use crate::measure::timing::{MAX_QUEUED, Rotation, rotation};
use crate::random::SplitMix64;

/// Threads of a block of the copy, and vectors that each has in flight (arbitrary: with one block on each multiprocessor of an H200 4 MB are in flight,
/// many times what its link holds).
pub const THREADS: u32 = 256;
/// See [`THREADS`].
const VECTORS: u32 = 8;
/// Bytes of a vector (spec: the widest load of a thread up to compute capability 9.0).
const VECTOR_BYTES: usize = 16;
/// Copies end at a multiple of this (arbitrary: two lines of a cache), with room for a guard behind them.
const ALIGNMENT: usize = 256;
/// Bytes behind each copy that must stay as they were (arbitrary: one vector).
const GUARD_BYTES: usize = VECTOR_BYTES;
/// What destinations hold before they are written (arbitrary).
const POISON: u8 = 0xFF;

/// Calls of a sample at least and at most, and the bytes that they should move (arbitrary: over a millisecond at 400 GB/s, so that nothing of GPUs that do not
/// start at quite the same moment is left; the most make small copies exceed the L2 cache of today's GPUs).
const MIN_CALLS: u64 = 2;
/// See [`MIN_CALLS`].
const MAX_CALLS: u64 = 2048;
/// See [`MIN_CALLS`].
const SAMPLE_BYTES: u64 = 512 << 20;

/// Samples of a turn (arbitrary).
const NUM_SAMPLES: usize = 3;

/// How often a sample is taken again when the host had not queued it before the gate opened; the gate is held four times as long then.
const NUM_ATTEMPTS: usize = 5;

/// The kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopySpec;

impl Spec for CopySpec {
    fn program(&self) -> Program {
        const SOURCES: &[Source] =
            &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/copy.cuh"), kernel_source!("measure/link/copy.cu")];
        Program {
            name: "measure link copy".into(),
            entry: "measure_link_copy",
            sources: SOURCES,
            constants: vec![
                Constant::Int("THREADS", THREADS.into()),
                Constant::Int("VECTORS", VECTORS.into()),
                Constant::Int("MAX_PIECES", MAX_GPUS as i64 - 1),
            ],
            threads: THREADS,
            smem_bytes: 0,
            // Derived: 4 registers a vector and 32 for addresses; 64 or fewer leave room for 1024 threads on an SM of 65536 registers.
            max_registers: 32 + 4 * VECTORS,
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

static KERNELS: Kernels<CopySpec> = Kernels::new();

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Piece {
    from: u64,
    to: u64,
    num_vectors: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    pieces: [Piece; MAX_GPUS - 1],
    num_pieces: u32,
    blocks_of_piece: u32,
}

/// What moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// A kernel of the sender.
    Write,
    /// A kernel of the receiver.
    Read,
    /// The driver's copy, on a stream of the sender.
    Engine,
}

/// One of the GPUs.
struct Gpu {
    stream: Stream,
    from: Shareable,
    to: Shareable,
    start: Event,
    end: Event,
}

/// All of them, with sources and destinations side by side.
pub struct Links {
    gpus: Vec<Gpu>,
    /// Holds all of them back until each has its work.
    gate: (Stream, Event),
    /// What sources hold, again and again, each GPU's from another place on.
    pattern: Vec<u8>,
    num_vectors: u64,
    pub rotation: Rotation,
    stride_bytes: usize,
    /// Copy with which the next sample of the copy engine begins.
    next_copy: Cell<usize>,
}

/// A way that is measured, ready to be.
pub struct Job {
    pub pattern: Pattern,
    pub means: Means,
    blocks_of_piece: u32,
    num_calls: usize,
    /// GPUs that have something to do.
    parts: Vec<Part>,
}

struct Part {
    gpu: usize,
    moves: Vec<Move>,
    /// Absent for the copy engine, whose copies are queued one by one: as a node of a graph one can be far slower.
    graph: Option<Graph>,
}

impl Job {
    pub fn name(&self) -> String {
        format!("{:?} {:?} {}", self.means, self.pattern, self.blocks_of_piece).to_lowercase()
    }

    /// Of each GPU that has something to do; absent for the copy engine.
    pub fn num_blocks(&self) -> Option<u32> {
        (self.means != Means::Engine).then(|| self.blocks_of_piece * self.parts[0].moves.len() as u32)
    }

    /// Copies that a sample that begins with the first of them uses.
    fn num_copies(&self, links: &Links) -> usize {
        self.num_calls.min(links.rotation.num_copies)
    }
}

impl Links {
    pub fn new(devices: &[Device], bytes: u64) -> Result<Self> {
        let ordinals: Vec<u32> = devices.iter().map(Device::ordinal).collect();
        let has_twin = (1..ordinals.len()).any(|i| ordinals[..i].contains(&ordinals[i]));
        if !(2..=MAX_GPUS).contains(&devices.len()) || has_twin {
            return Err(Error::invalid(OP, "devices", format!("{ordinals:?}"), format!("2 to {MAX_GPUS} different GPUs")));
        }
        let least_bytes = VECTOR_BYTES * (devices.len() - 1);
        let too_large = || Error::invalid(OP, "bytes", bytes, format!("{least_bytes} or more, and far fewer than 2^63"));
        let copy_bytes = usize::try_from(bytes).map_err(|_| too_large())? / VECTOR_BYTES * VECTOR_BYTES;
        if copy_bytes < least_bytes {
            return Err(too_large());
        }
        let l2_bytes = devices.iter().map(|device| device.properties().l2_bytes).max().unwrap_or(0);
        let rotation = rotation(copy_bytes as u64, l2_bytes, MAX_CALLS as usize);
        let stride_bytes = (copy_bytes + GUARD_BYTES).checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
        let len = stride_bytes.checked_mul(rotation.num_copies).ok_or_else(too_large)?;
        let gpus = devices.iter().map(|device| Gpu::new(device, devices, len)).collect::<Result<Vec<_>>>()?;
        // Random, because a GPU is faster on zeros; of a prime length, so that no other place of a source looks like the right one.
        let mut pattern = vec![0; 8_388_593]; // arbitrary: the greatest prime below 8 MiB
        let mut random = SplitMix64::new(1);
        pattern.fill_with(|| random.next_u64() as u8);
        let gate = (Stream::new(&devices[0])?, Event::new(&devices[0])?);
        delay::load(&gate.0)?;
        let links =
            Links { gpus, gate, pattern, num_vectors: (copy_bytes / VECTOR_BYTES) as u64, rotation, stride_bytes, next_copy: Cell::new(0) };
        (0..devices.len()).try_for_each(|gpu| links.fill(gpu))?;
        Ok(links)
    }

    pub fn bytes(&self) -> u64 {
        self.num_vectors * VECTOR_BYTES as u64
    }

    /// What byte `at` of a GPU's source is.
    fn source(&self, gpu: usize, at: usize) -> u8 {
        const SHIFT: usize = 1_048_583; // arbitrary: a prime, of which 7 are less than the length of the pattern
        self.pattern[(at + gpu * SHIFT) % self.pattern.len()]
    }

    fn fill(&self, gpu: usize) -> Result<()> {
        let Gpu { stream, from, .. } = &self.gpus[gpu];
        let (period, len) = (self.pattern.len(), from.len());
        let first: Vec<u8> = (0..period.min(len)).map(|at| self.source(gpu, at)).collect();
        from.write(stream, 0, &first)?;
        let mut filled = first.len();
        while filled < len {
            let num = filled.min(len - filled);
            // SAFETY: the memory lives until `drop` has waited for the streams.
            unsafe { from.copy_from(stream, filled, from, 0, num) }?;
            filled += num;
        }
        stream.synchronize()
    }

    /// Every way to move the bytes, with what it needs.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let num_sms = self.gpus.iter().map(|gpu| gpu.stream.device().num_sms()).min().unwrap_or(1);
        let mut jobs = Vec::new();
        for pattern in [Pattern::Alone, Pattern::Together] {
            let moves = pattern.moves(0, self.gpus.len(), self.num_vectors, false);
            let most_vectors = moves.iter().map(|m| m.num).max().unwrap_or(0);
            for means in [Means::Write, Means::Read] {
                for blocks_of_piece in grids(num_sms, moves.len(), most_vectors) {
                    jobs.push(self.job(pattern, means, blocks_of_piece)?);
                }
            }
            jobs.push(self.job(pattern, Means::Engine, 0)?);
        }
        Ok(jobs)
    }

    fn job(&self, pattern: Pattern, means: Means, blocks_of_piece: u32) -> Result<Job> {
        let calls = (SAMPLE_BYTES / self.bytes()).clamp(MIN_CALLS, MAX_CALLS) as usize;
        let mut parts = Vec::new();
        for gpu in 0..self.gpus.len() {
            let moves = pattern.moves(gpu, self.gpus.len(), self.num_vectors, means == Means::Read);
            if !moves.is_empty() {
                parts.push(Part { gpu, moves, graph: None });
            }
        }
        let num_calls = match means {
            // Half of what is queued without waiting: the gate needs a place too.
            Means::Engine => calls.min(MAX_QUEUED / 2 / parts[0].moves.len()),
            _ => calls.max(self.rotation.num_copies),
        };
        if means != Means::Engine {
            for part in &mut parts {
                let stream = &self.gpus[part.gpu].stream;
                let all = || {
                    (0..num_calls).try_for_each(|call| self.kernel(part.gpu, &part.moves, blocks_of_piece, call % self.rotation.num_copies))
                };
                part.graph = Some(Graph::capture(stream, all)?);
            }
        }
        Ok(Job { pattern, means, blocks_of_piece, num_calls, parts })
    }

    fn kernel(&self, gpu: usize, moves: &[Move], blocks_of_piece: u32, copy: usize) -> Result<()> {
        let stream = &self.gpus[gpu].stream;
        let mut pieces = [Piece::default(); MAX_GPUS - 1];
        for (piece, m) in pieces.iter_mut().zip(moves) {
            let at = (copy * self.stride_bytes) as u64 + m.at * VECTOR_BYTES as u64;
            let (from, to) = (&self.gpus[m.from].from, &self.gpus[m.to].to);
            *piece = Piece { from: from.address().address + at, to: to.address().address + at, num_vectors: m.num };
        }
        let num_pieces = moves.len() as u32;
        let parameters = Parameters { pieces, num_pieces, blocks_of_piece };
        let geometry = Geometry { grid: [num_pieces * blocks_of_piece, 1, 1], threads: THREADS, ..Geometry::default() };
        let kernel = KERNELS.get(OP, stream, CopySpec)?;
        // SAFETY: the kernel takes `Parameters`; the copy lies in both memories, which are open to all GPUs and live until `drop` has waited for the streams.
        unsafe { kernel.launch(stream, &geometry, &parameters) }
    }

    fn engine(&self, gpu: usize, moves: &[Move], copy: usize) -> Result<()> {
        for m in moves {
            let at = copy * self.stride_bytes + m.at as usize * VECTOR_BYTES;
            let (from, to) = (&self.gpus[m.from].from, &self.gpus[m.to].to);
            // SAFETY: the memory lives until `drop` has waited for the streams.
            unsafe { to.copy_from(&self.gpus[gpu].stream, at, from, at, m.num as usize * VECTOR_BYTES) }?;
        }
        Ok(())
    }

    /// Seconds of a call of the slowest GPU, all of which begin at the same moment, with this copy.
    fn seconds(&self, job: &Job, first_copy: usize) -> Result<f64> {
        let num_driver_calls: usize =
            job.parts.iter().map(|part| if part.graph.is_some() { 4 } else { 3 + job.num_calls * part.moves.len() }).sum();
        // Arbitrary: longer than a host needs for them, most likely.
        let mut time = Duration::from_micros(200 + 10 * num_driver_calls as u64);
        let (gate, opens) = &self.gate;
        for _ in 0..NUM_ATTEMPTS {
            delay(gate, time)?;
            opens.record(gate)?;
            for part in &job.parts {
                let Gpu { stream, start, end, .. } = &self.gpus[part.gpu];
                stream.wait_for(opens)?;
                start.record(stream)?;
                match &part.graph {
                    Some(graph) => graph.launch(stream)?,
                    None => (0..job.num_calls)
                        .try_for_each(|call| self.engine(part.gpu, &part.moves, (first_copy + call) % self.rotation.num_copies))?,
                }
                end.record(stream)?;
            }
            let was_late = gate.is_idle()?;
            let mut slowest = 0.0f64;
            for part in &job.parts {
                let Gpu { stream, start, end, .. } = &self.gpus[part.gpu];
                stream.synchronize()?;
                slowest = slowest.max(end.seconds_since(start)?);
            }
            if !was_late {
                return Ok(slowest / job.num_calls as f64);
            }
            time *= 4;
        }
        Err(Error::invalid(OP, "the host", format!("not done with queueing after {time:?}"), "faster: it is busy with other work"))
    }

    pub fn samples(&self, job: &Job) -> Result<Vec<f64>> {
        let sample = |_| {
            let copy = self.next_copy.get();
            self.next_copy.set((copy + job.num_calls) % self.rotation.num_copies);
            self.seconds(job, copy)
        };
        (0..NUM_SAMPLES).map(sample).collect()
    }

    /// Runs a sample and checks the first and the last copy that it used: beginning and end of what each GPU got from each other, and the guards.
    pub fn verify(&self, job: &Job) -> Result<()> {
        self.gpus.iter().try_for_each(|gpu| gpu.to.fill(gpu.to.len(), POISON))?;
        self.seconds(job, 0)?;
        for copy in [0, job.num_copies(self) - 1] {
            let start = copy * self.stride_bytes;
            for m in job.parts.iter().flat_map(|part| &part.moves) {
                let (first, all) = (start + m.at as usize * VECTOR_BYTES, m.num as usize * VECTOR_BYTES);
                let len = all.min(64 << 10); // arbitrary: enough to see every thread of many blocks
                for at in [first, first + all - len] {
                    let gpu = &self.gpus[m.to];
                    let got = gpu.to.read(&gpu.stream, at, len)?;
                    if let Some(i) = (0..len).find(|&i| got[i] != self.source(m.from, at + i)) {
                        let what = format!("byte {} of copy {copy} from GPU {} to {} ({})", at + i - start, m.from, m.to, job.name());
                        return Err(Error::invalid(OP, what, got[i], self.source(m.from, at + i)));
                    }
                }
            }
            for gpu in &self.gpus {
                let guard = gpu.to.read(&gpu.stream, start + self.bytes() as usize, GUARD_BYTES)?;
                if let Some(byte) = guard.iter().find(|byte| **byte != POISON) {
                    return Err(Error::invalid(OP, format!("byte behind copy {copy} ({})", job.name()), byte, POISON));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        // The memory goes next, and does not wait for kernels itself. A failure leaves nothing to do.
        for gpu in &self.gpus {
            let _ = gpu.stream.synchronize();
        }
    }
}

impl Gpu {
    fn new(device: &Device, others: &[Device], len: usize) -> Result<Self> {
        let open = || -> Result<Shareable> {
            let memory = Shareable::new(device, len)?;
            others.iter().try_for_each(|other| memory.allow(other))?;
            Ok(memory)
        };
        KERNELS.load(device, CopySpec)?;
        Ok(Gpu { stream: Stream::new(device)?, from: open()?, to: open()?, start: Event::new(device)?, end: Event::new(device)? })
    }
}
