//! What calls cost on the host.

use std::cell::RefCell;
use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::time::Instant;

use libtest_mimic::Failed;
use moe_kernels::gpu::{Buffer, Device, Event, Geometry, Graph, Spec, Stream, jit};
use moe_kernels::ops::gate::{self, GateOptions};
use moe_kernels::tensor::{DeviceAddress, Layout};
use moe_kernels::{Backend, Cuda, DType, Error, Result, TensorView, TensorViewMut};

use super::kernels::{KERNELS, Nothing, Test as Kernel, delay};
use super::raw::{Handle, LaunchConfig, Raw, ok};
use super::{Needs, Outcome, Test, ensure, gpu, report};
use crate::allocations::count;

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("host cost of calls", Needs::GpuAlone, costs),
    ("cost of the carve-out", Needs::GpuAlone, carve_out),
    ("warm calls allocate nothing", Needs::Gpu, allocations),
];

/// Calls between two readings of the clock: few enough that the queue of launches (1024 on every GPU seen) never fills.
const CALLS: u32 = 200;
/// They are queued behind a kernel that takes longer than queueing them, so that the GPU's own pace does not matter.
const BEHIND_NANOSECONDS: u64 = 2_000_000;
/// Readings of each arm (arbitrary: enough for a stable median).
const ROUNDS: usize = 31;

/// An arm: its name and one call.
type Arm<'a> = (&'a str, &'a dyn Fn() -> Outcome);

/// Median nanoseconds of a call of each arm, the arms taken in turns.
fn time(stream: &Stream, arms: &[Arm<'_>]) -> std::result::Result<Vec<f64>, Failed> {
    let mut times = vec![Vec::new(); arms.len()];
    for _ in 0..ROUNDS {
        for ((_, call), times) in arms.iter().zip(&mut times) {
            stream.synchronize()?;
            delay(stream, BEHIND_NANOSECONDS)?;
            let start = Instant::now();
            for _ in 0..CALLS {
                call()?;
            }
            times.push(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        }
    }
    stream.synchronize()?;
    Ok(times
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect())
}

/// An empty kernel, loaded as another library does it.
fn load(raw: &Raw, device: &Device) -> std::result::Result<Handle, Failed> {
    let image = jit::compile(&Kernel::Nothing.program(), &jit::architecture(device), None)?.image;
    let (mut module, mut function, name) = (std::ptr::null_mut(), std::ptr::null_mut(), CString::new("nothing")?);
    // SAFETY: the image is a whole cubin; the handle outlives the call.
    ok("cuModuleLoadData", unsafe { (raw.module_load)(&mut module, image.as_ptr().cast()) })?;
    // SAFETY: the module is alive, the name ends with 0; the handle outlives the call.
    ok("cuModuleGetFunction", unsafe { (raw.module_function)(&mut function, module, name.as_ptr()) })?;
    Ok(function)
}

fn costs() -> Outcome {
    let (device, stream) = gpu()?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    // Three of the same kernel: plain, with the largest carve-out, with clusters of any size.
    let functions = raw.with_context(context, || {
        let functions = [load(&raw, &device)?, load(&raw, &device)?, load(&raw, &device)?];
        // Numbers of CUfunction_attribute (spec: cuda.h).
        // SAFETY: the function is alive.
        ok("cuFuncSetAttribute", unsafe { (raw.function_set)(functions[1], 9, 100) })?;
        if device.compute_capability() >= (9, 0) {
            // SAFETY: the function is alive.
            ok("cuFuncSetAttribute", unsafe { (raw.function_set)(functions[2], 14, 1) })?;
        }
        Ok(functions)
    })?;
    let kernel = KERNELS.get("test", &stream, Kernel::Nothing)?;
    let geometry = Geometry { threads: 256, ..Geometry::default() };
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let parameters = Nothing::default();
    let buffers = [Buffer::new(&device, 1 << 20)?, Buffer::new(&device, 64 << 20)?];
    let addresses = [buffers[0].address().address, buffers[1].address().address + (32 << 20)];

    let bare = |function: Handle| {
        let parameters: [*const c_void; 1] = [std::ptr::from_ref(&parameters).cast()];
        let (grid, block) = (geometry.grid, [geometry.threads, 1, 1]);
        let config = LaunchConfig { grid, block, smem_bytes: 0, stream: stream.raw(), attributes: std::ptr::null(), num_attributes: 0 };
        // SAFETY: configuration and parameters outlive the call; the kernel uses no memory.
        ok("cuLaunchKernelEx", unsafe { (raw.launch)(&config, function, parameters.as_ptr(), std::ptr::null()) })
    };
    let launch = |programmatic| {
        // SAFETY: the kernel is `nothing` on this device, `Nothing` is its struct; it uses no memory.
        unsafe { kernel.launch(&stream, &Geometry { programmatic, ..geometry }, &parameters) }.map_err(Failed::from)
    };
    let mut pooled = 0;
    raw.with_context(context, || {
        // SAFETY: the address outlives the call; the null stream is that of the current context.
        ok("cuMemAllocAsync", unsafe { (raw.allocate_async)(&mut pooled, 4096, std::ptr::null_mut()) })?;
        // SAFETY: as above.
        ok("cuStreamSynchronize", unsafe { (raw.stream_synchronize)(std::ptr::null_mut()) })
    })?;
    let addresses = [addresses[0], addresses[1], pooled];
    let adopt = |which: usize| device.adopt("test", "x", black_box(addresses[which])).map(|_| ()).map_err(Failed::from);
    let attribute = |id: i32| {
        let mut value = [0u64; 2];
        // SAFETY: the value is as large as any attribute asked for here, and outlives the call.
        ok("cuPointerGetAttribute", unsafe { (raw.attribute_of)((&raw mut value).cast(), id, black_box(addresses[1])) })
    };
    let attributes = |ids: &[i32]| {
        let mut values = [[0u64; 2]; 4];
        let pointers = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        let num = ids.len() as u32;
        // SAFETY: there are as many values as attributes, each large enough; all outlive the call.
        ok("cuPointerGetAttributes", unsafe { (raw.attributes_of)(num, ids.as_ptr(), pointers.as_ptr(), black_box(addresses[1])) })
    };
    let range = || {
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: both numbers outlive the call.
        ok("cuMemGetAddressRange", unsafe { (raw.range_of)(&mut start, &mut bytes, black_box(addresses[1])) })
    };
    let push_pop = || {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context is retained.
        ok("cuCtxPushCurrent", unsafe { (raw.context_push)(context) })?;
        // SAFETY: the handle outlives the call; the push is undone.
        ok("cuCtxPopCurrent", unsafe { (raw.context_pop)(&mut popped) })
    };
    // Numbers of CUpointer_attribute (spec: cuda.h): 1 context, 2 memory type, 7 buffer id, 9 device ordinal, 11 and 12 range.
    let at = |byte: u64| DeviceAddress { device: device.ordinal(), address: black_box(addresses[1]) + byte };
    // SAFETY: the buffer holds these layouts, one behind the other, and lives until the stream is waited for.
    let x = unsafe { TensorView::from_device(at(0), Layout::contiguous("test", DType::BF16, &[1, 2048])?) }?;
    // SAFETY: as above.
    let w = unsafe { TensorView::from_device(at(1 << 20), Layout::contiguous("test", DType::BF16, &[2048])?) }?;
    // SAFETY: as above.
    let out = RefCell::new(unsafe { TensorViewMut::from_device(at(2 << 20), Layout::contiguous("test", DType::BF16, &[1])?) }?);
    let options = GateOptions::default();
    let gate = || gate::gate(&backend, black_box(x), black_box(w), &options, out.borrow_mut().reborrow()).map_err(Failed::from);
    gate()?;
    let views = || {
        // SAFETY: no operation runs with these views.
        black_box(unsafe { TensorView::from_device(at(0), Layout::contiguous("test", DType::BF16, &[1, 2048])?) }?);
        // SAFETY: as above.
        black_box(unsafe { TensorView::from_device(at(1 << 20), Layout::contiguous("test", DType::BF16, &[2048])?) }?);
        // SAFETY: as above.
        black_box(unsafe { TensorViewMut::from_device(at(2 << 20), Layout::contiguous("test", DType::BF16, &[1])?) }?);
        Ok(())
    };
    let arms: [Arm<'_>; 23] = [
        ("bare launch", &|| bare(functions[0])),
        ("Kernel::launch", &|| launch(false)),
        ("gate::gate, bf16, 2048", &gate),
        ("Kernel::launch, programmatic", &|| launch(true)),
        ("Kernels::get", &|| KERNELS.get("test", &stream, black_box(Kernel::Nothing)).map(|_| ()).map_err(Failed::from)),
        ("is_capturing", &|| stream.is_capturing().map(|_| ()).map_err(Failed::from)),
        ("adopt, small allocation", &|| adopt(0)),
        ("adopt, middle of a large one", &|| adopt(1)),
        ("cuPointerGetAttribute memory type", &|| attribute(2)),
        ("cuPointerGetAttribute context", &|| attribute(1)),
        ("cuPointerGetAttribute buffer id", &|| attribute(7)),
        ("cuPointerGetAttribute ordinal", &|| attribute(9)),
        ("cuPointerGetAttributes type", &|| attributes(&[2])),
        ("cuPointerGetAttributes type, ordinal, range", &|| attributes(&[2, 9, 11, 12])),
        ("cuMemGetAddressRange", &range),
        ("cuCtxGetCurrent", &|| raw.current().map(|_| ())),
        ("cuCtxPushCurrent, cuCtxPopCurrent", &push_pop),
        ("a clock and nothing else", &|| Ok(())),
        ("bare launch again", &|| bare(functions[0])),
        ("bare launch, largest carve-out", &|| bare(functions[1])),
        ("bare launch, clusters of any size", &|| bare(functions[2])),
        ("adopt, memory of a pool", &|| adopt(2)),
        ("three views of device memory", &views),
    ];
    let current = raw.with_context(context, || time(&stream, &arms))?;
    // Calls of ours when nothing is current: they bind the context each time.
    let ours = [1, 2, 3, 4, 5, 6, 7].map(|i| arms[i]);
    let unbound = time(&stream, &ours)?;
    for (i, ((name, _), nanoseconds)) in arms.iter().zip(&current).enumerate() {
        let other = if (1..=7).contains(&i) { format!("   {:7.1} without a current context", unbound[i - 1]) } else { String::new() };
        report(format!("{nanoseconds:8.1} ns  {name}{other}"));
    }
    // SAFETY: allocated above, and nothing uses it; the null stream is that of the current context.
    raw.with_context(context, || ok("cuMemFreeAsync", unsafe { (raw.free_async)(pooled, std::ptr::null_mut()) }))?;
    // The promise is half a microsecond on a host that makes a bare launch in 3; half a launch leaves room for slower and busier ones (arbitrary).
    let bare = current[0].min(current[18]);
    let over = current[2] - bare;
    report(format!("{over:8.1} ns  a call of the gate over a bare launch"));
    ensure(over < 0.5 * bare, format!("a call of the gate costs {over} ns more than a bare launch of {bare}"))
}

fn allocations() -> Outcome {
    let (device, stream) = gpu()?;
    let buffer = Buffer::new(&device, 4096)?;
    let call = || -> Result<()> {
        let kernel = KERNELS.get("test", &stream, Kernel::Nothing)?;
        device.adopt("test", "x", buffer.address().address)?;
        for (cooperative, programmatic) in [(false, false), (true, false), (false, true)] {
            let geometry = Geometry { threads: 256, cooperative, programmatic, ..Geometry::default() };
            // SAFETY: the kernel is `nothing` on this device, `Nothing` is its struct; it uses no memory.
            unsafe { kernel.launch(&stream, &geometry, &Nothing::default()) }?;
        }
        stream.is_capturing()?;
        buffer.fill(&stream, 0, 4096, 0)
    };
    call()?;
    let mut result = Ok(());
    let num = count(|| result = (0..100).try_for_each(|_| call()));
    result?;
    stream.synchronize()?;
    ensure(num == 0, format!("{num} allocations in 100 rounds of warm calls"))
}

/// Microseconds of a node of a graph of kernels, median of many replays.
fn node(stream: &Stream, device: &Device, queue: &dyn Fn(usize) -> Outcome) -> std::result::Result<f64, Failed> {
    const NODES: usize = 200;
    let graph = Graph::capture(stream, || {
        (0..NODES).try_for_each(|i| queue(i).map_err(|failed| Error::Io { what: "queueing".into(), why: format!("{failed:?}") }))
    })?;
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        start.record(stream)?;
        graph.launch(stream)?;
        end.record(stream)?;
        end.synchronize()?;
        times.push(end.seconds_since(&start)? * 1e6 / NODES as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// What a kernel that asks for the largest carve-out costs beside kernels that do not ask.
fn carve_out() -> Outcome {
    let (device, stream) = gpu()?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    let functions = raw.with_context(context, || {
        let functions = [load(&raw, &device)?, load(&raw, &device)?, load(&raw, &device)?];
        // Number of CUfunction_attribute (spec: cuda.h); in per cent.
        for (function, percent) in [(functions[1], 100), (functions[2], 0)] {
            // SAFETY: the function is alive.
            ok("cuFuncSetAttribute", unsafe { (raw.function_set)(function, 9, percent) })?;
        }
        Ok(functions)
    })?;
    let queue = |function: Handle| {
        let parameters = Nothing::default();
        let parameters: [*const c_void; 1] = [std::ptr::from_ref(&parameters).cast()];
        let (grid, block) = ([1, 1, 1], [256, 1, 1]);
        let config = LaunchConfig { grid, block, smem_bytes: 0, stream: stream.raw(), attributes: std::ptr::null(), num_attributes: 0 };
        // SAFETY: configuration and parameters outlive the call; the kernel uses no memory.
        ok("cuLaunchKernelEx", unsafe { (raw.launch)(&config, function, parameters.as_ptr(), std::ptr::null()) })
    };
    let [plain, most, least] = functions;
    for (name, pair) in [
        ("plain", [plain, plain]),
        ("largest", [most, most]),
        ("plain and largest in turns", [plain, most]),
        ("least and largest in turns", [least, most]),
        ("least and plain in turns", [least, plain]),
    ] {
        let microseconds = raw.with_context(context, || node(&stream, &device, &|i| queue(pair[i % 2])))?;
        report(format!("{microseconds:8.3} us a node, carve-out {name}"));
    }
    Ok(())
}
