//! NVRTC, the run-time compiler: where it is found, and one compilation.

use std::env;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::driver::Driver;
use super::library::{self, table};
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
            library::open("libnvrtc (CUDA run-time compiler)", candidates(&Places::of_this_machine()), |library, path| {
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
        let options =
            OPTIONS.iter().copied().chain([arch.as_str()]).map(|option| c_string("option", option)).collect::<Result<Vec<_>>>()?;
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

/// What says where a toolkit may be.
#[derive(Default)]
pub(super) struct Places {
    moe_nvrtc: Option<PathBuf>,
    /// `CUDA_HOME`, `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// `PYTHONPATH`.
    python_paths: Vec<PathBuf>,
    /// `VIRTUAL_ENV`, `CONDA_PREFIX`, and the prefixes of the interpreters in `PATH`.
    python_prefixes: Vec<PathBuf>,
    /// Folders that may hold a toolkit: `/usr/local`.
    roots: Vec<PathBuf>,
}

impl Places {
    pub(super) fn of_this_machine() -> Self {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let list = |name: &str| env::var_os(name).map(|value| env::split_paths(&value).collect::<Vec<_>>()).unwrap_or_default();
        let interpreters = list("PATH").into_iter().map(|folder| folder.join("python3")).filter(|python| python.exists());
        // The interpreter of a virtual environment is a link to another's: both places count.
        let prefixes = interpreters.flat_map(|python| [Some(python.clone()), fs::canonicalize(python).ok()]).flatten();
        let prefixes = prefixes.filter_map(|python| Some(python.parent()?.parent()?.to_owned()));
        Places {
            moe_nvrtc: variable("MOE_NVRTC"),
            toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect(),
            python_paths: list("PYTHONPATH"),
            python_prefixes: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).chain(prefixes).collect(),
            roots: vec![PathBuf::from("/usr/local"), PathBuf::from("/opt")],
        }
    }

    /// Folders that may hold Python packages, those named by the user first.
    pub(super) fn python_packages(&self) -> Vec<PathBuf> {
        let mut packages = self.python_paths.clone();
        for prefix in &self.python_prefixes {
            for version in sorted(&prefix.join("lib"), |name| name.starts_with("python3")) {
                packages.extend(["site-packages", "dist-packages"].map(|packages| version.join(packages)));
            }
        }
        packages
    }
}

/// Entries of a folder whose names are accepted, the last name first.
fn sorted(folder: &Path, accept: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| accept(name)).collect();
    names.sort_by(|a, b| b.cmp(a));
    names.into_iter().map(|name| folder.join(name)).collect()
}

/// Newest first: of two that the driver can run, the newer compiles better.
fn candidates(places: &Places) -> Vec<PathBuf> {
    const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    let in_folder = |folder: PathBuf| NAMES.map(|name| folder.join(name));
    if let Some(path) = &places.moe_nvrtc {
        return if path.is_dir() { in_folder(path.clone()).to_vec() } else { vec![path.clone()] };
    }
    let mut folders = Vec::new();
    let toolkits = places.roots.iter().flat_map(|root| sorted(root, |name| name.starts_with("cuda")));
    for toolkit in places.toolkits.iter().cloned().chain(toolkits) {
        folders.extend(["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|lib| toolkit.join(lib)));
    }
    for packages in places.python_packages() {
        folders.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|lib| packages.join(lib)));
    }
    let bare = NAMES.map(PathBuf::from);
    // A folder that is not there would only make the list of places long.
    bare.into_iter().chain(folders.into_iter().filter(|folder| folder.is_dir()).flat_map(in_folder)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_their_order() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        folder("local/cuda-12.8/lib64");
        folder("local/cuda-13.0/lib64");
        folder("home/lib64");
        folder("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        folder("path/nvidia/cuda_nvrtc/lib");
        let places = Places {
            moe_nvrtc: None,
            toolkits: vec![root.path().join("home")],
            python_paths: vec![root.path().join("path")],
            python_prefixes: vec![root.path().join("venv")],
            roots: vec![root.path().join("local")],
        };
        let found = candidates(&places);
        let found: Vec<_> = found.iter().map(|path| path.strip_prefix(root.path()).unwrap_or(path).to_str().unwrap()).collect();
        let firsts: Vec<_> = found.iter().step_by(3).copied().collect();
        assert_eq!(
            firsts,
            [
                "libnvrtc.so.13",
                "home/lib64/libnvrtc.so.13",
                "local/cuda-13.0/lib64/libnvrtc.so.13",
                "local/cuda-12.8/lib64/libnvrtc.so.13",
                "path/nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
                "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            ]
        );
        assert_eq!(found[1..3], ["libnvrtc.so.12", "libnvrtc.so"]);
        // Named by the user: that place alone.
        let named = Places { moe_nvrtc: Some(root.path().join("home/lib64")), ..Places::default() };
        assert_eq!(candidates(&named).len(), 3);
        let file = Places { moe_nvrtc: Some("/nowhere/libnvrtc.so".into()), ..Places::default() };
        assert_eq!(candidates(&file), [PathBuf::from("/nowhere/libnvrtc.so")]);
    }
}
