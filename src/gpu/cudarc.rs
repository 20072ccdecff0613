//! Slices and streams of the crate [cudarc](::cudarc) as tensors and streams of this one, without a copy.
//!
//! With the feature `cudarc`. It chooses neither a CUDA version nor how cudarc links: the program that uses both does, as candle does.
//!
//! A [`Reading`] or [`Writing`] tells cudarc what an operation does with a slice, as cudarc's own calls do: the stream waits for what other streams
//! of cudarc still do with it, and when the guard is dropped cudarc notes that this stream has used it.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use moe_kernels::gpu::cudarc::{Reading, Writing, backend};
//! use moe_kernels::ops::gate::{self, GateOptions};
//!
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! let x = stream.clone_htod(&vec![1.0f32; 8 * 2048])?;
//! let w = stream.clone_htod(&vec![1.0f32; 2048])?;
//! let mut out = stream.alloc_zeros::<f32>(8)?;
//!
//! let backend = backend(&stream)?;
//! {
//!     // SAFETY: the operation runs in `stream`, which is the backend's.
//!     let x = unsafe { Reading::new(&x, &stream, &[8, 2048]) }?;
//!     // SAFETY: as above.
//!     let w = unsafe { Reading::new(&w, &stream, &[2048]) }?;
//!     // SAFETY: as above.
//!     let mut out = unsafe { Writing::new(&mut out, &stream, &[8]) }?;
//!     gate::gate(&backend, x.view(), w.view(), &GateOptions::default(), out.view())?;
//! }
//! let values = stream.clone_dtoh(&out)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;

use ::cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::{Device, Stream};
use crate::backend::{Backend, Cuda};
use crate::error::{Error, Result};
use crate::tensor::{DeviceAddress, Element, Layout, TensorView, TensorViewMut};

const OP: &str = "cudarc";

/// The device of a context of cudarc.
///
/// # Errors
/// [`Error::Invalid`] names `what` when it is not the primary context of its device: this crate works in that one. Those of [`Device::open`].
fn device_of(context: &Arc<CudaContext>, what: &str) -> Result<Device> {
    let device = Device::open(context.ordinal() as u32)?;
    if context.cu_ctx().cast() != device.context() {
        return Err(Error::invalid(OP, what, "of another context", format!("of the primary context of device {}", device.ordinal())));
    }
    Ok(device)
}

/// A stream of cudarc, which lives as long as the result and its clones.
///
/// # Errors
/// [`Error::Invalid`] when it is of another context than its device's primary one. Those of [`Device::open`].
pub fn stream(stream: &Arc<CudaStream>) -> Result<Stream> {
    let device = device_of(stream.context(), "stream")?;
    // SAFETY: the handle is alive as long as the stream of cudarc, which is kept.
    unsafe { Stream::kept(&device, stream.cu_stream().cast(), Arc::clone(stream) as Arc<_>) }
}

/// The backend that queues its work in a stream of cudarc.
///
/// # Errors
/// Those of [`stream`].
pub fn backend(stream: &Arc<CudaStream>) -> Result<Backend> {
    Ok(Backend::Cuda(Cuda::on(self::stream(stream)?)))
}

/// Checks that `len` elements of `size` bytes of `owner` can be used in `stream` as a tensor of this layout; gives the device's ordinal.
fn check(owner: &Arc<CudaStream>, stream: &CudaStream, num_bytes: usize, layout: &Layout) -> Result<u32> {
    let device = device_of(stream.context(), "stream")?;
    if owner.context().cu_ctx() != stream.context().cu_ctx() {
        let (got, want) = (owner.context().ordinal(), device.ordinal());
        return Err(Error::invalid(
            OP,
            "slice",
            format!("of another context, on device {got}"),
            format!("of that of the stream, on device {want}"),
        ));
    }
    let need = layout.extent_bytes();
    if num_bytes < need {
        return Err(Error::invalid(OP, "slice", format!("{num_bytes} bytes"), format!("at least {need} for {layout:?}")));
    }
    Ok(device.ordinal())
}

/// A slice of cudarc that operations read: a `CudaSlice`, a `CudaView` or a `CudaViewMut`.
#[derive(Debug)]
pub struct Reading<'a> {
    view: TensorView<'a>,
    /// Dropped when the reads are queued.
    _used: SyncOnDrop<'a>,
}

impl<'a> Reading<'a> {
    /// A contiguous tensor at the start of a slice.
    ///
    /// # Errors
    /// Those of [`Reading::strided`].
    ///
    /// # Safety
    /// Operations that get the view run in `stream`.
    pub unsafe fn new<T: Element>(slice: &'a impl DevicePtr<T>, stream: &'a CudaStream, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous(OP, T::DTYPE, shape)?;
        // SAFETY: the caller's promise.
        unsafe { Self::strided(slice, stream, layout) }
    }

    /// A tensor of any layout and element type at the start of a slice, for example fp8 in a slice of bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] names `stream` when it is not of its device's primary context, and `slice` when it is of another context than the stream, when
    /// it holds too few bytes or when it begins at an address that is no multiple of the element's size.
    ///
    /// # Safety
    /// Operations that get the view run in `stream`.
    pub unsafe fn strided<T>(slice: &'a impl DevicePtr<T>, stream: &'a CudaStream, layout: Layout) -> Result<Self> {
        let device = check(slice.stream(), stream, slice.num_bytes(), &layout)?;
        let (address, used) = slice.device_ptr(stream);
        // SAFETY: the slice is borrowed as long as the view and holds the layout's extent; cudarc frees it after what its stream was told here.
        let view = unsafe { TensorView::from_device(DeviceAddress { device, address }, layout) }?;
        Ok(Reading { view, _used: used })
    }

    /// The tensor.
    pub fn view(&self) -> TensorView<'_> {
        self.view
    }
}

/// A slice of cudarc that operations write: a `CudaSlice` or a `CudaViewMut`.
#[derive(Debug)]
pub struct Writing<'a> {
    view: TensorViewMut<'a>,
    /// Dropped when the writes are queued.
    _used: SyncOnDrop<'a>,
}

impl<'a> Writing<'a> {
    /// A contiguous tensor at the start of a slice.
    ///
    /// # Errors
    /// Those of [`Reading::strided`].
    ///
    /// # Safety
    /// Operations that get the view run in `stream`.
    pub unsafe fn new<T: Element>(slice: &'a mut impl DevicePtrMut<T>, stream: &'a CudaStream, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous(OP, T::DTYPE, shape)?;
        // SAFETY: the caller's promise.
        unsafe { Self::strided(slice, stream, layout) }
    }

    /// A tensor of any layout and element type at the start of a slice.
    ///
    /// # Errors
    /// Those of [`Reading::strided`].
    ///
    /// # Safety
    /// Operations that get the view run in `stream`.
    pub unsafe fn strided<T>(slice: &'a mut impl DevicePtrMut<T>, stream: &'a CudaStream, layout: Layout) -> Result<Self> {
        let device = check(slice.stream(), stream, slice.num_bytes(), &layout)?;
        let (address, used) = slice.device_ptr_mut(stream);
        // SAFETY: the slice is borrowed alone as long as the view and holds the layout's extent; cudarc frees it after what its stream was told here.
        let view = unsafe { TensorViewMut::from_device(DeviceAddress { device, address }, layout) }?;
        Ok(Writing { view, _used: used })
    }

    /// The tensor.
    pub fn view(&mut self) -> TensorViewMut<'_> {
        self.view.reborrow()
    }
}
