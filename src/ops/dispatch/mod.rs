//! dispatch.
