//! combine.
