//! Tensors of C as views, and the reverse; structs that may grow.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use super::handle::{OP, required};
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceAddress, Layout, TensorView, TensorViewMut};

/// IEEE binary32.
pub const MOE_F32: i32 = 0;
/// IEEE binary16.
pub const MOE_F16: i32 = 1;
/// bfloat16: the upper half of binary32.
pub const MOE_BF16: i32 = 2;
/// OCP FP8 E4M3: largest 448, no infinity.
pub const MOE_E4M3: i32 = 3;
/// OCP FP8 E5M2: largest 57344.
pub const MOE_E5M2: i32 = 4;
/// FNUZ E4M3: largest 240, one NaN.
pub const MOE_E4M3FNUZ: i32 = 5;
/// FNUZ E5M2: largest 57344, one NaN.
pub const MOE_E5M2FNUZ: i32 = 6;
/// OCP E8M0 scale: 2^(bits - 127).
pub const MOE_E8M0: i32 = 7;
/// Bytes that are moved and never read as numbers.
pub const MOE_BYTES: i32 = 8;
/// 32-bit signed integer.
pub const MOE_I32: i32 = 9;
/// 64-bit signed integer.
pub const MOE_I64: i32 = 10;
/// 32-bit unsigned integer.
pub const MOE_U32: i32 = 11;

/// Most dimensions of a tensor.
pub const MOE_MAX_DIMS: usize = 4;

/// A tensor in memory of the caller: host memory for calls on the CPU, memory of the backend's GPU for calls on it. This struct never changes.
///
/// The memory must stay valid until the call returns; on a GPU until the stream has done what the call queued.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeTensor {
    /// First element. Aligned to the element size; rows that travel between ranks to 16. May be null when the tensor is empty.
    pub data: *mut c_void,
    /// One of MOE_F32 .. MOE_U32.
    pub dtype: i32,
    /// Dimensions that are used, at most MOE_MAX_DIMS.
    pub num_dims: i32,
    /// Extents, in elements.
    pub shape: [usize; MOE_MAX_DIMS],
    /// Distances between neighbours, in elements; the last one that is used is 1. All of them 0: contiguous, row after row.
    pub strides: [usize; MOE_MAX_DIMS],
}

const _: () = assert!(MOE_MAX_DIMS == crate::tensor::MAX_DIMS, "C describes every view.");

/// Where a call's tensors are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    Host,
    Device(u32),
}

/// The element type with this number.
pub(super) fn dtype(what: &str, number: i32) -> Result<DType> {
    let found = usize::try_from(number).ok().and_then(|n| DType::ALL.get(n).copied());
    found.ok_or_else(|| Error::invalid(OP, what, number, format!("0 to {}", DType::ALL.len() - 1)))
}

impl MoeTensor {
    fn layout(&self, what: &str) -> Result<Layout> {
        let num = usize::try_from(self.num_dims).ok().filter(|n| *n <= MOE_MAX_DIMS);
        let num = num.ok_or_else(|| Error::invalid(OP, format!("num_dims of {what}"), self.num_dims, format!("0 to {MOE_MAX_DIMS}")))?;
        let (dtype, shape, strides) = (dtype(what, self.dtype)?, &self.shape[..num], &self.strides[..num]);
        match strides.iter().all(|s| *s == 0) {
            true => Layout::contiguous(OP, dtype, shape),
            false => Layout::strided(OP, dtype, shape, strides),
        }
    }

    /// Where its bytes are in host memory; something that may be pointed to when there are none.
    fn host(&self, what: &str, layout: &Layout) -> Result<(*mut u8, usize)> {
        let len = layout.extent_bytes();
        if len == 0 {
            return Ok((std::ptr::dangling_mut::<u64>().cast(), 0));
        }
        match self.data.is_null() {
            true => Err(Error::invalid(OP, format!("data of {what}"), "null", format!("{len} bytes"))),
            false => Ok((self.data.cast(), len)),
        }
    }

    fn device(&self, device: u32) -> DeviceAddress {
        DeviceAddress { device, address: self.data.addr() as u64 }
    }

    /// # Safety
    /// The tensor's elements are memory of `place` that nobody writes while the view lives.
    unsafe fn view<'a>(&self, what: &str, place: Place) -> Result<TensorView<'a>> {
        let layout = self.layout(what)?;
        match place {
            Place::Host => {
                let (data, len) = self.host(what, &layout)?;
                // SAFETY: not null; the caller's promise, for exactly the layout's extent.
                TensorView::new(unsafe { std::slice::from_raw_parts(data, len) }, layout)
            }
            // SAFETY: the caller's promise.
            Place::Device(device) => unsafe { TensorView::from_device(self.device(device), layout) },
        }
    }

    /// # Safety
    /// The tensor's elements are memory of `place` that nobody else reads or writes while the view lives.
    unsafe fn view_mut<'a>(&self, what: &str, place: Place) -> Result<TensorViewMut<'a>> {
        let layout = self.layout(what)?;
        match place {
            Place::Host => {
                let (data, len) = self.host(what, &layout)?;
                // SAFETY: not null; the caller's promise, for exactly the layout's extent.
                TensorViewMut::new(unsafe { std::slice::from_raw_parts_mut(data, len) }, layout)
            }
            // SAFETY: the caller's promise.
            Place::Device(device) => unsafe { TensorViewMut::from_device(self.device(device), layout) },
        }
    }

    /// A view of the library, for C.
    pub(super) fn of(data: *mut c_void, layout: &Layout) -> Self {
        let mut out =
            MoeTensor { data, dtype: 0, num_dims: layout.shape().len() as i32, shape: [0; MOE_MAX_DIMS], strides: [0; MOE_MAX_DIMS] };
        let number = DType::ALL.iter().position(|d| *d == layout.dtype()).unwrap_or_default();
        out.dtype = number as i32;
        out.shape[..layout.shape().len()].copy_from_slice(layout.shape());
        out.strides[..layout.shape().len()].copy_from_slice(layout.strides());
        out
    }

    /// As [`of`](Self::of), from a view.
    pub(super) fn of_view(view: &TensorView<'_>) -> Result<Self> {
        let data = match view.device() {
            Some(address) => std::ptr::without_provenance_mut(address.address as usize),
            None => view.host(OP, "view")?.as_ptr().cast_mut().cast(),
        };
        Ok(Self::of(data, view.layout()))
    }
}

/// Tensors that a call reads.
///
/// # Safety
/// As the header requires: their elements are memory of `place` that nobody writes during the call.
pub(super) unsafe fn views<'a, const N: usize>(place: Place, tensors: [(&str, Option<&MoeTensor>); N]) -> Result<[TensorView<'a>; N]> {
    let mut views = [const { None }; N];
    for (view, (what, tensor)) in views.iter_mut().zip(tensors) {
        // SAFETY: the caller's promise.
        *view = Some(unsafe { required(what, tensor)?.view(what, place) }?);
    }
    Ok(views.map(|view| view.expect("every one was made")))
}

/// A tensor that may be missing.
///
/// # Safety
/// As [`views`].
pub(super) unsafe fn optional<'a>(place: Place, what: &str, tensor: Option<&MoeTensor>) -> Result<Option<TensorView<'a>>> {
    // SAFETY: the caller's promise.
    tensor.map(|tensor| unsafe { tensor.view(what, place) }).transpose()
}

/// A tensor that a call writes.
///
/// # Safety
/// As the header requires: its elements are memory of `place` that nobody else reads or writes during the call.
pub(super) unsafe fn output<'a>(place: Place, what: &str, tensor: Option<&MoeTensor>) -> Result<TensorViewMut<'a>> {
    // SAFETY: the caller's promise.
    unsafe { required(what, tensor)?.view_mut(what, place) }
}

/// As [`output`], of one that may be missing.
///
/// # Safety
/// As [`output`].
pub(super) unsafe fn optional_output<'a>(place: Place, what: &str, tensor: Option<&MoeTensor>) -> Result<Option<TensorViewMut<'a>>> {
    // SAFETY: the caller's promise.
    tensor.map(|tensor| unsafe { tensor.view_mut(what, place) }).transpose()
}

/// A struct whose first member is its size in bytes as the caller knows it, and which may grow at its end.
///
/// # Safety
/// Any bytes of it that the library writes are a value; zeros are one.
pub(super) unsafe trait Growing: Copy {
    const NAME: &'static str;
    /// Its size in the first version.
    const FIRST_BYTES: usize = size_of::<Self>();
}

/// Reads a struct that may be smaller, from a caller that was built with an older header, or larger: then what this library does not know must be 0.
///
/// # Safety
/// `from` is null or points to as many bytes as its first member says.
pub(super) unsafe fn read<T: Growing>(from: *const T) -> Result<T> {
    if from.is_null() || !from.is_aligned() {
        return Err(Error::invalid(OP, T::NAME, format!("at {:#x}", from.addr()), "a pointer to one"));
    }
    // SAFETY: aligned and not null; the first member is the size.
    let size = unsafe { from.cast::<usize>().read() };
    if size < T::FIRST_BYTES {
        return Err(Error::invalid(OP, format!("size of {}", T::NAME), size, format!("sizeof({}), at least {}", T::NAME, T::FIRST_BYTES)));
    }
    for at in size_of::<T>()..size {
        // SAFETY: below the size that the caller states.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            let why = "the library is older than the header that the caller was built with".into();
            return Err(Error::Unsupported { op: OP, what: format!("byte {at} of {}", T::NAME), why });
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both have at least as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), size.min(size_of::<T>())) };
    // SAFETY: zeros and what a caller wrote are a value (`Growing`).
    Ok(unsafe { value.assume_init() })
}

/// Writes as much of `value` as a caller with `size` bytes knows.
///
/// # Safety
/// `to` is null or points to `size` bytes.
pub(super) unsafe fn write<T: Growing>(to: *mut T, size: usize, value: &T) -> Result<()> {
    if to.is_null() || !to.is_aligned() {
        return Err(Error::invalid(OP, T::NAME, format!("at {:#x}", to.addr()), "a pointer to one"));
    }
    if size < T::FIRST_BYTES {
        return Err(Error::invalid(OP, format!("size of {}", T::NAME), size, format!("sizeof({}), at least {}", T::NAME, T::FIRST_BYTES)));
    }
    // SAFETY: `size` bytes are the caller's.
    unsafe { to.cast::<u8>().write_bytes(0, size) };
    // SAFETY: both have at least as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), to.cast::<u8>(), size.min(size_of::<T>())) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    #[repr(C)]
    struct Known {
        size: usize,
        a: u32,
        b: u32,
        added: u64,
    }

    // SAFETY: integers.
    unsafe impl Growing for Known {
        const NAME: &'static str = "Known";
        const FIRST_BYTES: usize = 16;
    }

    fn read_words(words: &[u64]) -> Result<Known> {
        // SAFETY: the first word says how many bytes there are.
        unsafe { read(words.as_ptr().cast()) }
    }

    #[test]
    fn structs_of_other_versions_are_read() {
        let known = |size, added| Known { size, a: 1, b: 2, added };
        let ab = 1 | 2 << 32;
        assert_eq!(read_words(&[16, ab]).unwrap(), known(16, 0));
        assert_eq!(read_words(&[24, ab, 9]).unwrap(), known(24, 9));
        // A newer caller, who does not use what is unknown here; and one who does.
        assert_eq!(read_words(&[32, ab, 9, 0]).unwrap(), known(32, 9));
        assert!(matches!(read_words(&[32, ab, 9, 1 << 63]), Err(Error::Unsupported { .. })));
        assert!(matches!(read_words(&[15, ab]), Err(Error::Invalid { .. })));
        // SAFETY: null is refused.
        assert!(matches!(unsafe { read::<Known>(std::ptr::null()) }, Err(Error::Invalid { .. })));
    }

    #[test]
    fn structs_of_other_versions_are_written() {
        for (size, want) in [(16, [16, 7, u64::MAX, u64::MAX]), (24, [24, 7, 8, u64::MAX]), (32, [32, 7, 8, 0])] {
            let mut words = [u64::MAX; 4];
            // SAFETY: there are `size` bytes.
            unsafe { write(words.as_mut_ptr().cast(), size, &Known { size, a: 7, b: 0, added: 8 }) }.unwrap();
            assert_eq!(words, want);
        }
    }

    #[test]
    fn tensors_are_checked() {
        let mut data = [0f32; 6];
        let good = MoeTensor { data: data.as_mut_ptr().cast(), dtype: MOE_F32, num_dims: 2, shape: [2, 3, 0, 0], strides: [0; 4] };
        let view = |t: MoeTensor| {
            // SAFETY: `data` is alive, or the tensor is refused.
            unsafe { t.view("t", Place::Host) }.map(|v| (v.shape().to_vec(), v.strides().to_vec()))
        };
        assert_eq!(view(good).unwrap(), (vec![2, 3], vec![3, 1]));
        assert_eq!(view(MoeTensor { shape: [2, 2, 0, 0], strides: [4, 1, 0, 0], ..good }).unwrap(), (vec![2, 2], vec![4, 1]));
        assert!(view(MoeTensor { data: std::ptr::null_mut(), shape: [0, 3, 0, 0], ..good }).is_ok());
        for bad in [
            MoeTensor { data: std::ptr::null_mut(), ..good },
            MoeTensor { data: good.data.wrapping_byte_add(1), ..good },
            MoeTensor { dtype: 12, ..good },
            MoeTensor { dtype: -1, ..good },
            MoeTensor { num_dims: 5, ..good },
            MoeTensor { num_dims: -1, ..good },
            MoeTensor { shape: [usize::MAX, 3, 0, 0], ..good },
            MoeTensor { strides: [3, 2, 0, 0], ..good },
        ] {
            assert!(matches!(view(bad), Err(Error::Invalid { .. })), "{bad:?}");
        }
    }

    #[test]
    fn types_have_the_numbers_of_the_header() {
        let numbers =
            [MOE_F32, MOE_F16, MOE_BF16, MOE_E4M3, MOE_E5M2, MOE_E4M3FNUZ, MOE_E5M2FNUZ, MOE_E8M0, MOE_BYTES, MOE_I32, MOE_I64, MOE_U32];
        for (number, want) in numbers.into_iter().zip(DType::ALL) {
            assert_eq!(dtype("dtype", number).unwrap(), want);
        }
        // By value too: the order of `DType::ALL` may not change what a number means.
        assert_eq!(
            (dtype("d", MOE_BF16).unwrap(), dtype("d", MOE_BYTES).unwrap(), dtype("d", MOE_U32).unwrap()),
            (DType::BF16, DType::Bytes, DType::U32)
        );
    }
}
