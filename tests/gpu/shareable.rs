//! Device memory that threads, processes and other libraries share.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use libtest_mimic::Failed;
use moe_kernels::ep::{Rendezvous, World, launch_command};
use moe_kernels::gpu::{Buffer, Device, Extent, Shareable, Stream};
use moe_kernels::{Backend, Error, Rank, Result};

use super::kernels::{KERNELS, Scale, Test as Kernel, check_scale, painted, read, scale, scaled, words};
use super::memory::names;
use super::raw::{Raw, ok};
use super::{Needs, Outcome, Test, child, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("shareable memory is zeros", Needs::Gpu, zeros),
    ("one memory at two addresses", Needs::Gpu, two_addresses),
    ("shareable memory that there is not", Needs::Gpu, too_much),
    ("files that are no device memory", Needs::Gpu, wrong_files),
    ("the caller's shareable memory", Needs::Gpu, adopted),
    ("the caller's memory that cannot be shared", Needs::Gpu, not_shareable),
    ("access of another device", Needs::Gpu, other_device),
    ("threads share device memory", Needs::Gpu, threads),
    ("threads fail to share device memory", Needs::Gpu, threads_fail),
    ("processes share device memory::2", Needs::Gpu, || processes(2)),
    ("processes share device memory::4", Needs::Gpu, || processes(4)),
];

/// Words of a memory that is no whole number of the driver's pages.
const NUM: usize = (3 << 18) + 5;

/// What is at an address, after the work of the stream.
pub fn words_at(stream: &Stream, address: u64, num: usize) -> Result<Vec<u32>> {
    let copy = words(stream, &vec![0xDEAD_BEEF; num])?;
    let kernel = KERNELS.get("test", stream, Kernel::Scale { factor: 1 })?;
    scale(stream, kernel, Scale { from: address, to: copy.address().address, num: num as u32, addend: 0 }, false)?;
    read(stream, &copy)
}

/// A kernel writes `painted(num, seed) * 3 + 1` to an address.
fn paint(stream: &Stream, address: u64, num: usize, seed: u32) -> Result<Vec<u32>> {
    let from = words(stream, &painted(num, seed))?;
    let kernel = KERNELS.get("test", stream, Kernel::Scale { factor: 3 })?;
    scale(stream, kernel, Scale { from: from.address().address, to: address, num: num as u32, addend: 1 }, false)?;
    stream.synchronize()?;
    Ok(scaled(&painted(num, seed), 3, 1))
}

fn address(memory: &Shareable) -> u64 {
    memory.address().address
}

fn zeros() -> Outcome {
    let (device, stream) = gpu()?;
    for round in 0..4 {
        let memory = Shareable::new(&device, 4 * NUM)?;
        same("its bytes", (memory.len(), memory.is_empty(), memory.device() == &device), (4 * NUM, false, true))?;
        ensure(address(&memory).is_multiple_of(1 << 21), format!("at {:#x}", address(&memory)))?; // spec: pages of 2 MiB
        device.adopt("test", "x", address(&memory) + 4)?;
        ensure(words_at(&stream, address(&memory), NUM)?.iter().all(|word| *word == 0), "it does not begin as zeros")?;
        // The next round gets the same pages, most likely.
        let painted = paint(&stream, address(&memory), NUM, round)?;
        ensure(words_at(&stream, address(&memory), NUM)? == painted, "a kernel wrote something else")?;
        memory.clear()?;
        ensure(words_at(&stream, address(&memory), NUM)?.iter().all(|word| *word == 0), "it was not cleared")?;
        paint(&stream, address(&memory), NUM, round)?;
    }
    names("no bytes", Shareable::new(&device, 0), "len", &["at least 1"])
}

fn two_addresses() -> Outcome {
    let (device, stream) = gpu()?;
    let first = Shareable::new(&device, 4 * NUM)?;
    let file = first.export()?;
    let second = Shareable::import(&device, file.as_fd(), &first.extent())?;
    let third = Shareable::import(&device, file.as_fd(), &first.extent())?;
    drop(file);
    ensure(address(&first) != address(&second) && address(&second) != address(&third), "one address")?;
    same("the bytes of the second", second.len(), first.len())?;
    let painted = paint(&stream, address(&first), NUM, 3)?;
    ensure(words_at(&stream, address(&second), NUM)? == painted, "the second shows other words")?;
    // It outlives the one that made it, but cannot be passed on.
    let gone = address(&first);
    drop(first);
    ensure(device.adopt("test", "x", gone).is_err(), "the mapping is still there")?;
    let painted = paint(&stream, address(&second), NUM, 4)?;
    ensure(words_at(&stream, address(&third), NUM)? == painted, "the third shows other words")?;
    names("imported memory", second.export(), "the memory to export", &["imported"])
}

fn too_much() -> Outcome {
    let (device, stream) = gpu()?;
    let total = device.properties().memory_bytes;
    for bytes in [2 * total, 1 << 48, u64::MAX / 2, u64::MAX - 5] {
        match Shareable::new(&device, bytes as usize) {
            Err(Error::Memory { need_bytes, have_bytes, what, .. }) => {
                ensure(need_bytes == bytes && have_bytes <= total && have_bytes > 0, format!("{what}: {need_bytes}, {have_bytes}"))?;
                ensure(what.contains("device 0"), what)?;
            }
            other => return Err(format!("{bytes} bytes: {other:?}").into()),
        }
    }
    // Nothing leaks: more in all than there is.
    let (free, _) = device.memory()?;
    let bytes = (free / 4) as usize;
    for _ in 0..6 {
        let memory = Shareable::new(&device, bytes)?;
        drop(Shareable::import(&device, memory.export()?.as_fd(), &memory.extent())?);
    }
    check_scale(&stream, 1000, 5)
}

/// An extent with other numbers: it travels as text.
fn other_extent(extent: &Extent, field: &str, value: u64) -> Result<Extent, Failed> {
    let mut text = serde_json::to_value(extent)?;
    text[field] = value.into();
    Ok(serde_json::from_value(text)?)
}

fn wrong_files() -> Outcome {
    let (device, stream) = gpu()?;
    let memory = Shareable::new(&device, 4096)?;
    let host = rustix::fs::memfd_create("moe-kernels-test", rustix::fs::MemfdFlags::CLOEXEC)?;
    let wrong = Shareable::import(&device, host.as_fd(), &memory.extent());
    ensure(matches!(wrong, Err(Error::Gpu { .. })), format!("host memory as a file: {wrong:?}"))?;
    for (field, value) in [("len", 0), ("len", u64::MAX), ("offset", u64::MAX), ("offset", 1 << 21), ("allocation_bytes", 4095)] {
        let extent = other_extent(&memory.extent(), field, value)?;
        names(field, Shareable::import(&device, memory.export()?.as_fd(), &extent), "extent", &["within the allocation"])?;
    }
    // More than the allocation has is the driver's to refuse.
    let extent = other_extent(&memory.extent(), "allocation_bytes", 1 << 30)?;
    let larger = Shareable::import(&device, memory.export()?.as_fd(), &extent);
    ensure(matches!(larger, Err(Error::Gpu { .. })), format!("a larger allocation: {larger:?}"))?;
    check_scale(&stream, 1000, 6)
}

fn adopted() -> Outcome {
    let (device, stream) = gpu()?;
    let theirs = Shareable::new(&device, 5 << 20)?;
    let painted = paint(&stream, address(&theirs), 1000, 8)?;
    // SAFETY: `theirs` lives to the end, and nobody writes to it beside this.
    let all = unsafe { Shareable::adopt(&device, address(&theirs), 5 << 20) }?;
    same("its address", all.address(), theirs.address())?;
    ensure(words_at(&stream, address(&all), 1000)? == painted, "adopting changed it")?;
    // A part in the middle, which reaches to the end of the driver's pages.
    let at = address(&theirs) + (1 << 20) + 256;
    // SAFETY: as above.
    let part = unsafe { Shareable::adopt(&device, at, (5 << 20) - 256) }?;
    let there = Shareable::import(&device, part.export()?.as_fd(), &part.extent())?;
    same("bytes of the part", there.len(), (5 << 20) - 256)?;
    let painted = paint(&stream, address(&there), 1000, 9)?;
    ensure(words_at(&stream, at, 1000)? == painted, "a part shows other words elsewhere")?;
    part.clear()?;
    ensure(words_at(&stream, at - 256, 64)?.iter().all(|word| *word == 0) && words_at(&stream, at, 1000)? == vec![0; 1000], "cleared")?;
    drop((all, part));
    // It was the caller's, and still is.
    let painted = paint(&stream, address(&theirs), 1000, 10)?;
    ensure(words_at(&stream, address(&theirs), 1000)? == painted, "dropping it took the caller's memory")
}

fn not_shareable() -> Outcome {
    let (device, _) = gpu()?;
    let (theirs, plain) = (Shareable::new(&device, 5 << 20)?, Buffer::new(&device, 4 << 20)?);
    // SAFETY: all of it is memory that lives to the end of this function, or none.
    let adopt = |address: u64, len: usize| unsafe { Shareable::adopt(&device, address, len) };
    let refused = |case: &str, result: Result<Shareable>, parts: &[&str]| match &result {
        Err(error @ Error::Invalid { .. }) if parts.iter().all(|part| error.to_string().contains(part)) => Ok(()),
        other => Err(Failed::from(format!("{case}: {other:?}"))),
    };
    refused("memory of cuMemAlloc", adopt(plain.address().address, 4 << 20), &["the memory at 0x", "cuMemCreate"])?;
    refused("an odd address", adopt(address(&theirs) + 64, 100), &["multiple of 256"])?;
    refused("no bytes", adopt(address(&theirs), 0), &["at least 1 byte"])?;
    refused("too many bytes", adopt(address(&theirs), (6 << 20) + 1), &["at least 6291457"])?;
    refused("too many from the middle", adopt(address(&theirs) + (1 << 20), (5 << 20) + 1), &["5242880 bytes up to"])?;
    refused("no memory", adopt(0, 100), &["no memory"])?;
    refused("host memory", adopt(Box::leak(Box::new([0u8; 4096])).as_ptr().addr() as u64 & !255, 1), &["host memory"])?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    let mut pooled = 0;
    raw.with_context(context, || {
        // SAFETY: the address outlives the call; the null stream is that of the primary context, which is current.
        ok("cuMemAllocAsync", unsafe { (raw.allocate_async)(&mut pooled, 4 << 20, std::ptr::null_mut()) })?;
        // SAFETY: as above.
        ok("cuStreamSynchronize", unsafe { (raw.stream_synchronize)(std::ptr::null_mut()) })
    })?;
    refused("memory of the default pool", adopt(pooled, 4096), &["cannot be exported"])?;
    // SAFETY: allocated above, and nothing uses it.
    raw.with_context(context, || ok("cuMemFreeAsync", unsafe { (raw.free_async)(pooled, std::ptr::null_mut()) }))
}

fn other_device() -> Outcome {
    let (device, _) = gpu()?;
    let memory = Shareable::new(&device, 1 << 20)?;
    memory.allow(&device)?;
    if Device::count()? < 2 {
        return Ok(());
    }
    let second = Device::open(1)?;
    match memory.allow(&second) {
        Ok(()) => {
            memory.allow(&second)?;
            let stream = Stream::new(&second)?;
            let painted = paint(&stream, address(&memory), 1000, 1)?;
            ensure(words_at(&Stream::new(&device)?, address(&memory), 1000)? == painted, "what another device wrote")
        }
        Err(Error::Unsupported { what, .. }) => ensure(what.contains("device 0") && what.contains("device 1"), what),
        Err(other) => Err(other.into()),
    }
}

/// One rank: it writes to a part of every rank's memory, and sees what all wrote to its own.
fn share(world: &World, device: &Device, mine: Result<Arc<Shareable>>) -> Outcome {
    const NUM: usize = 10_000;
    let stream = Stream::new(device)?;
    let (me, size) = (world.rank().index(), world.size());
    let all = world.exchange_device_memory("test", device, mine)?;
    same("memories", all.len(), size)?;
    for (peer, memory) in all.iter().enumerate() {
        paint(&stream, address(memory) + (me * NUM * 4) as u64, NUM, (me * 100 + peer) as u32)?;
    }
    world.barrier()?;
    for from in 0..size {
        let want = scaled(&painted(NUM, (from * 100 + me) as u32), 3, 1);
        ensure(
            words_at(&stream, address(&all[me]) + (from * NUM * 4) as u64, NUM)? == want,
            format!("what rank {from} wrote to rank {me}"),
        )?;
    }
    Ok(world.barrier()?)
}

/// Nothing of it can be used as an error of this crate.
pub fn of_failed(failed: Failed) -> Error {
    Error::Io { what: "a trial".into(), why: failed.message().unwrap_or("failed").into() }
}

fn threads() -> Outcome {
    let device = Device::open(0)?;
    let ranks = World::run(&Backend::cpu(), 4, |world| {
        for round in 0..3 {
            let mine = Arc::new(Shareable::new(&device, (1 << 20) + round)?);
            share(&world, &device, Ok(mine)).map_err(of_failed)?;
        }
        let mine = Arc::new(Shareable::new(&device, 4096)?);
        let all = world.exchange_device_memory("test", &device, Ok(mine.clone()))?;
        // One address for an allocation in a process.
        let is_same = Arc::ptr_eq(&all[world.rank().index()], &mine);
        world.gather(Ok(all.iter().flat_map(|memory| address(memory).to_le_bytes()).collect())).map(|lists| (is_same, lists))
    })?;
    for rank in ranks {
        let (is_same, lists) = rank?;
        ensure(is_same && lists.iter().all(|list| *list == lists[0]), "one allocation at two addresses")?;
    }
    Ok(())
}

fn threads_fail() -> Outcome {
    let device = Device::open(0)?;
    let ranks = World::run(&Backend::cpu(), 3, |world| {
        let num_bytes = if world.rank() == Rank(1) { 1 << 48 } else { 1 << 20 };
        let failed = world.exchange_device_memory("test", &device, Shareable::new(&device, num_bytes).map(Arc::new)).map(drop);
        // The world lives.
        share(&world, &device, Shareable::new(&device, 1 << 20).map(Arc::new)).map_err(of_failed)?;
        Ok(failed)
    })?;
    for rank in ranks {
        match rank? {
            Err(Error::Setup { op: "test", rank: Rank(1), error }) if matches!(*error, Error::Memory { .. }) => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
    Ok(())
}

/// The processes of a world at the work that `child` names; how each ended, with what it said.
pub fn run_ranks(work: &str, ranks: usize) -> Result<Vec<(Option<i32>, String)>, Failed> {
    let temporary = tempfile::tempdir()?;
    let folder: PathBuf = temporary.path().join("m");
    let mut command = Command::new(std::env::current_exe()?);
    command.env(child::VARIABLE, work).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut launched = launch_command(&mut command, ranks, Some(folder))?;
    let mut texts = Vec::new();
    for rank in 0..ranks {
        let mut text = String::new();
        let stderr = launched.child(Rank(rank as u32)).and_then(|child| child.stderr.take()).ok_or("no stderr")?;
        std::io::Read::read_to_string(&mut { stderr }, &mut text)?;
        texts.push(text);
    }
    Ok(launched.wait()?.into_iter().map(|status| status.code()).zip(texts).collect())
}

pub fn join() -> Result<World> {
    World::join(&Backend::cpu(), &Rendezvous::from_env("test")?)
}

/// A rank in a process of its own.
pub fn share_rank() -> Outcome {
    let world = join()?;
    let device = Device::open(0)?;
    for _ in 0..2 {
        share(&world, &device, Shareable::new(&device, 1 << 20).map(Arc::new))?;
    }
    // Of the caller, and not where the allocation begins.
    let theirs = Shareable::new(&device, 2 << 20)?;
    // SAFETY: `theirs` lives to the end of this function, and nobody writes to it beside this.
    let part = unsafe { Shareable::adopt(&device, address(&theirs) + 4096, 1 << 20) };
    share(&world, &device, part.map(Arc::new))?;
    // One that fails makes all fail, and the world lives.
    let num_bytes = if world.rank() == Rank(1) { 1 << 48 } else { 1 << 20 };
    let failed = world.exchange_device_memory("test", &device, Shareable::new(&device, num_bytes).map(Arc::new));
    ensure(matches!(&failed, Err(Error::Setup { rank: Rank(1), .. })), format!("{failed:?}"))?;
    share(&world, &device, Shareable::new(&device, 1 << 20).map(Arc::new))
}

fn processes(ranks: usize) -> Outcome {
    for (rank, (code, text)) in run_ranks("share", ranks)?.into_iter().enumerate() {
        ensure(code == Some(0), format!("rank {rank}: {code:?} {text}"))?;
    }
    Ok(())
}
