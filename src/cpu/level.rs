//! Which instructions the CPU kernels use, found at run time.

use std::fmt;
use std::sync::OnceLock;

/// An instruction set that this machine has. A value of this type is the proof: kernels compiled for it may be called.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub(crate) Isa);

/// Instruction sets with kernels of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(dead_code)] // each architecture makes only its own
pub(crate) enum Isa {
    /// Whatever the compilation target guarantees.
    Scalar,
    /// AArch64 NEON.
    Neon,
    /// x86-64 AVX2, FMA, F16C, BMI2.
    Avx2,
    /// AVX2 and AVX-512 F, BW, DQ, VL, VBMI (Ice Lake, Zen 4 and later).
    Avx512,
}

impl Level {
    /// The best level of this machine.
    pub fn detect() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().expect("the scalar level is always there"))
    }

    /// Every level of this machine, slowest first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Level(Isa::Scalar)];
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            levels.push(Level(Isa::Neon));
        }
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi");
            if avx2 {
                levels.push(Level(Isa::Avx2));
            }
            if avx2 && avx512 {
                levels.push(Level(Isa::Avx512));
            }
        }
        levels
    }

    /// Short name: scalar, neon, avx2, avx512.
    pub fn name(self) -> &'static str {
        match self.0 {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }
}

impl Default for Level {
    fn default() -> Self {
        Level::detect()
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
