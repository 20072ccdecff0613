//! Which grids may wait on a device at the same time.
//!
//! A block that waits for a peer keeps its threads, registers and shared memory, and pins the split of its multiprocessor's memory between cache and
//! shared memory. Ranks that share a device therefore stop each other when one fills the device with waiting blocks before the others have started, or
//! before their own kernels have run. So each object declares its waiting grids before it launches anything, and is refused when the grids of all ranks
//! and objects of the device could stop each other, whatever order they come in and wherever the hardware places them.
//!
//! # The rule
//!
//! A rank's object waits in one *moment* at a time: one of its grids, or two with programmatic launch, where the next one may start while the first
//! still waits. For two objects and more on a device:
//!
//! 1. **Nobody locks out the kernels of a late one.** Let all wait but one, in any moments: enough multiprocessors without any waiting block are left for
//!    that one's other kernels, or with room for a block of them, where it is known how large they are. Measured on an H200: beside one waiting block of
//!    512 threads on each of the 132, a kernel that asks for another split never starts, unless the waiting one has asked for the largest; beside 131 it runs.
//! 2. **All waiting blocks fit.** Let all blocks run but one, wherever: it still finds a place. Measured: 66 blocks of 512 threads with 110 registers on
//!    each of four ranks, so one block a multiprocessor and 264 of them on 132, never end.
//!
//! In both, the multiprocessors that blocks can make useless are counted and not how many fit at best. One object alone on a device waits for nobody there: its
//! grids only have to fit.
//!
//! A third thing is shared: the queues by which streams reach the device. When all of them are taken by streams that have work behind a kernel that waits,
//! whatever else is queued waits too. Measured on an H200: another stream is held up by as many such streams as `CUDA_DEVICE_MAX_CONNECTIONS` says, 8 by
//! itself and at most 32. So a device takes no more ranks of a process than that; who uses further streams beside them leaves room.
//!
//! Processes that share a device take turns on it as a whole, so each process counts its own. (Under a multi-process service they do not; there the
//! ranks of one device belong into one process.)
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;

use crate::ep::World;
use crate::ep::world::lock;
use crate::error::{Error, Result};
use crate::gpu::{Device, Geometry, Kernel};
use crate::id::Rank;
use crate::name::Name;

/// A device, and what one of its multiprocessors holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Multiprocessors.
    pub sms: u32,
    /// What blocks share.
    pub sm: Block,
    /// Most blocks.
    pub blocks: u32,
    /// Shared memory that each block takes beside its own.
    pub reserved_smem_bytes: u32,
    /// Queues of a process.
    pub queues: u32,
}

const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// What a block takes of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Threads.
    pub threads: u32,
    /// Registers of all threads.
    pub registers: u32,
    /// Shared memory, static and dynamic and reserved.
    pub smem_bytes: u32,
}

/// Blocks that wait for peers, or for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// The kernel.
    pub name: Name,
    /// How many wait at the same time: of a grid whose last block alone waits, 1.
    pub blocks: u32,
    /// Each of them.
    pub block: Block,
    /// How many of them one multiprocessor holds.
    pub blocks_per_sm: u32,
}

/// What an object of one rank needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// Grids that may wait at the same time, for each moment.
    pub moments: Vec<Vec<Waiting>>,
    /// The largest other kernel of this rank.
    pub other: Other,
}

/// What a kernel that does not wait for peers needs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Multiprocessors in which a block of it finds room: 1 at least, more for cooperative grids and clusters.
    pub sms: u32,
    /// One of its blocks; `None` for any, which may need a multiprocessor without a waiting block.
    pub block: Option<Block>,
}

impl Other {
    /// Any kernel whose blocks need not run together.
    pub const ANY: Other = Other { sms: 1, block: None };
}

/// Whose demand it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// The object: equal on the ranks of this process.
    object: (usize, u64),
    rank: Rank,
}

/// The right to launch the grids of a demand. Dropped when no kernel of them can run any more.
#[derive(Debug)]
#[must_use]
pub struct Permit {
    registry: &'static Registry,
    id: u64,
}

/// The demands of a process, by device.
#[derive(Debug)]
pub struct Registry(Mutex<Entries>);

#[derive(Debug)]
struct Entries {
    entries: Vec<Entry>,
    num_added: u64,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    device: u32,
    holder: Holder,
    demand: Demand,
}

/// That of this process.
static REGISTRY: Registry = Registry::new();

impl Limits {
    /// Those of a GPU.
    pub fn of(device: &Device) -> Self {
        let p = device.properties();
        // Spec: 1 to 32, and 8 where nothing is said; the driver reads it when it starts.
        let queues = std::env::var(CONNECTIONS).ok().and_then(|text| text.parse().ok()).filter(|n| (1..=32).contains(n)).unwrap_or(8);
        let sm = Block { threads: p.max_threads_per_sm, registers: p.registers_per_sm, smem_bytes: p.smem_bytes_per_sm };
        Limits { sms: p.num_sms, sm, blocks: p.max_blocks_per_sm, reserved_smem_bytes: p.reserved_smem_bytes, queues }
    }

    /// A block of `threads`, each with as many registers as the compiler says, and `smem_bytes` of shared memory.
    pub fn block(&self, threads: u32, registers: u32, smem_bytes: u32) -> Block {
        const WARP: u32 = 32;
        // Spec (CUDA occupancy): warps come in fours, the registers of a warp in units of 256, shared memory in units of 128 bytes.
        let (warps_unit, registers_unit, smem_unit) = (4, 256, 128);
        let warps = threads.div_ceil(WARP).next_multiple_of(warps_unit);
        Block {
            threads: threads.next_multiple_of(WARP),
            registers: warps * (registers * WARP).next_multiple_of(registers_unit),
            smem_bytes: (smem_bytes + self.reserved_smem_bytes).next_multiple_of(smem_unit),
        }
    }
}

/// How much of a multiprocessor a waiting block of each kind makes useless for a block that needs a place. The sum over all waiting blocks bounds the number of
/// multiprocessors in which it has none, wherever they are: each of those holds blocks that leave too little of some resource, so at least the least sum
/// of blocks that does.
struct Lost<'a> {
    kinds: &'a [Block],
    parts: Vec<f64>,
    sms: u32,
}

impl<'a> Lost<'a> {
    fn to(block: &Block, limits: &Limits, kinds: &'a [Block]) -> Self {
        type Amount = fn(&Block) -> u32;
        let resources: [(Amount, u32); 4] = [
            (|block| block.threads, limits.sm.threads),
            (|block| block.registers, limits.sm.registers),
            (|block| block.smem_bytes, limits.sm.smem_bytes),
            (|_| 1, limits.blocks),
        ];
        let mut parts = vec![0.0f64; kinds.len()];
        for (amount, available) in resources {
            let sizes: Vec<u32> = kinds.iter().map(amount).collect();
            let too_much = (available + 1).saturating_sub(amount(block));
            if let Some(least) = least_sum(&sizes, too_much) {
                for (part, size) in parts.iter_mut().zip(&sizes) {
                    *part = part.max((f64::from(*size) / f64::from(least)).min(1.0));
                }
            }
        }
        Lost { kinds, parts, sms: limits.sms }
    }

    fn of_block(&self, block: &Block) -> f64 {
        self.kinds.iter().position(|kind| kind == block).map_or(1.0, |at| self.parts[at])
    }

    fn of_moment(&self, moment: &[Waiting]) -> f64 {
        // A grid that fills the device cannot lose more of it.
        let of = |grid: &Waiting| (f64::from(grid.blocks) * self.of_block(&grid.block)).min(f64::from(self.sms));
        moment.iter().map(of).sum()
    }

    /// All but one wait, each in its worst moment.
    fn of_others(&self, demands: &[&Demand], one: usize) -> f64 {
        let worst = |demand: &Demand| demand.moments.iter().map(|moment| self.of_moment(moment)).fold(0.0, f64::max);
        demands.iter().enumerate().filter(|(i, _)| *i != one).map(|(_, demand)| worst(demand)).sum()
    }

    /// Whole multiprocessors.
    fn sms(&self, parts: f64) -> u32 {
        // 1e-6: arbitrary, above the rounding of a sum of thousands of parts, below one part of a multiprocessor.
        (parts + 1e-6) as u32
    }
}

/// The least sum of any number of these sizes that is at least this much; `None` when all are 0.
fn least_sum(sizes: &[u32], at_least: u32) -> Option<u32> {
    let unit = sizes.iter().fold(0, |a, b| gcd(a, *b));
    if unit == 0 {
        return None;
    }
    let sizes: BTreeSet<usize> = sizes.iter().filter(|size| **size > 0).map(|size| (size / unit) as usize).collect();
    let at_least = at_least.div_ceil(unit) as usize;
    let largest = sizes.last().copied().unwrap_or(1);
    let mut is_sum = vec![false; at_least + largest + 1];
    is_sum[0] = true;
    for sum in 0..is_sum.len() {
        is_sum[sum] |= sizes.iter().any(|size| *size <= sum && is_sum[sum - size]);
    }
    // A multiple of the largest is among them.
    (at_least.max(1)..is_sum.len()).find(|sum| is_sum[*sum]).map(|sum| sum as u32 * unit)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Why demands do not fit on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Multiprocessors that would be enough.
    pub need_sms: u32,
    /// Which part of the rule.
    pub why: &'static str,
}

const FILLS: &str = "its blocks wait for each other and must all run at once";
const LOCKS_OUT: &str = "a rank that is late must find room for its other kernels beside the waiting blocks of all others";
const STARVES: &str = "all waiting blocks must find a place beside each other, in whatever order they come";

impl Demand {
    /// Most multiprocessors that its waiting blocks can touch.
    fn touched(&self, limits: &Limits) -> u32 {
        let touched = |moment: &Vec<Waiting>| moment.iter().map(|w| w.blocks.min(limits.sms)).sum::<u32>().min(limits.sms);
        self.moments.iter().map(touched).max().unwrap_or(0)
    }

    fn grids(&self) -> impl Iterator<Item = &Waiting> {
        self.moments.iter().flatten()
    }

    /// The same with at most so many blocks in a grid.
    fn cut(&self, blocks: u32) -> Self {
        let cut = |moment: &Vec<Waiting>| moment.iter().map(|w| Waiting { blocks: w.blocks.min(blocks), ..*w }).collect();
        Demand { moments: self.moments.iter().map(cut).collect(), ..*self }
    }
}

/// The rule: whether the objects with these demands can share a device.
pub fn judge(limits: &Limits, demands: &[&Demand]) -> Result<(), Refusal> {
    for grid in demands.iter().flat_map(|demand| demand.grids()) {
        let need_sms = grid.blocks.div_ceil(grid.blocks_per_sm.max(1));
        if need_sms > limits.sms || grid.blocks_per_sm == 0 {
            return Err(Refusal { need_sms: need_sms.max(limits.sms + 1), why: FILLS });
        }
    }
    if demands.len() < 2 {
        return Ok(());
    }
    let refuse_above = |need_sms: u32, why| if need_sms > limits.sms { Err(Refusal { need_sms, why }) } else { Ok(()) };
    let kinds: Vec<Block> = demands.iter().flat_map(|demand| demand.grids()).map(|grid| grid.block).collect();
    for (late, demand) in demands.iter().enumerate() {
        let lost = Lost::to(&demand.other.block.unwrap_or(limits.sm), limits, &kinds);
        refuse_above(lost.sms(lost.of_others(demands, late)) + demand.other.sms.max(1), LOCKS_OUT)?;
    }
    for (i, demand) in demands.iter().enumerate() {
        for (moment, candidate) in demand.moments.iter().flat_map(|moment| moment.iter().map(move |grid| (moment, grid))) {
            if candidate.blocks > 0 {
                let lost = Lost::to(&candidate.block, limits, &kinds);
                let parts = lost.of_others(demands, i) + lost.of_moment(moment) - lost.of_block(&candidate.block);
                refuse_above(lost.sms(parts) + 1, STARVES)?;
            }
        }
    }
    Ok(())
}

impl Waiting {
    /// `blocks` of a kernel that is launched with this geometry.
    ///
    /// # Errors
    /// [`Error::Gpu`] from the driver.
    pub fn of(name: Name, device: &Device, kernel: &Kernel, geometry: &Geometry, blocks: u32) -> Result<Self> {
        let resources = kernel.resources(device)?;
        let smem_bytes = resources.smem_bytes + geometry.smem_bytes;
        let block = Limits::of(device).block(geometry.threads, resources.registers, smem_bytes);
        let blocks_per_sm = kernel.max_active_blocks(device, geometry.threads, geometry.smem_bytes)?;
        Ok(Waiting { name, blocks, block, blocks_per_sm })
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Waiting { name, blocks, block, blocks_per_sm } = self;
        write!(f, "{name} of {blocks} blocks of {} threads ({blocks_per_sm} fit on a multiprocessor)", block.threads)
    }
}

impl Holder {
    /// The object that this rank of `world` is setting up: all its ranks call this between the same two collective calls.
    pub fn of(world: &World) -> Self {
        Holder { object: world.member().place_in_setup(), rank: world.rank() }
    }
}

/// Registers the demand of an object of one rank, of which `num_ranks` ranks of this process share the device, each with this demand. All of them get the same
/// answer, whichever comes first.
///
/// # Errors
/// [`Error::Invalid`] that says how many multiprocessors are needed, why, who holds how many, and how many blocks would fit;
/// [`Error::Unsupported`] when no grid does.
pub fn register(op: Name, device: &Device, holder: Holder, num_ranks: usize, demand: Demand) -> Result<Permit> {
    REGISTRY.register(op, &Limits::of(device), device.ordinal(), holder, num_ranks, demand)
}

impl Registry {
    /// An empty one.
    const fn new() -> Self {
        Registry(Mutex::new(Entries { entries: Vec::new(), num_added: 0 }))
    }

    fn register(&'static self, op: Name, limits: &Limits, device: u32, holder: Holder, num_ranks: usize, demand: Demand) -> Result<Permit> {
        let mut entries = lock(&self.0);
        let here = || entries.entries.iter().filter(|entry| entry.device == device);
        let num_known = here().filter(|entry| entry.holder.object == holder.object).count();
        let num_new = num_ranks.saturating_sub(num_known).max(1);
        let with = |demand: &Demand| {
            let held = here().map(|entry| &entry.demand);
            judge(limits, &held.chain(std::iter::repeat_n(demand, num_new)).collect::<Vec<_>>())
        };
        if let Err(refusal) = with(&demand) {
            let others: Vec<_> = here().filter(|entry| entry.holder.object != holder.object).collect();
            let most = demand.grids().map(|grid| grid.blocks).max().unwrap_or(0);
            let fitting = (1..most).rev().find(|blocks| with(&demand.cut(*blocks)).is_ok());
            return Err(refused(op, limits, num_ranks, &demand, &refusal, &others, fitting));
        }
        let (world, _) = holder.object;
        let other_ranks: BTreeSet<_> =
            here().map(|entry| (entry.holder.object.0, entry.holder.rank)).filter(|(w, _)| *w != world).collect();
        let ranks = other_ranks.len() + num_ranks;
        if ranks > limits.queues as usize {
            let queues = limits.queues;
            let why = format!(
                "work of a process reaches the device through {queues} queues, where that of a late rank would wait behind the others; set {CONNECTIONS}, \
                 up to 32, before the process first uses the GPU"
            );
            return Err(Error::Unsupported { op, what: format!("{ranks} ranks of one process on one device"), why });
        }
        entries.num_added += 1;
        let id = entries.num_added;
        entries.entries.push(Entry { id, device, holder, demand });
        Ok(Permit { registry: self, id })
    }
}

fn refused(
    op: Name,
    limits: &Limits,
    num_ranks: usize,
    demand: &Demand,
    refusal: &Refusal,
    others: &[&Entry],
    fitting: Option<u32>,
) -> Error {
    let Refusal { need_sms, why } = refusal;
    let grids: Vec<String> = demand.grids().map(Waiting::to_string).collect();
    let ranks = if num_ranks > 1 { format!(", on each of {num_ranks} ranks of the device") } else { String::new() };
    let held: Vec<String> = others
        .iter()
        .map(|entry| {
            let grids: Vec<_> = entry.demand.grids().map(|grid| format!("{} of {}", grid.name, grid.blocks)).collect();
            format!("rank {} of another object holds {} ({})", entry.holder.rank, entry.demand.touched(limits), grids.join(", "))
        })
        .collect();
    let held = if held.is_empty() { String::new() } else { format!("; {}", held.join(", ")) };
    let got = format!("{}{ranks}: they need {need_sms} multiprocessors, because {why}", grids.join(", "));
    let have = format!("{} multiprocessors{held}", limits.sms);
    match fitting {
        Some(blocks) => Error::invalid(op, "waiting grids", got, format!("grids that fit on {have}; at most {blocks} blocks each would")),
        None => Error::Unsupported { op, what: got, why: format!("the device has {have}; not even grids of one block would fit") },
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.registry.0).entries.retain(|entry| entry.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200, as the driver reports it.
    const H200: Limits = Limits {
        sms: 132,
        sm: Block { threads: 2048, registers: 65536, smem_bytes: 233_472 },
        blocks: 32,
        reserved_smem_bytes: 1024,
        queues: 8,
    };

    fn grid(name: Name, blocks: u32, threads: u32, registers: u32) -> Waiting {
        let block = H200.block(threads, registers, 0);
        let blocks_per_sm = (H200.sm.threads / block.threads).min(H200.sm.registers / block.registers).min(H200.blocks);
        Waiting { name, blocks, block, blocks_per_sm }
    }

    fn demand(blocks: u32, threads: u32, registers: u32) -> Demand {
        Demand { moments: vec![vec![grid("route", 1, 512, 64)], vec![grid("combine", blocks, threads, registers)]], other: Other::ANY }
    }

    fn fits(num: usize, demand: &Demand) -> bool {
        judge(&H200, &vec![demand; num]).is_ok()
    }

    #[test]
    fn a_block_takes_whole_units() {
        assert_eq!(H200.block(512, 110, 0), Block { threads: 512, registers: 16 * 3584, smem_bytes: 1024 });
        assert_eq!(H200.block(512, 64, 1), Block { threads: 512, registers: 32768, smem_bytes: 1152 });
        assert_eq!(H200.block(33, 9, 100), Block { threads: 64, registers: 4 * 512, smem_bytes: 1152 });
    }

    #[test]
    fn least_sums() {
        assert_eq!(least_sum(&[3], 7), Some(9));
        assert_eq!(least_sum(&[3, 5], 7), Some(8));
        assert_eq!(least_sum(&[4, 6, 0], 7), Some(8));
        assert_eq!(least_sum(&[4, 6], 0), Some(4));
        assert_eq!(least_sum(&[0], 7), None);
        assert_eq!(least_sum(&[32768], 32769), Some(65536));
    }

    #[test]
    fn one_alone_only_has_to_fit() {
        // One of 512 threads with 110 registers fits on a multiprocessor, two with 64.
        assert!(fits(1, &demand(132, 512, 110)) && !fits(1, &demand(133, 512, 110)));
        assert!(fits(1, &demand(264, 512, 64)) && !fits(1, &demand(265, 512, 64)));
        assert!(!fits(1, &demand(1, 1024, 128)));
        let refusal = judge(&H200, &[&demand(1000, 512, 64)]).unwrap_err();
        assert_eq!(refusal, Refusal { need_sms: 500, why: FILLS });
    }

    #[test]
    fn what_never_ended_is_refused() {
        let refusal = judge(&H200, &[&demand(66, 512, 110); 4]).unwrap_err();
        assert_eq!(refusal, Refusal { need_sms: 3 * 66 + 1, why: LOCKS_OUT });
        assert!(fits(4, &demand(33, 512, 110)));
    }

    /// Measured: beside 131 waiting blocks another kernel runs, beside 132 it does not.
    #[test]
    fn a_late_rank_has_a_multiprocessor() {
        let largest = |num: usize, blocks: u32| (1..=264).rev().find(|b| fits(num, &demand(*b, 256, 64))) == Some(blocks);
        assert!(largest(2, 131) && largest(3, 65) && largest(4, 43) && largest(8, 18));
        let more = |blocks| Demand { other: Other { sms: 16, ..Other::ANY }, ..demand(blocks, 256, 64) };
        assert!(fits(2, &more(116)) && !fits(2, &more(117)));
        // Who waits with little is late for long.
        assert!(judge(&H200, &[&demand(1, 512, 64), &demand(131, 512, 64)]).is_ok());
        assert!(judge(&H200, &[&demand(1, 512, 64), &demand(132, 512, 64)]).is_err());
    }

    /// Measured: beside one or two waiting blocks of 512 threads on each multiprocessor, with the largest carve-out, a kernel of 512 threads runs.
    #[test]
    fn a_late_rank_finds_room_where_its_kernels_are_known() {
        let other = Other { sms: 1, block: Some(H200.block(512, 64, 200 << 10)) };
        let with = |blocks, threads, registers| Demand { other, ..demand(blocks, threads, registers) };
        // One of 512 threads and 64 registers beside it leaves half of the registers, two leave none.
        assert!(fits(2, &with(132, 512, 64)) && fits(2, &demand(131, 512, 64)) && !fits(2, &demand(132, 512, 64)));
        // Three of 16384 registers are too much.
        let largest = (1..=264).rev().find(|blocks| fits(8, &with(*blocks, 256, 64)));
        assert_eq!(largest, Some(56));
        // Any of 110 is too much, as for a kernel that is not known.
        assert!(fits(3, &with(44, 512, 110)) && !fits(3, &with(66, 512, 110)));
        // Shared memory counts too.
        let waiting = Waiting { block: H200.block(64, 32, 30 << 10), ..grid("combine", 132, 64, 32) };
        let large = Demand { moments: vec![vec![waiting]], other };
        let small = Demand { other: Other { sms: 1, block: Some(H200.block(512, 64, 100 << 10)) }, ..large.clone() };
        assert!(!fits(2, &large) && fits(2, &small));
    }

    #[test]
    fn all_blocks_find_a_place() {
        // 86 blocks touch at most 86, but 2 x 86 of one a multiprocessor are more than 132.
        let refusal = judge(&H200, &[&demand(86, 512, 110); 2]).unwrap_err();
        assert_eq!(refusal, Refusal { need_sms: 172, why: STARVES });
        assert!(fits(2, &demand(66, 512, 110)) && !fits(2, &demand(67, 512, 110)));
        // Two a multiprocessor.
        assert!(fits(2, &demand(131, 512, 64)));
        // 131 large blocks, and 130 small ones that go wherever they like: one small one in a multiprocessor stops a large one.
        let (large, small) = (demand(131, 512, 110), demand(3, 256, 64));
        assert_eq!(judge(&H200, &[&large, &small]).unwrap_err(), Refusal { need_sms: 134, why: STARVES });
        assert!(judge(&H200, &[&demand(129, 512, 110), &small]).is_ok());
        // Small ones fit beside large ones, four of them before another large one does not: both may be many.
        let (large, small) = (demand(100, 512, 72), demand(100, 256, 32));
        assert!(judge(&H200, &[&large, &small]).is_ok());
        let (large, small) = (demand(110, 512, 72), demand(110, 256, 32));
        assert_eq!(judge(&H200, &[&large, &small]).unwrap_err(), Refusal { need_sms: 137, why: STARVES });
    }

    #[test]
    fn moments_do_not_add_up_but_what_waits_together_does() {
        let (low_latency, combine) = (grid("low_latency", 40, 256, 64), grid("combine", 60, 256, 64));
        let apart = Demand { moments: vec![vec![low_latency], vec![combine]], other: Other::ANY };
        let together = Demand { moments: vec![vec![low_latency, combine]], other: Other::ANY };
        assert_eq!((apart.touched(&H200), together.touched(&H200)), (60, 100));
        assert!(fits(3, &apart) && fits(2, &together) && !fits(3, &together));
    }

    fn holder(object: u64, rank: u32) -> Holder {
        Holder { object: (0, object), rank: Rank(rank) }
    }

    fn registry() -> &'static Registry {
        Box::leak(Box::new(Registry::new()))
    }

    #[test]
    fn every_rank_gets_the_same_answer() {
        let registry = registry();
        let add = |rank, blocks| registry.register("ep setup", &H200, 0, holder(1, rank), 4, demand(blocks, 512, 110));
        for rank in [2, 0] {
            let Err(Error::Invalid { what, got, want, .. }) = add(rank, 66) else { panic!("four times 66 were accepted") };
            assert_eq!(what, "waiting grids");
            assert!(got.contains("combine of 66 blocks of 512 threads") && got.contains("each of 4 ranks") && got.contains("199"), "{got}");
            assert!(want.contains("132 multiprocessors") && want.contains("at most 33 blocks"), "{want}");
        }
        let permits: Vec<_> = (0..4).map(|rank| add(rank, 33).unwrap()).collect();
        assert_eq!(lock(&registry.0).entries.len(), 4);
        drop(permits);
        assert_eq!(lock(&registry.0).entries.len(), 0);
    }

    #[test]
    fn a_device_takes_as_many_ranks_as_it_has_queues() {
        let registry = registry();
        let add = |world: usize, object: u64, rank: u32, num: usize| {
            registry.register("ep setup", &H200, 0, Holder { object: (world, object), rank: Rank(rank) }, num, demand(1, 64, 32))
        };
        let Err(Error::Unsupported { what, why, .. }) = add(1, 1, 0, 9) else { panic!("9 ranks have 8 queues") };
        assert!(what.starts_with("9 ranks") && why.contains(CONNECTIONS), "{what}; {why}");
        // Two objects of 6 ranks, and another world.
        let permits: Vec<_> = (0..12).map(|i| add(1, i / 6, i as u32 % 6, 6).unwrap()).collect();
        let others = [0, 1].map(|rank| add(2, 1, rank, 2).unwrap());
        assert!(add(3, 1, 0, 1).is_err());
        drop(permits);
        assert!(add(3, 1, 0, 6).is_ok() && add(3, 1, 0, 7).is_err());
        drop(others);
    }

    #[test]
    fn two_objects_count_twice_and_devices_apart() {
        let registry = registry();
        let add = |device, object, blocks| registry.register("ep setup", &H200, device, holder(object, 3), 1, demand(blocks, 512, 110));
        let first = add(0, 1, 100).unwrap();
        let other_device = add(1, 1, 132).unwrap();
        let Err(Error::Invalid { want, .. }) = add(0, 2, 40) else { panic!("100 and 40 of 132 were accepted") };
        assert!(want.contains("rank 3 of another object holds 100") && want.contains("at most 32 blocks"), "{want}");
        let second = add(0, 2, 32).unwrap();
        assert!(add(0, 3, 1).is_err());
        drop(first);
        let third = add(0, 3, 1).unwrap();
        drop((second, third, other_device));
        let full = add(0, 1, 132).unwrap();
        let Err(Error::Unsupported { what, why, .. }) = add(0, 2, 1) else { panic!("there is no room at all") };
        assert!(what.contains("133 multiprocessors") && why.contains("not even"), "{what}; {why}");
        drop(full);
    }
}
