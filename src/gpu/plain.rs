//! The steps that a framework runs one by one, each a launch of its own: what benchmarks compare the fused operations with.

use super::jit::Kernels;
use super::launch::Geometry;
use super::program::{Carveout, Constant, Program, Source, Spec, Targets};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::kernel_source;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

const OP: &str = "plain";

/// Threads of a block, but of the empty kernel (arbitrary: what frameworks use).
const THREADS: u32 = 256;
/// Elements of a thread (derived: 16 bytes of a 16-bit type).
const EIGHT: usize = 8;

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    /// Nothing, in one warp.
    Empty,
    /// `y[t] = x[t] . w`.
    Dot,
    /// `y[t] = sigmoid(x[t])`.
    Sigmoid,
    /// `y[t, n] = g[t] * s[t, n]`.
    Scale,
    /// `y = a + b`.
    Add,
    /// `y[t, n] = silu(gate[t, n]) * up[t, n]`.
    SiluMul,
}

/// A step in one type, bf16 or f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PlainSpec {
    step: Step,
    dtype: DType,
}

/// The kernels of this module, for the table of resources.
pub fn programs() -> Vec<Program> {
    let steps = [Step::Dot, Step::Sigmoid, Step::Scale, Step::Add, Step::SiluMul];
    let of = |dtype| steps.map(|step| PlainSpec { step, dtype });
    let empty = PlainSpec { step: Step::Empty, dtype: DType::BF16 };
    [empty].into_iter().chain(of(DType::BF16)).chain(of(DType::F16)).map(|spec| spec.program()).collect()
}

impl Spec for PlainSpec {
    fn program(&self) -> Program {
        const SOURCES: &[Source] =
            &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/float.cuh"), kernel_source!("gpu/device/plain.cu")];
        let (name, entry) = match self.step {
            Step::Empty => ("empty", "plain_empty"),
            Step::Dot => ("dot", "plain_dot"),
            Step::Sigmoid => ("sigmoid", "plain_sigmoid"),
            Step::Scale => ("scale", "plain_scale"),
            Step::Add => ("add", "plain_add"),
            Step::SiluMul => ("silu_mul", "plain_silu_mul"),
        };
        let dtype = if self.dtype == DType::F16 { "f16" } else { "bf16" };
        Program {
            name: format!("plain {name} {dtype}"),
            entry,
            sources: SOURCES,
            constants: vec![Constant::Int("THREADS", self.threads().into()), Constant::Type("T", dtype)],
            threads: self.threads(),
            smem_bytes: 0,
            // Derived: 65536 registers of a multiprocessor hold 2048 threads of 32, 1024 of 64; these kernels are small.
            max_registers: 64,
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

impl PlainSpec {
    fn threads(self) -> u32 {
        if self.step == Step::Empty { 32 } else { THREADS }
    }
}

static KERNELS: Kernels<PlainSpec> = Kernels::new();

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    a: u64,
    b: u64,
    out: u64,
    num: u64,
    columns: u64,
}

fn launch(stream: &Stream, spec: PlainSpec, num_blocks: usize, programmatic: bool, parameters: Parameters) -> Result<()> {
    let kernel = KERNELS.get(OP, stream, spec)?;
    let num_blocks = u32::try_from(num_blocks).map_err(|_| Error::invalid(OP, "grid", num_blocks, "fewer blocks than 2^32"))?;
    let geometry = Geometry { grid: [num_blocks, 1, 1], threads: spec.threads(), programmatic, ..Geometry::default() };
    // SAFETY: the kernel takes `Parameters`; each address comes from a view of this device's memory with the shape that the grid covers.
    unsafe { kernel.launch(stream, &geometry, &parameters) }
}

/// Launches a kernel that does nothing and never lets the next one start early.
///
/// # Errors
/// Those of compiling it and of the driver.
pub fn empty(stream: &Stream, programmatic: bool) -> Result<()> {
    let nothing = Parameters { a: 0, b: 0, out: 0, num: 0, columns: 0 };
    launch(stream, PlainSpec { step: Step::Empty, dtype: DType::BF16 }, 1, programmatic, nothing)
}

/// `y [T] = x [T, K] . w [K]`, f32 inside; K is a multiple of 8.
///
/// # Errors
/// [`Error::Invalid`] for tensors that do not fit or lie elsewhere, and those of [`empty`].
pub fn dot(stream: &Stream, x: TensorView<'_>, w: TensorView<'_>, y: &mut TensorViewMut<'_>) -> Result<()> {
    let [rows, columns] = matrix("x", x.layout())?;
    let dtype = x.dtype();
    let a = address(stream, "x", x.layout(), x.device(), dtype, rows * columns)?;
    let b = address(stream, "w", w.layout(), w.device(), dtype, columns)?;
    let out = address(stream, "y", y.layout(), y.device(), dtype, rows)?;
    let parameters = Parameters { a, b, out, num: columns as u64, columns: columns as u64 };
    launch(stream, PlainSpec { step: Step::Dot, dtype }, rows, false, parameters)
}

/// `y = sigmoid(x)`.
///
/// # Errors
/// Those of [`dot`].
pub fn sigmoid(stream: &Stream, x: TensorView<'_>, y: &mut TensorViewMut<'_>) -> Result<()> {
    let (num, dtype) = (num_elements(x.layout()), x.dtype());
    let a = address(stream, "x", x.layout(), x.device(), dtype, num)?;
    let out = address(stream, "y", y.layout(), y.device(), dtype, num)?;
    let parameters = Parameters { a, b: 0, out, num: num as u64, columns: 1 };
    launch(stream, PlainSpec { step: Step::Sigmoid, dtype }, num.div_ceil(THREADS as usize), false, parameters)
}

/// `y [T, N] = g [T] * s [T, N]`; N is a multiple of 8.
///
/// # Errors
/// Those of [`dot`].
pub fn scale(stream: &Stream, g: TensorView<'_>, s: TensorView<'_>, y: &mut TensorViewMut<'_>) -> Result<()> {
    let [rows, columns] = matrix("s", s.layout())?;
    let dtype = s.dtype();
    let a = address(stream, "g", g.layout(), g.device(), dtype, rows)?;
    let b = address(stream, "s", s.layout(), s.device(), dtype, rows * columns)?;
    let out = address(stream, "y", y.layout(), y.device(), dtype, rows * columns)?;
    eights(stream, PlainSpec { step: Step::Scale, dtype }, Parameters { a, b, out, num: (rows * columns) as u64, columns: columns as u64 })
}

/// `y += x`; both `[T, N]`, N a multiple of 8.
///
/// # Errors
/// Those of [`dot`].
pub fn add(stream: &Stream, x: TensorView<'_>, y: &mut TensorViewMut<'_>) -> Result<()> {
    let [rows, columns] = matrix("x", x.layout())?;
    let dtype = x.dtype();
    let b = address(stream, "x", x.layout(), x.device(), dtype, rows * columns)?;
    let out = address(stream, "y", y.layout(), y.device(), dtype, rows * columns)?;
    let parameters = Parameters { a: out, b, out, num: (rows * columns) as u64, columns: columns as u64 };
    eights(stream, PlainSpec { step: Step::Add, dtype }, parameters)
}

/// `y [T, N] = silu(gate) * up`, both in `gate_up [T, 2 N]`, SiLU rounded before the product; N is a multiple of 8.
///
/// # Errors
/// Those of [`dot`].
pub fn silu_mul(stream: &Stream, gate_up: TensorView<'_>, y: &mut TensorViewMut<'_>) -> Result<()> {
    let [rows, columns] = matrix("y", y.layout())?;
    let dtype = gate_up.dtype();
    let a = address(stream, "gate_up", gate_up.layout(), gate_up.device(), dtype, 2 * rows * columns)?;
    let out = address(stream, "y", y.layout(), y.device(), dtype, rows * columns)?;
    let parameters = Parameters { a, b: 0, out, num: (rows * columns) as u64, columns: columns as u64 };
    eights(stream, PlainSpec { step: Step::SiluMul, dtype }, parameters)
}

fn eights(stream: &Stream, spec: PlainSpec, parameters: Parameters) -> Result<()> {
    let num_threads = (parameters.num as usize).div_ceil(EIGHT);
    launch(stream, spec, num_threads.div_ceil(THREADS as usize), false, parameters)
}

fn num_elements(layout: &Layout) -> usize {
    layout.shape().iter().product()
}

/// Rows and columns; `[B, 1, N]` has B rows.
fn matrix(what: &str, layout: &Layout) -> Result<[usize; 2]> {
    match layout.shape() {
        [rows @ .., columns] if !rows.is_empty() && columns.is_multiple_of(EIGHT) => Ok([rows.iter().product(), *columns]),
        shape => Err(Error::invalid(OP, what, format!("of shape {shape:?}"), "rows whose length is a multiple of 8")),
    }
}

fn address(
    stream: &Stream,
    what: &str,
    layout: &Layout,
    place: Option<crate::tensor::DeviceAddress>,
    dtype: DType,
    num: usize,
) -> Result<u64> {
    let (got, ordinal) = (layout.dtype(), stream.device().ordinal());
    if got != dtype || !matches!(dtype, DType::BF16 | DType::F16) {
        return Err(Error::invalid(OP, what, format!("of type {got}"), "bf16 or f16, one type for all"));
    }
    if num_elements(layout) != num || layout.extent_bytes() != num * dtype.size() {
        let got = format!("of shape {:?} and strides {:?}", layout.shape(), layout.strides());
        return Err(Error::invalid(OP, what, got, format!("{num} contiguous elements")));
    }
    match place {
        // Spec: 16-byte accesses.
        Some(place) if place.device == ordinal && place.address.is_multiple_of(16) => Ok(place.address),
        _ => Err(Error::invalid(OP, what, format!("{place:?}"), format!("at a multiple of 16 in the memory of device {ordinal}"))),
    }
}
