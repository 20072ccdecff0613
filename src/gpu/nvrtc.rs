//! NVRTC, the run-time compiler: where it is found, and one compilation.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use super::driver::Driver;
use super::library::{self, table};
use super::places::{Places, ToolkitLibrary};
use crate::error::{Error, Result};

table! {
    /// Functions of NVRTC.
    Nvrtc, failed {
        version_of = "nvrtcVersion"(major: *mut c_int, minor: *mut c_int);
        num_supported = "nvrtcGetNumSupportedArchs"(num: *mut c_int);
        supported = "nvrtcGetSupportedArchs"(archs: *mut c_int);
        create = "nvrtcCreateProgram"(program: *mut *mut c_void, text: *const c_char, name: *const c_char, num_headers: c_int, headers: *const *const c_char, names: *const *const c_char);
        destroy = "nvrtcDestroyProgram"(program: *mut *mut c_void);
        compile_program = "nvrtcCompileProgram"(program: *mut c_void, num_options: c_int, options: *const *const c_char);
        log_size = "nvrtcGetProgramLogSize"(program: *mut c_void, bytes: *mut usize);
        log = "nvrtcGetProgramLog"(program: *mut c_void, text: *mut c_char);
        cubin_size = "nvrtcGetCUBINSize"(program: *mut c_void, bytes: *mut usize);
        cubin = "nvrtcGetCUBIN"(program: *mut c_void, image: *mut c_char);
    }
}

/// Options of every compilation: results are the same bits everywhere, so no contraction, no flushing, exact division and root.
pub(super) const OPTIONS: [&str; 6] =
    ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--ptxas-options=-v"];

const LIBRARY: ToolkitLibrary = ToolkitLibrary {
    variable: "MOE_NVRTC",
    names: ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    packages: ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
};

impl Nvrtc {
    /// The compiler of this machine, found once.
    ///
    /// `MOE_NVRTC` names a file or a folder and is then the only place. Else: the loader's path, `CUDA_HOME` and `CUDA_PATH`, the usual toolkit
    /// folders, and the Python packages `nvidia-cuda-nvrtc` and their like.
    ///
    /// # Errors
    /// [`Error::Library`] with the places searched, and why what was found there was refused.
    pub fn get() -> Result<&'static Nvrtc> {
        static NVRTC: OnceLock<Result<Nvrtc>> = OnceLock::new();
        let nvrtc = NVRTC.get_or_init(|| {
            // Without a driver (a compile gate) any version will do.
            let newest = Driver::get().and_then(Driver::version).ok();
            library::open("libnvrtc (CUDA run-time compiler)", LIBRARY.candidates(&Places::of_this_machine()), |library, path| {
                let nvrtc = Nvrtc::fill(library, path)?;
                let (major, minor) = nvrtc.version().map_err(|error| error.to_string())?;
                match newest {
                    Some((driver, _)) if major > driver => Err(format!("is {major}.{minor}, newer than the driver's CUDA {driver}")),
                    _ => {
                        load_builtins(path, major, minor)?;
                        Ok(nvrtc)
                    }
                }
            })
        });
        nvrtc.as_ref().map_err(Clone::clone)
    }

    /// (major, minor).
    pub fn version(&self) -> Result<(u32, u32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers outlive the call.
        unsafe { self.version_of(&mut major, &mut minor) }?;
        Ok((major as u32, minor as u32))
    }

    /// Numbers of the architectures it knows: 90 is sm_90.
    pub fn architectures(&self) -> Result<Vec<u32>> {
        let mut num = 0;
        // SAFETY: the number outlives the call.
        unsafe { self.num_supported(&mut num) }?;
        let mut archs = vec![0; num as usize];
        // SAFETY: the list has the length that the library asked for.
        unsafe { self.supported(archs.as_mut_ptr()) }?;
        Ok(archs.into_iter().map(|arch| arch as u32).collect())
    }

    /// Machine code and log of one translation unit.
    ///
    /// # Errors
    /// [`Error::Compile`] with the whole log.
    pub(super) fn compile(&self, kernel: &str, text: &str, arch: &str) -> Result<(Vec<u8>, String)> {
        let c_string = |what: &str, text: &str| {
            CString::new(text).map_err(|_| Error::invalid("compile", what.to_owned(), "a text with a zero byte", "a text without"))
        };
        let (text, name) = (c_string("source", text)?, c_string("name", &format!("{kernel}.cu"))?);
        let arch = format!("--gpu-architecture={arch}");
        // Spec (NVRTC 12.9): from then on it has a cache of its own, and what comes from there has no report of registers in its log.
        let own_cache = (self.version()? >= (12, 9)).then_some("--no-cache");
        let options = OPTIONS.iter().copied().chain(own_cache).chain([arch.as_str()]);
        let options = options.map(|option| c_string("option", option)).collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let none = std::ptr::null();
        let mut program = Unit { nvrtc: self, raw: std::ptr::null_mut() };
        // SAFETY: both strings outlive the program; there are no headers.
        unsafe { self.create(&mut program.raw, text.as_ptr(), name.as_ptr(), 0, none, none) }?;
        // SAFETY: the program is alive, and so are the options.
        let compiled = unsafe { self.compile_program(program.raw, options.len() as c_int, options.as_ptr()) };
        let log = program.text()?;
        if let Err(error) = compiled {
            let log = if log.trim().is_empty() { error.to_string() } else { log };
            return Err(Error::Compile { kernel: kernel.into(), log });
        }
        let mut bytes = 0;
        // SAFETY: the number outlives the call.
        unsafe { self.cubin_size(program.raw, &mut bytes) }?;
        let mut image = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the library asked for.
        unsafe { self.cubin(program.raw, image.as_mut_ptr().cast()) }?;
        Ok((image, log))
    }
}

/// Loads the library that NVRTC opens by its bare name when it compiles. In a folder that the loader does not search, as those of Python packages
/// are, it would not find the one beside it; one that is loaded already is found by name.
fn load_builtins(nvrtc: &Path, major: u32, minor: u32) -> Result<(), String> {
    let Some(folder) = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return Ok(()) };
    let path = folder.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
    match library::keep(&path) {
        Err(why) if path.exists() => Err(format!("cannot use {}: {why}", path.display())),
        // Not beside it: the loader may know it.
        _ => Ok(()),
    }
}

/// A program of the library, destroyed at the end.
struct Unit<'a> {
    nvrtc: &'a Nvrtc,
    raw: *mut c_void,
}

impl Unit<'_> {
    fn text(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the number outlives the call.
        unsafe { self.nvrtc.log_size(self.raw, &mut bytes) }?;
        let mut text = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the buffer has the size that the library asked for.
            unsafe { self.nvrtc.log(self.raw, text.as_mut_ptr().cast()) }?;
        }
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }
}

impl Drop for Unit<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created above, and this is its only owner. A failure leaves nothing to do.
            let _ = unsafe { self.nvrtc.destroy(&mut self.raw) };
        }
    }
}

/// Turns a status into an error that names the call.
fn failed(_: &Nvrtc, call: &'static str, code: i32) -> Error {
    // Spec: nvrtcResult.
    let names = [
        "NVRTC_SUCCESS",
        "NVRTC_ERROR_OUT_OF_MEMORY",
        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "NVRTC_ERROR_INVALID_INPUT",
        "NVRTC_ERROR_INVALID_PROGRAM",
        "NVRTC_ERROR_INVALID_OPTION",
        "NVRTC_ERROR_COMPILATION",
        "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    ];
    let name = usize::try_from(code).ok().and_then(|code| names.get(code)).copied().unwrap_or("unknown");
    Error::Gpu { call, code, name: name.into() }
}
