//! Bad input that no single operation owns: views, names, environment. Each operation has a table of its own beside its tests.

use libtest_mimic::{Failed, Trial};
use moe_kernels::tensor::{Layout, MAX_DIMS};
use moe_kernels::{Backend, Cpu, DType, DeviceAddress, Error, Result, TensorView, TensorViewMut};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("bad input::views", views),
        Trial::test("bad input::device addresses", device_addresses),
        Trial::test("bad input::names", names),
        Trial::test("bad input::messages name argument, got and wanted", messages),
    ]
}

/// The call failed with `Invalid` that names `argument`.
fn names_argument<T: std::fmt::Debug>(case: &str, result: Result<T>, argument: &str) -> Result<(), Failed> {
    match result {
        Err(Error::Invalid { what, got, want, .. }) if what == argument && !got.is_empty() && !want.is_empty() => Ok(()),
        other => Err(format!("{case}: expected an error that names `{argument}`, got {other:?}").into()),
    }
}

fn views() -> Result<(), Failed> {
    let bytes = [0u8; 64];
    let mut writable = [0u8; 64];
    let huge = usize::MAX / 2;
    for (case, shape) in
        [("product beyond usize", vec![huge, 3]), ("bytes beyond isize", vec![huge]), ("empty, others huge", vec![huge, huge, 0])]
    {
        names_argument(case, TensorView::from_bytes(&bytes, DType::F32, &shape), "shape")?;
        names_argument(case, TensorViewMut::from_bytes(&mut writable, DType::F32, &shape), "shape")?;
    }
    names_argument("too many dimensions", TensorView::from_bytes(&bytes, DType::Bytes, &[1; MAX_DIMS + 1]), "shape")?;
    names_argument("too few bytes", TensorView::from_bytes(&bytes, DType::F32, &[17]), "bytes")?;
    names_argument("too few bytes", TensorViewMut::from_bytes(&mut writable, DType::F32, &[17]), "bytes")?;
    let odd = usize::from(bytes.as_ptr().addr().is_multiple_of(2));
    names_argument("misaligned", TensorView::from_bytes(&bytes[odd..], DType::BF16, &[4]), "address")?;
    let strided = |shape: &[usize], strides: &[usize]| Layout::strided("test", DType::F32, shape, strides);
    names_argument("one stride for two dimensions", strided(&[2, 2], &[1]), "strides")?;
    names_argument("last dimension not contiguous", strided(&[2, 2], &[4, 2]), "strides")?;
    names_argument("extent beyond usize", strided(&[3, 1], &[usize::MAX / 2, 1]), "shape")?;
    names_argument("strides reach beyond the bytes", TensorView::new(&bytes, strided(&[3, 4], &[7, 1])?), "bytes")?;
    // What is allowed: nothing at all, exactly all, an overlap that is only read.
    TensorView::from_bytes(&[], DType::F32, &[0, 5])?;
    TensorView::from_bytes(&bytes, DType::Bytes, &[64])?;
    TensorView::from_bytes(&bytes, DType::Bytes, &[])?;
    TensorView::new(&bytes, Layout::strided("test", DType::Bytes, &[9, 64], &[0, 1])?)?;
    Ok(())
}

fn device_addresses() -> Result<(), Failed> {
    let layout = Layout::contiguous("test", DType::BF16, &[4, 8])?;
    for address in [0, 1, 0x1001] {
        let device = DeviceAddress { device: 0, address };
        names_argument(
            "null or misaligned",
            {
                // SAFETY: no operation runs with this view: it is refused.
                unsafe { TensorView::from_device(device, layout) }
            },
            "address",
        )?;
        names_argument(
            "null or misaligned",
            {
                // SAFETY: no operation runs with this view: it is refused.
                unsafe { TensorViewMut::from_device(device, layout) }
            },
            "address",
        )?;
    }
    let view = {
        // SAFETY: no operation runs with this view: it is refused.
        unsafe { TensorView::from_device(DeviceAddress { device: 3, address: 0x1000 }, layout) }
    }?;
    assert_eq!(view.device().map(|d| d.device), Some(3));
    names_argument("a device address on the cpu", view.host("gate", "x"), "x")?;
    // An empty tensor may be anywhere.
    {
        // SAFETY: no operation runs with this view: it is refused.
        unsafe { TensorView::from_device(DeviceAddress { device: 0, address: 0 }, Layout::contiguous("test", DType::BF16, &[0, 8])?) }
    }?;
    Ok(())
}

fn names() -> Result<(), Failed> {
    names_argument("unknown backend", Backend::from_name("metal"), "name")?;
    names_argument("unknown dtype", "float".parse::<DType>(), "name")?;
    assert!(matches!(Backend::from_name("hip"), Err(Error::Unsupported { .. })), "hip is no silent fallback");
    match Backend::from_name("cuda") {
        Ok(backend) => assert_eq!(backend.name(), "cuda"),
        Err(error) => assert!(matches!(error, Error::Library { .. } | Error::Gpu { .. }), "{error}"),
    }
    for name in ["cuda:", "cuda:x", "cuda:-1", "cudax"] {
        names_argument("no ordinal", Backend::from_name(name), "name")?;
    }
    for dtype in DType::ALL {
        assert_eq!(dtype.name().parse::<DType>()?, dtype);
    }
    assert_eq!(Cpu::with_threads(3)?.num_threads(), 3);
    Ok(())
}

fn messages() -> Result<(), Failed> {
    let error = TensorView::from_bytes(&[0u8; 8], DType::F32, &[2, 4]).unwrap_err();
    assert_eq!(error.to_string(), "tensor: bytes is 8, expected 32 for f32 [2, 4] with strides [4, 1]");
    Ok(())
}
