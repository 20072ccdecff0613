//! Newtypes, so that a rank is never passed where an expert is meant.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(serde::Serialize, serde::Deserialize)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of an index; `None` above `u32::MAX`.
            #[inline]
            pub fn from_index(index: usize) -> Option<Self> {
                u32::try_from(index).ok().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// One participant of expert parallelism.
    Rank
);
id!(
    /// A global (physical) expert id.
    Expert
);
id!(
    /// A row of its source rank's input.
    Token
);
id!(
    /// A row of a receiver's buffer.
    Slot
);
