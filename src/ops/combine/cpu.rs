//! Combine on CPU ranks, by pull. Numbers in parentheses are steps of `ep/PROTOCOL.md`.

use std::cell::RefCell;
use std::convert::Infallible;

use super::check::Checked;
use super::reduce::{Finish, Form, Term, sum_f32, sum_row, to_wire};
use super::{Output, Sent};
use crate::cpu::copy::{Store, finish};
use crate::ep::object::{Lease, Shared};
use crate::ep::signal::{Label, Machine};
use crate::ep::steps::{COMBINE_RECEIVE, COMBINE_SEND, Step, Walker, walk};
use crate::ep::wait::Poll;
use crate::ep::world::Doing;
use crate::ep::{MAX_K, Reduce, Wire};
use crate::error::{Error, Result};
use crate::ops::dispatch::{Arrival, NONE, Routing, Rows};
use crate::tensor::{DType, TensorViewMut};

/// Rows or tokens of one unit of parallel work (arbitrary: some 100 us at 7168 bf16).
const PART_ROWS: usize = 32;

/// How a rank's rows travel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Rows as experts wrote them.
    Rows,
    /// Each row in an fp8 form, in the wire region.
    Converted,
    /// The sum of a token's rows in place of the first of them.
    Partial,
    /// The sum of a token's rows, in another form, in the wire region.
    PartialConverted,
}

fn path(shared: &Shared) -> Path {
    let c = &shared.config;
    let is_partial = c.layout.is_by_expert() && c.reduce != Reduce::AtSource;
    // A partial sum in f32 is no conversion when y is f32.
    let is_converted = c.wire != Wire::AsIs || (c.reduce == Reduce::AtRankF32 && c.combine_dtype != DType::F32);
    match (is_partial, is_converted) {
        (false, false) => Path::Rows,
        (false, true) => Path::Converted,
        (true, false) => Path::Partial,
        (true, true) => Path::PartialConverted,
    }
}

/// Region and row size of what peers read, and how they read it.
fn wire_rows(shared: &Shared) -> (usize, usize, Form) {
    let (plan, c) = (&shared.plan, &shared.config);
    match (path(shared), c.wire) {
        (Path::Rows | Path::Partial, _) => (plan.regions.expert_output, plan.expert_row_bytes, Form::Plain(c.combine_dtype)),
        (_, Wire::AsIs) => (plan.regions.wire, plan.wire_row_bytes, Form::Plain(DType::F32)),
        (_, Wire::Fp8Direct) => (plan.regions.wire, plan.wire_row_bytes, Form::Plain(DType::E4M3)),
        (_, Wire::Fp8Block) => (plan.regions.wire, plan.wire_row_bytes, Form::Block),
    }
}

thread_local! {
    /// An f32 row, reused.
    static SUM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The sending half.
pub(super) fn send(routing: &Routing, arrival: Arrival, checked: &Checked<&[u8]>) -> Sent {
    let lease = arrival.lease;
    let mut sending = Sending { lease: &lease, routing, checked };
    let Ok(()) = walk(&COMBINE_SEND, &mut sending);
    Sent { lease, filled_by: arrival.filled_by }
}

/// One rank in the sending half of a combine.
struct Sending<'a> {
    lease: &'a Lease,
    routing: &'a Routing,
    checked: &'a Checked<&'a [u8]>,
}

impl Walker for Sending<'_> {
    type Memory = Machine;
    type Error = Infallible;

    fn take(&mut self, step: Step) -> Result<(), Infallible> {
        match step {
            Step::WireForm => self.to_wire_form(),
            Step::Post(Label::Ready) => self.post_ready(),
            other => debug_assert!(false, "{other:?} is no step of this half"),
        }
        Ok(())
    }
}

impl Sending<'_> {
    /// Puts this rank's rows into the form in which peers read them (8).
    fn to_wire_form(&self) {
        let Lease { shared, bank, .. } = self.lease;
        let counts = self.lease.counts();
        let work = Work { shared, routing: self.routing, bank: shared.bank_offset(*bank), y: self.checked.y };
        match path(shared) {
            Path::Rows if self.checked.y.is_none() => {}
            Path::Rows | Path::Converted => work.convert_rows(counts.num_rows()),
            Path::Partial | Path::PartialConverted => work.sum_rows(*counts.arrival_start.last().expect("world + 1 entries") as usize),
        }
        if let Some(weights) = &self.checked.row_weights {
            work.store_weights(weights, counts.num_rows());
        }
    }

    /// Says that they may be read (9).
    fn post_ready(&self) {
        let Lease { shared, bank, epoch, .. } = self.lease;
        // sync ready: the release before this pairs with the acquire after `poll_ready` of every source
        for peer in shared.peers() {
            shared.ranks[peer].signals.post_ready(shared.me(), *bank, *epoch);
            shared.member.doorbell(peer).ring();
        }
    }
}

struct Work<'a> {
    shared: &'a Shared,
    routing: &'a Routing,
    bank: usize,
    y: Option<Rows<&'a [u8]>>,
}

impl Work<'_> {
    /// Row `slot` as the experts wrote it.
    fn expert_row(&self, slot: usize) -> &[u8] {
        match &self.y {
            Some(y) => y.row(slot),
            // SAFETY: the arrival was this rank's alone and has been consumed; only `wire_row` of the same slot writes here, and no caller holds
            // both (8).
            None => unsafe { self.region(self.shared.plan.regions.expert_output, slot, self.shared.plan.expert_row_bytes) },
        }
    }

    /// # Safety
    /// Nobody writes these bytes while the reference lives.
    unsafe fn region(&self, region: usize, slot: usize, row_bytes: usize) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { self.shared.mine().bytes.bytes(self.bank + region + slot * row_bytes, row_bytes) }
    }

    /// # Safety
    /// Nobody else reads or writes these bytes while the reference lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn region_mut(&self, region: usize, slot: usize, row_bytes: usize) -> &mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { self.shared.mine().bytes.bytes_mut(self.bank + region + slot * row_bytes, row_bytes) }
    }

    /// Every valid row in wire form. Rows of padding are converted too: whatever they hold, nobody reads them.
    fn convert_rows(&self, num_rows: usize) {
        let (region, row_bytes, _) = wire_rows(self.shared);
        let c = &self.shared.config;
        let store = Store::for_bytes(num_rows * row_bytes);
        self.shared.member.cpu().for_each_part(num_rows.div_ceil(PART_ROWS), |part| {
            for slot in part * PART_ROWS..((part + 1) * PART_ROWS).min(num_rows) {
                // SAFETY: peers read this bank's rows only after this rank's ready word (9); each slot is written by one part.
                let out = unsafe { self.region_mut(region, slot, row_bytes) };
                if c.wire == Wire::AsIs {
                    crate::cpu::copy::copy(self.shared.level(), store, self.expert_row(slot), out);
                } else {
                    to_wire(self.shared.level(), c.wire, c.combine_dtype, self.expert_row(slot), c.hidden, out);
                }
            }
            finish(store);
        });
    }

    /// The sum of each arrival's rows, in ascending expert id, at its first slot.
    fn sum_rows(&self, num_arrivals: usize) {
        let (region, row_bytes, _) = wire_rows(self.shared);
        let c = &self.shared.config;
        let received = &self.routing.received;
        let form = Form::Plain(c.combine_dtype);
        self.shared.member.cpu().for_each_part(num_arrivals.div_ceil(PART_ROWS), |part| {
            SUM.with_borrow_mut(|sum| {
                sum.resize(c.hidden, 0.0);
                for arrival in part * PART_ROWS..((part + 1) * PART_ROWS).min(num_arrivals) {
                    let primary = received.primary[arrival];
                    if primary == NONE {
                        continue;
                    }
                    let slots = &received.slots[arrival * c.k..][..c.k];
                    let weights = &received.weights[arrival * c.k..][..c.k];
                    let num = slots.iter().position(|&s| s == NONE).unwrap_or(c.k);
                    if num == 1 && !c.weighted && self.y.is_none() && path(self.shared) == Path::Partial {
                        continue; // the row is its own sum, in place
                    }
                    let mut terms = [Term { row: &[], weight: None }; MAX_K];
                    for i in 0..num {
                        terms[i] = Term { row: self.expert_row(slots[i] as usize), weight: c.weighted.then_some(weights[i]) };
                    }
                    sum_f32(self.shared.level(), form, &terms[..num], sum);
                    // SAFETY: the terms are not read any more; the slot is this arrival's alone; peers read after the ready word (9).
                    let out = unsafe { self.region_mut(region, primary as usize, row_bytes) };
                    match path(self.shared) {
                        Path::Partial => crate::cpu::convert::narrow(self.shared.level(), c.combine_dtype, sum, out),
                        _ => to_wire(self.shared.level(), c.wire, DType::F32, bytemuck::cast_slice(sum), c.hidden, out),
                    }
                }
            });
        });
    }

    fn store_weights(&self, weights: &Rows<&[u8]>, num_rows: usize) {
        let plan = &self.shared.plan;
        for slot in 0..num_rows {
            // SAFETY: peers read them only after this rank's ready word (9).
            unsafe { self.region_mut(plan.regions.fold, slot, 4 * plan.row_k) }.copy_from_slice(weights.row(slot));
        }
    }
}

/// The receiving half. The bank is given back when it ends.
pub(super) fn receive(routing: &Routing, sent: Sent, output: Output<'_>) -> Result<()> {
    walk(&COMBINE_RECEIVE, &mut Receiving { lease: &sent.lease, routing, output })
}

/// One rank in the receiving half of a combine.
struct Receiving<'a> {
    lease: &'a Lease,
    routing: &'a Routing,
    output: Output<'a>,
}

impl Walker for Receiving<'_> {
    type Memory = Machine;
    type Error = Error;

    fn take(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Poll(Label::Ready) => self.poll_ready()?,
            Step::Pull => pull(self.lease, self.routing, &mut self.output)?,
            other => debug_assert!(false, "{other:?} is no step of this half"),
        }
        Ok(())
    }
}

impl Receiving<'_> {
    /// Waits for the rows of this rank's tokens (10).
    fn poll_ready(&self) -> Result<()> {
        let Lease { shared, bank, epoch, .. } = self.lease;
        let signals = &shared.mine().signals;
        let has_rows = |peer: &usize| self.routing.arrivals(&shared.plan, shared.me(), *peer) > 0;
        // sync ready: the acquire after this pairs with the release before `post_ready` of every rank
        let poll = || {
            let missing = shared.peers().filter(has_rows).find(|&peer| !signals.is_ready(peer, *bank, *epoch));
            missing.map_or(Poll::Ready, |peer| Poll::Missing { peer, seen: signals.seen_ready(peer, *bank) })
        };
        shared.member.wait(Doing { op: "combine", phase: "ready", epoch: *epoch }, shared.timeout, poll)
    }
}

/// Reads the rows of this rank's tokens and sums them (10).
fn pull(lease: &Lease, routing: &Routing, output: &mut Output<'_>) -> Result<()> {
    let shared = &lease.shared;
    let bank = shared.bank_offset(lease.bank);
    if let Some(weights) = &mut output.topk_weights {
        fold(shared, routing, bank, weights)?;
    }
    let c = &shared.config;
    let num_tokens = routing.num_tokens;
    let dtype = output.out.dtype();
    let row_bytes = c.hidden * dtype.size();
    let stride_bytes = output.out.strides()[0] * dtype.size();
    let add_to = match &output.add_to {
        None => None,
        Some(a) => Some((a.dtype(), a.strides()[0] * a.dtype().size(), a.host("combine", "add_to")?)),
    };
    let store = Store::for_bytes(num_tokens * row_bytes);
    let (_, _, form) = wire_rows(shared);
    let out = output.out.host_mut("combine", "out")?;
    let sum_token = |t: usize, out: &mut [u8]| {
        let mut terms = [Term { row: &[], weight: None }; MAX_K];
        let num = terms_of(shared, routing, bank, t, &mut terms);
        let add_to = add_to.map(|(d, stride, bytes)| (d, &bytes[t * stride..][..c.hidden * d.size()]));
        sum_row(form, &terms[..num], &Finish { add_to, level: shared.level(), store }, dtype, out);
    };
    shared.member.cpu().for_each_row(out, (num_tokens, row_bytes, stride_bytes), PART_ROWS, sum_token, || finish(store));
    Ok(())
}

/// The rows that make up token `t`, in the order in which they are added; returns how many.
fn terms_of<'a>(shared: &'a Shared, routing: &Routing, bank: usize, t: usize, terms: &mut [Term<'a>; MAX_K]) -> usize {
    let (plan, c) = (&shared.plan, &shared.config);
    let owners = plan.placement.owners();
    let ids = &routing.sent.topk_idx[t * c.k..][..c.k];
    let is_each_route = c.layout.is_by_expert() && c.reduce == Reduce::AtSource;
    // (expert or rank, rank, slot, weight), ascending by the first.
    let mut rows = [(0usize, 0usize, NONE, 0f32); MAX_K];
    let mut num = 0;
    let mut ranks = 0u64;
    for (route, &e) in ids.iter().enumerate().filter(|(_, e)| **e >= 0) {
        let rank = owners[e as usize].index();
        let slot = routing.slot(plan, t, route);
        if slot == NONE || !is_each_route && ranks >> rank & 1 == 1 {
            continue;
        }
        ranks |= 1 << rank;
        let key = if is_each_route { e as usize } else { rank };
        let at = rows[..num].partition_point(|r| r.0 < key);
        rows.copy_within(at..num, at + 1);
        rows[at] = (key, rank, slot, routing.sent.topk_weights[t * c.k + route]);
        num += 1;
    }
    let (region, row_bytes, _) = wire_rows(shared);
    for (term, &(_, rank, slot, weight)) in terms.iter_mut().zip(&rows[..num]) {
        let at = bank + region + slot as usize * row_bytes;
        // SAFETY: the peer is ready (9) and does not write these rows before this rank posts the counts of its next dispatch into this bank (2).
        let row = unsafe { shared.ranks[rank].bytes.bytes(at, row_bytes) };
        *term = Term { row, weight: (is_each_route && c.weighted).then_some(weight) };
    }
    num
}

/// The weights of this rank's routes, from the ranks that computed them.
fn fold(shared: &Shared, routing: &Routing, bank: usize, out: &mut TensorViewMut<'_>) -> Result<()> {
    let (plan, k) = (&shared.plan, shared.config.k);
    let stride = out.strides()[0] * 4;
    let out = out.host_mut("combine", "topk_weights")?;
    for t in 0..routing.num_tokens {
        for route in 0..k {
            let slot = routing.slot(plan, t, route);
            let to = &mut out[t * stride + 4 * route..][..4];
            if slot == NONE {
                to.fill(0);
                continue;
            }
            let rank = plan.placement.owners()[routing.sent.topk_idx[t * k + route] as usize].index();
            let column = if plan.row_k == 1 { 0 } else { route };
            let at = bank + plan.regions.fold + (slot as usize * plan.row_k + column) * 4;
            // SAFETY: as for the rows of this token.
            to.copy_from_slice(unsafe { shared.ranks[rank].bytes.bytes(at, 4) });
        }
    }
    Ok(())
}
