//! Tests of routers beyond the shared checks.

use libtest_mimic::Trial;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    Vec::new()
}
