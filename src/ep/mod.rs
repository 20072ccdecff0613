//! Ranks, their symmetric memory and the protocol between them.
