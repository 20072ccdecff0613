//! The specification: plain scalar loops that fix every sum's order and every rounding.
//!
//! Nothing here shares code with a backend, and no backend calls it. Every backend matches it bit for bit; a NaN equals any NaN, except in
//! fp8 where the byte counts. It is the dullest code that is right, and slow.
#![forbid(unsafe_code)]

pub mod cast;
pub mod combine;
pub mod compare;
pub mod dispatch;
pub mod exp;
pub mod float;
pub mod gate;
pub mod gate_backward;
pub mod layer;
pub mod router;
