//! Device memory of every rank, mapped by all.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::ep::World;
use crate::ep::meeting::{Posted, values};
use crate::ep::world::Member;
use crate::error::{Error, Result};
use crate::gpu::{Device, Extent, Shareable};
use crate::name::Name;

impl Member {
    /// The memory of every rank, in the order of ranks, accessible for `device`, the one of this rank. Nobody has it before all have. Collective; fails
    /// on all ranks when one brings an error or cannot map another's memory.
    ///
    /// An allocation has one address in a process: threads get the same value, which gives each device access; a process maps what others made.
    pub fn exchange_device_memory(&self, op: Name, device: &Device, memory: Result<Arc<Shareable>>) -> Result<Vec<Arc<Shareable>>> {
        let reached = match self.is_among_threads() {
            true => self.memory_of_threads(op, memory)?.into_iter().map(|memory| memory.allow(device).map(|()| memory)).collect(),
            false => self.memory_of_processes(op, device, memory)?,
        };
        self.exchange(op, reached.as_ref().map(|_| ()).map_err(Clone::clone))?;
        reached
    }

    fn memory_of_threads(&self, op: Name, memory: Result<Arc<Shareable>>) -> Result<Vec<Arc<Shareable>>> {
        let posted = Posted { device_memory: memory.as_ref().ok().cloned(), ..Posted::new(op, memory.map(|_| ())) };
        let all = self.meet(posted)?;
        values::<()>(op, &all)?;
        Ok(all.into_iter().filter_map(|posted| posted.device_memory).collect())
    }

    /// The outer error is the same on all ranks, the inner one is this rank's.
    fn memory_of_processes(&self, op: Name, device: &Device, memory: Result<Arc<Shareable>>) -> Result<Result<Vec<Arc<Shareable>>>> {
        let exported = memory.and_then(|memory| memory.export().map(|file| (memory, file)));
        let (mine, extent, files) = match exported {
            Ok((memory, file)) => (Some(memory.clone()), Ok(memory.extent()), vec![Arc::new(file)]),
            Err(error) => (None, Err(error), Vec::new()),
        };
        let all = self.meet(Posted { files, ..Posted::new(op, extent) })?;
        let extents = values::<Extent>(op, &all)?;
        let map = |(rank, (posted, extent)): (usize, (Posted, Extent))| match (&mine, posted.files.first()) {
            (Some(mine), _) if rank == self.rank().index() => Ok(mine.clone()),
            (_, Some(file)) => Shareable::import(device, std::os::fd::AsFd::as_fd(&**file), &extent).map(Arc::new),
            _ => Err(Error::invalid(op, "collective call", "another operation on some rank", "the same on all ranks")),
        };
        Ok(all.into_iter().zip(extents).enumerate().map(map).collect())
    }
}

impl World {
    /// As the member's, for tests.
    #[doc(hidden)]
    pub fn exchange_device_memory(&self, op: Name, device: &Device, memory: Result<Arc<Shareable>>) -> Result<Vec<Arc<Shareable>>> {
        self.member().exchange_device_memory(op, device, memory)
    }
}
