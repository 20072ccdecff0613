//! Benchmarks.

use criterion::Criterion;

/// Criterion's cases.
pub fn criterion(_criterion: &mut Criterion) {}

/// Interleaved pairs with memcpy.
pub fn pairs(_small: bool) {}
