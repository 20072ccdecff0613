//! The data path of Mixture-of-Experts layers.

pub mod backend;
pub mod capi;
pub mod check;
pub mod cpu;
pub mod ep;
pub mod error;
pub mod gpu;
pub mod id;
pub mod layer;
pub mod measure;
mod name;
pub mod ops;
pub mod oracle;
pub mod random;
pub mod routing;
mod space;
pub mod tensor;

pub use backend::{Backend, Cpu, Cuda};
pub use error::{Error, Result};
pub use id::{Expert, Rank, Slot, Token};
pub use tensor::{DType, DeviceAddress, TensorView, TensorViewMut};

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
