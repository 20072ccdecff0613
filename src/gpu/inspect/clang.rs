//! A clang with the AMDGPU target: where it is found, one compilation, and resources from its assembly.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Resources;
use crate::error::{Error, Result};
use crate::gpu::places::Places;

/// Options of every compilation: as for NVRTC, no contraction; no headers and no device library are there, so none is looked for.
const OPTIONS: [&str; 9] =
    ["-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-O3", "-std=c++17", "-ffp-contract=off"];

/// The compiler of AMD's architectures, a program of its own.
#[derive(Debug, Clone)]
pub struct Clang {
    path: PathBuf,
    version: String,
}

impl Clang {
    /// The first that has the AMDGPU target.
    ///
    /// `MOE_CLANG` names a clang, or a zig that carries one, and is then the only place. Else: ROCm's, below `ROCM_PATH` and the usual folder; `clang` in
    /// `PATH`; the Python package `ziglang`.
    ///
    /// # Errors
    /// [`Error::Library`] with the places searched, and why what was found there was refused.
    pub fn find() -> Result<Self> {
        let named = env::var_os("MOE_CLANG").filter(|value| !value.is_empty());
        let places = candidates(named.clone(), env::var_os("ROCM_PATH"), env::var_os("PATH"), &Places::of_this_machine().python_packages());
        Self::first_of(places).map_err(|error| match error {
            Error::Library { name, mut searched } if named.is_none() => {
                searched.extend(["clang in PATH", "the Python package ziglang"].map(PathBuf::from));
                Error::Library { name, searched }
            }
            other => other,
        })
    }

    fn first_of(candidates: Vec<PathBuf>) -> Result<Self> {
        let mut searched: Vec<PathBuf> = Vec::new();
        for path in candidates {
            if searched.contains(&path) {
                continue;
            }
            match Self::accept(&path) {
                Ok(clang) => return Ok(clang),
                Err(_) if !path.exists() => searched.push(path),
                Err(why) => searched.push(PathBuf::from(format!("{} ({why})", path.display()))),
            }
        }
        Err(Error::Library { name: "clang with the AMDGPU target".into(), searched })
    }

    fn accept(path: &Path) -> Result<Self, String> {
        let said = |argument: &str| -> Result<String, String> {
            let output = command(path).arg(argument).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                return Err(format!("{argument}: {}", output.status));
            }
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let targets = said("--print-targets")?;
        if !targets.lines().any(|line| line.split_whitespace().next() == Some("amdgcn")) {
            return Err("has no target amdgcn".into());
        }
        let version = said("--version")?;
        Ok(Clang { path: path.to_owned(), version: version.lines().next().unwrap_or_default().trim().to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it calls itself: `clang version 22.1.8`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The assembly of one translation unit.
    ///
    /// # Errors
    /// [`Error::Compile`] with the whole log; [`Error::Io`] when the program cannot be run.
    pub fn compile(&self, kernel: &str, text: &str, arch: &str) -> Result<String> {
        let failed = |what: &str, error: std::io::Error| Error::Io { what: format!("{what} of kernel {kernel}"), why: error.to_string() };
        let file =
            tempfile::Builder::new().prefix("moe-").suffix(".hip").tempfile().map_err(|error| failed("writing the source", error))?;
        fs::write(file.path(), text).map_err(|error| failed("writing the source", error))?;
        let mut command = command(&self.path);
        command.args(OPTIONS).arg(format!("--offload-arch={arch}")).args(["-S", "-o", "-"]).arg(file.path()).stdin(Stdio::null());
        let output = command.output().map_err(|error| failed("running the compiler", error))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            let log = if log.trim().is_empty() { output.status.to_string() } else { log.into_owned() };
            return Err(Error::Compile { kernel: kernel.into(), log });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// `clang`, or `zig clang`.
fn command(path: &Path) -> Command {
    let mut command = Command::new(path);
    if path.file_stem() == Some(OsStr::new("zig")) {
        command.arg("clang");
    }
    command
}

fn candidates(moe_clang: Option<OsString>, rocm: Option<OsString>, path: Option<OsString>, packages: &[PathBuf]) -> Vec<PathBuf> {
    let given = |value: Option<OsString>| value.filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(clang) = given(moe_clang) {
        return vec![clang];
    }
    let rocm = given(rocm).into_iter().chain([PathBuf::from("/opt/rocm")]).map(|folder| folder.join("llvm/bin/clang"));
    let folders = path.map(|value| env::split_paths(&value).collect::<Vec<_>>()).unwrap_or_default();
    // A folder of PATH without a clang would only make the list of places long.
    let in_path = folders.into_iter().map(|folder| folder.join("clang")).filter(|clang| clang.is_file());
    let in_packages = packages.iter().map(|folder| folder.join("ziglang/zig")).filter(|zig| zig.is_file());
    rocm.chain(in_path).chain(in_packages).collect()
}

/// Resources as the assembly's metadata and comments tell them; the text of an error says what was missing.
pub fn resources(entry: &str, assembly: &str) -> Result<Resources, String> {
    let missing = |what: &str| format!("no {what} of `{entry}` in the assembly");
    let (_, metadata) = assembly.split_once("\n\t.amdgpu_metadata\n").ok_or_else(|| missing("metadata"))?;
    // A list of maps, one of each kernel (spec: AMDGPU usage, code object metadata); a deeper list, of arguments, is indented further.
    let fields = |kernel: &str| -> Vec<(String, String)> {
        let lines = kernel.lines().filter(|line| !line.starts_with("     "));
        lines.filter_map(|line| line.trim().split_once(':')).map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
    };
    let kernels = metadata.split("\n  - ").skip(1).map(fields);
    let value = |fields: &[(String, String)], key: &str| fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone());
    let fields = kernels.into_iter().find(|fields| value(fields, ".name").as_deref() == Some(entry)).ok_or_else(|| missing("metadata"))?;
    let number = |key: &str| value(&fields, key).and_then(|value| value.parse::<u32>().ok()).ok_or_else(|| missing(key));
    let (_, after) = assembly.split_once(&format!(".amdhsa_kernel {entry}\n")).ok_or_else(|| missing("code"))?;
    let code = after.lines().find_map(|line| line.strip_prefix("; codeLenInByte = ")).and_then(|value| value.trim().parse().ok());
    Ok(Resources {
        // Where there are accumulation registers, they are counted in it.
        registers: number(".vgpr_count")?,
        scalar_registers: Some(number(".sgpr_count")?),
        spills: number(".vgpr_spill_count")?,
        scalar_spills: number(".sgpr_spill_count")?,
        stack_bytes: number(".private_segment_fixed_size")?,
        static_smem_bytes: number(".group_segment_fixed_size")?,
        code_bytes: code.ok_or_else(|| missing("code"))?,
        lanes: number(".wavefront_size")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What clang 22 says of a kernel that spills on gfx942, shortened; another kernel stands before it.
    const ASSEMBLY: &str = "\t.amdhsa_kernel probe_two
\t.end_amdhsa_kernel
; codeLenInByte = 7
\t.amdhsa_kernel probe
\t\t.amdhsa_group_segment_fixed_size 128
\t.end_amdhsa_kernel
; Kernel info:
; codeLenInByte = 10632
; TotalNumSgprs: 106
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:           []
    .name:           probe_two
    .vgpr_count:     3
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           16
        .name:           probe_two
        .value_kind:     by_value
    .group_segment_fixed_size: 128
    .kernarg_segment_align: 8
    .max_flat_workgroup_size: 1024
    .name:           probe
    .private_segment_fixed_size: 1064
    .sgpr_count:     106
    .sgpr_spill_count: 6
    .symbol:         probe.kd
    .vgpr_count:     128
    .vgpr_spill_count: 265
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...

\t.end_amdgpu_metadata
";

    #[test]
    fn the_metadata_of_clang() {
        let want = Resources {
            registers: 128,
            scalar_registers: Some(106),
            spills: 265,
            scalar_spills: 6,
            stack_bytes: 1064,
            static_smem_bytes: 128,
            code_bytes: 10632,
            lanes: 64,
        };
        assert_eq!(resources("probe", ASSEMBLY), Ok(want));
    }

    /// An assembly that does not say everything is an error, never a kernel without spills.
    #[test]
    fn nothing_is_taken_for_granted() {
        let needed = [
            ".amdhsa_kernel probe\n",
            "; codeLenInByte = 10632",
            ".amdgpu_metadata",
            ".group_segment_fixed_size: 128",
            ".name:           probe\n",
            ".private_segment_fixed_size: 1064",
            ".sgpr_count:     106",
            ".sgpr_spill_count: 6",
            ".vgpr_count:     128",
            ".vgpr_spill_count: 265",
            ".wavefront_size: 64",
        ];
        for text in needed {
            let cut = ASSEMBLY.replacen(text, "", 1);
            assert!(cut != ASSEMBLY && resources("probe", &cut).is_err(), "without {text}");
        }
        assert!(resources("prob", ASSEMBLY).is_err());
        let error = resources("probe", &ASSEMBLY.replace(".vgpr_count:     128", ".vgpr_count:     many")).unwrap_err();
        assert!(error.contains("no .vgpr_count of `probe`"), "{error}");
    }

    #[test]
    fn places_in_their_order() {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let (clang, zig) = (file("bin/clang"), file("packages/ziglang/zig"));
        let path = env::join_paths([root.path().join("empty"), root.path().join("bin")]).unwrap();
        let found = candidates(None, Some("/rocm".into()), Some(path), &[root.path().join("packages"), root.path().join("empty")]);
        let want = [PathBuf::from("/rocm/llvm/bin/clang"), "/opt/rocm/llvm/bin/clang".into(), clang, zig];
        assert_eq!(found, want);
        // Named by the user: that place alone.
        assert_eq!(candidates(Some("/nowhere/zig".into()), None, None, &[]), [PathBuf::from("/nowhere/zig")]);
    }

    #[test]
    fn a_compiler_that_is_refused_says_why() {
        // Programs that every machine has: one fails, one says nothing of targets.
        let error = Clang::first_of(["/nowhere/clang", "/bin/false", "/bin/true"].map(PathBuf::from).to_vec()).unwrap_err();
        let Error::Library { searched, .. } = &error else { panic!("{error}") };
        assert_eq!(searched[0], PathBuf::from("/nowhere/clang"));
        assert!(searched[1].to_string_lossy().starts_with("/bin/false (--print-targets: exit status"), "{error}");
        assert_eq!(searched[2], PathBuf::from("/bin/true (has no target amdgcn)"));
    }
}
