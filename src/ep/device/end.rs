//! One rank's end on its GPU.
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Cuda;
use crate::ep::world::{Member, World};
use crate::ep::{Config, Plan};
use crate::error::Result;
use crate::gpu::Stream;
use crate::tensor::DeviceAddress;

#[derive(Debug)]
pub(crate) struct End {}

impl End {
    pub fn new(_: &World, _: &Cuda, _: &Config, _: &Plan, _: Result<Duration>) -> Result<Self> {
        todo!()
    }
    pub fn stream(&self) -> &Stream {
        todo!()
    }
    pub fn check(&self, _: &Arc<Member>, _: Duration) -> Result<()> {
        todo!()
    }
    pub fn address(&self, _: usize) -> DeviceAddress {
        todo!()
    }
    pub fn num_rows(&self, _: usize) -> DeviceAddress {
        todo!()
    }
    pub fn num_rows_per_expert(&self, _: usize) -> DeviceAddress {
        todo!()
    }
    pub fn segment_start(&self, _: usize) -> DeviceAddress {
        todo!()
    }
}
