//! The structs that the kernels of dispatch take, by the names and in the order of their sources.
#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};

use crate::ep::device::layout::RankParameters;

/// `Call` of routing.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct CallParameters {
    pub topk_idx: u64,
    /// 0: all 1.
    pub topk_weights: u64,
    /// 0: `num_tokens`.
    pub device_tokens: u64,
    /// Elements, as the next.
    pub idx_stride: u64,
    pub weight_stride: u64,
    pub num_tokens: u32,
    pub max_tokens: u32,
    pub max_rows: u32,
    /// That can be read: not above `max_tokens`.
    pub most_tokens: u32,
    pub routing: u64,
    pub counts: u64,
    pub sent: u64,
    pub records: u64,
    pub arrival: u64,
    pub rows: u64,
    pub places: u64,
    pub arriving: u64,
    pub expert_rows: u64,
    pub segment_start: u64,
    pub segment_align: u32,
    pub rows_per_expert: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct RouteParameters {
    pub call: CallParameters,
    pub block_words: u64,
    pub x: u64,
    pub x_stride: u64,
    pub x_row_bytes: u32,
    pub warm_rows: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct LowLatencyParameters {
    pub call: CallParameters,
    pub x: u64,
    pub x_stride: u64,
    pub x_region: u64,
    pub record_region: u64,
    pub staging: u64,
    pub copies: u32,
    pub x_rows: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct PayloadParameters {
    pub x: u64,
    pub x_stride: u64,
    pub scales: u64,
    pub scale_stride: u64,
    pub routing: u64,
    pub sent: u64,
    pub records: u64,
    pub rows: u64,
    pub places: u64,
    pub counts: u64,
    pub x_region: u64,
    pub record_region: u64,
    pub scale_region: u64,
    pub scale_rows: u64,
    pub max_rows: u32,
    pub max_tokens: u32,
    pub x_rows: u32,
    pub waits: u32,
    pub triggers: u32,
    pub spare: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct ReceiveParameters {
    pub counts: u64,
    pub posts: u32,
    pub waits: u32,
    pub triggers: u32,
    pub spare: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct ArrangeParameters {
    pub arrival: u64,
    pub arriving: u64,
    pub expert_rows: u64,
    pub segment_start: u64,
    pub x: u64,
    pub records: u64,
    pub transit: u64,
    pub scales: u64,
    pub scale_rows: u64,
    pub primary: u64,
    pub slots: u64,
    pub experts: u64,
    pub weights: u64,
    pub segment_align: u32,
    pub rows_per_expert: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct IndexParameters {
    pub arrival: u64,
    pub records: u64,
    pub num_rows_per_expert: u64,
    pub segment_start: u64,
    pub gather_idx: u64,
    pub statistics: u64,
    pub counts_host: u64,
    pub align: u32,
    pub spare: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportParameters {
    pub arrival: u64,
    pub records: u64,
    /// 0 by token.
    pub expert_rows: u64,
    /// 0: neither source, ids nor weights.
    pub source: u64,
    pub ids: u64,
    pub weights: u64,
    pub statistics: u64,
    pub counts_host: u64,
    pub num_local: u32,
    pub rows_per_expert: u32,
    pub me: RankParameters,
}

// As the kernels assert with the same numbers: no padding, and the rank at the end.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<CallParameters>() == 144);
    assert!(offset_of!(RouteParameters, me) == 176);
    assert!(offset_of!(LowLatencyParameters, me) == 192);
    assert!(offset_of!(PayloadParameters, me) == 136);
    assert!(offset_of!(ReceiveParameters, me) == 24);
    assert!(offset_of!(ArrangeParameters, me) == 112);
    assert!(offset_of!(IndexParameters, me) == 64);
    assert!(offset_of!(ReportParameters, me) == 72);
};

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ep::device::layout::tests::assert_same_fields;

    macro_rules! same {
        ($file:literal, $name:ident, $words:expr) => {
            let text = include_str!(concat!("../", $file));
            assert_same_fields(text, stringify!($name), &format!("{:#?}", $name::zeroed()), &$words);
            let size = concat!("static_assert(sizeof(", stringify!($name), ") == ");
            assert!(text.contains(&format!("{size}{} + sizeof(Rank),", offset_of!($name, me))), stringify!($name));
        };
    }

    #[test]
    fn structs_are_those_of_the_kernels() {
        let text = include_str!("../routing.cuh");
        let words = ["num_tokens", "max_tokens", "max_rows", "most_tokens", "segment_align", "rows_per_expert"];
        assert_same_fields(text, "Call", &format!("{:#?}", CallParameters::zeroed()), &words);
        assert!(text.contains(&format!("static_assert(sizeof(Call) == {},", size_of::<CallParameters>())));
        same!("route.cu", RouteParameters, ["x_row_bytes", "warm_rows"]);
        same!("low_latency.cu", LowLatencyParameters, ["copies", "x_rows"]);
        same!("payload.cu", PayloadParameters, ["max_rows", "max_tokens", "x_rows", "waits", "triggers", "spare"]);
        same!("receive.cu", ReceiveParameters, ["posts", "waits", "triggers", "spare"]);
        same!("arrange.cu", ArrangeParameters, ["segment_align", "rows_per_expert"]);
        same!("index.cu", IndexParameters, ["align", "spare"]);
    }
}
