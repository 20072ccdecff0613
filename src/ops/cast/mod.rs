//! cast: scaled FP8 copies of matrices, row-major and transposed, from one read.
//!
//! For each of n matrices `X_i [R_i, C_i]` (f32, f16 or bf16) this writes `round(scale * f32(x))`, one f32 multiplication and one rounding to
//! nearest even, as a row-major copy `row [P_i, C_i]`, as a transposed copy `column [C_i, P_i]`, or as both. `P_i` is `R_i` rounded up to
//! [`Options::pad_rows`]; the rows of `row` and the columns of `column` from `R_i` on are zero bytes whatever the scale is. Every scale block
//! sees the padded matrix.
//!
//! - FP8 outputs saturate (infinities too) and have one NaN (0x7F; FNUZ 0x80); f16 and bf16 outputs overflow to infinity.
//! - `amax` is raised to the greatest |x| **before** scaling: the greater of the stored bits and the new ones as signed integers, so a stored
//!   value is never negative afterwards. NaN drops out, infinity stays. A matrix without elements leaves it alone. It is only reset, to 0 and
//!   before anything is read, when [`Options::reset_amax`] asks for it.
//! - `scale_inv` is the IEEE quotient 1 / scale and is written for matrices without elements too.
//!
//! On a GPU nothing of the tensors is read before the call runs. For a group whose offsets are not as [`cast_grouped`] says, or whose outputs are too short
//! for them, neither copies nor their scales are written there, and [`Operands::status`] says so; the CPU returns an error.
//!
//! Two forms: [`cast`] takes a list of matrices of any shapes, [`cast_grouped`] one buffer of rows and the offsets of its matrices, which are
//! read when the operation runs. A [`List`] is checked once and cast often. [`Scaling`] says where scales come from.
//!
//! # Scales of blocks
//!
//! A copy with `L` lines of `K` elements (`row`: L = P, K = C; `column`: L = C, K = P) has, with blocks of `l x k`, `LB = ceil(L / l)` by
//! `KB = ceil(K / k)` scales. The copy `row` writes them to `row_scales`, the copy `column` to `column_scales`. With 1x128 and 1x32 the column
//! copy has scales of its own, over 128 or 32 rows of one column, and is not the transposed row copy; with 128x128 it is. No extent needs to be a
//! multiple of anything: blocks at the end are shorter. See [`ScaleLayout`] for where each scale lies.

use crate::backend::Backend;
use crate::error::Result;
use crate::gpu::{Program, Spec};
use crate::tensor::{TensorView, TensorViewMut};

mod check;
mod cpu;
mod formula;
mod gpu;
mod kernels;
mod layout;
mod like;
mod list;
#[cfg(target_arch = "x86_64")]
mod ocp;
mod overlap;
mod table;
mod tile;
mod tuning;
mod variant;

pub use list::List;

const OP: &str = "cast";

/// The tensors of one matrix, or of all matrices of a [`cast_grouped`].
///
/// `n` is 1 in a list and the number of matrices in a grouped call. Every tensor but `x` may have any row stride that keeps rows apart.
#[derive(Debug)]
pub struct Operands<'a> {
    /// The matrix `[R, C]` in f32, f16 or bf16, any row stride. Grouped: the rows of all matrices `[capacity, C]`.
    pub x: TensorView<'a>,
    /// f32 `[n]`, for [`Scaling::Given`] only. Absent means 1.
    pub scale: Option<TensorView<'a>>,
    /// The row-major copy `[P, C]`. Grouped: `[capacity, C]`, the matrices' padded rows one after the other.
    pub row: Option<TensorViewMut<'a>>,
    /// The transposed copy `[C, P]`. Grouped: `[capacity * C]`, matrix i as a contiguous `[C, P_i]` behind those before it.
    pub column: Option<TensorViewMut<'a>>,
    /// Scales of `row`, for [`Scaling::Block`] only; shape by [`ScaleLayout`].
    pub row_scales: Option<TensorViewMut<'a>>,
    /// Scales of `column`, for [`Scaling::Block`] only; shape by [`ScaleLayout`].
    pub column_scales: Option<TensorViewMut<'a>>,
    /// f32 `[n]`: raised to the greatest magnitude of each matrix.
    pub amax: Option<TensorViewMut<'a>>,
    /// f32 `[n]`: 1 / scale of each matrix. Not for [`Scaling::Block`].
    pub scale_inv: Option<TensorViewMut<'a>>,
    /// u32 `[1]`, of a [`cast_grouped`] only: what a GPU finds of the offsets when it reads them, one of the values of [`status`]. Written by every
    /// call of at least one matrix that the noop flag lets run.
    pub status: Option<TensorViewMut<'a>>,
}

impl<'a> Operands<'a> {
    /// An input without outputs; add at least one of [`row`](Self::row) and [`column`](Self::column).
    #[inline]
    pub fn new(x: TensorView<'a>) -> Self {
        Operands {
            x,
            scale: None,
            row: None,
            column: None,
            row_scales: None,
            column_scales: None,
            amax: None,
            scale_inv: None,
            status: None,
        }
    }

    /// With given scales.
    #[inline]
    pub fn scale(mut self, scale: TensorView<'a>) -> Self {
        self.scale = Some(scale);
        self
    }
}

macro_rules! with {
    ($($field:ident: $doc:literal),* $(,)?) => {
        impl<'a> Operands<'a> {
            $(
                #[doc = $doc]
                #[inline]
                pub fn $field(mut self, $field: TensorViewMut<'a>) -> Self {
                    self.$field = Some($field);
                    self
                }
            )*
        }
    };
}
with! {
    row: "With a row-major copy.",
    column: "With a transposed copy.",
    row_scales: "With the block scales of the row-major copy.",
    column_scales: "With the block scales of the transposed copy.",
    amax: "With the greatest magnitudes.",
    scale_inv: "With the inverse scales.",
    status: "With a word about the offsets.",
}

/// Values of [`Operands::status`]: sums of these.
pub mod status {
    /// The offsets were good.
    pub const GOOD: u32 = 0;
    /// The offsets do not start with 0, decrease, or end behind `x`.
    pub const BAD_OFFSETS: u32 = 1;
    /// An output is too short for the matrices, with their padding.
    pub const SHORT_OUTPUTS: u32 = 2;
}

/// What all matrices of a call have in common.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Where scales come from.
    pub scaling: Scaling,
    /// Rows of each output are a multiple of this: 1 (no padding), 16, 32 or 128.
    pub pad_rows: usize,
    /// Sets every `amax` to 0 first.
    pub reset_amax: bool,
    /// f32, i32 or u32 `[1]`: when it is not zero as the operation runs, nothing at all is written.
    pub noop: Option<TensorView<'a>>,
}

impl Default for Options<'_> {
    /// Given scales, no padding, `amax` kept, always run.
    fn default() -> Self {
        Options { scaling: Scaling::Given, pad_rows: 1, reset_amax: false, noop: None }
    }
}

impl Options<'_> {
    /// The default with another scaling.
    pub fn with_scaling(scaling: Scaling) -> Self {
        Options { scaling, ..Self::default() }
    }
}

/// Where the scales come from. `largest` is the output format's: 448, 57344, or 240 for the FNUZ form of E4M3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// One scale for each matrix, given (delayed scaling). Any output type: FP8, f16, bf16 or f32.
    Given,
    /// One scale for each matrix, from its own greatest magnitude (current scaling): `largest / max(amax, epsilon)`; 1 when that maximum is 0 (a
    /// matrix of zeros, of NaN only, or without elements) or infinite; f32's largest finite value when the quotient is infinite. `power_of_two`
    /// then clears its mantissa. Two reads of the input. FP8 outputs only.
    ///
    /// On a GPU inputs of up to about twice what its multiprocessors hold take one cooperative launch, which begins when it has all of them: behind a kernel
    /// of another stream that waits for what comes after this call it never begins.
    Current {
        /// Least magnitude; 0 for none.
        epsilon: f32,
        /// Only powers of two, rounded down.
        power_of_two: bool,
    },
    /// One scale for each block. FP8 outputs only.
    Block {
        /// Elements that share a scale.
        block: Block,
        /// How the scale follows from the block's greatest magnitude.
        formula: Formula,
        /// Where the scales lie.
        layout: ScaleLayout,
    },
}

impl Scaling {
    /// OCP MXFP8: 1x32 blocks, E8M0 scales rounded up, row-major.
    pub const MXFP8: Scaling = Scaling::Block { block: Block::Row32, formula: Formula::Mx, layout: ScaleLayout::RowMajor };

    /// Transformer Engine's FP8 block scaling as its GEMMs take it: 1x128 blocks column-major, 128x128 blocks row-major.
    pub const fn transformer_engine(block: Block, epsilon: f32, power_of_two: bool) -> Self {
        let layout = if matches!(block, Block::Square128) { ScaleLayout::RowMajor } else { ScaleLayout::ColumnMajor };
        Scaling::Block { block, formula: Formula::TransformerEngine { epsilon, power_of_two }, layout }
    }

    /// DeepGEMM's f32 scales (Hopper): 1x128 blocks column-major, 128x128 blocks row-major.
    pub const fn deep_gemm(block: Block) -> Self {
        let layout = if matches!(block, Block::Square128) { ScaleLayout::RowMajor } else { ScaleLayout::ColumnMajor };
        Scaling::Block { block, formula: Formula::DeepGemm { power_of_two: false }, layout }
    }

    /// DeepGEMM's packed E8M0 scales (Blackwell).
    pub const fn deep_gemm_packed(block: Block) -> Self {
        Scaling::Block { block, formula: Formula::DeepGemm { power_of_two: true }, layout: ScaleLayout::PackedE8m0 }
    }
}

/// Elements that share a scale. In the transposed copy `1x128` means 128 rows of one column of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// 1x128.
    Row128,
    /// 128x128.
    Square128,
    /// 1x32.
    Row32,
}

/// How a block's scale follows from `amax`, its greatest magnitude (NaN drops out, so a block of NaN has 0). All steps are single IEEE f32
/// operations; elements are multiplied by `scale`, `stored` is what a GEMM multiplies by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Formula {
    /// `scale = largest / max(amax, epsilon)`, `stored = 1 / scale`. When that maximum is 0 or infinite the scale is 1; an infinite quotient becomes the
    /// input type's largest finite value; `power_of_two` then clears the mantissa.
    /// Source: `compute_scale_from_amax` of Transformer Engine 2.
    TransformerEngine {
        /// Least magnitude; 0 for none.
        epsilon: f32,
        /// Only powers of two: scales may be stored as E8M0.
        power_of_two: bool,
    },
    /// `m = max(amax, 1e-4)`, `scale = largest / m`, `stored = m / largest`. With `power_of_two`: `stored = 2^e` with the least e in -127..=127
    /// such that `m / largest <= 2^e` (127 if there is none), `scale = 2^-e`.
    /// Source: `per_token_cast_to_fp8` of DeepGEMM and its E8M0 form.
    DeepGemm {
        /// Only powers of two: scales may be stored as E8M0.
        power_of_two: bool,
    },
    /// `stored = 2^e` with the least e in -127..=127 such that `amax / largest <= 2^e` (127 if there is none), `scale = 2^-e`.
    /// Source: OCP MX 1.0 with the exponent rounded up, as Transformer Engine's MXFP8.
    Mx,
}

/// Where the scales `[LB, KB]` of a copy lie (see the [module](self) for LB and KB). Elements are f32, or E8M0 when the formula gives powers of
/// two ([`Formula::Mx`]: E8M0 only). Cells between rows of a strided view are never written.
///
/// In a grouped call the scales of the matrices follow each other: along the lines for `row`, along the blocks for `column`; the extent that
/// grows so may be larger than needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// `[LB, KB]`. Grouped `column`: flat, matrix i as a contiguous `[LB, KB_i]` behind those before it.
    /// Sources: OCP MX; Transformer Engine for 128x128 (its views have rows padded to 4) and for MXFP8 (padded to 4).
    RowMajor,
    /// `[KB, LB]`, rows a multiple of 16 bytes apart.
    /// Sources: Transformer Engine for 1x128 (rows padded to 4); DeepGEMM (MN-major, aligned for TMA).
    ColumnMajor,
    /// i32 or u32 `[ceil(KB / 4), L]`, rows a multiple of 16 bytes apart: byte b of word `[w, l]` is the E8M0 scale of line l, block `4 w + b`; bytes
    /// past the last block are 0. With 128x128 blocks each of a block's lines repeats its scale.
    /// Source: DeepGEMM on Blackwell.
    PackedE8m0,
}

/// Casts every matrix of a list. All matrices have the same input type, the same output type and the same directions; shapes may differ. A GPU takes 256 matrices
/// a launch, and the host checks each matrix at each call: see [`List`] for more matrices, and for those that are cast often. The tensors of one matrix
/// must not overlap, nor may outputs of different ones; of a list in a GPU's memory only the former is checked here.
///
/// ```
/// use moe_kernels::ops::cast::{Operands, Options, cast};
/// use moe_kernels::{Backend, DType, TensorView, TensorViewMut};
///
/// let x = [1.0f32, -2.0, 0.5, 1e9, 0.0, 3.3];
/// let (mut row, mut column, mut amax) = ([0u8; 6], [0u8; 6], [0.0f32]);
/// let matrix = Operands::new(TensorView::from_slice(&x, &[2, 3])?)
///     .row(TensorViewMut::from_bytes(&mut row, DType::E4M3, &[2, 3])?)
///     .column(TensorViewMut::from_bytes(&mut column, DType::E4M3, &[3, 2])?)
///     .amax(TensorViewMut::from_slice(&mut amax, &[1])?);
/// cast(&Backend::cpu(), &mut [matrix], &Options::default())?;
/// assert_eq!(row, [0x38, 0xC0, 0x30, 0x7E, 0x00, 0x45]); // 1, -2, 0.5, 448, 0, 3.25
/// assert_eq!(column, [0x38, 0x7E, 0xC0, 0x00, 0x30, 0x45]);
/// assert_eq!(amax, [1e9]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) naming `matrices[i].field`, before anything is written.
pub fn cast(backend: &Backend, matrices: &mut [Operands<'_>], options: &Options<'_>) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => match check::list(cpu, matrices, options, |_| ())? {
            Some(known) if !check::is_noop(cpu, options) => cpu::list(cpu, &known, matrices),
            _ => Ok(()),
        },
        // A list of one launch is packed as it is checked.
        Backend::Cuda(cuda) => gpu::list(cuda, matrices, options),
    }
}

/// Casts the matrices of one buffer of rows: matrix i is the rows `offsets[i]..offsets[i + 1]` of `operands.x`.
///
/// `offsets` is i32 or i64 `[n + 1]`, starts with 0, never decreases and ends within `x`; it is read when the operation runs. Rows from
/// `offsets[n]` on belong to no matrix and are not read. Outputs lie as [`Operands`] says; with padding, matrix i of `row` starts at the sum of the padded
/// rows before it. Cells behind the last matrix are not written.
///
/// ```
/// use moe_kernels::ops::cast::{Operands, Options, Scaling, Block, cast_grouped};
/// use moe_kernels::{Backend, DType, TensorView, TensorViewMut};
///
/// let x = vec![1.0f32; 10 * 256]; // 10 rows of 256
/// let offsets = [0i32, 3, 3, 8];  // three matrices, the second is empty; two rows are left over
/// let (mut row, mut scales) = (vec![0u8; 32 * 256], vec![0f32; 2 * 32]);
/// let mut operands = Operands::new(TensorView::from_slice(&x, &[10, 256])?)
///     .row(TensorViewMut::from_bytes(&mut row, DType::E4M3, &[32, 256])?)
///     .row_scales(TensorViewMut::from_slice(&mut scales, &[2, 32])?);
/// let options = Options { pad_rows: 16, ..Options::with_scaling(Scaling::deep_gemm(Block::Row128)) };
/// cast_grouped(&Backend::cpu(), &mut operands, TensorView::from_slice(&offsets, &[4])?, &options)?;
/// assert_eq!((row[0], row[3 * 256], row[16 * 256]), (0x7E, 0, 0x7E)); // 448, padding, 448
/// assert_eq!(scales[0], 1.0 / 448.0);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) naming the field, before anything is written.
pub fn cast_grouped(backend: &Backend, operands: &mut Operands<'_>, offsets: TensorView<'_>, options: &Options<'_>) -> Result<()> {
    match backend {
        Backend::Cpu(cpu) => match check::grouped(cpu, operands, &offsets, options)? {
            _ if check::is_noop(cpu, options) => Ok(()),
            known => cpu::grouped(cpu, &known, operands, &offsets),
        },
        Backend::Cuda(cuda) => {
            let known = check::grouped(cuda, operands, &offsets, options)?;
            gpu::grouped(cuda, &known, operands, &offsets, options)
        }
    }
}

/// Every kernel with every set of constants that is meant to be shipped.
pub fn programs() -> Vec<Program> {
    variant::shipped().iter().map(Spec::program).collect()
}
