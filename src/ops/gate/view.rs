//! Rows of host memory, after validation: safe slices, one for each row.
#![forbid(unsafe_code)]

use crate::tensor::DType;

/// Rows that are read. Any stride, also 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) dtype: DType,
    pub(super) num_rows: usize,
    pub(super) row_bytes: usize,
    pub(super) stride_bytes: usize,
}

impl<'a> Rows<'a> {
    /// The bytes of row `i`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        debug_assert!(i < self.num_rows);
        match self.row_bytes {
            // A tensor without elements has no bytes to index.
            0 => &[],
            _ => &self.bytes[i * self.stride_bytes..][..self.row_bytes],
        }
    }
}

/// Rows that are written: at least one, not empty, and none overlaps another.
#[derive(Debug)]
pub(super) struct RowsMut<'a> {
    /// From the first byte of the first row to the last of the last.
    pub(super) bytes: &'a mut [u8],
    pub(super) dtype: DType,
    pub(super) row_bytes: usize,
    pub(super) stride_bytes: usize,
}

impl<'a> RowsMut<'a> {
    /// The last element of each row, as rows of one element.
    pub(super) fn last_element(self) -> Self {
        let row_bytes = self.dtype.size();
        let bytes = &mut self.bytes[self.row_bytes - row_bytes..];
        RowsMut { bytes, row_bytes, ..self }
    }
}
