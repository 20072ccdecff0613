//! Which grids may wait on a device at the same time.
//!
//! A block that waits for a peer keeps its threads, registers and shared memory, and pins the split of its multiprocessor's memory between cache and
//! shared memory. Ranks that share a device therefore stop each other when one fills the device with waiting blocks before the others have started, or
//! before their own kernels have run. So each object declares its waiting grids before it launches anything; they are cut, or refused, so that the grids of
//! all ranks and objects of the device cannot stop each other, whatever order they come in and wherever the hardware places them. Who holds what, and
//! when it is cut, is in `claims.rs`.
//!
//! # The rule
//!
//! What a rank queues in one stream waits in one *moment* at a time: one of its grids, or two with programmatic launch, where the next one may start while the
//! first still waits. For two such demands and more on a device:
//!
//! 1. **Nobody locks out the kernels of a late one.** Let all wait but one, in any moments: enough multiprocessors without any waiting block are left for
//!    that one's other kernels, or with room for a block of them, where it is known how large they are. Measured on an H200: beside one waiting block of
//!    512 threads on each of the 132, a kernel that asks for another split never starts, unless the waiting one has asked for the largest; beside 131 it runs.
//! 2. **All waiting blocks fit.** Let all blocks run but one, wherever: it still finds a place. Measured: 66 blocks of 512 threads with 110 registers on
//!    each of four ranks, so one block a multiprocessor and 264 of them on 132, never end.
//!
//! In both, the multiprocessors that blocks can make useless are counted and not how many fit at best. One demand alone on a device waits for nobody there: its
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

pub use super::claims::{Holder, Permit, Settled, register};
use crate::error::Result;
use crate::gpu::{Device, Geometry, Kernel};
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

pub(super) const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// What a block takes of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
    /// The caller has said how many blocks: it is that or an error.
    pub is_fixed: bool,
}

/// What an object of one rank needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// Grids that may wait at the same time, for each moment.
    pub moments: Vec<Vec<Waiting>>,
    /// One that may still wait when the next kernel of the stream, of whichever object, has started. It is in `moments` where that is this object's.
    pub lingers: Option<Waiting>,
    /// If nothing shares the device it lets any kernel behind one that waits start.
    pub opens_when_alone: bool,
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

impl Other {
    /// Room for either.
    fn max(self, other: Other) -> Other {
        let most = |a: Block, b: Block| Block {
            threads: a.threads.max(b.threads),
            registers: a.registers.max(b.registers),
            smem_bytes: a.smem_bytes.max(b.smem_bytes),
        };
        Other { sms: self.sms.max(other.sms), block: self.block.zip(other.block).map(|(a, b)| most(a, b)) }
    }
}

impl Demand {
    /// Of objects that a rank uses in one stream: they take turns, but for what lingers.
    pub(super) fn in_turns(parts: &[Demand]) -> Self {
        let other = Other { sms: 1, block: Some(Block::default()) };
        let mut all = Demand { moments: Vec::new(), lingers: None, opens_when_alone: false, other };
        for (i, part) in parts.iter().enumerate() {
            let before = || parts.iter().enumerate().filter(|(j, _)| *j != i).filter_map(|(_, other)| other.lingers);
            for moment in &part.moments {
                all.moments.push(moment.clone());
                all.moments.extend(before().map(|lingers| moment.iter().copied().chain([lingers]).collect()));
            }
            all.other = all.other.max(part.other);
        }
        all
    }

    /// Most multiprocessors that its waiting blocks can touch.
    pub(super) fn touched(&self, limits: &Limits) -> u32 {
        let touched = |moment: &Vec<Waiting>| moment.iter().map(|w| w.blocks.min(limits.sms)).sum::<u32>().min(limits.sms);
        self.moments.iter().map(touched).max().unwrap_or(0)
    }

    pub(super) fn grids(&self) -> impl Iterator<Item = &Waiting> {
        self.moments.iter().flatten()
    }

    /// The same with a kernel, of whatever size, that has started behind one that waits.
    pub(super) fn opened(mut self, limits: &Limits) -> Self {
        let name = "what is behind payload";
        self.moments.push(vec![Waiting { name, blocks: limits.sms, block: limits.sm, blocks_per_sm: 1, is_fixed: true }]);
        self
    }

    /// The same with at most so many blocks in a grid of which the caller has not said how many.
    pub(super) fn cut(&self, blocks: u32) -> Self {
        self.cut_if(blocks, |w| !w.is_fixed)
    }

    /// The same in every grid.
    pub(super) fn cut_all(&self, blocks: u32) -> Self {
        self.cut_if(blocks, |_| true)
    }

    fn cut_if(&self, blocks: u32, is_cut: impl Fn(&Waiting) -> bool) -> Self {
        let cut = |w: Waiting| Waiting { blocks: if is_cut(&w) { w.blocks.min(blocks) } else { w.blocks }, ..w };
        let moments = self.moments.iter().map(|moment| moment.iter().copied().map(cut).collect()).collect();
        Demand { moments, lingers: self.lingers.map(cut), ..*self }
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
    let mut kinds: Vec<Block> = Vec::new();
    for grid in demands.iter().flat_map(|demand| demand.grids()) {
        if !kinds.contains(&grid.block) {
            kinds.push(grid.block);
        }
    }
    // Ranks of an object have equal demands: one of them speaks for all.
    let distinct = || demands.iter().enumerate().filter(|(i, demand)| !demands[..*i].contains(demand));
    for (late, demand) in distinct() {
        let lost = Lost::to(&demand.other.block.unwrap_or(limits.sm), limits, &kinds);
        refuse_above(lost.sms(lost.of_others(demands, late)) + demand.other.sms.max(1), LOCKS_OUT)?;
    }
    for (i, demand) in distinct() {
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
    /// Just so many blocks of a kernel that is launched with this geometry.
    ///
    /// # Errors
    /// [`Error::Gpu`] from the driver.
    pub fn of(name: Name, device: &Device, kernel: &Kernel, geometry: &Geometry, blocks: u32) -> Result<Self> {
        let resources = kernel.resources(device)?;
        let smem_bytes = resources.smem_bytes + geometry.smem_bytes;
        let block = Limits::of(device).block(geometry.threads, resources.registers, smem_bytes);
        let blocks_per_sm = kernel.max_active_blocks(device, geometry.threads, geometry.smem_bytes)?;
        Ok(Waiting { name, blocks, block, blocks_per_sm, is_fixed: true })
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Waiting { name, blocks, block, blocks_per_sm, .. } = self;
        write!(f, "{name} of {blocks} blocks of {} threads ({blocks_per_sm} fit on a multiprocessor)", block.threads)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Of an H200, as the driver reports it.
    pub const H200: Limits = Limits {
        sms: 132,
        sm: Block { threads: 2048, registers: 65536, smem_bytes: 233_472 },
        blocks: 32,
        reserved_smem_bytes: 1024,
        queues: 8,
    };

    /// A grid that is not cut.
    pub fn grid(name: Name, blocks: u32, threads: u32, registers: u32) -> Waiting {
        let block = H200.block(threads, registers, 0);
        let blocks_per_sm = (H200.sm.threads / block.threads).min(H200.sm.registers / block.registers).min(H200.blocks);
        Waiting { name, blocks, block, blocks_per_sm, is_fixed: true }
    }

    pub fn demand(blocks: u32, threads: u32, registers: u32) -> Demand {
        let moments = vec![vec![grid("route", 1, 512, 64)], vec![grid("combine", blocks, threads, registers)]];
        Demand { moments, lingers: None, opens_when_alone: false, other: Other::ANY }
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
        let large = Demand { moments: vec![vec![waiting]], other, ..demand(1, 512, 64) };
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
        let apart = Demand { moments: vec![vec![low_latency], vec![combine]], ..demand(1, 512, 64) };
        let together = Demand { moments: vec![vec![low_latency, combine]], ..demand(1, 512, 64) };
        assert_eq!((apart.touched(&H200), together.touched(&H200)), (60, 100));
        assert!(fits(3, &apart) && fits(2, &together) && !fits(3, &together));
    }
}
