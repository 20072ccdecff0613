//! Combine: the experts' rows travel back and are summed on the token's own rank, in a fixed order.

mod check;
mod cpu;
mod cuda;
pub(crate) mod gpu;
mod reduce;

use crate::ep::ExpertParallel;
use crate::ep::object::Lease;
use crate::error::{Rejected, Result};
use crate::gpu::{Program, Spec};
use crate::ops::dispatch::{Arrival, Routing};
use crate::tensor::{TensorView, TensorViewMut};

/// The experts' rows.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows<'a> {
    /// In [`Arrival::expert_output`]: nothing is copied before it travels.
    InPlace,
    /// In any tensor `[rows, H]`, with at least the arrival's rows.
    Staged(TensorView<'a>),
}

/// What one rank brings back.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// One row per received row.
    pub y: ExpertRows<'a>,
    /// With `fold_weights`: `f32 [rows, row_k]`, a value per route of each received row.
    pub row_weights: Option<TensorView<'a>>,
}

/// What one rank gets.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[T, H]` of the combine type; rows from T on are untouched.
    pub out: TensorViewMut<'a>,
    /// Added last, in f32, before the one rounding: `[T, H]` of the combine type or f32. A token without contributor gets it unchanged
    /// (rounded, if it is f32 and `out` is not).
    pub add_to: Option<TensorView<'a>>,
    /// With `fold_weights`: `f32 [T, K]`; 0 where a route was masked or dropped.
    pub topk_weights: Option<TensorViewMut<'a>>,
}

/// A combine whose rows are on their way: between [`combine_send`](ExpertParallel::combine_send) and
/// [`combine_receive`](ExpertParallel::combine_receive).
#[must_use = "the sums are only made by combine_receive"]
#[derive(Debug)]
pub struct Sent {
    lease: Lease,
    filled_by: u64,
}

/// Every kernel with every set of constants that is meant to be shipped.
pub fn programs() -> Vec<Program> {
    gpu::shipped().iter().map(Spec::program).collect()
}

impl ExpertParallel {
    /// Brings the experts' rows back and sums them: `out[t] = round(sum over ranks, ascending, of y + add_to[t])`, in f32. Collective.
    ///
    /// # Errors
    /// `Invalid` before anything is sent, with the arrival given back; `Timeout` and `Poisoned`.
    pub fn combine(&mut self, routing: &Routing, arrival: Arrival, input: &Input<'_>, output: Output<'_>) -> Result<(), Rejected<Arrival>> {
        if self.shared.cuda().is_some() {
            return cuda::combine(self, routing, arrival, input, output);
        }
        if let Err(error) = check::output(self.shared.member.cpu(), self, routing, &output) {
            return Err(Rejected { error, returned: Some(arrival) });
        }
        let sent = self.combine_send(routing, arrival, input)?;
        self.combine_receive(routing, sent, output).map_err(|rejected| rejected.error.into())
    }

    /// First half of [`combine`](Self::combine): this rank's rows are complete and may be read.
    pub fn combine_send(&mut self, routing: &Routing, arrival: Arrival, input: &Input<'_>) -> Result<Sent, Rejected<Arrival>> {
        if self.shared.cuda().is_some() {
            return cuda::send(self, routing, arrival, input);
        }
        let shared = self.shared.clone();
        let checked = shared.check_alive().and_then(|()| check::input(shared.member.cpu(), self, routing, &arrival, input));
        match checked {
            Ok(checked) => Ok(cpu::send(routing, arrival, &checked)),
            Err(error) => Err(Rejected { error, returned: Some(arrival) }),
        }
    }

    /// Second half of [`combine`](Self::combine).
    pub fn combine_receive(&mut self, routing: &Routing, sent: Sent, output: Output<'_>) -> Result<(), Rejected<Sent>> {
        if self.shared.cuda().is_some() {
            return cuda::receive(self, routing, sent, output);
        }
        let checked = check::sent(self, routing, &sent).and_then(|()| check::output(self.shared.member.cpu(), self, routing, &output));
        if let Err(error) = checked {
            return Err(Rejected { error, returned: Some(sent) });
        }
        Ok(cpu::receive(routing, sent, output)?)
    }
}
