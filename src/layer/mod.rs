//! A whole MoE block: router, dispatch, experts, combine, shared expert.
#![forbid(unsafe_code)]
