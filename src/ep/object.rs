//! One rank's end of the buffers through which tokens travel.

use super::{Config, Plan, World};
use crate::error::Result;

/// One rank's end of the buffers through which tokens travel to experts and back: banks, signal words, epochs.
pub struct ExpertParallel {
    config: Config,
    plan: Plan,
}

impl ExpertParallel {
    /// Collective: every rank of the world calls it with an equal configuration. It fails on all ranks or on none.
    pub fn new(world: &World, config: Config) -> Result<Self> {
        let plan = config.plan(world.size())?;
        Ok(Self { config, plan })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The sizes that follow from it.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
