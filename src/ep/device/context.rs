//! One rank's end of an object on a GPU, as launches need it.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::layout::RankParameters;
use super::memory::{Bank, DeviceLayout};
use super::registry::{Settled, Waiting};
use super::tuning::{Launches, Tuning};
use crate::backend::Cuda;
use crate::ep::{Config, Layout, MAX_RANKS, Plan};
use crate::error::Result;
use crate::gpu::Device;
use crate::id::Rank;
use crate::ops::{combine, dispatch};

/// Every kernel that a call of an object may choose, loaded.
#[derive(Debug, Clone)]
pub(crate) struct ObjectKernels {
    pub dispatch: dispatch::gpu::Loaded,
    pub combine: combine::gpu::Loaded,
}

impl ObjectKernels {
    /// Compiles and loads all of them, several at a time. At setup, before the barrier after which ranks write to each other: a kernel that waits for a
    /// peer of the same context would hold up a load.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a tuning that no kernel can have; those of the compiler and the driver.
    pub fn load(device: &Device, c: &Config, p: &Plan, layout: &DeviceLayout, ranks_on_device: u32, tuning: Tuning) -> Result<Self> {
        tuning.check()?;
        Ok(ObjectKernels {
            dispatch: dispatch::gpu::Loaded::load(device, c, p, layout, ranks_on_device, tuning)?,
            combine: combine::gpu::Loaded::load(device, c, p, ranks_on_device, tuning)?,
        })
    }

    /// The grids whose blocks wait for peers, for the registry of the device.
    pub fn waiting(&self, device: &Device) -> Result<Vec<Waiting>> {
        let mut all = self.dispatch.waiting(device)?;
        all.extend(self.combine.waiting(device)?);
        Ok(all)
    }

    /// How a call of so many tokens is launched.
    pub fn launches(&self, num_tokens: u32) -> Launches {
        Launches { dispatch: self.dispatch.launches(num_tokens), combine: self.combine.launches(num_tokens) }
    }

    /// What the registry allows from now on: so many blocks of grids whose blocks wait, but for a phase whose geometry the caller has chosen.
    pub fn settle(&self, settled: Settled) {
        self.dispatch.settle(settled);
        self.combine.limit_waiting(settled.blocks);
    }
}

/// What [`Ctx`] is made of. Addresses are those of this rank's device.
pub(crate) struct Setup<'a> {
    pub cuda: Cuda,
    pub config: &'a Config,
    pub plan: &'a Plan,
    pub layout: DeviceLayout,
    pub kernels: ObjectKernels,
    pub rank: Rank,
    /// Symmetric memory of every rank, this one included.
    pub peers: &'a [u64],
    /// This rank's own memory, `layout.private.num_bytes` zeros and the tables of a map.
    pub private: u64,
    /// [`HostRecord`](super::layout::HostRecord), as the device knows it; zeroed.
    pub host_record: u64,
    /// Bound of every wait.
    pub timeout: Duration,
    /// Ranks of the world on this device, this one included.
    pub ranks_on_device: u32,
    /// All ranks of the world are threads of this process on this device.
    pub is_one_device: bool,
}

/// One rank's end of an object on a GPU: what every call's launches have in common. Making launches from it allocates nothing and waits for nothing.
#[derive(Debug)]
pub(crate) struct Ctx {
    /// Whose stream the launches are queued in, and whether programmatically. May be replaced by another stream of the same device.
    pub cuda: Cuda,
    pub layout: DeviceLayout,
    pub kernels: ObjectKernels,
    pub rank: u32,
    pub ranks_on_device: u32,
    pub num_sms: u32,
    pub in_flight: u32,
    pub max_tokens: u32,
    pub max_rows: u32,
    pub segment_align: u32,
    pub rows_per_expert: u32,
    pub scale_rows: u64,
    /// Local experts of this rank.
    pub num_local: u32,
    pub is_by_expert: bool,
    pub is_fixed: bool,
    pub expert_row_bytes: u64,
    private: u64,
    /// The end of every parameter struct, by bank.
    ranks: [RankParameters; 2],
}

impl Ctx {
    /// # Panics
    /// When there are not as many peers as ranks.
    pub fn new(setup: Setup<'_>) -> Self {
        let Setup { cuda, config: c, plan: p, layout, kernels, rank, peers, private, host_record, timeout, ranks_on_device, is_one_device } =
            setup;
        assert_eq!(peers.len(), p.world, "addresses of peers");
        let mut all = [0; MAX_RANKS];
        all[..p.world].copy_from_slice(peers);
        let if_map = |at: usize| if c.expert_map.is_some() { private + at as u64 } else { 0 };
        let ranks = [0, 1].map(|bank| RankParameters {
            timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            signals: layout.regions.signals as u64,
            state: private + layout.private.state as u64,
            host: host_record,
            owners: if_map(layout.private.owners),
            experts: if_map(layout.private.experts),
            first_expert: if_map(layout.private.first_expert),
            rank: rank.0,
            bank,
            is_one_device: is_one_device.into(),
            spare: 0,
            peers: all,
        });
        let (segment_align, is_fixed) = match c.layout {
            Layout::ByExpert { segment_align } => (segment_align as u32, false),
            Layout::ByToken => (1, false),
            Layout::ByExpertFixed { .. } => (1, true),
        };
        Ctx {
            num_sms: cuda.device().num_sms(),
            cuda,
            rank: rank.0,
            ranks_on_device: ranks_on_device.max(1),
            in_flight: c.in_flight as u32,
            // The plan has checked that all of these fit.
            max_tokens: c.max_tokens as u32,
            max_rows: p.max_rows as u32,
            segment_align,
            rows_per_expert: p.max_rows_per_expert as u32,
            scale_rows: p.scale_rows as u64,
            num_local: p.placement.num_local(rank) as u32,
            is_by_expert: c.layout.is_by_expert(),
            is_fixed,
            expert_row_bytes: p.expert_row_bytes as u64,
            private,
            ranks,
            layout,
            kernels,
        }
    }

    /// The end of a parameter struct for a bank below `in_flight`.
    pub fn me(&self, bank: u32) -> &RankParameters {
        &self.ranks[bank as usize & 1]
    }

    /// Offset of a region of a bank in every rank's memory.
    pub fn region(&self, bank: u32, region: usize) -> u64 {
        (bank as usize * self.layout.regions.bank_bytes + region) as u64
    }

    /// Address of a region of a bank in this rank's memory.
    pub fn own(&self, bank: u32, region: usize) -> u64 {
        self.me(bank).peers[self.rank as usize] + self.region(bank, region)
    }

    /// Address in this rank's own memory.
    pub fn private(&self, at: usize) -> u64 {
        self.private + at as u64
    }

    /// What describes the arrival of a bank, as offsets for [`private`](Self::private).
    pub fn bank(&self, bank: u32) -> Bank {
        self.layout.private.banks[bank as usize & 1]
    }
}
