//! Device memory that other processes and other devices can use.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::device::Device;
use super::driver::{MemoryAccess, MemoryProperties};
use super::known;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceAddress, Layout, TensorView, TensorViewMut};

const OP: &str = "shareable memory";

// Spec (cuda.h): CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
// CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
const PINNED: c_int = 1;
const FILE: c_int = 1;
const ON_DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;
/// What an address of the caller must be a multiple of (derived: as every allocation of the driver).
const ALIGN: u64 = 256;

/// Device memory that can be exported as a file and mapped by other processes; other devices of this process get access with
/// [`allow`](Self::allow).
///
/// **Dropping it does not wait for kernels** (measured: a mapping goes away while a kernel runs; a kernel that then touches it faults). Whoever queued
/// work that uses the memory keeps this until that work is done. The bytes themselves live until the last process that mapped them has dropped its
/// own: a peer that is late never writes into memory of somebody else.
///
/// Memory of `cuMemAllocAsync`'s default pool and of `cuMemAlloc` cannot be exported; this is made by the driver's virtual memory functions.
#[derive(Debug)]
pub struct Shareable {
    device: Device,
    /// The driver's handle of the allocation.
    memory: u64,
    /// Where the allocation is mapped.
    start: u64,
    allocation_bytes: usize,
    /// Our part of it.
    offset: usize,
    len: usize,
    state: State,
    origin: Origin,
    /// Ordinals of devices that may access it, beside its own.
    allowed: Mutex<Vec<u32>>,
}

/// How far a mapping has come, and so what is undone when it is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The caller's mapping; we hold the allocation.
    Callers,
    /// We hold the allocation.
    Created,
    /// And a range of addresses.
    Reserved,
    /// And the allocation is mapped there.
    Mapped,
}

/// Where an allocation came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Here,
    Imported,
}

/// What another process must know of exported memory, beside the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    allocation_bytes: usize,
    offset: usize,
    len: usize,
    /// The device whose memory it is, for messages.
    device: String,
}

impl Extent {
    /// Bytes that are shared.
    pub fn len(&self) -> usize {
        self.len
    }

    /// `true` for none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

fn name(device: &Device) -> String {
    format!("device {} at {}", device.ordinal(), device.properties().pci_bus_id)
}

fn location(device: &Device) -> MemoryProperties {
    MemoryProperties {
        kind: PINNED,
        handle_types: FILE,
        location_kind: ON_DEVICE,
        location: device.ordinal() as c_int,
        windows: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

impl Shareable {
    /// `len` zeros on `device`, aligned to the driver's pages (2 MiB on today's GPUs).
    ///
    /// # Errors
    /// [`Error::Invalid`] for no bytes, [`Error::Memory`] when the device has less left, [`Error::Unsupported`] when its memory cannot be exported,
    /// [`Error::Gpu`] from the driver.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        let too_much = || {
            let have_bytes = device.memory().map_or(0, |(free, _)| free);
            let (what, change) = (format!("shareable memory on {device:?}"), "free device memory or ask for less".into());
            Error::Memory { what, need_bytes: len as u64, have_bytes, change }
        };
        if len == 0 {
            return Err(Error::invalid(OP, "len", 0, "at least 1 byte"));
        }
        let driver = device.driver();
        let bound = device.bind()?;
        let properties = location(device);
        let mut page = 0;
        // SAFETY: the number and the properties outlive the call; 0 asks for the smallest granularity.
        unsafe { driver.memory_granularity(&mut page, &properties, 0) }.map_err(|error| unsupported(device, error))?;
        // No machine has that much, and the driver must not see a size that wraps around.
        let allocation_bytes =
            len.checked_next_multiple_of(page.max(1)).filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(too_much)?;
        let mut memory = 0;
        // SAFETY: the handle and the properties outlive the call.
        match unsafe { driver.memory_create(&mut memory, allocation_bytes, &properties, 0) } {
            Err(Error::Gpu { code: 2, .. }) => return Err(too_much()), // spec: CUDA_ERROR_OUT_OF_MEMORY
            result => result.map_err(|error| unsupported(device, error))?,
        }
        let mut shareable = Self::of(device, memory, Origin::Here, allocation_bytes, 0, len);
        shareable.map()?;
        shareable.open_to(device)?;
        drop(bound);
        shareable.clear()?;
        Ok(shareable)
    }

    /// Maps memory of another process (or once more of this one) for `device`, from the file that [`export`](Self::export) gave there. The file may be
    /// closed afterwards.
    ///
    /// # Errors
    /// [`Error::Unsupported`] that names both devices when `device` has no access to the other's memory, [`Error::Gpu`] from the driver, for a file that
    /// is no such memory too.
    pub fn import(device: &Device, file: BorrowedFd<'_>, extent: &Extent) -> Result<Self> {
        let Extent { allocation_bytes, offset, len, .. } = *extent;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > allocation_bytes) {
            let got = format!("{len} bytes from {offset} of an allocation of {allocation_bytes}");
            return Err(Error::invalid(OP, "extent", got, "bytes within the allocation"));
        }
        let mut memory = 0;
        let _bound = device.bind()?;
        let file = file.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the handle outlives the call; the file is open, and the driver does not keep it.
        unsafe { device.driver().memory_import(&mut memory, file, FILE) }?;
        let mut shareable = Self::of(device, memory, Origin::Imported, allocation_bytes, offset, len);
        shareable.map()?;
        shareable.open_to(device).map_err(|error| no_access(device, &extent.device, error))?;
        Ok(shareable)
    }

    /// Memory of the caller: `len` bytes at `address`, as they are. They must lie in one allocation of the driver's virtual memory functions
    /// (`cuMemCreate`, or a memory pool) that can be exported as a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other memory, memory of another device, a range that ends behind the allocation, and an address that is no multiple of
    /// 256.
    ///
    /// # Safety
    /// The memory stays mapped at `address` while this lives, and work that uses it through this; meanwhile nobody writes to it otherwise.
    pub unsafe fn adopt(device: &Device, address: u64, len: usize) -> Result<Self> {
        let what = format!("the memory at {address:#x}");
        if len == 0 || !address.is_multiple_of(ALIGN) {
            let got = format!("{len} bytes at {address:#x}");
            return Err(Error::invalid(OP, "the caller's memory", got, format!("at least 1 byte at a multiple of {ALIGN}")));
        }
        device.adopt(OP, &what, address)?;
        // Spec: CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES.
        const ALLOWED_TYPES: c_int = 14;
        let driver = device.driver();
        let _bound = device.bind()?;
        let (mut types, mut start, mut allocation_bytes, mut memory) = (0u64, 0, 0, 0);
        let values = [(&raw mut types).cast()];
        // SAFETY: the value is as large as any attribute of this kind and outlives the call; the address is only looked up.
        unsafe { driver.pointer_attributes(1, &ALLOWED_TYPES, values.as_ptr(), address) }?;
        let want = "memory of cuMemCreate, or of a pool, that was asked for as exportable to a file";
        if types & FILE as u64 == 0 {
            return Err(Error::invalid(OP, what, "memory that cannot be exported", want));
        }
        // SAFETY: both numbers outlive the call; the address is only looked up.
        unsafe { driver.memory_range(&mut start, &mut allocation_bytes, address) }?;
        let offset = (address - start) as usize;
        if allocation_bytes - offset < len {
            let got = format!("{} bytes up to the end of its allocation", allocation_bytes - offset);
            return Err(Error::invalid(OP, what, got, format!("at least {len}")));
        }
        // SAFETY: the handle outlives the call; the address is only looked up.
        let retained = unsafe { driver.memory_retain(&mut memory, address as *mut c_void) };
        retained.map_err(|error| Error::invalid(OP, what, format!("memory without an allocation of its own ({error})"), want))?;
        let mut shareable = Self::of(device, memory, Origin::Here, allocation_bytes, offset, len);
        (shareable.start, shareable.state) = (start, State::Callers);
        Ok(shareable)
    }

    fn of(device: &Device, memory: u64, origin: Origin, allocation_bytes: usize, offset: usize, len: usize) -> Self {
        let allowed = Mutex::new(Vec::new());
        Shareable { device: device.clone(), memory, start: 0, allocation_bytes, offset, len, state: State::Created, origin, allowed }
    }

    /// Finds addresses for the allocation and maps it there.
    fn map(&mut self) -> Result<()> {
        let driver = self.device.driver();
        // SAFETY: the address outlives the call; 0 leaves alignment and place to the driver.
        unsafe { driver.address_reserve(&mut self.start, self.allocation_bytes, 0, 0, 0) }?;
        self.state = State::Reserved;
        // SAFETY: the range was just reserved for as many bytes as the allocation has.
        unsafe { driver.memory_map(self.start, self.allocation_bytes, 0, self.memory, 0) }?;
        self.state = State::Mapped;
        Ok(())
    }

    /// Gives a device access to the whole mapping.
    fn open_to(&self, device: &Device) -> Result<()> {
        let access = MemoryAccess { location_kind: ON_DEVICE, location: device.ordinal() as c_int, access: READ_WRITE };
        // SAFETY: the range is mapped, and the description outlives the call.
        unsafe { device.driver().memory_set_access(self.start, self.allocation_bytes, &access, 1) }
    }

    /// Fills it with zeros, and waits.
    ///
    /// # Errors
    /// [`Error::Gpu`] from the driver.
    pub fn clear(&self) -> Result<()> {
        self.fill(self.len, 0)
    }

    /// Fills the first `len` bytes, and waits.
    pub(crate) fn fill(&self, len: usize, byte: u8) -> Result<()> {
        let to = self.range(0, len)?.address;
        if len == 0 {
            return Ok(());
        }
        let stream = Stream::new(&self.device)?;
        let bound = self.device.bind()?;
        // SAFETY: the range lies in the mapping, which lives as long as self: the stream is waited for below.
        unsafe { self.device.driver().fill_bytes(to, byte, len, stream.raw()) }?;
        drop(bound);
        stream.synchronize()
    }

    /// A file by which another process can [`import`](Self::import) it, with its [`extent`](Self::extent). Each open file keeps the memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] for memory that was imported: the driver exports it from where it was made alone. [`Error::Gpu`] from the driver,
    /// [`Error::Io`] when this process has too many open files.
    pub fn export(&self) -> Result<OwnedFd> {
        if self.origin == Origin::Imported {
            return Err(Error::invalid(OP, "the memory to export", "memory that was imported", "memory that was made here"));
        }
        let mut file: c_int = -1;
        let bound = self.device.bind()?;
        // SAFETY: the number outlives the call; the allocation was made to be exported as a file.
        unsafe { self.device.driver().memory_export((&raw mut file).cast(), self.memory, FILE, 0) }?;
        drop(bound);
        // SAFETY: the driver just opened this file for us.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let io = |error: rustix::io::Errno| Error::Io { what: "exporting device memory".into(), why: error.to_string() };
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC).map_err(io)?;
        Ok(file)
    }

    /// What goes with the file.
    pub fn extent(&self) -> Extent {
        Extent { allocation_bytes: self.allocation_bytes, offset: self.offset, len: self.len, device: name(&self.device) }
    }

    /// Gives another device of this process access at the same address. Nothing to do for its own, or a second time.
    ///
    /// # Errors
    /// [`Error::Unsupported`] that names both devices when there is no access from one to the other, [`Error::Gpu`] from the driver.
    pub fn allow(&self, device: &Device) -> Result<()> {
        let mut allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        let ordinal = device.ordinal();
        if ordinal == self.device.ordinal() || allowed.contains(&ordinal) {
            return Ok(());
        }
        let mut can = 0;
        let _bound = device.bind()?;
        // SAFETY: the number outlives the call; both are ordinals of devices, which are the driver's numbers for them.
        unsafe { device.driver().device_can_access(&mut can, ordinal as c_int, self.device.ordinal() as c_int) }?;
        if can == 0 {
            let why = "the driver reports no access from one to the other";
            return Err(Error::Unsupported { op: OP, what: access(device, &name(&self.device)), why: why.into() });
        }
        self.open_to(device).map_err(|error| no_access(device, &name(&self.device), error))?;
        allowed.push(ordinal);
        Ok(())
    }

    /// Where it is, on every device that may access it in this process.
    pub fn address(&self) -> DeviceAddress {
        DeviceAddress { device: self.device.ordinal(), address: self.start + self.offset as u64 }
    }

    /// A copy of `len` bytes from `at` on, after the work that the stream holds; waits.
    pub(crate) fn read(&self, stream: &Stream, at: usize, len: usize) -> Result<Vec<u8>> {
        let layout = Layout::contiguous(OP, DType::Bytes, &[len])?;
        // SAFETY: the range was checked, and the mapping lives as long as self: the stream is waited for.
        stream.read(&unsafe { TensorView::from_device(self.range(at, len)?, layout) }?)
    }

    /// Copies `bytes` to `at`, after the work that the stream holds; waits.
    pub(crate) fn write(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<()> {
        let layout = Layout::contiguous(OP, DType::Bytes, &[bytes.len()])?;
        // SAFETY: as in `read`.
        stream.write(&mut unsafe { TensorViewMut::from_device(self.range(at, bytes.len())?, layout) }?, bytes)
    }

    /// Queues a copy of `len` bytes from another such memory, of this or of another device. The stream's device may access both.
    ///
    /// # Safety
    /// Both memories live until the stream has done this.
    pub(crate) unsafe fn copy_from(&self, stream: &Stream, at: usize, from: &Shareable, from_at: usize, len: usize) -> Result<()> {
        let (to, from) = (self.range(at, len)?.address, from.range(from_at, len)?.address);
        let device = stream.device();
        let _bound = device.bind()?;
        // SAFETY: both ranges lie in their mappings, which outlive the copy (the caller's promise); an address is the same on all devices.
        unsafe { device.driver().copy_on_device(to, from, len, stream.raw()) }
    }

    fn range(&self, at: usize, len: usize) -> Result<DeviceAddress> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(DeviceAddress { address: self.address().address + at as u64, ..self.address() }),
            _ => Err(Error::invalid(OP, "range", format!("{len} bytes from {at}"), format!("within {} bytes", self.len))),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// `false`: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory it is; of imported memory, the device that it was mapped for.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

fn access(device: &Device, owner: &str) -> String {
    format!("access from {} to memory of {owner}", name(device))
}

/// The driver's refusal of an access, with both devices; what is wrong with this device alone stays as it is.
fn no_access(device: &Device, owner: &str, error: Error) -> Error {
    match error {
        // Spec: CUDA_ERROR_INVALID_VALUE, INVALID_DEVICE, PEER_ACCESS_UNSUPPORTED, NOT_SUPPORTED.
        Error::Gpu { code: 1 | 101 | 217 | 801, .. } => Error::Unsupported { op: OP, what: access(device, owner), why: error.to_string() },
        other => other,
    }
}

fn unsupported(device: &Device, error: Error) -> Error {
    match error {
        // Spec: CUDA_ERROR_INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED.
        Error::Gpu { code: 101 | 800 | 801, .. } => {
            Error::Unsupported { op: OP, what: format!("exportable memory on {device:?}"), why: error.to_string() }
        }
        other => other,
    }
}

impl Drop for Shareable {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        let driver = self.device.driver();
        // Each step undoes one of the mapping, last first. A failure leaves nothing to do.
        if self.state == State::Mapped {
            // SAFETY: mapped by `map` with these bytes; no work that uses it is left (promised by whoever queued it).
            let _ = unsafe { driver.memory_unmap(self.start, self.allocation_bytes) };
            known::forget();
        }
        // SAFETY: the handle is this value's alone. Other mappings of the allocation keep its bytes.
        let _ = unsafe { driver.memory_release(self.memory) };
        if matches!(self.state, State::Reserved | State::Mapped) {
            // SAFETY: reserved by `map` with these bytes, and nothing is mapped there any more.
            let _ = unsafe { driver.address_free(self.start, self.allocation_bytes) };
        }
    }
}
