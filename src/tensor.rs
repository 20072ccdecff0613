//! Element types and borrowed tensor views over host memory and opaque device addresses.

use std::fmt;

use half::{bf16, f16};

use crate::error::{Error, Result};

/// Most dimensions that a view has.
pub const MAX_DIMS: usize = 4;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of binary32.
    BF16,
    /// OCP FP8 E4M3 (`e4m3fn`): bias 7, largest 448, no infinity, NaN 0x7F and 0xFF.
    E4M3,
    /// OCP FP8 E5M2: bias 15, largest 57344, infinities.
    E5M2,
    /// FNUZ E4M3: bias 8, largest 240, one NaN at 0x80, no negative zero.
    E4M3Fnuz,
    /// FNUZ E5M2: bias 16, largest 57344, one NaN at 0x80, no negative zero.
    E5M2Fnuz,
    /// OCP E8M0 scale: the value is 2^(bits - 127), 0xFF is NaN.
    E8M0,
    /// Bytes that are moved and never read as numbers.
    Bytes,
    /// 32-bit signed integer (indices).
    I32,
    /// 64-bit signed integer (indices).
    I64,
    /// 32-bit unsigned integer (counts).
    U32,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 12] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::E4M3,
        DType::E5M2,
        DType::E4M3Fnuz,
        DType::E5M2Fnuz,
        DType::E8M0,
        DType::Bytes,
        DType::I32,
        DType::I64,
        DType::U32,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I64 => 8,
            _ => 1,
        }
    }

    /// The usual name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::E4M3Fnuz => "e4m3fnuz",
            DType::E5M2Fnuz => "e5m2fnuz",
            DType::E8M0 => "e8m0",
            DType::Bytes => "bytes",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U32 => "u32",
        }
    }

    /// `true` for the four FP8 formats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2 | DType::E4M3Fnuz | DType::E5M2Fnuz)
    }

    /// `true` for f32, f16 and bf16.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        DType::ALL
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| Error::invalid("dtype", "name", format!("`{name}`"), DType::ALL.map(DType::name).join(", ")))
    }
}

/// A Rust type whose values are elements of one [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),* $(,)?) => { $(impl Element for $ty { const DTYPE: DType = DType::$dtype; })* };
}
element!(f32 => F32, f16 => F16, bf16 => BF16, u8 => Bytes, i32 => I32, i64 => I64, u32 => U32);

/// An address in the memory of a device. It cannot be dereferenced here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceAddress {
    /// Ordinal of the device.
    pub device: u32,
    /// The address as the driver knows it.
    pub address: u64,
}

/// What a view is but for its extents and its address, in one word: type, number of dimensions and device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind(u64);

impl Kind {
    /// Of no view.
    pub(crate) const ABSENT: Kind = Kind(u64::MAX);

    fn new(layout: &Layout, device: Option<u32>) -> Self {
        let device = device.map_or(0, |device| u64::from(device) + 1);
        Kind(device << 16 | (layout.dtype as u64) << 8 | u64::from(layout.num_dims))
    }

    /// The ordinal of the device; `None` for host memory.
    #[inline(always)]
    pub(crate) fn device(self) -> Option<u32> {
        (self.0 >> 16).checked_sub(1).map(|device| device as u32)
    }

    /// The bits that differ: to compare many at once.
    #[inline(always)]
    pub(crate) fn differs(self, other: Kind) -> u64 {
        self.0 ^ other.0
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Shape, strides (in elements) and type of a view; the last dimension of every view is contiguous.
///
/// A list of hundreds of matrices is looked through at each call, so a view is small, and what is read of a matrix lies at its front.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    /// Kept, since every call asks for it of every tensor.
    extent_bytes: usize,
    dtype: DType,
    num_dims: u8,
    /// The extents, then the strides, then zeros.
    dims: [usize; 2 * MAX_DIMS],
}

impl Layout {
    /// Row-major and contiguous.
    pub fn contiguous(op: &'static str, dtype: DType, shape: &[usize]) -> Result<Self> {
        let mut layout = Self::of_extents(op, dtype, shape)?;
        let mut stride = 1usize;
        for (d, &size) in shape.iter().enumerate().rev() {
            layout.dims[shape.len() + d] = stride;
            // An empty tensor has strides too; an extent of 0 must not zero those before it.
            stride = stride.checked_mul(size.max(1)).ok_or_else(|| overflow(op, shape))?;
        }
        // Most have elements, and those lie one behind the other.
        match stride.checked_mul(dtype.size()) {
            Some(extent_bytes) if extent_bytes <= isize::MAX as usize && !shape.contains(&0) => Ok(Layout { extent_bytes, ..layout }),
            _ => layout.checked(op),
        }
    }

    /// With the given strides in elements. The last must be 1.
    pub fn strided(op: &'static str, dtype: DType, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let mut layout = Self::of_extents(op, dtype, shape)?;
        few_dims(op, "strides", strides)?;
        if shape.len() != strides.len() {
            let got = format!("{} strides for {} dimensions", strides.len(), shape.len());
            return Err(Error::invalid(op, "strides", got, "one for each dimension"));
        }
        if strides.last().is_some_and(|&s| s != 1) {
            return Err(Error::invalid(op, "strides", format!("{strides:?}"), "a last stride of 1"));
        }
        layout.dims[shape.len()..][..strides.len()].copy_from_slice(strides);
        layout.checked(op)
    }

    /// With its extents, and strides of 0 still.
    #[inline(always)]
    fn of_extents(op: &'static str, dtype: DType, shape: &[usize]) -> Result<Self> {
        few_dims(op, "shape", shape)?;
        let mut layout = Layout { extent_bytes: 0, dtype, num_dims: shape.len() as u8, dims: [0; 2 * MAX_DIMS] };
        // One by one: a copy of unknown length is a call.
        layout.dims.iter_mut().zip(shape).for_each(|(to, from)| *to = *from);
        Ok(layout)
    }

    fn checked(self, op: &'static str) -> Result<Self> {
        let extent_bytes = self.sum_of_extents().ok_or_else(|| overflow(op, self.shape()))?;
        Ok(Layout { extent_bytes, ..self })
    }

    fn sum_of_extents(&self) -> Option<usize> {
        // The product of the extents must fit too, or `len` overflows.
        self.shape().iter().try_fold(self.dtype.size(), |a, &b| a.checked_mul(b))?;
        if self.shape().contains(&0) {
            return Some(0);
        }
        let mut last = 0usize;
        for (&size, &stride) in self.shape().iter().zip(self.strides()) {
            last = last.checked_add((size - 1).checked_mul(stride)?)?;
        }
        // Slices hold at most isize::MAX bytes.
        last.checked_add(1)?.checked_mul(self.dtype.size()).filter(|&b| b <= isize::MAX as usize)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> &[usize] {
        &self.dims[..usize::from(self.num_dims)]
    }

    /// Distance between neighbours in each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        let num_dims = usize::from(self.num_dims);
        &self.dims[num_dims..2 * num_dims]
    }

    /// Bytes from the first element to the end of the last.
    pub fn extent_bytes(&self) -> usize {
        self.extent_bytes
    }

    /// The first three of extents and strides: rows, columns and the stride of rows of a matrix; the extent first of all with one dimension.
    #[inline(always)]
    pub(crate) fn first_dims(&self) -> [usize; 3] {
        [self.dims[0], self.dims[1], self.dims[2]]
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .field("extent_bytes", &self.extent_bytes)
            .finish()
    }
}

#[inline(always)]
fn few_dims(op: &'static str, what: &str, values: &[usize]) -> Result<()> {
    if values.len() <= MAX_DIMS { Ok(()) } else { Err(many_dims(op, what, values)) }
}

#[cold]
fn many_dims(op: &'static str, what: &str, values: &[usize]) -> Error {
    Error::invalid(op, what, format!("{} dimensions", values.len()), format!("at most {MAX_DIMS}"))
}

fn overflow(op: &'static str, shape: &[usize]) -> Error {
    Error::invalid(op, "shape", format!("{shape:?}"), "a tensor of at most isize::MAX bytes")
}

macro_rules! layout_getters {
    () => {
        /// Element type.
        pub fn dtype(&self) -> DType {
            self.layout.dtype
        }

        /// Extents.
        pub fn shape(&self) -> &[usize] {
            self.layout.shape()
        }

        /// Distance between neighbours in each dimension, in elements.
        pub fn strides(&self) -> &[usize] {
            self.layout.strides()
        }

        /// Shape, strides and element type.
        pub fn layout(&self) -> &Layout {
            &self.layout
        }

        /// The device address, when the view is not over host memory.
        pub fn device(&self) -> Option<DeviceAddress> {
            self.kind.device().map(|device| DeviceAddress { device, address: self.address })
        }

        /// What it is but for its extents and its address.
        #[inline(always)]
        pub(crate) fn kind(&self) -> Kind {
            self.kind
        }

        /// Its address on a device; 0 in host memory.
        #[inline(always)]
        pub(crate) fn address(&self) -> u64 {
            self.address
        }
    };
}

/// A read-only tensor.
///
/// ```
/// use moe_kernels::tensor::{DType, TensorView};
/// let x = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let view = TensorView::from_slice(&x, &[2, 3])?;
/// assert_eq!((view.dtype(), view.shape()), (DType::F32, &[2, 3][..]));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug)]
#[repr(C)]
pub struct TensorView<'a> {
    /// 0 in host memory.
    address: u64,
    kind: Kind,
    layout: Layout,
    /// The bytes in host memory; none of a device's.
    host: &'a [u8],
}

impl Clone for TensorView<'_> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Copy for TensorView<'_> {}

/// A tensor that an operation writes.
#[derive(Debug)]
#[repr(C)]
pub struct TensorViewMut<'a> {
    /// As in [`TensorView`].
    address: u64,
    kind: Kind,
    layout: Layout,
    host: &'a mut [u8],
}

const VIEW: &str = "tensor";

fn check_host(layout: &Layout, bytes: &[u8]) -> Result<()> {
    let need = layout.extent_bytes();
    if bytes.len() < need {
        let want = format!("{need} for {} {:?} with strides {:?}", layout.dtype, layout.shape(), layout.strides());
        return Err(Error::invalid(VIEW, "bytes", bytes.len(), want));
    }
    let address = bytes.as_ptr().addr();
    if need > 0 && !address.is_multiple_of(layout.dtype.size()) {
        let want = format!("a multiple of {}", layout.dtype.size());
        return Err(Error::invalid(VIEW, "address", format!("{address:#x}"), want));
    }
    Ok(())
}

#[inline]
fn check_device(layout: &Layout, address: DeviceAddress) -> Result<()> {
    let DeviceAddress { address, .. } = address;
    let is_bad = layout.extent_bytes() > 0 && (address == 0 || address & (layout.dtype.size() as u64 - 1) != 0);
    if is_bad { Err(no_address(layout, address)) } else { Ok(()) }
}

#[cold]
fn no_address(layout: &Layout, address: u64) -> Error {
    let want = format!("not null and a multiple of {}", layout.dtype.size());
    Error::invalid(VIEW, "address", format!("{address:#x}"), want)
}

impl<'a> TensorView<'a> {
    /// A contiguous view of typed elements.
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice(data), T::DTYPE, shape)
    }

    /// A contiguous view of bytes that hold elements of `dtype`.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::new(bytes, Layout::contiguous(VIEW, dtype, shape)?)
    }

    /// A view of bytes with any layout.
    pub fn new(bytes: &'a [u8], layout: Layout) -> Result<Self> {
        check_host(&layout, bytes)?;
        Ok(Self { address: 0, kind: Kind::new(&layout, None), layout, host: bytes })
    }

    /// A view of device memory that the caller owns: a raw pointer with a shape. Calls are the same as with views that know their owner.
    ///
    /// ```
    /// use moe_kernels::gpu::{Buffer, Stream};
    /// use moe_kernels::ops::gate::{GateOptions, gate};
    /// use moe_kernels::tensor::{DType, DeviceAddress, Layout, TensorView, TensorViewMut};
    /// use moe_kernels::{Backend, Cuda};
    ///
    /// // Of a GPU and a stream that another library made, say.
    /// let Ok(Backend::Cuda(theirs)) = Backend::cuda(0) else { return Ok(()) }; // no GPU here
    /// let memory = Buffer::new(theirs.device(), 48)?;
    /// let (stream, pointer) = (theirs.stream().raw(), memory.address().address);
    ///
    /// // SAFETY: the stream lives to the end of this example.
    /// let stream = unsafe { Stream::external(theirs.device(), stream) }?;
    /// let backend = Backend::Cuda(Cuda::on(stream.clone()));
    /// let device = theirs.device().ordinal();
    /// let view = |offset, shape: &[usize]| {
    ///     let layout = Layout::contiguous("example", DType::F32, shape)?;
    ///     // SAFETY: x, w and g do not overlap, are inside the 48 bytes, and these live until the stream has been waited for.
    ///     unsafe { TensorViewMut::from_device(DeviceAddress { device, address: pointer + offset }, layout) }
    /// };
    /// let (mut x, mut w, mut g) = (view(0, &[1, 4])?, view(16, &[4])?, view(32, &[1])?);
    /// stream.write(&mut x, bytemuck::cast_slice(&[1.0f32, 2.0, 3.0, 0.0]))?;
    /// stream.write(&mut w, bytemuck::cast_slice(&[0.5f32, 0.25, -0.5, 0.0]))?;
    /// gate(&backend, x.as_view(), w.as_view(), &GateOptions::default(), g.reborrow())?;
    /// assert_eq!(stream.read(&g.as_view())?, 0.37754068f32.to_le_bytes());
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    ///
    /// # Safety
    /// The layout's extent from `address` on is memory of that device, and stays so until every operation that was given the view has run.
    #[inline]
    pub unsafe fn from_device(address: DeviceAddress, layout: Layout) -> Result<Self> {
        check_device(&layout, address)?;
        Ok(Self { address: address.address, kind: Kind::new(&layout, Some(address.device)), layout, host: &[] })
    }

    layout_getters!();

    /// The bytes under the view, from its first element on; an error that names `what` when they are on a device.
    pub fn host(&self, op: &'static str, what: impl Into<String>) -> Result<&'a [u8]> {
        self.device().map_or(Ok(self.host), |at| Err(not_host(op, what, at)))
    }
}

impl<'a> TensorViewMut<'a> {
    /// A contiguous view of typed elements.
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice_mut(data), T::DTYPE, shape)
    }

    /// A contiguous view of bytes that hold elements of `dtype`.
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::new(bytes, Layout::contiguous(VIEW, dtype, shape)?)
    }

    /// A view of bytes with any layout.
    pub fn new(bytes: &'a mut [u8], layout: Layout) -> Result<Self> {
        check_host(&layout, bytes)?;
        Ok(Self { address: 0, kind: Kind::new(&layout, None), layout, host: bytes })
    }

    /// A view of device memory that the caller owns.
    ///
    /// # Safety
    /// The layout's extent from `address` on is memory of that device, and stays so until every operation that was given the view has run.
    #[inline]
    pub unsafe fn from_device(address: DeviceAddress, layout: Layout) -> Result<Self> {
        check_device(&layout, address)?;
        Ok(Self { address: address.address, kind: Kind::new(&layout, Some(address.device)), layout, host: &mut [] })
    }

    layout_getters!();

    /// The bytes under the view; an error that names `what` when they are on a device.
    pub fn host(&self, op: &'static str, what: impl Into<String>) -> Result<&[u8]> {
        match self.device() {
            None => Ok(self.host),
            Some(at) => Err(not_host(op, what, at)),
        }
    }

    /// The bytes under the view, to be written; an error that names `what` when they are on a device.
    pub fn host_mut(&mut self, op: &'static str, what: impl Into<String>) -> Result<&mut [u8]> {
        match self.device() {
            None => Ok(self.host),
            Some(at) => Err(not_host(op, what, at)),
        }
    }

    /// The same view, to be read.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { address: self.address, kind: self.kind, layout: self.layout, host: self.host }
    }

    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { address: self.address, kind: self.kind, layout: self.layout, host: self.host }
    }
}

fn not_host(op: &'static str, what: impl Into<String>, DeviceAddress { device, address }: DeviceAddress) -> Error {
    let got = format!("at address {address:#x} of device {device}");
    Error::invalid(op, what, got, "in host memory (the backend is cpu)")
}
