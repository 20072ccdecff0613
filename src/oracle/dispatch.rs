//! The meaning of dispatch.
