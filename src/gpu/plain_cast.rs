//! A grouped cast as it is commonly done, bf16 to e4m3, and casts of other libraries: what `moe bench cast` compares with.

use std::path::Path;

use super::jit::Kernels;
use super::launch::Geometry;
use super::program::{Carveout, Constant, Program, Source, Spec, Targets};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::kernel_source;
use crate::tensor::{DType, TensorView, TensorViewMut};

const OP: &str = "plain_cast";

/// Matrices of a launch (arbitrary: what public libraries take).
pub const MAX_MATRICES: usize = 64;
/// As in plain_cast.cu.
const TILE: usize = 64;
const THREADS: u32 = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PlainCast;

impl Spec for PlainCast {
    fn program(&self) -> Program {
        const SOURCES: &[Source] = &[
            kernel_source!("gpu/device/platform.cuh"),
            kernel_source!("gpu/device/fp8.cuh"),
            kernel_source!("gpu/device/copy.cuh"),
            kernel_source!("gpu/device/plain_cast.cu"),
        ];
        Program {
            name: "plain cast bf16 to e4m3".into(),
            entry: "plain_cast",
            sources: SOURCES,
            constants: vec![Constant::Int("MAX_MATRICES", MAX_MATRICES as i64)],
            threads: THREADS,
            smem_bytes: 0,
            max_registers: 64, // derived: four blocks in a multiprocessor
            carveout: Carveout::Shared,
            targets: Targets::Nvidia,
        }
    }
}

static KERNELS: Kernels<PlainCast> = Kernels::new();

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Matrix {
    x: u64,
    row: u64,
    column: u64,
    scale: u64,
    amax: u64,
    scale_inv: u64,
    num_rows: u32,
    num_columns: u32,
    first_tile: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    num_matrices: u32,
    padding: u32,
    matrices: [Matrix; MAX_MATRICES],
}

/// The tensors of a group without padding, all contiguous: `x [capacity, C]` bf16, `row` and `column` e4m3 as `cast_grouped` has them, `scale`, `amax` and
/// `scale_inv` f32 `[n]`.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// The rows of all matrices.
    pub x: TensorView<'a>,
    /// One scale a matrix.
    pub scale: TensorView<'a>,
    /// The row-major copies.
    pub row: TensorViewMut<'a>,
    /// The transposed copies.
    pub column: TensorViewMut<'a>,
    /// Raised to the greatest magnitudes.
    pub amax: TensorViewMut<'a>,
    /// 1 / scale.
    pub scale_inv: TensorViewMut<'a>,
}

/// Addresses of the tensors: x, scale, row, column, amax, scale_inv.
struct Addresses([u64; 6]);

impl Tensors<'_> {
    fn addresses(&self, stream: &Stream, offsets: &[i64]) -> Result<Addresses> {
        let rows = offsets.last().copied().unwrap_or(0);
        let (num, device) = (offsets.len().saturating_sub(1), stream.device().ordinal());
        let layouts = [
            (self.x.layout(), self.x.device(), DType::BF16),
            (self.scale.layout(), self.scale.device(), DType::F32),
            (self.row.layout(), self.row.device(), DType::E4M3),
            (self.column.layout(), self.column.device(), DType::E4M3),
            (self.amax.layout(), self.amax.device(), DType::F32),
            (self.scale_inv.layout(), self.scale_inv.device(), DType::F32),
        ];
        let columns = self.x.shape().get(1).copied().unwrap_or(0);
        let needed = [rows as usize * columns * 2, num * 4, rows as usize * columns, rows as usize * columns, num * 4, num * 4];
        let is_sorted = offsets.first() == Some(&0) && offsets.is_sorted();
        let fits = layouts.iter().zip(needed).all(|((layout, at, dtype), needed)| {
            layout.dtype() == *dtype && layout.extent_bytes() >= needed && at.is_some_and(|at| at.device == device)
        });
        if !is_sorted || !fits {
            return Err(Error::invalid(OP, "tensors", "others", "contiguous ones on the stream's device that hold all rows"));
        }
        Ok(Addresses(layouts.map(|(_, at, _)| at.map_or(0, |at| at.address))))
    }
}

/// Casts in as many launches as it takes, with one look at the offsets on the host.
///
/// # Errors
/// [`Error::Invalid`] for tensors that do not fit, and those of compiling and launching.
pub fn plain_cast(stream: &Stream, tensors: &Tensors<'_>, offsets: &[i64]) -> Result<()> {
    let Addresses([x, scale, row, column, amax, scale_inv]) = tensors.addresses(stream, offsets)?;
    let columns = tensors.x.shape()[1];
    let kernel = KERNELS.get(OP, stream, PlainCast)?;
    let num = offsets.len() - 1;
    for first in (0..num).step_by(MAX_MATRICES) {
        let mut parameters = Parameters { num_matrices: 0, padding: 0, matrices: [Matrix::default(); MAX_MATRICES] };
        let mut tiles = 0;
        for i in first..num.min(first + MAX_MATRICES) {
            let (start, rows) = (offsets[i] as usize, (offsets[i + 1] - offsets[i]) as usize);
            let (elements, word) = ((start * columns) as u64, 4 * i as u64);
            parameters.matrices[i - first] = Matrix {
                x: x + 2 * elements,
                row: row + elements,
                column: column + elements,
                scale: scale + word,
                amax: amax + word,
                scale_inv: scale_inv + word,
                num_rows: rows as u32,
                num_columns: columns as u32,
                first_tile: tiles as u32,
                padding: 0,
            };
            parameters.num_matrices += 1;
            tiles += rows.div_ceil(TILE) * columns.div_ceil(TILE);
        }
        let geometry = Geometry { grid: [tiles as u32, 1, 1], threads: THREADS, ..Geometry::default() };
        // SAFETY: the kernel takes `Parameters`; `addresses` has checked that the views lie on this device and hold the rows of all offsets.
        unsafe { kernel.launch(stream, &geometry, &parameters) }?;
    }
    Ok(())
}

/// The kernel, for the table of resources.
pub fn programs() -> Vec<Program> {
    vec![PlainCast.program()]
}

/// `int moe_peer_cast(const void *x, const int64_t *offsets, const int64_t *device_offsets, uint64_t num_matrices, uint64_t num_columns, const float *scale,
/// void *row, void *column, float *amax, float *scale_inv, void *stream)`
type PeerFunction = unsafe extern "C" fn(u64, *const i64, u64, u64, u64, u64, u64, u64, u64, u64, *mut std::ffi::c_void) -> i32;

/// The grouped cast of another library, loaded from a shared library with one C function:
///
/// ```c
/// int moe_peer_cast(const void *x,                 // bf16 [offsets[n], num_columns], device
///                   const int64_t *offsets,        // [n + 1], host
///                   const int64_t *device_offsets, // the same on the device
///                   uint64_t n, uint64_t num_columns,
///                   const float *scale,            // [n], device
///                   void *row, void *column,       // e4m3: the copies of each matrix behind those before it, device
///                   float *amax, float *scale_inv, // [n], device: raised, written
///                   void *stream);                 // CUstream
/// ```
///
/// It queues the cast in the stream, waits for nothing, and returns 0 when that went well. The device's primary context is current.
pub struct PeerCast {
    function: PeerFunction,
    // Keeps the function loaded.
    _library: libloading::Library,
}

impl PeerCast {
    /// Loads the library.
    ///
    /// # Errors
    /// [`Error::Library`] when it cannot be loaded or has no such function.
    pub fn load(path: &Path) -> Result<Self> {
        let failed =
            |error: libloading::Error| Error::Library { name: format!("{} ({error})", path.display()), searched: vec![path.into()] };
        // SAFETY: the user names this library in order to run it.
        let library = unsafe { libloading::Library::new(path) }.map_err(failed)?;
        // SAFETY: the documented name has the documented type; the user says that the library keeps to it.
        let function = unsafe { library.get::<PeerFunction>(b"moe_peer_cast\0") }.map(|symbol| *symbol).map_err(failed)?;
        Ok(PeerCast { function, _library: library })
    }

    /// Casts. `device_offsets` are `offsets` on the device, i64.
    ///
    /// # Errors
    /// [`Error::Invalid`] for tensors that do not fit, [`Error::Unsupported`] when the function returns anything but 0.
    pub fn run(&self, stream: &Stream, tensors: &Tensors<'_>, offsets: &[i64], device_offsets: &TensorView<'_>) -> Result<()> {
        let Addresses([x, scale, row, column, amax, scale_inv]) = tensors.addresses(stream, offsets)?;
        let device_offsets = match device_offsets.device() {
            Some(at) if device_offsets.dtype() == DType::I64 && device_offsets.shape() == [offsets.len()] => at.address,
            _ => return Err(Error::invalid(OP, "device_offsets", "others", "i64, as many as offsets, on the device")),
        };
        let (num, columns) = (offsets.len() as u64 - 1, tensors.x.shape()[1] as u64);
        let _bound = stream.device().bind()?;
        // SAFETY: the function has this type (see `load`), the addresses are those of tensors that were checked, and the stream is alive.
        let status = unsafe {
            (self.function)(x, offsets.as_ptr(), device_offsets, num, columns, scale, row, column, amax, scale_inv, stream.raw())
        };
        if status == 0 {
            return Ok(());
        }
        Err(Error::Unsupported { op: OP, what: "the peer's cast".into(), why: format!("it returned {status}") })
    }
}
