//! Every function of both tables is called.

use std::os::fd::AsFd;

use moe_kernels::Error;
use moe_kernels::gpu::{Buffer, Device, Driver, Event, Geometry, Graph, Nvrtc, Pinned, Shareable, Stream, jit};

use super::kernels::{Form, KERNELS, Scale, Test as Kernel, check_scale, scale, words};
use super::{Needs, Outcome, Test, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[("every function of the tables is called", Needs::GpuAlone, entries)];

fn entries() -> Outcome {
    let driver = Driver::get()?;
    let (major, minor) = driver.version()?;
    ensure((11..100).contains(&major) && minor < 10, format!("driver of CUDA {major}.{minor}"))?;
    ensure(driver.describe(2).contains("memory") && !driver.describe(-7).is_empty(), driver.describe(2))?; // spec: 2 is CUDA_ERROR_OUT_OF_MEMORY
    let (device, stream) = gpu()?;
    device.memory()?;
    // Memory.
    let buffer = words(&stream, &[1; 64])?;
    let other = Buffer::new(&device, 256)?;
    other.fill(&stream, 0, 256, 0)?;
    other.copy_from(&stream, 0, &buffer, 0, 128)?;
    other.download(&stream, 0, &mut [0; 8])?;
    device.adopt("test", "x", buffer.address().address)?;
    Pinned::new(&device, 8)?.device_address()?;
    // Memory that is shared.
    let shared = Shareable::new(&device, 1 << 20)?;
    Shareable::import(&device, shared.export()?.as_fd(), &shared.extent())?;
    // SAFETY: `shared` outlives it, and nobody writes there.
    unsafe { Shareable::adopt(&device, shared.address().address, 1 << 20) }?;
    // Streams and events.
    // SAFETY: the default stream lives as long as the context.
    let default = unsafe { Stream::external(&device, std::ptr::null_mut()) }?;
    let (start, end) = (Event::new(&device)?, Event::new(&device)?);
    start.record(&stream)?;
    check_scale(&stream, 100, 1)?;
    end.record(&stream)?;
    default.wait_for(&end)?;
    end.synchronize()?;
    end.seconds_since(&start)?;
    ensure(stream.is_idle()? && !stream.is_capturing()?, "idle")?;
    device.synchronize()?;
    // A kernel, compiled now: no cache.
    jit::compile(&moe_kernels::gpu::Spec::program(&Kernel::Nothing), &jit::architecture(&device), None)?;
    let cluster = if device.compute_capability() >= (9, 0) { 2 } else { 1 };
    let form = Form { smem_bytes: 64 << 10, cluster, cooperative: false, programmatic: false };
    let large = KERNELS.get("test", &stream, Kernel::Together(form))?;
    large.resources(&device)?;
    large.max_active_blocks(&device, 256, form.smem_bytes)?;
    let geometry = Geometry { grid: [2, 1, 1], threads: 256, smem_bytes: form.smem_bytes, cluster: form.cluster, ..Geometry::default() };
    large.max_active_clusters(&stream, &geometry)?;
    ensure(matches!(KERNELS.get("test", &stream, Kernel::WrongEntry), Err(Error::Gpu { .. })), "a module without the entry")?;
    // A graph.
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let here = buffer.address().address;
    let graph = Graph::capture(&stream, || scale(&stream, kernel, Scale { from: here, to: here, num: 64, addend: 0 }, false))?;
    graph.num_nodes()?;
    graph.launch(&stream)?;
    stream.synchronize()?;
    Nvrtc::get()?.architectures()?;
    drop((graph, stream, buffer, start));
    // Only a second device has access to what a first one has.
    let mut uncalled = driver.never_called();
    if Device::count()? > 1 {
        Shareable::new(&Device::open(1)?, 8)?.allow(&device)?;
    } else {
        uncalled.retain(|symbol| *symbol != "cuDeviceCanAccessPeer");
    }
    same("functions of the driver that were not called", uncalled, vec![])?;
    same("functions of NVRTC that were not called", Nvrtc::get()?.never_called(), vec![])
}
