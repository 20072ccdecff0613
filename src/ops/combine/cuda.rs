//! Combine on GPU ranks: from checked arguments to launches.
#![forbid(unsafe_code)]

use super::check::{self, Checked, CheckedOutput};
use super::gpu::{self, Addend, Folded, Receive, RowWeights, Send, Staged};
use super::{Input, Output, Sent};
use crate::ep::ExpertParallel;
use crate::ep::device::End;
use crate::ep::object::Shared;
use crate::error::{Rejected, Result};
use crate::ops::dispatch::{Arrival, Routing, routing_of};
use crate::space::Address;
use crate::tensor::DType;

pub(super) fn combine(
    ep: &mut ExpertParallel,
    routing: &Routing,
    arrival: Arrival,
    input: &Input<'_>,
    output: Output<'_>,
) -> Result<(), Rejected<Arrival>> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let calls = || -> Result<(Send, Receive)> {
        shared.check_alive()?;
        let (input, output) = (check::input(&ctx.cuda, ep, routing, &arrival, input)?, check::output(&ctx.cuda, ep, routing, &output)?);
        let bank = arrival.lease.bank as u32;
        let receive = receive_call(routing, bank, &output)?;
        gpu::check(&ctx, &receive)?;
        Ok((send_call(routing, bank, &input)?, receive))
    };
    let (send, receive) = match calls() {
        Ok(calls) => calls,
        Err(error) => return Err(Rejected { error, returned: Some(arrival) }),
    };
    Ok(ep.queued("combine", gpu::combine(&ctx, &send, &receive))?)
}

pub(super) fn send(ep: &mut ExpertParallel, routing: &Routing, arrival: Arrival, input: &Input<'_>) -> Result<Sent, Rejected<Arrival>> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let call = shared.check_alive().and_then(|()| {
        let checked = check::input(&ctx.cuda, ep, routing, &arrival, input)?;
        gpu::check_send(&ctx)?;
        send_call(routing, arrival.lease.bank as u32, &checked)
    });
    let call = match call {
        Ok(call) => call,
        Err(error) => return Err(Rejected { error, returned: Some(arrival) }),
    };
    ep.queued("combine", gpu::combine_send(&ctx, &call))?;
    Ok(Sent { lease: arrival.lease, filled_by: arrival.filled_by })
}

pub(super) fn receive(ep: &mut ExpertParallel, routing: &Routing, sent: Sent, output: Output<'_>) -> Result<(), Rejected<Sent>> {
    let shared = ep.shared.clone();
    let end = end_of(&shared);
    let ctx = end.ctx();
    let call = shared.check_alive().and_then(|()| {
        check::sent(ep, routing, &sent)?;
        let checked = check::output(&ctx.cuda, ep, routing, &output)?;
        let call = receive_call(routing, sent.lease.bank as u32, &checked)?;
        gpu::check(&ctx, &call).map(|()| call)
    });
    let call = match call {
        Ok(call) => call,
        Err(error) => return Err(Rejected { error, returned: Some(sent) }),
    };
    Ok(ep.queued("combine", gpu::combine_receive(&ctx, &call))?)
}

/// Whoever calls has found that the object is on a GPU.
fn end_of(shared: &Shared) -> &End {
    shared.cuda().expect("an object on a GPU")
}

fn send_call(routing: &Routing, bank: u32, checked: &Checked<Address<'_>>) -> Result<Send> {
    let (routing, tokens) = routing_of(routing)?;
    let staged = checked.y.map(|y| Staged { y: y.memory.address, y_stride: y.stride_bytes as u64 });
    let row_weights = checked.row_weights.map(|w| RowWeights { address: w.memory.address, stride: (w.stride_bytes / 4) as u64 });
    Ok(Send { tokens, routing, bank, staged, row_weights })
}

fn receive_call(routing: &Routing, bank: u32, checked: &CheckedOutput<Address<'_>>) -> Result<Receive> {
    let (routing, tokens) = routing_of(routing)?;
    let add = checked.add_to.as_ref().map(|(dtype, rows)| Addend {
        address: rows.memory.address,
        stride: rows.stride_bytes as u64,
        is_f32: *dtype == DType::F32,
    });
    let folded = checked.topk_weights.map(|w| Folded { address: w.memory.address, stride: (w.stride_bytes / 4) as u64 });
    let (out, out_stride) = (checked.out.memory.address, checked.out.stride_bytes as u64);
    Ok(Receive { tokens, routing, bank, out, out_stride, add, folded })
}
