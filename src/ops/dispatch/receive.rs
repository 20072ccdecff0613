//! The receiving half of dispatch on CPU ranks: waits, then puts in place what only the receiver can. Numbers in parentheses are steps of
//! `ep/PROTOCOL.md`.

use super::cpu::{local_id, message_offset, put_column_scales, record_scales};
use super::record::{Reader, Writer};
use super::routing::{NONE, ReceivedRows, Routing};
use super::{Arrival, Sent};
use crate::cpu::copy::{Store, copy, finish};
use crate::ep::object::{Counts, Lease, Shared};
use crate::ep::signal::{Kind, Label, Machine};
use crate::ep::steps::{DISPATCH_RECEIVE, Step, Walker, walk};
use crate::ep::wait::Poll;
use crate::ep::world::Doing;
use crate::ep::{IdSpace, Layout};
use crate::error::{Error, Result};
use crate::id::Rank;

/// Arrivals of one unit of parallel work (arbitrary, as for sending).
const PART_ARRIVALS: usize = 32;

/// The receiving half of a call. Rows that travelled with the counts are there already.
pub(super) fn receive(routing: &Routing, received: &mut ReceivedRows, is_new: bool, sent: Sent) -> Result<Arrival> {
    let mut receiving = Receiving { routing, received, is_new, at: At::Sent(sent) };
    walk(&DISPATCH_RECEIVE, &mut receiving)?;
    match receiving.at {
        At::Arrived(arrival) => Ok(arrival),
        At::Sent(_) | At::Nowhere => unreachable!("the last step arranges"),
    }
}

/// One rank in the receiving half of a call.
struct Receiving<'a> {
    routing: &'a Routing,
    received: &'a mut ReceivedRows,
    is_new: bool,
    at: At,
}

/// How far it has come.
enum At {
    Sent(Sent),
    Nowhere,
    Arrived(Arrival),
}

impl Walker for Receiving<'_> {
    type Memory = Machine;
    type Error = Error;

    fn take(&mut self, step: Step) -> Result<()> {
        match (step, std::mem::replace(&mut self.at, At::Nowhere)) {
            (Step::Poll(Label::Done), At::Sent(sent)) => {
                poll_done(self.routing, &sent)?;
                self.at = At::Sent(sent);
            }
            (Step::Arrange, At::Sent(sent)) => self.at = At::Arrived(arrange(self.routing, self.received, self.is_new, sent)),
            (other, _) => debug_assert!(false, "{other:?} is no step of this half"),
        }
        Ok(())
    }
}

/// Waits until every row for this rank is complete in its memory (6).
fn poll_done(routing: &Routing, sent: &Sent) -> Result<()> {
    let Lease { shared, epoch, .. } = &sent.lease;
    let plan = &shared.plan;
    let op = if sent.kind == Kind::Replay { "replay" } else { "dispatch" };
    let signals = &shared.mine().signals;
    let is_sending = |peer: &usize| routing.arrivals(plan, *peer, shared.me()) as usize > plan.staged_rows;
    // sync done: the acquire after this pairs with the release before `cpu::post_done` of every sender
    let poll = || {
        let missing = shared.peers().filter(is_sending).find(|&peer| !signals.is_done(peer, *epoch));
        missing.map_or(Poll::Ready, |peer| Poll::Missing { peer, seen: signals.seen_done(peer) })
    };
    shared.member.wait(Doing { op, phase: "rows", epoch: *epoch }, shared.timeout, poll)
}

/// Turns what arrived into an arrival (step 7): all of the bank is this rank's now.
fn arrange(routing: &Routing, received: &mut ReceivedRows, is_new: bool, mut sent: Sent) -> Arrival {
    let shared = sent.lease.shared.clone();
    let plan = &shared.plan;
    let me = shared.me();
    let counts = sent.lease.counts_mut();
    let mut start = 0;
    for sender in 0..plan.world {
        counts.arrival_start[sender] = start;
        start += routing.arrivals(plan, sender, me);
    }
    counts.arrival_start[plan.world] = start;
    let bank = shared.bank_offset(sent.lease.bank);
    let work = Work { shared: &shared, routing, bank, epoch: sent.lease.epoch };
    let counts = sent.lease.counts_mut();
    if routing.config.layout == Layout::ByToken {
        work.unstage_by_token(counts);
        work.count_by_token(counts);
    } else {
        work.count_by_expert(counts);
        work.unstage_transit(counts);
        if is_new {
            work.read_transit(counts, received);
        }
        let received = if is_new { &*received } else { &routing.received };
        work.expand(counts, received);
        if matches!(routing.config.layout, Layout::ByExpert { .. }) {
            work.pad(counts);
        }
    }
    Arrival::new(sent.lease, sent.filled_by)
}

struct Work<'a> {
    shared: &'a Shared,
    routing: &'a Routing,
    bank: usize,
    epoch: u64,
}

impl Work<'_> {
    /// Bytes of a region of this rank's bank.
    ///
    /// # Safety
    /// As for [`Symmetric::bytes`](crate::ep::symmetric::Symmetric::bytes).
    unsafe fn bytes(&self, region: usize, index: usize, len: usize) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { self.shared.mine().bytes.bytes(self.bank + region + index * len, len) }
    }

    /// Bytes of a region of this rank's bank, to be written.
    ///
    /// # Safety
    /// As for [`Symmetric::bytes_mut`](crate::ep::symmetric::Symmetric::bytes_mut).
    #[allow(clippy::mut_from_ref)]
    unsafe fn bytes_mut(&self, region: usize, index: usize, len: usize) -> &mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { self.shared.mine().bytes.bytes_mut(self.bank + region + index * len, len) }
    }

    /// Messages of this epoch: (arrival at this rank, bytes).
    fn messages<'a>(&'a self, counts: &'a Counts) -> impl Iterator<Item = (usize, &'a [u8])> {
        let plan = &self.shared.plan;
        (0..plan.world).flat_map(move |sender| {
            let first = counts.arrival_start[sender];
            let num = ((counts.arrival_start[sender + 1] - first) as usize).min(plan.staged_rows);
            (0..num).map(move |i| {
                let at = message_offset(self.shared, self.epoch, sender, i);
                // SAFETY: the sender wrote it before its counts, which this rank has read, and not again before this rank's next counts (1).
                (first as usize + i, unsafe { self.shared.mine().bytes.bytes(at, plan.message_bytes) })
            })
        })
    }

    fn unstage_by_token(&self, counts: &Counts) {
        let plan = &self.shared.plan;
        for (slot, message) in self.messages(counts).filter(|&(slot, _)| slot < plan.max_rows) {
            let (row, rest) = message.split_at(plan.row_bytes);
            let (record, scales) = rest.split_at(plan.record_bytes);
            // SAFETY: step 7; each slot is written once.
            unsafe { self.bytes_mut(plan.regions.x, slot, plan.row_bytes) }.copy_from_slice(row);
            // SAFETY: as above.
            unsafe { self.bytes_mut(plan.regions.records, slot, plan.record_bytes) }.copy_from_slice(record);
            if plan.has_column_scales() {
                put_column_scales(self.shared, self.shared.me(), self.bank, slot as u32, Some(&scales[..plan.scale_bytes]));
            }
        }
    }

    fn count_by_token(&self, counts: &mut Counts) {
        let plan = &self.shared.plan;
        let demand = counts.arrival_start[plan.world] as usize;
        let num_rows = demand.min(plan.max_rows);
        counts.num_rows = [num_rows as u32];
        counts.num_dropped = demand - num_rows;
        counts.num_rows_per_expert.fill(0);
        let rank = Rank(self.shared.me() as u32);
        for slot in 0..num_rows {
            // SAFETY: step 7; nobody writes.
            let record = Reader::new(unsafe { self.bytes(plan.regions.records, slot, plan.record_bytes) }, plan.row_k);
            for &id in record.ids().iter().filter(|&&id| id >= 0) {
                let local = match self.routing.config.id_space {
                    IdSpace::Local => id,
                    IdSpace::Global if plan.placement.owners()[id as usize] == rank => local_id(self.shared, id),
                    IdSpace::Global => continue,
                };
                counts.num_rows_per_expert[local as usize] += 1;
            }
        }
    }

    fn count_by_expert(&self, counts: &mut Counts) {
        let plan = &self.shared.plan;
        let experts = plan.placement.experts_of(Rank(self.shared.me() as u32));
        let num_local = experts.len();
        let (mut start, mut dropped) = (0u32, 0usize);
        for (l, &expert) in experts.iter().enumerate() {
            let mut base = 0;
            for sender in 0..plan.world {
                counts.row_base[sender * num_local + l] = base;
                base += self.routing.rows(plan, sender, expert.index());
            }
            let (kept, taken) = self.routing.segment_rows(plan, base);
            counts.num_rows_per_expert[l] = kept;
            counts.segment_start[l] = start;
            start += taken;
            dropped += (base - kept) as usize;
        }
        counts.segment_start[num_local] = start;
        counts.num_rows = [start];
        counts.num_dropped = dropped;
    }

    fn unstage_transit(&self, counts: &Counts) {
        let plan = &self.shared.plan;
        for (arrival, message) in self.messages(counts) {
            // SAFETY: step 7; each arrival is written once.
            let record = unsafe { self.bytes_mut(plan.regions.transit, arrival, plan.transit_bytes) };
            record.copy_from_slice(&message[plan.row_bytes..][..plan.transit_bytes]);
        }
    }

    fn transit(&self, arrival: usize) -> Reader<'_> {
        let plan = &self.shared.plan;
        // SAFETY: step 7; transit records are complete and nobody writes them.
        Reader::new(unsafe { self.bytes(plan.regions.transit, arrival, plan.transit_bytes) }, self.routing.config.k)
    }

    /// From the records that travelled: the slots of every arrival, in ascending expert id.
    fn read_transit(&self, counts: &Counts, received: &mut ReceivedRows) {
        let k = self.routing.config.k;
        let num_local = counts.num_rows_per_expert.len();
        let num_arrivals = *counts.arrival_start.last().expect("world + 1 entries") as usize;
        received.num_arrivals = num_arrivals;
        let mut sender = 0;
        for arrival in 0..num_arrivals {
            while arrival >= counts.arrival_start[sender + 1] as usize {
                sender += 1;
            }
            let record = self.transit(arrival);
            let slots = &mut received.slots[arrival * k..][..k];
            let experts = &mut received.experts[arrival * k..][..k];
            let weights = &mut received.weights[arrival * k..][..k];
            slots.fill(NONE);
            received.primary[arrival] = NONE;
            let mut num = 0;
            for route in 0..k {
                let id = record.id(route);
                if id < 0 {
                    continue;
                }
                let local = local_id(self.shared, id) as usize;
                let position = counts.row_base[sender * num_local + local] + record.position(route);
                if position >= counts.num_rows_per_expert[local] {
                    continue;
                }
                let slot = counts.segment_start[local] + position;
                if received.primary[arrival] == NONE {
                    received.primary[arrival] = slot;
                }
                let at = experts[..num].partition_point(|&e| e < id as u32);
                slots.copy_within(at..num, at + 1);
                experts.copy_within(at..num, at + 1);
                weights.copy_within(at..num, at + 1);
                (slots[at], experts[at], weights[at]) = (slot, id as u32, record.weight(route));
                num += 1;
            }
        }
    }

    /// The payload that travelled once becomes a row for each local expert, and every row gets its record.
    fn expand(&self, counts: &Counts, received: &ReceivedRows) {
        let plan = &self.shared.plan;
        let k = self.routing.config.k;
        let num_arrivals = *counts.arrival_start.last().expect("world + 1 entries") as usize;
        for (arrival, message) in self.messages(counts).filter(|&(arrival, _)| received.primary[arrival] != NONE) {
            let slot = received.primary[arrival] as usize;
            // SAFETY: step 7; each slot is written once.
            unsafe { self.bytes_mut(plan.regions.x, slot, plan.row_bytes) }.copy_from_slice(&message[..plan.row_bytes]);
        }
        let store = Store::for_bytes(counts.num_rows() * plan.row_bytes);
        self.shared.member.cpu().for_each_part(num_arrivals.div_ceil(PART_ARRIVALS), |part| {
            for arrival in part * PART_ARRIVALS..((part + 1) * PART_ARRIVALS).min(num_arrivals) {
                let record = self.transit(arrival);
                let primary = received.primary[arrival];
                let slots = &received.slots[arrival * k..][..k];
                for (i, &slot) in slots.iter().enumerate().take_while(|(_, s)| **s != NONE) {
                    if slot != primary {
                        // SAFETY: step 7; the primary row is complete and only read, the other slots are this arrival's alone.
                        let from = unsafe { self.bytes(plan.regions.x, primary as usize, plan.row_bytes) };
                        // SAFETY: as above.
                        copy(self.shared.level(), store, from, unsafe { self.bytes_mut(plan.regions.x, slot as usize, plan.row_bytes) });
                    }
                    let (rank, token) = record.source();
                    let expert = received.experts[arrival * k + i] as i32;
                    let id = if self.routing.config.id_space == IdSpace::Local { local_id(self.shared, expert) } else { expert };
                    let scales = record.transit_scales(plan.scale_bytes);
                    self.put_record(slot, (rank, token), id, received.weights[arrival * k + i], Some(scales));
                }
            }
            finish(store);
        });
    }

    /// Rows between the end of a segment and the start of the next: zeros from nowhere.
    fn pad(&self, counts: &Counts) {
        let plan = &self.shared.plan;
        for (l, &kept) in counts.num_rows_per_expert.iter().enumerate() {
            for slot in counts.segment_start[l] + kept..counts.segment_start[l + 1] {
                // SAFETY: step 7; padding slots belong to no arrival.
                unsafe { self.bytes_mut(plan.regions.x, slot as usize, plan.row_bytes) }.fill(0);
                self.put_record(slot, (-1, -1), -1, 0.0, None);
            }
        }
    }

    fn put_record(&self, slot: u32, source: (i32, i32), id: i32, weight: f32, scales: Option<&[u8]>) {
        let plan = &self.shared.plan;
        // SAFETY: step 7; a slot's record belongs to the arrival that has the slot.
        let out = unsafe { self.bytes_mut(plan.regions.records, slot as usize, plan.record_bytes) };
        let mut w = Writer::new(out);
        w.i32(source.0);
        w.i32(source.1);
        w.i32(id);
        w.f32(weight);
        match (record_scales(self.shared), scales) {
            (Some(_), Some(scales)) => w.bytes(scales),
            (Some(offset), None) => out[offset..][..plan.scale_bytes].fill(0),
            (None, _) => {}
        }
        put_column_scales(self.shared, self.shared.me(), self.bank, slot, scales);
    }
}
