//! Structs that kernels and host share, as `ep/layout.cuh` has them, and the words of a rank that its peers write.
#![forbid(unsafe_code)]

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use crate::ep::MAX_RANKS;

/// What happened first: `Failure` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Failure {
    /// kind | op << 8 | phase << 16 | rank << 24 | peer << 32 | blocks arrived << 40
    pub what: u64,
    /// Epoch.
    pub wanted: u64,
    pub seen: u64,
    pub time: u64,
    pub spare: [u64; 4],
}

/// A rank's own memory: `State` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct State {
    /// Last dispatch or replay.
    pub epoch: u64,
    /// Dispatch that filled the bank; 0 after one that was refused.
    pub bank_epoch: [u64; 2],
    pub failed: u64,
    pub arrived: u32,
    pub stored: u32,
    pub spare: [u64; 3],
}

/// In pinned host memory, which kernels write, and read the last two words of: `HostRecord` of layout.cuh. [`record`](super::record) makes errors of it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct HostRecord {
    /// 0, or one of `STATUS_*`; the epoch in the upper 56 bits.
    pub status: u64,
    pub num_demands: u64,
    pub failure: Failure,
    pub demand: [u64; MAX_RANKS],
    pub capacity: [u64; MAX_RANKS],
    /// Not 0 once the host knows that the world has failed.
    pub abort: u64,
    /// A bit for each rank of which the host knows that it has left. Behind `abort`.
    pub left: u64,
}

/// What describes an arrival: `BankHead` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BankHead {
    pub num_rows: u32,
    pub num_dropped: u32,
    pub num_arrivals: u32,
    pub is_valid: u32,
    /// First arrival of each sender.
    pub arrival_start: [u32; MAX_RANKS + 1],
    pub spare: [u32; 3],
}

/// What is kept of a dispatch: `RoutingHead` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct RoutingHead {
    /// Of the dispatch that filled it; 0: refused.
    pub epoch: u64,
    pub num_tokens: u32,
    pub num_dropped: u32,
    /// Arrivals of lower ranks at each rank.
    pub arrival_base: [u32; MAX_RANKS],
}

/// Where rows of one sender for one expert go: `Place` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Place {
    pub slot: u32,
    pub room: u32,
}

/// One rank, as every kernel knows it: `Rank` of layout.cuh, the end of every parameter struct. Kernels declare `peers[WORLD]`, and the driver copies
/// as much as they declare.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct RankParameters {
    pub timeout_ns: u64,
    /// Offset of the words in every rank's memory.
    pub signals: u64,
    /// Address of [`State`].
    pub state: u64,
    /// Address of [`HostRecord`], as the device knows it.
    pub host: u64,
    /// With an expert map: `u32 [num_experts]`, else 0.
    pub owners: u64,
    /// With an expert map: ids grouped by owner, ascending, `u32 [num_experts]`.
    pub experts: u64,
    /// With an expert map: where each owner's begin in `experts`, `u32 [world + 1]`.
    pub first_expert: u64,
    pub rank: u32,
    pub bank: u32,
    /// 1: all ranks are threads of one process on one device, so that its scope reaches them.
    pub is_one_device: u32,
    pub spare: u32,
    /// Memory of every rank, at the addresses that this device uses.
    pub peers: [u64; MAX_RANKS],
}

/// Offsets of the words of a rank that its peers write, from the start of the words: as layout.cuh computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signals {
    /// u64: not 0 once any rank failed.
    pub abort: usize,
    /// [`Failure`] by writer.
    pub failures: usize,
    /// u64 `[2, sender, num_words]`.
    pub counts: usize,
    /// u64 `[sender]`.
    pub done: usize,
    /// u64 `[2, sender]`.
    pub ready: usize,
    /// All of them.
    pub num_bytes: usize,
}

/// A line of the second-level cache (spec: NVIDIA and AMD CDNA): no two writers of words share the abort word's.
pub(crate) const LINE_BYTES: usize = 128;

impl Signals {
    /// Of a world whose calls have `num_words` count words for each pair of ranks.
    pub const fn new(world: usize, num_words: usize) -> Self {
        let failures = LINE_BYTES;
        let counts = failures + size_of::<Failure>() * world;
        let done = counts + 2 * 8 * world * num_words;
        let ready = done + 8 * world;
        Signals { abort: 0, failures, counts, done, ready, num_bytes: ready + 2 * 8 * world }
    }
}

// As the kernels assert with the same numbers.
const _: () = {
    assert!(size_of::<Failure>() == 64 && size_of::<State>() == 64 && size_of::<Place>() == 8);
    assert!(size_of::<HostRecord>() == 16 + 64 + 2 * 8 * MAX_RANKS + 16 && offset_of!(HostRecord, demand) == 80);
    assert!(size_of::<BankHead>() == 288 && offset_of!(BankHead, arrival_start) == 16);
    assert!(size_of::<RoutingHead>() == 272 && offset_of!(RoutingHead, arrival_base) == 16);
    assert!(size_of::<RankParameters>() == 72 + 8 * MAX_RANKS && offset_of!(RankParameters, peers) == 72);
    assert!(offset_of!(State, bank_epoch) == 8 && offset_of!(State, failed) == 24 && offset_of!(State, arrived) == 32);
};

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The fields of a struct of device code: names, in order, and whether each is of 32 bits.
    fn device_fields(text: &str, name: &str) -> Vec<(String, bool)> {
        let (_, rest) = text.split_once(&format!("struct {name} {{\n")).unwrap_or_else(|| panic!("no struct {name}"));
        let (body, _) = rest.split_once("\n};").unwrap();
        let lines = body.lines().map(|line| line.split("//").next().unwrap().trim()).filter(|line| !line.is_empty());
        let field = |line: &str| {
            let declaration = line.strip_suffix(';').unwrap_or_else(|| panic!("{line}"));
            let (ty, name) = declaration.split('[').next().unwrap().rsplit_once(' ').unwrap();
            (name.to_owned(), ty == "u32")
        };
        lines.map(field).collect()
    }

    /// Fails unless the struct of device code has the fields of this one, which prints them, in their order; `words` are those of 32 bits.
    pub(crate) fn assert_same_fields(text: &str, name: &str, printed: &str, words: &[&str]) {
        let top = printed.lines().filter_map(|line| line.strip_prefix("    ").filter(|rest| !rest.starts_with([' ', '}', ']'])));
        let fields: Vec<String> = top.map(|line| line.split(':').next().unwrap().to_owned()).collect();
        let device = device_fields(text, name);
        assert_eq!(fields, device.iter().map(|(field, _)| field.clone()).collect::<Vec<_>>(), "{name}");
        let short: Vec<&str> = device.iter().filter(|(_, is_short)| *is_short).map(|(field, _)| field.as_str()).collect();
        assert_eq!(short, words, "{name}");
    }

    #[test]
    fn structs_are_those_of_the_kernels() {
        let text = include_str!("../layout.cuh");
        let same = |name: &str, printed: String, words: &[&str]| assert_same_fields(text, name, &printed, words);
        same("Failure", format!("{:#?}", Failure::zeroed()), &[]);
        same("State", format!("{:#?}", State::zeroed()), &["arrived", "stored"]);
        same("HostRecord", format!("{:#?}", HostRecord::zeroed()), &[]);
        let head = BankHead { num_rows: 0, num_dropped: 0, num_arrivals: 0, is_valid: 0, arrival_start: [0; 65], spare: [0; 3] };
        let all = ["num_rows", "num_dropped", "num_arrivals", "is_valid", "arrival_start", "spare"];
        same("BankHead", format!("{head:#?}"), &all);
        same("RoutingHead", format!("{:#?}", RoutingHead::zeroed()), &["num_tokens", "num_dropped", "arrival_base"]);
        same("Place", format!("{:#?}", Place::zeroed()), &["slot", "room"]);
        same("Rank", format!("{:#?}", RankParameters::zeroed()), &["rank", "bank", "is_one_device", "spare"]);
        for (name, size) in [
            ("Failure", size_of::<Failure>()),
            ("State", size_of::<State>()),
            ("HostRecord", size_of::<HostRecord>()),
            ("BankHead", size_of::<BankHead>()),
            ("RoutingHead", size_of::<RoutingHead>()),
        ] {
            assert!(text.contains(&format!("static_assert(sizeof({name}) == {size},")), "{name}");
        }
        assert!(text.contains(&format!("static_assert(sizeof(Rank) == {} + 8 * WORLD,", offset_of!(RankParameters, peers))));
    }

    #[test]
    fn words_follow_each_other() {
        // Counted by hand for 3 ranks by token and for 2 ranks with 5 experts.
        let by_token = Signals { abort: 0, failures: 128, counts: 320, done: 464, ready: 488, num_bytes: 536 };
        assert_eq!(Signals::new(3, 3), by_token);
        let by_expert = Signals { abort: 0, failures: 128, counts: 256, done: 480, ready: 496, num_bytes: 528 };
        assert_eq!(Signals::new(2, 7), by_expert);
    }
}
