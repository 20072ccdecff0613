//! Dispatch: every token goes once to each distinct rank that owns one of its experts.

mod arrival;
mod routing;

pub use arrival::{Arrival, Metadata};
pub use routing::Routing;

use crate::ep::ExpertParallel;
use crate::error::Result;
use crate::tensor::TensorView;

/// How many tokens a call has.
#[derive(Debug, Clone, Copy, Default)]
pub enum NumTokens<'a> {
    /// The rows of `x`.
    #[default]
    All,
    /// The first `n` rows of `x`.
    Host(usize),
    /// As a number in memory of the device (`u32 [1]`), read once, here, and kept in [`Routing`].
    Device(TensorView<'a>),
}

/// What one rank sends.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `[T, H]` of the configuration's type. Rows are 16-byte aligned and multiples of 16 bytes apart.
    pub x: TensorView<'a>,
    /// `i32` or `i64` `[T, K]`: global expert ids. Negative and out-of-range ids are masked; of equal ids in a row the first counts.
    pub topk_idx: TensorView<'a>,
    /// `f32 [T, K]`; absent weights count as 1.
    pub topk_weights: Option<TensorView<'a>>,
    /// Opaque bytes `[T, S]`, when the configuration has `scale_bytes`.
    pub scales: Option<TensorView<'a>>,
    /// Tokens of this call.
    pub num_tokens: NumTokens<'a>,
}

/// What a call reports beside the arrival.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// Running statistics `[L]`: the rows per local expert of this call are added.
    pub expert_statistics: Option<&'a mut [u64]>,
    /// Receives the rows per local expert `[L]` of this call.
    pub counts_host: Option<&'a mut [u32]>,
}

/// Payload of a [`replay`](ExpertParallel::replay): the same routing, new rows.
#[derive(Debug, Clone, Copy)]
pub struct Payload<'a> {
    /// `[T, H]`.
    pub x: TensorView<'a>,
    /// `[T, S]`, when the configuration has `scale_bytes`.
    pub scales: Option<TensorView<'a>>,
}

/// A dispatch whose rows are on their way: between [`dispatch_send`](ExpertParallel::dispatch_send) and
/// [`dispatch_receive`](ExpertParallel::dispatch_receive).
#[must_use = "peers' rows are only complete after dispatch_receive"]
pub struct Sent {}

impl ExpertParallel {
    /// Sends this rank's tokens and receives those of all ranks. Collective.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `Capacity` on every rank, with nothing written; `Busy` when the bank's arrival is still alive;
    /// `Timeout` and `Poisoned`.
    pub fn dispatch(&mut self, routing: &mut Routing, input: &Input<'_>, outputs: Outputs<'_>) -> Result<Arrival> {
        let sent = self.dispatch_send(routing, input)?;
        self.dispatch_receive(routing, sent, outputs)
    }

    /// The same routing with new payload. Collective.
    pub fn replay(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Arrival> {
        let sent = self.replay_send(routing, payload)?;
        self.replay_receive(routing, sent)
    }

    /// First half of [`dispatch`](Self::dispatch): counts and rows leave; nothing waits for rows.
    pub fn dispatch_send(&mut self, routing: &mut Routing, input: &Input<'_>) -> Result<Sent> {
        let _ = (routing, input);
        todo!()
    }

    /// Second half of [`dispatch`](Self::dispatch).
    pub fn dispatch_receive(&mut self, routing: &mut Routing, sent: Sent, outputs: Outputs<'_>) -> Result<Arrival> {
        let _ = (routing, sent, outputs);
        todo!()
    }

    /// First half of [`replay`](Self::replay).
    pub fn replay_send(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Sent> {
        let _ = (routing, payload);
        todo!()
    }

    /// Second half of [`replay`](Self::replay).
    pub fn replay_receive(&mut self, routing: &Routing, sent: Sent) -> Result<Arrival> {
        let _ = (routing, sent);
        todo!()
    }
}
