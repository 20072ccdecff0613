//! Scaled FP8 copies of matrices, with a scale for each matrix.

use super::handle::{OP, get};
use super::tensor::{Growing, MoeTensor, Place, optional, optional_output, read, views, write};
use super::{MoeBackend, guard};
use crate::error::{Error, Result};
use crate::ops::cast::{self, Operands, Options, Scaling};

/// `scale` is given; absent it is 1. Outputs of any type.
pub const MOE_SCALING_GIVEN: i32 = 0;
/// The scale follows from the matrix itself: the largest number of the output's type / max(amax, epsilon). Outputs of FP8.
pub const MOE_SCALING_CURRENT: i32 = 1;

/// The offsets were good.
pub const MOE_CAST_GOOD: u32 = 0;
/// The offsets do not start with 0, decrease, or end behind x.
pub const MOE_CAST_BAD_OFFSETS: u32 = 1;
/// An output is too short for the matrices with their padding.
pub const MOE_CAST_SHORT_OUTPUTS: u32 = 2;

/// The tensors of one matrix, or of all matrices of a group: then [n] below is the number of matrices. All but x may be null, but not both of row and column.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeCastOperands {
    /// sizeof(MoeCastOperands): later versions may add members at the end, for which 0 is the default.
    pub size: usize,
    /// [R, C] of f32, f16 or bf16, any row stride. Of a group: the rows of all matrices, [capacity, C].
    pub x: *const MoeTensor,
    /// f32 [n], for MOE_SCALING_GIVEN.
    pub scale: *const MoeTensor,
    /// [P, C], written: round(scale * x); P is R rounded up to `pad_rows`. Of a group: [capacity, C], matrix after matrix.
    pub row: *const MoeTensor,
    /// [C, P], written: the same, transposed. Of a group: [capacity * C], matrix i as a contiguous [C, P_i] behind those before it.
    pub column: *const MoeTensor,
    /// f32 [n], raised to the greatest |x| of each matrix.
    pub amax: *const MoeTensor,
    /// f32 [n], written: 1 / scale.
    pub scale_inv: *const MoeTensor,
    /// Of a group: u32 [1], written: a sum of MOE_CAST_*, what a GPU finds when it reads the offsets.
    pub status: *const MoeTensor,
}

// SAFETY: an integer and pointers; zeros are a value of each.
unsafe impl Growing for MoeCastOperands {
    const NAME: &'static str = "MoeCastOperands";
}

/// What all matrices of a cast have in common. `moe_cast_options_init` sets the defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeCastOptions {
    /// sizeof(MoeCastOptions): later versions may add members at the end.
    pub size: usize,
    /// Rows of each output are a multiple of this: 1 (the default), 16, 32 or 128.
    pub pad_rows: usize,
    /// MOE_SCALING_GIVEN (the default) or MOE_SCALING_CURRENT.
    pub scaling: i32,
    /// MOE_SCALING_CURRENT: not 0 for powers of two only, rounded down. 0 by default.
    pub power_of_two: i32,
    /// MOE_SCALING_CURRENT: the least magnitude that counts. 0 by default.
    pub epsilon: f32,
    /// Not 0: sets every amax to 0 first. 0 by default.
    pub reset_amax: i32,
    /// f32, i32 or u32 [1]: when it is not zero as the operation runs, nothing is written. May be null.
    pub noop: *const MoeTensor,
}

// SAFETY: integers, a float and a pointer; zeros are a value of each.
unsafe impl Growing for MoeCastOptions {
    const NAME: &'static str = "MoeCastOptions";
}

/// Sets the defaults. `size` is sizeof(MoeCastOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_cast_options_init(options: *mut MoeCastOptions, size: usize) -> i32 {
    let default = MoeCastOptions {
        size,
        pad_rows: 1,
        scaling: MOE_SCALING_GIVEN,
        power_of_two: 0,
        epsilon: 0.0,
        reset_amax: 0,
        noop: std::ptr::null(),
    };
    // SAFETY: the header requires `size` bytes there.
    guard(|| unsafe { write(options, size, &default) })
}

/// # Safety
/// As the header requires of options and of the tensor that they name.
unsafe fn options_of<'a>(place: Place, options: *const MoeCastOptions) -> Result<Options<'a>> {
    if options.is_null() {
        return Ok(Options::default());
    }
    // SAFETY: not null; the caller's promise.
    let options = unsafe { read(options) }?;
    Ok(Options {
        scaling: match options.scaling {
            MOE_SCALING_GIVEN => Scaling::Given,
            MOE_SCALING_CURRENT => Scaling::Current { epsilon: options.epsilon, power_of_two: options.power_of_two != 0 },
            other => return Err(Error::invalid(OP, "scaling", other, "0 or 1")),
        },
        pad_rows: options.pad_rows,
        reset_amax: options.reset_amax != 0,
        // SAFETY: null or a tensor: the caller's promise.
        noop: unsafe { optional(place, "noop", options.noop.as_ref()) }?,
    })
}

/// # Safety
/// As the header requires of the struct and of the tensors that it names.
unsafe fn operands_of<'a>(place: Place, operands: *const MoeCastOperands) -> Result<Operands<'a>> {
    // SAFETY: the caller's promise.
    let operands = unsafe { read(operands) }?;
    // SAFETY: null or a tensor: the caller's promise.
    let [x] = unsafe { views(place, [("x", operands.x.as_ref())]) }?;
    Ok(Operands {
        // SAFETY: as above.
        scale: unsafe { optional(place, "scale", operands.scale.as_ref()) }?,
        // SAFETY: as above.
        row: unsafe { optional_output(place, "row", operands.row.as_ref()) }?,
        // SAFETY: as above.
        column: unsafe { optional_output(place, "column", operands.column.as_ref()) }?,
        // SAFETY: as above.
        amax: unsafe { optional_output(place, "amax", operands.amax.as_ref()) }?,
        // SAFETY: as above.
        scale_inv: unsafe { optional_output(place, "scale_inv", operands.scale_inv.as_ref()) }?,
        // SAFETY: as above.
        status: unsafe { optional_output(place, "status", operands.status.as_ref()) }?,
        ..Operands::new(x)
    })
}

/// Casts every matrix of a list: each is read once and written row-major, transposed or both. All have the same types and the same outputs; shapes may
/// differ. `matrices` is an array of `num` structs of one size. `options` may be null. The host allocates a description of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_cast(
    backend: Option<&MoeBackend>,
    matrices: *const MoeCastOperands,
    num: usize,
    options: *const MoeCastOptions,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        let mut all: Vec<Operands<'_>> = Vec::new();
        let mut size = 0;
        for i in 0..num {
            let at = matrices.wrapping_byte_add(i * size);
            if i > 0 {
                // SAFETY: the first was read, so it is not null and aligned; the header requires `num` structs of its size.
                let own = unsafe { at.cast::<usize>().read_unaligned() };
                if own != size {
                    return Err(Error::invalid(OP, format!("size of matrices[{i}]"), own, format!("{size}, as of the first")));
                }
            }
            // SAFETY: as above; `read` refuses null.
            all.push(unsafe { operands_of(place, at) }?);
            // SAFETY: it was read just now.
            size = unsafe { at.cast::<usize>().read() };
        }
        cast::cast(backend, &mut all, &options)
    })
}

/// Casts the matrices of one buffer of rows: matrix i is the rows offsets[i] to offsets[i + 1] of x.
///
/// `offsets`: i32 or i64 [n + 1], read when the operation runs: starts with 0, never decreases, ends within x. `options` may be null. On a GPU offsets that are not
/// so are told by `status`, and nothing else is written; on the CPU they are MOE_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_cast_grouped(
    backend: Option<&MoeBackend>,
    operands: *const MoeCastOperands,
    offsets: Option<&MoeTensor>,
    options: *const MoeCastOptions,
) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let place = backend.place();
        // SAFETY: the header's rules for options.
        let options = unsafe { options_of(place, options) }?;
        // SAFETY: the header's rules for structs and tensors.
        let mut operands = unsafe { operands_of(place, operands) }?;
        // SAFETY: the header's rules for tensors.
        let [offsets] = unsafe { views(place, [("offsets", offsets)]) }?;
        cast::cast_grouped(backend, &mut operands, offsets, &options)
    })
}
