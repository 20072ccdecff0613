//! What kernels write of a refused or failed call, as errors.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::layout::{self, HostRecord};
use crate::ep::signal::{COUNT_MASK, Kind};
use crate::error::{Demand, Error, Failure, FailureKind, Limit};
use crate::id::Rank;
use crate::name::Name;

// `STATUS_*` of layout.cuh, in the lower 8 bits of a status.
const CAPACITY_TOKENS: u64 = 1;
const CAPACITY_ROWS: u64 = 2;
const MISMATCH: u64 = 3;
const FAILED: u64 = 4;
const CAPACITY_EXPERT: u64 = 5;

/// Which rank reads its record, and what it was told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader {
    pub rank: Rank,
    pub world: usize,
    /// Of the waits.
    pub bound: Duration,
}

impl HostRecord {
    /// The error that the next call returns; `None` for a record in which nothing was written.
    pub fn error(&self, reader: &Reader) -> Option<Error> {
        match self.status & 0xFF {
            0 => None,
            CAPACITY_TOKENS => Some(self.capacity_error(reader, Limit::Tokens)),
            CAPACITY_ROWS => Some(self.capacity_error(reader, Limit::Rows)),
            CAPACITY_EXPERT => Some(self.capacity_error(reader, Limit::RowsPerExpert)),
            MISMATCH => Some(self.mismatch(reader)),
            FAILED => Some(match failure(&self.failure) {
                Some(failure) if failure.kind == FailureKind::Timeout && failure.rank == reader.rank => {
                    Error::Timeout { failure, bound: reader.bound }
                }
                Some(first) => Error::Poisoned { first },
                None => unknown(self.failure.what),
            }),
            _ => Some(unknown(self.status)),
        }
    }

    fn capacity_error(&self, reader: &Reader, limit: Limit) -> Error {
        let demand = |r: usize| Demand { rank: Rank(r as u32), limit, demand: self.demand[r], capacity: self.capacity[r] };
        // Of too many tokens only those ranks speak that have them; the others' numbers are 0.
        let demands = (0..reader.world).map(demand).filter(|d| limit != Limit::Tokens || d.demand > 0).collect();
        Error::Capacity { op: "dispatch", demands }
    }

    /// From what `refuse` of routing.cuh wrote: in `demand` the flags of each rank's word, 0 when they are this rank's own, and above them its count
    /// for this rank; in `capacity` this rank's flags and the count that it expected.
    fn mismatch(&self, reader: &Reader) -> Error {
        let call = |r: usize| {
            let (theirs, mine) = (self.demand[r] & 0xF, self.capacity[r] & 0xF);
            let flags = if theirs == 0 { mine } else { theirs };
            (flags & 3, flags >> 3 & 1)
        };
        let describe = |r: usize| {
            let (kind, bank) = call(r);
            format!("{} into bank {bank}", if kind == Kind::Replay as u64 { "replay" } else { "dispatch" })
        };
        if let Some(r) = (0..reader.world).find(|&r| call(r) != call(0)) {
            let (first, second) = (Rank(0), Rank(r as u32));
            let (first_value, second_value) = (describe(0), describe(r));
            return Error::Mismatch { op: "dispatch", first, second, what: "call".into(), first_value, second_value };
        }
        let me = reader.rank.index();
        let counts = |r: usize| (self.demand[r] >> 8 & COUNT_MASK, self.capacity[r] >> 8 & COUNT_MASK);
        let other = (0..reader.world).find(|&r| counts(r).0 != counts(r).1);
        // When no count for this rank differs, one for another rank does.
        let peer = other.unwrap_or(if me == 0 { 1 } else { 0 });
        let (here, there) = match other {
            Some(r) => (format!("a routing with {} rows from rank {r}", counts(r).1), format!("one with {}", counts(r).0)),
            None => ("a routing".into(), "another one, for other ranks".into()),
        };
        let (first_value, second_value) = if me < peer { (here, there) } else { (there, here) };
        let (first, second) = (Rank(me.min(peer) as u32), Rank(me.max(peer) as u32));
        Error::Mismatch { op: "replay", first, second, what: "routing".into(), first_value, second_value }
    }
}

fn unknown(what: u64) -> Error {
    Error::invalid("ep", "host record", format!("{what:#x}"), "a word that a kernel writes")
}

/// A failure that a kernel wrote, at this rank or into the words of its peers; `None` where nobody wrote one.
pub(crate) fn failure(record: &layout::Failure) -> Option<Failure> {
    let field = |shift: u32| record.what >> shift & 0xFF;
    // `FAILED_*`, `OP_*` and `PHASE_*` of layout.cuh.
    const OPS: [Name; 3] = ["dispatch", "replay", "combine"];
    const PHASES: [Name; 4] = ["blocks", "counts", "rows", "ready"];
    let name = |names: &[Name], code: u64| names.get((code as usize).wrapping_sub(1)).copied();
    let kind = match field(0) {
        1 => FailureKind::Timeout,
        2 => FailureKind::Left,
        _ => return None,
    };
    let (rank, peer) = (Rank(field(24) as u32), Rank(field(32) as u32));
    Some(Failure {
        kind,
        op: name(&OPS, field(8))?,
        phase: name(&PHASES, field(16))?,
        // As on the host: who has left is who has failed.
        rank: if kind == FailureKind::Left { peer } else { rank },
        peer,
        epoch: record.wanted,
        seen: record.seen,
        blocks_arrived: (record.what >> 40) as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    const READER: Reader = Reader { rank: Rank(1), world: 3, bound: Duration::from_secs(7) };

    fn record(status: u64, demand: [u64; 3], capacity: [u64; 3]) -> HostRecord {
        let mut record = HostRecord { status: 9 << 8 | status, ..HostRecord::zeroed() };
        record.demand[..3].copy_from_slice(&demand);
        record.capacity[..3].copy_from_slice(&capacity);
        record
    }

    #[test]
    fn nothing_and_nonsense() {
        assert_eq!(HostRecord::zeroed().error(&READER), None);
        for status in [6, 0xFF] {
            assert!(matches!(record(status, [0; 3], [0; 3]).error(&READER), Some(Error::Invalid { .. })));
        }
        assert!(matches!(record(FAILED, [0; 3], [0; 3]).error(&READER), Some(Error::Invalid { .. })));
    }

    #[test]
    fn capacity() {
        let demands = |status, demand, capacity| match record(status, demand, capacity).error(&READER) {
            Some(Error::Capacity { op: "dispatch", demands }) => {
                demands.iter().map(|d| (d.rank.0, d.limit, d.demand, d.capacity)).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(demands(CAPACITY_TOKENS, [0, 70, 65], [64; 3]), [(1, Limit::Tokens, 70, 64), (2, Limit::Tokens, 65, 64)]);
        let rows = demands(CAPACITY_ROWS, [5, 9, 0], [8; 3]);
        assert_eq!(rows, [(0, Limit::Rows, 5, 8), (1, Limit::Rows, 9, 8), (2, Limit::Rows, 0, 8)]);
        assert_eq!(demands(CAPACITY_EXPERT, [5, 9, 0], [8; 3])[1].1, Limit::RowsPerExpert);
    }

    #[test]
    fn mismatches_name_both_ranks() {
        let values = |record: HostRecord| match record.error(&READER) {
            Some(Error::Mismatch { op, first, second, what, first_value, second_value }) => {
                (op, first.0, second.0, what, first_value, second_value)
            }
            other => panic!("{other:?}"),
        };
        let text = String::from;
        // This rank dispatches into bank 1, and so does rank 0; rank 2 replays, into bank 0.
        let call = record(MISMATCH, [0, 0, 2], [9, 9, 9]);
        assert_eq!(values(call), ("dispatch", 0, 2, text("call"), text("dispatch into bank 1"), text("replay into bank 0")));
        // Rank 0 has another routing: 7 rows for this rank instead of 5.
        let routing = record(MISMATCH, [7 << 8, 3 << 8, 0], [5 << 8 | 2, 3 << 8 | 2, 2]);
        let (here, there) = (text("a routing with 5 rows from rank 0"), text("one with 7"));
        assert_eq!(values(routing), ("replay", 0, 1, text("routing"), there, here));
        // All counts for this rank are as expected.
        let (_, first, second, ..) = values(record(MISMATCH, [0; 3], [2; 3]));
        assert_eq!((first, second), (0, 1));
    }

    #[test]
    fn failures() {
        let what = 1 | 3 << 8 | 4 << 16 | 1 << 24 | 2 << 32 | 77 << 40;
        let written = layout::Failure { what, wanted: 12, seen: 11, ..layout::Failure::zeroed() };
        let here = HostRecord { status: FAILED, failure: written, ..HostRecord::zeroed() };
        let Some(Error::Timeout { failure: found, bound }) = here.error(&READER) else { panic!("{:?}", here.error(&READER)) };
        assert_eq!((found.op, found.phase, found.rank.0, found.peer.0), ("combine", "ready", 1, 2));
        assert_eq!((found.epoch, found.seen, found.blocks_arrived, bound.as_secs()), (12, 11, 77, 7));
        assert!(found.to_string().contains("77 blocks"), "{found}");
        let elsewhere = Reader { rank: Rank(0), ..READER };
        assert_eq!(here.error(&elsewhere), Some(Error::Poisoned { first: found }));
        // Rank 2 had left: on every rank another's failure.
        let gone = HostRecord { failure: layout::Failure { what: what + 1, ..written }, ..here };
        let Some(Error::Poisoned { first }) = gone.error(&READER) else { panic!("{:?}", gone.error(&READER)) };
        assert_eq!((first.kind, first.rank.0, first.peer.0, first.phase), (FailureKind::Left, 2, 2, "ready"));
        assert_eq!(failure(&layout::Failure::zeroed()), None);
        assert_eq!(failure(&layout::Failure { what: what + 2, ..written }), None);
        assert_eq!(failure(&layout::Failure { what: 1 | 9 << 8 | 1 << 16, ..written }), None);
    }
}
