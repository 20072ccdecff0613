//! cuBLASLt and the plain kernels of benchmarks, on a GPU. Without one these trials are ignored; when `MOE_BACKEND` asks for CUDA they fail instead.

use libtest_mimic::{Failed, Trial};
use moe_kernels::gpu::{Blas, Buffer, CublasLt, Device, Graph, Stream, plain};
use moe_kernels::oracle::{exp, float};
use moe_kernels::random::SplitMix64;
use moe_kernels::tensor::Layout;
use moe_kernels::{DType, Error};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let is_asked_for = std::env::var("MOE_BACKEND").is_ok_and(|name| name.starts_with("cuda"));
    let has_gpu = Device::count().is_ok_and(|num| num > 0);
    let trial = |name: &str, test: fn() -> Result<(), Failed>, is_possible: bool| {
        Trial::test(format!("blas::{name}"), test).with_ignored_flag(!is_possible && !is_asked_for)
    };
    let has_blas = has_gpu && CublasLt::get().is_ok();
    vec![
        trial("products, and every entry is called", products, has_blas),
        trial("tensors that do not fit are refused", refused, has_blas),
        trial("plain kernels", plain_kernels, has_gpu),
    ]
}

fn stream() -> Result<Stream, Failed> {
    Ok(Stream::new(&Device::open(0)?)?)
}

/// Numbers that are exact in the type, and their bytes.
fn random(dtype: DType, num: usize, seed: u64) -> (Vec<f32>, Vec<u8>) {
    let mut random = SplitMix64::new(seed);
    let values: Vec<f32> = (0..num).map(|_| float::round(dtype, random.next_f32())).collect();
    let mut bytes = Vec::new();
    values.iter().for_each(|&value| float::push(dtype, value, &mut bytes));
    (values, bytes)
}

fn fetch(stream: &Stream, buffer: &Buffer, dtype: DType) -> Result<Vec<f32>, Failed> {
    let mut bytes = vec![0; buffer.len()];
    buffer.download(stream, 0, &mut bytes)?;
    Ok(float::values(dtype, &bytes))
}

/// Elements that are further from `want` than `tolerance`; NaN is.
fn compare(what: &str, got: &[f32], want: &[f64], tolerance: f64) -> Result<(), Failed> {
    let is_near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= tolerance;
    match got.iter().zip(want).position(|pair| !is_near(pair)) {
        None if got.len() == want.len() => Ok(()),
        None => Err(format!("{what}: {} elements, expected {}", got.len(), want.len()).into()),
        Some(i) => Err(format!("{what}: element {i} is {}, expected {}", got[i], want[i]).into()),
    }
}

fn products() -> Result<(), Failed> {
    let stream = stream()?;
    let blas = Blas::new(stream.device())?;
    // B, M, N, K; the gate of a token is the second.
    for (dtype, tolerance) in [(DType::BF16, 0.2), (DType::F16, 0.03), (DType::F32, 1e-4)] {
        for [batch, m, n, k] in [[1, 3, 40, 64], [1, 1, 1, 2048], [1, 64, 1, 2048], [5, 1, 96, 128], [2, 16, 24, 32]] {
            let matrix = |rows: usize, columns: usize| {
                let shape = [batch, rows, columns];
                Layout::contiguous("test", dtype, if batch == 1 { &shape[1..] } else { &shape })
            };
            let (x_layout, w_layout, y_layout) = (matrix(m, k)?, matrix(n, k)?, matrix(m, n)?);
            let (x, x_bytes) = random(dtype, batch * m * k, 1);
            let (w, w_bytes) = random(dtype, batch * n * k, 2);
            let (before, y_bytes) = random(dtype, batch * m * n, 3);
            let (x_buffer, w_buffer) = (Buffer::from_bytes(&stream, &x_bytes)?, Buffer::from_bytes(&stream, &w_bytes)?);
            let mut want = Vec::new();
            for b in 0..batch {
                for i in 0..m {
                    for j in 0..n {
                        let (x, w) = (&x[(b * m + i) * k..][..k], &w[(b * n + j) * k..][..k]);
                        let dot: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                        want.push(0.5 * dot + 2.0 * f64::from(before[(b * m + i) * n + j]));
                    }
                }
            }
            let kernels = blas.products(&x_layout, &w_layout, &y_layout, 4)?;
            for (choice, kernel) in kernels.iter().enumerate() {
                let what = format!("{dtype}, {batch} times {m} x {n} x {k}, choice {choice}");
                let mut y_buffer = Buffer::from_bytes(&stream, &y_bytes)?;
                let mut run = || {
                    let (x, w) = (x_buffer.view(0, x_layout)?, w_buffer.view(0, w_layout)?);
                    kernel.run(&stream, x, w, &mut y_buffer.view_mut(0, y_layout)?, 0.5, 2.0)
                };
                run()?;
                compare(&what, &fetch(&stream, &y_buffer, dtype)?, &want, tolerance)?;
                // Recorded: the same again.
                y_buffer.upload(&stream, 0, &y_bytes)?;
                let mut run = || {
                    let (x, w) = (x_buffer.view(0, x_layout)?, w_buffer.view(0, w_layout)?);
                    kernel.run(&stream, x, w, &mut y_buffer.view_mut(0, y_layout)?, 0.5, 2.0)
                };
                Graph::capture(&stream, &mut run)?.launch(&stream)?;
                compare(&what, &fetch(&stream, &y_buffer, dtype)?, &want, tolerance)?;
            }
        }
    }
    drop(blas);
    let never_called = CublasLt::get()?.never_called();
    if never_called.is_empty() { Ok(()) } else { Err(format!("never called: {never_called:?}").into()) }
}

fn refused() -> Result<(), Failed> {
    let stream = stream()?;
    let blas = Blas::new(stream.device())?;
    let layout = |shape: &[usize]| Layout::contiguous("test", DType::BF16, shape);
    let (x, w, y) = (layout(&[2, 64])?, layout(&[8, 64])?, layout(&[2, 8])?);
    let kernel = blas.products(&x, &w, &y, 1)?.remove(0);
    let named = |result: Result<(), Error>, name: &str| match result {
        Err(Error::Invalid { what, .. }) if what == name => Ok(()),
        other => Err(Failed::from(format!("expected `{name}` to be refused, got {other:?}"))),
    };
    let mut memory = Buffer::new(stream.device(), 1 << 16)?;
    let others = Buffer::new(stream.device(), 1 << 16)?;
    let host = vec![0u8; 1 << 12];
    let on_host = moe_kernels::TensorView::new(&host, x)?;
    named(kernel.run(&stream, on_host, others.view(0, w)?, &mut memory.view_mut(0, y)?, 1.0, 0.0), "x")?;
    named(kernel.run(&stream, others.view(0, y)?, others.view(0, w)?, &mut memory.view_mut(0, y)?, 1.0, 0.0), "x")?;
    named(kernel.run(&stream, others.view(0, x)?, others.view(16, w)?, &mut memory.view_mut(0, y)?, 1.0, 0.0), "w")?;
    named(kernel.run(&stream, others.view(0, x)?, others.view(0, w)?, &mut memory.view_mut(2, y)?, 1.0, 0.0), "y")?;
    named(plain::sigmoid(&stream, others.view(0, x)?, &mut memory.view_mut(0, y)?), "y")?;
    named(plain::dot(&stream, others.view(2, x)?, others.view(0, w)?, &mut memory.view_mut(0, y)?), "x")
}

fn plain_kernels() -> Result<(), Failed> {
    let stream = stream()?;
    plain::empty(&stream, false)?;
    plain::empty(&stream, true)?;
    for (dtype, ulp) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        // One row alone, a block's worth of columns, and more than one block of rows.
        for [t, k] in [[1, 8], [3, 2048], [65, 2056]] {
            let layout = |shape: &[usize]| Layout::contiguous("test", dtype, shape);
            let tensor = |num: usize, seed: u64| -> Result<(Vec<f32>, Buffer), Failed> {
                let (values, bytes) = random(dtype, num, seed);
                Ok((values, Buffer::from_bytes(&stream, &bytes)?))
            };
            let ((a, a_buffer), (b, b_buffer)) = (tensor(t * k, 1)?, tensor(t * k, 2)?);
            let ((w, w_buffer), (g, g_buffer)) = (tensor(k, 3)?, tensor(t, 4)?);
            let (gate_up, gate_up_buffer) = tensor(t * 2 * k, 5)?;
            let (rows, column) = (layout(&[t, k])?, layout(&[t, 1])?);
            let what = |step: &str| format!("{step}, {dtype}, {t} x {k}");
            let each = |f: &dyn Fn(usize) -> f64| (0..t * k).map(f).collect::<Vec<f64>>();

            let mut out = Buffer::new(stream.device(), t * dtype.size())?;
            plain::dot(&stream, a_buffer.view(0, rows)?, w_buffer.view(0, layout(&[k])?)?, &mut out.view_mut(0, column)?)?;
            let want: Vec<f64> = a.chunks(k).map(|row| row.iter().zip(&w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()).collect();
            compare(&what("dot"), &fetch(&stream, &out, dtype)?, &want, 64.0 * ulp)?;

            let mut out = Buffer::new(stream.device(), t * dtype.size())?;
            plain::sigmoid(&stream, g_buffer.view(0, column)?, &mut out.view_mut(0, column)?)?;
            let want: Vec<f64> = g.iter().map(|&g| f64::from(float::round(dtype, exp::sigmoid(g)))).collect();
            compare(&what("sigmoid"), &fetch(&stream, &out, dtype)?, &want, 0.0)?;

            let mut out = Buffer::new(stream.device(), t * k * dtype.size())?;
            plain::scale(&stream, g_buffer.view(0, column)?, b_buffer.view(0, rows)?, &mut out.view_mut(0, rows)?)?;
            let want = each(&|i| f64::from(float::round(dtype, g[i / k] * b[i])));
            compare(&what("scale"), &fetch(&stream, &out, dtype)?, &want, 0.0)?;

            plain::add(&stream, a_buffer.view(0, rows)?, &mut out.view_mut(0, rows)?)?;
            let want = each(&|i| f64::from(float::round(dtype, want[i] as f32 + a[i])));
            compare(&what("add"), &fetch(&stream, &out, dtype)?, &want, 0.0)?;

            plain::silu_mul(&stream, gate_up_buffer.view(0, layout(&[t, 2 * k])?)?, &mut out.view_mut(0, rows)?)?;
            let silu = |x: f32| float::round(dtype, exp::silu(x));
            let want = each(&|i| {
                let at = i / k * 2 * k + i % k;
                f64::from(float::round(dtype, silu(gate_up[at]) * gate_up[at + k]))
            });
            compare(&what("silu_mul"), &fetch(&stream, &out, dtype)?, &want, 0.0)?;
        }
    }
    Ok(())
}
