//! Hot calls allocate nothing once their scratch has its size: counted, on the thread that makes the call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::{self, Config, ExpertParallel, Mode, Quantize, Reduce, World};
use moe_kernels::ops::{cast, combine, dispatch, gate};
use moe_kernels::{Backend, Cpu, DType, Result, TensorView, TensorViewMut};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let by_expert = ep::Layout::ByExpert { segment_align: 4 };
    let config = || Config::new(128, DType::F32, 8, 3, 40);
    let configs = [
        ("by token", config()),
        ("by token, low latency", Config { mode: Mode::LowLatency, expected_tokens: 2, ..config() }),
        ("by token, quantised", Config { quantize: Some(Quantize::F32), ..config() }),
        ("by expert", Config { layout: by_expert, weighted: true, ..config() }),
        ("by expert, at source", Config { layout: by_expert, reduce: Reduce::AtSource, ..config() }),
    ];
    let mut trials = vec![
        Trial::test("allocations::the counter counts", || ensure(count(|| drop(vec![0u8; 100])) == 1, "a vector was not counted")),
        Trial::test("allocations::gate and cast", gate_and_cast),
    ];
    for (name, config) in configs {
        trials.push(Trial::test(format!("allocations::dispatch and combine, {name}"), move || dispatch_and_combine(&config)));
    }
    trials
}

/// The system's allocator, counting for each thread.
pub struct Counting;

thread_local! {
    static NUM_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; the counter is a constant-initialised thread local, which allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.set(NUM_ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allocations of this thread during `work`.
pub fn count(work: impl FnOnce()) -> u64 {
    let before = NUM_ALLOCATIONS.get();
    work();
    NUM_ALLOCATIONS.get() - before
}

fn ensure(condition: bool, message: impl Into<String>) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message.into().into()) }
}

/// The call allocates nothing after a first one that may.
fn none_when_warm(what: &str, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    call()?;
    for round in 1..4 {
        let mut result = Ok(());
        let num = count(|| result = call());
        result?;
        assert_eq!(num, 0, "{what}, round {round}: allocations");
    }
    Ok(())
}

fn gate_and_cast() -> Result<(), Failed> {
    let backend = Backend::Cpu(Cpu::with_threads(1)?);
    let x: Vec<f32> = (0..33 * 300).map(|i| i as f32 * 0.01).collect();
    let (mut out, mut row, mut column, mut amax) = (vec![0f32; 33], vec![0u8; 33 * 300], vec![0u8; 33 * 300], vec![0f32]);
    none_when_warm("gate", || {
        let x = TensorView::from_slice(&x, &[33, 300])?;
        let w = TensorView::from_slice(&[0.5f32; 300], &[300])?;
        gate::gate(&backend, x, w, &gate::GateOptions::default(), TensorViewMut::from_slice(&mut out, &[33])?)
    })?;
    let (mut dlogit, mut dx, mut dw, mut dbias) = (vec![0f32; 33], vec![0f32; 33 * 300], vec![0f32; 300], vec![0f32]);
    none_when_warm("gate_backward", || {
        let x = TensorView::from_slice(&x, &[33, 300])?;
        let (w, dg) = (TensorView::from_slice(&[0.5f32; 300], &[300])?, TensorView::from_slice(&[0.25f32; 33], &[33])?);
        let outputs = gate::GateGradients {
            dlogit: TensorViewMut::from_slice(&mut dlogit, &[33])?,
            dx: Some(TensorViewMut::from_slice(&mut dx, &[33, 300])?),
            dw: Some(TensorViewMut::from_slice(&mut dw, &[300])?),
            dbias: Some(TensorViewMut::from_slice(&mut dbias, &[1])?),
        };
        gate::gate_backward(&backend, x, w, dg, &gate::GateOptions::default(), outputs)
    })?;
    none_when_warm("gate_mul_backward", || {
        let x = TensorView::from_slice(&x, &[33, 300])?;
        let w = TensorView::from_slice(&[0.5f32; 300], &[300])?;
        let outputs = gate::GateMulGradients {
            dg: TensorViewMut::from_slice(&mut dlogit, &[33])?,
            ds: Some(TensorViewMut::from_slice(&mut dx, &[33, 300])?),
        };
        gate::gate_mul_backward(&backend, x, w, x, x, &gate::GateOptions::default(), outputs)
    })?;
    none_when_warm("cast", || {
        let mut operands = [cast::Operands::new(TensorView::from_slice(&x, &[33, 300])?)
            .row(TensorViewMut::from_bytes(&mut row, DType::E4M3, &[33, 300])?)
            .column(TensorViewMut::from_bytes(&mut column, DType::E4M3, &[300, 33])?)
            .amax(TensorViewMut::from_slice(&mut amax, &[1])?)];
        cast::cast(&backend, &mut operands, &cast::Options::default())
    })?;
    let matrix = cast::Operands::new(TensorView::from_slice(&x, &[33, 300])?)
        .row(TensorViewMut::from_bytes(&mut row, DType::E4M3, &[33, 300])?)
        .column(TensorViewMut::from_bytes(&mut column, DType::E4M3, &[300, 33])?)
        .amax(TensorViewMut::from_slice(&mut amax, &[1])?);
    let mut list = cast::List::new(&backend, vec![matrix], cast::Options::default())?;
    none_when_warm("a list that is made once", || list.cast(&backend))?;
    Ok(())
}

fn dispatch_and_combine(config: &Config) -> Result<(), Failed> {
    let results = World::run(&Backend::Cpu(Cpu::with_threads(1)?), 2, |world| {
        let mut ep = ExpertParallel::new(&world, config.clone())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        let ids: Vec<i32> = (0..40 * 3).map(|i| (i * 5 % 9) - 1).collect();
        let (x, mut out) = (vec![1.5f32; 40 * 128], vec![0f32; 40 * 128]);
        none_when_warm("dispatch and combine", || {
            let input = dispatch::Input {
                x: TensorView::from_slice(&x, &[40, 128])?,
                topk_idx: TensorView::from_slice(&ids, &[40, 3])?,
                topk_weights: None,
                scales: None,
                num_tokens: dispatch::NumTokens::All,
            };
            let arrival = ep.dispatch(&mut routing, &input, dispatch::Outputs::default())?;
            let y = combine::Input { y: combine::ExpertRows::InPlace, row_weights: None };
            let out = TensorViewMut::from_slice(&mut out, &[40, 128])?;
            Ok(ep.combine(&routing, arrival, &y, combine::Output { out, add_to: None, topk_weights: None })?)
        })
    })?;
    Ok(results.into_iter().collect::<Result<()>>()?)
}
