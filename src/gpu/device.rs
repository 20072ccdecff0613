//! GPUs and their primary contexts.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::{Arc, Mutex};

use super::driver::{Driver, Handle};
use super::known;
use crate::error::{Error, Result};
use crate::tensor::DeviceAddress;

/// A GPU with its primary context: the one that every other library of the process uses too.
///
/// Cheap to clone. The context is kept until the process ends, as kernels are.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    driver: &'static Driver,
    ordinal: u32,
    context: Handle,
    properties: Properties,
}

// SAFETY: a context may be used by any thread that makes it current (spec: CUDA driver API, thread safety); the rest is plain data.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a launch or a report needs to know of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Properties {
    /// The vendor's name, for example `NVIDIA H200`.
    pub name: String,
    /// Identifier of the board, as tools print it.
    pub uuid: String,
    /// Address on the bus.
    pub pci_bus_id: String,
    /// Compute capability: (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Most threads of a block.
    pub max_threads_per_block: u32,
    /// Most threads that one SM holds.
    pub max_threads_per_sm: u32,
    /// Most blocks that one SM holds.
    pub max_blocks_per_sm: u32,
    /// 32-bit registers of one SM.
    pub registers_per_sm: u32,
    /// Most shared memory of a block, with the opt-in.
    pub max_smem_bytes: u32,
    /// Shared memory of an SM.
    pub smem_bytes_per_sm: u32,
    /// Shared memory of each block that the driver keeps for itself.
    pub reserved_smem_bytes: u32,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// Device memory.
    pub memory_bytes: u64,
    /// Threads of a warp.
    pub warp_size: u32,
    /// Whether grids whose blocks wait for each other can be launched.
    pub cooperative_launch: bool,
}

impl Device {
    /// Number of GPUs that the driver shows to this process.
    pub fn count() -> Result<u32> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        unsafe { Driver::get()?.device_count(&mut count) }?;
        Ok(count as u32)
    }

    /// The GPU with this ordinal. The second call for the same one gives the same context.
    ///
    /// # Errors
    /// [`Error::Library`] without a driver, [`Error::Invalid`] for an ordinal that no GPU has, [`Error::Gpu`] from the driver.
    pub fn open(ordinal: u32) -> Result<Self> {
        static OPEN: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        let driver = Driver::get()?;
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(device) = open.iter().find(|device| device.ordinal() == ordinal) {
            return Ok(device.clone());
        }
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::invalid("device", "ordinal", ordinal, format!("below {count}, the number of GPUs")));
        }
        let mut device = 0;
        // SAFETY: `device` outlives the call; the ordinal is that of a GPU.
        unsafe { driver.device_get(&mut device, ordinal as i32) }?;
        let properties = Properties::read(driver, device)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call. It is never released: kernels and streams of the process live in it.
        unsafe { driver.primary_context_retain(&mut context, device) }?;
        let device = Device(Arc::new(Inner { driver, ordinal, context, properties }));
        open.push(device.clone());
        Ok(device)
    }

    /// The ordinal that it was opened with.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Name, sizes and limits.
    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Multiprocessors.
    pub fn num_sms(&self) -> u32 {
        self.0.properties.num_sms
    }

    /// Compute capability, (9, 0) for Hopper.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.0.properties.compute_capability
    }

    /// Free and total bytes of device memory now.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        let _bound = self.bind()?;
        // SAFETY: both numbers outlive the call; the context is current.
        unsafe { self.driver().memory_info(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    /// Waits for all work of the context.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the context is current.
        unsafe { self.driver().context_synchronize() }
    }

    /// Checks a raw address: that it is memory of this device.
    ///
    /// An allocation is looked up once on each thread and then known, until a [`Buffer`](super::Buffer) is freed or another takes its place: the
    /// driver needs 70 ns to look one up, a known one costs 6 (measured, Xeon beside an H200). Whoever passes an address in memory that another
    /// library has freed has broken the promise of the view; that is not always found.
    ///
    /// # Errors
    /// [`Error::Invalid`] names `what` for host memory (pinned too), memory of another device, and addresses that are no memory.
    pub fn adopt(&self, op: &'static str, what: &str, address: u64) -> Result<DeviceAddress> {
        let adopted = DeviceAddress { device: self.ordinal(), address };
        if known::contains(adopted) {
            return Ok(adopted);
        }
        // Spec: CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START_ADDR, _RANGE_SIZE; CU_MEMORYTYPE_HOST is 1, DEVICE 2.
        const ATTRIBUTES: [i32; 4] = [2, 9, 11, 12];
        let (mut memory_type, mut ordinal, mut start, mut bytes) = (0u32, -1i32, 0u64, 0usize);
        let values = [(&raw mut memory_type).cast(), (&raw mut ordinal).cast(), (&raw mut start).cast(), (&raw mut bytes).cast()];
        let num_freed = known::num_freed();
        let _bound = self.bind()?;
        // SAFETY: each value has the size of its attribute and outlives the call; the address is only looked up, never read.
        unsafe { self.driver().pointer_attributes(ATTRIBUTES.len() as u32, ATTRIBUTES.as_ptr(), values.as_ptr(), address) }?;
        let got = match memory_type {
            2 if ordinal == self.ordinal() as i32 => {
                known::add(adopted, start, bytes as u64, num_freed);
                return Ok(adopted);
            }
            2 => format!("memory of device {ordinal}"),
            1 => "pinned host memory".into(),
            _ => "host memory or no memory".into(),
        };
        Err(Error::invalid(op, what, format!("at {address:#x}, {got}"), format!("memory of device {}", self.ordinal())))
    }

    /// The address by which this device reaches pinned host memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] names `what` for memory that is not pinned.
    pub(crate) fn reach_host(&self, op: &'static str, what: &str, memory: *const u8) -> Result<u64> {
        // Spec: CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_POINTER; CU_MEMORYTYPE_HOST is 1.
        const ATTRIBUTES: [i32; 2] = [2, 3];
        let (mut memory_type, mut address) = (0u32, 0u64);
        let values = [(&raw mut memory_type).cast(), (&raw mut address).cast()];
        let _bound = self.bind()?;
        // SAFETY: each value has the size of its attribute and outlives the call; the pointer is only looked up, never read.
        unsafe { self.driver().pointer_attributes(2, ATTRIBUTES.as_ptr(), values.as_ptr(), memory.addr() as u64) }?;
        match memory_type {
            1 if address != 0 => Ok(address),
            _ => Err(Error::invalid(op, what, format!("host memory at {memory:p} that is not pinned"), "pinned host memory (gpu::Pinned)")),
        }
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    pub(super) fn context(&self) -> Handle {
        self.0.context
    }

    /// Makes the primary context current on this thread until the guard is dropped; does nothing when it is.
    pub(super) fn bind(&self) -> Result<Bound> {
        let driver = self.driver();
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` outlives the call.
        unsafe { driver.context_current(&mut current) }?;
        let is_pushed = current != self.context();
        if is_pushed {
            // SAFETY: the context is retained for the life of the process.
            unsafe { driver.context_push(self.context()) }?;
        }
        Ok(Bound { driver, is_pushed, not_send: std::marker::PhantomData })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({})", self.ordinal(), self.properties().name)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

/// The context is current while this lives; the caller's own context comes back afterwards.
pub(super) struct Bound {
    driver: &'static Driver,
    is_pushed: bool,
    /// What is current belongs to a thread.
    not_send: std::marker::PhantomData<*mut ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = self.not_send;
        if self.is_pushed {
            let mut context = std::ptr::null_mut();
            // SAFETY: the push of `bind` on this thread is undone. Nothing can be done about a failure here.
            let _ = unsafe { self.driver.context_pop(&mut context) };
        }
    }
}

fn attribute_of(driver: &Driver, device: i32, attribute: i32) -> Result<i32> {
    let mut value = 0;
    // SAFETY: `value` outlives the call.
    unsafe { driver.device_attribute(&mut value, attribute, device) }?;
    Ok(value)
}

impl Properties {
    fn read(driver: &Driver, device: i32) -> Result<Self> {
        let number = |attribute| attribute_of(driver, device, attribute).map(|value| value as u32);
        let mut name = [0 as c_char; 128]; // arbitrary: no GPU's name is that long
        // SAFETY: the driver writes at most the length that it is given, with a 0 at the end.
        unsafe { driver.device_name(name.as_mut_ptr(), name.len() as i32, device) }?;
        let mut pci_bus_id = [0 as c_char; 32]; // spec: at least 13
        // SAFETY: as above.
        unsafe { driver.device_pci_bus_id(pci_bus_id.as_mut_ptr(), pci_bus_id.len() as i32, device) }?;
        let mut uuid = [0u8; 16];
        // SAFETY: the array has the size of an identifier and outlives the call.
        unsafe { driver.device_uuid(&mut uuid, device) }?;
        let mut memory_bytes = 0;
        // SAFETY: the number outlives the call.
        unsafe { driver.device_total_memory(&mut memory_bytes, device) }?;
        // SAFETY: the driver ended the string within the array.
        let text = |chars: &[c_char]| unsafe { CStr::from_ptr(chars.as_ptr()) }.to_string_lossy().into_owned();
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        // Numbers of CUdevice_attribute (spec: cuda.h).
        Ok(Properties {
            name: text(&name),
            uuid: ["GPU", &hex(&uuid[..4]), &hex(&uuid[4..6]), &hex(&uuid[6..8]), &hex(&uuid[8..10]), &hex(&uuid[10..])].join("-"),
            pci_bus_id: text(&pci_bus_id),
            compute_capability: (number(75)?, number(76)?),
            num_sms: number(16)?,
            max_threads_per_block: number(1)?,
            max_threads_per_sm: number(39)?,
            max_blocks_per_sm: number(106)?,
            registers_per_sm: number(82)?,
            max_smem_bytes: number(97)?,
            smem_bytes_per_sm: number(81)?,
            reserved_smem_bytes: number(111)?,
            l2_bytes: u64::from(number(38)?),
            memory_bytes: memory_bytes as u64,
            warp_size: number(10)?,
            cooperative_launch: number(95)? != 0,
        })
    }
}
