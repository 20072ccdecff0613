//! Kernels of checks, compiled before they run. NVRTC compiles one after the other however many threads ask, so processes do it, each its share, into
//! the cache folder.
#![forbid(unsafe_code)]

use std::process::{Command, Stdio};

use rayon::prelude::*;

use crate::backend::Cuda;
use crate::check::Failed;
use crate::gpu::{Program, jit};
use crate::measure::environment::cache_folder;

/// Names the share of a process, in its environment.
const VARIABLE: &str = "MOE_COMPILE_SHARE";

/// What one process is to compile: every `of`-th kernel from `first` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    first: usize,
    of: usize,
    arch: String,
}

impl Share {
    /// That of this process, if it was started by [`compile`].
    pub fn of_this_process() -> Option<Self> {
        Self::parse(&std::env::var(VARIABLE).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split(' ');
        let mut number = || fields.next()?.parse().ok();
        let (first, of) = (number()?, number().filter(|of| *of > 0)?);
        Some(Share { first, of, arch: fields.next()?.into() })
    }

    fn text(&self) -> String {
        format!("{} {} {}", self.first, self.of, self.arch)
    }

    /// Compiles its part of `programs`, unless they are in the cache folder; returns how many there were.
    ///
    /// # Errors
    /// Those of the compiler.
    pub fn compile(&self, programs: &[Program]) -> Result<usize, Failed> {
        let folder = cache_folder();
        let mut num = 0;
        for program in programs.iter().skip(self.first).step_by(self.of) {
            jit::compile(program, &self.arch, folder.as_deref())?;
            num += 1;
        }
        Ok(num)
    }
}

/// Starts this program again, with the same arguments, once for each processor, if any of `programs` is missing; returns when all have compiled
/// their shares of the same list. Nothing to do without a cache folder. What fails there is compiled, or fails, again where it is needed.
pub fn compile(cuda: &Cuda, programs: &[Program]) {
    // A process takes as long to start as some kernels to compile (arbitrary).
    const LEAST: usize = 4;
    let (Ok(program), Some(folder)) = (std::env::current_exe(), cache_folder()) else { return };
    let arch = jit::architecture(cuda.device());
    let is_missing = |program: &&Program| !jit::is_cached(program, &arch, &folder).unwrap_or(true);
    let num_missing = programs.par_iter().filter(is_missing).count();
    let of = std::thread::available_parallelism().map_or(1, usize::from).min(num_missing.div_ceil(LEAST));
    let start = |first: usize| {
        let share = Share { first, of, arch: arch.clone() };
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(VARIABLE, share.text());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    };
    let started: Vec<_> = (0..of).filter_map(|first| start(first).ok()).collect();
    for mut process in started {
        let _ = process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole() {
        let share = Share { first: 3, of: 16, arch: "sm_90a".into() };
        assert_eq!(Share::parse(&share.text()), Some(share));
        for bad in ["", "3", "3 0 sm_90a", "3 16", "x 16 sm_90a"] {
            assert_eq!(Share::parse(bad), None, "{bad}");
        }
    }
}
