//! The driver as another library of the process uses it: by its own handles.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;
use libtest_mimic::Failed;
use moe_kernels::gpu::{Device, Driver};

pub type Handle = *mut c_void;

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub smem_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const c_void,
    pub num_attributes: c_uint,
}

macro_rules! raw {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Functions by their symbols.
        pub struct Raw {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            _library: Library,
        }

        impl Raw {
            /// The driver that the crate found.
            pub fn open() -> Result<Self, Failed> {
                let path = Driver::get()?.path();
                // SAFETY: it is loaded already, so no initialiser runs.
                let library = unsafe { Library::new(path) }?;
                Ok(Raw {
                    $($name: {
                        // SAFETY: the type is that of the function in the vendor's header, by the symbol's name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(concat!($symbol, "\0")) };
                        *symbol?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

raw! {
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    context_create = "cuCtxCreate_v2"(*mut Handle, c_uint, c_int);
    context_destroy = "cuCtxDestroy_v2"(Handle);
    context_current = "cuCtxGetCurrent"(*mut Handle);
    context_push = "cuCtxPushCurrent_v2"(Handle);
    context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
    stream_create = "cuStreamCreate"(*mut Handle, c_uint);
    stream_query = "cuStreamQuery"(Handle);
    stream_destroy = "cuStreamDestroy_v2"(Handle);
    stream_synchronize = "cuStreamSynchronize"(Handle);
    allocate = "cuMemAlloc_v2"(*mut u64, usize);
    allocate_async = "cuMemAllocAsync"(*mut u64, usize, Handle);
    allocate_managed = "cuMemAllocManaged"(*mut u64, usize, c_uint);
    copy_to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
    free = "cuMemFree_v2"(u64);
    free_async = "cuMemFreeAsync"(u64, Handle);
    range_of = "cuMemGetAddressRange_v2"(*mut u64, *mut usize, u64);
    attribute_of = "cuPointerGetAttribute"(*mut c_void, c_int, u64);
    attributes_of = "cuPointerGetAttributes"(c_uint, *const c_int, *const *mut c_void, u64);
    module_load = "cuModuleLoadData"(*mut Handle, *const c_void);
    module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    function_set = "cuFuncSetAttribute"(Handle, c_int, c_int);
    launch = "cuLaunchKernelEx"(*const LaunchConfig, Handle, *const *const c_void, *const *const c_void);
}

/// A status as a result.
pub fn ok(call: &str, status: c_int) -> Result<(), Failed> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: status {status}").into()) }
}

impl Raw {
    /// The primary context of a device, retained once more, for the life of the process.
    pub fn primary(&self, device: &Device) -> Result<Handle, Failed> {
        let (mut number, mut context) = (0, std::ptr::null_mut());
        // SAFETY: the number outlives the call.
        ok("cuDeviceGet", unsafe { (self.device_get)(&mut number, device.ordinal() as c_int) })?;
        // SAFETY: the handle outlives the call.
        ok("cuDevicePrimaryCtxRetain", unsafe { (self.retain)(&mut context, number) })?;
        Ok(context)
    }

    /// The context that is current on this thread.
    pub fn current(&self) -> Result<Handle, Failed> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the handle outlives the call.
        ok("cuCtxGetCurrent", unsafe { (self.context_current)(&mut context) })?;
        Ok(context)
    }

    /// Runs `work` with a context current, as a thread of another library would have it.
    pub fn with_context<T>(&self, context: Handle, work: impl FnOnce() -> Result<T, Failed>) -> Result<T, Failed> {
        // SAFETY: the caller holds the context.
        ok("cuCtxPushCurrent", unsafe { (self.context_push)(context) })?;
        let result = work();
        let mut popped = std::ptr::null_mut();
        // SAFETY: the handle outlives the call; the push above is undone.
        ok("cuCtxPopCurrent", unsafe { (self.context_pop)(&mut popped) })?;
        super::same("the context that was current", popped, context)?;
        result
    }
}
