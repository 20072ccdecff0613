//! Tests of bad input: every argument, what it gets.

use libtest_mimic::Trial;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    Vec::new()
}
