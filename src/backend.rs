//! Where an operation runs.

use std::fmt;
use std::sync::Arc;

use crate::cpu::Level;
use crate::error::{Error, Result};
use crate::gpu::{Device, Stream};

/// Where an operation runs. Asked for means got, or an error: there is no silent fallback.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Backend {
    /// The CPU: always there, the reference for every other backend's bytes.
    Cpu(Cpu),
    /// An NVIDIA GPU, through its driver and run-time compiler; neither is needed to build.
    Cuda(Cuda),
}

impl Backend {
    /// The CPU backend with the best instructions of this machine and rayon's global pool.
    pub fn cpu() -> Self {
        Backend::Cpu(Cpu::default())
    }

    /// The CUDA backend on the GPU with this ordinal, with a stream of its own.
    ///
    /// # Errors
    /// [`Error::Library`] without a driver, [`Error::Invalid`] for an ordinal that no GPU has, [`Error::Gpu`] from the driver.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Cuda::new(ordinal).map(Backend::Cuda)
    }

    /// A backend by name: `cpu`, `cuda` or `cuda:N` (GPU 0 or N), `cuda:N,M,..` (several: see [`Cuda::across`]), `auto` (the CPU).
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a backend that this version does not have, [`Error::Invalid`] for an unknown name, and those of [`Backend::cuda`].
    pub fn from_name(name: &str) -> Result<Self> {
        let unknown = || Error::invalid("backend", "name", format!("`{name}`"), "auto, cpu, cuda, cuda:N, cuda:N,M,.. or hip");
        match name {
            "auto" | "cpu" => Ok(Backend::cpu()),
            "cuda" => Backend::cuda(0),
            "hip" => Err(Error::Unsupported {
                op: "backend",
                what: format!("backend {name}"),
                why: "this version has the cpu and cuda backends".into(),
            }),
            _ => {
                let ordinals = Self::ordinals(name).ok_or_else(unknown)?;
                let gpus = ordinals.iter().map(|&ordinal| Device::open(ordinal)).collect::<Result<Vec<_>>>()?;
                Cuda::on(Stream::new(&gpus[0])?).across(&gpus).map(Backend::Cuda)
            }
        }
    }

    /// The GPUs that a name of [`from_name`](Self::from_name) asks for, at least one, without a look at any; `None` for other names.
    pub fn ordinals(name: &str) -> Option<Vec<u32>> {
        match name {
            "cuda" => Some(vec![0]),
            _ => name.strip_prefix("cuda:")?.split(',').map(|ordinal| ordinal.parse().ok()).collect(),
        }
    }

    /// What the rank with this number works on: of several GPUs the one of its turn, with a stream of its own.
    pub(crate) fn of_rank(&self, rank: usize) -> Result<Self> {
        match self {
            Backend::Cuda(cuda) if cuda.gpus().len() > 1 => cuda.of_rank(rank).map(Backend::Cuda),
            other => Ok(other.clone()),
        }
    }

    /// The CPU backend under it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] that names `op` for another backend.
    pub fn as_cpu(&self, op: &'static str) -> Result<&Cpu> {
        match self {
            Backend::Cpu(cpu) => Ok(cpu),
            Backend::Cuda(_) => Err(Error::Unsupported {
                op,
                what: format!("backend {}", self.name()),
                why: "this operation runs on the cpu in this version".into(),
            }),
        }
    }

    /// The name of this backend.
    pub fn name(&self) -> &'static str {
        match self {
            Backend::Cpu(_) => "cpu",
            Backend::Cuda(_) => "cuda",
        }
    }
}

impl Default for Backend {
    fn default() -> Self {
        Backend::cpu()
    }
}

/// The CUDA backend: the stream in which operations are queued, and how.
///
/// An operation returns when its work is queued. It never waits for the GPU, allocates nothing once its kernels are loaded, and can be captured
/// in a graph. Tensors must lie in memory of the stream's device.
#[derive(Debug, Clone)]
pub struct Cuda {
    stream: Stream,
    programmatic: bool,
    /// Of a world's ranks; absent: the stream's alone.
    gpus: Option<Arc<[Device]>>,
}

impl Cuda {
    /// The GPU with this ordinal, with a stream of its own.
    ///
    /// # Errors
    /// Those of [`Device::open`].
    pub fn new(ordinal: u32) -> Result<Self> {
        Ok(Self::on(Stream::new(&Device::open(ordinal)?)?))
    }

    /// Operations are queued in this stream.
    pub fn on(stream: Stream) -> Self {
        Cuda { stream, programmatic: false, gpus: None }
    }

    /// Ranks of a world that is made with it take turns on these GPUs: rank r, or of ranks that are processes the one with local number r, has the one
    /// with number r modulo how many there are, and a stream of its own. What is not a world runs in the stream, on the first of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the first is not the stream's GPU, or one is there twice.
    pub fn across(mut self, gpus: &[Device]) -> Result<Self> {
        let ordinals: Vec<u32> = gpus.iter().map(Device::ordinal).collect();
        let has_twin = (1..ordinals.len()).any(|i| ordinals[..i].contains(&ordinals[i]));
        if ordinals.first() != Some(&self.device().ordinal()) || has_twin {
            let want = format!("different GPUs, of which the first is {}, that of the stream", self.device().ordinal());
            return Err(Error::invalid("backend", "GPUs", format!("{ordinals:?}"), want));
        }
        self.gpus = (gpus.len() > 1).then(|| gpus.into());
        Ok(self)
    }

    /// The GPUs on which ranks take turns: one, if it was not told otherwise.
    pub fn gpus(&self) -> &[Device] {
        self.gpus.as_deref().unwrap_or(std::slice::from_ref(self.device()))
    }

    /// The same on one rank's GPU, with a stream of its own.
    pub(crate) fn of_rank(&self, rank: usize) -> Result<Self> {
        let gpu = &self.gpus()[rank % self.gpus().len()];
        Ok(Cuda { stream: Stream::new(gpu)?, programmatic: self.programmatic, gpus: None })
    }

    /// With programmatic launch a kernel may start while the one before it in the stream still ends; it waits for it before it reads what may
    /// not be constant. In graphs on an H200 it saves 0.37 us behind a kernel of ours, and costs 0.24 us behind one that lets nothing start early, as
    /// those of a BLAS (measured, `moe bench gate`, K = 2048). Off by default.
    pub fn programmatic(mut self, programmatic: bool) -> Self {
        self.programmatic = programmatic;
        self
    }

    /// Whether kernels are launched programmatically.
    pub fn is_programmatic(&self) -> bool {
        self.programmatic
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        self.stream.device()
    }
}

/// The CPU backend: which instructions, and which threads.
#[derive(Clone, Default)]
pub struct Cpu {
    level: Level,
    threads: Threads,
}

/// The threads that one rank owns.
#[derive(Clone, Default)]
enum Threads {
    /// Rayon's global pool.
    #[default]
    Global,
    /// The calling thread only.
    Caller,
    /// A pool of its own.
    Pool(Arc<rayon::ThreadPool>),
}

impl Cpu {
    /// Runs on `threads` threads of its own; 1 is the calling thread, 0 is rayon's global pool. Results do not depend on it.
    pub fn with_threads(threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => Threads::Global,
            1 => Threads::Caller,
            n => Threads::Pool(Arc::new(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(n)
                    .build()
                    .map_err(|e| Error::Io { what: format!("starting {n} threads"), why: e.to_string() })?,
            )),
        };
        Ok(Self { threads, ..Self::default() })
    }

    /// The same, restricted to an instruction set: for tests, which force each of them. Results do not depend on it.
    #[doc(hidden)]
    pub fn at_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// What one of `num_ranks` ranks of this process gets: its share of the cores, or a pool of its own as large as the one that was asked for.
    pub(crate) fn share(&self, num_ranks: usize) -> Result<Self> {
        let threads = match &self.threads {
            Threads::Global if num_ranks == 1 => return Ok(self.clone()),
            Threads::Global => (std::thread::available_parallelism().map_or(1, usize::from) / num_ranks).max(1),
            Threads::Caller => 1,
            Threads::Pool(pool) => pool.current_num_threads(),
        };
        Ok(Self::with_threads(threads)?.at_level(self.level))
    }

    /// The instruction set in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Threads that work on one call.
    pub fn num_threads(&self) -> usize {
        match &self.threads {
            Threads::Global => rayon::current_num_threads(),
            Threads::Caller => 1,
            Threads::Pool(pool) => pool.current_num_threads(),
        }
    }

    /// Runs `work` once for each index of `0..num_parts`, on this backend's threads. `work` must not wait for another rank.
    pub(crate) fn for_each_part(&self, num_parts: usize, work: impl Fn(usize) + Sync + Send) {
        use rayon::prelude::*;
        let parallel = || (0..num_parts).into_par_iter().for_each(&work);
        match &self.threads {
            _ if num_parts <= 1 => (0..num_parts).for_each(work),
            Threads::Caller => (0..num_parts).for_each(work),
            Threads::Global => parallel(),
            Threads::Pool(pool) => pool.install(parallel),
        }
    }

    /// Runs `work` once for each row of a matrix of `num_rows` rows of `row_bytes`, `stride_bytes` apart, `rows_of_part` rows to a unit of work;
    /// `end_part` runs on the same thread after the last row of each unit.
    pub(crate) fn for_each_row(
        &self,
        matrix: &mut [u8],
        (num_rows, row_bytes, stride_bytes): (usize, usize, usize),
        rows_of_part: usize,
        work: impl Fn(usize, &mut [u8]) + Sync + Send,
        end_part: impl Fn() + Sync + Send,
    ) {
        use rayon::prelude::*;
        if num_rows == 0 {
            return;
        }
        let matrix = &mut matrix[..(num_rows - 1) * stride_bytes + row_bytes];
        // One row may have any stride, 0 included, which no chunk has.
        let stride_bytes = if num_rows == 1 { row_bytes } else { stride_bytes };
        let part = |(index, rows): (usize, &mut [u8])| {
            for (i, row) in rows.chunks_mut(stride_bytes).enumerate() {
                work(index * rows_of_part + i, &mut row[..row_bytes]);
            }
            end_part();
        };
        let part_bytes = rows_of_part * stride_bytes;
        let parallel = |matrix: &mut [u8]| matrix.par_chunks_mut(part_bytes).enumerate().for_each(part);
        match &self.threads {
            _ if num_rows <= rows_of_part => matrix.chunks_mut(part_bytes).enumerate().for_each(part),
            Threads::Caller => matrix.chunks_mut(part_bytes).enumerate().for_each(part),
            Threads::Global => parallel(matrix),
            Threads::Pool(pool) => pool.install(|| parallel(matrix)),
        }
    }

    /// Runs `work` inside this backend's pool, so that rayon iterators in it use its threads; on the calling thread if that is all it has.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Threads::Pool(pool) => pool.install(work),
            Threads::Global | Threads::Caller => work(),
        }
    }

    /// `true` when only the calling thread works.
    pub(crate) fn is_serial(&self) -> bool {
        matches!(self.threads, Threads::Caller)
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu").field("level", &self.level).field("threads", &self.num_threads()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gpus() {
        assert_eq!(Backend::ordinals("cuda"), Some(vec![0]));
        assert_eq!(Backend::ordinals("cuda:3"), Some(vec![3]));
        assert_eq!(Backend::ordinals("cuda:2,0,1"), Some(vec![2, 0, 1]));
        for other in ["cpu", "auto", "hip", "cuda:", "cuda:1,", "cuda:-1", "cuda:0,x", "cuda0", ""] {
            assert_eq!(Backend::ordinals(other), None, "{other}");
        }
        assert!(matches!(Backend::from_name("cuda:0,x"), Err(Error::Invalid { want, .. }) if want.contains("cuda:N,M")));
        assert!(matches!(Backend::cpu().of_rank(5), Ok(Backend::Cpu(_))));
    }
}
