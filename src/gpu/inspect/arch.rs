//! Architectures: what a block may use on each.
#![forbid(unsafe_code)]

use std::fmt;

use super::Program;
use crate::error::{Error, Result};

/// Whose compiler makes the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Vendor {
    /// NVRTC.
    Nvidia,
    /// clang.
    Amd,
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Vendor::Nvidia => "NVIDIA",
            Vendor::Amd => "AMD",
        })
    }
}

/// An architecture, as its compiler calls it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Arch {
    name: String,
    vendor: Vendor,
    /// `None`: not in the tables below, so not judged.
    limits: Option<Limits>,
}

/// What one multiprocessor (a compute unit of AMD) has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Limits {
    /// Bytes of shared memory of a block at most.
    smem_bytes: u32,
    /// Vector registers of 32 bits, of all lanes.
    registers: u32,
    /// Of a lane at most.
    registers_of_lane: u32,
}

const KIB: u32 = 1024;

/// Vector registers of a multiprocessor of every NVIDIA architecture here; `Program::max_registers` is in shares of it (spec: CUDA programming guide,
/// technical specifications per compute capability).
const NVIDIA_REGISTERS: u32 = 64 * KIB;

impl Arch {
    /// The architectures of the compile gate.
    pub const GATE: [&'static str; 8] = ["sm_80", "sm_90a", "sm_100a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"];

    /// From its name: `sm_90a`, `gfx950`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is no name of an architecture. Whether the compiler knows it is the compiler's word.
    pub fn from_name(name: &str) -> Result<Self> {
        let nvidia = name.strip_prefix("sm_").filter(|rest| {
            let digits = rest.strip_suffix(['a', 'f']).unwrap_or(rest);
            digits.len() >= 2 && digits.bytes().all(|byte| byte.is_ascii_digit())
        });
        let amd = name.strip_prefix("gfx").filter(|rest| {
            rest.len() >= 3
                && rest.bytes().next().is_some_and(|byte| byte.is_ascii_digit())
                && rest.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        let (vendor, limits) = match (nvidia, amd) {
            (Some(capability), _) => (Vendor::Nvidia, nvidia_limits(capability)),
            (_, Some(number)) => (Vendor::Amd, amd_limits(number)),
            (None, None) => {
                return Err(Error::invalid(
                    "inspect",
                    "architecture",
                    format_args!("`{name}`"),
                    "sm_ or gfx with a number, like sm_90a or gfx950",
                ));
            }
        };
        Ok(Arch { name: name.to_owned(), vendor, limits })
    }

    /// Those of the compile gate.
    pub fn gate() -> Vec<Self> {
        // Every name there is of the right form (a test says so).
        Self::GATE.iter().filter_map(|name| Self::from_name(name).ok()).collect()
    }

    /// As its compiler calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whose it is.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// Most bytes of shared memory of a block, static and dynamic; `None` when this library has no figure.
    pub fn max_smem_bytes(&self) -> Option<u32> {
        self.limits.map(|limits| limits.smem_bytes)
    }

    /// Most vector registers that a thread of `program` may use.
    ///
    /// On NVIDIA it is the program's own number. On AMD it is that number times the ratio of the register files, and never above what a lane can have:
    /// a compute unit then holds at least as many threads as the multiprocessor. So 64 registers become 128 on gfx942 and gfx950, whose file is
    /// twice as large, and 96 on gfx1100, gfx1151 and gfx1201. `None` when this library does not know the file.
    pub fn max_registers(&self, program: &Program) -> Option<u32> {
        if self.vendor == Vendor::Nvidia {
            return Some(program.max_registers);
        }
        let limits = self.limits?;
        let share = u64::from(program.max_registers) * u64::from(limits.registers) / u64::from(NVIDIA_REGISTERS);
        Some(share.min(u64::from(limits.registers_of_lane)) as u32)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Spec: CUDA programming guide, technical specifications per compute capability: shared memory of a block, registers of a multiprocessor and of a thread.
fn nvidia_limits(capability: &str) -> Option<Limits> {
    let smem = match capability.trim_end_matches(['a', 'f']) {
        "80" | "87" => 163,
        "86" | "89" | "120" | "121" => 99,
        "90" | "100" | "103" | "110" => 227,
        _ => return None,
    };
    Some(Limits { smem_bytes: smem * KIB, registers: NVIDIA_REGISTERS, registers_of_lane: 255 })
}

/// Spec: LLVM's AMDGPU target (AddressableLocalMemorySize, TotalNumVGPRs, AddressableNumVGPRs) and AMD's ISA documents. Per compute unit: CDNA 4 SIMDs of
/// 512 registers x 64 lanes, RDNA 2 SIMDs of 1536 x 32 lanes.
fn amd_limits(number: &str) -> Option<Limits> {
    let cdna = |smem| Limits { smem_bytes: smem * KIB, registers: 4 * 512 * 64, registers_of_lane: 512 };
    match number {
        "90a" | "942" => Some(cdna(64)),
        "950" => Some(cdna(160)),
        "1100" | "1101" | "1151" | "1200" | "1201" => {
            Some(Limits { smem_bytes: 64 * KIB, registers: 2 * 1536 * 32, registers_of_lane: 256 })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::program;
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Arch::gate().len(), Arch::GATE.len());
        for arch in Arch::gate() {
            assert!(arch.limits.is_some(), "{arch} is in the gate and not in the tables");
        }
        let vendor = |name: &str| Arch::from_name(name).unwrap().vendor();
        assert_eq!(["sm_90a", "sm_120f", "gfx90a", "gfx1151"].map(vendor), [Vendor::Nvidia, Vendor::Nvidia, Vendor::Amd, Vendor::Amd]);
        for bad in ["", "sm_", "sm_9", "sm_90b", "sm_9aa", "gfx", "gfx9x0", "gfxabc", "cuda", "SM_90", "gfx950 "] {
            assert!(matches!(Arch::from_name(bad), Err(Error::Invalid { .. })), "{bad}");
        }
    }

    #[test]
    fn budgets_follow_the_register_file() {
        let budget = |arch: &str, max_registers: u32| Arch::from_name(arch).unwrap().max_registers(&program(max_registers, 0));
        assert_eq!(["sm_80", "sm_90a", "gfx942", "gfx950", "gfx1151"].map(|arch| budget(arch, 64)), [64, 64, 128, 128, 96].map(Some));
        assert_eq!(["sm_90a", "gfx950", "gfx1151"].map(|arch| budget(arch, 255)), [255, 510, 256].map(Some));
        assert_eq!(budget("gfx1030", 64), None);
        assert_eq!(budget("sm_999", 64), Some(64));
    }
}
