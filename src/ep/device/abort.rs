//! How the host ends the waits of running kernels.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::ep::World;
use crate::ep::page::OnFailure;
use crate::ep::world::Member;
use crate::error::Result;
use crate::gpu::{Alarm, Device, Shareable};

/// The abort words of all ranks, as one rank of a world reaches them. When its process learns that the world has failed (a rank panicked, gave up a wait on
/// the host, or its process ended), the words are set while kernels run, and these end their waits.
///
/// Made at setup, one for each object. Dropping it waits for the writes, not for kernels; on a thread that panics it fails the world first.
#[derive(Debug)]
pub struct AbortLine {
    /// Dropped first: afterwards nobody raises the alarm.
    _on_failure: OnFailure,
    alarm: Arc<Alarm>,
    member: Arc<Member>,
}

impl AbortLine {
    /// `offset` is that of the abort word in the memory of every rank; `device` is the one of this rank and can access all of `memory`.
    ///
    /// # Errors
    /// Those of [`Alarm::new`].
    pub fn new(world: &World, device: &Device, memory: &[Arc<Shareable>], offset: usize) -> Result<Self> {
        let alarm = Arc::new(Alarm::new(device, memory, offset)?);
        let raised = alarm.clone();
        let member = world.member().clone();
        // Where the alarm cannot be raised nothing else can be done: the waits end at their bound.
        let _on_failure = member.on_failure(Box::new(move || drop(raised.raise())));
        Ok(AbortLine { _on_failure, alarm, member })
    }

    /// Sets the words now. From any thread; allocates nothing, waits for no kernel.
    ///
    /// # Errors
    /// Those of [`Alarm::raise`].
    pub fn raise(&self) -> Result<()> {
        self.alarm.raise()
    }
}

impl Drop for AbortLine {
    fn drop(&mut self) {
        self.member.fail_if_panicking();
    }
}
