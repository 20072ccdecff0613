//! cuBLASLt: matrix products of a well-kept library, found at run time.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use super::buffer::Buffer;
use super::device::Device;
use super::driver::{Driver, Handle};
use super::library::{self, table};
use super::places::{Places, ToolkitLibrary};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

const OP: &str = "blas";

table! {
    /// Functions of cuBLASLt.
    CublasLt, failed {
        property = "cublasLtGetProperty"(property: c_int, value: *mut c_int);
        create = "cublasLtCreate"(handle: *mut Handle);
        destroy = "cublasLtDestroy"(handle: Handle);
        product_create = "cublasLtMatmulDescCreate"(product: *mut Handle, compute: c_int, scale: c_int);
        product_set = "cublasLtMatmulDescSetAttribute"(product: Handle, attribute: c_int, value: *const c_void, bytes: usize);
        product_destroy = "cublasLtMatmulDescDestroy"(product: Handle);
        layout_create = "cublasLtMatrixLayoutCreate"(layout: *mut Handle, dtype: c_int, rows: u64, columns: u64, stride: i64);
        layout_set = "cublasLtMatrixLayoutSetAttribute"(layout: Handle, attribute: c_int, value: *const c_void, bytes: usize);
        layout_destroy = "cublasLtMatrixLayoutDestroy"(layout: Handle);
        preference_create = "cublasLtMatmulPreferenceCreate"(preference: *mut Handle);
        preference_set = "cublasLtMatmulPreferenceSetAttribute"(preference: Handle, attribute: c_int, value: *const c_void, bytes: usize);
        preference_destroy = "cublasLtMatmulPreferenceDestroy"(preference: Handle);
        choose = "cublasLtMatmulAlgoGetHeuristic"(handle: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle, most: c_int, choices: *mut Choice, num: *mut c_int);
        multiply = "cublasLtMatmul"(handle: Handle, product: Handle, alpha: *const c_void, a: u64, a_layout: Handle, b: u64, b_layout: Handle, beta: *const c_void, c: u64, c_layout: Handle, d: u64, d_layout: Handle, algorithm: *const [u64; 8], workspace: u64, workspace_bytes: usize, stream: Handle);
    }
}

/// A kernel that the library proposes (spec: `cublasLtMatmulHeuristicResult_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Choice {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    status: c_int,
    num_waves: f32,
    reserved: [c_int; 4],
}

const LIBRARY: ToolkitLibrary = ToolkitLibrary {
    variable: "MOE_CUBLASLT",
    names: ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    packages: ["nvidia/cu13/lib", "nvidia/cublas/lib"],
};

impl CublasLt {
    /// The library of this machine, found once.
    ///
    /// `MOE_CUBLASLT` names a file or a folder and is then the only place. Else it is searched where [`Nvrtc`](super::Nvrtc) is, and in the Python
    /// package `nvidia-cublas`.
    ///
    /// # Errors
    /// [`Error::Library`] with the places searched, and why what was found there was refused.
    pub fn get() -> Result<&'static CublasLt> {
        static CUBLASLT: OnceLock<Result<CublasLt>> = OnceLock::new();
        let found = CUBLASLT.get_or_init(|| {
            let (newest, _) = Driver::get()?.version()?;
            library::open("libcublasLt (matrix products)", LIBRARY.candidates(&Places::of_this_machine()), |library, path| {
                let cublaslt = CublasLt::fill(library, path)?;
                let (major, minor, _) = cublaslt.version().map_err(|error| error.to_string())?;
                match major > newest {
                    true => Err(format!("is {major}.{minor}, newer than the driver's CUDA {newest}")),
                    false => Ok(cublaslt),
                }
            })
        });
        found.as_ref().map_err(Clone::clone)
    }

    /// (major, minor, patch).
    pub fn version(&self) -> Result<(u32, u32, u32)> {
        let number = |property: c_int| {
            let mut value = 0;
            // SAFETY: the number outlives the call.
            unsafe { self.property(property, &mut value) }.map(|()| value as u32)
        };
        // Spec: libraryPropertyType.
        Ok((number(0)?, number(1)?, number(2)?))
    }
}

/// Turns a status into an error that names the call.
fn failed(_: &CublasLt, call: &'static str, code: i32) -> Error {
    // Spec: cublasStatus_t.
    let name = match code {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => "unknown",
    };
    Error::Gpu { call, code, name: name.into() }
}

/// Workspace that kernels may use (spec: 32 MiB is what the library's documentation recommends for Hopper).
const WORKSPACE_BYTES: usize = 32 << 20;

/// What the address of each matrix must be a multiple of (spec: what the library's choice assumes by default).
const ALIGN: u64 = 256;

/// The library on one device, with a workspace: one stream at a time uses it and what is made with it. Cheap to clone.
#[derive(Clone)]
pub struct Blas(Arc<Context>);

struct Context {
    cublaslt: &'static CublasLt,
    device: Device,
    handle: Handle,
    workspace: Buffer,
}

// SAFETY: a handle of the library may be used by any thread (spec: cuBLASLt, thread safety); the rest is plain data.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Blas {
    /// Opens the library on a device.
    ///
    /// # Errors
    /// Those of [`CublasLt::get`], [`Error::Memory`] without room for the workspace, [`Error::Gpu`] from the library.
    pub fn new(device: &Device) -> Result<Self> {
        let cublaslt = CublasLt::get()?;
        let workspace = Buffer::new(device, WORKSPACE_BYTES)?;
        let mut handle = std::ptr::null_mut();
        let _bound = device.bind()?;
        // SAFETY: `handle` outlives the call; the context is current.
        unsafe { cublaslt.create(&mut handle) }?;
        Ok(Blas(Arc::new(Context { cublaslt, device: device.clone(), handle, workspace })))
    }

    /// Kernels for `y = alpha * x . w^T + beta * y`, at most `most`, the one that the library expects to be the fastest first.
    ///
    /// `x` is `[M, K]`, `w` `[N, K]`, `y` `[M, N]`, or each has one more dimension in front, of B products. All are bf16, f16 or f32 of one type; sums are
    /// f32, without tf32.
    ///
    /// # Errors
    /// [`Error::Invalid`] for layouts that do not fit, [`Error::Unsupported`] when the library has no kernel, [`Error::Gpu`] from it.
    pub fn products(&self, x: &Layout, w: &Layout, y: &Layout, most: usize) -> Result<Vec<Product>> {
        let context = &*self.0;
        let (shape, dtype) = (Shape::of(x, w, y)?, cuda_type(x.dtype())?);
        let _bound = context.device.bind()?;
        // The library's matrices have columns that are contiguous: row-major x [M, K] is its K x M, and y^T = w . x^T.
        let plan = Plan {
            context: self.clone(),
            layouts: [*x, *w, *y],
            product: context.product()?,
            w: context.layout(dtype, shape.k, shape.n, shape.batch, w)?,
            x: context.layout(dtype, shape.k, shape.m, shape.batch, x)?,
            y: context.layout(dtype, shape.n, shape.m, shape.batch, y)?,
        };
        let choices = plan.choices(most)?;
        if choices.is_empty() {
            let what = format!("a product of {} {:?} and {:?}", x.dtype(), x.shape(), w.shape());
            return Err(Error::Unsupported { op: OP, what, why: "cuBLASLt proposes no kernel for it".into() });
        }
        let plan = Arc::new(plan);
        Ok(choices.into_iter().map(|choice| Product { plan: plan.clone(), choice }).collect())
    }
}

impl Context {
    fn product(&self) -> Result<Object> {
        let mut product = Object { library: None, raw: std::ptr::null_mut(), destroy: CublasLt::product_destroy };
        // SAFETY: `raw` outlives the call; 68 is CUBLAS_COMPUTE_32F, 0 CUDA_R_32F.
        unsafe { self.cublaslt.product_create(&mut product.raw, 68, 0) }?;
        product.library = Some(self.cublaslt);
        let transposed: c_int = 1;
        // SAFETY: 3 is CUBLASLT_MATMUL_DESC_TRANSA, an i32; 1 is CUBLAS_OP_T.
        unsafe { self.cublaslt.product_set(product.raw, 3, (&raw const transposed).cast(), size_of::<c_int>()) }?;
        Ok(product)
    }

    /// `rows` is the contiguous dimension of `layout`, `columns` the one before it.
    fn layout(&self, dtype: c_int, rows: usize, columns: usize, batch: usize, layout: &Layout) -> Result<Object> {
        let strides = strides(layout);
        let mut object = Object { library: None, raw: std::ptr::null_mut(), destroy: CublasLt::layout_destroy };
        // A single column has any stride, and the library wants one that is long enough.
        let stride = if columns == 1 { rows } else { strides.1 };
        // SAFETY: `raw` outlives the call.
        unsafe { self.cublaslt.layout_create(&mut object.raw, dtype, rows as u64, columns as u64, stride as i64) }?;
        object.library = Some(self.cublaslt);
        if batch > 1 {
            let (count, offset) = (batch as i32, strides.0 as i64);
            // SAFETY: 5 is CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, an i32.
            unsafe { self.cublaslt.layout_set(object.raw, 5, (&raw const count).cast(), size_of::<i32>()) }?;
            // SAFETY: 6 is CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, an i64 in elements.
            unsafe { self.cublaslt.layout_set(object.raw, 6, (&raw const offset).cast(), size_of::<i64>()) }?;
        }
        Ok(object)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: created by `new`, and this is its last owner. A failure leaves nothing to do.
            let _ = unsafe { self.cublaslt.destroy(self.handle) };
        }
    }
}

/// A description that the library made.
struct Object {
    /// `None` until it is made.
    library: Option<&'static CublasLt>,
    raw: Handle,
    destroy: unsafe fn(&CublasLt, Handle) -> Result<()>,
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(cublaslt) = self.library {
            // SAFETY: the library made it, and this is its only owner. A failure leaves nothing to do.
            let _ = unsafe { (self.destroy)(cublaslt, self.raw) };
        }
    }
}

struct Plan {
    context: Blas,
    /// x, w, y.
    layouts: [Layout; 3],
    product: Object,
    w: Object,
    x: Object,
    y: Object,
}

// SAFETY: descriptions are plain data of the library that nothing changes once they are made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    fn choices(&self, most: usize) -> Result<Vec<Choice>> {
        let context = &*self.context.0;
        let cublaslt = context.cublaslt;
        let mut preference = Object { library: None, raw: std::ptr::null_mut(), destroy: CublasLt::preference_destroy };
        // SAFETY: `raw` outlives the call.
        unsafe { cublaslt.preference_create(&mut preference.raw) }?;
        preference.library = Some(cublaslt);
        let bytes = context.workspace.len();
        // SAFETY: 1 is CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, a u64.
        unsafe { cublaslt.preference_set(preference.raw, 1, (&raw const bytes).cast(), size_of::<u64>()) }?;
        let mut choices = vec![Choice::default(); most];
        let mut num = 0;
        let (product, w, x, y) = (self.product.raw, self.w.raw, self.x.raw, self.y.raw);
        // SAFETY: all descriptions are alive; the list has the length that is passed.
        let found =
            unsafe { cublaslt.choose(context.handle, product, w, x, y, y, preference.raw, most as c_int, choices.as_mut_ptr(), &mut num) };
        match found {
            // Spec: CUBLAS_STATUS_NOT_SUPPORTED, no kernel at all.
            Err(Error::Gpu { code: 15, .. }) => num = 0,
            other => other?,
        }
        choices.truncate(num.max(0) as usize);
        choices.retain(|choice| choice.status == 0 && choice.workspace_bytes <= bytes);
        Ok(choices)
    }
}

/// One kernel for one product. Cheap to clone.
#[derive(Clone)]
pub struct Product {
    plan: Arc<Plan>,
    choice: Choice,
}

impl Product {
    /// Queues `y = alpha * x . w^T + beta * y`. Can be captured.
    ///
    /// # Errors
    /// [`Error::Invalid`] for tensors of other layouts than it was made for, elsewhere than on its device, or not aligned to 256 bytes; and for a
    /// stream of another device. [`Error::Gpu`] from the library.
    pub fn run(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        w: TensorView<'_>,
        y: &mut TensorViewMut<'_>,
        alpha: f32,
        beta: f32,
    ) -> Result<()> {
        let context = &*self.plan.context.0;
        let ordinal = context.device.ordinal();
        if stream.device().ordinal() != ordinal {
            return Err(Error::invalid(OP, "stream", format!("of {:?}", stream.device()), format!("of {:?}", context.device)));
        }
        let named = [("x", x.layout(), x.device()), ("w", w.layout(), w.device()), ("y", y.layout(), y.device())];
        let mut addresses = [0; 3];
        for (((what, layout, place), want), address) in named.into_iter().zip(&self.plan.layouts).zip(&mut addresses) {
            if layout != want {
                return Err(Error::invalid(OP, what, format!("{layout:?}"), format!("{want:?}")));
            }
            let place = place.ok_or_else(|| Error::invalid(OP, what, "in host memory", format!("in the memory of device {ordinal}")))?;
            if place.device != ordinal || !place.address.is_multiple_of(ALIGN) {
                let got = format!("at {:#x} of device {}", place.address, place.device);
                return Err(Error::invalid(OP, what, got, format!("at a multiple of {ALIGN} in the memory of device {ordinal}")));
            }
            *address = place.address;
        }
        let [x, w, y] = addresses;
        let plan = &*self.plan;
        let workspace = context.workspace.address().address;
        let _bound = context.device.bind()?;
        // SAFETY: the matrices have the layouts of the descriptions (checked) and are borrowed views of device memory; the factors are read before the
        // call returns (host pointer mode); the workspace has the size that is passed.
        unsafe {
            context.cublaslt.multiply(
                context.handle,
                plan.product.raw,
                (&raw const alpha).cast(),
                w,
                plan.w.raw,
                x,
                plan.x.raw,
                (&raw const beta).cast(),
                y,
                plan.y.raw,
                y,
                plan.y.raw,
                &self.choice.algorithm,
                workspace,
                context.workspace.len(),
                stream.raw(),
            )
        }
    }
}

/// M, N, K and B of a product.
#[derive(Debug, PartialEq)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
}

impl Shape {
    fn of(x: &Layout, w: &Layout, y: &Layout) -> Result<Self> {
        let split = |what: &str, layout: &Layout| match *layout.shape() {
            [rows, columns] => Ok((1, rows, columns)),
            [batch, rows, columns] => Ok((batch, rows, columns)),
            _ => Err(Error::invalid(OP, what, format!("of shape {:?}", layout.shape()), "[rows, columns] or [B, rows, columns]")),
        };
        let ((batch, m, k), (w_batch, n, w_k), (y_batch, y_m, y_n)) = (split("x", x)?, split("w", w)?, split("y", y)?);
        if (w_batch, w_k) != (batch, k) {
            return Err(Error::invalid(OP, "w", format!("of shape {:?}", w.shape()), format!("{batch} times [N, {k}]")));
        }
        if (y_batch, y_m, y_n) != (batch, m, n) {
            return Err(Error::invalid(OP, "y", format!("of shape {:?}", y.shape()), format!("{batch} times [{m}, {n}]")));
        }
        for (what, layout) in [("w", w), ("y", y)] {
            if layout.dtype() != x.dtype() {
                return Err(Error::invalid(OP, what, format!("of type {}", layout.dtype()), x.dtype()));
            }
        }
        for (what, layout, rows, columns) in [("x", x, m, k), ("w", w, n, k), ("y", y, m, n)] {
            // The library counts in 32 bits; an empty product has no kernel.
            if rows == 0 || columns == 0 || batch == 0 || rows.max(columns).max(batch) > i32::MAX as usize {
                return Err(Error::invalid(OP, what, format!("of shape {:?}", layout.shape()), "from 1 to 2^31 - 1 in each dimension"));
            }
            if rows > 1 && strides(layout).1 < columns {
                return Err(Error::invalid(OP, what, format!("rows {} elements apart", strides(layout).1), format!("at least {columns}")));
            }
        }
        Ok(Shape { m, n, k, batch })
    }
}

/// From product to product, and from row to row.
fn strides(layout: &Layout) -> (usize, usize) {
    match *layout.strides() {
        [batch, row, _] => (batch, row),
        [row, _] => (0, row),
        _ => (0, 0),
    }
}

/// The library's number of a type.
fn cuda_type(dtype: DType) -> Result<c_int> {
    // Spec: cudaDataType.
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(14),
        _ => Err(Error::invalid(OP, "x", format!("of type {dtype}"), "f32, f16 or bf16")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_header() {
        // Spec: cublasLt.h of 13.0.
        assert_eq!(size_of::<Choice>(), 96);
        assert_eq!(std::mem::offset_of!(Choice, status), 72);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let layout = |shape: &[usize]| Layout::contiguous("test", DType::BF16, shape).unwrap();
        let of = |x: &[usize], w: &[usize], y: &[usize]| Shape::of(&layout(x), &layout(w), &layout(y));
        assert_eq!(of(&[3, 8], &[5, 8], &[3, 5]).unwrap(), Shape { m: 3, n: 5, k: 8, batch: 1 });
        assert_eq!(of(&[2, 3, 8], &[2, 5, 8], &[2, 3, 5]).unwrap(), Shape { m: 3, n: 5, k: 8, batch: 2 });
        let refused = |x: &[usize], w: &[usize], y: &[usize], named: &str| {
            let message = of(x, w, y).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        };
        refused(&[8], &[5, 8], &[3, 5], "x is of shape [8]");
        refused(&[3, 8], &[5, 7], &[3, 5], "w is of shape [5, 7]");
        refused(&[3, 8], &[2, 5, 8], &[3, 5], "w is of shape [2, 5, 8]");
        refused(&[3, 8], &[5, 8], &[5, 3], "y is of shape [5, 3]");
        refused(&[0, 8], &[5, 8], &[0, 5], "x is of shape [0, 8]");
        let f16 = Layout::contiguous("test", DType::F16, &[5, 8]).unwrap();
        let message = Shape::of(&layout(&[3, 8]), &f16, &layout(&[3, 5])).unwrap_err().to_string();
        assert!(message.contains("w is of type f16"), "{message}");
        let overlapping = Layout::strided("test", DType::BF16, &[3, 8], &[4, 1]).unwrap();
        let message = Shape::of(&overlapping, &layout(&[5, 8]), &layout(&[3, 5])).unwrap_err().to_string();
        assert!(message.contains("x is rows 4 elements apart"), "{message}");
        assert!(cuda_type(DType::E4M3).is_err());
    }
}
