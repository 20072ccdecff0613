//! The MoE blocks of one decode step: one token through every layer's routed experts, shared expert and gate.
#![forbid(unsafe_code)]

use moe_kernels::gpu::{Blas, Buffer, Product, Stream, plain};
use moe_kernels::layer::Shape;
use moe_kernels::measure::timing::Replay;
use moe_kernels::ops::gate::{Activation, GateOptions, Rounding, gate_mul_add};
use moe_kernels::oracle::gate as oracle;
use moe_kernels::random::SplitMix64;
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, DType, Error, Result, TensorView};

use super::slots::{self, Slots};
use super::statistics;

const DTYPE: DType = DType::BF16;

/// How a layer's routed experts run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Experts {
    /// Each expert by itself: gate and up in one product, SiLU, down; the last adds to the sum.
    Each,
    /// All of a token in three launches, as a grouped product runs them: the fewest launches around the gate.
    Grouped,
}

/// Who weighs the shared expert.
pub enum Gate {
    /// Nobody: the rest of the step.
    Nobody,
    /// A product of one column, sigmoid, multiply, add: four launches.
    Blas,
    /// `gate_mul_add` on this backend.
    Ours(Backend),
}

/// Matrices of a layer, one behind the other.
struct Matrices {
    /// Bytes of an expert's gate and up, and of its down.
    expert_up: usize,
    expert_down: usize,
    shared_up: usize,
    shared_down: usize,
    gate: usize,
}

impl Matrices {
    fn of(shape: &Shape) -> Self {
        let Shape { hidden, expert_width, shared_width, .. } = *shape;
        let bytes = |rows: usize, columns: usize| (rows * columns * DTYPE.size()).next_multiple_of(256); // spec: the BLAS's alignment
        Matrices {
            expert_up: bytes(2 * expert_width, hidden),
            expert_down: bytes(hidden, expert_width),
            shared_up: bytes(2 * shared_width, hidden),
            shared_down: bytes(hidden, shared_width),
            gate: bytes(1, hidden),
        }
    }

    fn layer(&self, k: usize) -> usize {
        k * (self.expert_up + self.expert_down) + self.shared_up + self.shared_down + self.gate
    }
}

struct Products {
    expert_up: Product,
    expert_down: Product,
    all_up: Product,
    all_down: Product,
    shared_up: Product,
    shared_down: Product,
    gate: Product,
}

/// Weights and activations of a step.
pub struct Step {
    stream: Stream,
    shape: Shape,
    num_layers: usize,
    matrices: Matrices,
    weights: Buffer,
    products: Products,
    layouts: Layouts,
    /// One for each layer.
    x: Slots,
    s: Slots,
    out: Slots,
    /// One for each expert.
    up: Slots,
    act: Slots,
    /// Of all experts, and of the shared one.
    all_up: Slots,
    all_act: Slots,
    shared_up: Slots,
    shared_act: Slots,
    logit: Slots,
    gate: Slots,
    product: Slots,
}

struct Layouts {
    x_of_all: Layout,
    expert_up: Layout,
    expert_down: Layout,
    all_up: Layout,
    all_down: Layout,
    shared_up: Layout,
    shared_down: Layout,
    gate: Layout,
    gate_row: Layout,
    act_of_all: Layout,
    all_act_row: Layout,
}

impl Layouts {
    fn of(shape: &Shape) -> Result<Self> {
        let Shape { hidden, expert_width, shared_width, router, .. } = *shape;
        let layout = |shape: &[usize]| Layout::contiguous("bench", DTYPE, shape);
        let k = router.k;
        Ok(Layouts {
            // The same row for every expert.
            x_of_all: Layout::strided("bench", DTYPE, &[k, 1, hidden], &[0, hidden, 1])?,
            expert_up: layout(&[2 * expert_width, hidden])?,
            expert_down: layout(&[hidden, expert_width])?,
            all_up: layout(&[k, 2 * expert_width, hidden])?,
            all_down: layout(&[hidden, k * expert_width])?,
            shared_up: layout(&[2 * shared_width, hidden])?,
            shared_down: layout(&[hidden, shared_width])?,
            gate: layout(&[1, hidden])?,
            gate_row: layout(&[hidden])?,
            act_of_all: layout(&[k, expert_width])?,
            all_act_row: layout(&[1, k * expert_width])?,
        })
    }
}

impl Step {
    /// Random weights, different memory for each layer, and the fastest kernels of the BLAS for each product.
    pub fn new(stream: &Stream, blas: &Blas, shape: &Shape, num_layers: usize) -> Result<Self> {
        let Shape { hidden, expert_width, shared_width, router, .. } = *shape;
        let k = router.k;
        let (matrices, layouts) = (Matrices::of(shape), Layouts::of(shape)?);
        let weights = weights(stream, matrices.layer(k), num_layers)?;
        let slots = |shape: &[usize], num, seed| Slots::random(stream, DTYPE, shape, num, seed, 1.0);
        let (x, s, out) = (slots(&[1, hidden], num_layers, 1)?, slots(&[1, hidden], num_layers, 2)?, slots(&[1, hidden], num_layers, 3)?);
        let (up, act) = (slots(&[1, 2 * expert_width], k, 4)?, slots(&[1, expert_width], k, 5)?);
        let (all_up, all_act) = (slots(&[k, 1, 2 * expert_width], 1, 6)?, slots(&[k, expert_width], 1, 7)?);
        let (shared_up, shared_act) = (slots(&[1, 2 * shared_width], 1, 8)?, slots(&[1, shared_width], 1, 9)?);
        let (logit, gate, product) = (slots(&[1, 1], 1, 10)?, slots(&[1, 1], 1, 11)?, slots(&[1, hidden], 1, 12)?);
        let row = |columns: usize| Layout::contiguous("bench", DTYPE, &[1, columns]);
        let fastest = |x: &Layout, w: &Layout, y: &Layout| fastest(stream, blas, &weights, matrices.layer(k), num_layers, (x, w, y));
        let products = Products {
            expert_up: fastest(&row(hidden)?, &layouts.expert_up, up.layout())?,
            expert_down: fastest(&row(expert_width)?, &layouts.expert_down, out.layout())?,
            all_up: fastest(&layouts.x_of_all, &layouts.all_up, all_up.layout())?,
            all_down: fastest(&layouts.all_act_row, &layouts.all_down, out.layout())?,
            shared_up: fastest(&row(hidden)?, &layouts.shared_up, shared_up.layout())?,
            shared_down: fastest(&row(shared_width)?, &layouts.shared_down, s.layout())?,
            gate: fastest(&row(hidden)?, &layouts.gate, logit.layout())?,
        };
        Ok(Step {
            stream: stream.clone(),
            shape: *shape,
            num_layers,
            matrices,
            weights,
            products,
            layouts,
            x,
            s,
            out,
            up,
            act,
            all_up,
            all_act,
            shared_up,
            shared_act,
            logit,
            gate,
            product,
        })
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len()
    }

    /// Queues the step.
    pub fn run(&self, experts: Experts, gate: &Gate) -> Result<()> {
        (0..self.num_layers).try_for_each(|layer| {
            match experts {
                Experts::Each => self.each(layer)?,
                Experts::Grouped => self.grouped(layer)?,
            }
            self.shared(layer)?;
            self.weigh(layer, gate)
        })
    }

    fn matrix(&self, at: usize, layout: &Layout) -> Result<TensorView<'_>> {
        self.weights.view(at, *layout)
    }

    fn each(&self, layer: usize) -> Result<()> {
        let (stream, matrices) = (&self.stream, &self.matrices);
        let (k, first) = (self.shape.router.k, layer * matrices.layer(self.shape.router.k));
        for e in 0..k {
            let up = self.matrix(first + e * matrices.expert_up, &self.layouts.expert_up)?;
            let down = self.matrix(first + k * matrices.expert_up + e * matrices.expert_down, &self.layouts.expert_down)?;
            self.products.expert_up.run(stream, self.x.read().slot(layer)?, up, &mut self.up.write().slot(e)?, 1.0, 0.0)?;
            plain::silu_mul(stream, self.up.read().slot(e)?, &mut self.act.write().slot(e)?)?;
            // The routing weight is the product's factor, and the first product starts the sum.
            let (weight, keep) = (1.0 / k as f32, if e == 0 { 0.0 } else { 1.0 });
            self.products.expert_down.run(stream, self.act.read().slot(e)?, down, &mut self.out.write().slot(layer)?, weight, keep)?;
        }
        Ok(())
    }

    fn grouped(&self, layer: usize) -> Result<()> {
        let (stream, matrices) = (&self.stream, &self.matrices);
        let (k, first) = (self.shape.router.k, layer * matrices.layer(self.shape.router.k));
        let up = self.matrix(first, &self.layouts.all_up)?;
        let down = self.matrix(first + k * matrices.expert_up, &self.layouts.all_down)?;
        let x = self.x.read();
        self.products.all_up.run(stream, x.slot_as(layer, self.layouts.x_of_all)?, up, &mut self.all_up.write().slot(0)?, 1.0, 0.0)?;
        plain::silu_mul(stream, self.all_up.read().slot(0)?, &mut self.all_act.write().slot_as(0, self.layouts.act_of_all)?)?;
        let act = self.all_act.read();
        let act = act.slot_as(0, self.layouts.all_act_row)?;
        self.products.all_down.run(stream, act, down, &mut self.out.write().slot(layer)?, 1.0 / k as f32, 0.0)
    }

    fn shared_at(&self, layer: usize) -> usize {
        let (matrices, k) = (&self.matrices, self.shape.router.k);
        layer * matrices.layer(k) + k * (matrices.expert_up + matrices.expert_down)
    }

    fn shared(&self, layer: usize) -> Result<()> {
        let (stream, at) = (&self.stream, self.shared_at(layer));
        let up = self.matrix(at, &self.layouts.shared_up)?;
        let down = self.matrix(at + self.matrices.shared_up, &self.layouts.shared_down)?;
        self.products.shared_up.run(stream, self.x.read().slot(layer)?, up, &mut self.shared_up.write().slot(0)?, 1.0, 0.0)?;
        plain::silu_mul(stream, self.shared_up.read().slot(0)?, &mut self.shared_act.write().slot(0)?)?;
        self.products.shared_down.run(stream, self.shared_act.read().slot(0)?, down, &mut self.s.write().slot(layer)?, 1.0, 0.0)
    }

    fn gate_at(&self, layer: usize) -> usize {
        self.shared_at(layer) + self.matrices.shared_up + self.matrices.shared_down
    }

    fn weigh(&self, layer: usize, gate: &Gate) -> Result<()> {
        let stream = &self.stream;
        let (x, s) = (self.x.read(), self.s.read());
        let (x, s) = (x.slot(layer)?, s.slot(layer)?);
        match gate {
            Gate::Nobody => Ok(()),
            Gate::Blas => {
                let w = self.matrix(self.gate_at(layer), &self.layouts.gate)?;
                self.products.gate.run(stream, x, w, &mut self.logit.write().slot(0)?, 1.0, 0.0)?;
                plain::sigmoid(stream, self.logit.read().slot(0)?, &mut self.gate.write().slot(0)?)?;
                plain::scale(stream, self.gate.read().slot(0)?, s, &mut self.product.write().slot(0)?)?;
                plain::add(stream, self.product.read().slot(0)?, &mut self.out.write().slot(layer)?)
            }
            Gate::Ours(backend) => {
                let w = self.matrix(self.gate_at(layer), &self.layouts.gate_row)?;
                // Only a programmatic launch looks at it.
                let options = GateOptions { weights_are_constant: true, ..GateOptions::default() };
                gate_mul_add(backend, x, w, s, &options, self.out.write().slot(layer)?)
            }
        }
    }

    fn outputs(&self, experts: Experts, gate: &Gate) -> Result<Vec<Vec<f32>>> {
        (0..self.num_layers).try_for_each(|layer| self.out.poison(&self.stream, layer))?;
        self.run(experts, gate)?;
        (0..self.num_layers).map(|layer| Ok(slots::values(DTYPE, &self.out.fetch(&self.stream, layer)?))).collect()
    }

    /// Compares the gates of every layer: ours bit for bit with the oracle, the BLAS's with it within its roundings. What is wrong, if anything.
    pub fn check(&self, experts: Experts, gates: &[(&str, Gate)]) -> Result<Option<String>> {
        let before = self.outputs(experts, &Gate::Nobody)?;
        for (name, gate) in gates {
            let is_exact = match gate {
                Gate::Nobody => continue,
                Gate::Blas => false,
                Gate::Ours(_) => true,
            };
            for (layer, got) in self.outputs(experts, gate)?.into_iter().enumerate() {
                let s = slots::values(DTYPE, &self.s.fetch(&self.stream, layer)?);
                let mut w = vec![0; self.shape.hidden * DTYPE.size()];
                self.weights.download(&self.stream, self.gate_at(layer), &mut w)?;
                let (x, w) = (self.x.values(layer), slots::values(DTYPE, &w));
                let gates = oracle::Gates {
                    x,
                    w: &w,
                    num_tokens: 1,
                    x_dtype: DTYPE,
                    bias: None,
                    addend: None,
                    activation: Activation::Sigmoid,
                    scale: 1.0,
                    rounding: Rounding::Fused,
                };
                let want = slots::values(DTYPE, &oracle::gate_mul_add(&gates, &s, DTYPE, &before[layer]));
                // Derived: logit, gate, product and sum are each rounded by half a unit in the last place of a number of this size.
                let near = |got: f32, want: f32, s: f32| (got - want).abs() <= 4.0 * 2f32.powi(-8) * (want.abs() + s.abs());
                let is_right = |n: usize| if is_exact { got[n].to_bits() == want[n].to_bits() } else { near(got[n], want[n], s[n]) };
                if let Some(n) = (0..got.len()).find(|&n| !is_right(n)) {
                    let text = format!("{experts:?}, {name}, layer {layer}: element {n} is {}, expected {}", got[n], want[n]);
                    return Ok(Some(text));
                }
            }
        }
        Ok(None)
    }
}

/// Random numbers in memory of `num_layers` layers. Made once and turned by another distance for each layer, so that no two layers are equal.
fn weights(stream: &Stream, layer_bytes: usize, num_layers: usize) -> Result<Buffer> {
    // Uniform below 0.1 (arbitrary): every product's results are then of size 1.
    let mut random = SplitMix64::new(7);
    let numbers: Vec<f32> = (0..layer_bytes / DTYPE.size()).map(|_| random.next_f32() * 0.1).collect();
    let bytes = slots::bytes(DTYPE, &numbers);
    let weights = Buffer::new(stream.device(), layer_bytes * num_layers)?;
    let one = Buffer::from_bytes(stream, &bytes)?;
    for layer in 0..num_layers {
        let turned = layer * 4096 % layer_bytes; // arbitrary: two rows of a hidden size of 1024
        let first = layer_bytes - turned;
        weights.copy_from(stream, layer * layer_bytes, &one, turned, first)?;
        if turned > 0 {
            weights.copy_from(stream, layer * layer_bytes + first, &one, 0, turned)?;
        }
    }
    stream.synchronize()?;
    Ok(weights)
}

/// Of the kernels that the BLAS proposes, the fastest in a graph that takes its matrix from another layer each time.
fn fastest(
    stream: &Stream,
    blas: &Blas,
    weights: &Buffer,
    layer_bytes: usize,
    num_layers: usize,
    (x, w, y): (&Layout, &Layout, &Layout),
) -> Result<Product> {
    // Arbitrary: enough to tell kernels apart that differ by 5 %.
    const MAX_CHOICES: usize = 8;
    const NUM_NODES: usize = 120;
    const NUM_REPLAYS: usize = 5;
    let (x_slots, y_slots) = (slot(stream, x)?, slot(stream, y)?);
    let mut best: Option<(f64, Product)> = None;
    for product in blas.products(x, w, y, MAX_CHOICES)? {
        let run = |i: usize| {
            let w = weights.view(i % num_layers * layer_bytes, *w)?;
            product.run(stream, x_slots.read().slot_as(0, *x)?, w, &mut y_slots.write().slot_as(0, *y)?, 1.0, 0.0)
        };
        let seconds = statistics(&Replay::capture(stream, run, NUM_NODES)?.time(stream, NUM_REPLAYS)?)?.median;
        if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
            best = Some((seconds, product));
        }
    }
    let none = || Error::Unsupported { op: "bench", what: format!("{:?} times {:?}", x.shape(), w.shape()), why: "no kernel".into() };
    best.map(|(_, product)| product).ok_or_else(none)
}

/// One random tensor of the extent of a layout.
fn slot(stream: &Stream, layout: &Layout) -> Result<Slots> {
    Slots::random(stream, DTYPE, &[layout.extent_bytes() / DTYPE.size()], 1, 13, 1.0)
}
