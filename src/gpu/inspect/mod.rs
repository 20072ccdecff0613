//! What every kernel needs on every architecture, without a GPU: registers, spills, shared memory, code. The compile gate and `moe inspect` are made of it.
//!
//! ```no_run
//! use moe_kernels::gpu::inspect::{Arch, Compilers, catalogue};
//!
//! let compilers = Compilers::find();
//! let arch = Arch::from_name("gfx950")?;
//! for program in catalogue().iter().filter(|program| program.targets.contain(arch.name())) {
//!     let report = compilers.report(program, &arch)?;
//!     println!("{}: {} registers, {:?}", report.kernel, report.resources.registers, report.faults);
//! }
//! # Ok::<(), moe_kernels::Error>(())
//! ```
#![forbid(unsafe_code)]

mod arch;
mod clang;
mod nvidia;
mod sweep;
mod table;

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::jit;
use super::nvrtc::Nvrtc;
use super::program::{Carveout, Program, Source, Spec, Targets};
use crate::error::{Error, Result};
use crate::measure::ceiling::CeilingSpec;
use crate::ops;

pub use arch::{Arch, Vendor};
pub use clang::Clang;
pub use sweep::{Point, Sweep};
pub use table::{cells, difference, markdown};

/// Every kernel with every set of constants that is shipped, by operation, then those of the benchmarks.
pub fn catalogue() -> Vec<Program> {
    let all: &[fn() -> Vec<Program>] = &[
        ops::gate::programs,
        ops::cast::programs,
        ops::dispatch::programs,
        ops::combine::programs,
        || CeilingSpec::ALL.iter().map(Spec::program).collect(),
        crate::measure::delay::programs,
        crate::measure::link::programs,
        super::plain::programs,
        super::plain_cast::programs,
    ];
    all.iter().flat_map(|programs| programs()).collect()
}

/// What a compiler says a kernel needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    /// Registers of a thread; on AMD vector registers, with accumulation registers where they exist.
    pub registers: u32,
    /// Scalar registers of a wave, on AMD.
    pub scalar_registers: Option<u32>,
    /// What did not fit in registers: bytes of spill stores of a thread on NVIDIA, spilled vector registers on AMD.
    pub spills: u32,
    /// Scalar registers that did not fit, on AMD; they go to lanes of vector registers.
    pub scalar_spills: u32,
    /// Bytes of local memory of a thread: spills, and arrays that are indexed at run time.
    pub stack_bytes: u32,
    /// Static shared memory of a block.
    pub static_smem_bytes: u32,
    /// Bytes of machine code.
    pub code_bytes: u32,
    /// Threads that run together: a warp or a wave.
    pub lanes: u32,
}

/// One kernel on one architecture, judged.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// [`Program::name`].
    pub kernel: String,
    /// [`Arch::name`].
    pub arch: String,
    /// What it needs.
    pub resources: Resources,
    /// Most registers that it may use ([`Arch::max_registers`]).
    pub max_registers: Option<u32>,
    /// Static and dynamic shared memory of a block.
    pub smem_bytes: u64,
    /// What breaks a rule; nothing in a kernel that may be shipped.
    pub faults: Vec<String>,
}

impl Report {
    /// Judges: no spill, no local memory, registers within the budget, a block that fits in the shared memory. Scalar registers that do not fit lie in lanes of
    /// vector registers, which are counted: no memory, no fault.
    pub fn new(program: &Program, arch: &Arch, resources: Resources) -> Self {
        let Resources { registers, spills, stack_bytes, .. } = resources;
        let max_registers = arch.max_registers(program);
        let smem_bytes = u64::from(resources.static_smem_bytes) + u64::from(program.smem_bytes);
        let mut faults = Vec::new();
        if spills > 0 {
            let unit = if arch.vendor() == Vendor::Nvidia { "bytes spilled" } else { "registers spilled" };
            faults.push(format!("{spills} {unit}"));
        }
        if stack_bytes > 0 {
            faults.push(format!("{stack_bytes} bytes of local memory"));
        }
        if let Some(max) = max_registers.filter(|max| registers > *max) {
            faults.push(format!("{registers} registers, at most {max}"));
        }
        if let Some(max) = arch.max_smem_bytes().filter(|max| smem_bytes > u64::from(*max)) {
            faults.push(format!("{smem_bytes} bytes of shared memory, a block has at most {max}"));
        }
        Report { kernel: program.name.clone(), arch: arch.name().to_owned(), resources, max_registers, smem_bytes, faults }
    }
}

/// The compilers of this machine.
pub struct Compilers {
    nvidia: Result<&'static Nvrtc>,
    amd: Result<Clang>,
}

impl Compilers {
    /// Looks for all of them.
    pub fn find() -> Self {
        Compilers { nvidia: Nvrtc::get(), amd: Clang::find() }
    }

    /// What a vendor's compiler calls itself.
    ///
    /// # Errors
    /// [`Error::Library`] when it was not found; then nothing can be compiled for that vendor.
    pub fn version(&self, vendor: Vendor) -> Result<String> {
        match vendor {
            Vendor::Nvidia => {
                let (major, minor) = self.nvidia.clone()?.version()?;
                // Only its images say which release it is.
                const EMPTY: &[Source] = &[Source { path: "empty", text: "extern \"C\" __global__ void empty() {}" }];
                let (name, constants, targets) = ("empty".to_owned(), Vec::new(), Targets::Nvidia);
                let empty = Program {
                    name,
                    entry: "empty",
                    sources: EMPTY,
                    constants,
                    threads: 1,
                    smem_bytes: 0,
                    max_registers: 255,
                    carveout: Carveout::Shared,
                    targets,
                };
                let image = jit::compile(&empty, "sm_80", None)?.image;
                Ok(format!("NVRTC {}", nvidia::release(&image).unwrap_or_else(|| format!("{major}.{minor}"))))
            }
            Vendor::Amd => Ok(self.amd.clone()?.version().to_owned()),
        }
    }

    /// Compiles a kernel for an architecture and judges it.
    ///
    /// # Errors
    /// [`Error::Library`] without the vendor's compiler; [`Error::Compile`] with its whole log.
    pub fn report(&self, program: &Program, arch: &Arch) -> Result<Report> {
        let kernel = format!("{} for {arch}", program.name);
        let resources = match arch.vendor() {
            Vendor::Nvidia => {
                self.nvidia.clone()?;
                let compiled = jit::compile(program, arch.name(), None)?;
                nvidia::resources(program.entry, &compiled.log, &compiled.image)
            }
            Vendor::Amd => {
                let assembly = self.amd.as_ref().map_err(Clone::clone)?.compile(&kernel, &program.text(), arch.name())?;
                clang::resources(program.entry, &assembly)
            }
        };
        Ok(Report::new(program, arch, resources.map_err(|log| Error::Compile { kernel, log })?))
    }

    /// [`report`](Self::report) of each pair, in their order, on all cores; `done` is called after each.
    pub fn reports(&self, pairs: &[(Program, Arch)], done: impl Fn() + Sync) -> Vec<Result<Report>> {
        let one = |(program, arch): &(Program, Arch)| {
            let report = self.report(program, arch);
            done();
            report
        };
        pairs.par_iter().map(one).collect()
    }
}

/// Each program with each of the architectures that it is for.
pub fn pairs(programs: &[Program], archs: &[Arch]) -> Vec<(Program, Arch)> {
    let of = |program: &Program| {
        let archs = archs.iter().filter(|arch| program.targets.contain(arch.name()));
        archs.map(|arch| (program.clone(), arch.clone())).collect::<Vec<_>>()
    };
    programs.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn program(max_registers: u32, smem_bytes: u32) -> Program {
        let (sources, constants, targets): (&[Source], _, _) = (&[], Vec::new(), Targets::All);
        Program {
            name: "probe".into(),
            entry: "probe",
            sources,
            constants,
            threads: 128,
            smem_bytes,
            max_registers,
            carveout: Carveout::Shared,
            targets,
        }
    }

    pub const GOOD: Resources = Resources {
        registers: 64,
        scalar_registers: None,
        spills: 0,
        scalar_spills: 0,
        stack_bytes: 0,
        static_smem_bytes: 1024,
        code_bytes: 100,
        lanes: 32,
    };

    fn faults(arch: &str, program: &Program, resources: Resources) -> Vec<String> {
        Report::new(program, &Arch::from_name(arch).unwrap(), resources).faults
    }

    #[test]
    fn each_rule_has_its_fault() {
        let fits = program(64, 226 * 1024); // with the static one, all that a block of sm_90a has
        assert_eq!(faults("sm_90a", &fits, GOOD), [""; 0]);
        assert_eq!(faults("sm_90a", &program(63, 0), GOOD), ["64 registers, at most 63"]);
        assert_eq!(faults("sm_90a", &fits, Resources { spills: 4, ..GOOD }), ["4 bytes spilled"]);
        assert_eq!(faults("gfx950", &program(64, 0), Resources { scalar_spills: 5, ..GOOD }), [""; 0]);
        assert_eq!(faults("sm_90a", &fits, Resources { stack_bytes: 8, ..GOOD }), ["8 bytes of local memory"]);
        let over = Resources { static_smem_bytes: 1025, ..GOOD };
        assert_eq!(faults("sm_90a", &fits, over), ["232449 bytes of shared memory, a block has at most 232448"]);
        // The sum of both is what counts, and it may be above 2^32.
        assert_eq!(faults("sm_80", &program(64, u32::MAX), GOOD).len(), 1);
        assert_eq!(
            faults("gfx1151", &program(64, 0), Resources { registers: 97, spills: 3, ..GOOD }),
            ["3 registers spilled", "97 registers, at most 96"]
        );
        // What is in no table is not judged, but spills are always.
        assert_eq!(faults("gfx1030", &program(1, u32::MAX), Resources { spills: 1, ..GOOD }), ["1 registers spilled"]);
    }

    #[test]
    fn pairs_follow_the_targets() {
        let hopper = Program { targets: Targets::Hopper, name: "hopper".into(), ..program(64, 0) };
        let archs: Vec<Arch> = ["sm_80", "sm_90a", "gfx950"].iter().map(|name| Arch::from_name(name).unwrap()).collect();
        let names: Vec<_> =
            pairs(&[program(64, 0), hopper], &archs).iter().map(|(program, arch)| format!("{} {arch}", program.name)).collect();
        assert_eq!(names, ["probe sm_80", "probe sm_90a", "probe gfx950", "hopper sm_90a"]);
    }

    #[test]
    fn names_of_the_catalogue_are_different() {
        let mut names: Vec<String> = catalogue().into_iter().map(|program| program.name).collect();
        names.sort();
        let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| &pair[0]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }

    #[test]
    fn a_missing_compiler_is_said_for_each_vendor() {
        let missing = |name: &str| Error::Library { name: name.into(), searched: Vec::new() };
        let compilers = Compilers { nvidia: Err(missing("n")), amd: Err(missing("a")) };
        for (vendor, arch, name) in [(Vendor::Nvidia, "sm_80", "n"), (Vendor::Amd, "gfx950", "a")] {
            assert_eq!(compilers.version(vendor), Err(missing(name)));
            assert_eq!(compilers.report(&program(64, 0), &Arch::from_name(arch).unwrap()), Err(missing(name)));
        }
    }
}
