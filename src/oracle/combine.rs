//! The meaning of combine.
