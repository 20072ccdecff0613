//! Bounded waits that park: many ranks may share few cores.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::world::{Doing, Member};
use crate::error::{Error, Failure, FailureKind, Result};
use crate::id::Rank;

/// Polls before the first yield (arbitrary: a signal between two running cores takes well under a microsecond).
const NUM_SPINS: usize = 64;
/// Yields before parking (arbitrary: enough for a peer on the same core to finish a small message).
const NUM_YIELDS: usize = 8;
/// Longest sleep without a ring: how late a deadline may be noticed (arbitrary).
const NAP: Duration = Duration::from_millis(20);

/// State of something that is waited for.
pub(crate) enum Poll {
    /// It is there.
    Ready,
    /// Not yet: the peer that is missing, and the epoch last seen from it.
    Missing { peer: usize, seen: u64 },
}

impl Member {
    /// Polls until `poll` is ready; every other wait of the same rank that does not depend on it goes into the same `poll`.
    ///
    /// # Errors
    /// `Timeout` when `bound` passes first, `Poisoned` when another rank failed first or left; in both cases the world is poisoned.
    pub fn wait(&self, doing: Doing, bound: Duration, mut poll: impl FnMut() -> Poll) -> Result<()> {
        self.set_doing(doing);
        let start = Instant::now();
        let mut num_polls = 0usize;
        loop {
            let Poll::Missing { peer, seen } = poll() else { return Ok(()) };
            self.check_alive()?;
            let failure = |kind, rank| {
                let Doing { op, phase, epoch } = doing;
                Failure { kind, op, phase, rank, peer: Rank(peer as u32), epoch, seen, blocks_arrived: 0 }
            };
            num_polls += 1;
            if num_polls <= NUM_SPINS {
                std::hint::spin_loop();
                continue;
            }
            if num_polls <= NUM_SPINS + NUM_YIELDS {
                std::thread::yield_now();
                continue;
            }
            if self.has_left(peer) {
                // It may have signalled and left between the poll and now.
                match poll() {
                    Poll::Missing { peer: still, .. } if still == peer => {
                        return Err(self.timed_out(failure(FailureKind::Left, Rank(peer as u32)), bound));
                    }
                    Poll::Missing { .. } => continue,
                    Poll::Ready => return Ok(()),
                }
            }
            if start.elapsed() >= bound {
                return Err(self.timed_out(failure(FailureKind::Timeout, self.rank()), bound));
            }
            let mut changed = || !matches!(poll(), Poll::Missing { peer: p, seen: s } if p == peer && s == seen);
            self.doorbell(self.rank().index()).park(NAP, || changed() || self.has_left(peer) || self.check_alive().is_err());
        }
    }
}

/// Scales a bound by the environment; see [`super::world::timeout_scale`].
pub(crate) fn scaled(bound: Duration, scale: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(bound.as_secs_f64() * scale)
        .map_err(|_| Error::invalid("ep config", "timeout", format!("{bound:?} x {scale}"), "a bound below 2^64 seconds"))
}
