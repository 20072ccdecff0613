//! One size of `moe bench gate`: its tensors, the ways to compute it, and what each must give.
#![forbid(unsafe_code)]

use moe_kernels::gpu::{Blas, Buffer, Device, Product, Stream, plain};
use moe_kernels::measure::timing::Replay;
use moe_kernels::ops::gate::{Activation, GateOptions, Rounding, gate, gate_mul, gate_mul_add};
use moe_kernels::oracle::gate as oracle;
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, Cuda, DType, Error, Result};

use rayon::prelude::*;

use super::slots::{Slots, values};
use super::statistics;

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// `x . w`.
    Dot,
    /// `sigmoid(x . w)`.
    Gate,
    /// That times s.
    GateMul,
    /// That added to out.
    GateMulAdd,
}

/// One size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Size {
    pub form: Form,
    pub dtype: DType,
    pub t: usize,
    pub k: usize,
    /// Columns of s; 0 without.
    pub n: usize,
}

impl Size {
    /// Bytes that one call must read and write.
    pub fn moved_bytes(&self) -> u64 {
        let Size { t, k, n, .. } = *self;
        let results = match self.form {
            Form::Dot | Form::Gate => t,
            Form::GateMul => 2 * t * n,
            Form::GateMulAdd => 3 * t * n,
        };
        ((t * k + k + results) * self.dtype.size()) as u64
    }
}

fn options(form: Form, weights_are_constant: bool) -> GateOptions<'static> {
    let activation = if form == Form::Dot { Activation::Linear } else { Activation::Sigmoid };
    GateOptions { activation, weights_are_constant, ..GateOptions::default() }
}

/// How many tensors take turns: as in the recorded probes of a one-block kernel.
const NUM_W: usize = 40;
/// See [`NUM_W`].
const NUM_X: usize = 8;

/// Kernels of cuBLASLt that are tried; the fastest counts (arbitrary: the library proposes fewer for products of one column).
const MAX_CHOICES: usize = 8;

/// The tensors of one size.
pub struct Inputs {
    size: Size,
    stream: Stream,
    x: Slots,
    w: Slots,
    s: Slots,
    out: Slots,
    /// The chains' results between two steps: logits, gates, products.
    logits: Slots,
    gates: Slots,
    products: Slots,
}

/// One way to compute it.
pub struct Way<'a> {
    pub name: &'static str,
    /// Queues call `i`.
    pub run: Box<dyn Fn(usize) -> Result<()> + 'a>,
    /// Ours: bit for bit the oracle's. Others come near.
    is_exact: bool,
    /// Launches of one call.
    pub num_launches: usize,
}

impl Inputs {
    /// Random tensors. Dots are of size 1, whatever K is.
    pub fn new(stream: &Stream, size: Size) -> Result<Self> {
        let Size { form, dtype, t, k, n } = size;
        let slots = |shape: &[usize], num, seed, scale| Slots::random(stream, dtype, shape, num, seed, scale);
        let out: &[usize] = if matches!(form, Form::Dot | Form::Gate) { &[t] } else { &[t, n] };
        // Uniform in [-1, 1) has a variance of 1/3: three times as much for w makes the variance of the dot 1.
        let w_scale = 3.0 / (k.max(1) as f32).sqrt();
        Ok(Inputs {
            size,
            stream: stream.clone(),
            x: slots(&[t, k], NUM_X, 1, 1.0)?,
            w: slots(&[1, k], NUM_W, 2, w_scale)?,
            s: slots(&[t, n], NUM_X, 3, 1.0)?,
            out: slots(out, NUM_X, 4, 1.0)?,
            logits: Slots::scratch(stream, dtype, &[t, 1], NUM_X)?,
            gates: Slots::scratch(stream, dtype, &[t, 1], NUM_X)?,
            products: Slots::scratch(stream, dtype, &[t, n], NUM_X)?,
        })
    }

    /// Loads the kernels of our ways of this size, from the compiler if no process has done so before.
    pub fn load(device: &Device, size: Size) -> Result<()> {
        let stream = Stream::new(device)?;
        let Size { form, dtype, t, k, n } = size;
        let buffer = |num: usize| {
            let buffer = Buffer::new(device, num * dtype.size())?;
            buffer.fill(&stream, 0, buffer.len(), 0).map(|()| buffer)
        };
        let layout = |shape: &[usize]| Layout::contiguous("bench", dtype, shape);
        let is_gate = matches!(form, Form::Dot | Form::Gate);
        let out_shape = if is_gate { layout(&[t])? } else { layout(&[t, n])? };
        let (x, w, s, mut out) = (buffer(t * k)?, buffer(k)?, buffer(t * n)?, buffer(t * n.max(1))?);
        for (programmatic, weights_are_constant) in [(false, false), (true, true), (true, false)] {
            let backend = Backend::Cuda(Cuda::on(stream.clone()).programmatic(programmatic));
            let options = options(form, weights_are_constant);
            let (x, w, out) = (x.view(0, layout(&[t, k])?)?, w.view(0, layout(&[1, k])?)?, out.view_mut(0, out_shape)?);
            match form {
                Form::Dot | Form::Gate => gate(&backend, x, w, &options, out)?,
                Form::GateMul => gate_mul(&backend, x, w, s.view(0, layout(&[t, n])?)?, &options, out)?,
                Form::GateMulAdd => gate_mul_add(&backend, x, w, s.view(0, layout(&[t, n])?)?, &options, out)?,
            }
        }
        stream.synchronize()
    }

    /// Every way, ours first.
    pub fn ways(&self, blas: &Blas) -> Result<Vec<Way<'_>>> {
        // Weights of a model are constant, and a programmatic launch may be told so.
        let ours = |programmatic: bool, weights_are_constant: bool| {
            let backend = Backend::Cuda(Cuda::on(self.stream.clone()).programmatic(programmatic));
            move |i| self.ours(&backend, weights_are_constant, i)
        };
        // Behind a kernel that never lets its dependents start: the least that programmatic launch can save.
        let behind = |programmatic: bool| {
            let ours = ours(programmatic, programmatic);
            move |i| plain::empty(&self.stream, false).and_then(|()| ours(i))
        };
        let product = self.fastest_product(blas)?;
        let num_steps = match self.size.form {
            Form::Dot => 1,
            Form::Gate => 2,
            Form::GateMul => 3,
            Form::GateMulAdd => 4,
        };
        let way = |name, run, is_exact, num_launches| Way { name, run, is_exact, num_launches };
        let mut ways = vec![way("ours", Box::new(ours(false, false)), true, 1), way("programmatic", Box::new(ours(true, true)), true, 1)];
        // What the launch before decides is the same at every size: a few of them show it.
        if self.size.t == 1 && [2048, 4096, 131072].contains(&self.size.k) {
            ways.push(way("programmatic, any weights", Box::new(ours(true, false)), true, 1));
            ways.push(way("empty, ours", Box::new(behind(false)), true, 2));
            ways.push(way("empty, programmatic", Box::new(behind(true)), true, 2));
        }
        ways.push(way("cublaslt chain", Box::new(move |i| self.chain(i, |i| self.multiply(&product, i))), false, num_steps));
        ways.push(way("plain chain", Box::new(move |i| self.chain(i, |i| self.plain_dot(i))), false, num_steps));
        Ok(ways)
    }

    fn ours(&self, backend: &Backend, weights_are_constant: bool, i: usize) -> Result<()> {
        let (x, w, mut out) = (self.x.read(), self.w.read(), self.out.write());
        let (x, w, out, options) = (x.slot(i)?, w.slot(i)?, out.slot(i)?, options(self.size.form, weights_are_constant));
        match self.size.form {
            Form::Dot | Form::Gate => gate(backend, x, w, &options, out),
            Form::GateMul => gate_mul(backend, x, w, self.s.read().slot(i)?, &options, out),
            Form::GateMulAdd => gate_mul_add(backend, x, w, self.s.read().slot(i)?, &options, out),
        }
    }

    /// Where the logits of the chains go: the result itself when it is nothing else.
    fn logits(&self) -> &Slots {
        if self.size.form == Form::Dot { &self.out } else { &self.logits }
    }

    fn multiply(&self, product: &Product, i: usize) -> Result<()> {
        let mut logits = self.logits().write();
        let mut logits = logits.slot_as(i, *self.logits.layout())?;
        product.run(&self.stream, self.x.read().slot(i)?, self.w.read().slot(i)?, &mut logits, 1.0, 0.0)
    }

    fn plain_dot(&self, i: usize) -> Result<()> {
        plain::dot(&self.stream, self.x.read().slot(i)?, self.w.read().slot(i)?, &mut self.logits().write().slot(i)?)
    }

    /// The steps behind the dot, each a launch.
    fn chain(&self, i: usize, dot: impl Fn(usize) -> Result<()>) -> Result<()> {
        let stream = &self.stream;
        dot(i)?;
        let gates = match self.size.form {
            Form::Dot => return Ok(()),
            Form::Gate => &self.out,
            Form::GateMul | Form::GateMulAdd => &self.gates,
        };
        plain::sigmoid(stream, self.logits.read().slot(i)?, &mut gates.write().slot(i)?)?;
        let products = match self.size.form {
            Form::Dot | Form::Gate => return Ok(()),
            Form::GateMul => &self.out,
            Form::GateMulAdd => &self.products,
        };
        plain::scale(stream, gates.read().slot(i)?, self.s.read().slot(i)?, &mut products.write().slot(i)?)?;
        if self.size.form == Form::GateMulAdd {
            plain::add(stream, products.read().slot(i)?, &mut self.out.write().slot(i)?)?;
        }
        Ok(())
    }

    /// Of the kernels that cuBLASLt proposes, the one that is the fastest in a graph.
    fn fastest_product(&self, blas: &Blas) -> Result<Product> {
        // Arbitrary: enough to tell kernels apart that differ by 5 %.
        const NUM_NODES: usize = 40;
        const NUM_REPLAYS: usize = 3;
        let mut best: Option<(f64, Product)> = None;
        for product in blas.products(self.x.layout(), self.w.layout(), self.logits.layout(), MAX_CHOICES)? {
            let run = |i| self.multiply(&product, i);
            let seconds = statistics(&Replay::capture(&self.stream, run, NUM_NODES)?.time(&self.stream, NUM_REPLAYS)?)?.median;
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, product));
            }
        }
        // `products` gives at least one, or an error.
        best.map(|(_, product)| product).ok_or_else(|| Error::Unsupported {
            op: "bench",
            what: format!("{:?}", self.size),
            why: "no kernel".into(),
        })
    }

    /// What calls of these numbers must give.
    pub fn expectations(&self) -> Vec<Expectation> {
        // 43 takes other slots of x and w than 0 (derived: 43 % 8 = 3, 43 % 40 = 3). Large results are fetched for one call only.
        let calls: &[usize] = if self.size.t < 512 { &[0, 43] } else { &[43] };
        calls.iter().map(|&i| self.expectation(i)).collect()
    }

    fn expectation(&self, i: usize) -> Expectation {
        let Size { form, dtype, t, k, n } = self.size;
        let (x, w, s, before) = (self.x.values(i), self.w.values(i), self.s.values(i), self.out.values(i));
        let activation = options(form, false).activation;
        // Row by row on all cores: the oracle is plain, and a result has millions of elements.
        let rows = (0..t).into_par_iter().map(|row| {
            let x = &x[row * k..][..k];
            let gates = oracle::Gates {
                x,
                w,
                num_tokens: 1,
                x_dtype: dtype,
                bias: None,
                addend: None,
                activation,
                scale: 1.0,
                rounding: Rounding::Fused,
            };
            let dot: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let gate = if form == Form::Dot { dot } else { 1.0 / (1.0 + (-dot).exp()) };
            let columns = |values: &'_ [f32]| values[row * n..][..n].to_vec();
            match form {
                Form::Dot | Form::Gate => (oracle::gate(&gates, dtype), vec![gate]),
                Form::GateMul => {
                    let s = columns(s);
                    (oracle::gate_mul(&gates, &s, dtype), s.iter().map(|&s| gate * f64::from(s)).collect())
                }
                Form::GateMulAdd => {
                    let (s, before) = (columns(s), columns(before));
                    let near = s.iter().zip(&before).map(|(&s, &before)| f64::from(before) + gate * f64::from(s)).collect();
                    (oracle::gate_mul_add(&gates, &s, dtype, &before), near)
                }
            }
        });
        let (exact, near): (Vec<Vec<u8>>, Vec<Vec<f64>>) = rows.unzip();
        let (exact, near) = (exact.concat(), near.concat());
        Expectation { i, exact, near }
    }

    /// Runs one way and compares; what is wrong, if anything.
    pub fn check(&self, way: &Way<'_>, expectations: &[Expectation]) -> Result<Option<String>> {
        // Derived: four roundings of numbers of size 4 at most, each by half a unit in the last place.
        let tolerance = if self.size.dtype == DType::BF16 { 4.0 * 2f64.powi(-8) } else { 4.0 * 2f64.powi(-11) };
        for expectation in expectations {
            let i = expectation.i;
            if self.size.form == Form::GateMulAdd {
                self.out.reset(&self.stream, i)?;
            } else {
                self.out.poison(&self.stream, i)?;
            }
            (way.run)(i)?;
            let got = self.out.fetch(&self.stream, i)?;
            let wrong = match way.is_exact {
                true => (0..got.len()).find(|&at| got[at] != expectation.exact[at]).map(|at| at / self.size.dtype.size()),
                // A NaN is no distance below the tolerance.
                false => {
                    let is_near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= tolerance * want.abs().max(1.0);
                    let got = values(self.size.dtype, &got);
                    got.par_iter().zip(&expectation.near).position_any(|pair| !is_near(pair))
                }
            };
            if let Some(at) = wrong {
                let (got, near) = (values(self.size.dtype, &got)[at], expectation.near[at]);
                return Ok(Some(format!("{:?}, {}, call {i}: element {at} is {got}, expected {near}", self.size, way.name)));
            }
        }
        Ok(None)
    }

    /// Where its calls are queued.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

/// What call `i` must give: the oracle's bytes, and numbers in f64.
pub struct Expectation {
    i: usize,
    exact: Vec<u8>,
    near: Vec<f64>,
}
