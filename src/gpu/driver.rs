//! The driver's functions, found at run time.
//!
//! One table of what this crate calls. The names of its entries are neutral: HIP has the same calls under other symbols.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use super::library::{self, table};
use crate::error::{Error, Result};

/// A context, stream, event, module, function, graph or executable graph, as the driver hands it out.
pub(super) type Handle = *mut c_void;

/// One attribute of a launch (spec: `CUlaunchAttribute`, an identifier, padding to 8 bytes and a union of 64).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    pub(super) id: c_uint,
    pub(super) pad: u32,
    pub(super) value: [u32; 16],
}

/// A launch (spec: `CUlaunchConfig`).
#[repr(C)]
pub struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) smem_bytes: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) num_attributes: c_uint,
}

/// What an allocation is to be (spec: `CUmemAllocationProp`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryProperties {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location_kind: c_int,
    pub(super) location: c_int,
    pub(super) windows: *mut c_void,
    /// Compression, remote access, usage and padding.
    pub(super) flags: [u8; 8],
}

/// Who may access mapped memory, and how (spec: `CUmemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryAccess {
    pub(super) location_kind: c_int,
    pub(super) location: c_int,
    pub(super) access: c_int,
}

table! {
    /// Functions of the NVIDIA driver.
    Driver, failed {
        init = "cuInit"(flags: c_uint);
        driver_version = "cuDriverGetVersion"(version: *mut c_int);
        error_name = "cuGetErrorName"(code: c_int, name: *mut *const c_char);
        error_string = "cuGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device_get = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: c_int);
        device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: c_int);
        device_pci_bus_id = "cuDeviceGetPCIBusId"(id: *mut c_char, len: c_int, device: c_int);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: c_int);
        device_total_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
        device_can_access = "cuDeviceCanAccessPeer"(can: *mut c_int, device: c_int, peer: c_int);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
        context_current = "cuCtxGetCurrent"(context: *mut Handle);
        context_push = "cuCtxPushCurrent_v2"(context: Handle);
        context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
        context_synchronize = "cuCtxSynchronize"();
        stream_create = "cuStreamCreate"(stream: *mut Handle, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2"(stream: Handle);
        stream_synchronize = "cuStreamSynchronize"(stream: Handle);
        stream_query = "cuStreamQuery"(stream: Handle);
        stream_context = "cuStreamGetCtx"(stream: Handle, context: *mut Handle);
        stream_wait_event = "cuStreamWaitEvent"(stream: Handle, event: Handle, flags: c_uint);
        stream_is_capturing = "cuStreamIsCapturing"(stream: Handle, status: *mut c_int);
        stream_begin_capture = "cuStreamBeginCapture_v2"(stream: Handle, mode: c_int);
        stream_end_capture = "cuStreamEndCapture"(stream: Handle, graph: *mut Handle);
        event_create = "cuEventCreate"(event: *mut Handle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: Handle);
        event_record = "cuEventRecord"(event: Handle, stream: Handle);
        event_synchronize = "cuEventSynchronize"(event: Handle);
        event_elapsed = "cuEventElapsedTime"(milliseconds: *mut f32, start: Handle, end: Handle);
        memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        memory_alloc = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
        memory_free = "cuMemFree_v2"(address: u64);
        host_alloc = "cuMemHostAlloc"(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        host_free = "cuMemFreeHost"(pointer: *mut c_void);
        host_device_address = "cuMemHostGetDevicePointer_v2"(address: *mut u64, pointer: *mut c_void, flags: c_uint);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(to: u64, from: *const c_void, bytes: usize, stream: Handle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: u64, bytes: usize, stream: Handle);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: Handle);
        fill_bytes = "cuMemsetD8Async"(address: u64, byte: u8, bytes: usize, stream: Handle);
        memory_range = "cuMemGetAddressRange_v2"(start: *mut u64, bytes: *mut usize, address: u64);
        memory_granularity = "cuMemGetAllocationGranularity"(bytes: *mut usize, properties: *const MemoryProperties, option: c_int);
        memory_create = "cuMemCreate"(memory: *mut u64, bytes: usize, properties: *const MemoryProperties, flags: u64);
        memory_release = "cuMemRelease"(memory: u64);
        memory_retain = "cuMemRetainAllocationHandle"(memory: *mut u64, address: *mut c_void);
        memory_export = "cuMemExportToShareableHandle"(file: *mut c_void, memory: u64, kind: c_int, flags: u64);
        memory_import = "cuMemImportFromShareableHandle"(memory: *mut u64, file: *mut c_void, kind: c_int);
        address_reserve = "cuMemAddressReserve"(address: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: u64);
        address_free = "cuMemAddressFree"(address: u64, bytes: usize);
        memory_map = "cuMemMap"(address: u64, bytes: usize, offset: usize, memory: u64, flags: u64);
        memory_unmap = "cuMemUnmap"(address: u64, bytes: usize);
        memory_set_access = "cuMemSetAccess"(address: u64, bytes: usize, access: *const MemoryAccess, num: usize);
        pointer_attributes = "cuPointerGetAttributes"(num: c_uint, attributes: *const c_int, values: *const *mut c_void, address: u64);
        module_load = "cuModuleLoadData"(module: *mut Handle, image: *const c_void);
        module_unload = "cuModuleUnload"(module: Handle);
        module_function = "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
        function_attribute = "cuFuncGetAttribute"(value: *mut c_int, attribute: c_int, function: Handle);
        function_set_attribute = "cuFuncSetAttribute"(function: Handle, attribute: c_int, value: c_int);
        launch = "cuLaunchKernelEx"(config: *const LaunchConfig, function: Handle, parameters: *const *const c_void, extra: *const *const c_void);
        max_active_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(blocks: *mut c_int, function: Handle, threads: c_int, smem_bytes: usize);
        max_active_clusters = "cuOccupancyMaxActiveClusters"(clusters: *mut c_int, function: Handle, config: *const LaunchConfig);
        graph_instantiate = "cuGraphInstantiateWithFlags"(executable: *mut Handle, graph: Handle, flags: u64);
        graph_num_nodes = "cuGraphGetNodes"(graph: Handle, nodes: *mut Handle, num_nodes: *mut usize);
        graph_upload = "cuGraphUpload"(executable: Handle, stream: Handle);
        graph_launch = "cuGraphLaunch"(executable: Handle, stream: Handle);
        graph_destroy = "cuGraphDestroy"(graph: Handle);
        graph_executable_destroy = "cuGraphExecDestroy"(executable: Handle);
    }
}

impl Driver {
    /// The driver of this machine, loaded and initialised once.
    ///
    /// # Errors
    /// [`Error::Library`] with the places searched, or [`Error::Gpu`] when the driver finds no GPU.
    pub fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        let driver = DRIVER.get_or_init(|| {
            let driver = library::open("libcuda.so.1 (NVIDIA driver)", candidates(), Driver::fill)?;
            // SAFETY: 0 is the only flag that this function knows.
            unsafe { driver.init(0) }?;
            Ok(driver)
        });
        driver.as_ref().map_err(Clone::clone)
    }

    /// The newest CUDA version that this driver runs, as (major, minor).
    pub fn version(&self) -> Result<(u32, u32)> {
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        unsafe { self.driver_version(&mut version) }?;
        // 13000 is 13.0 (spec: cuDriverGetVersion).
        Ok((version as u32 / 1000, version as u32 % 1000 / 10))
    }

    /// The driver's own sentence about a status code.
    pub fn describe(&self, code: i32) -> String {
        let mut text = std::ptr::null();
        // SAFETY: `text` outlives the call; the driver's texts are static.
        match unsafe { self.error_string(code, &mut text) } {
            // SAFETY: a string of the driver that ends with 0 and is never freed.
            Ok(()) if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            _ => format!("status {code}"),
        }
    }
}

/// Turns a status into an error that names the call.
fn failed(driver: &Driver, call: &'static str, code: i32) -> Error {
    let mut name = std::ptr::null();
    // The call that finds no name must not ask for the name of that.
    let named = if call == "cuGetErrorName" {
        false
    } else {
        // SAFETY: `name` outlives the call, which only reads the driver's table of names.
        unsafe { driver.error_name(code, &mut name) }.is_ok()
    };
    let name = if named && !name.is_null() {
        // SAFETY: a string of the driver that ends with 0 and is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown".into()
    };
    Error::Gpu { call, code, name }
}

/// Where the driver's library may lie: the loader's path, then where containers and WSL put it.
fn candidates() -> Vec<PathBuf> {
    let folders = ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
    let names = ["libcuda.so.1", "libcuda.so"].map(PathBuf::from);
    names.into_iter().chain(folders.map(|folder| PathBuf::from(folder).join("libcuda.so.1"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_header() {
        // Spec: cuda.h of 13.0.
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!((size_of::<MemoryProperties>(), size_of::<MemoryAccess>()), (32, 12));
        assert_eq!(std::mem::offset_of!(MemoryProperties, flags), 24);
    }
}
