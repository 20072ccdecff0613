//! Matrices between guard bands, contiguous or strided, as a caller would own them.

use crate::check::Failed;
use crate::check::guarded::{Guarded, POISON};
use crate::error::Result;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

/// A `[rows, cols]` matrix of `dtype`. Everything that was not filled is poison.
pub(super) struct Matrix {
    memory: Guarded,
    dtype: DType,
    rows: usize,
    cols: usize,
    /// In elements.
    stride: usize,
}

impl Matrix {
    /// All poison. `padded`: rows are `gap_bytes` apart, and the first starts 16 bytes after a 64-byte boundary.
    pub(super) fn poisoned(dtype: DType, rows: usize, cols: usize, padded: bool, gap_bytes: usize) -> Self {
        let stride = cols + if padded { gap_bytes / dtype.size() } else { 0 };
        let memory = Guarded::at_offset(rows * stride * dtype.size(), if padded { 16 } else { 0 });
        Matrix { memory, dtype, rows, cols, stride }
    }

    /// The first rows hold `contiguous`.
    pub(super) fn filled(dtype: DType, rows: usize, cols: usize, padded: bool, gap_bytes: usize, contiguous: &[u8]) -> Self {
        let mut matrix = Self::poisoned(dtype, rows, cols, padded, gap_bytes);
        let (row_bytes, stride_bytes) = (cols * dtype.size(), matrix.stride * dtype.size());
        if row_bytes > 0 {
            for (r, row) in contiguous.chunks_exact(row_bytes).enumerate() {
                matrix.memory.bytes_mut()[r * stride_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        matrix
    }

    fn layout(&self) -> Result<Layout> {
        Layout::strided("check", self.dtype, &[self.rows, self.cols], &[self.stride, 1])
    }

    pub(super) fn view(&self) -> Result<TensorView<'_>> {
        TensorView::new(self.memory.bytes(), self.layout()?)
    }

    pub(super) fn view_mut(&mut self) -> Result<TensorViewMut<'_>> {
        let layout = self.layout()?;
        TensorViewMut::new(self.memory.bytes_mut(), layout)
    }

    /// The first `num_rows` rows, contiguous.
    pub(super) fn contiguous(&self, num_rows: usize) -> Vec<u8> {
        let (row_bytes, stride_bytes) = (self.cols * self.dtype.size(), self.stride * self.dtype.size());
        (0..num_rows).flat_map(|r| self.memory.bytes()[r * stride_bytes..][..row_bytes].to_vec()).collect()
    }

    /// Fails when anything but the first `num_rows` rows was written.
    pub(super) fn check(&self, what: &str, num_rows: usize) -> Result<(), Failed> {
        self.memory.check(what)?;
        let (row_bytes, stride_bytes) = (self.cols * self.dtype.size(), self.stride * self.dtype.size());
        let written = |i: &usize| i / stride_bytes < num_rows && i % stride_bytes < row_bytes;
        match (0..self.memory.bytes().len()).filter(|i| !written(i)).find(|&i| self.memory.bytes()[i] != POISON) {
            None => Ok(()),
            Some(i) => {
                let (row, byte) = (i / stride_bytes, i % stride_bytes);
                Err(Failed(format!("{what}: byte {byte} of row {row} was written; {num_rows} rows of {row_bytes} bytes are valid")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_beside_the_valid_rows_are_found() {
        let mut m = Matrix::filled(DType::F32, 3, 4, true, 16, &[1; 32]);
        assert_eq!(m.contiguous(2), [1; 32]);
        m.check("m", 2).unwrap();
        for at in [16, 31, 64] {
            let kept = m.memory.bytes()[at];
            m.memory.bytes_mut()[at] = 7;
            assert!(m.check("m", 2).unwrap_err().0.contains("was written"));
            m.memory.bytes_mut()[at] = kept;
        }
    }
}
