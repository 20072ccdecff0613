//! Dispatch on GPU ranks: from checked arguments to launches.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use bytemuck::Zeroable;

use super::check::{self, CheckedPayload};
use super::gpu::{self, Call, IndexCall, IndexType, ReceiveCall, ReplayCall, ReportCall};
use super::routing::DeviceRouting;
use super::{Arrival, Input, Outputs, Payload, Received, Routing, Sent};
use crate::ep::ExpertParallel;
use crate::ep::device::End;
use crate::ep::device::context::Ctx;
use crate::ep::device::layout::RoutingHead;
use crate::ep::device::tuning::Tokens;
use crate::ep::object::{Lease, Shared};
use crate::ep::signal::Kind;
use crate::error::{Error, Failure, FailureKind, Rejected, Result};
use crate::space::{Address, Space};
use crate::tensor::{DType, TensorViewMut};

pub(super) fn dispatch(ep: &mut ExpertParallel, routing: &mut Routing, input: &Input<'_>, mut outputs: Outputs<'_>) -> Result<Arrival> {
    let shared = ep.shared.clone();
    shared.check_alive()?;
    let end = end_of(&shared);
    let ctx = end.ctx();
    let wanted = Wanted::of(&ctx, &mut outputs)?;
    let (lease, call) = begin(ep, &ctx, routing, input)?;
    ep.queued("dispatch", gpu::dispatch(&ctx, &call))?;
    let arrival = Arrival::new(lease, routing.filled_by);
    wanted.report(&ctx, &arrival)?;
    Ok(arrival)
}

pub(super) fn dispatch_around(
    ep: &mut ExpertParallel,
    routing: &mut Routing,
    input: &Input<'_>,
    between: impl FnOnce() -> Result<()>,
) -> Result<Arrival> {
    let shared = ep.shared.clone();
    shared.check_alive()?;
    let ctx = end_of(&shared).ctx();
    let (lease, call) = begin(ep, &ctx, routing, input)?;
    ep.queued("dispatch", gpu::dispatch_around(&ctx, &call, between))?;
    Ok(Arrival::new(lease, routing.filled_by))
}

pub(super) fn dispatch_send(ep: &mut ExpertParallel, routing: &mut Routing, input: &Input<'_>) -> Result<Sent> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let (lease, call) = begin(ep, &ctx, routing, input)?;
    ep.queued("dispatch", gpu::dispatch_send(&ctx, &call))?;
    Ok(Sent { filled_by: routing.filled_by, kind: Kind::Dispatch, lease })
}

pub(super) fn dispatch_receive(
    ep: &mut ExpertParallel,
    routing: &mut Routing,
    sent: Sent,
    mut outputs: Outputs<'_>,
) -> Result<Arrival, Rejected<Sent>> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let wanted = match shared.check_alive().and_then(|()| Wanted::of(&ctx, &mut outputs)) {
        Ok(wanted) => wanted,
        Err(error) => return Err(Rejected { error, returned: Some(sent) }),
    };
    ep.queued("dispatch", gpu::dispatch_receive(&ctx, &receive_call(routing, &sent)?))?;
    let arrival = Arrival::new(sent.lease, sent.filled_by);
    wanted.report(&ctx, &arrival)?;
    Ok(arrival)
}

pub(super) fn replay(ep: &mut ExpertParallel, routing: &Routing, payload: &Payload<'_>) -> Result<Arrival> {
    let shared = ep.shared.clone();
    shared.check_alive()?;
    let end = end_of(&shared);
    let ctx = end.ctx();
    let (lease, call) = begin_replay(ep, &ctx, routing, payload)?;
    ep.queued("replay", gpu::replay(&ctx, &call))?;
    Ok(Arrival::new(lease, routing.filled_by))
}

pub(super) fn payload_alone(ep: &mut ExpertParallel, routing: &Routing, arrival: &Arrival, payload: &Payload<'_>) -> Result<()> {
    const OP: &str = "payload_alone";
    let shared = ep.shared.clone();
    shared.check_alive()?;
    let end = end_of(&shared);
    let ctx = end.ctx();
    if !ctx.kernels.dispatch.skips_signals() {
        return Err(Error::invalid(OP, "tuning", "with signals", "Measure::skip_signals: rows without their words would mislead peers"));
    }
    check::same_object(ep, routing, OP)?;
    let checked = check::payload(&ctx.cuda, ep, routing, payload)?;
    let (address, tokens) = routing_of(routing)?;
    let call = ReplayCall { tokens, payload: payload_of(&checked), routing: address, bank: arrival.lease.bank as u32 };
    gpu::payload_alone(&ctx, &call)
}

pub(super) fn replay_send(ep: &mut ExpertParallel, routing: &Routing, payload: &Payload<'_>) -> Result<Sent> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let (lease, call) = begin_replay(ep, &ctx, routing, payload)?;
    ep.queued("replay", gpu::replay_send(&ctx, &call))?;
    Ok(Sent { filled_by: routing.filled_by, kind: Kind::Replay, lease })
}

pub(super) fn replay_receive(ep: &mut ExpertParallel, routing: &Routing, sent: Sent) -> Result<Arrival, Rejected<Sent>> {
    let shared = ep.shared.clone();
    if let Err(error) = shared.check_alive() {
        return Err(Rejected { error, returned: Some(sent) });
    }
    let end = end_of(&shared);
    ep.queued("replay", gpu::replay_receive(&end.ctx(), &receive_call(routing, &sent)?))?;
    Ok(Arrival::new(sent.lease, sent.filled_by))
}

/// Whoever calls has found that the object is on a GPU.
fn end_of(shared: &Shared) -> &End {
    shared.cuda().expect("an object on a GPU")
}

/// As an address, and what the host knows of the tokens.
pub(crate) fn routing_of(routing: &Routing) -> Result<(u64, Tokens)> {
    match &routing.device {
        Some(device) => Ok((device.address.address, device.tokens)),
        None => Err(Error::invalid("dispatch", "routing", "of a CPU rank", "made by Routing::new for this object")),
    }
}

fn device_of(routing: &mut Routing) -> Result<&mut DeviceRouting> {
    let error = || Error::invalid("dispatch", "routing", "of a CPU rank", "made by Routing::new for this object");
    routing.device.as_mut().ok_or_else(error)
}

/// Checks a dispatch, takes its bank, and notes what the host knows.
fn begin(ep: &mut ExpertParallel, ctx: &Ctx, routing: &mut Routing, input: &Input<'_>) -> Result<(Lease, Call)> {
    let checked = check::input(&ctx.cuda, ep, routing, input)?;
    let address = device_of(routing)?.address.address;
    let lease = ep.shared.take_bank("dispatch", ep.epoch + 1)?;
    // More than any rank may have: which number it is does not matter.
    let most = u32::try_from(checked.num_tokens).unwrap_or(u32::MAX);
    let tokens = match checked.device_tokens {
        None => Tokens::exactly(most),
        Some(_) => Tokens { most, likely: most.min(u32::try_from(ep.config().expected_tokens).unwrap_or(u32::MAX)) },
    };
    let elements = |rows: &check::Rows<Address<'_>>, size: usize| (rows.stride_bytes / size) as u64;
    let weights = checked.topk_weights.as_ref();
    let call = Call {
        topk_idx: checked.topk_idx.memory.address,
        index: if checked.topk_idx_dtype == DType::I64 { IndexType::I64 } else { IndexType::I32 },
        idx_stride: elements(&checked.topk_idx, checked.topk_idx_dtype.size()),
        topk_weights: weights.map_or(0, |weights| weights.memory.address),
        weight_stride: weights.map_or(0, |weights| elements(weights, DType::F32.size())),
        device_tokens: checked.device_tokens.map_or(0, |memory| memory.address),
        tokens,
        payload: payload_of(&checked.payload),
        routing: address,
        bank: lease.bank as u32,
    };
    ep.epoch += 1;
    routing.filled_by = ep.epoch;
    routing.num_tokens = checked.num_tokens.min(ep.config().max_tokens);
    device_of(routing)?.tokens = tokens;
    Ok((lease, call))
}

fn begin_replay(ep: &mut ExpertParallel, ctx: &Ctx, routing: &Routing, payload: &Payload<'_>) -> Result<(Lease, ReplayCall)> {
    let checked = check::payload(&ctx.cuda, ep, routing, payload)?;
    let (address, tokens) = routing_of(routing)?;
    let lease = ep.shared.take_bank("replay", ep.epoch + 1)?;
    ep.epoch += 1;
    let call = ReplayCall { tokens, payload: payload_of(&checked), routing: address, bank: lease.bank as u32 };
    Ok((lease, call))
}

fn payload_of(checked: &CheckedPayload<Address<'_>>) -> gpu::Payload {
    gpu::Payload {
        x: checked.x.memory.address,
        x_stride: checked.x.stride_bytes as u64,
        x_rows: u32::try_from(checked.x_rows).unwrap_or(u32::MAX),
        scales: checked.scales.map_or(0, |scales| scales.memory.address),
        scale_stride: checked.scales.map_or(0, |scales| scales.stride_bytes as u64),
    }
}

fn receive_call(routing: &Routing, sent: &Sent) -> Result<ReceiveCall> {
    let (routing, tokens) = routing_of(routing)?;
    Ok(ReceiveCall { tokens, routing, bank: sent.lease.bank as u32 })
}

impl ExpertParallel {
    /// A launch that failed leaves the rank out of step with its peers: the world is over.
    pub(crate) fn queued(&self, op: &'static str, result: Result<()>) -> Result<()> {
        result.inspect_err(|_| {
            let rank = self.rank();
            let (kind, epoch) = (FailureKind::Left, self.epoch);
            self.shared.member.fail(Failure { kind, op, phase: "launch", rank, peer: rank, epoch, seen: epoch, blocks_arrived: 0 });
        })
    }
}

/// Addresses of what a call reports beside the arrival; 0 where nothing is wanted.
struct Wanted {
    statistics: u64,
    counts_host: u64,
}

impl Wanted {
    fn of(ctx: &Ctx, outputs: &mut Outputs<'_>) -> Result<Self> {
        const OP: &str = "dispatch";
        let statistics = match &mut outputs.expert_statistics {
            None => 0,
            Some(view) => ctx.cuda.write(OP, "expert_statistics", view)?.address,
        };
        let counts_host = match &outputs.counts_host {
            Some(view) if !view.shape().contains(&0) => {
                ctx.cuda.device().reach_host(OP, "counts_host", view.host(OP, "counts_host")?.as_ptr())?
            }
            _ => 0,
        };
        Ok(Wanted { statistics, counts_host })
    }

    fn report(&self, ctx: &Ctx, arrival: &Arrival) -> Result<()> {
        let &Wanted { statistics, counts_host } = self;
        if statistics == 0 && counts_host == 0 {
            return Ok(());
        }
        let bank = arrival.lease.bank as u32;
        if ctx.is_by_expert {
            return gpu::report(ctx, &ReportCall { bank, statistics, counts_host, ..ReportCall::default() });
        }
        arrival.lease.set_counted();
        gpu::index_rows(ctx, &IndexCall { statistics, counts_host, ..index_call(bank) })
    }
}

fn index_call(bank: u32) -> IndexCall {
    IndexCall { bank, num_rows_per_expert: 0, segment_start: 0, gather_idx: 0, statistics: 0, counts_host: 0, align: 1 }
}

/// `ByToken` counts when it is asked first.
pub(super) fn count_rows_per_expert(arrival: &Arrival) -> Result<()> {
    let ctx = end_of(&arrival.lease.shared).ctx();
    if ctx.is_by_expert || arrival.lease.set_counted() {
        return Ok(());
    }
    gpu::index_rows(&ctx, &index_call(arrival.lease.bank as u32))
}

pub(super) fn gather_idx(
    arrival: &Arrival,
    op: &'static str,
    align: usize,
    mut gather_idx: TensorViewMut<'_>,
    mut segment_start: TensorViewMut<'_>,
) -> Result<()> {
    let ctx = end_of(&arrival.lease.shared).ctx();
    let gather_idx = ctx.cuda.write(op, "gather_idx", &mut gather_idx)?.address;
    let segment_start = ctx.cuda.write(op, "segment_start", &mut segment_start)?.address;
    arrival.lease.set_counted();
    gpu::index_rows(&ctx, &IndexCall { gather_idx, segment_start, align: align as u32, ..index_call(arrival.lease.bank as u32) })
}

pub(super) fn contiguous_metadata(
    arrival: &Arrival,
    op: &'static str,
    mut source: TensorViewMut<'_>,
    mut topk_idx: TensorViewMut<'_>,
    mut topk_weights: TensorViewMut<'_>,
) -> Result<()> {
    let ctx = end_of(&arrival.lease.shared).ctx();
    let call = ReportCall {
        bank: arrival.lease.bank as u32,
        source: ctx.cuda.write(op, "source", &mut source)?.address,
        topk_idx: ctx.cuda.write(op, "topk_idx", &mut topk_idx)?.address,
        topk_weights: ctx.cuda.write(op, "topk_weights", &mut topk_weights)?.address,
        ..ReportCall::default()
    };
    gpu::report(&ctx, &call)
}

/// Everything that arrived, copied.
pub(super) fn received(arrival: &Arrival) -> Result<Received<'_>> {
    let lease = &arrival.lease;
    let shared = &*lease.shared;
    let (end, plan) = (end_of(shared), &shared.plan);
    shared.member.check_alive()?;
    count_rows_per_expert(arrival)?;
    end.wait(&shared.member, shared.timeout)?;
    let counts = end.counts(lease.bank, plan, shared.config.layout.is_by_expert())?;
    let rows = counts.num_rows();
    let x = end.read(lease.at(plan.regions.x), rows * plan.row_bytes)?;
    let records = end.read(lease.at(plan.regions.records), rows * plan.record_bytes)?;
    Ok(Received { shared, counts: Cow::Owned(counts), x: Cow::Owned(x), records: Cow::Owned(records) })
}

pub(super) fn num_dropped(ep: &ExpertParallel, routing: &Routing) -> Result<usize> {
    let Some(device) = &routing.device else { return Ok(0) };
    ep.synchronize()?;
    let at = end_of(&ep.shared).ctx().layout.routing.head;
    let mut head = RoutingHead::zeroed();
    bytemuck::bytes_of_mut(&mut head).copy_from_slice(&device.read(at, size_of::<RoutingHead>())?);
    Ok(head.num_dropped as usize)
}
