//! Slices and streams of the crate cudarc.

use cudarc::driver::{CudaContext, CudaStream};
use libtest_mimic::Failed;
use moe_kernels::gpu::cudarc::{Reading, Writing, backend, stream as adapt};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, DType, TensorView, TensorViewMut};

use super::kernels::{KERNELS, Scale, Test as Kernel, check_scale, painted, scale, scaled};
use super::memory::names;
use super::{Needs, Outcome, Test, ensure};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("cudarc: slices and streams", Needs::Gpu, slices),
    ("cudarc: what is refused", Needs::Gpu, refused),
    ("cudarc: a stream is kept", Needs::Gpu, kept),
];

fn address(view: TensorView<'_>) -> Result<u64, Failed> {
    Ok(view.device().ok_or("a view of a slice is on a device")?.address)
}

fn address_mut(view: TensorViewMut<'_>) -> Result<u64, Failed> {
    Ok(view.device().ok_or("a view of a slice is on a device")?.address)
}

/// `scale` through adapters on a stream of cudarc.
fn run(stream: &std::sync::Arc<CudaStream>) -> Outcome {
    let input = painted(1000, 11);
    let from = stream.clone_htod(&input)?;
    let mut to = stream.alloc_zeros::<u32>(2000)?;
    let Backend::Cuda(cuda) = backend(stream)? else { return Err("not the cuda backend".into()) };
    let kernel = KERNELS.get("test", cuda.stream(), Kernel::Scale { factor: 3 })?;
    {
        // SAFETY: the kernel runs in `stream`.
        let from = unsafe { Reading::new(&from, stream, &[10, 100]) }?;
        let mut part = to.slice_mut(500..1500);
        // SAFETY: as above.
        let mut to = unsafe { Writing::new(&mut part, stream, &[1000]) }?;
        let (from, to) = (address(from.view())?, address_mut(to.view())?);
        cuda.device().adopt("test", "x", from)?;
        cuda.device().adopt("test", "out", to)?;
        scale(cuda.stream(), kernel, Scale { from, to, num: 1000, addend: 9 }, false)?;
    }
    // Another stream of cudarc reads it: cudarc makes it wait, because the guard has told it of the write.
    let other = stream.context().new_stream()?;
    let words = other.clone_dtoh(&to)?;
    let mut want = vec![0; 2000];
    want[500..1500].copy_from_slice(&scaled(&input, 3, 9));
    ensure(words == want, "wrong words")
}

fn slices() -> Outcome {
    let context = CudaContext::new(0)?;
    run(&context.new_stream()?)?;
    run(&context.default_stream())?;
    run(&context.per_thread_stream())
}

fn refused() -> Outcome {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let mut slice = stream.alloc_zeros::<u8>(100)?;
    let layout = |shape: &[usize]| Layout::contiguous("test", DType::F32, shape);
    // SAFETY: no operation runs with these views.
    names("too few bytes", unsafe { Reading::strided(&slice, &stream, layout(&[26])?) }, "slice", &["100 bytes", "104"])?;
    // SAFETY: as above.
    names("too few bytes", unsafe { Writing::strided(&mut slice, &stream, layout(&[26])?) }, "slice", &["100 bytes", "104"])?;
    let odd = slice.slice(1..);
    // SAFETY: as above.
    names("an odd address", unsafe { Reading::strided(&odd, &stream, layout(&[2])?) }, "address", &["multiple of 4"])?;
    // A context beside the primary one: its streams, even its null stream, and its memory.
    let beside = CudaContext::new_non_primary(0, 0)?;
    let foreign = beside.new_stream()?;
    for other in [&foreign, &beside.default_stream()] {
        names("a stream of another context", adapt(other), "stream", &["another context", "primary context of device 0"])?;
        // SAFETY: as above.
        names("a stream of another context", unsafe { Reading::new(&slice, other, &[4]) }, "stream", &["another context"])?;
    }
    let there = foreign.alloc_zeros::<u8>(100)?;
    // SAFETY: as above.
    names("a slice of another context", unsafe { Reading::new(&there, &stream, &[4]) }, "slice", &["another context", "device 0"])
}

fn kept() -> Outcome {
    let context = CudaContext::new(0)?;
    let ours = {
        let theirs = context.new_stream()?;
        adapt(&theirs)?
    };
    // cudarc would have destroyed it.
    check_scale(&ours, 1000, 1)
}
