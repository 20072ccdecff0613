//! The steps of a dispatch and a combine, in the order in which a rank takes them: the one list, for ranks on CPUs and for the model checkers.
//! `PROTOCOL.md` says why each two neighbours stand in this order, or that they need not.
#![forbid(unsafe_code)]

use super::signal::{Label, Memory};

/// One thing that a rank does to memory that others use. Numbers are those of `PROTOCOL.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Step {
    /// 1: writes its first rows for each peer into the peer's staging.
    Stage,
    /// The fence before words of this label are stored.
    Release(Label),
    /// 2, 5, 9: stores its words of this label at every peer.
    Post(Label),
    /// 3, 6, 10: waits for the words of this label.
    Poll(Label),
    /// The fence after the words of this label have been read.
    Acquire(Label),
    /// 3: from the count matrix, whether the call goes on.
    Decide,
    /// 4: writes its rows into the peers' banks.
    WriteRows,
    /// 7: takes what arrived; the bank is its own.
    Arrange,
    /// 8: writes what peers will read, in its own bank.
    WireForm,
    /// 10: reads the peers' rows, then gives its bank back.
    Pull,
}

use Step::*;

impl std::fmt::Display for Step {
    /// As `PROTOCOL.md` writes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stage => f.write_str("stage"),
            Release(label) => write!(f, "release {}", label.name()),
            Post(label) => write!(f, "post {}", label.name()),
            Poll(label) => write!(f, "poll {}", label.name()),
            Acquire(label) => write!(f, "acquire {}", label.name()),
            Decide => f.write_str("decide"),
            WriteRows => f.write_str("write rows"),
            Arrange => f.write_str("arrange"),
            WireForm => f.write_str("wire form"),
            Pull => f.write_str("pull"),
        }
    }
}

/// First half of a dispatch or replay.
#[doc(hidden)]
pub const DISPATCH_SEND: [Step; 9] = [
    Stage,
    Release(Label::Counts),
    Post(Label::Counts),
    Poll(Label::Counts),
    Acquire(Label::Counts),
    Decide,
    WriteRows,
    Release(Label::Done),
    Post(Label::Done),
];

/// Second half of a dispatch or replay.
#[doc(hidden)]
pub const DISPATCH_RECEIVE: [Step; 3] = [Poll(Label::Done), Acquire(Label::Done), Arrange];

/// First half of a combine.
#[doc(hidden)]
pub const COMBINE_SEND: [Step; 3] = [WireForm, Release(Label::Ready), Post(Label::Ready)];

/// Second half of a combine.
#[doc(hidden)]
pub const COMBINE_RECEIVE: [Step; 3] = [Poll(Label::Ready), Acquire(Label::Ready), Pull];

/// Who takes the steps that are no fences.
#[doc(hidden)]
pub trait Walker {
    /// The memory whose fences are used.
    type Memory: Memory;
    /// Why a rank goes no further.
    type Error;

    /// Takes one step.
    ///
    /// # Errors
    /// The rank takes none of the steps behind it.
    fn take(&mut self, step: Step) -> Result<(), Self::Error>;
}

/// Takes `steps` one after the other.
///
/// # Errors
/// Of the first step that fails.
#[doc(hidden)]
pub fn walk<W: Walker>(steps: &[Step], walker: &mut W) -> Result<(), W::Error> {
    for &step in steps {
        match step {
            Release(label) => W::Memory::release(label),
            Acquire(label) => W::Memory::acquire(label),
            step => walker.take(step)?,
        }
    }
    Ok(())
}
