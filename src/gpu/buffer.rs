//! Device memory and pinned host memory.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use super::device::Device;
use super::known;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::tensor::{DeviceAddress, Layout, TensorView, TensorViewMut};

const OP: &str = "buffer";

/// Device memory that is freed when this is dropped. Freeing waits for the work of the device, so no kernel can still use it.
///
/// What it holds is ordered by streams, not by borrows: copies and fills take `&self`.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    address: u64,
    len: usize,
}

impl Buffer {
    /// Allocates `len` bytes, aligned to 256 (spec: the driver's allocations). Nothing for 0.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has less left, [`Error::Gpu`] from the driver.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let mut address = 0;
        if len > 0 {
            let bound = device.bind()?;
            // SAFETY: `address` outlives the call; the context is current.
            let result = unsafe { device.driver().memory_alloc(&mut address, len) };
            drop(bound);
            match result {
                // Spec: CUDA_ERROR_OUT_OF_MEMORY.
                Err(Error::Gpu { code: 2, .. }) => {
                    let have_bytes = device.memory().map_or(0, |(free, _)| free);
                    let (what, change) = (format!("a buffer on {device:?}"), "free device memory or ask for less".into());
                    return Err(Error::Memory { what, need_bytes: len as u64, have_bytes, change });
                }
                other => other?,
            }
        }
        Ok(Buffer { device: device.clone(), address, len })
    }

    /// Allocates as many bytes as `bytes` has, and copies them.
    pub fn from_bytes(stream: &Stream, bytes: &[u8]) -> Result<Self> {
        let buffer = Buffer::new(stream.device(), bytes.len())?;
        buffer.upload(stream, 0, bytes)?;
        Ok(buffer)
    }

    /// Where it starts.
    pub fn address(&self) -> DeviceAddress {
        DeviceAddress { device: self.device.ordinal(), address: self.address }
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// `true` for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn range(&self, at: usize, len: usize) -> Result<u64> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + at as u64),
            _ => Err(self.not_within(at, len)),
        }
    }

    #[cold]
    fn not_within(&self, at: usize, len: usize) -> Error {
        Error::invalid(OP, "range", format!("{len} bytes from {at}"), format!("within {} bytes", self.len))
    }

    /// Copies `bytes` to `at`, after the work that the stream holds, and waits.
    pub fn upload(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<()> {
        let to = self.range(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        // A copy of pageable memory that waits for the stream inside the driver keeps other threads out of it, so also those that this work waits for.
        stream.synchronize()?;
        let bound = self.device.bind()?;
        // SAFETY: the range lies in this allocation; `bytes` is borrowed until the stream is synchronised below.
        unsafe { self.device.driver().copy_to_device(to, bytes.as_ptr().cast(), bytes.len(), stream.raw()) }?;
        drop(bound);
        stream.synchronize()
    }

    /// Copies from `at` to `bytes`, after the work that the stream holds, and waits.
    pub fn download(&self, stream: &Stream, at: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.range(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        stream.synchronize()?; // as in `upload`
        let bound = self.device.bind()?;
        // SAFETY: the range lies in this allocation; `bytes` is borrowed until the stream is synchronised below.
        unsafe { self.device.driver().copy_to_host(bytes.as_mut_ptr().cast(), from, bytes.len(), stream.raw()) }?;
        drop(bound);
        stream.synchronize()
    }

    /// Queues a copy of `len` bytes from another buffer of the device.
    pub fn copy_from(&self, stream: &Stream, at: usize, from: &Buffer, from_at: usize, len: usize) -> Result<()> {
        let (to, from) = (self.range(at, len)?, from.range(from_at, len)?);
        let _bound = self.device.bind()?;
        // SAFETY: both ranges lie in their allocations, which wait for the device's work when they are freed.
        unsafe { self.device.driver().copy_on_device(to, from, len, stream.raw()) }
    }

    /// Queues a fill of `len` bytes from `at`.
    pub fn fill(&self, stream: &Stream, at: usize, len: usize, byte: u8) -> Result<()> {
        let address = self.range(at, len)?;
        if len == 0 {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: the range lies in this allocation.
        unsafe { self.device.driver().fill_bytes(address, byte, len, stream.raw()) }
    }

    /// A tensor in this buffer, its first element at byte `at`.
    #[inline]
    pub fn view(&self, at: usize, layout: Layout) -> Result<TensorView<'_>> {
        let address = DeviceAddress { device: self.device.ordinal(), address: self.range(at, layout.extent_bytes())? };
        // SAFETY: the extent lies in this allocation, which waits for the device's work when it is freed.
        unsafe { TensorView::from_device(address, layout) }
    }

    /// A tensor in a part of this buffer that the caller has for itself.
    pub(crate) fn part_mut(&self, at: usize, layout: Layout) -> Result<TensorViewMut<'_>> {
        let address = DeviceAddress { device: self.device.ordinal(), address: self.range(at, layout.extent_bytes())? };
        // SAFETY: as in `view`.
        unsafe { TensorViewMut::from_device(address, layout) }
    }

    /// A tensor in this buffer that an operation writes.
    #[inline]
    pub fn view_mut(&mut self, at: usize, layout: Layout) -> Result<TensorViewMut<'_>> {
        self.part_mut(at, layout)
    }

    /// Several tensors in this buffer, each behind the one before.
    ///
    /// # Errors
    /// [`Error::Invalid`] when one starts before the end of the one before it, or ends behind the buffer.
    pub fn views_mut(&mut self, tensors: &[(usize, Layout)]) -> Result<Vec<TensorViewMut<'_>>> {
        let mut end = 0;
        let mut views = Vec::with_capacity(tensors.len());
        for &(at, layout) in tensors {
            if at < end {
                return Err(Error::invalid(
                    OP,
                    "tensors",
                    format!("one at byte {at}"),
                    format!("none before byte {end}, the end of the one before"),
                ));
            }
            let address = DeviceAddress { device: self.device.ordinal(), address: self.range(at, layout.extent_bytes())? };
            end = at + layout.extent_bytes();
            // SAFETY: as in `view`; no two of the extents overlap.
            views.push(unsafe { TensorViewMut::from_device(address, layout) }?);
        }
        Ok(views)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.address != 0
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: allocated by `new`, and this is its only owner. A failure leaves nothing to do.
            let _ = unsafe { self.device.driver().memory_free(self.address) };
            known::forget();
        }
    }
}

/// Page-locked host memory that a GPU can reach; zeroed.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    pointer: *mut c_void,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` bytes, at least one.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::invalid(OP, "len", 0, "at least 1 byte of pinned memory"));
        }
        let mut pointer = std::ptr::null_mut();
        let _bound = device.bind()?;
        // SAFETY: `pointer` outlives the call; 3 is PORTABLE | DEVICEMAP.
        unsafe { device.driver().host_alloc(&mut pointer, len, 3) }?;
        // SAFETY: the driver just gave these `len` bytes to us.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len) };
        Ok(Pinned { device: device.clone(), pointer, len })
    }

    /// The bytes. The caller has waited for the work that writes them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes, initialised by `new`, freed only when this is dropped.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.len) }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.len) }
    }

    /// The word of 64 bits at byte `at`, which a kernel may be writing.
    ///
    /// # Panics
    /// When the word does not lie in the memory, or `at` is no multiple of 8.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "word at {at} of {}", self.len);
        // SAFETY: inside the memory, aligned (the memory is to a page), and any bits are a number.
        unsafe { AtomicU64::from_ptr(self.pointer.cast::<u8>().add(at).cast()) }
    }

    /// The address by which the device reaches it.
    pub fn device_address(&self) -> Result<u64> {
        let mut address = 0;
        let _bound = self.device.bind()?;
        // SAFETY: `address` outlives the call; the memory was allocated with DEVICEMAP.
        unsafe { self.device.driver().host_device_address(&mut address, self.pointer, 0) }?;
        Ok(address)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: allocated by `new`, and this is its only owner. A failure leaves nothing to do.
            let _ = unsafe { self.device.driver().host_free(self.pointer) };
        }
    }
}
