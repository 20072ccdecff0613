//! Streams of our own and of others, events.

use std::ffi::c_void;
use std::time::Instant;

use libtest_mimic::Failed;
use moe_kernels::gpu::{Buffer, Device, Event, Geometry, Stream};

use super::kernels::{KERNELS, Meet, Scale, Test as Kernel, check_scale, delay, painted, read, scale, scaled, words};
use super::memory::names;
use super::raw::{Handle, Raw, ok};
use super::{Needs, Outcome, Test, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("a stream is a queue", Needs::Gpu, queue),
    ("streams of others", Needs::Gpu, external),
    ("default streams", Needs::Gpu, default_streams),
    ("a stream of another context", Needs::Gpu, other_context),
    ("two streams run at once", Needs::GpuAlone, at_once),
    ("streams on many threads", Needs::Gpu, on_threads),
    ("events", Needs::Gpu, events),
];

/// Long enough to see that a call does not wait for it (arbitrary).
const LONG_NANOSECONDS: u64 = 50_000_000;

fn queue() -> Outcome {
    let (_, stream) = gpu()?;
    check_scale(&stream, 1000, 1)?;
    ensure(stream.is_idle()?, "a stream that was waited for is idle")?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let input = painted(1000, 9);
    let buffer = words(&stream, &input)?;
    delay(&stream, 1)?; // its kernel is loaded
    let start = Instant::now();
    delay(&stream, LONG_NANOSECONDS)?;
    // Everything here is queued, and nothing waits.
    let here = buffer.address().address;
    scale(&stream, kernel, Scale { from: here, to: here, num: 1000, addend: 1 }, false)?;
    buffer.fill(&stream, 0, 4, 0)?;
    buffer.copy_from(&stream, 4, &buffer, 0, 4)?;
    let queued = start.elapsed();
    let is_idle = stream.is_idle()?;
    stream.synchronize()?;
    let done = start.elapsed();
    ensure(!is_idle && queued.as_nanos() < u128::from(LONG_NANOSECONDS) / 2, format!("queueing took {queued:?}, idle {is_idle}"))?;
    ensure(done.as_nanos() >= u128::from(LONG_NANOSECONDS), format!("the stream was waited for only {done:?}"))?;
    let mut want = scaled(&input, 3, 1);
    want[..2].fill(0);
    ensure(read(&stream, &buffer)? == want, "the order of the queue was not kept")
}

/// A stream made in the context that is current, as another library makes it.
fn make(raw: &Raw, flags: u32) -> Result<Handle, Failed> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the handle outlives the call.
    ok("cuStreamCreate", unsafe { (raw.stream_create)(&mut stream, flags) })?;
    Ok(stream)
}

fn external() -> Outcome {
    let device = Device::open(0)?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    for flags in [0, 1] {
        let handle = raw.with_context(context, || make(&raw, flags))?;
        {
            // SAFETY: the stream was made above and is destroyed below.
            let stream = unsafe { Stream::external(&device, handle) }?;
            same("the handle", stream.raw(), handle)?;
            check_scale(&stream, 1000, flags)?;
            check_scale(&stream.clone(), 10, flags)?;
        }
        raw.with_context(context, || {
            // It is still the caller's.
            // SAFETY: the stream is alive.
            ok("cuStreamQuery", unsafe { (raw.stream_query)(handle) })?;
            // SAFETY: as above, and nobody uses it any more.
            ok("cuStreamDestroy", unsafe { (raw.stream_destroy)(handle) })
        })?;
    }
    Ok(())
}

fn default_streams() -> Outcome {
    let device = Device::open(0)?;
    // Spec: null and CU_STREAM_LEGACY are the legacy default stream, CU_STREAM_PER_THREAD is that of the calling thread.
    for handle in [0usize, 1, 2] {
        // SAFETY: the default streams live as long as the context.
        let stream = unsafe { Stream::external(&device, std::ptr::without_provenance_mut::<c_void>(handle)) }
            .map_err(|error| format!("default stream {handle}: {error}"))?;
        check_scale(&stream, 1000, handle as u32).map_err(|failed| format!("default stream {handle}: {failed:?}"))?;
        ensure(stream.is_idle()? && !stream.is_capturing()?, "idle")?;
    }
    Ok(())
}

fn other_context() -> Outcome {
    let (device, ours) = gpu()?;
    let raw = Raw::open()?;
    let (mut number, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the number outlives the call.
    ok("cuDeviceGet", unsafe { (raw.device_get)(&mut number, 0) })?;
    // SAFETY: the handle outlives the call. The new context is current afterwards.
    ok("cuCtxCreate", unsafe { (raw.context_create)(&mut context, 0, number) })?;
    let check = || -> Outcome {
        let handle = make(&raw, 1)?;
        // SAFETY: the stream lives until the end of this function.
        let refused = unsafe { Stream::external(&device, handle) };
        names("a stream of another context", refused, "raw", &["stream", "another context", "primary context of device 0"])?;
        // The null stream is the primary context's, whatever is current.
        // SAFETY: the default streams live as long as the context.
        let null = unsafe { Stream::external(&device, std::ptr::null_mut()) }?;
        check_scale(&null, 100, 4)?;
        // What is current does not change what we do, nor we what is current.
        check_scale(&ours, 100, 5)?;
        let made = Stream::new(&device)?;
        check_scale(&made, 100, 6)?;
        drop(made);
        same("the context that is current", raw.current()?, context)?;
        // SAFETY: the stream was made above, and nobody uses it.
        ok("cuStreamDestroy", unsafe { (raw.stream_destroy)(handle) })
    };
    let result = check();
    // SAFETY: made above, and nobody uses it any more.
    ok("cuCtxDestroy", unsafe { (raw.context_destroy)(context) })?;
    result
}

fn at_once() -> Outcome {
    let (device, first) = gpu()?;
    let second = Stream::new(&device)?;
    let kernel = KERNELS.get("test", &first, Kernel::Meet)?;
    let flags = words(&first, &[0; 4])?;
    let at = |i: u64| flags.address().address + 4 * i;
    // Each waits for the other: in one queue, the first would wait for its bound in vain.
    let meet = |stream: &Stream, mine: u64, other: u64, bound_nanoseconds: u64| {
        let parameters = Meet { mine: at(mine), other: at(other), met: at(2 + mine), bound_nanoseconds };
        // SAFETY: the kernel is `meet` on this device, `Meet` is its struct; the flags live until both streams have been waited for.
        unsafe { kernel.launch(stream, &Geometry::default(), &parameters) }
    };
    meet(&first, 0, 1, 10 * LONG_NANOSECONDS)?;
    meet(&second, 1, 0, 10 * LONG_NANOSECONDS)?;
    first.synchronize()?;
    second.synchronize()?;
    same("both met", read(&first, &flags)?, vec![1; 4])?;
    // The test can tell: in one stream the first does not meet.
    flags.upload(&first, 0, &[0; 16])?;
    meet(&first, 0, 1, LONG_NANOSECONDS / 10)?;
    meet(&first, 1, 0, LONG_NANOSECONDS / 10)?;
    same("in one stream", read(&first, &flags)?, vec![1, 1, 0, 1])?;
    // Work of both on their own data, many times, while the other runs.
    let kernel = KERNELS.get("test", &first, Kernel::Scale { factor: 3 })?;
    let inputs = [painted(5000, 1), painted(5000, 2)];
    let buffers = [words(&first, &inputs[0])?, words(&first, &inputs[1])?];
    for round in 0..100 {
        for (stream, buffer) in [&first, &second].into_iter().zip(&buffers) {
            let here = buffer.address().address;
            scale(stream, kernel, Scale { from: here, to: here, num: 5000, addend: round }, false)?;
        }
    }
    for ((stream, buffer), input) in [&first, &second].into_iter().zip(&buffers).zip(&inputs) {
        let want = (0..100).fold(input.clone(), |words, round| scaled(&words, 3, round));
        ensure(read(stream, buffer)? == want, "two streams disturbed each other")?;
    }
    Ok(())
}

fn on_threads() -> Outcome {
    let (_, shared) = gpu()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u32)
            .map(|i| {
                let shared = shared.clone();
                scope.spawn(move || -> Result<(), String> {
                    let (_, own) = gpu().map_err(|failed| format!("{failed:?}"))?;
                    for round in 0..20 {
                        check_scale(&own, 500, i * 100 + round).map_err(|failed| format!("{failed:?}"))?;
                        check_scale(&shared, 500, i * 100 + round).map_err(|failed| format!("{failed:?}"))?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })
    .map_err(Failed::from)
}

fn events() -> Outcome {
    let (device, first) = gpu()?;
    let second = Stream::new(&device)?;
    let kernel = KERNELS.get("test", &first, Kernel::Scale { factor: 3 })?;
    let input = painted(1000, 1);
    let (from, to) = (words(&first, &input)?, Buffer::new(&device, 4000)?);
    to.fill(&first, 0, 4000, 0)?;
    first.synchronize()?;
    let (start, end) = (Event::new(&device)?, Event::new(&device)?);
    start.record(&first)?;
    delay(&first, LONG_NANOSECONDS)?;
    scale(&first, kernel, Scale { from: from.address().address, to: to.address().address, num: 1000, addend: 1 }, false)?;
    end.record(&first)?;
    second.wait_for(&end)?;
    let here = to.address().address;
    scale(&second, kernel, Scale { from: here, to: here, num: 1000, addend: 2 }, false)?;
    ensure(read(&second, &to)? == scaled(&scaled(&input, 3, 1), 3, 2), "a stream did not wait for an event")?;
    end.synchronize()?;
    let seconds = end.seconds_since(&start)?;
    let long = LONG_NANOSECONDS as f64 * 1e-9;
    // Bounds: the kernel cannot be shorter; twice as long is arbitrary.
    ensure((long * 0.999..long * 2.0).contains(&seconds), format!("{seconds} s between events around a kernel of {long} s"))
}
