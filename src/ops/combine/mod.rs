//! Combine: the experts' rows travel back and are summed on the token's own rank, in a fixed order.

use crate::ep::ExpertParallel;
use crate::error::Result;
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
    /// Added last, in f32, before the one rounding: `[T, H]` of the combine type.
    pub add_to: Option<TensorView<'a>>,
    /// With `fold_weights`: `f32 [T, K]`; 0 where a route was masked or dropped.
    pub topk_weights: Option<TensorViewMut<'a>>,
}

/// A combine whose rows are on their way.
#[must_use = "the sums are only made by combine_receive"]
pub struct Sent {}

impl ExpertParallel {
    /// Brings the experts' rows back and sums them. Collective.
    pub fn combine(&mut self, routing: &Routing, arrival: Arrival, input: &Input<'_>, output: Output<'_>) -> Result<()> {
        let sent = self.combine_send(routing, arrival, input)?;
        self.combine_receive(routing, sent, output)
    }

    /// First half of [`combine`](Self::combine): this rank's rows are complete and may be read.
    pub fn combine_send(&mut self, routing: &Routing, arrival: Arrival, input: &Input<'_>) -> Result<Sent> {
        let _ = (routing, arrival, input);
        todo!()
    }

    /// Second half of [`combine`](Self::combine).
    pub fn combine_receive(&mut self, routing: &Routing, sent: Sent, output: Output<'_>) -> Result<()> {
        let _ = (routing, sent, output);
        todo!()
    }
}
