//! The one error of the library: facts, never advice hidden in prose.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::id::Rank;
use crate::measure::report;
use crate::name::{Name, interned};

/// Result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the facts that a caller needs to act on it.
///
/// Nothing was written to any output, and nothing the caller owned was lost, when one of these is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// An argument is not acceptable.
    #[error("{op}: {what} is {got}, expected {want}")]
    Invalid {
        /// Operation that refused it.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// Name of the argument.
        what: String,
        /// What was passed.
        got: String,
        /// What would have been accepted.
        want: String,
    },
    /// The request is meaningful but this build, backend or device cannot do it.
    #[error("{op}: {what} is not supported: {why}")]
    Unsupported {
        /// Operation that refused it.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// What was asked for.
        what: String,
        /// The reason.
        why: String,
    },
    /// A run-time library was not found.
    #[error("library {name} was not found; searched {}", list(.searched))]
    Library {
        /// Name of the library.
        name: String,
        /// Every place that was tried.
        searched: Vec<PathBuf>,
    },
    /// A function of a GPU's library failed.
    #[error("{call} failed: {name} ({code})")]
    Gpu {
        /// The function.
        #[serde(deserialize_with = "interned")]
        call: Name,
        /// Its status.
        code: i32,
        /// The library's name of that status.
        name: String,
    },
    /// A kernel could not be compiled.
    #[error("kernel {kernel} does not compile:\n{log}")]
    Compile {
        /// Which kernel.
        kernel: String,
        /// All that the compiler said.
        log: String,
    },
    /// More memory is needed than the machine has free.
    #[error("{what} needs {}, available are {}; {change}", amount(*.need_bytes), amount(*.have_bytes))]
    Memory {
        /// What would have been allocated.
        what: String,
        /// Bytes needed.
        need_bytes: u64,
        /// Bytes available.
        have_bytes: u64,
        /// What to change so that it fits.
        change: String,
    },
    /// More rows arrive somewhere than its buffers hold. Every rank gets this; no rank wrote payload; the world stays usable.
    #[error("{op}: capacity exceeded: {}", over_capacity(.demands))]
    Capacity {
        /// Operation that found it.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// Demand and capacity, ascending by rank: of every rank for rows; for tokens, of the ranks that have more than `max_tokens`.
        demands: Vec<Demand>,
    },
    /// Two ranks were configured differently.
    #[error("{op}: ranks {first} and {second} differ in {what}: {first_value} against {second_value}")]
    Mismatch {
        /// Operation that compared them.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// Lower of the two ranks.
        first: Rank,
        /// Higher of the two ranks.
        second: Rank,
        /// Which value differs.
        what: String,
        /// The value on `first`.
        first_value: String,
        /// The value on `second`.
        second_value: String,
    },
    /// A collective setup failed on one rank; every rank gets this.
    #[error("{op}: failed on rank {rank}: {error}")]
    Setup {
        /// The collective call.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// The lowest rank that failed.
        rank: Rank,
        /// Its error.
        error: Box<Error>,
    },
    /// The object, or the bank it would take, is in use.
    #[error("{op}: {what} is busy: {why}")]
    Busy {
        /// Operation that found it.
        #[serde(deserialize_with = "interned")]
        op: Name,
        /// What is in use.
        what: String,
        /// By whom.
        why: String,
    },
    /// A peer did not signal within the bound. The world is poisoned until it is rebuilt.
    #[error("{failure}; the bound was {bound:?}")]
    Timeout {
        /// Who waited for whom.
        failure: Failure,
        /// The bound of the wait.
        bound: Duration,
    },
    /// Another rank failed first; every rank of the world reports the same first cause until the world is rebuilt.
    #[error("the world is poisoned; first cause: {first}")]
    Poisoned {
        /// The first failure of the world.
        first: Failure,
    },
    /// A system call failed.
    #[error("{what}: {why}")]
    Io {
        /// What was attempted, with the path if there is one.
        what: String,
        /// The system's message.
        why: String,
    },
    /// A file does not have the format that it should have.
    #[error("{}:{line}: {why}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1; 0 when the format has no lines.
        line: u64,
        /// Which field is wrong, and how.
        why: String,
    },
}

/// An error that gives back what the call would have consumed, so that nothing is lost: `?` turns it into its [`Error`].
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T> {
    /// What went wrong.
    pub error: Error,
    /// The argument, when the call did not begin to use it.
    pub returned: Option<T>,
}

impl<T> From<Rejected<T>> for Error {
    fn from(rejected: Rejected<T>) -> Self {
        rejected.error
    }
}

impl<T> From<Error> for Rejected<T> {
    fn from(error: Error) -> Self {
        Rejected { error, returned: None }
    }
}

/// Rows that one rank would receive, and rows that it can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Demand {
    /// The receiving rank, or the sending rank for [`Limit::Tokens`].
    pub rank: Rank,
    /// What is counted.
    pub limit: Limit,
    /// Needed.
    pub demand: u64,
    /// Available.
    pub capacity: u64,
}

/// Which capacity a [`Demand`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Limit {
    /// Tokens of one rank in one call, `max_tokens`.
    Tokens,
    /// Rows of a receive buffer, `max_rows`.
    Rows,
    /// Rows of the fullest segment, `rows_per_expert`.
    RowsPerExpert,
}

/// The record of the first failure of a world, as every rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// Operation in which it happened.
    #[serde(deserialize_with = "interned")]
    pub op: Name,
    /// Step of the operation, as PROTOCOL.md names it.
    #[serde(deserialize_with = "interned")]
    pub phase: Name,
    /// The rank that failed or waited.
    pub rank: Rank,
    /// The rank that it waited for (itself when it waited for nobody).
    pub peer: Rank,
    /// Epoch it wanted to see.
    pub epoch: u64,
    /// Epoch it last saw.
    pub seen: u64,
    /// On a GPU: blocks of the waiting kernel that had stored their rows.
    pub blocks_arrived: u32,
}

/// Kinds of [`Failure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// `peer` did not signal `rank` in time.
    Timeout,
    /// The thread of `rank` panicked.
    Panicked,
    /// `rank` left the world while others still used it.
    Left,
    /// The process of `rank` ended without leaving the world.
    Died,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { kind, op, phase, rank, peer, epoch, seen, blocks_arrived } = self;
        match kind {
            FailureKind::Timeout => {
                write!(f, "{op}, phase {phase}: rank {rank} waited for rank {peer}, epoch {epoch} wanted, {seen} seen")?;
                if *blocks_arrived > 0 { write!(f, ", {blocks_arrived} blocks had stored their rows") } else { Ok(()) }
            }
            FailureKind::Panicked => write!(f, "{op}, phase {phase}: rank {rank} panicked at epoch {seen}"),
            FailureKind::Died => write!(f, "{op}, phase {phase}: the process of rank {rank} ended at epoch {seen}"),
            FailureKind::Left => write!(f, "{op}, phase {phase}: rank {rank} left the world at epoch {seen}"),
        }
    }
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.limit {
            Limit::Tokens => "tokens",
            Limit::Rows => "rows",
            Limit::RowsPerExpert => "rows in its fullest segment",
        };
        write!(f, "rank {} needs {} {what} and has {}", self.rank, self.demand, self.capacity)
    }
}

impl Error {
    /// Shorthand for [`Error::Invalid`].
    pub(crate) fn invalid(op: &'static str, what: impl Into<String>, got: impl fmt::Display, want: impl fmt::Display) -> Self {
        Error::Invalid { op, what: what.into(), got: got.to_string(), want: want.to_string() }
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Bytes as people read them, and exactly.
fn amount(bytes: u64) -> String {
    format!("{} ({} bytes)", report::bytes(bytes), report::count(bytes))
}

fn over_capacity(demands: &[Demand]) -> String {
    let over: Vec<_> = demands.iter().filter(|d| d.demand > d.capacity).map(Demand::to_string).collect();
    over.join("; ")
}
