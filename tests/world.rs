//! Tests of ranks, the protocol and its failures.

use libtest_mimic::Trial;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    Vec::new()
}
