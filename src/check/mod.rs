//! One checker per operation, run on every backend: by the test suite as named trials, by `moe check` as lines.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt;

use crate::backend::{Backend, Cpu};
use crate::cpu::Level;
use crate::ep::{Config, Tuning};
use crate::gpu::Program;

pub mod cast;
pub mod combine;
pub mod dispatch;
pub mod ep;
pub mod gate;
pub mod gate_backward;
pub mod guarded;
pub mod layer;
pub mod precompile;
pub mod router;

/// Why a check failed: one message with everything needed to repeat it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed(pub String);

impl<E: fmt::Display> From<E> for Failed {
    fn from(error: E) -> Self {
        Failed(error.to_string())
    }
}

/// World, configuration and launches of an object.
pub type Shape = (usize, Config, Tuning);

type Shapes = dyn Fn() -> Vec<Shape> + Send + Sync;
type Check = dyn Fn(&Backend) -> Result<usize, Failed> + Send + Sync;

/// A named group of cases of one operation.
pub struct Group {
    /// The operation: router, gate, cast, dispatch, combine, ...
    pub op: &'static str,
    /// What the cases have in common, for example `bf16 tile edges`.
    pub name: String,
    run: Box<Check>,
    /// Worlds and configurations of its cases on a GPU, where kernels are compiled for each.
    shapes: Option<Box<Shapes>>,
}

impl Group {
    /// `run` checks every case of the group on a backend and returns how many there were.
    pub fn new(op: &'static str, name: impl Into<String>, run: impl Fn(&Backend) -> Result<usize, Failed> + Send + Sync + 'static) -> Self {
        Group { op, name: name.into(), run: Box::new(run), shapes: None }
    }

    /// With the worlds and configurations of its cases on a GPU.
    pub fn with_shapes(self, shapes: impl Fn() -> Vec<Shape> + Send + Sync + 'static) -> Self {
        Group { shapes: Some(Box::new(shapes)), ..self }
    }

    /// The kernels that the group's cases load on a GPU, as far as they follow from configurations.
    ///
    /// # Errors
    /// A configuration that has no plan.
    pub fn programs(&self) -> Result<Vec<Program>, Failed> {
        let mut programs = Vec::new();
        for (world, config, tuning) in self.shapes.as_ref().map_or(Vec::new(), |shapes| shapes()) {
            programs.extend(config.programs(world, tuning)?);
        }
        let mut seen = HashSet::new();
        programs.retain(|program: &Program| seen.insert(format!("{} {:?}", program.entry, program.constants)));
        Ok(programs)
    }

    /// Runs every case.
    ///
    /// # Errors
    /// The first case that failed. A group that ran no case fails too.
    pub fn run(&self, backend: &Backend) -> Result<usize, Failed> {
        match (self.run)(backend)? {
            0 => Err(Failed("the group has no cases".into())),
            n => Ok(n),
        }
    }
}

/// Every group of every operation.
pub fn groups() -> Vec<Group> {
    let of_each_op = [router::groups, gate::groups, gate_backward::groups, cast::groups, dispatch::groups, combine::groups, layer::groups];
    of_each_op.into_iter().flat_map(|groups| groups()).collect()
}

/// The operations that a backend has, by its name (`cuda:1` is `cuda`).
pub fn runs_on(op: &str, backend: &str) -> bool {
    match backend.split(':').next() {
        Some("cuda") => matches!(op, "gate" | "dispatch" | "combine" | "cast"),
        _ => true,
    }
}

/// The ways to run on `backend` that must give the same bytes, named: on the CPU every instruction set, with 1 and 3 threads; on a
/// GPU with and without programmatic launch.
///
/// # Errors
/// When threads cannot be started.
pub fn variants(backend: &Backend) -> Result<Vec<(String, Backend)>, Failed> {
    match backend {
        Backend::Cpu(_) => {
            let mut all = Vec::new();
            for threads in [1, 3] {
                let cpu = Cpu::with_threads(threads)?;
                let at = |level: Level| (format!("cpu {}, {threads} threads", level.name()), Backend::Cpu(cpu.clone().at_level(level)));
                all.extend(Level::available().into_iter().map(at));
            }
            Ok(all)
        }
        Backend::Cuda(cuda) => {
            let with = |programmatic| Backend::Cuda(cuda.clone().programmatic(programmatic));
            Ok(vec![("cuda".into(), with(false)), ("cuda, programmatic".into(), with(true))])
        }
    }
}

/// Fails with a formatted message unless the condition holds.
#[macro_export]
#[doc(hidden)]
macro_rules! ensure {
    ($cond:expr, $($message:tt)+) => {
        if $cond {
        } else {
            return Err($crate::check::Failed(format!($($message)+)));
        }
    };
}
