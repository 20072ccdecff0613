//! Rows after validation: of host memory as safe slices, of a device as addresses.
#![forbid(unsafe_code)]

use crate::tensor::DType;

/// Rows that are read. Any stride, also 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<R> {
    /// The first row's first element.
    pub(super) memory: R,
    pub(super) dtype: DType,
    pub(super) num_rows: usize,
    pub(super) row_bytes: usize,
    pub(super) stride_bytes: usize,
}

impl<'a> Rows<&'a [u8]> {
    /// The bytes of row `i`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        debug_assert!(i < self.num_rows);
        match self.row_bytes {
            // A tensor without elements has no bytes to index.
            0 => &[],
            _ => &self.memory[i * self.stride_bytes..][..self.row_bytes],
        }
    }
}

/// Rows that are written: at least one, not empty, and none overlaps another.
#[derive(Debug)]
pub(super) struct RowsMut<W> {
    /// From the first byte of the first row to the last of the last.
    pub(super) memory: W,
    pub(super) dtype: DType,
    pub(super) num_rows: usize,
    pub(super) row_bytes: usize,
    pub(super) stride_bytes: usize,
}

impl RowsMut<&mut [u8]> {
    /// The last element of each row, as rows of one element.
    pub(super) fn last_element(self) -> Self {
        let row_bytes = self.dtype.size();
        let memory = &mut self.memory[self.row_bytes - row_bytes..];
        RowsMut { memory, row_bytes, ..self }
    }
}
