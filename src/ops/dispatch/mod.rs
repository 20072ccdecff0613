//! Dispatch: every token goes once to each distinct rank that owns one of its experts.

mod arrival;
mod check;
mod cpu;
mod cuda;
pub(crate) mod gpu;
mod receive;
mod received;
mod record;
mod routing;

pub use arrival::Arrival;
pub use received::{Metadata, Received};
pub use routing::Routing;

pub(crate) use check::{Rows, aligned_matrix, filled, matrix, same_object};
pub(crate) use cuda::routing_of;
pub(crate) use routing::NONE;

use crate::ep::ExpertParallel;
use crate::ep::object::Lease;
use crate::ep::signal::Kind;
use crate::error::{Error, Rejected, Result};
use crate::gpu::{Program, Spec};
use crate::tensor::{TensorView, TensorViewMut};

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
    /// Running statistics `i64 [L]`, in the memory of the backend: the rows per local expert of this call are added.
    pub expert_statistics: Option<TensorViewMut<'a>>,
    /// Receives the rows per local expert `u32 [L]` of this call, in host memory. On a GPU in the order of the stream, and the memory is
    /// [`Pinned`](crate::gpu::Pinned).
    pub counts_host: Option<TensorViewMut<'a>>,
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
    /// On a GPU the call returns when its kernels are queued. What only they find out, [`Error::Capacity`](crate::Error::Capacity),
    /// `Mismatch`, `Timeout` and `Poisoned`, the next call on this object returns, or [`synchronize`](Self::synchronize), or
    /// [`Arrival::on_host`]; the arrival of a call that was refused has no rows, and its combine writes nothing.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `Capacity` on every rank, with no payload written; `Busy` when the bank's arrival is still alive;
    /// `Mismatch` when another rank called [`replay`](Self::replay); `Timeout` and `Poisoned`.
    pub fn dispatch(&mut self, routing: &mut Routing, input: &Input<'_>, outputs: Outputs<'_>) -> Result<Arrival> {
        check::outputs(self, &outputs)?;
        if self.shared.cuda().is_some() {
            return cuda::dispatch(self, routing, input, outputs);
        }
        let sent = self.dispatch_send(routing, input)?;
        Ok(self.dispatch_receive(routing, sent, outputs)?)
    }

    /// The same routing with new payload (backward of combine). Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); `Invalid` for a routing that holds no call of this rank and configuration.
    pub fn replay(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Arrival> {
        if self.shared.cuda().is_some() {
            return cuda::replay(self, routing, payload);
        }
        let sent = self.replay_send(routing, payload)?;
        Ok(self.replay_receive(routing, sent)?)
    }

    /// A [`dispatch`](Self::dispatch) in whose middle the caller queues work of its own, behind the routes and before the rows: for tests, of ranks that are
    /// late there. On a GPU, in the form of two kernels.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); `Unsupported` on a CPU.
    #[doc(hidden)]
    pub fn dispatch_around(&mut self, routing: &mut Routing, input: &Input<'_>, between: impl FnOnce() -> Result<()>) -> Result<Arrival> {
        if self.shared.cuda().is_none() {
            return Err(Error::Unsupported {
                op: "dispatch_around",
                what: "backend cpu".into(),
                why: "nothing can be queued there".into(),
            });
        }
        cuda::dispatch_around(self, routing, input, between)
    }

    /// The kernel that moves the rows of a call that has arrived, once more and alone, to be timed: without routing, without a word to any peer. On a GPU,
    /// after a `retune` to [`Measure::skip_signals`](crate::ep::Measure).
    ///
    /// # Errors
    /// `Unsupported` on a CPU, `Invalid` for kernels that do signal.
    #[doc(hidden)]
    pub fn payload_alone(&mut self, routing: &Routing, arrival: &Arrival, payload: &Payload<'_>) -> Result<()> {
        if self.shared.cuda().is_none() {
            return Err(Error::Unsupported {
                op: "payload_alone",
                what: "backend cpu".into(),
                why: "a CPU moves rows and signals as one".into(),
            });
        }
        cuda::payload_alone(self, routing, arrival, payload)
    }

    /// First half of [`dispatch`](Self::dispatch): counts and rows leave; nothing waits for rows.
    pub fn dispatch_send(&mut self, routing: &mut Routing, input: &Input<'_>) -> Result<Sent> {
        self.shared.check_alive()?;
        if self.shared.cuda().is_some() {
            return cuda::dispatch_send(self, routing, input);
        }
        let shared = self.shared.clone();
        let checked = check::input(shared.member.cpu(), self, routing, input)?;
        cpu::dispatch_send(self, routing, &checked)
    }

    /// Second half of [`dispatch`](Self::dispatch).
    pub fn dispatch_receive(&mut self, routing: &mut Routing, sent: Sent, outputs: Outputs<'_>) -> Result<Arrival, Rejected<Sent>> {
        if let Err(error) = check::outputs(self, &outputs).and_then(|()| check::sent(routing, &sent, Kind::Dispatch)) {
            return Err(Rejected { error, returned: Some(sent) });
        }
        if self.shared.cuda().is_some() {
            return cuda::dispatch_receive(self, routing, sent, outputs);
        }
        let arrival = cpu::dispatch_receive(routing, sent)?;
        outputs.fill(&arrival)?;
        Ok(arrival)
    }

    /// First half of [`replay`](Self::replay).
    pub fn replay_send(&mut self, routing: &Routing, payload: &Payload<'_>) -> Result<Sent> {
        self.shared.check_alive()?;
        if self.shared.cuda().is_some() {
            return cuda::replay_send(self, routing, payload);
        }
        let shared = self.shared.clone();
        let checked = check::payload(shared.member.cpu(), self, routing, payload)?;
        cpu::replay_send(self, routing, &checked)
    }

    /// Second half of [`replay`](Self::replay).
    pub fn replay_receive(&mut self, routing: &Routing, sent: Sent) -> Result<Arrival, Rejected<Sent>> {
        if let Err(error) = check::sent(routing, &sent, Kind::Replay) {
            return Err(Rejected { error, returned: Some(sent) });
        }
        if self.shared.cuda().is_some() {
            return cuda::replay_receive(self, routing, sent);
        }
        Ok(cpu::replay_receive(routing, sent)?)
    }
}

impl Outputs<'_> {
    fn fill(self, arrival: &Arrival) -> Result<()> {
        let counts = arrival.lease.counts().num_rows_per_expert.as_slice();
        if let Some(mut statistics) = self.expert_statistics {
            let bytes = &mut statistics.host_mut("dispatch", "expert_statistics")?[..size_of_val(counts) * 2];
            bytemuck::cast_slice_mut::<u8, i64>(bytes).iter_mut().zip(counts).for_each(|(s, &n)| *s += i64::from(n));
        }
        if let Some(mut host) = self.counts_host {
            host.host_mut("dispatch", "counts_host")?[..size_of_val(counts)].copy_from_slice(bytemuck::cast_slice(counts));
        }
        Ok(())
    }
}
