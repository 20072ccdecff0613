//! The meaning of experts and of a whole block.
