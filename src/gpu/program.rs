//! A kernel as text: sources and constants.
#![forbid(unsafe_code)]

use std::fmt;
use std::hash::Hash;

/// One source file, embedded in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Where it stands in this crate, for the compiler's messages.
    pub path: &'static str,
    /// What it holds.
    pub text: &'static str,
}

/// Embeds a file of this crate, given relative to `src/`.
#[macro_export]
#[doc(hidden)]
macro_rules! kernel_source {
    ($path:literal) => {
        $crate::gpu::Source { path: concat!("src/", $path), text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/", $path)) }
    };
}

/// What a source is compiled for: a name and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Constant {
    /// `constexpr long long NAME = value;`
    Int(&'static str, i64),
    /// `constexpr bool NAME = value;`
    Bool(&'static str, bool),
    /// `using NAME = type;`
    Type(&'static str, &'static str),
}

impl fmt::Display for Constant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The type is wide enough for every size; kernels give it a narrower one where they want it.
            Constant::Int(name, value) => write!(f, "constexpr long long {name} = {value};"),
            Constant::Bool(name, value) => write!(f, "constexpr bool {name} = {value};"),
            Constant::Type(name, ty) => write!(f, "using {name} = {ty};"),
        }
    }
}

/// Which architectures a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Targets {
    /// Every one.
    All,
    /// NVIDIA's.
    Nvidia,
    /// NVIDIA's from compute capability 9.0 on: clusters, bulk copies.
    Hopper,
    /// AMD's.
    Amd,
}

impl Targets {
    /// Whether an architecture, `sm_90a` or `gfx950`, is one of them.
    pub fn contain(self, arch: &str) -> bool {
        let capability = arch.strip_prefix("sm_").and_then(|digits| digits.trim_end_matches(char::is_alphabetic).parse::<u32>().ok());
        match self {
            Targets::All => true,
            Targets::Nvidia => capability.is_some(),
            Targets::Hopper => capability.is_some_and(|capability| capability >= 90), // spec: compute capability 9.0
            Targets::Amd => capability.is_none(),
        }
    }
}

/// How a multiprocessor's memory is split while a kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carveout {
    /// All that can be is shared memory: a multiprocessor on which a block waits cannot be split in another way, and kernels that all want the same run beside each other.
    Shared,
    /// As the driver chooses for the kernel's own shared memory, so the rest is first-level cache: for kernels that read something twice.
    Cache,
}

/// A kernel: everything that decides its machine code, but the architecture and the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// A line of the table of resources, for example `gate block bf16`.
    pub name: String,
    /// The `extern "C"` function.
    pub entry: &'static str,
    /// In the order in which they are put together; the dialect (`platform.cuh`) first.
    pub sources: &'static [Source],
    /// Constants, before the sources. They may name types of the dialect: those come after it.
    pub constants: Vec<Constant>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub smem_bytes: u32,
    /// Registers of a thread that it may use at most.
    pub max_registers: u32,
    /// What it wants of the memory that shared memory and the first-level cache share.
    pub carveout: Carveout,
    /// Where it is meant to run.
    pub targets: Targets,
}

impl Program {
    /// One translation unit: the dialect, the constants, the other sources, each with its own line numbers.
    pub fn text(&self) -> String {
        let mut text =
            String::with_capacity(self.sources.iter().map(|source| source.text.len() + source.path.len() + 16).sum::<usize>() + 1024);
        for (i, source) in self.sources.iter().enumerate() {
            text.push_str(&format!("#line 1 \"{}\"\n{}\n", source.path, source.text));
            if i == 0 {
                text.push_str("#line 1 \"constants\"\n");
                for constant in &self.constants {
                    text.push_str(&format!("{constant}\n"));
                }
            }
        }
        text
    }
}

/// The small value by which an operation chooses among its kernels.
///
/// It never holds a number that follows the data (tokens, rows, offsets): each value is compiled once.
pub trait Spec: Copy + Eq + Hash + fmt::Debug + Send + Sync + 'static {
    /// Its kernel.
    fn program(&self) -> Program;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_follow_the_dialect() {
        const SOURCES: &[Source] = &[Source { path: "a.cuh", text: "struct bf16 {};" }, Source { path: "b.cu", text: "X x;" }];
        let constants = vec![Constant::Int("N", -3), Constant::Bool("B", true), Constant::Type("X", "bf16")];
        let program = Program {
            name: "p".into(),
            entry: "p",
            sources: SOURCES,
            constants,
            threads: 32,
            smem_bytes: 0,
            max_registers: 32,
            carveout: Carveout::Shared,
            targets: Targets::All,
        };
        let lines = "#line 1 \"a.cuh\"\nstruct bf16 {};\n#line 1 \"constants\"\nconstexpr long long N = -3;\nconstexpr bool B = true;\nusing X = bf16;\n#line 1 \"b.cu\"\nX x;\n";
        assert_eq!(program.text(), lines);
    }

    #[test]
    fn targets_know_their_architectures() {
        let of = |targets: Targets| ["sm_80", "sm_90a", "sm_120a", "gfx950"].map(|arch| targets.contain(arch));
        assert_eq!(of(Targets::All), [true; 4]);
        assert_eq!(of(Targets::Nvidia), [true, true, true, false]);
        assert_eq!(of(Targets::Hopper), [false, true, true, false]);
        assert_eq!(of(Targets::Amd), [false, false, false, true]);
    }
}
