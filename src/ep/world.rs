//! Worlds of ranks: threads of one process.

use crate::backend::Backend;
use crate::error::Result;
use crate::id::Rank;

/// One rank's membership of a world.
pub struct World {
    rank: Rank,
    size: usize,
}

impl World {
    /// The memberships of a world of `size` ranks in this process, to be moved to a thread each. Every rank works on `backend`.
    pub fn threads(backend: &Backend, size: usize) -> Result<Vec<World>> {
        let _ = backend;
        Ok((0..size).map(|r| World { rank: Rank(r as u32), size }).collect())
    }

    /// Runs `work` on a thread for each of `size` ranks and returns their results in the order of ranks. A panic of a rank is
    /// `Err(Error::Poisoned)` in its place.
    pub fn run<R: Send>(backend: &Backend, size: usize, work: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<Result<R>>> {
        let _ = (backend, size, work);
        todo!()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }
}
