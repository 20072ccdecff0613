//! The meaning of cast.
