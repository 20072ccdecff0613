//! Memory of a rank's tensors.
#![forbid(unsafe_code)]

use moe_kernels::gpu::{Buffer, Stream};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, Result, TensorView, TensorViewMut};

/// Memory of a rank, where its backend works.
pub enum Memory {
    /// In units of 16 bytes, to which rows are aligned.
    Host(Vec<u128>),
    Device(Buffer, Stream),
}

impl Memory {
    /// Zeros on the host, anything on a GPU.
    pub fn new(backend: &Backend, len: usize) -> Result<Self> {
        Ok(match backend {
            Backend::Cuda(cuda) => Memory::Device(Buffer::new(cuda.device(), len.max(16))?, cuda.stream().clone()),
            _ => Memory::Host(vec![0; len.div_ceil(16).max(1)]),
        })
    }

    /// Copies `bytes` to `at`; waits.
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Memory::Host(memory) => bytemuck::cast_slice_mut::<u128, u8>(memory)[at..][..bytes.len()].copy_from_slice(bytes),
            Memory::Device(buffer, stream) => buffer.upload(stream, at, bytes)?,
        }
        Ok(())
    }

    /// The first `len` bytes; waits.
    pub fn read(&self, len: usize) -> Result<Vec<u8>> {
        match self {
            Memory::Host(memory) => Ok(bytemuck::cast_slice::<u128, u8>(memory)[..len].to_vec()),
            Memory::Device(buffer, stream) => {
                let mut bytes = vec![0; len];
                buffer.download(stream, 0, &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// Fills it with ones: NaN in every float type.
    pub fn poison(&mut self) -> Result<()> {
        match self {
            Memory::Host(memory) => memory.fill(u128::MAX),
            Memory::Device(buffer, stream) => buffer.fill(stream, 0, buffer.len(), 0xFF)?,
        }
        Ok(())
    }

    /// A tensor from `at` on.
    pub fn view(&self, at: usize, layout: Layout) -> Result<TensorView<'_>> {
        match self {
            Memory::Host(memory) => TensorView::new(&bytemuck::cast_slice(memory)[at..], layout),
            Memory::Device(buffer, _) => buffer.view(at, layout),
        }
    }

    /// A tensor from the start on, to be written.
    pub fn view_mut(&mut self, layout: Layout) -> Result<TensorViewMut<'_>> {
        match self {
            Memory::Host(memory) => TensorViewMut::new(bytemuck::cast_slice_mut(memory), layout),
            Memory::Device(buffer, _) => buffer.view_mut(0, layout),
        }
    }
}
