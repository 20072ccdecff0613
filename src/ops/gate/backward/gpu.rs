//! The CUDA backend of the gate's backward: rows by the kernel of the forward, sums over tokens by one of their own.

use super::super::gpu::{dlogit, gate_mul, is_aligned, pair_dot};
use super::check::{GateBackward, GateMulBackward};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Carveout, Constant, Geometry, Kernels, Program, Source, Spec, Targets};
use crate::kernel_source;
use crate::tensor::DType;

static KERNELS: Kernels<TokenSums> = Kernels::new();

const SOURCES: &[Source] = &[
    kernel_source!("gpu/device/platform.cuh"),
    kernel_source!("gpu/device/float.cuh"),
    kernel_source!("ops/gate/eight.cuh"),
    kernel_source!("ops/gate/backward/kernel.cu"),
];

/// Everything that the kernel of the sums over tokens is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TokenSums {
    x: DType,
    dw: DType,
    aligned: bool,
}

impl TokenSums {
    /// Threads of one row of a block: together 32 bytes, as in kernel.cu.
    fn parts(self) -> u32 {
        if self.x == DType::F32 { 1 } else { 2 }
    }

    /// Threads of a block.
    fn threads(self) -> u32 {
        256 * self.parts() // 256: spec (order of the sum)
    }

    /// Columns of a block.
    fn columns(self) -> usize {
        8 * self.parts() as usize // 8: elements of a vector
    }
}

impl Spec for TokenSums {
    fn program(&self) -> Program {
        let TokenSums { x, dw, aligned } = *self;
        Program {
            name: format!("gate_backward dw {x} {dw}{}", if aligned { "" } else { " unaligned" }),
            entry: "token_sums",
            sources: SOURCES,
            constants: vec![Constant::Type("X", x.name()), Constant::Type("S", dw.name()), Constant::Bool("ALIGNED", aligned)],
            threads: self.threads(),
            smem_bytes: 0,
            max_registers: 128, // derived: 65536 registers of an SM for 512 threads
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

/// `Parameters` of kernel.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Parameters {
    x: u64,
    x_stride: u64,
    k: u64,
    dlogit: u64,
    dlogit_stride: u64,
    num_tokens: u64,
    dw: u64,
    dbias: u64,
    flags: u64,
}

/// Bit of `Parameters::flags`, as in kernel.cu.
const DBIAS_F32: u64 = 1;

/// Writes what was asked for.
pub(super) fn gate_backward(cuda: &Cuda, call: GateBackward<'_, Cuda>) -> Result<()> {
    const OP: &str = "gate_backward";
    let GateBackward { gates, dg, dlogit: logits, dx, dw, dbias } = call;
    if let Some(logits) = &logits {
        dlogit(cuda, OP, &gates, &dg, logits, dx.as_ref())?;
    }
    if dw.is_none() && dbias.is_none() {
        return Ok(());
    }
    let x = gates.x;
    // Of w: without tokens x has no row that would tell.
    let k = if dw.is_some() { gates.w.row_bytes / gates.w.dtype.size() } else { 0 };
    let spec = TokenSums {
        x: x.dtype,
        dw: dw.as_ref().map_or(x.dtype, |dw| dw.dtype),
        aligned: is_aligned(x.memory, x.stride_bytes, x.row_bytes, x.dtype),
    };
    let num_blocks = k.div_ceil(spec.columns()) + usize::from(dbias.is_some());
    // spec (CUDA): blocks along x.
    let num_blocks = u32::try_from(num_blocks).ok().filter(|num| *num < 1 << 31).ok_or_else(|| {
        Error::invalid(OP, "x", format!("of {k} columns"), format!("fewer than 2^31 blocks of {} columns", spec.columns()))
    })?;
    let parameters = Parameters {
        x: x.memory.address,
        x_stride: x.stride_bytes as u64,
        k: k as u64,
        dlogit: logits.as_ref().map_or(0, |logits| logits.memory.address),
        dlogit_stride: logits.as_ref().map_or(0, |logits| logits.stride_bytes as u64),
        num_tokens: x.num_rows as u64,
        dw: dw.as_ref().map_or(0, |dw| dw.memory.address),
        dbias: dbias.as_ref().map_or(0, |dbias| dbias.memory.address),
        flags: if dbias.as_ref().is_some_and(|dbias| dbias.dtype == DType::F32) { DBIAS_F32 } else { 0 },
    };
    let kernel = KERNELS.get(OP, cuda.stream(), spec)?;
    let geometry =
        Geometry { grid: [num_blocks, 1, 1], threads: spec.threads(), programmatic: cuda.is_programmatic(), ..Geometry::default() };
    // SAFETY: the kernel was loaded for this stream's device and takes this struct; the validator has checked that every address belongs to the
    // device and that the views behind them, which the caller keeps, cover what the shapes say.
    unsafe { kernel.launch(cuda.stream(), &geometry, &parameters) }
}

/// Writes what was asked for.
pub(super) fn gate_mul_backward(cuda: &Cuda, call: GateMulBackward<'_, Cuda>) -> Result<()> {
    const OP: &str = "gate_mul_backward";
    let GateMulBackward { gates, s, dout, dg, ds } = call;
    if let Some(dg) = dg {
        pair_dot(cuda, OP, dout, s, dg)?;
    }
    match ds {
        Some(ds) => gate_mul(cuda, OP, false, &gates, dout, ds),
        None => Ok(()),
    }
}

/// Loads the kernels of the sums over tokens for such an x.
pub(in super::super) fn precompile(cuda: &Cuda, x: DType, dw: DType, k: usize) -> Result<()> {
    KERNELS.load(cuda.device(), TokenSums { x, dw, aligned: k.is_multiple_of(8) }).map(|_| ()) // 8: elements of a vector
}

/// The kernels that the table of resources lists.
pub(in super::super) fn programs() -> Vec<Program> {
    let all = [
        (DType::BF16, DType::BF16, true),
        (DType::BF16, DType::BF16, false),
        (DType::F16, DType::F32, true),
        (DType::F32, DType::F32, true),
    ];
    all.map(|(x, dw, aligned)| TokenSums { x, dw, aligned }.program()).into()
}
