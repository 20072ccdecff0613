//! The rows that a rank received.

use crate::error::Result;
use crate::id::{Rank, Slot, Token};
use crate::tensor::{TensorView, TensorViewMut};

/// The lease of a bank, with views of what arrived in it. `combine` consumes it; dropping it gives the bank back.
pub struct Arrival {}

impl Arrival {
    /// Valid rows. `ByToken`: received rows. `ByExpert`: `segment_start[L]`, padding included. `ByExpertFixed`: `L * rows_per_expert`.
    pub fn num_rows(&self) -> usize {
        todo!()
    }

    /// Received rows `[max_rows, H]` (`ByExpertFixed`: `[L, rows_per_expert, H]`).
    pub fn x(&self) -> TensorView<'_> {
        todo!()
    }

    /// The bytes of one row.
    pub fn row(&self, slot: Slot) -> &[u8] {
        let _ = slot;
        todo!()
    }

    /// Rows of each local expert `[L]`; `ByToken`: how many rows have a route to it.
    pub fn num_rows_per_expert(&self) -> &[u32] {
        todo!()
    }

    /// Expert layouts: first slot of each segment and, last, the end `[L + 1]`. `ByToken`: empty.
    pub fn segment_start(&self) -> &[u32] {
        todo!()
    }

    /// The metadata of a row.
    pub fn metadata(&self, slot: Slot) -> Metadata<'_> {
        let _ = slot;
        todo!()
    }

    /// Scale bytes of all rows: row-major `[max_rows, S]`, strided inside the records, or the column-major words
    /// `[groups, ceil(S / 4), aligned rows]` as `u32`. `None` without scales.
    pub fn scales(&self) -> Option<TensorView<'_>> {
        todo!()
    }

    /// Unpacks the records of the valid rows: source `i32 [rows, 2]`, ids `i32 [rows, row_k]`, weights `f32 [rows, row_k]`. `row_k` is K for
    /// `ByToken` and 1 in the expert layouts.
    pub fn contiguous_metadata(&self, source: &mut [i32], topk_idx: &mut [i32], topk_weights: &mut [f32]) -> Result<()> {
        let _ = (source, topk_idx, topk_weights);
        todo!()
    }

    /// `ByToken`: for grouped GEMMs that gather. Fills `gather_idx` with the slots of the rows of each local expert, ascending, each segment
    /// padded to a multiple of `align` with -1, and `segment_start` `[L + 1]`; returns the entries used.
    pub fn gather_idx(&self, align: usize, gather_idx: &mut [i32], segment_start: &mut [u32]) -> Result<usize> {
        let _ = (align, gather_idx, segment_start);
        todo!()
    }

    /// Rows dropped at this rank.
    pub fn num_dropped(&self) -> usize {
        todo!()
    }

    /// The rows that experts write for a zero-copy combine: `[max_rows, H]` of the combine type.
    pub fn expert_output(&mut self) -> TensorViewMut<'_> {
        todo!()
    }
}

/// The metadata record of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metadata<'a> {
    /// Where the row came from; `None` for a padding row (recorded as rank -1, token -1).
    pub source: Option<(Rank, Token)>,
    /// Ids of its routes `[row_k]`.
    pub topk_idx: &'a [i32],
    /// Weights of its routes `[row_k]`; 0 where masked.
    pub topk_weights: &'a [f32],
}
