//! Dispatch on CPU ranks. Numbers in parentheses are steps of `ep/PROTOCOL.md`.

use std::cell::RefCell;

use super::check::{Checked, CheckedPayload};
use super::record::{Writer, row_scales_offset};
use super::routing::{NONE, Routing};
use super::{Arrival, Sent, receive};
use crate::cpu::copy::{Store, copy, finish};
use crate::cpu::quantize::quantize_row;
use crate::ep::object::{Lease, Shared};
use crate::ep::signal::{CountWord, Kind, Label, Machine, Rules};
use crate::ep::steps::{DISPATCH_SEND, Step, Walker, walk};
use crate::ep::wait::Poll;
use crate::ep::world::Doing;
use crate::ep::{ExpertParallel, IdSpace, Layout, MAX_RANKS};
use crate::error::{Demand, Error, Limit, Result};
use crate::id::{Expert, Rank};
use crate::tensor::DType;

/// Tokens of one unit of parallel work (arbitrary: some 100 us of copying at 7168 bf16).
const PART_TOKENS: usize = 32;

pub(super) fn dispatch_send(ep: &mut ExpertParallel, routing: &mut Routing, checked: &Checked<&[u8]>) -> Result<Sent> {
    let shared = ep.shared.clone();
    let lease = shared.take_bank("dispatch", ep.epoch + 1)?;
    routing.filled_by = 0;
    let oversize = (checked.num_tokens > shared.config.max_tokens).then_some(checked.num_tokens);
    let num_tokens = if oversize.is_some() { 0 } else { checked.num_tokens };
    let weights = checked.topk_weights.as_ref();
    let weight = |t: usize, r: usize| weights.map_or(1.0, |w| f32::from_bits(read_i32(w.row(t), r) as u32));
    match checked.topk_idx_dtype {
        DType::I64 => routing.route(&shared.plan, num_tokens, |t, r| read_i64(checked.topk_idx.row(t), r), weight),
        _ => routing.route(&shared.plan, num_tokens, |t, r| i64::from(read_i32(checked.topk_idx.row(t), r)), weight),
    }
    send(ep, lease, Kind::Dispatch, Kept::New(routing), &checked.payload, oversize)
}

pub(super) fn replay_send(ep: &mut ExpertParallel, routing: &Routing, payload: &CheckedPayload<&[u8]>) -> Result<Sent> {
    let lease = ep.shared.take_bank("replay", ep.epoch + 1)?;
    send(ep, lease, Kind::Replay, Kept::Replayed { routing, other: None }, payload, None)
}

/// Takes the steps of the sending half. From here on the epoch counts, whatever comes of it.
fn send(
    ep: &mut ExpertParallel,
    lease: Lease,
    kind: Kind,
    kept: Kept<'_>,
    payload: &CheckedPayload<&[u8]>,
    oversize: Option<usize>,
) -> Result<Sent> {
    let shared = lease.shared.clone();
    ep.epoch = lease.epoch;
    let call = Call { shared: &shared, bank: lease.bank, epoch: lease.epoch, kind };
    kept.routing().words(&shared.plan, call.epoch, call.bank, kind, oversize, &mut ep.words);
    let mut sending =
        Sending { call, kept, payload, words: &ep.words, oversize, first_words: [CountWord::unpack(0); MAX_RANKS], excess: [0; MAX_RANKS] };
    walk(&DISPATCH_SEND, &mut sending)?;
    Ok(Sent { filled_by: sending.kept.routing().filled_by, kind, lease })
}

/// The routing of a call.
enum Kept<'a> {
    /// Made by it.
    New(&'a mut Routing),
    /// Used again; `other` is the first peer whose count is not the routing's, with its count and the one expected.
    Replayed { routing: &'a Routing, other: Option<(usize, u64, u32)> },
}

impl Kept<'_> {
    fn routing(&self) -> &Routing {
        match self {
            Kept::New(routing) => routing,
            Kept::Replayed { routing, .. } => routing,
        }
    }

    /// Takes count `at` of the count matrix, which is one of `peer`'s.
    fn take_count(&mut self, at: usize, peer: usize, count: u64) {
        match self {
            Kept::New(routing) => routing.counts[at] = count as u32,
            Kept::Replayed { routing, other } => {
                let want = routing.counts[at];
                if count != u64::from(want) {
                    *other = other.or(Some((peer, count, want)));
                }
            }
        }
    }
}

/// One rank in the sending half of a call.
struct Sending<'a> {
    call: Call<'a>,
    kept: Kept<'a>,
    payload: &'a CheckedPayload<&'a [u8]>,
    words: &'a [CountWord],
    oversize: Option<usize>,
    /// Of every rank.
    first_words: [CountWord; MAX_RANKS],
    /// The tokens of those that have too many.
    excess: [u64; MAX_RANKS],
}

impl Walker for Sending<'_> {
    type Memory = Machine;
    type Error = Error;

    fn take(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Stage => stage(&self.call, self.kept.routing(), self.payload),
            Step::Post(Label::Counts) => self.post_counts(),
            Step::Poll(Label::Counts) => self.read_counts()?,
            Step::Decide => self.decide()?,
            Step::WriteRows => write_rows(&self.call, self.kept.routing(), self.payload),
            Step::Post(Label::Done) => self.post_done(),
            other => debug_assert!(false, "{other:?} is no step of this half"),
        }
        Ok(())
    }
}

fn another_routing(me: usize, peer: usize, count: u64, want: u32) -> Error {
    let (here, there) = (format!("a routing with {want} rows from rank {peer}"), format!("one with {count}"));
    let (first_value, second_value) = if me < peer { (here, there) } else { (there, here) };
    let (first, second) = (Rank(me.min(peer) as u32), Rank(me.max(peer) as u32));
    Error::Mismatch { op: "replay", first, second, what: "routing".into(), first_value, second_value }
}

pub(super) fn dispatch_receive(routing: &mut Routing, sent: Sent) -> Result<Arrival> {
    // Taken out for the time of the call, so that the rest of the routing can be read beside it; an empty value allocates nothing.
    let mut received = std::mem::take(&mut routing.received);
    let arrival = receive::receive(routing, &mut received, true, sent);
    routing.received = received;
    arrival
}

pub(super) fn replay_receive(routing: &Routing, sent: Sent) -> Result<Arrival> {
    receive::receive(routing, &mut Default::default(), false, sent)
}

/// One call of one rank.
struct Call<'a> {
    shared: &'a Shared,
    bank: usize,
    epoch: u64,
    kind: Kind,
}

impl Call<'_> {
    fn doing(&self, phase: &'static str) -> Doing {
        Doing { op: name(self.kind as u64), phase, epoch: self.epoch }
    }
}

fn name(kind: u64) -> &'static str {
    if kind == Kind::Replay as u64 { "replay" } else { "dispatch" }
}

fn read_i32(row: &[u8], i: usize) -> i32 {
    let b = &row[4 * i..][..4];
    i32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

fn read_i64(row: &[u8], i: usize) -> i64 {
    i64::from(read_i32(row, 2 * i) as u32) | i64::from(read_i32(row, 2 * i + 1)) << 32
}

impl Sending<'_> {
    /// Publishes this rank's count words, which are its credit (2).
    fn post_counts(&self) {
        let shared = self.call.shared;
        // sync counts: the release before this pairs with the acquire after `read_counts` on every peer
        for peer in shared.peers() {
            shared.ranks[peer].signals.post_counts(shared.me(), self.words);
            shared.member.doorbell(peer).ring();
        }
    }

    /// Waits for everybody's count words (3).
    fn read_counts(&mut self) -> Result<()> {
        let Self { call, kept, words, first_words, excess, .. } = self;
        let Call { shared, epoch, .. } = *call;
        let signals = &shared.mine().signals;
        let mut num_read = [0usize; MAX_RANKS];
        shared.member.wait(call.doing("counts"), shared.timeout, || {
            let mut missing = Poll::Ready;
            for peer in shared.peers() {
                if num_read[peer] == words.len() {
                    continue;
                }
                num_read[peer] = signals.poll_counts(peer, epoch, num_read[peer], |i, word| {
                    if i == 0 {
                        first_words[peer] = word;
                    }
                    if word.invalid {
                        excess[peer] |= word.count.checked_shl(20 * i as u32).unwrap_or(0);
                    }
                    kept.take_count(peer * words.len() + i, peer, word.count);
                });
                if num_read[peer] < words.len() {
                    missing = Poll::Missing { peer, seen: signals.seen_counts(peer, epoch) };
                }
            }
            missing
        })
    }

    /// Whether the call goes on, from what all ranks know (3).
    fn decide(&mut self) -> Result<()> {
        let Call { shared, epoch, kind, .. } = self.call;
        let me = shared.me();
        let first_words = &self.first_words[..shared.plan.world];
        same_call(first_words)?;
        if let Some(n) = self.oversize {
            // The words of a small world cannot carry every bit; this rank knows its own number.
            self.excess[me] = n as u64;
        }
        let over = first_words.iter().enumerate().filter(|(_, w)| w.invalid);
        let capacity = shared.config.max_tokens as u64;
        let demand = |(r, _)| Demand { rank: Rank(r as u32), limit: Limit::Tokens, demand: self.excess[r], capacity };
        let demands: Vec<_> = over.map(demand).collect();
        if !demands.is_empty() {
            return Err(Error::Capacity { op: name(kind as u64), demands });
        }
        match &mut self.kept {
            Kept::New(routing) => {
                routing.place(&shared.plan)?;
                routing.filled_by = epoch;
                Ok(())
            }
            Kept::Replayed { other: None, .. } => Ok(()),
            Kept::Replayed { other: Some((peer, count, want)), .. } => Err(another_routing(me, *peer, *count, *want)),
        }
    }

    /// Says that this rank's rows are complete (5).
    fn post_done(&self) {
        let Call { shared, epoch, .. } = self.call;
        // sync done: the release before this pairs with the acquire after `receive::poll_done` on every peer
        for peer in shared.peers() {
            shared.ranks[peer].signals.post_done(shared.me(), epoch);
            shared.member.doorbell(peer).ring();
        }
    }
}

/// All ranks must make the same call into the same bank.
fn same_call(words: &[CountWord]) -> Result<()> {
    let describe = |w: &CountWord| format!("{} into bank {}", name(w.kind), w.bank);
    match words.iter().position(|w| (w.kind, w.bank) != (words[0].kind, words[0].bank)) {
        None => Ok(()),
        Some(r) => Err(Error::Mismatch {
            op: "dispatch",
            first: Rank(0),
            second: Rank(r as u32),
            what: "call".into(),
            first_value: describe(&words[0]),
            second_value: describe(&words[r]),
        }),
    }
}

thread_local! {
    /// A quantised row and its scales, reused.
    static QUANTIZED: RefCell<(Vec<u8>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Calls `send` with token `t`'s row and scales as they travel.
fn with_payload(shared: &Shared, payload: &CheckedPayload<&[u8]>, t: usize, send: impl FnOnce(&[u8], &[u8])) {
    let scales = payload.scales.map_or(&[][..], |scales| scales.row(t));
    let Some(quantize) = shared.config.quantize else { return send(payload.x.row(t), scales) };
    QUANTIZED.with_borrow_mut(|(q, scales)| {
        q.resize(shared.plan.row_bytes, 0);
        scales.resize(shared.plan.scale_bytes, 0);
        quantize_row(shared.level(), quantize, shared.config.dtype, payload.x.row(t), q, scales);
        send(q, scales);
    });
}

/// The distinct destinations of a token: each with the first of its routes.
fn destinations(routing: &Routing, owners: &[Rank], t: usize) -> impl Iterator<Item = (usize, usize)> {
    let k = routing.config.k;
    let ids = &routing.sent.topk_idx[t * k..][..k];
    let mut seen = 0u64;
    ids.iter().enumerate().filter(|(_, e)| **e >= 0).filter_map(move |(route, &e)| {
        let rank = owners[e as usize].index();
        let is_new = seen >> rank & 1 == 0;
        seen |= 1 << rank;
        is_new.then_some((rank, route))
    })
}

/// Low latency: the first rows for each peer travel with the counts, into staging that no user sees and that needs no credit (step 1).
fn stage(call: &Call<'_>, routing: &Routing, payload: &CheckedPayload<&[u8]>) {
    let Call { shared, epoch, .. } = *call;
    let plan = &shared.plan;
    if plan.staged_rows == 0 {
        return;
    }
    let k = routing.config.k;
    for t in 0..routing.num_tokens {
        let staged = destinations(routing, plan.placement.owners(), t)
            .map(|(peer, route)| (peer, routing.sent.arrival[t * k + route] as usize))
            .filter(|&(_, arrival)| arrival < plan.staged_rows);
        let mut staged = staged.peekable();
        if staged.peek().is_none() {
            continue;
        }
        with_payload(shared, payload, t, |row, scales| {
            for (peer, arrival) in staged {
                let at = message_offset(shared, epoch, shared.me(), arrival);
                // SAFETY: this rank alone writes its messages; the peer read the last ones here before it posted epoch - 1 (step 1).
                let message = unsafe { shared.ranks[peer].bytes.bytes_mut(at, plan.message_bytes) };
                let (to, record) = message.split_at_mut(plan.row_bytes);
                to.copy_from_slice(row);
                write_arrival_record(shared, routing, t, peer, scales, record);
                if plan.has_column_scales() && !routing.config.layout.is_by_expert() {
                    record[plan.record_bytes..][..scales.len()].copy_from_slice(scales);
                }
            }
        });
    }
}

/// Where message `arrival` of `sender` is in every rank's memory.
pub(super) fn message_offset(shared: &Shared, epoch: u64, sender: usize, arrival: usize) -> usize {
    let plan = &shared.plan;
    let copy = Machine::staging_copy(epoch, shared.config.in_flight);
    let index = (copy * plan.world + sender) * plan.staged_rows + arrival;
    plan.regions.staging + index * plan.message_bytes
}

/// The record that travels: of the row itself (`ByToken`), or of the (token, rank) pair.
fn write_arrival_record(shared: &Shared, routing: &Routing, t: usize, peer: usize, scales: &[u8], out: &mut [u8]) {
    let plan = &shared.plan;
    let k = routing.config.k;
    let ids = &routing.sent.topk_idx[t * k..][..k];
    let weights = &routing.sent.topk_weights[t * k..][..k];
    let is_there = |e: i32| e >= 0 && plan.placement.owners()[e as usize].index() == peer;
    let mut w = Writer::new(out);
    w.i32(shared.me() as i32);
    w.i32(t as i32);
    if routing.config.layout.is_by_expert() {
        ids.iter().for_each(|&e| w.i32(if is_there(e) { e } else { -1 }));
        weights.iter().for_each(|&x| w.f32(x));
        routing.sent.row[t * k..][..k].iter().for_each(|&p| w.i32(p as i32));
        w.bytes(scales);
        return;
    }
    match routing.config.id_space {
        IdSpace::Global => {
            ids.iter().for_each(|&e| w.i32(e));
            weights.iter().for_each(|&x| w.f32(x));
        }
        IdSpace::Local => {
            ids.iter().for_each(|&e| w.i32(if is_there(e) { local_id(shared, e) } else { -1 }));
            ids.iter().zip(weights).for_each(|(&e, &x)| w.f32(if is_there(e) { x } else { 0.0 }));
        }
    }
    if !plan.has_column_scales() {
        w.bytes(scales);
    }
}

pub(super) fn local_id(shared: &Shared, expert: i32) -> i32 {
    shared.plan.placement.local_of(Expert(expert as u32)).map_or(-1, |l| l as i32)
}

/// Writes every row that did not travel with the counts to its final place (4).
fn write_rows(call: &Call<'_>, routing: &Routing, payload: &CheckedPayload<&[u8]>) {
    let Call { shared, bank, .. } = *call;
    let plan = &shared.plan;
    let me = shared.me();
    let num_rows: usize = (0..plan.world).map(|r| routing.arrivals(plan, me, r) as usize).sum();
    let store = Store::for_bytes(num_rows * plan.row_bytes);
    shared.member.cpu().for_each_part(routing.num_tokens.div_ceil(PART_TOKENS), |part| {
        let tokens = part * PART_TOKENS..((part + 1) * PART_TOKENS).min(routing.num_tokens);
        for t in tokens {
            send_token(shared, routing, payload, bank, t, store);
        }
        finish(store);
    });
}

fn send_token(shared: &Shared, routing: &Routing, payload: &CheckedPayload<&[u8]>, bank: usize, t: usize, store: Store) {
    let plan = &shared.plan;
    let k = routing.config.k;
    let owners = plan.placement.owners();
    let is_by_expert = routing.config.layout != Layout::ByToken;
    let bank = shared.bank_offset(bank);
    let remote = |&(_, route): &(usize, usize)| routing.sent.arrival[t * k + route] as usize >= plan.staged_rows;
    let mut remote = destinations(routing, owners, t).filter(remote).peekable();
    if remote.peek().is_none() {
        return;
    }
    with_payload(shared, payload, t, |row, scales| {
        for (peer, first_route) in remote {
            let memory = &shared.ranks[peer].bytes;
            let to_peer =
                |r: &usize| routing.sent.topk_idx[t * k + r] >= 0 && owners[routing.sent.topk_idx[t * k + r] as usize].index() == peer;
            let slots = (first_route..k).filter(to_peer).map(|r| routing.slot(plan, t, r));
            let slot = slots.into_iter().find(|&s| s != NONE);
            if is_by_expert {
                let arrival = (routing.sent.arrival_base[peer] + routing.sent.arrival[t * k + first_route]) as usize;
                let at = bank + plan.regions.transit + arrival * plan.transit_bytes;
                // SAFETY: the peer's word of this epoch gave this bank away (step 3), and the arrival is this token's alone (step 4).
                let record = unsafe { memory.bytes_mut(at, plan.transit_bytes) };
                write_arrival_record(shared, routing, t, peer, scales, record);
            }
            let Some(slot) = slot else { continue };
            let at = bank + plan.regions.x + slot as usize * plan.row_bytes;
            // SAFETY: as above; the slot is this token's alone.
            copy(shared.level(), store, row, unsafe { memory.bytes_mut(at, plan.row_bytes) });
            if !is_by_expert {
                let at = bank + plan.regions.records + slot as usize * plan.record_bytes;
                // SAFETY: as above.
                let record = unsafe { memory.bytes_mut(at, plan.record_bytes) };
                write_arrival_record(shared, routing, t, peer, scales, record);
                put_column_scales(shared, peer, bank, slot, Some(scales));
            }
        }
    });
}

/// Scatters a row's scales over the columns of a column-major matrix; the last word is filled up with zeros. `None` is all zeros.
pub(super) fn put_column_scales(shared: &Shared, peer: usize, bank: usize, slot: u32, scales: Option<&[u8]>) {
    let plan = &shared.plan;
    if !plan.has_column_scales() {
        return;
    }
    let num_words = plan.scale_bytes.div_ceil(4);
    let (group, row) = match shared.config.layout {
        Layout::ByExpertFixed { rows_per_expert } => (slot as usize / rows_per_expert, slot as usize % rows_per_expert),
        _ => (0, slot as usize),
    };
    for g in 0..num_words {
        let mut word = [0u8; 4];
        if let Some(scales) = scales {
            let bytes = &scales[4 * g..scales.len().min(4 * g + 4)];
            word[..bytes.len()].copy_from_slice(bytes);
        }
        let at = bank + plan.regions.scales + ((group * num_words + g) * plan.scale_rows + row) * 4;
        // SAFETY: the words of a slot belong to whom the slot belongs: its sender, or its receiver after all rows arrived (steps 4 and 7).
        unsafe { shared.ranks[peer].bytes.bytes_mut(at, 4) }.copy_from_slice(&word);
    }
}

/// Offset of the scales inside a row's record, when they are there.
pub(super) fn record_scales(shared: &Shared) -> Option<usize> {
    let plan = &shared.plan;
    (plan.scale_bytes > 0 && !plan.has_column_scales()).then(|| row_scales_offset(plan.row_k))
}
