//! Tests of the shared-expert gate beyond the shared checks: bad input, determinism, properties.

use half::{bf16, f16};
use libtest_mimic::{Failed, Trial};
use moe_kernels::ops::gate::{
    Activation, GateGradients, GateMulGradients, GateOptions, Rounding, gate, gate_append_topk, gate_backward, gate_mul, gate_mul_add,
    gate_mul_backward, sigmoid_mul,
};
use moe_kernels::oracle::{gate as oracle, gate_backward as backward};
use moe_kernels::random::SplitMix64;
use moe_kernels::tensor::{Element, Layout};
use moe_kernels::{Backend, Cpu, DType, DeviceAddress, Error, Expert, TensorView, TensorViewMut};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn() -> Result<(), Failed>| Trial::test(format!("gate::{name}"), test);
    vec![
        trial("bad input", bad_input),
        trial("bad input writes nothing", bad_input_writes_nothing),
        trial("20 runs give the same bytes", twenty_runs),
        trial("20 runs of the backward give the same bytes", twenty_runs_backward),
        trial("property: the backward equals the oracle", property_backward),
        trial("framework rounding equals the chain of single operations", framework_chain),
        trial("property: equals the oracle", property_oracle),
        trial("property: forms agree", property_forms),
    ]
}

const T: usize = 3;
const K: usize = 10;
const N: usize = 4;

/// The arguments of every form, each a view that a bad case replaces. All are right at first.
struct Arguments {
    x: TensorView<'static>,
    w: TensorView<'static>,
    s: TensorView<'static>,
    g: TensorView<'static>,
    options: GateOptions<'static>,
    shared_expert: Expert,
    out_vector: TensorViewMut<'static>,
    out: TensorViewMut<'static>,
    topk_idx: TensorViewMut<'static>,
    topk_weights: TensorViewMut<'static>,
    dg: TensorView<'static>,
    dout: TensorView<'static>,
    dlogit: TensorViewMut<'static>,
    dx: TensorViewMut<'static>,
    dw: TensorViewMut<'static>,
    dbias: TensorViewMut<'static>,
    out_dg: TensorViewMut<'static>,
    ds: TensorViewMut<'static>,
}

/// More bytes than any view here needs.
static ZEROS: [u64; 64] = [0; 64];

fn view(dtype: DType, shape: &[usize]) -> TensorView<'static> {
    TensorView::from_bytes(bytemuck::cast_slice(&ZEROS), dtype, shape).unwrap()
}

/// Each leaks a few bytes once: the table then needs no lifetimes.
fn view_mut(dtype: DType, shape: &[usize]) -> TensorViewMut<'static> {
    let memory = Box::leak(Box::new(ZEROS));
    TensorViewMut::from_bytes(bytemuck::cast_slice_mut(memory), dtype, shape).unwrap()
}

fn strided_mut(dtype: DType, shape: &[usize], strides: &[usize]) -> TensorViewMut<'static> {
    let memory = Box::leak(Box::new(ZEROS));
    let layout = Layout::strided("test", dtype, shape, strides).unwrap();
    TensorViewMut::new(bytemuck::cast_slice_mut(memory), layout).unwrap()
}

const ADDRESS: DeviceAddress = DeviceAddress { device: 0, address: 0x1000 };

fn device(dtype: DType, shape: &[usize]) -> TensorView<'static> {
    {
        // SAFETY: no operation runs with this view: it is refused.
        unsafe { TensorView::from_device(ADDRESS, Layout::contiguous("test", dtype, shape).unwrap()) }
    }
    .unwrap()
}

fn device_mut(dtype: DType, shape: &[usize]) -> TensorViewMut<'static> {
    {
        // SAFETY: no operation runs with this view: it is refused.
        unsafe { TensorViewMut::from_device(ADDRESS, Layout::contiguous("test", dtype, shape).unwrap()) }
    }
    .unwrap()
}

impl Arguments {
    fn good() -> Self {
        Arguments {
            x: view(BF16, &[T, K]),
            w: view(BF16, &[K]),
            s: view(BF16, &[T, N]),
            g: view(BF16, &[T, 1]),
            options: GateOptions::default(),
            shared_expert: Expert(60),
            out_vector: view_mut(BF16, &[T]),
            out: view_mut(BF16, &[T, N]),
            topk_idx: view_mut(DType::I32, &[T, N]),
            topk_weights: view_mut(DType::F32, &[T, N]),
            dg: view(BF16, &[T]),
            dout: view(BF16, &[T, N]),
            dlogit: view_mut(DType::F32, &[T]),
            dx: view_mut(BF16, &[T, K]),
            dw: view_mut(BF16, &[K]),
            dbias: view_mut(BF16, &[1]),
            out_dg: view_mut(DType::F32, &[T]),
            ds: view_mut(BF16, &[T, N]),
        }
    }

    fn run(self, form: Form) -> Result<(), Error> {
        let Arguments { x, w, s, g, options, shared_expert, out_vector, out, topk_idx, topk_weights, dg, dout, .. } = self;
        let Arguments { dlogit, dx, dw, dbias, out_dg, ds, .. } = self;
        let gradients = GateGradients { dlogit, dx: Some(dx), dw: Some(dw), dbias: Some(dbias) };
        let backend = Backend::cpu();
        match form {
            Form::Gate => gate(&backend, x, w, &options, out_vector),
            Form::Mul => gate_mul(&backend, x, w, s, &options, out),
            Form::MulAdd => gate_mul_add(&backend, x, w, s, &options, out),
            Form::Append => gate_append_topk(&backend, x, w, shared_expert, &options, topk_idx, topk_weights),
            Form::SigmoidMul => sigmoid_mul(&backend, s, g, options.rounding, out),
            Form::Backward => gate_backward(&backend, x, w, dg, &options, gradients),
            Form::MulBackward => gate_mul_backward(&backend, x, w, s, dout, &options, GateMulGradients { dg: out_dg, ds: Some(ds) }),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Gate,
    Mul,
    MulAdd,
    Append,
    SigmoidMul,
    Backward,
    MulBackward,
}

const ALL: [Form; 7] = [Form::Gate, Form::Mul, Form::MulAdd, Form::Append, Form::SigmoidMul, Form::Backward, Form::MulBackward];
const BF16: DType = DType::BF16;
/// The forms that make a gate.
const GATES: &[Form] = &[Form::Gate, Form::Mul, Form::MulAdd, Form::Append, Form::Backward, Form::MulBackward];
/// The forms that multiply.
const PRODUCTS: &[Form] = &[Form::Mul, Form::MulAdd, Form::MulBackward];
const WITH_OUT: &[Form] = &[Form::Mul, Form::MulAdd, Form::SigmoidMul];

type Change = fn(&mut Arguments);

/// Forms, the change that makes the arguments bad, the argument named, and a part of `got`.
fn table() -> Vec<(&'static [Form], &'static str, Change, &'static str)> {
    vec![
        (GATES, "x", |a| a.x = view(DType::E4M3, &[T, K]), "of type e4m3"),
        (GATES, "x", |a| a.x = view(DType::I32, &[T, K]), "of type i32"),
        (GATES, "x", |a| a.x = view(BF16, &[K]), "of shape [10]"),
        (GATES, "x", |a| a.x = view(BF16, &[1, T, K]), "of shape [1, 3, 10]"),
        (GATES, "x", |a| a.x = device(BF16, &[T, K]), "at address 0x1000 of device 0"),
        (GATES, "w", |a| a.w = view(DType::F16, &[K]), "of type f16"),
        (GATES, "w", |a| a.w = view(BF16, &[K - 1]), "of shape [9]"),
        (GATES, "w", |a| a.w = view(BF16, &[K, 1]), "of shape [10, 1]"),
        (GATES, "w", |a| a.w = view(BF16, &[2, K]), "of shape [2, 10]"),
        (GATES, "w", |a| a.w = device(BF16, &[K]), "of device 0"),
        (GATES, "w", |a| a.x = view(BF16, &[T, K + 1]), "of shape [10]"),
        (GATES, "w", |a| a.x = view(DType::F32, &[T, K]), "of type bf16"),
        (GATES, "bias", |a| a.options.bias = Some(view(DType::F16, &[1])), "of type f16"),
        (GATES, "bias", |a| a.options.bias = Some(view(BF16, &[T])), "of shape [3]"),
        (GATES, "bias", |a| a.options.bias = Some(view(BF16, &[0])), "of shape [0]"),
        (GATES, "bias", |a| a.options.bias = Some(device(BF16, &[1])), "of device 0"),
        (GATES, "addend", |a| a.options.addend = Some(view(DType::I32, &[T])), "of type i32"),
        (GATES, "addend", |a| a.options.addend = Some(view(BF16, &[T + 1])), "of shape [4]"),
        (GATES, "addend", |a| a.options.addend = Some(view(BF16, &[T, 2])), "of shape [3, 2]"),
        (GATES, "addend", |a| a.options.addend = Some(device(BF16, &[T])), "of device 0"),
        (GATES, "scale", |a| a.options.scale = f32::NAN, "NaN"),
        (GATES, "scale", |a| a.options.scale = f32::INFINITY, "inf"),
        (PRODUCTS, "s", |a| a.s = view(DType::F16, &[T, N]), "of type f16"),
        (PRODUCTS, "s", |a| a.s = view(BF16, &[T * N]), "of shape [12]"),
        (PRODUCTS, "s", |a| a.s = view(BF16, &[T + 1, N]), "of 4 rows"),
        (WITH_OUT, "s", |a| a.s = device(BF16, &[T, N]), "of device 0"),
        (&[Form::MulBackward], "s", |a| a.s = device(BF16, &[T, N]), "of device 0"),
        (&[Form::MulBackward], "dout", |a| a.dout = view(DType::F32, &[T, N]), "of type f32"),
        (&[Form::MulBackward], "dout", |a| a.s = view(DType::F32, &[T, N]), "of type bf16"),
        (&[Form::MulBackward], "dout", |a| a.dout = view(BF16, &[T, N + 1]), "of shape [3, 5]"),
        (&[Form::MulBackward], "dout", |a| a.dout = view(BF16, &[T * N]), "of shape [12]"),
        (&[Form::MulBackward], "dout", |a| a.dout = device(BF16, &[T, N]), "of device 0"),
        (&[Form::MulBackward], "dg", |a| a.out_dg = view_mut(BF16, &[T]), "of type bf16"),
        (&[Form::MulBackward], "dg", |a| a.out_dg = view_mut(DType::F32, &[T + 1]), "of shape [4]"),
        (&[Form::MulBackward], "dg", |a| a.out_dg = device_mut(DType::F32, &[T]), "of device 0"),
        (&[Form::MulBackward], "ds", |a| a.ds = view_mut(DType::F32, &[T, N]), "of type f32"),
        (&[Form::MulBackward], "ds", |a| a.ds = view_mut(BF16, &[T, N - 1]), "of shape [3, 3]"),
        (&[Form::MulBackward], "ds", |a| a.ds = strided_mut(BF16, &[T, N], &[N - 1, 1]), "rows 3 elements apart"),
        (&[Form::MulBackward], "ds", |a| a.ds = device_mut(BF16, &[T, N]), "of device 0"),
        (&[Form::Backward], "dg", |a| a.dg = view(DType::F16, &[T]), "of type f16"),
        (&[Form::Backward], "dg", |a| a.dg = view(BF16, &[T - 1]), "of shape [2]"),
        (&[Form::Backward], "dg", |a| a.dg = view(BF16, &[1, T]), "of shape [1, 3]"),
        (&[Form::Backward], "dg", |a| a.dg = device(BF16, &[T]), "of device 0"),
        (&[Form::Backward], "dlogit", |a| a.dlogit = view_mut(BF16, &[T]), "of type bf16"),
        (&[Form::Backward], "dlogit", |a| a.dlogit = view_mut(DType::F32, &[T, 2]), "of shape [3, 2]"),
        (&[Form::Backward], "dlogit", |a| a.dlogit = strided_mut(DType::F32, &[T, 1], &[0, 1]), "rows 0 elements apart"),
        (&[Form::Backward], "dlogit", |a| a.dlogit = device_mut(DType::F32, &[T]), "of device 0"),
        (&[Form::Backward], "dx", |a| a.dx = view_mut(DType::F32, &[T, K]), "of type f32"),
        (&[Form::Backward], "dx", |a| a.dx = view_mut(BF16, &[T, K + 1]), "of shape [3, 11]"),
        (&[Form::Backward], "dx", |a| a.dx = view_mut(BF16, &[T - 1, K]), "of shape [2, 10]"),
        (&[Form::Backward], "dx", |a| a.dx = strided_mut(BF16, &[T, K], &[K - 1, 1]), "rows 9 elements apart"),
        (&[Form::Backward], "dx", |a| a.dx = device_mut(BF16, &[T, K]), "of device 0"),
        (&[Form::Backward], "dw", |a| a.dw = view_mut(DType::F16, &[K]), "of type f16"),
        (&[Form::Backward], "dw", |a| (a.w, a.dw) = (view(DType::F32, &[K]), view_mut(BF16, &[K])), "of type bf16"),
        (&[Form::Backward], "dw", |a| a.dw = view_mut(BF16, &[K - 1]), "of shape [9]"),
        (&[Form::Backward], "dw", |a| a.dw = view_mut(BF16, &[K, 1]), "of shape [10, 1]"),
        (&[Form::Backward], "dw", |a| a.dw = device_mut(BF16, &[K]), "of device 0"),
        (&[Form::Backward], "dbias", |a| a.dbias = view_mut(DType::F16, &[1]), "of type f16"),
        (&[Form::Backward], "dbias", |a| a.dbias = view_mut(BF16, &[T]), "of shape [3]"),
        (&[Form::Backward], "dbias", |a| a.dbias = device_mut(BF16, &[1]), "of device 0"),
        (WITH_OUT, "out", |a| a.out = view_mut(DType::F32, &[T, N]), "of type f32"),
        (WITH_OUT, "out", |a| a.out = view_mut(BF16, &[T, N + 1]), "of shape [3, 5]"),
        (WITH_OUT, "out", |a| a.out = view_mut(BF16, &[T + 1, N]), "of shape [4, 4]"),
        (WITH_OUT, "out", |a| a.out = view_mut(BF16, &[T * N]), "of shape [12]"),
        (WITH_OUT, "out", |a| a.out = strided_mut(BF16, &[T, N], &[N - 1, 1]), "rows 3 elements apart"),
        (WITH_OUT, "out", |a| a.out = strided_mut(BF16, &[T, N], &[0, 1]), "rows 0 elements apart"),
        (WITH_OUT, "out", |a| a.out = device_mut(BF16, &[T, N]), "of device 0"),
        (&[Form::Gate], "out", |a| a.out_vector = view_mut(DType::F16, &[T]), "of type f16"),
        (&[Form::Gate], "out", |a| a.out_vector = view_mut(BF16, &[T - 1]), "of shape [2]"),
        (&[Form::Gate], "out", |a| a.out_vector = view_mut(BF16, &[1, T]), "of shape [1, 3]"),
        (&[Form::Gate], "out", |a| a.out_vector = strided_mut(BF16, &[T, 1], &[0, 1]), "rows 0 elements apart"),
        (&[Form::Gate], "out", |a| a.out_vector = device_mut(BF16, &[T]), "of device 0"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = view_mut(DType::U32, &[T, N]), "of type u32"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = view_mut(DType::I32, &[T]), "of shape [3]"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = view_mut(DType::I32, &[T - 1, N]), "of 2 rows"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = view_mut(DType::I32, &[T, 0]), "without columns"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = strided_mut(DType::I32, &[T, N], &[2, 1]), "rows 2 elements apart"),
        (&[Form::Append], "topk_idx", |a| a.topk_idx = device_mut(DType::I32, &[T, N]), "of device 0"),
        (&[Form::Append], "topk_weights", |a| a.topk_weights = view_mut(BF16, &[T, N]), "of type bf16"),
        (&[Form::Append], "topk_weights", |a| a.topk_weights = view_mut(DType::F32, &[T, N + 1]), "of shape [3, 5]"),
        (&[Form::Append], "topk_weights", |a| a.topk_weights = device_mut(DType::F32, &[T, N]), "of device 0"),
        (&[Form::Append], "shared_expert", |a| a.shared_expert = Expert(1 << 31), "2147483648"),
        (&[Form::SigmoidMul], "s", |a| a.s = view(DType::E5M2, &[T, N]), "of type e5m2"),
        (&[Form::SigmoidMul], "s", |a| a.s = view(BF16, &[T]), "of shape [3]"),
        (&[Form::SigmoidMul], "g", |a| a.g = view(DType::F16, &[T, 1]), "of type f16"),
        (&[Form::SigmoidMul], "g", |a| a.g = view(BF16, &[T]), "of shape [3]"),
        (&[Form::SigmoidMul], "g", |a| a.g = view(BF16, &[T, 2]), "of shape [3, 2]"),
        (&[Form::SigmoidMul], "g", |a| a.g = view(BF16, &[T + 1, 1]), "of shape [4, 1]"),
        (&[Form::SigmoidMul], "g", |a| a.g = device(BF16, &[T, 1]), "of device 0"),
    ]
}

fn name(form: Form) -> &'static str {
    match form {
        Form::Gate => "gate",
        Form::Mul => "gate_mul",
        Form::MulAdd => "gate_mul_add",
        Form::Append => "gate_append_topk",
        Form::SigmoidMul => "sigmoid_mul",
        Form::Backward => "gate_backward",
        Form::MulBackward => "gate_mul_backward",
    }
}

fn bad_input() -> Result<(), Failed> {
    for form in ALL {
        Arguments::good().run(form).map_err(|e| format!("{form:?} refuses good arguments: {e}"))?;
    }
    for (i, (forms, argument, change, part)) in table().into_iter().enumerate() {
        for &form in forms {
            let mut arguments = Arguments::good();
            change(&mut arguments);
            match arguments.run(form) {
                Err(Error::Invalid { op, what, got, want })
                    if op == name(form) && what == argument && got.contains(part) && !want.is_empty() => {}
                other => return Err(format!("row {i}, {form:?}: expected `{argument}` {part}, got {other:?}").into()),
            }
        }
    }
    // i64 holds every id; a stride that is never walked may be anything; empty tensors need no memory.
    let mut fine = Arguments::good();
    (fine.shared_expert, fine.topk_idx) = (Expert(u32::MAX), view_mut(DType::I64, &[T, N]));
    fine.run(Form::Append)?;
    let mut fine = Arguments::good();
    fine.x = view(BF16, &[1, K]);
    fine.s = view(BF16, &[1, N]);
    fine.out = strided_mut(BF16, &[1, N], &[0, 1]);
    fine.run(Form::Mul)?;
    let mut fine = Arguments::good();
    fine.x = TensorView::from_bytes(&[], BF16, &[T, 0])?;
    fine.w = TensorView::from_bytes(&[], BF16, &[0])?;
    fine.run(Form::Gate)?;
    // A gradient of w in f32 whatever its type, and none of what nobody asks for.
    let mut fine = Arguments::good();
    (fine.dw, fine.dbias) = (view_mut(DType::F32, &[1, K]), view_mut(DType::F32, &[1]));
    fine.run(Form::Backward)?;
    let Arguments { x, w, dg, options, dlogit, .. } = Arguments::good();
    gate_backward(&Backend::cpu(), x, w, dg, &options, GateGradients { dlogit, dx: None, dw: None, dbias: None })?;
    // Without rows a width that no memory holds is no overflow.
    for form in [Form::Mul, Form::SigmoidMul] {
        let mut fine = Arguments::good();
        fine.x = view(BF16, &[0, K]);
        fine.g = view(BF16, &[0, 1]);
        fine.s = view(BF16, &[0, usize::MAX]);
        fine.out = view_mut(BF16, &[0, usize::MAX]);
        fine.run(form)?;
    }
    Ok(())
}

fn bad_input_writes_nothing() -> Result<(), Failed> {
    let (mut idx, mut weights) = ([[7i32; N]; T], [[8f32; N]; T]);
    let bad = GateOptions { addend: Some(device(BF16, &[T])), ..GateOptions::default() };
    let idx_view = TensorViewMut::from_slice(idx.as_flattened_mut(), &[T, N])?;
    let weights_view = TensorViewMut::from_slice(weights.as_flattened_mut(), &[T, N])?;
    gate_append_topk(&Backend::cpu(), view(BF16, &[T, K]), view(BF16, &[K]), Expert(60), &bad, idx_view, weights_view).unwrap_err();
    // The second output is bad: the first must not have been written.
    let idx_view = TensorViewMut::from_slice(idx.as_flattened_mut(), &[T, N])?;
    let on_device = device_mut(DType::F32, &[T, N]);
    let options = GateOptions::default();
    gate_append_topk(&Backend::cpu(), view(BF16, &[T, K]), view(BF16, &[K]), Expert(60), &options, idx_view, on_device).unwrap_err();
    assert_eq!((idx, weights), ([[7; N]; T], [[8.0; N]; T]));
    // The last output is bad.
    let (mut dlogit, mut dw, mut dg) = ([7f32; T], [8f32; K], [9f32; T]);
    let Arguments { x, w, s, dg: dg_view, dout, dx, .. } = Arguments::good();
    let outputs = GateGradients {
        dlogit: TensorViewMut::from_slice(&mut dlogit, &[T])?,
        dx: Some(dx),
        dw: Some(TensorViewMut::from_slice(&mut dw, &[K])?),
        dbias: Some(device_mut(BF16, &[1])),
    };
    gate_backward(&Backend::cpu(), x, w, dg_view, &options, outputs).unwrap_err();
    let outputs = GateMulGradients { dg: TensorViewMut::from_slice(&mut dg, &[T])?, ds: Some(device_mut(BF16, &[T, N])) };
    gate_mul_backward(&Backend::cpu(), x, w, s, dout, &options, outputs).unwrap_err();
    assert_eq!((dlogit, dw, dg), ([7.0; T], [8.0; K], [9.0; T]));
    Ok(())
}

fn random<E: Element>(len: usize, seed: u64, from_f32: fn(f32) -> E) -> Vec<E> {
    let mut random = SplitMix64::new(seed);
    (0..len).map(|_| from_f32(random.next_f32() * 3.0)).collect()
}

fn twenty_runs() -> Result<(), Failed> {
    // Long enough for several parts on 3 threads.
    let (t, k) = (301, 2049);
    let (x, w) = (random(t * k, 1, f16::from_f32), random(k, 2, f16::from_f32));
    let s = random(t * k, 3, f16::from_f32);
    let mut first: Option<Vec<f16>> = None;
    for run in 0..20 {
        let backend = Backend::Cpu(Cpu::with_threads([3, 0, 1, 2][run % 4])?);
        let mut out = random(t * k, 4, f16::from_f32);
        gate_mul_add(
            &backend,
            TensorView::from_slice(&x, &[t, k])?,
            TensorView::from_slice(&w, &[k])?,
            TensorView::from_slice(&s, &[t, k])?,
            &GateOptions::default(),
            TensorViewMut::from_slice(&mut out, &[t, k])?,
        )?;
        let first = first.get_or_insert_with(|| out.clone());
        if bytemuck::cast_slice::<_, u16>(first) != bytemuck::cast_slice::<_, u16>(&out) {
            return Err(format!("run {run} differs").into());
        }
    }
    Ok(())
}

/// Enough tokens and columns for several parts of each phase.
fn twenty_runs_backward() -> Result<(), Failed> {
    let (t, k) = (1030, 1025);
    let (x, w) = (random(t * k, 1, bf16::from_f32), random(k, 2, bf16::from_f32));
    let dg = random(t, 3, |v| v);
    let mut first = None;
    for run in 0..20 {
        let backend = Backend::Cpu(Cpu::with_threads([3, 0, 1, 2][run % 4])?);
        let mut all = (vec![0f32; t], vec![bf16::ZERO; t * k], vec![0f32; k], vec![0f32]);
        let outputs = GateGradients {
            dlogit: TensorViewMut::from_slice(&mut all.0, &[t])?,
            dx: Some(TensorViewMut::from_slice(&mut all.1, &[t, k])?),
            dw: Some(TensorViewMut::from_slice(&mut all.2, &[k])?),
            dbias: Some(TensorViewMut::from_slice(&mut all.3, &[1])?),
        };
        let (w, dg) = (TensorView::from_slice(&w, &[k])?, TensorView::from_slice(&dg, &[t])?);
        gate_backward(&backend, TensorView::from_slice(&x, &[t, k])?, w, dg, &GateOptions::default(), outputs)?;
        // No value is a NaN or a zero, so equal means equal bits.
        if *first.get_or_insert_with(|| all.clone()) != all {
            return Err(format!("run {run} differs").into());
        }
    }
    Ok(())
}

/// A sum of tokens' gradients does not depend on where in memory the tokens are: rows of a larger matrix give what a copy of them gives.
fn property_backward() -> Result<(), Failed> {
    property((sizes(), any::<bool>(), -2.0f32..2.0), |((t, k, n, more, seed), framework, scale)| {
        // More tokens than partial sums, now and then.
        let t = if n.is_multiple_of(8) { t + 300 } else { t };
        let k = k % 80;
        let stride = k + more;
        let (x, w) = (random(t * stride, seed, f16::from_f32), random(k, seed ^ 1, f16::from_f32));
        let dg = random(t, seed ^ 2, f16::from_f32);
        let rounding = if framework { Rounding::Framework } else { Rounding::Fused };
        let options = GateOptions { rounding, scale, ..GateOptions::default() };
        let (mut dlogit, mut dx, mut dw, mut dbias) = (vec![f32::MAX; t], vec![f16::MAX; t * k], vec![f16::MAX; k], [f32::MAX]);
        let outputs = GateGradients {
            dlogit: TensorViewMut::from_slice(&mut dlogit, &[t]).unwrap(),
            dx: Some(TensorViewMut::from_slice(&mut dx, &[t, k]).unwrap()),
            dw: Some(TensorViewMut::from_slice(&mut dw, &[k]).unwrap()),
            dbias: Some(TensorViewMut::from_slice(&mut dbias, &[1]).unwrap()),
        };
        let layout = Layout::strided("test", DType::F16, &[t, k], &[stride, 1]).unwrap();
        let x_view = TensorView::new(bytemuck::cast_slice(&x), layout).unwrap();
        let (w_view, dg_view) = (TensorView::from_slice(&w, &[k]).unwrap(), TensorView::from_slice(&dg, &[t]).unwrap());
        gate_backward(&Backend::cpu(), x_view, w_view, dg_view, &options, outputs).unwrap();
        let widen = |v: &[f16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        let (x, w): (Vec<f32>, _) = ((0..t).flat_map(|r| widen(&x[r * stride..][..k])).collect(), widen(&w));
        let gates = oracle::Gates {
            x: &x,
            w: &w,
            num_tokens: t,
            x_dtype: DType::F16,
            bias: None,
            addend: None,
            activation: Activation::Sigmoid,
            scale,
            rounding,
        };
        let want = backward::dlogit(&gates, &widen(&dg));
        prop_assert_eq!(bytemuck::cast_slice::<_, u32>(&dlogit), bytemuck::cast_slice::<_, u32>(&want));
        prop_assert_eq!(bytemuck::cast_slice::<_, u8>(&dx), &backward::dx(&want, &w, DType::F16)[..]);
        prop_assert_eq!(bytemuck::cast_slice::<_, u8>(&dw), &backward::dw(&want, &x, k, DType::F16)[..]);
        prop_assert_eq!(bytemuck::bytes_of(&dbias), &backward::dbias(&want, DType::F32)[..]);
        Ok(())
    })
}

/// `Framework` with a one-element dot product is the chain linear, sigmoid, product, sum with each result stored in bf16, for every bf16 logit.
fn framework_chain() -> Result<(), Failed> {
    let backend = Backend::cpu();
    let logits: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let t = logits.len();
    let shape = [t, 1];
    let s = random(t, 5, bf16::from_f32);
    let mut out = random(t, 6, bf16::from_f32);
    let before = out.clone();
    let framework = GateOptions { rounding: Rounding::Framework, ..GateOptions::default() };
    let x = TensorView::from_slice(&logits, &shape)?;
    let w = [bf16::ONE];
    let w = TensorView::from_slice(&w, &[1])?;
    gate_mul_add(&backend, x, w, TensorView::from_slice(&s, &shape)?, &framework, TensorViewMut::from_slice(&mut out, &shape)?)?;
    for i in 0..t {
        let sigmoid = bf16::from_f32(moe_kernels::oracle::exp::sigmoid(logits[i].to_f32()));
        let product = bf16::from_f32(sigmoid.to_f32() * s[i].to_f32());
        let want = bf16::from_f32(before[i].to_f32() + product.to_f32());
        let same = want.to_bits() == out[i].to_bits() || want.is_nan() && out[i].is_nan();
        if !same {
            return Err(format!("logit {}: got {}, expected {want}", logits[i], out[i]).into());
        }
    }
    Ok(())
}

/// Proptest with fixed seeds and few cases: the shared checks are the broad ones.
fn property<S: Strategy>(strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) -> Result<(), Failed> {
    let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, proptest::test_runner::TestRng::deterministic_rng(Default::default()));
    Ok(runner.run(&strategy, test).map_err(|e| e.to_string())?)
}

/// T, K, N, stride beyond K, seed.
fn sizes() -> impl Strategy<Value = (usize, usize, usize, usize, u64)> {
    (0usize..9, 0usize..700, 0usize..40, 0usize..9, any::<u64>())
}

fn property_oracle() -> Result<(), Failed> {
    property((sizes(), any::<bool>(), -2.0f32..2.0), |((t, k, _, more, seed), framework, scale)| {
        let stride = k + more;
        let (x, w) = (random(t * stride, seed, bf16::from_f32), random(k, seed ^ 1, bf16::from_f32));
        let rounding = if framework { Rounding::Framework } else { Rounding::Fused };
        let options = GateOptions { rounding, scale, ..GateOptions::default() };
        let mut out = vec![bf16::MAX; t];
        let layout = Layout::strided("test", BF16, &[t, k], &[stride, 1]).unwrap();
        let x_view = TensorView::new(bytemuck::cast_slice(&x), layout).unwrap();
        let out_view = TensorViewMut::from_slice(&mut out, &[t]).unwrap();
        gate(&Backend::cpu(), x_view, TensorView::from_slice(&w, &[k]).unwrap(), &options, out_view).unwrap();
        let widen = |v: &[bf16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        let packed: Vec<f32> = (0..t).flat_map(|r| widen(&x[r * stride..][..k])).collect();
        let gates = oracle::Gates {
            x: &packed,
            w: &widen(&w),
            num_tokens: t,
            x_dtype: BF16,
            bias: None,
            addend: None,
            activation: Activation::Sigmoid,
            scale,
            rounding,
        };
        prop_assert_eq!(bytemuck::cast_slice::<_, u8>(&out), &oracle::gate(&gates, BF16)[..]);
        Ok(())
    })
}

/// In f32, where nothing is rounded on the way: the fused forms equal the gate followed by the single operations.
fn property_forms() -> Result<(), Failed> {
    property(sizes(), |(t, k, n, _, seed)| {
        let backend = Backend::cpu();
        let (x, w, s) = (random(t * k, seed, |v| v), random(k, seed ^ 1, |v| v), random(t * n, seed ^ 2, |v| v));
        let before = random(t * n, seed ^ 3, |v| v);
        let x = TensorView::from_slice(&x, &[t, k]).unwrap();
        let w = TensorView::from_slice(&w, &[k]).unwrap();
        let s_view = TensorView::from_slice(&s, &[t, n]).unwrap();
        let (fused, linear) = (GateOptions::default(), GateOptions { activation: Activation::Linear, ..GateOptions::default() });
        let (mut g, mut logits) = (vec![0f32; t], vec![0f32; t]);
        gate(&backend, x, w, &fused, TensorViewMut::from_slice(&mut g, &[t]).unwrap()).unwrap();
        gate(&backend, x, w, &linear, TensorViewMut::from_slice(&mut logits, &[t, 1]).unwrap()).unwrap();
        let (mut product, mut sum, mut from_logits) = (vec![0f32; t * n], before.clone(), vec![0f32; t * n]);
        gate_mul(&backend, x, w, s_view, &fused, TensorViewMut::from_slice(&mut product, &[t, n]).unwrap()).unwrap();
        gate_mul_add(&backend, x, w, s_view, &fused, TensorViewMut::from_slice(&mut sum, &[t, n]).unwrap()).unwrap();
        let logits = TensorView::from_slice(&logits, &[t, 1]).unwrap();
        sigmoid_mul(&backend, s_view, logits, Rounding::Fused, TensorViewMut::from_slice(&mut from_logits, &[t, n]).unwrap()).unwrap();
        for i in 0..t * n {
            prop_assert_eq!(product[i].to_bits(), (g[i / n] * s[i]).to_bits());
            prop_assert_eq!(sum[i].to_bits(), (before[i] + g[i / n] * s[i]).to_bits());
            prop_assert_eq!(from_logits[i].to_bits(), product[i].to_bits());
        }
        Ok(())
    })
}
