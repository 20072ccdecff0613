//! The C interface: what `include/moe_kernels.h` declares. The header is made from this module by a trial, which also compares the committed one.
//!
//! The functions check every pointer for null, every handle for its kind, every number for its range, and let no panic cross. What C cannot say (how
//! long memory lives, that a handle is used by one thread at a time) is the caller's to keep, as the header says. From Rust use the modules that
//! this one calls.
#![allow(clippy::missing_safety_doc)] // the same for all of them: the rules at the head of the header
#![allow(rustdoc::broken_intra_doc_links)] // the texts are those of a C header, where [T] is a shape

mod calls;
mod cast;
mod ep;
mod gate;
mod handle;
mod tensor;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use calls::*;
pub use cast::*;
pub use ep::*;
pub use gate::*;
pub use tensor::*;

use crate::backend::{Backend, Cuda};
use crate::error::{Error, Result};
use crate::gpu::{Device, Stream};
use handle::{Handle, OP, Tagged, drop_handle, get_mut, give, handle};
use tensor::Place;

/// Nothing is wrong.
pub const MOE_OK: i32 = 0;
/// An argument is not acceptable; the message names it, what it was and what would have been accepted. Nothing was written.
pub const MOE_INVALID: i32 = 1;
/// Meaningful, but this build, backend or device cannot do it.
pub const MOE_UNSUPPORTED: i32 = 2;
/// A run-time library (the GPU's driver or compiler) was not found.
pub const MOE_LIBRARY: i32 = 3;
/// A function of the GPU's driver failed.
pub const MOE_GPU: i32 = 4;
/// A kernel could not be compiled.
pub const MOE_COMPILE: i32 = 5;
/// More memory is needed than is free.
pub const MOE_MEMORY: i32 = 6;
/// More tokens or rows than buffers hold. Every rank gets this, no rank wrote payload, the world stays usable.
pub const MOE_CAPACITY: i32 = 7;
/// Two ranks differ in configuration or made different calls.
pub const MOE_MISMATCH: i32 = 8;
/// A collective setup failed on one rank; every rank gets this.
pub const MOE_SETUP: i32 = 9;
/// The object, or the bank that the call would take, is in use.
pub const MOE_BUSY: i32 = 10;
/// A peer did not come within the bound. The world is poisoned until it is rebuilt.
pub const MOE_TIMEOUT: i32 = 11;
/// Another rank failed first; every rank reports the same first cause until the world is rebuilt.
pub const MOE_POISONED: i32 = 12;
/// A system call failed.
pub const MOE_IO: i32 = 13;
/// A file does not have the format that it should have.
pub const MOE_FORMAT: i32 = 14;
/// A defect of the library. What the call had been given is in no defined state.
pub const MOE_PANIC: i32 = 15;

fn status(error: &Error) -> i32 {
    match error {
        Error::Invalid { .. } => MOE_INVALID,
        Error::Unsupported { .. } => MOE_UNSUPPORTED,
        Error::Library { .. } => MOE_LIBRARY,
        Error::Gpu { .. } => MOE_GPU,
        Error::Compile { .. } => MOE_COMPILE,
        Error::Memory { .. } => MOE_MEMORY,
        Error::Capacity { .. } => MOE_CAPACITY,
        Error::Mismatch { .. } => MOE_MISMATCH,
        Error::Setup { .. } => MOE_SETUP,
        Error::Busy { .. } => MOE_BUSY,
        Error::Timeout { .. } => MOE_TIMEOUT,
        Error::Poisoned { .. } => MOE_POISONED,
        Error::Io { .. } => MOE_IO,
        Error::Format { .. } => MOE_FORMAT,
    }
}

thread_local! {
    /// What `moe_last_error` returns on this thread.
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

fn set_last_error(text: &str) {
    // A message has no zeros but those that an argument brought.
    LAST_ERROR.set(CString::new(text.replace('\0', " ")).unwrap_or_default());
}

/// Runs a call of C: its result as a status, its error as the thread's message; a panic ends here.
fn guard(call: impl FnOnce() -> Result<()>) -> i32 {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => MOE_OK,
        Ok(Err(error)) => {
            set_last_error(&error.to_string());
            status(&error)
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            set_last_error(&format!("a defect of the library: {}", text.unwrap_or("no message")));
            // What a panic carries may panic when it is dropped.
            std::mem::forget(panic);
            MOE_PANIC
        }
    }
}

/// The message of the last call on this thread that did not return `MOE_OK`; empty before the first. It stays until the next such call of the thread.
#[unsafe(no_mangle)]
pub extern "C" fn moe_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// The version of the library: major * 65536 + minor * 256 + patch.
#[unsafe(no_mangle)]
pub extern "C" fn moe_version() -> u32 {
    let number = |text: &str| text.parse().unwrap_or(0u32);
    number(env!("CARGO_PKG_VERSION_MAJOR")) << 16 | number(env!("CARGO_PKG_VERSION_MINOR")) << 8 | number(env!("CARGO_PKG_VERSION_PATCH"))
}

/// Where operations run: the CPU, or a GPU with the stream in which they are queued. Any number of threads may use one at a time.
pub struct MoeBackend(Tagged<Backend>);

handle!(MoeBackend, Backend, 1);

/// The CPU, with the best instructions of this machine and all of its cores. `*backend` is destroyed with `moe_backend_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_backend_cpu(backend: Option<&mut *mut MoeBackend>) -> i32 {
    guard(|| give(backend, "backend", Backend::cpu()))
}

/// A GPU and a stream of the caller on it. `device` is the ordinal of the CUDA driver. `stream` is a CUstream or cudaStream_t of the device's primary
/// context, or null for its default stream; it must live until the backend and all that was made with it are destroyed. Operations return when their work is
/// queued there; nothing waits for the GPU unless its text says so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_backend_cuda(device: u32, stream: *mut c_void, backend: Option<&mut *mut MoeBackend>) -> i32 {
    guard(|| {
        let device = Device::open(device)?;
        // SAFETY: the header requires a stream that outlives the backend; the driver checks that it is of this device.
        let stream = unsafe { Stream::external(&device, stream) }?;
        give(backend, "backend", Backend::Cuda(Cuda::on(stream)))
    })
}

/// Of a GPU: whether kernels of calls and worlds made with the backend from now on are launched programmatically: a kernel may then start while the one before it
/// in the stream still ends, and waits for it before it reads what may change. Not 0 for yes; a new backend does not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_backend_set_programmatic(backend: Option<&mut MoeBackend>, programmatic: i32) -> i32 {
    guard(|| match get_mut(backend)? {
        Backend::Cpu(_) => Err(Error::Unsupported { op: OP, what: "programmatic launch".into(), why: "a CPU launches nothing".into() }),
        Backend::Cuda(cuda) => {
            *cuda = cuda.clone().programmatic(programmatic != 0);
            Ok(())
        }
    })
}

/// Destroys a backend. Worlds and objects that were made with it stay as they are. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_backend_destroy(backend: Option<Box<MoeBackend>>) -> i32 {
    guard(|| drop_handle(backend))
}

impl Backend {
    /// Where tensors of a call on this backend are.
    fn place(&self) -> Place {
        match self {
            Backend::Cpu(_) => Place::Host,
            Backend::Cuda(cuda) => Place::Device(cuda.device().ordinal()),
        }
    }
}

/// A text of C.
///
/// # Safety
/// `text` is null or ends with a zero, and is not changed during the call.
unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::invalid(OP, what, "null", "a text"));
    }
    // SAFETY: not null; the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::invalid(OP, what, format!("{text:?}"), "UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the function returns a text that ends with a zero.
        unsafe { CStr::from_ptr(moe_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn no_panic_crosses() {
        assert_eq!(guard(|| panic!("{} apples", 3)), MOE_PANIC);
        assert_eq!(last(), "a defect of the library: 3 apples");
        assert_eq!(guard(|| Err(Error::invalid("op", "x", "a\0b", "c"))), MOE_INVALID);
        assert_eq!(last(), "op: x is a b, expected c");
        assert_eq!(guard(|| Ok(())), MOE_OK);
        assert_eq!(last(), "op: x is a b, expected c");
    }
}
