//! Kernels that wait: how the host ends it, what else runs meanwhile, and which of them may wait at the same time.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use moe_kernels::ep::World;
use moe_kernels::ep::device::AbortLine;
use moe_kernels::ep::device::registry::{Demand, Holder, Limits, Other, Waiting, register};
use moe_kernels::gpu::{Buffer, Device, Geometry, Pinned, Shareable, Spec, Stream, jit};
use moe_kernels::{Backend, Error, Rank, Result};

use super::kernels::{Form, HOLD_SMEM_BYTES, Hold, KERNELS, Scale, Test as Kernel, check_scale, read, scale, words};
use super::raw::{Handle, LaunchConfig, Raw, ok};
use super::shareable::{join, run_ranks};
use super::{Needs, Outcome, Test, ensure, gpu, report, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("the host ends waits", Needs::GpuAlone, abort),
    ("the host ends waits beside calls of the driver", Needs::GpuAlone, abort_beside_calls),
    ("streams share queues", Needs::GpuAlone, queues),
    ("setup beside a kernel that waits", Needs::GpuAlone, setup_beside),
    ("a failed world ends waits::threads", Needs::GpuAlone, threads_fail),
    ("a failed world ends waits::a killed process", Needs::GpuAlone, || processes_fail("abort killed")),
    ("a failed world ends waits::a process that panics", Needs::GpuAlone, || processes_fail("abort panicked")),
    ("a failed world ends waits::a process that gives up", Needs::GpuAlone, || processes_fail("abort gave up")),
    ("kernels beside waiting blocks", Needs::GpuAlone, beside_waiting),
    ("what a block takes", Needs::Gpu, footprints),
    ("the registry of a device", Needs::Gpu, registry),
];

/// Bound of a wait that is ended from outside (arbitrary: far above what ending it takes, and it is paid when the trial fails).
const BOUND: Duration = Duration::from_secs(3);
/// In which it must end (arbitrary: as above).
const SOON: Duration = Duration::from_millis(500);

/// Blocks that wait for a word.
fn hold(stream: &Stream, grid: (u32, u32), word: u64, ended: &Buffer, bound: Duration) -> Result<()> {
    hold_with(stream, grid, 0, word, ended, bound)
}

/// As [`hold`], with shared memory.
fn hold_with(stream: &Stream, (blocks, threads): (u32, u32), smem_bytes: u32, word: u64, ended: &Buffer, bound: Duration) -> Result<()> {
    let kernel = KERNELS.get("test", stream, Kernel::Hold)?;
    let parameters = Hold { word, ended: ended.address().address, bound_nanoseconds: bound.as_nanos() as u64 };
    let geometry = Geometry { grid: [blocks, 1, 1], threads, smem_bytes, ..Geometry::default() };
    // SAFETY: the kernel is `hold` on the stream's device, `Hold` is its struct; the callers wait for the stream while the memory lives.
    unsafe { kernel.launch(stream, &geometry, &parameters) }
}

/// Everything that a trial launches has been launched once: what is loaded late waits for what runs.
fn warm(device: &Device, stream: &Stream) -> Outcome {
    let ended = words(stream, &[1])?;
    hold(stream, (1, 32), ended.address().address, &ended, BOUND)?;
    check_scale(stream, 100, 1)?;
    Ok(device.synchronize()?)
}

/// Streams of which each waits for the word, with a kernel and copies queued behind it.
struct Queues {
    streams: Vec<Stream>,
    ended: Buffer,
    other: Buffer,
    pinned: Pinned,
}

impl Queues {
    fn new(device: &Device, num: usize) -> Result<Self> {
        let stream = Stream::new(device)?;
        let streams = (0..num).map(|_| Stream::new(device)).collect::<Result<Vec<_>>>()?;
        Ok(Queues { streams, ended: words(&stream, &[0])?, other: words(&stream, &vec![0; 1000])?, pinned: Pinned::new(device, 4000)? })
    }

    fn fill(&self, grid: (u32, u32), word: u64) -> Outcome {
        let raw = Raw::open()?;
        let context = raw.primary(self.streams[0].device())?;
        for stream in &self.streams {
            let kernel = KERNELS.get("test", stream, Kernel::Scale { factor: 3 })?;
            hold(stream, grid, word, &self.ended, BOUND)?;
            let here = self.other.address().address;
            raw.with_context(context, || {
                // SAFETY: both memories are pinned or of the device, as large as this, and live until the streams have been waited for.
                ok("cuMemcpyHtoDAsync", unsafe { (raw.copy_to_device)(here, self.pinned.bytes().as_ptr().cast(), 4000, stream.raw()) })
            })?;
            scale(stream, kernel, Scale { from: here, to: here, num: 1000, addend: 1 }, false)?;
        }
        // Until they run, as far as they fit.
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }

    fn wait(&self) -> Outcome {
        for stream in &self.streams {
            stream.synchronize()?;
        }
        Ok(())
    }
}

/// A word of the host's, which kernels wait for.
fn host_word(device: &Device) -> Result<(Arc<Pinned>, u64)> {
    let memory = Arc::new(Pinned::new(device, 4096)?);
    let word = memory.device_address()? + ABORT as u64;
    Ok((memory, word))
}

fn abort() -> Outcome {
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let world = World::threads(&Backend::cpu(), 1)?.remove(0);
    let sms = device.num_sms();
    for (num, grid) in [(1, (1, 32)), (8, (16, 256)), (64, (2, 512)), (1, (sms * 4, 512)), (40, (sms, 256))] {
        let (memory, word) = host_word(&device)?;
        let (queues, line) = (Queues::new(&device, num)?, AbortLine::new(&world, &memory, ABORT));
        queues.fill(grid, word)?;
        let start = Instant::now();
        line.raise();
        let raised = start.elapsed();
        queues.wait()?;
        let ended = start.elapsed();
        report(format!("{num} streams of {} x {} wait: raised in {raised:?}, all ended after {ended:?}", grid.0, grid.1));
        ensure(ended < SOON, format!("{num} streams of {grid:?} ended {ended:?} after the word was set"))?;
        same("blocks that saw it", read(&stream, &queues.ended)?, vec![num as u32 * grid.0])?;
        let want: Vec<u8> = (0..4096).map(|at| u8::from(at == ABORT)).collect();
        ensure(memory.bytes() == want, "something else was set")?;
    }
    Ok(())
}

/// Streams share the hardware's queues: when each is taken by a stream with work behind a kernel that waits, other work waits too. The registry counts on
/// there being as many queues as it says.
fn queues() -> Outcome {
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let bound = Duration::from_millis(40);
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let other = words(&stream, &[0; 8])?;
    let here = other.address().address;
    let after = |stream: &Stream| scale(stream, kernel, Scale { from: here, to: here, num: 8, addend: 1 }, false);
    // Some streams wait, with a kernel behind or without; another one has work.
    let is_held_up = |waiting: &[Stream], free: &Stream, with_kernel: bool| -> Result<bool, Failed> {
        let (zero, ended) = (words(&stream, &[0])?, words(&stream, &[0])?);
        for stream in waiting {
            hold(stream, (1, 32), zero.address().address, &ended, bound)?;
            if with_kernel {
                after(stream)?;
            }
        }
        after(free)?;
        let start = Instant::now();
        free.synchronize()?;
        let took = start.elapsed();
        device.synchronize()?;
        Ok(took > bound / 2)
    };
    let make = |num: usize| (0..num).map(|_| Stream::new(&device)).collect::<Result<Vec<_>>>();
    let queues = Limits::of(&device).queues as usize;
    for with_kernel in [true, false] {
        let mut first = None;
        for num in 1..=queues + 2 {
            let (waiting, free) = (make(num)?, Stream::new(&device)?);
            if first.is_none() && is_held_up(&waiting, &free, with_kernel)? {
                first = Some(num);
            }
        }
        report(format!("{queues} queues; another stream is held up by {first:?} streams that wait, work behind them: {with_kernel}"));
        ensure(first.is_none_or(|num| num >= queues), format!("{first:?} streams hold up another one, there are {queues} queues"))?;
    }
    // Which queue a stream gets does not depend on how many others were made before.
    for gap in 0..2 * queues {
        let first = make(1)?;
        let between = make(gap)?;
        let between = gap.is_multiple_of(2).then_some(between);
        let second = Stream::new(&device)?;
        ensure(queues == 1 || !is_held_up(&first, &second, true)?, format!("one stream holds up another one, made after {gap} others"))?;
        drop(between);
    }
    Ok(())
}

/// While other threads are inside calls of the driver that wait for the device.
fn abort_beside_calls() -> Outcome {
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let world = World::threads(&Backend::cpu(), 1)?.remove(0);
    type Call = fn(&Device, &Stream) -> Result<()>;
    let calls: [(&str, Call); 5] = [
        ("waiting for the stream", |_, stream| stream.synchronize()),
        ("waiting for the context", |device, _| device.synchronize()),
        ("allocating and freeing device memory", |device, _| Buffer::new(device, 64 << 20).map(drop)),
        ("allocating and freeing pinned memory", |device, _| Pinned::new(device, 1 << 20).map(drop)),
        ("compiling and loading a kernel", |device, _| KERNELS.load(device, Kernel::Scale { factor: 101 }).map(drop)),
    ];
    for (name, call) in calls {
        let (memory, word) = host_word(&device)?;
        let line = AbortLine::new(&world, &memory, ABORT);
        let ended = words(&stream, &[0])?;
        hold(&stream, (4, 256), word, &ended, BOUND)?;
        let start = Instant::now();
        let took = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let start = Instant::now();
                call(&device, &stream).map(|()| start.elapsed())
            });
            std::thread::sleep(Duration::from_millis(50));
            line.raise();
            other.join().map_err(|_| Failed::from("the other thread panicked"))
        })??;
        stream.synchronize()?;
        let all = start.elapsed();
        report(format!("{name} took {took:?}; the word was set after 50 ms; all ended after {all:?}"));
        ensure(read(&stream, &ended)? == [4] && all < SOON, format!("{name}: the wait did not end"))?;
    }
    Ok(())
}

/// Which steps of setup wait for a kernel that runs.
fn setup_beside() -> Outcome {
    use std::os::fd::AsFd;
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let ended = words(&stream, &[0])?;
    let word = words(&stream, &[0])?;
    let bound = Duration::from_millis(150);
    let time = |name: &str, work: &mut dyn FnMut() -> Result<()>| -> Outcome {
        hold(&stream, (1, 32), word.address().address, &ended, bound)?;
        std::thread::sleep(Duration::from_millis(5));
        let start = Instant::now();
        work()?;
        let took = start.elapsed();
        let has_waited = stream.is_idle()?;
        stream.synchronize()?;
        report(format!("{name} beside a kernel of {bound:?}: {took:?}{}", if has_waited { ", it waits" } else { "" }));
        ensure(!has_waited, format!("{name} waits for a kernel"))
    };
    let (mut memory, mut mapped) = (None, None);
    time("allocating shareable memory", &mut || Shareable::new(&device, 64 << 20).map(|new| drop(memory.replace(Arc::new(new)))))?;
    let memory = memory.ok_or("no memory")?;
    let file = memory.export()?;
    time("exporting it", &mut || memory.export().map(drop))?;
    time("importing it", &mut || Shareable::import(&device, file.as_fd(), &memory.extent()).map(|new| mapped = Some(new)))?;
    time("unmapping what was imported", &mut || {
        mapped = None;
        Ok(())
    })?;
    let mut memory = Some(memory);
    time("freeing shareable memory", &mut || {
        memory = None;
        Ok(())
    })
}

/// Offset of the abort word in these trials' memory (arbitrary).
const ABORT: usize = 256;

/// This rank waits for its own abort word, as a kernel of an operation does; how long that took and whether it was set.
fn wait_for_abort(device: &Device, word: u64) -> Result<(Duration, bool)> {
    let stream = Stream::new(device)?;
    let ended = words(&stream, &[0])?;
    let start = Instant::now();
    hold(&stream, (2, 64), word, &ended, BOUND)?;
    stream.synchronize()?;
    Ok((start.elapsed(), read(&stream, &ended)? == [2]))
}

/// A rank's line, when all have theirs.
fn line(world: &World, device: &Device) -> Result<(Arc<Pinned>, u64, AbortLine)> {
    let (memory, word) = host_word(device)?;
    let line = AbortLine::new(world, &memory, ABORT);
    world.barrier()?;
    Ok((memory, word, line))
}

fn threads_fail() -> Outcome {
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let ranks = World::run(&Backend::cpu(), 4, |world| {
        let (_memory, word, _line) = line(&world, &device)?;
        if world.rank() == Rank(2) {
            std::thread::sleep(Duration::from_millis(100));
            panic!("a rank of a trial panics");
        }
        wait_for_abort(&device, word)
    })?;
    for (rank, result) in ranks.into_iter().enumerate() {
        match result {
            Err(Error::Poisoned { first }) if rank == 2 => same("the rank that failed", first.rank, Rank(2))?,
            Ok((time, is_set)) => ensure(is_set && time < SOON, format!("rank {rank}: {time:?}, {is_set}"))?,
            Err(error) => return Err(error.into()),
        }
    }
    // A world that ends well sets nothing.
    let ranks = World::run(&Backend::cpu(), 3, |world| {
        let (memory, _, line) = line(&world, &device)?;
        world.barrier()?;
        drop(line);
        world.barrier()?;
        Ok(memory.bytes().to_vec())
    })?;
    for rank in ranks {
        ensure(rank?.iter().all(|byte| *byte == 0), "an abort word was set in a world that did not fail")?;
    }
    Ok(())
}

/// How a rank of [`abort_rank`] ends its world.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Killed,
    Panicked,
    GaveUp,
}

/// A rank in a process of its own: rank 1 ends as it is told, the others wait in a kernel.
pub fn abort_rank(end: End) -> Outcome {
    let world = join()?;
    let device = Device::open(0)?;
    warm(&device, &Stream::new(&device)?)?;
    let (_memory, word, line) = line(&world, &device)?;
    if world.rank() == Rank(1) {
        std::thread::sleep(Duration::from_millis(100));
        match end {
            End::Killed => {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL)?;
            }
            End::Panicked => panic!("a rank of a trial panics"),
            // It finds on the host that rank 0 has left.
            End::GaveUp => drop(world.gather(Ok(Vec::new()))),
        }
        return Ok(());
    }
    if end == End::GaveUp && world.rank() == Rank(0) {
        return Ok(());
    }
    let (time, is_set) = wait_for_abort(&device, word)?;
    ensure(is_set && time < SOON, format!("rank {}: {time:?}, by the abort word: {is_set}", world.rank()))?;
    let first = world.failure().ok_or("no failure is known")?;
    let culprit = if end == End::GaveUp { Rank(0) } else { Rank(1) };
    same("the rank that failed", first.rank, culprit)?;
    drop(line);
    Ok(())
}

fn processes_fail(work: &str) -> Outcome {
    for (rank, (code, text)) in run_ranks(work, 3)?.into_iter().enumerate() {
        let is_victim = rank == 1 && work != "abort gave up";
        ensure((code == Some(0)) != is_victim, format!("rank {rank}: {code:?} {text}"))?;
    }
    Ok(())
}

/// `hold`, loaded as another library would.
fn load(raw: &Raw, device: &Device) -> Result<Handle, Failed> {
    let image = jit::compile(&Kernel::Hold.program(), &jit::architecture(device), None)?.image;
    let (mut module, mut function, name) = (std::ptr::null_mut(), std::ptr::null_mut(), CString::new("hold")?);
    // SAFETY: the image is a whole cubin; the handle outlives the call.
    ok("cuModuleLoadData", unsafe { (raw.module_load)(&mut module, image.as_ptr().cast()) })?;
    // SAFETY: the module is alive, the name ends with 0; the handle outlives the call.
    ok("cuModuleGetFunction", unsafe { (raw.module_function)(&mut function, module, name.as_ptr()) })?;
    // Number of CUfunction_attribute (spec: cuda.h): the largest dynamic shared memory.
    // SAFETY: the function is alive.
    ok("cuFuncSetAttribute", unsafe { (raw.function_set)(function, 8, HOLD_SMEM_BYTES as i32) })?;
    Ok(function)
}

/// What the rule of the registry rests on: a kernel of another library starts beside blocks that wait if a multiprocessor is free of them.
fn beside_waiting() -> Outcome {
    let (device, stream) = gpu()?;
    warm(&device, &stream)?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    let function = raw.with_context(context, || load(&raw, &device))?;
    let late = Stream::new(&device)?;
    let bound = Duration::from_millis(60);
    let other = |word: u64, ended: &Buffer, smem_bytes: u32| {
        let parameters = Hold { word, ended: ended.address().address, bound_nanoseconds: 0 };
        let parameters: [*const c_void; 1] = [std::ptr::from_ref(&parameters).cast()];
        let (grid, block) = ([66, 1, 1], [512, 1, 1]); // as measured before
        let config = LaunchConfig { grid, block, smem_bytes, stream: late.raw(), attributes: std::ptr::null(), num_attributes: 0 };
        raw.with_context(context, || {
            // SAFETY: configuration and parameters outlive the call, the memory lives until the device has been waited for.
            ok("cuLaunchKernelEx", unsafe { (raw.launch)(&config, function, parameters.as_ptr(), std::ptr::null()) })
        })
    };
    let sms = device.num_sms();
    let mut locked_out = Vec::new();
    // 120 KiB: no two of them on a multiprocessor.
    let waiting = [(sms - 1, 512, 0), (sms, 512, 0), (sms, 512, 120 << 10), (sms, 64, 0), (2 * sms, 512, 0), (4 * sms - 1, 512, 0)];
    for (blocks, threads, held_bytes) in waiting {
        for smem_bytes in [0, 2 << 10, 16 << 10, 64 << 10, HOLD_SMEM_BYTES] {
            let (zero, ended) = (words(&stream, &[0])?, words(&stream, &[0])?);
            other(zero.address().address, &ended, smem_bytes)?;
            device.synchronize()?;
            hold_with(&stream, (blocks, threads), held_bytes, zero.address().address, &ended, bound)?;
            std::thread::sleep(Duration::from_millis(5));
            other(zero.address().address, &ended, smem_bytes)?;
            let start = Instant::now();
            late.synchronize()?;
            let is_late = stream.is_idle()? || start.elapsed() > bound / 2;
            device.synchronize()?;
            report(format!(
                "{blocks} blocks of {threads} with {} KiB wait; a kernel with {} KiB of another library {}",
                held_bytes >> 10,
                smem_bytes >> 10,
                if is_late { "does not start" } else { "runs" }
            ));
            if blocks < sms && is_late {
                locked_out.push((blocks, threads, smem_bytes));
            }
        }
    }
    ensure(locked_out.is_empty(), format!("a free multiprocessor is not enough: {locked_out:?}"))
}

/// The registry's own sizes of blocks agree with what the driver says fits.
fn footprints() -> Outcome {
    let (device, stream) = gpu()?;
    let limits = Limits::of(&device);
    let largest = device.properties().max_smem_bytes & !3;
    let form = Form { smem_bytes: largest, cluster: 1, cooperative: false, programmatic: false };
    for kernel in [Kernel::Hold, Kernel::Together(form), Kernel::Scale { factor: 3 }] {
        let loaded = KERNELS.get("test", &stream, kernel)?;
        let most = if matches!(kernel, Kernel::Together(_)) { largest } else { 0 };
        for threads in [32, 64, 96, 160, 256, 384, 512, 1024] {
            for smem_bytes in [0, most / 100, most / 10, most / 4, most / 3, most / 2, most] {
                let geometry = Geometry { threads, smem_bytes, ..Geometry::default() };
                let waiting = Waiting::of("test", &device, &loaded, &geometry, 7)?;
                let (block, num) = (waiting.block, waiting.blocks_per_sm);
                let fits = |num: u32| {
                    num <= limits.blocks
                        && num * block.threads <= limits.sm.threads
                        && num * block.registers <= limits.sm.registers
                        && num * block.smem_bytes <= limits.sm.smem_bytes
                };
                ensure(fits(num) && !fits(num + 1), format!("{kernel:?}, {threads} threads, {smem_bytes} bytes: {waiting:?}"))?;
            }
        }
    }
    Ok(())
}

fn registry() -> Outcome {
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Hold)?;
    let waiting = |blocks: u32| Waiting::of("hold", &device, &kernel, &Geometry { threads: 512, ..Geometry::default() }, blocks);
    let sms = device.num_sms();
    let ranks = World::run(&Backend::cpu(), 4, |world| {
        let demand = |blocks: u32| {
            Ok::<_, Error>(Demand { moments: vec![vec![waiting(blocks)?]], lingers: None, opens_when_alone: false, other: Other::ANY })
        };
        let most = (sms - 1) / 3;
        let refused = register("test", &device, Holder::of(&world), 4, demand(most + 1)?).map(drop);
        world.barrier()?;
        let held = register("test", &device, Holder::of(&world), 4, demand(most)?);
        world.barrier()?;
        // A second object counts beside the first.
        let second = register("test", &device, Holder::of(&world), 4, demand(most)?).map(drop);
        world.barrier()?;
        held.map(drop)?;
        world.barrier()?;
        Ok((refused, second))
    })?;
    for rank in ranks {
        let (refused, second) = rank?;
        let text = format!("{refused:?}");
        ensure(matches!(&refused, Err(Error::Invalid { .. })), text.clone())?;
        ensure(text.contains(&format!("at most {} blocks", (sms - 1) / 3)) && text.contains("each of 4 ranks"), text)?;
        ensure(matches!(&second, Err(Error::Invalid { .. } | Error::Unsupported { .. })), format!("{second:?}"))?;
    }
    // Nothing is held any more.
    let world = World::threads(&Backend::cpu(), 1)?.remove(0);
    let alone = Demand { moments: vec![vec![waiting(sms)?]], lingers: None, opens_when_alone: false, other: Other::ANY };
    drop(register("test", &device, Holder::of(&world), 1, alone)?);
    Ok(())
}
