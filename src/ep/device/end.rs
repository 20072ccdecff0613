//! One rank's end of an object on its GPU: memory of all ranks, its own, the kernels, and what they report.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use bytemuck::Zeroable;

use super::abort::AbortLine;
use super::context::{Ctx, ObjectKernels, Setup};
use super::layout::{BankHead, Failure, HostRecord};
use super::memory::{DeviceLayout, map_tables};
use super::record::{Reader, failure};
use super::registry::{self, Demand, Holder, Other, Permit, Waiting};
use super::tuning::Tuning;
use crate::backend::Cuda;
use crate::ep::object::Counts;
use crate::ep::world::{Member, World, lock};
use crate::ep::{Config, Layout, Plan, Wire};
use crate::error::{Error, Result};
use crate::gpu::{Device, Pinned, Shareable, Stream};
use crate::name::Name;
use crate::tensor::DeviceAddress;

const OP: &str = "ep setup";

/// One rank's end on its GPU.
///
/// Made and used by one rank; dropping it waits for the rank's stream, and then nothing of its own uses the memory. Peers keep theirs.
#[derive(Debug)]
pub(crate) struct End {
    /// Replaced when the object changes its stream.
    ctx: RwLock<Ctx>,
    abort: Option<AbortLine>,
    record: Option<Arc<Pinned>>,
    /// `None` only inside [`retune`](Self::retune).
    permit: Mutex<Option<Permit>>,
    /// The next call asks the registry first.
    must_settle: AtomicBool,
    /// What is launched behind a dispatch may start before the ranks of this device have sent their rows: see [`Tuning::early`].
    is_early: AtomicBool,
    ranks_on_device: u32,
    ranks_here: usize,
    /// This rank's own, unlike `memories`, which peers use.
    private: Shareable,
    memories: Vec<Arc<Shareable>>,
    rank: usize,
}

/// Records of objects that are gone. Freeing pinned memory waits for all work of the device, which may wait for the rank that frees.
static SPARE_RECORDS: Mutex<Vec<Arc<Pinned>>> = Mutex::new(Vec::new());

static LOADING: Mutex<()> = Mutex::new(());

impl End {
    /// Collective: fails on all ranks or on none.
    pub fn new(world: &World, cuda: &Cuda, config: &Config, plan: &Plan, timeout: Result<Duration>, tuning: Tuning) -> Result<Self> {
        let (member, device) = (world.member(), cuda.device());
        let identities = world.exchange(OP, Ok((std::process::id(), device.properties().uuid.clone())))?;
        let (process, uuid) = &identities[world.rank().index()];
        let ranks_on_device = identities.iter().filter(|(_, other)| other == uuid).count() as u32;
        let ranks_here = identities.iter().filter(|(other_process, other)| other_process == process && other == uuid).count();

        // Equal on all ranks: it follows from what they have compared.
        let layout = DeviceLayout::new(config, plan)?;
        let memory = timeout.clone().and_then(|_| Shareable::new(device, layout.regions.total_bytes)).map(Arc::new);
        let memories = member.exchange_device_memory(OP, device, memory)?;
        let holder = Holder::of(world);
        let own = || -> Result<_> {
            // One rank of a process after the other: the first compiles with all threads, the others find its kernels.
            let loading = lock(&LOADING);
            check_early(config, is_early(tuning, cuda, ranks_on_device))?;
            let kernels = ObjectKernels::load(device, config, plan, &layout, ranks_on_device, tuning)?;
            drop(loading);
            let opens_when_alone = ranks_on_device == 1 && cuda.is_programmatic();
            let permit = permit(device, holder, ranks_here, &kernels, tuning, opens_when_alone)?;
            let private = Shareable::new(device, layout.private.num_bytes)?;
            let stream = cuda.stream();
            if config.expert_map.is_some() {
                let places = [layout.private.owners, layout.private.experts, layout.private.first_expert];
                for (at, table) in places.into_iter().zip(map_tables(plan)) {
                    private.write(stream, at, bytemuck::cast_slice(&table))?;
                }
            }
            let record = record(device)?;
            let abort = AbortLine::new(world, &record, std::mem::offset_of!(HostRecord, abort));
            Ok((kernels, permit, private, record, abort, timeout.clone()?))
        };
        let own = own();
        // Nobody launches anything before all have loaded what they launch.
        world.exchange(OP, own.as_ref().map(|_| ()).map_err(Clone::clone))?;
        let (kernels, permit, private, record, abort, timeout) = own?;
        let peers: Vec<u64> = memories.iter().map(|memory| memory.address().address).collect();
        let ctx = Ctx::new(Setup {
            cuda: cuda.clone(),
            config,
            plan,
            layout,
            kernels,
            rank: world.rank(),
            peers: &peers,
            private: private.address().address,
            host_record: record.device_address()?,
            timeout,
            ranks_on_device,
            is_one_device: ranks_here == identities.len(),
        });
        let (abort, record, rank) = (Some(abort), Some(record), world.rank().index());
        Ok(End {
            ctx: RwLock::new(ctx),
            abort,
            record,
            permit: Mutex::new(Some(permit)),
            must_settle: AtomicBool::new(true),
            is_early: AtomicBool::new(is_early(tuning, cuda, ranks_on_device)),
            ranks_on_device,
            ranks_here,
            private,
            memories,
            rank,
        })
    }

    /// Launches are shaped by `tuning` from now on; graphs that hold earlier launches stay as they are. Collective, with nothing queued on any rank: fails on
    /// all ranks or on none, and after a failure calls are launched as before, but have no claim to their multiprocessors.
    pub fn retune(&self, world: &World, config: &Config, plan: &Plan, tuning: Tuning) -> Result<()> {
        *lock(&self.permit) = None;
        // All have given theirs back before one asks again.
        world.exchange(OP, self.stream().synchronize())?;
        let (device, layout) = (self.stream().device().clone(), DeviceLayout::new(config, plan)?);
        let holder = Holder::of(world).in_stream(&self.stream());
        let early = is_early(tuning, &self.ctx().cuda, self.ranks_on_device);
        let opens_when_alone = self.ranks_on_device == 1 && self.ctx().cuda.is_programmatic();
        let own = || -> Result<_> {
            let loading = lock(&LOADING);
            check_early(config, early)?;
            let kernels = ObjectKernels::load(&device, config, plan, &layout, self.ranks_on_device, tuning)?;
            drop(loading);
            let permit = permit(&device, holder, self.ranks_here, &kernels, tuning, opens_when_alone)?;
            Ok((kernels, permit))
        };
        let own = own();
        world.exchange(OP, own.as_ref().map(|_| ()).map_err(Clone::clone))?;
        let (kernels, permit) = own?;
        *lock(&self.permit) = Some(permit);
        self.must_settle.store(true, Ordering::Relaxed);
        self.is_early.store(early, Ordering::Relaxed);
        self.ctx.write().unwrap_or_else(PoisonError::into_inner).kernels = kernels;
        Ok(())
    }

    /// Whether the caller has promised that nothing fills the device behind a dispatch, and the ranks that share it rely on that.
    pub fn is_early(&self) -> bool {
        self.is_early.load(Ordering::Relaxed)
    }

    /// What launches need.
    pub fn ctx(&self) -> RwLockReadGuard<'_, Ctx> {
        self.ctx.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream in which the object queues.
    pub fn stream(&self) -> Stream {
        self.ctx().cuda.stream().clone()
    }

    /// Calls from now on are queued by `cuda`.
    pub fn set_cuda(&self, cuda: Cuda) {
        if let Some(permit) = &*lock(&self.permit) {
            permit.moved_to(cuda.stream());
        }
        self.must_settle.store(true, Ordering::Relaxed);
        self.ctx.write().unwrap_or_else(PoisonError::into_inner).cuda = cuda;
    }

    /// Before every call: its waiting grids have their place on the device, as [`claims`](super::claims) says.
    ///
    /// # Errors
    /// `Invalid` and `Unsupported` when objects in other streams leave none.
    pub fn settle(&self, op: Name) -> Result<()> {
        if !self.must_settle.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(permit) = &*lock(&self.permit) {
            self.ctx().kernels.settle(permit.settle(op)?);
        }
        self.must_settle.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// What kernels have reported since the last look.
    pub fn check(&self, member: &Member, bound: Duration) -> Result<()> {
        let Some(pinned) = &self.record else { return Ok(()) };
        // sync record: acquire, pairs with the release of the kernel, which fills the record and then stores the status
        if pinned.word(0).load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        // Taken before the rest is read: a status that comes meanwhile stays for the next look.
        let status = pinned.word(0).swap(0, Ordering::Acquire);
        let mut found = HostRecord::zeroed();
        bytemuck::bytes_of_mut(&mut found).copy_from_slice(&pinned.bytes()[..size_of::<HostRecord>()]);
        found.status = status;
        match found.error(&Reader { rank: member.rank(), world: member.size(), bound }) {
            None => Ok(()),
            Some(Error::Timeout { failure, bound }) => Err(member.timed_out(failure, bound)),
            Some(Error::Poisoned { first }) => Err(Error::Poisoned { first: member.fail(first) }),
            Some(error) => Err(error),
        }
    }

    /// Waits for the stream, then looks at everything that kernels of any rank may have reported to this one.
    pub fn wait(&self, member: &Member, bound: Duration) -> Result<()> {
        let stream = self.stream();
        stream.synchronize()?;
        self.check(member, bound)?;
        let signals = self.ctx().layout.signals;
        let at = self.ctx().layout.regions.signals;
        let own = &self.memories[self.rank];
        let abort: u64 = bytemuck::pod_read_unaligned(&own.read(&stream, at + signals.abort, 8)?);
        if abort == 0 {
            return Ok(());
        }
        let failures = own.read(&stream, at + signals.failures, size_of::<Failure>() * member.size())?;
        let mut found = failures.chunks_exact(size_of::<Failure>()).map(bytemuck::pod_read_unaligned::<Failure>);
        // Without a record a host has raised the alarm, and the world's page says why.
        match found.find_map(|written| failure(&written)) {
            Some(first) => Err(Error::Poisoned { first: member.fail(first) }),
            None => member.check_alive(),
        }
    }

    /// Fills everything before the signal words with 0xFF, and waits.
    pub fn poison(&self) -> Result<()> {
        let signals = self.ctx().layout.regions.signals;
        self.memories[self.rank].fill(signals, 0xFF)
    }

    /// Address of byte `at` of this rank's symmetric memory.
    pub fn address(&self, at: usize) -> DeviceAddress {
        let start = self.memories[self.rank].address();
        DeviceAddress { address: start.address + at as u64, ..start }
    }

    fn private_address(&self, at: usize) -> DeviceAddress {
        let start = self.private.address();
        DeviceAddress { address: start.address + at as u64, ..start }
    }

    /// Where a bank's number of rows is.
    pub fn num_rows(&self, bank: usize) -> DeviceAddress {
        self.private_address(self.ctx().bank(bank as u32).head + std::mem::offset_of!(BankHead, num_rows))
    }

    /// Where a bank's rows of each local expert are.
    pub fn num_rows_per_expert(&self, bank: usize) -> DeviceAddress {
        self.private_address(self.ctx().bank(bank as u32).expert_rows)
    }

    /// Where the starts of a bank's segments are.
    pub fn segment_start(&self, bank: usize) -> DeviceAddress {
        self.private_address(self.ctx().bank(bank as u32).segment_start)
    }

    /// What describes the arrival of a bank, when the stream has come to it.
    pub fn counts(&self, bank: usize, plan: &Plan, is_by_expert: bool) -> Result<Counts> {
        let stream = self.stream();
        let place = self.ctx().bank(bank as u32);
        let numbers = |at: usize, len: usize| -> Result<Vec<u32>> {
            Ok(self.private.read(&stream, at, 4 * len)?.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect())
        };
        let local = self.ctx().num_local as usize;
        let head = numbers(place.head, size_of::<BankHead>() / 4)?;
        let (num_rows, num_dropped) = (head[0], head[1] as usize); // the first fields of BankHead
        let arrival_start = head[std::mem::offset_of!(BankHead, arrival_start) / 4..][..plan.world + 1].to_vec();
        let segment_start = if is_by_expert { numbers(place.segment_start, local + 1)? } else { Vec::new() };
        let num_rows_per_expert = numbers(place.expert_rows, local)?;
        Ok(Counts { num_rows: [num_rows], num_dropped, num_rows_per_expert, segment_start, arrival_start, row_base: Vec::new() })
    }

    /// Bytes of this rank's symmetric memory.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        self.memories[self.rank].read(&self.stream(), at, len)
    }
}

/// Whether the promise of [`Tuning::early`] matters.
fn is_early(tuning: Tuning, cuda: &Cuda, ranks_on_device: u32) -> bool {
    tuning.early && cuda.is_programmatic() && ranks_on_device > 1
}

/// Combines that launch more than the kernel that sums would break the promise.
fn check_early(config: &Config, is_early: bool) -> Result<()> {
    let refused =
        |what: String| Err(Error::invalid(OP, "early", format!("set, with {what}"), "unset, or rows ByToken that travel as they are"));
    match (is_early, config.layout, config.wire) {
        (false, ..) | (true, Layout::ByToken, Wire::AsIs) => Ok(()),
        (true, Layout::ByToken, wire) => refused(format!("{wire:?} on the wire")),
        (true, layout, _) => refused(format!("{layout:?}")),
    }
}

/// The right to the grids that wait.
fn permit(
    device: &Device,
    holder: Holder,
    ranks_here: usize,
    kernels: &ObjectKernels,
    tuning: Tuning,
    opens_when_alone: bool,
) -> Result<Permit> {
    // Where ranks share a device a kernel lets nothing start before its own waits are over (docs/ep-gpu.md): one grid waits at a time. With `early` the
    // next one is there while the last block of `payload`, or `receive` behind it, waits.
    let waiting = kernels.waiting(device)?;
    let may_linger = |grid: &&Waiting| tuning.early && matches!(grid.name, "payload" | "receive");
    let lingers = waiting.iter().filter(may_linger).max_by_key(|grid| grid.block.registers).copied();
    let with_payload = |grid: Waiting| [Some(grid), lingers].into_iter().flatten().collect();
    let demand = Demand { moments: waiting.into_iter().map(with_payload).collect(), lingers, opens_when_alone, other: Other::ANY };
    let permit = registry::register(OP, device, holder, ranks_here, demand)?;
    // As far as it is known before the first call.
    kernels.settle(permit.expected(OP)?);
    Ok(permit)
}

fn record(device: &Device) -> Result<Arc<Pinned>> {
    let spare = lock(&SPARE_RECORDS).pop();
    let pinned = spare.map_or_else(|| Pinned::new(device, size_of::<HostRecord>()).map(Arc::new), Ok)?;
    for at in (0..size_of::<HostRecord>()).step_by(8) {
        pinned.word(at).store(0, Ordering::Relaxed);
    }
    Ok(pinned)
}

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Fails the world first, so that nothing waits for this rank to the bound.
            self.abort = None;
        }
        // The rank's kernels end: by what they wait for, at their bound, or by the alarm of a rank that fails. On a failure nothing is left to do.
        let _ = self.stream().synchronize();
        self.abort = None;
        lock(&SPARE_RECORDS).extend(self.record.take());
    }
}
