//! Calls of the gate as users make them: what is refused, what they cost on the host, in a capture.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Instant;

use moe_kernels::gpu::{Buffer, Graph, Pinned, Stream};
use moe_kernels::ops::gate::{self, GateOptions, Rounding};
use moe_kernels::tensor::{DeviceAddress, Layout};
use moe_kernels::{Backend, Cuda, DType, Error, Expert, Result, TensorView, TensorViewMut};

use super::child::run_in_child;
use super::kernels::{check_scale, delay};
use super::memory::names;
use super::{Needs, Outcome, Test, ensure, gpu, same};
use crate::allocations::count;

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("gate: tensors that lie elsewhere", Needs::Gpu, elsewhere),
    ("gate: warm calls allocate nothing and do not wait", Needs::GpuAlone, warm),
    ("gate: a capture before its kernel is loaded", Needs::Gpu, capture_first),
    ("gate: tensors of others", Needs::Gpu, tensors_of_others),
];

const T: usize = 3;
const K: usize = 40;
const N: usize = 16;

/// The forms, with the arguments that each takes.
const FORMS: [(&str, &[&str]); 5] = [
    ("gate", &["x", "w", "bias", "addend", "out"]),
    ("gate_mul", &["x", "w", "s", "bias", "addend", "out"]),
    ("gate_mul_add", &["x", "w", "s", "bias", "addend", "out"]),
    ("gate_append_topk", &["x", "w", "bias", "addend", "topk_idx", "topk_weights"]),
    ("sigmoid_mul", &["s", "g", "out"]),
];

fn layout_of(form: &str, argument: &str) -> Result<Layout> {
    let (dtype, shape): (_, &[usize]) = match argument {
        "x" => (DType::F32, &[T, K]),
        "w" => (DType::F32, &[K]),
        "bias" => (DType::F32, &[1]),
        "addend" => (DType::F32, &[T]),
        "g" => (DType::F32, &[T, 1]),
        "out" if form == "gate" => (DType::F32, &[T]),
        "topk_idx" => (DType::I32, &[T, N]),
        _ => (DType::F32, &[T, N]),
    };
    Layout::contiguous("test", dtype, shape)
}

/// Where the argument of a call lies that should not.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// A view of host memory.
    HostView,
    /// A view that says another device.
    OtherDevice,
    /// A view that says this device, with this address.
    Address(u64),
}

/// Device memory of every argument.
struct Arguments {
    buffers: HashMap<&'static str, Buffer>,
    host: RefCell<Vec<f32>>,
}

impl Arguments {
    fn new(stream: &Stream) -> Result<Self> {
        let names = ["x", "w", "s", "g", "bias", "addend", "out", "topk_idx", "topk_weights"];
        let buffer = |name| -> Result<_> {
            let buffer = Buffer::new(stream.device(), 4 * T * K)?;
            buffer.fill(stream, 0, 4 * T * K, 0x3E)?; // arbitrary: small numbers as f32
            Ok((name, buffer))
        };
        Ok(Arguments { buffers: names.into_iter().map(buffer).collect::<Result<_>>()?, host: RefCell::new(vec![0.5; T * K]) })
    }

    /// Calls a form; the argument `bad` lies at `place`.
    fn call(&self, backend: &Backend, form: &str, (bad, place): (&str, Place)) -> Result<()> {
        let host = self.host.borrow().clone();
        let mut host_out = self.host.borrow_mut();
        let mut host_out = Some(&mut host_out[..]);
        let address = |name: &str| {
            let here = self.buffers[name].address();
            match place {
                _ if name != bad => here,
                Place::OtherDevice => DeviceAddress { device: here.device + 7, ..here },
                Place::Address(address) => DeviceAddress { address, ..here },
                Place::HostView => here,
            }
        };
        let is_host = |name: &str| name == bad && matches!(place, Place::HostView);
        let view = |name: &str| -> Result<TensorView<'_>> {
            let layout = layout_of(form, name)?;
            if is_host(name) {
                return TensorView::new(bytemuck::cast_slice(&host), layout);
            }
            // SAFETY: the buffer holds the layout and outlives the call's work, which the callers wait for; a wrong place is refused.
            unsafe { TensorView::from_device(address(name), layout) }
        };
        let mut view_mut = |name: &str| -> Result<TensorViewMut<'_>> {
            let layout = layout_of(form, name)?;
            if is_host(name)
                && let Some(host) = host_out.take()
            {
                return TensorViewMut::new(bytemuck::cast_slice_mut(host), layout);
            }
            // SAFETY: as above.
            unsafe { TensorViewMut::from_device(address(name), layout) }
        };
        let options = GateOptions { bias: Some(view("bias")?), addend: Some(view("addend")?), ..GateOptions::default() };
        match form {
            "gate" => gate::gate(backend, view("x")?, view("w")?, &options, view_mut("out")?),
            "gate_mul" => gate::gate_mul(backend, view("x")?, view("w")?, view("s")?, &options, view_mut("out")?),
            "gate_mul_add" => gate::gate_mul_add(backend, view("x")?, view("w")?, view("s")?, &options, view_mut("out")?),
            "gate_append_topk" => {
                let (idx, weights) = (view_mut("topk_idx")?, view_mut("topk_weights")?);
                gate::gate_append_topk(backend, view("x")?, view("w")?, Expert(3), &options, idx, weights)
            }
            _ => gate::sigmoid_mul(backend, view("s")?, view("g")?, Rounding::Fused, view_mut("out")?),
        }
    }

    /// A call with everything where it must be.
    fn call_well(&self, backend: &Backend, form: &str) -> Result<()> {
        self.call(backend, form, ("", Place::HostView))
    }
}

fn elsewhere() -> Outcome {
    let (device, stream) = gpu()?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let arguments = Arguments::new(&stream)?;
    let (host, pinned) = (vec![0.5f32; T * K], Pinned::new(&device, 4 * T * K)?);
    let places = [
        ("host memory", Place::HostView, "in host memory"),
        ("another device", Place::OtherDevice, "of device 7"),
        ("an address of host memory", Place::Address(host.as_ptr().addr() as u64), "host memory or no memory"),
        ("an address of pinned memory", Place::Address(pinned.device_address()?), "pinned host memory"),
        ("an address that is no memory", Place::Address(0x1000), "no memory"),
    ];
    let before: Vec<_> = arguments.buffers.values().map(|buffer| super::kernels::read(&stream, buffer)).collect::<Result<_>>()?;
    let mut num_cases = 0;
    for (form, names_of_form) in FORMS {
        for argument in names_of_form {
            for (case, place, part) in places {
                let case = format!("{form}, {argument} in {case}");
                names(&case, arguments.call(&backend, form, (argument, place)), argument, &[form, part, "device 0"])?;
                num_cases += 1;
            }
        }
    }
    let after: Vec<_> = arguments.buffers.values().map(|buffer| super::kernels::read(&stream, buffer)).collect::<Result<_>>()?;
    ensure(before == after, "a refused call wrote")?;
    ensure(arguments.host.borrow().iter().all(|value| *value == 0.5), "a refused call wrote to host memory")?;
    super::report(format!("{num_cases} tensors that lie elsewhere"));
    // The same memory on the CPU backend is refused the other way round.
    for (form, names_of_form) in FORMS {
        let refused = arguments.call_well(&Backend::cpu(), form);
        ensure(
            matches!(&refused, Err(Error::Invalid { what, got, .. }) if names_of_form.contains(&what.as_str()) && got.contains("of device 0")),
            format!("{form} on the cpu: {refused:?}"),
        )?;
        arguments.call_well(&backend, form)?;
    }
    stream.synchronize()?;
    check_scale(&stream, 100, 1)
}

fn warm() -> Outcome {
    /// Long enough to see that a call does not wait for it (arbitrary).
    const LONG_NANOSECONDS: u64 = 50_000_000;
    let (_, stream) = gpu()?;
    let arguments = Arguments::new(&stream)?;
    delay(&stream, 1)?;
    for programmatic in [false, true] {
        let backend = Backend::Cuda(Cuda::on(stream.clone()).programmatic(programmatic));
        for (form, _) in FORMS {
            // What the call here allocates beside the operation, so that the difference is the operation's.
            arguments.call_well(&backend, form)?;
            stream.synchronize()?;
            let start = Instant::now();
            delay(&stream, LONG_NANOSECONDS)?;
            for _ in 0..20 {
                arguments.call_well(&backend, form)?;
            }
            let (queued, is_idle) = (start.elapsed(), stream.is_idle()?);
            stream.synchronize()?;
            ensure(
                !is_idle && queued.as_nanos() < u128::from(LONG_NANOSECONDS) / 2,
                format!("{form}: 20 calls took {queued:?}, idle {is_idle}"),
            )?;
        }
        // Without the test's own vectors: one form with everything prepared.
        let (x, w) = (arguments.buffers["x"].address(), arguments.buffers["w"].address());
        let out = arguments.buffers["out"].address();
        let call = || -> Result<()> {
            // SAFETY: the buffers hold these layouts and live until the stream is waited for below.
            let x = unsafe { TensorView::from_device(x, layout_of("gate", "x")?) }?;
            // SAFETY: as above.
            let w = unsafe { TensorView::from_device(w, layout_of("gate", "w")?) }?;
            // SAFETY: as above.
            let out = unsafe { TensorViewMut::from_device(out, layout_of("gate", "out")?) }?;
            gate::gate(&backend, x, w, &GateOptions::default(), out)
        };
        call()?;
        let mut result = Ok(());
        let num = count(|| result = (0..100).try_for_each(|_| call()));
        result?;
        stream.synchronize()?;
        same("allocations of 100 calls", num, 0)?;
    }
    Ok(())
}

fn capture_first() -> Outcome {
    let lines = run_in_child("capture", &[])?;
    ensure(lines.contains("captured after a first call"), lines)
}

/// In a process of its own, in which no kernel is loaded: see [`capture_first`].
pub fn capture() -> Outcome {
    let (_, stream) = gpu()?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let arguments = Arguments::new(&stream)?;
    stream.synchronize()?;
    // Not the first: its kernel is that of `gate_append_topk`.
    for (form, _) in FORMS.iter().skip(1) {
        match Graph::capture(&stream, || arguments.call_well(&backend, form)) {
            Err(error @ Error::Unsupported { .. }) => {
                let text = error.to_string();
                ensure(text.contains("`precompile`") && text.contains(form), text)?;
            }
            other => return Err(format!("{form}: {other:?}").into()),
        }
        ensure(!stream.is_capturing()?, "the stream is still captured")?;
        check_scale(&stream, 100, 1)?;
        arguments.call_well(&backend, form)?;
        let graph = Graph::capture(&stream, || arguments.call_well(&backend, form))?;
        same("nodes", graph.num_nodes()?, 1)?;
        graph.launch(&stream)?;
        stream.synchronize()?;
    }
    println!("captured after a first call");
    Ok(())
}

/// Addresses in the middle of one allocation, in no buffer of ours as far as the views know, give what the CPU gives.
fn tensors_of_others() -> Outcome {
    let (device, stream) = gpu()?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let x: Vec<f32> = (0..T * K).map(|i| (i as f32 * 0.37).sin()).collect();
    let w: Vec<f32> = (0..K).map(|i| (i as f32 * 0.11).cos()).collect();
    let memory = Buffer::new(&device, 1 << 22)?;
    let (at_x, at_w, at_out) = (4 + (1 << 21), 1 << 20, 12);
    memory.upload(&stream, at_x, bytemuck::cast_slice(&x))?;
    memory.upload(&stream, at_w, bytemuck::cast_slice(&w))?;
    let at = |byte: usize| DeviceAddress { device: 0, address: memory.address().address + byte as u64 };
    {
        // SAFETY: the memory holds these layouts and lives until the stream is waited for below.
        let x = unsafe { TensorView::from_device(at(at_x), layout_of("gate", "x")?) }?;
        // SAFETY: as above.
        let w = unsafe { TensorView::from_device(at(at_w), layout_of("gate", "w")?) }?;
        // SAFETY: as above.
        let out = unsafe { TensorViewMut::from_device(at(at_out), layout_of("gate", "out")?) }?;
        gate::gate(&backend, x, w, &GateOptions::default(), out)?;
    }
    let (mut got, mut want) = (vec![0f32; T], vec![0f32; T]);
    memory.download(&stream, at_out, bytemuck::cast_slice_mut(&mut got))?;
    let (x, w) = (TensorView::from_slice(&x, &[T, K])?, TensorView::from_slice(&w, &[K])?);
    gate::gate(&Backend::cpu(), x, w, &GateOptions::default(), TensorViewMut::from_slice(&mut want, &[T])?)?;
    ensure(got.iter().map(|g| g.to_bits()).eq(want.iter().map(|g| g.to_bits())), format!("{got:?}, the CPU has {want:?}"))?;
    Ok(())
}
