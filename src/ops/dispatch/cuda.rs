//! Dispatch on GPU ranks: from checked arguments to the kernels' launches.
#![forbid(unsafe_code)]

use super::{Arrival, Input, Outputs, Payload, Received, Routing, Sent};
use crate::ep::ExpertParallel;
use crate::error::{Error, Rejected, Result};
use crate::tensor::TensorViewMut;

pub(super) fn dispatch(_: &mut ExpertParallel, _: &mut Routing, _: &Input<'_>, _: Outputs<'_>) -> Result<Arrival> {
    todo!()
}
pub(super) fn replay(_: &mut ExpertParallel, _: &Routing, _: &Payload<'_>) -> Result<Arrival> {
    todo!()
}
pub(super) fn dispatch_send(_: &mut ExpertParallel, _: &mut Routing, _: &Input<'_>) -> Result<Sent> {
    todo!()
}
pub(super) fn replay_send(_: &mut ExpertParallel, _: &Routing, _: &Payload<'_>) -> Result<Sent> {
    todo!()
}
pub(super) fn dispatch_receive(_: &mut ExpertParallel, _: &mut Routing, _: Sent, _: Outputs<'_>) -> Result<Arrival, Rejected<Sent>> {
    todo!()
}
pub(super) fn replay_receive(_: &mut ExpertParallel, _: &Routing, _: Sent) -> Result<Arrival, Rejected<Sent>> {
    todo!()
}
pub(super) fn count_rows_per_expert(_: &Arrival) -> Result<()> {
    todo!()
}
pub(super) fn received(_: &Arrival) -> Result<Received<'_>> {
    todo!()
}
pub(super) fn contiguous_metadata(
    _: &Arrival,
    _: &'static str,
    _: TensorViewMut<'_>,
    _: TensorViewMut<'_>,
    _: TensorViewMut<'_>,
) -> Result<()> {
    todo!()
}
pub(super) fn gather_idx(_: &Arrival, _: &'static str, _: usize, _: TensorViewMut<'_>, _: TensorViewMut<'_>) -> Result<()> {
    todo!()
}
pub(super) fn num_dropped(_: &ExpertParallel, _: &Routing) -> Result<usize> {
    todo!()
}
