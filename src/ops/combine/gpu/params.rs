//! The structs that the kernels of combine take, by the names and in the order of their sources.
#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};

use crate::ep::device::layout::RankParameters;

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct PrepareParameters {
    pub arrival: u64,
    pub y: u64,
    pub y_stride: u64,
    pub out: u64,
    pub primary: u64,
    pub slots: u64,
    pub weights: u64,
    pub row_weights: u64,
    pub row_weight_stride: u64,
    pub fold: u64,
    pub rows: u32,
    pub spare: u32,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct SendParameters {
    pub counts: u64,
    pub me: RankParameters,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct CombineParameters {
    pub routing: u64,
    pub sent: u64,
    pub counts: u64,
    pub out: u64,
    pub out_stride: u64,
    pub add_to: u64,
    pub add_stride: u64,
    pub rows_region: u64,
    pub fold_region: u64,
    pub folded: u64,
    pub folded_stride: u64,
    pub records: u64,
    pub rows: u64,
    pub places: u64,
    pub max_rows: u32,
    pub max_tokens: u32,
    pub me: RankParameters,
}

// As the kernels assert with the same numbers: no padding, and the rank at the end.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(PrepareParameters, me) == 88);
    assert!(offset_of!(SendParameters, me) == 8);
    assert!(offset_of!(CombineParameters, me) == 120);
};

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ep::device::layout::tests::assert_same_fields;

    #[test]
    fn structs_are_those_of_the_kernels() {
        let text = include_str!("../prepare.cu");
        assert_same_fields(text, "PrepareParameters", &format!("{:#?}", PrepareParameters::zeroed()), &["rows", "spare"]);
        let size = offset_of!(PrepareParameters, me);
        assert!(text.contains(&format!("static_assert(sizeof(PrepareParameters) == {size} + sizeof(Rank),")));
        let text = include_str!("../combine.cu");
        assert_same_fields(text, "CombineParameters", &format!("{:#?}", CombineParameters::zeroed()), &["max_rows", "max_tokens"]);
        let size = offset_of!(CombineParameters, me);
        assert!(text.contains(&format!("static_assert(sizeof(CombineParameters) == {size} + sizeof(Rank),")));
        let text = include_str!("../send.cu");
        assert_same_fields(text, "SendParameters", &format!("{:#?}", SendParameters::zeroed()), &[]);
        let size = offset_of!(SendParameters, me);
        assert!(text.contains(&format!("static_assert(sizeof(SendParameters) == {size} + sizeof(Rank),")));
    }
}
