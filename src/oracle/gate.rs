//! The meaning of gate.
