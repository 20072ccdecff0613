//! Dispatch on CPU ranks. Numbers in parentheses are steps of `ep/PROTOCOL.md`.

use std::cell::RefCell;

use super::check::{Checked, CheckedPayload};
use super::record::{Writer, row_scales_offset};
use super::routing::{NONE, Routing};
use super::{Arrival, Sent, receive};
use crate::cpu::copy::{Store, copy, finish};
use crate::cpu::quantize::quantize_row;
use crate::ep::object::Shared;
use crate::ep::signal::{CountWord, Kind, Machine, Memory};
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
    ep.epoch += 1;
    let call = Call { shared: &shared, bank: lease.bank, epoch: ep.epoch, kind: Kind::Dispatch };
    stage(&call, routing, &checked.payload);
    routing.words(&shared.plan, call.epoch, call.bank, call.kind, oversize, &mut ep.words);
    let width = shared.plan.num_count_words;
    let counts = &mut routing.counts;
    exchange_counts(&call, &ep.words, oversize, |peer, i, count| counts[peer * width + i] = count as u32)?;
    routing.place(&shared.plan)?;
    routing.filled_by = call.epoch;
    send_rows(&call, routing, &checked.payload);
    Ok(Sent { epoch: call.epoch, filled_by: call.epoch, kind: call.kind, lease })
}

pub(super) fn replay_send(ep: &mut ExpertParallel, routing: &Routing, payload: &CheckedPayload<&[u8]>) -> Result<Sent> {
    let shared = ep.shared.clone();
    let lease = shared.take_bank("replay", ep.epoch + 1)?;
    ep.epoch += 1;
    let call = Call { shared: &shared, bank: lease.bank, epoch: ep.epoch, kind: Kind::Replay };
    stage(&call, routing, payload);
    routing.words(&shared.plan, call.epoch, call.bank, call.kind, None, &mut ep.words);
    let width = shared.plan.num_count_words;
    let mut other = None;
    exchange_counts(&call, &ep.words, None, |peer, i, count| {
        let want = routing.counts[peer * width + i];
        if count != u64::from(want) {
            other = other.or(Some((peer, count, want)));
        }
    })?;
    if let Some((peer, count, want)) = other {
        return Err(another_routing(shared.me(), peer, count, want));
    }
    send_rows(&call, routing, payload);
    Ok(Sent { epoch: call.epoch, filled_by: routing.filled_by, kind: call.kind, lease })
}

fn another_routing(me: usize, peer: usize, count: u64, want: u32) -> Error {
    let (here, there) = (format!("a routing with {want} rows from rank {peer}"), format!("one with {count}"));
    let (first_value, second_value) = if me < peer { (here, there) } else { (there, here) };
    let (first, second) = (Rank(me.min(peer) as u32), Rank(me.max(peer) as u32));
    Error::Mismatch { op: "replay", first, second, what: "routing".into(), first_value, second_value }
}

pub(super) fn dispatch_receive(routing: &mut Routing, sent: Sent) -> Result<Arrival> {
    receive::wait_for_rows(routing, &sent)?;
    // Taken out for the time of the call, so that the rest of the routing can be read beside it; an empty value allocates nothing.
    let mut received = std::mem::take(&mut routing.received);
    let arrival = receive::arrange(routing, &mut received, true, sent);
    routing.received = received;
    Ok(arrival)
}

pub(super) fn replay_receive(routing: &Routing, sent: Sent) -> Result<Arrival> {
    receive::wait_for_rows(routing, &sent)?;
    let mut none = Default::default();
    Ok(receive::arrange(routing, &mut none, false, sent))
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

/// Publishes this rank's count words, which are its credit, and reads everybody's (steps 2 and 3).
fn exchange_counts(call: &Call<'_>, words: &[CountWord], oversize: Option<usize>, mut take: impl FnMut(usize, usize, u64)) -> Result<()> {
    let Call { shared, epoch, .. } = *call;
    let (me, world) = (shared.me(), shared.plan.world);
    // sync counts: release, pairs with the acquire below on every peer
    Machine::release();
    for peer in shared.peers() {
        shared.ranks[peer].signals.post_counts(me, words);
        shared.member.doorbell(peer).ring();
    }
    let signals = &shared.mine().signals;
    let mut num_read = [0usize; MAX_RANKS];
    let mut first_words = [CountWord::unpack(0); MAX_RANKS];
    let mut excess = [0u64; MAX_RANKS];
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
                take(peer, i, word.count);
            });
            if num_read[peer] < words.len() {
                missing = Poll::Missing { peer, seen: signals.seen_counts(peer, epoch) };
            }
        }
        missing
    })?;
    Machine::acquire();
    let first_words = &first_words[..world];
    same_call(first_words)?;
    if let Some(n) = oversize {
        // The words of a small world cannot carry every bit; this rank knows its own number.
        excess[me] = n as u64;
    }
    let over = first_words.iter().enumerate().filter(|(_, w)| w.invalid);
    let capacity = shared.config.max_tokens as u64;
    let demands: Vec<_> = over.map(|(r, _)| Demand { rank: Rank(r as u32), limit: Limit::Tokens, demand: excess[r], capacity }).collect();
    if demands.is_empty() { Ok(()) } else { Err(Error::Capacity { op: name(call.kind as u64), demands }) }
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
    let copy = epoch as usize % (shared.config.in_flight + 1);
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

/// Writes every row that did not travel with the counts to its final place, and says so (steps 4 and 5).
fn send_rows(call: &Call<'_>, routing: &Routing, payload: &CheckedPayload<&[u8]>) {
    let Call { shared, bank, epoch, .. } = *call;
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
    // sync done: release, pairs with the acquire in receive::wait_for_rows
    Machine::release();
    for peer in shared.peers() {
        shared.ranks[peer].signals.post_done(me, epoch);
        shared.member.doorbell(peer).ring();
    }
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
