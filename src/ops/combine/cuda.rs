//! Combine on GPU ranks.
#![forbid(unsafe_code)]

use super::{Input, Output, Sent};
use crate::ep::ExpertParallel;
use crate::error::Rejected;
use crate::ops::dispatch::{Arrival, Routing};
type R<T> = std::result::Result<T, Rejected<Arrival>>;
pub(super) fn combine(_: &mut ExpertParallel, _: &Routing, _: Arrival, _: &Input<'_>, _: Output<'_>) -> R<()> {
    todo!()
}
pub(super) fn send(_: &mut ExpertParallel, _: &Routing, _: Arrival, _: &Input<'_>) -> R<Sent> {
    todo!()
}
pub(super) fn receive(_: &mut ExpertParallel, _: &Routing, _: Sent, _: Output<'_>) -> std::result::Result<(), Rejected<Sent>> {
    todo!()
}
