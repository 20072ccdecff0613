//! The trace reader on arbitrary bytes: it never panics, and what it accepts is well formed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_kernels::routing::trace::{Options, parse};
use moe_kernels::routing::{Load, Placement};

fuzz_target!(|data: &[u8]| {
    for options in [Options::default(), Options { num_experts: Some(16), layer: Some(1), keep_warmup: true }] {
        let Ok(trace) = parse(data, "fuzz".as_ref(), &options) else { continue };
        let placement = Placement::blocks(trace.num_experts, 1).expect("a trace has a number of experts that can be placed");
        let negative = trace.routes.topk_idx.iter().filter(|&&id| id < 0).count() as u64;
        assert_eq!(Load::new(&trace.routes, &placement).num_masked, negative);
        assert_eq!(trace.routes.topk_idx.len(), trace.routes.num_tokens * trace.routes.k);
        assert!(trace.routes.topk_weights.iter().all(|w| w.is_finite()));
    }
});
