//! Where an operation's tensors must lie, and what a validator makes of them there.

use std::marker::PhantomData;

use crate::backend::{Cpu, Cuda};
use crate::error::{Error, Result};
use crate::tensor::{TensorView, TensorViewMut};

/// A memory in which an operation runs. A validator is written once, for every space.
pub(crate) trait Space {
    /// What is read: bytes, or an address.
    type Read<'a>: Copy + std::fmt::Debug;
    /// What is written.
    type Write<'a>: std::fmt::Debug;

    /// The memory under a view, from its first element on; an error that names `what` when it lies elsewhere.
    fn read<'a>(&self, op: &'static str, what: &str, view: TensorView<'a>) -> Result<Self::Read<'a>>;

    /// The memory under a view that is written, as long as its extent.
    fn write<'a>(&self, op: &'static str, what: &str, view: &'a mut TensorViewMut<'_>) -> Result<Self::Write<'a>>;

    /// Where it starts: vectors and bulk copies need aligned rows.
    fn address(memory: Self::Read<'_>) -> u64;

    /// The number that four bytes hold, when the host may look at them.
    fn number(memory: Self::Read<'_>) -> Option<u32>;
}

impl Space for Cpu {
    type Read<'a> = &'a [u8];
    type Write<'a> = &'a mut [u8];

    fn read<'a>(&self, op: &'static str, what: &str, view: TensorView<'a>) -> Result<&'a [u8]> {
        view.host(op, what)
    }

    fn write<'a>(&self, op: &'static str, what: &str, view: &'a mut TensorViewMut<'_>) -> Result<&'a mut [u8]> {
        let extent_bytes = view.layout().extent_bytes();
        Ok(&mut view.host_mut(op, what)?[..extent_bytes])
    }

    fn address(memory: &[u8]) -> u64 {
        memory.as_ptr().addr() as u64
    }

    fn number(memory: &[u8]) -> Option<u32> {
        memory.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
    }
}

/// An address of a device, valid as long as the view that it came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address<'a> {
    /// As the driver knows it; 0 only for a tensor without elements.
    pub(crate) address: u64,
    view: PhantomData<&'a ()>,
}

impl Space for Cuda {
    type Read<'a> = Address<'a>;
    type Write<'a> = Address<'a>;

    fn read<'a>(&self, op: &'static str, what: &str, view: TensorView<'a>) -> Result<Address<'a>> {
        self.locate(op, what, view.device(), view.layout().extent_bytes())
    }

    fn write<'a>(&self, op: &'static str, what: &str, view: &'a mut TensorViewMut<'_>) -> Result<Address<'a>> {
        self.locate(op, what, view.device(), view.layout().extent_bytes())
    }

    fn address(memory: Address<'_>) -> u64 {
        memory.address
    }

    fn number(_: Address<'_>) -> Option<u32> {
        None
    }
}

impl Cuda {
    fn locate<'a>(
        &self,
        op: &'static str,
        what: &str,
        found: Option<crate::tensor::DeviceAddress>,
        extent_bytes: usize,
    ) -> Result<Address<'a>> {
        let want = |here: u32| format!("in the memory of device {here} (the backend is cuda)");
        let here = self.device().ordinal();
        match found {
            None if extent_bytes == 0 => Ok(Address { address: 0, view: PhantomData }),
            None => Err(Error::invalid(op, what, "in host memory", want(here))),
            Some(found) if found.device != here && extent_bytes > 0 => {
                let got = format!("at address {:#x} of device {}", found.address, found.device);
                Err(Error::invalid(op, what, got, want(here)))
            }
            Some(found) => {
                if extent_bytes > 0 {
                    self.device().adopt(op, what, found.address)?;
                }
                Ok(Address { address: found.address, view: PhantomData })
            }
        }
    }
}
