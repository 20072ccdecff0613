//! Tests of the program `moe`.

use libtest_mimic::Trial;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    Vec::new()
}
