//! Dispatch: every token goes once to each distinct rank that owns one of its experts.

mod arrival;
mod check;
mod cpu;
#[allow(dead_code, unused_imports, reason = "calls of objects on GPUs are made of it")]
pub(crate) mod gpu;
mod receive;
mod record;
mod routing;

pub use arrival::{Arrival, Metadata};
pub use routing::Routing;

pub(crate) use check::{Rows, aligned_matrix, filled, matrix, same_object};
pub(crate) use routing::NONE;

use crate::ep::ExpertParallel;
use crate::ep::object::Lease;
use crate::ep::signal::Kind;
use crate::error::{Rejected, Result};
use crate::gpu::{Program, Spec};
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
/// [`dispatch_receive`](ExpertParallel::dispatch_receive), or between the halves of a replay.
#[must_use = "peers' rows are only complete after the receiving half"]
#[derive(Debug)]
pub struct Sent {
    lease: Lease,
    epoch: u64,
    /// Epoch of the dispatch that made the routing.
    filled_by: u64,
    kind: Kind,
}

/// Every kernel with every set of constants that is meant to be shipped.
pub fn programs() -> Vec<Program> {
    gpu::shipped().iter().map(Spec::program).collect()
}

impl ExpertParallel {
    /// Sends this rank's tokens and receives those of all ranks. Collective.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `Capacity` on every rank, with no payload written; `Busy` when the bank's arrival is still alive;
    /// `Mismatch` when another rank called [`replay`](Self::replay); `Timeout` and `Poisoned`.
    pub fn dispatch(&mut self, routing: &mut Routing, input: &Input<'_>, outputs: Outputs<'_>) -> Result<Arrival> {
        check::outputs(self, &outputs)?;
        let sent = self.dispatch_send(routing, input)?;
        Ok(self.dispatch_receive(routing, sent, outputs)?)
    }

    /// The same routing with new payload (backward of combine). Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); `Invalid` for a routing that holds no call of this rank and configuration.
    pub fn replay(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Arrival> {
        let sent = self.replay_send(routing, payload)?;
        Ok(self.replay_receive(routing, sent)?)
    }

    /// First half of [`dispatch`](Self::dispatch): counts and rows leave; nothing waits for rows.
    pub fn dispatch_send(&mut self, routing: &mut Routing, input: &Input<'_>) -> Result<Sent> {
        self.shared.member.check_alive()?;
        let checked = check::input(self, routing, input)?;
        cpu::dispatch_send(self, routing, &checked)
    }

    /// Second half of [`dispatch`](Self::dispatch).
    pub fn dispatch_receive(&mut self, routing: &mut Routing, sent: Sent, outputs: Outputs<'_>) -> Result<Arrival, Rejected<Sent>> {
        if let Err(error) = check::outputs(self, &outputs).and_then(|()| check::sent(routing, &sent, Kind::Dispatch)) {
            return Err(Rejected { error, returned: Some(sent) });
        }
        let arrival = cpu::dispatch_receive(routing, sent)?;
        outputs.fill(&arrival);
        Ok(arrival)
    }

    /// First half of [`replay`](Self::replay).
    pub fn replay_send(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Sent> {
        self.shared.member.check_alive()?;
        let checked = check::payload(self, routing, payload)?;
        cpu::replay_send(self, routing, &checked)
    }

    /// Second half of [`replay`](Self::replay).
    pub fn replay_receive(&mut self, routing: &Routing, sent: Sent) -> Result<Arrival, Rejected<Sent>> {
        if let Err(error) = check::sent(routing, &sent, Kind::Replay) {
            return Err(Rejected { error, returned: Some(sent) });
        }
        Ok(cpu::replay_receive(routing, sent)?)
    }
}

impl Outputs<'_> {
    fn fill(self, arrival: &Arrival) {
        let counts = arrival.num_rows_per_expert();
        if let Some(statistics) = self.expert_statistics {
            statistics.iter_mut().zip(counts).for_each(|(s, &n)| *s += u64::from(n));
        }
        if let Some(host) = self.counts_host {
            host.copy_from_slice(counts);
        }
    }
}
