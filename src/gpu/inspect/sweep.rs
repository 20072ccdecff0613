//! One constant of a kernel over a range of values: where the registers end and spills begin.
#![forbid(unsafe_code)]

use super::{Arch, Compilers, pairs};
use crate::error::{Error, Result};
use crate::gpu::Program;
use crate::ops;
use crate::tensor::DType;

/// What is varied, and what others published of it.
pub struct Sweep {
    /// As `moe inspect --sweep` calls it.
    pub name: &'static str,
    /// What is measured, in a sentence.
    pub what: &'static str,
    /// Architectures to look at.
    pub archs: &'static [&'static str],
    /// Of what the published numbers are.
    pub published_as: &'static str,
    /// The values, with registers and spilled registers as published.
    pub published: &'static [(u16, (u32, u32))],
    /// The kernel with a value.
    pub program: fn(u16) -> Program,
}

/// A value of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Point {
    /// What was varied.
    pub value: u16,
    /// Registers and spilled registers as published.
    pub published: (u32, u32),
    /// Registers and spills (bytes of stores on NVIDIA, registers on AMD) on each architecture of the sweep; `None` without its compiler.
    pub measured: Vec<Option<(u32, u32)>>,
}

impl Sweep {
    /// Every sweep there is.
    pub fn all() -> Vec<Self> {
        vec![Sweep {
            name: "elements-per-lane",
            what: "The gate's dot in one tile: each lane holds so many bf16 elements of a row before it adds them.",
            archs: &["gfx1151", "gfx950", "sm_90a"],
            published_as: "gfx1151, published",
            published: &[(32, (65, 0)), (64, (99, 0)), (128, (175, 0)), (256, (256, 257)), (512, (256, 829))],
            program: |elements_per_lane| ops::gate::one_tile_program(DType::BF16, elements_per_lane),
        }]
    }

    /// Compiles every value for every architecture.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's whole log. A compiler that is not there is no error.
    pub fn measure(&self, compilers: &Compilers, done: impl Fn() + Sync) -> Result<Vec<Point>> {
        let archs = self.archs.iter().map(|name| Arch::from_name(name)).collect::<Result<Vec<_>>>()?;
        let programs: Vec<Program> = self.published.iter().map(|(value, _)| (self.program)(*value)).collect();
        let reports = compilers.reports(&pairs(&programs, &archs), done).into_iter().map(|report| match report {
            Ok(report) => Ok(Some((report.resources.registers, report.resources.spills))),
            Err(Error::Library { .. }) => Ok(None),
            Err(error) => Err(error),
        });
        let measured = reports.collect::<Result<Vec<_>>>()?;
        let points = self.published.iter().zip(measured.chunks(archs.len()));
        Ok(points
            .map(|((value, published), measured)| Point { value: *value, published: *published, measured: measured.to_vec() })
            .collect())
    }
}
