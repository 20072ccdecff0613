//! Streams and events.

use std::fmt;
use std::sync::Arc;

use super::device::Device;
use super::driver::Handle;
use crate::error::{Error, Result};
use crate::tensor::{DeviceAddress, TensorView, TensorViewMut};

/// A queue of work on a GPU: our own, or one that the caller made. Cheap to clone.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    device: Device,
    raw: Handle,
    owner: Owner,
}

/// Who destroys a stream.
enum Owner {
    /// This, with its last clone.
    Ours,
    /// The caller, who has promised that it outlives this.
    Caller,
    /// A value of another library, kept alive here.
    #[cfg_attr(not(feature = "cudarc"), expect(dead_code, reason = "made by adapters only"))]
    Kept { _owner: Arc<dyn std::any::Any + Send + Sync> },
}

// SAFETY: a stream may be used from any thread (spec: CUDA driver API, thread safety).
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream that does not wait for the legacy default stream.
    pub fn new(device: &Device) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let _bound = device.bind()?;
        // SAFETY: `raw` outlives the call; 1 is CU_STREAM_NON_BLOCKING.
        unsafe { device.driver().stream_create(&mut raw, 1) }?;
        Ok(Stream(Arc::new(Inner { device: device.clone(), raw, owner: Owner::Ours })))
    }

    /// A stream of the caller, or a null pointer for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is of another context than the device's primary one.
    ///
    /// # Safety
    /// `raw` is a stream, and it lives as long as this and its clones.
    pub unsafe fn external(device: &Device, raw: *mut std::ffi::c_void) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::of_owner(device, raw, Owner::Caller) }
    }

    /// As [`external`](Self::external), of a value that destroys the stream when it is dropped and is therefore kept.
    ///
    /// # Safety
    /// `raw` is a stream, and it lives as long as `owner`.
    #[cfg(feature = "cudarc")]
    pub(super) unsafe fn kept(device: &Device, raw: *mut std::ffi::c_void, owner: Arc<dyn std::any::Any + Send + Sync>) -> Result<Self> {
        // SAFETY: the caller's promise; the owner goes with the stream.
        unsafe { Self::of_owner(device, raw, Owner::Kept { _owner: owner }) }
    }

    /// # Safety
    /// `raw` is a stream, and it lives as long as `owner` says.
    unsafe fn of_owner(device: &Device, raw: *mut std::ffi::c_void, owner: Owner) -> Result<Self> {
        let mut context = std::ptr::null_mut();
        let bound = device.bind()?;
        // SAFETY: the caller's promise; the device's context is current, to which the default streams belong.
        unsafe { device.driver().stream_context(raw, &mut context) }?;
        drop(bound);
        if context != device.context() {
            let want = format!("a stream of the primary context of device {}", device.ordinal());
            return Err(Error::invalid("stream", "raw", "a stream of another context", want));
        }
        Ok(Stream(Arc::new(Inner { device: device.clone(), raw, owner })))
    }

    /// The device whose work it queues.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver's handle.
    pub fn raw(&self) -> *mut std::ffi::c_void {
        self.0.raw
    }

    /// Waits until all work queued so far is done.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.device().bind()?;
        // SAFETY: the stream is alive.
        unsafe { self.device().driver().stream_synchronize(self.raw()) }
    }

    /// `true` when no work is left.
    pub fn is_idle(&self) -> Result<bool> {
        let _bound = self.device().bind()?;
        // SAFETY: the stream is alive.
        match unsafe { self.device().driver().stream_query(self.raw()) } {
            Ok(()) => Ok(true),
            Err(Error::Gpu { code: 600, .. }) => Ok(false), // spec: CUDA_ERROR_NOT_READY
            Err(error) => Err(error),
        }
    }

    /// `true` while its work is recorded into a graph instead of being run.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = 0;
        let _bound = self.device().bind()?;
        // SAFETY: `status` outlives the call; the stream is alive.
        unsafe { self.device().driver().stream_is_capturing(self.raw(), &mut status) }?;
        Ok(status != 0)
    }

    /// The bytes under a view of device memory, when the work queued so far is done; waits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a view of host memory or of another device.
    pub fn read(&self, view: &TensorView<'_>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; view.layout().extent_bytes()];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let from = self.of_this_device("read", view.device())?;
        // A copy of pageable memory that waits for the stream inside the driver keeps other threads out of it, so also those that this work waits for.
        self.synchronize()?;
        let bound = self.device().bind()?;
        // SAFETY: the view covers these bytes of the device; `bytes` is borrowed until the stream is synchronised below.
        unsafe { self.device().driver().copy_to_host(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw()) }?;
        drop(bound);
        self.synchronize()?;
        Ok(bytes)
    }

    /// Copies `bytes`, as many as the view covers, to device memory, after the work queued so far; waits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a view of host memory or of another device, and for another number of bytes.
    pub fn write(&self, view: &mut TensorViewMut<'_>, bytes: &[u8]) -> Result<()> {
        let len = view.layout().extent_bytes();
        if bytes.len() != len {
            return Err(Error::invalid("write", "bytes", bytes.len(), len));
        }
        if len == 0 {
            return Ok(());
        }
        let to = self.of_this_device("write", view.device())?;
        self.synchronize()?; // as in `read`
        let bound = self.device().bind()?;
        // SAFETY: the view covers these bytes of the device; `bytes` is borrowed until the stream is synchronised below.
        unsafe { self.device().driver().copy_to_device(to, bytes.as_ptr().cast(), len, self.raw()) }?;
        drop(bound);
        self.synchronize()
    }

    fn of_this_device(&self, op: &'static str, at: Option<DeviceAddress>) -> Result<u64> {
        let want = format!("in the memory of device {}", self.device().ordinal());
        match at {
            Some(at) if at.device == self.device().ordinal() => Ok(at.address),
            Some(at) => Err(Error::invalid(op, "view", format!("on device {}", at.device), want)),
            None => Err(Error::invalid(op, "view", "in host memory", want)),
        }
    }

    /// Work queued from now on starts after the event.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let _bound = self.device().bind()?;
        // SAFETY: stream and event are alive.
        unsafe { self.device().driver().stream_wait_event(self.raw(), event.raw, 0) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Ours)
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: made by `new`, and this is its last owner. Work in flight goes on; a failure leaves nothing to do.
            let _ = unsafe { self.device.driver().stream_destroy(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:?} of {:?}", self.raw(), self.device())
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: Handle,
}

// SAFETY: an event may be used from any thread (spec: CUDA driver API, thread safety).
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that was never recorded.
    pub fn new(device: &Device) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let _bound = device.bind()?;
        // SAFETY: `raw` outlives the call; 0 asks for an event with a time.
        unsafe { device.driver().event_create(&mut raw, 0) }?;
        Ok(Event { device: device.clone(), raw })
    }

    /// Marks this point of the stream.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: event and stream are alive.
        unsafe { self.device.driver().event_record(self.raw, stream.raw()) }
    }

    /// Waits until the point has been reached.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive.
        unsafe { self.device.driver().event_synchronize(self.raw) }
    }

    /// Seconds from `earlier` to this; both must have been reached.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let mut milliseconds = 0.0;
        let _bound = self.device.bind()?;
        // SAFETY: both events are alive, and the number outlives the call.
        unsafe { self.device.driver().event_elapsed(&mut milliseconds, earlier.raw, self.raw) }?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: made by `new`, and this is its only owner. A failure leaves nothing to do.
            let _ = unsafe { self.device.driver().event_destroy(self.raw) };
        }
    }
}
