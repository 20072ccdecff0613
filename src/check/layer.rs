//! Checks of the MoE block.

use crate::check::Group;

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    Vec::new()
}
