//! Matrices between guard bands, contiguous or strided, as a caller would own them.

use std::borrow::Cow;
use std::sync::Arc;

use crate::backend::{Backend, Cuda};
use crate::check::Failed;
use crate::check::guarded::{Arena, Guarded, POISON};
use crate::error::{Error, Result};
use crate::gpu::Pinned;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

/// Device memory for the tensors of one rank's checks (arbitrary: those of the largest script fit several times).
const ARENA_BYTES: usize = 64 << 20;

/// Where one rank's tensors are.
#[derive(Debug, Clone)]
pub(in crate::check) struct Place {
    pub(in crate::check) backend: Backend,
    arena: Option<Arc<Arena>>,
}

impl Place {
    pub(in crate::check) fn new(backend: Backend) -> Result<Self, Failed> {
        let arena = match &backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(Arena::kept(cuda, ARENA_BYTES)?),
        };
        Ok(Place { backend, arena })
    }

    pub(in crate::check) fn cuda(&self) -> Option<&Cuda> {
        match &self.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda),
        }
    }

    /// Poison that is seen by the backend.
    pub(in crate::check) fn guarded(&self, len: usize) -> Guarded {
        Guarded::new(len).within(self.arena.as_ref())
    }

    /// The bytes under a view, wherever it is.
    pub(in crate::check) fn bytes<'a>(&self, what: &str, view: &TensorView<'a>) -> Result<Cow<'a, [u8]>> {
        match self.cuda() {
            None => view.host("check", what).map(Cow::Borrowed),
            Some(cuda) => cuda.stream().read(view).map(Cow::Owned),
        }
    }

    /// Its values.
    pub(in crate::check) fn numbers<T: bytemuck::AnyBitPattern>(&self, what: &str, view: &TensorView<'_>) -> Result<Vec<T>> {
        let bytes = self.bytes(what, view)?;
        Ok(bytes[..view.layout().extent_bytes()].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// Numbers on the host that a backend writes in the order of its work.
pub(in crate::check) enum HostNumbers {
    Plain(Vec<u32>),
    Pinned(Pinned),
}

impl HostNumbers {
    pub(in crate::check) fn new(place: &Place, len: usize) -> Result<Self> {
        Ok(match place.cuda() {
            None => HostNumbers::Plain(vec![0; len]),
            Some(cuda) => HostNumbers::Pinned(Pinned::new(cuda.device(), (4 * len).max(4))?),
        })
    }

    pub(in crate::check) fn get(&self, len: usize) -> &[u32] {
        match self {
            HostNumbers::Plain(numbers) => numbers,
            HostNumbers::Pinned(pinned) => &bytemuck::cast_slice(pinned.bytes())[..len],
        }
    }

    pub(in crate::check) fn get_mut(&mut self, len: usize) -> &mut [u32] {
        match self {
            HostNumbers::Plain(numbers) => numbers,
            HostNumbers::Pinned(pinned) => &mut bytemuck::cast_slice_mut(pinned.bytes_mut())[..len],
        }
    }
}

/// A `[rows, cols]` matrix of `dtype`. Everything that was not filled is poison.
pub(in crate::check) struct Matrix {
    memory: Guarded,
    place: Place,
    dtype: DType,
    rows: usize,
    cols: usize,
    /// In elements.
    stride: usize,
}

impl Matrix {
    /// All poison. `padded`: rows are `gap_bytes` apart, and the first starts 16 bytes after a 64-byte boundary.
    pub(in crate::check) fn poisoned(place: &Place, dtype: DType, rows: usize, cols: usize, padded: bool, gap_bytes: usize) -> Self {
        let stride = cols + if padded { gap_bytes / dtype.size() } else { 0 };
        let memory = Guarded::at_offset(rows * stride * dtype.size(), if padded { 16 } else { 0 }).within(place.arena.as_ref());
        Matrix { memory, place: place.clone(), dtype, rows, cols, stride }
    }

    /// The first rows hold `contiguous`.
    pub(in crate::check) fn filled(
        place: &Place,
        dtype: DType,
        (rows, cols): (usize, usize),
        padded: bool,
        gap_bytes: usize,
        contiguous: &[u8],
    ) -> Self {
        let mut matrix = Self::poisoned(place, dtype, rows, cols, padded, gap_bytes);
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

    pub(in crate::check) fn view(&self) -> Result<TensorView<'_>> {
        self.memory.view(&self.place.backend, 0, self.layout()?).map_err(in_setup)
    }

    pub(in crate::check) fn view_mut(&mut self) -> Result<TensorViewMut<'_>> {
        let layout = self.layout()?;
        self.memory.view_mut(&self.place.backend, 0, layout).map_err(in_setup)
    }

    /// Its first row.
    pub(in crate::check) fn vector(&self) -> Result<TensorView<'_>> {
        self.memory.view(&self.place.backend, 0, Layout::contiguous("check", self.dtype, &[self.cols])?).map_err(in_setup)
    }

    /// Waits for the backend and brings back what it wrote.
    pub(in crate::check) fn fetch(&mut self) -> Result<()> {
        self.memory.fetch(&self.place.backend).map_err(in_setup)
    }

    /// The first `num_rows` rows, contiguous.
    pub(in crate::check) fn contiguous(&self, num_rows: usize) -> Vec<u8> {
        let (row_bytes, stride_bytes) = (self.cols * self.dtype.size(), self.stride * self.dtype.size());
        (0..num_rows).flat_map(|r| self.memory.bytes()[r * stride_bytes..][..row_bytes].to_vec()).collect()
    }

    /// Fails when anything but the first `num_rows` rows was written.
    pub(in crate::check) fn check(&self, what: &str, num_rows: usize) -> Result<(), Failed> {
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

/// A failure of the checks' own memory ends the rank's walk.
pub(in crate::check) fn in_setup(Failed(why): Failed) -> Error {
    Error::Io { what: "memory of the checks".into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_beside_the_valid_rows_are_found() {
        let mut m = Matrix::filled(&Place::new(Backend::cpu()).unwrap(), DType::F32, (3, 4), true, 16, &[1; 32]);
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
