//! GPUs: the driver's functions found at run time, memory, streams, graphs, and kernels compiled at run time.
//!
//! Nothing here is needed to build or to use the CPU backend. The parts:
//!
//! | part | what it is |
//! |---|---|
//! | [`Driver`], [`Nvrtc`] | typed tables of the vendor's functions; absence is [`Error::Library`](crate::Error::Library) with the places searched |
//! | [`Device`] | a GPU and its primary context |
//! | [`Stream`], [`Event`], [`Graph`] | ours, or the caller's |
//! | [`Buffer`], [`Pinned`] | memory; a caller's own memory is an address |
//! | [`Shareable`], [`Extent`] | memory that other processes and devices use |
//! | [`Program`], [`Spec`] | a kernel as text and constants |
//! | [`Kernels`], [`jit`] | compiled, cached in memory and on disk, loaded |
//! | [`Kernel`], [`Geometry`] | a launch |
//! | [`Blas`], [`Product`] | matrix products of cuBLASLt |
//! | `cudarc` | with the feature of that name: slices and streams of the crate cudarc |
//! | [`inspect`] | registers, spills and sizes of every kernel on every architecture, without a GPU |
//!
//! # Contexts
//!
//! Everything runs in the primary context of a device, which every other library of the process uses too. Each call makes it current and brings
//! back what was current before, so it does not matter on which thread it is made; where it is current already, that costs 12 ns instead of
//! 55 (measured, Xeon beside an H200).
//!
//! # Errors
//!
//! A refused call, a launch that the driver does not take, a kernel that does not compile and an error inside a capture leave the stream usable. A
//! kernel that reaches memory that is not there ends the context: every later call of this process fails with the same
//! [`Error::Gpu`](crate::Error::Gpu).
//!
//! # Environment
//!
//! | variable | what it names |
//! |---|---|
//! | `MOE_NVRTC` | the run-time compiler, a file or its folder; else it is searched for ([`Nvrtc::get`]) |
//! | `MOE_CACHE_DIR` | the folder of compiled kernels; else `moe-kernels` in `XDG_CACHE_HOME` or in `~/.cache` |

mod blas;
mod buffer;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod device;
mod driver;
mod graph;
pub mod inspect;
pub mod jit;
mod known;
mod launch;
mod library;
mod nvrtc;
mod places;
pub mod plain;
pub mod plain_cast;
mod program;
mod shareable;
mod stream;

pub use blas::{Blas, CublasLt, Product};
pub use buffer::{Buffer, Pinned};
pub use device::{Device, Properties};
pub use driver::Driver;
pub use graph::Graph;
pub use jit::Kernels;
pub use launch::{Geometry, Kernel, Resources};
pub use nvrtc::Nvrtc;
pub use program::{Carveout, Constant, Program, Source, Spec, Targets};
pub use shareable::{Extent, Shareable};
pub use stream::{Event, Stream};
