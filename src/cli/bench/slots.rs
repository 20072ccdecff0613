//! Buffers that take turns: as many tensors of one layout side by side, so that no call finds its data in a cache.
#![forbid(unsafe_code)]

use std::cell::{Ref, RefCell, RefMut};

use half::{bf16, f16};
use moe_kernels::gpu::{Buffer, Stream};
use moe_kernels::random::{SplitMix64, symmetric_f32};
use moe_kernels::tensor::Layout;
use moe_kernels::{DType, Result, TensorView, TensorViewMut};
use rayon::prelude::*;

/// Each tensor starts at a multiple of this (spec: what cuBLASLt's choice of a kernel assumes).
const ALIGN: usize = 256;

/// Most elements of all patterns together (arbitrary: making them on the host takes a tenth of a second).
const MAX_PATTERN_ELEMENTS: usize = 1 << 24;

/// Tensors of one layout, each with one of a few random patterns.
pub struct Slots {
    buffer: RefCell<Buffer>,
    layout: Layout,
    stride: usize,
    num: usize,
    patterns: Vec<Pattern>,
}

/// Numbers, and their bytes in the type.
struct Pattern {
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Slots {
    /// `num` tensors of uniform numbers below `scale` in magnitude, rounded to the type. Large tensors share patterns, at least two.
    pub fn random(stream: &Stream, dtype: DType, shape: &[usize], num: usize, seed: u64, scale: f32) -> Result<Self> {
        let layout = Layout::contiguous("bench", dtype, shape)?;
        let num_elements: usize = shape.iter().product();
        let num_patterns = (MAX_PATTERN_ELEMENTS / num_elements.max(1)).clamp(2, num.max(2));
        let pattern = |stream: usize| {
            let random = SplitMix64::stream(seed, stream as u64);
            (0..num_elements).into_par_iter().map(|i| rounded(dtype, symmetric_f32(random.at(i as u64)) * scale)).collect()
        };
        Slots::new(stream, layout, num, (0..num_patterns).map(pattern).collect())
    }

    /// `num` tensors that hold the patterns in turn; their values are exact in the type.
    pub fn new(stream: &Stream, layout: Layout, num: usize, patterns: Vec<Vec<f32>>) -> Result<Self> {
        let pattern = |values: Vec<f32>| Pattern { bytes: bytes(layout.dtype(), &values), values };
        let patterns: Vec<Pattern> = patterns.into_iter().map(pattern).collect();
        let stride = layout.extent_bytes().next_multiple_of(ALIGN);
        let slots = Slots { buffer: RefCell::new(Buffer::new(stream.device(), stride * num)?), layout, stride, num, patterns };
        (0..num).try_for_each(|slot| slots.reset(stream, slot))?;
        Ok(slots)
    }

    /// `num` tensors that hold anything: for what is written before it is read.
    pub fn scratch(stream: &Stream, dtype: DType, shape: &[usize], num: usize) -> Result<Self> {
        let layout = Layout::contiguous("bench", dtype, shape)?;
        let stride = layout.extent_bytes().next_multiple_of(ALIGN);
        let buffer = RefCell::new(Buffer::new(stream.device(), stride * num)?);
        Ok(Slots { buffer, layout, stride, num, patterns: vec![Pattern { values: Vec::new(), bytes: Vec::new() }] })
    }

    /// What slot `i`, modulo their number, holds at first.
    pub fn values(&self, i: usize) -> &[f32] {
        &self.pattern(i).values
    }

    fn pattern(&self, i: usize) -> &Pattern {
        &self.patterns[i % self.num % self.patterns.len()]
    }

    /// Brings a slot back to what it held at first.
    pub fn reset(&self, stream: &Stream, i: usize) -> Result<()> {
        self.buffer.borrow().upload(stream, i % self.num * self.stride, &self.pattern(i).bytes)
    }

    /// Fills a slot with ones: NaN in every type.
    pub fn poison(&self, stream: &Stream, i: usize) -> Result<()> {
        self.buffer.borrow().fill(stream, i % self.num * self.stride, self.layout.extent_bytes(), 0xFF)
    }

    /// The bytes of a slot now.
    pub fn fetch(&self, stream: &Stream, i: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.layout.extent_bytes()];
        self.buffer.borrow().download(stream, i % self.num * self.stride, &mut bytes)?;
        Ok(bytes)
    }

    /// Shape and type of a slot.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// To be read.
    pub fn read(&self) -> Read<'_> {
        Read { buffer: self.buffer.borrow(), slots: self }
    }

    /// To be written.
    pub fn write(&self) -> Write<'_> {
        Write { buffer: self.buffer.borrow_mut(), slots: self }
    }
}

/// Slots that are read.
pub struct Read<'a> {
    buffer: Ref<'a, Buffer>,
    slots: &'a Slots,
}

impl Read<'_> {
    /// Slot `i`, modulo their number.
    pub fn slot(&self, i: usize) -> Result<TensorView<'_>> {
        self.buffer.view(i % self.slots.num * self.slots.stride, self.slots.layout)
    }

    /// The same under another shape of as many elements.
    pub fn slot_as(&self, i: usize, layout: Layout) -> Result<TensorView<'_>> {
        self.buffer.view(i % self.slots.num * self.slots.stride, layout)
    }
}

/// Slots that are written.
pub struct Write<'a> {
    buffer: RefMut<'a, Buffer>,
    slots: &'a Slots,
}

impl Write<'_> {
    /// Slot `i`, modulo their number.
    pub fn slot(&mut self, i: usize) -> Result<TensorViewMut<'_>> {
        self.buffer.view_mut(i % self.slots.num * self.slots.stride, self.slots.layout)
    }

    /// The same under another shape of as many elements.
    pub fn slot_as(&mut self, i: usize, layout: Layout) -> Result<TensorViewMut<'_>> {
        self.buffer.view_mut(i % self.slots.num * self.slots.stride, layout)
    }
}

/// Rounded to the type, as f32.
pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Values as bytes of the type.
pub fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let pairs = |narrow: fn(f32) -> [u8; 2]| values.par_iter().map(|&x| narrow(x)).collect::<Vec<_>>().into_flattened();
    match dtype {
        DType::BF16 => pairs(|x| bf16::from_f32(x).to_le_bytes()),
        DType::F16 => pairs(|x| f16::from_f32(x).to_le_bytes()),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Bytes of the type as values.
pub fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pairs = |widen: fn([u8; 2]) -> f32| bytes.par_chunks_exact(2).map(|pair| widen([pair[0], pair[1]])).collect();
    match dtype {
        DType::BF16 => pairs(|pair| bf16::from_le_bytes(pair).to_f32()),
        DType::F16 => pairs(|pair| f16::from_le_bytes(pair).to_f32()),
        _ => bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect(),
    }
}
