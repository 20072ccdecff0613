//! Capture and replay.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moe_kernels::gpu::{Buffer, Graph, Stream};
use moe_kernels::{Error, Result};

use super::kernels::{KERNELS, Scale, Test as Kernel, check_scale, painted, read, scale, scaled, words};
use super::{Needs, Outcome, Test, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("1000 replays with changing inputs", Needs::Gpu, replays),
    ("a graph of programmatic launches", Needs::Gpu, programmatic),
    ("an error inside a capture", Needs::Gpu, errors),
    ("a kernel that is not loaded inside a capture", Needs::Gpu, not_loaded),
];

/// The stream is not being captured, and work runs on it.
fn is_usable(stream: &Stream) -> Outcome {
    ensure(!stream.is_capturing()?, "the stream is still captured")?;
    check_scale(stream, 300, 3)
}

fn replays() -> Outcome {
    const NUM: usize = 3000;
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let (from, to) = (words(&stream, &vec![0; NUM])?, Buffer::new(&device, 4 * NUM + 4)?);
    let (input, output) = (from.address().address, to.address().address);
    let mut num_calls = 0;
    let graph = Graph::capture(&stream, || {
        num_calls += 1;
        assert!(stream.is_capturing()?, "the stream is captured");
        scale(&stream, kernel, Scale { from: input, to: output, num: NUM as u32, addend: 5 }, false)?;
        scale(&stream, kernel, Scale { from: output, to: output, num: NUM as u32, addend: 6 }, false)?;
        to.fill(&stream, 4 * NUM, 4, 0xAB)?;
        to.copy_from(&stream, 0, &from, 0, 4)
    })?;
    same("calls", num_calls, 1)?;
    same("nodes", graph.num_nodes()?, 4)?;
    ensure(!stream.is_capturing()?, "the capture has ended")?;
    // Recording ran nothing: nobody has written the output.
    to.fill(&stream, 0, 4 * NUM + 4, 0)?;
    ensure(read(&stream, &to)?.iter().all(|word| *word == 0), "recording ran the work")?;
    for round in 0..1000 {
        let words = painted(NUM, round);
        from.upload(&stream, 0, bytemuck::cast_slice(&words))?;
        graph.launch(&stream)?;
        let mut want = scaled(&scaled(&words, 3, 5), 3, 6);
        want[0] = words[0];
        want.push(0xABAB_ABAB);
        ensure(read(&stream, &to)? == want, format!("replay {round} gave wrong words"))?;
    }
    // Several in the queue at once, and on another stream.
    let other = Stream::new(&device)?;
    for _ in 0..20 {
        graph.launch(&other)?;
    }
    other.synchronize()?;
    drop(graph);
    is_usable(&stream)
}

fn programmatic() -> Outcome {
    let (device, stream) = gpu()?;
    if device.compute_capability() < (9, 0) {
        return Ok(());
    }
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let input = painted(50_000, 4);
    let buffer = words(&stream, &input)?;
    let here = buffer.address().address;
    let graph = Graph::capture(&stream, || {
        (0..40).try_for_each(|addend| scale(&stream, kernel, Scale { from: here, to: here, num: 50_000, addend }, true))
    })?;
    same("nodes", graph.num_nodes()?, 40)?;
    let mut want = input;
    for _ in 0..20 {
        graph.launch(&stream)?;
        want = (0..40).fold(want, |words, addend| scaled(&words, 3, addend));
    }
    ensure(read(&stream, &buffer)? == want, "a node did not wait for the one before it")
}

fn errors() -> Outcome {
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let buffer = words(&stream, &[1, 2, 3])?;
    let here = buffer.address().address;
    let queue = || scale(&stream, kernel, Scale { from: here, to: here, num: 3, addend: 0 }, false);
    let ours = Error::Invalid { op: "test", what: "x".into(), got: "y".into(), want: "z".into() };
    // An error of the work itself, before and after something was queued.
    same("the error", Graph::capture(&stream, || Err(ours.clone())).err(), Some(ours.clone()))?;
    is_usable(&stream)?;
    same("the error", Graph::capture(&stream, || queue().and(Err(ours.clone()))).err(), Some(ours))?;
    is_usable(&stream)?;
    // What a capture cannot hold: waiting, and copies that wait.
    let waits: [(&str, &dyn Fn() -> Result<()>); 3] = [
        ("synchronize", &|| stream.synchronize()),
        ("upload", &|| buffer.upload(&stream, 0, &[0; 4])),
        ("is_idle", &|| stream.is_idle().map(|_| ())),
    ];
    for (case, wait) in waits {
        match Graph::capture(&stream, || queue().and_then(|()| wait())) {
            Err(Error::Gpu { code, name, .. }) => super::report(format!("{case} inside a capture: {name} ({code})")),
            other => return Err(format!("{case} inside a capture: {other:?}").into()),
        }
        is_usable(&stream)?;
    }
    // An error that the work swallows is still one.
    let swallowed = Graph::capture(&stream, || {
        let _ = stream.synchronize();
        Ok(())
    });
    ensure(matches!(swallowed, Err(Error::Gpu { .. })), format!("{swallowed:?}"))?;
    is_usable(&stream)?;
    // A capture inside a capture.
    let inner = Graph::capture(&stream, || Graph::capture(&stream, queue).map(|_| ()));
    ensure(matches!(inner, Err(Error::Gpu { .. })), format!("{inner:?}"))?;
    is_usable(&stream)?;
    let panicked =
        catch_unwind(AssertUnwindSafe(|| Graph::capture(&stream, || -> Result<()> { std::panic::resume_unwind(Box::new(1)) }).map(|_| ())));
    ensure(panicked.is_err(), "the panic comes through")?;
    is_usable(&stream)?;
    // An empty one, and one on a null stream, which cannot be captured.
    let empty = Graph::capture(&stream, || Ok(()))?;
    same("nodes", empty.num_nodes()?, 0)?;
    empty.launch(&stream)?;
    stream.synchronize()?;
    // SAFETY: the default stream lives as long as the context.
    let null = unsafe { Stream::external(&device, std::ptr::null_mut()) }?;
    let refused = Graph::capture(&null, || Ok(()));
    ensure(matches!(refused, Err(Error::Gpu { call: "cuStreamBeginCapture_v2", .. })), format!("{refused:?}"))?;
    is_usable(&null)?;
    same("the words", read(&stream, &buffer)?, vec![1, 2, 3])
}

fn not_loaded() -> Outcome {
    let (device, stream) = gpu()?;
    // A factor that no other trial uses: its kernel is not loaded yet.
    let spec = Kernel::Scale { factor: 41 };
    let buffer = words(&stream, &[7])?;
    let here = buffer.address().address;
    let call = || {
        let kernel = KERNELS.get("gate", &stream, spec)?;
        scale(&stream, kernel, Scale { from: here, to: here, num: 1, addend: 1 }, false)
    };
    match Graph::capture(&stream, call) {
        Err(error @ Error::Unsupported { op: "gate", .. }) => {
            let text = error.to_string();
            ensure(text.contains("`precompile`") && text.contains("test Scale"), text)?;
        }
        other => return Err(format!("{other:?}").into()),
    }
    is_usable(&stream)?;
    same("the word", read(&stream, &buffer)?, vec![7])?;
    // Loaded before, it can be recorded.
    let (_, origin) = KERNELS.load(&device, spec)?;
    ensure(origin.is_some(), "it was not loaded before")?;
    same("origin of the second load", KERNELS.load(&device, spec)?.1, None)?;
    Graph::capture(&stream, call)?.launch(&stream)?;
    same("the word", read(&stream, &buffer)?, vec![7 * 41 + 1])
}
