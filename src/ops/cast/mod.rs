//! cast.
