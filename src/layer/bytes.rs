//! Bytes of a matrix: its own, or a part of a mapped file.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::Mmap;

/// Bytes that a matrix owns or borrows from a file. At any address: a file does not promise alignment.
#[derive(Clone)]
pub(crate) enum Bytes {
    /// Made here.
    Owned(Vec<u8>),
    /// A part of a file, which is read when it is used.
    Mapped {
        /// The file.
        map: Arc<Mmap>,
        /// Which of its bytes; within it.
        range: Range<usize>,
    },
}

impl Bytes {
    /// The bytes, when they are the matrix's own; otherwise none.
    pub(crate) fn owned_mut(&mut self) -> &mut [u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped { .. } => &mut [],
        }
    }

    /// A part of these bytes; of a mapped file without a copy.
    ///
    /// # Panics
    /// If the range is not within them.
    pub(crate) fn part(&self, part: Range<usize>) -> Self {
        assert!(part.start <= part.end && part.end <= self.len(), "bytes {part:?} of {}", self.len());
        match self {
            Bytes::Owned(bytes) => Bytes::Owned(bytes[part].to_vec()),
            Bytes::Mapped { map, range } => Bytes::Mapped { map: map.clone(), range: range.start + part.start..range.start + part.end },
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped { map, range } => &map[range.clone()],
        }
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self, Bytes::Owned(_)) { "own" } else { "mapped" };
        write!(f, "{} {kind} bytes", self.len())
    }
}
