//! The dot products of rows with one vector, in the one order of the sum that `oracle::gate` states.
//!
//! A *block* is 256 neighbours: all of one `(j, w)` of the stated order, so block `b` has `w = b % 32` and `j = b / 32`. Per block and row the
//! pairs over e are added while the elements are in registers, which leaves 32 partial sums, one for each l. The pairs over w are a binary
//! counter: the sums of block `b` are added to those of the block before it when bit 0 of `b` is set, and so on for the higher bits. The pairs
//! over l come once for each row.
//!
//! Absent terms are left out and not added as +0, and a first product stands for the fma with +0: both change a sum only from one zero to the
//! other, and the last step, + 0, makes every zero +0.
// Indices run through several arrays at once, and name their dimension.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{Portable, Vector};
use super::view::Rows;
use crate::cpu::Level;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;
use crate::tensor::DType;

/// Elements of a block (spec: the order of the sum).
const BLOCK: usize = 256;
/// Blocks after which the accumulators are used again (spec: the order of the sum).
const NUM_W: usize = 32;
/// Rows that share the loads of the weights, and streams from memory at a time (arbitrary: 4 sums of 4 vectors fill half the registers of
/// AVX-512; AVX2 spills some and is still at the speed of memory).
pub(super) const ROWS: usize = 4;
/// How far ahead of the loads the prefetches are, at least: the next group of rows of 4 KiB. Measured (Zen 4, 2 threads, K = 2048, bf16, ratio
/// to the better of a plain and a prefetching read): 0.93 with AVX2 and 0.96 with AVX-512 into the second-level cache; 0.80 and 0.75 into the first, where
/// rows a power of two apart fall into the same few sets.
const PREFETCH_BYTES: usize = 16 << 10;

/// `sums[i]` = row `first + i` of `x` times `w`, for every `i`. Both have the same number of elements.
///
/// # Panics
/// If there are fewer rows, or for types that are no f32, f16 or bf16; the validator excludes both.
pub(super) fn dots(level: Level, x: &Rows<&[u8]>, first: usize, w: &Rows<&[u8]>, sums: &mut [f32]) {
    let w_dtype = w.dtype;
    let w = w.row(0);
    assert_eq!(x.row_bytes / x.dtype.size(), w.len() / w_dtype.size(), "dots: elements of a row");
    macro_rules! with_types {
        ($function:ident) => {
            match (x.dtype, w_dtype) {
                (DType::BF16, DType::BF16) => $function::<Bf16, Bf16>(x, first, w, sums),
                (DType::BF16, DType::F32) => $function::<Bf16, F32>(x, first, w, sums),
                (DType::F16, DType::F16) => $function::<F16, F16>(x, first, w, sums),
                (DType::F16, DType::F32) => $function::<F16, F32>(x, first, w, sums),
                (DType::F32, DType::F32) => $function::<F32, F32>(x, first, w, sums),
                (x, w) => panic!("dots of {x} and {w}"),
            }
        };
    }
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { with_types!(dots_avx512) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { with_types!(dots_avx2) },
        _ => with_types!(dots_portable),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn dots_avx512<X: Format, W: Format>(x: &Rows<&[u8]>, first: usize, w: &[u8], sums: &mut [f32]) {
    // SAFETY: this function enables the instruction set of the vector.
    unsafe { dots_loop::<Avx512, X, W>(x, first, w, sums) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn dots_avx2<X: Format, W: Format>(x: &Rows<&[u8]>, first: usize, w: &[u8], sums: &mut [f32]) {
    // SAFETY: this function enables the instruction set of the vector.
    unsafe { dots_loop::<Avx2, X, W>(x, first, w, sums) }
}

fn dots_portable<X: Format, W: Format>(x: &Rows<&[u8]>, first: usize, w: &[u8], sums: &mut [f32]) {
    // SAFETY: the portable vector needs no instruction set.
    unsafe { dots_loop::<Portable, X, W>(x, first, w, sums) }
}

/// How elements of one type are loaded.
trait Format {
    const SIZE: usize;
    /// Even and odd ones of `2 * V::LANES` elements.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(source: *const u8) -> (V, V);
}

struct Bf16;
struct F16;
struct F32;

impl Format for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Vector>(source: *const u8) -> (V, V) {
        // SAFETY: this function has the contract of the one called.
        unsafe { V::load_bf16(source) }
    }
}

impl Format for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Vector>(source: *const u8) -> (V, V) {
        // SAFETY: this function has the contract of the one called.
        unsafe { V::load_f16(source) }
    }
}

impl Format for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<V: Vector>(source: *const u8) -> (V, V) {
        // SAFETY: this function has the contract of the one called.
        unsafe { V::load_f32(source) }
    }
}

/// The rows of a call: [`ROWS`] at a time, the rest one by one.
///
/// # Safety
/// As [`Vector`]: the instruction set is enabled.
#[inline(always)]
unsafe fn dots_loop<V: Vector, X: Format, W: Format>(x: &Rows<&[u8]>, first: usize, w: &[u8], sums: &mut [f32]) {
    let num_grouped = sums.len() - sums.len() % ROWS;
    let (grouped, single) = sums.split_at_mut(num_grouped);
    // SAFETY: the instruction set is enabled (the contract of this function).
    unsafe {
        if w.len() / W::SIZE > NUM_W * BLOCK {
            row_groups::<V, X, W, 1, true>(x, first, w, grouped);
            row_groups::<V, X, W, 1, true>(x, first + num_grouped, w, single);
        } else {
            row_groups::<V, X, W, ROWS, false>(x, first, w, grouped);
            row_groups::<V, X, W, 1, false>(x, first + num_grouped, w, single);
        }
    }
}

/// Groups of `R` rows; `LONG`: the accumulators are used more than once. `sums` has a multiple of `R` elements.
///
/// # Safety
/// As [`Vector`]: the instruction set is enabled.
#[inline(always)]
unsafe fn row_groups<V: Vector, X: Format, W: Format, const R: usize, const LONG: bool>(
    x: &Rows<&[u8]>,
    first: usize,
    w: &[u8],
    sums: &mut [f32],
) {
    if sums.is_empty() {
        return;
    }
    // SAFETY: the instruction set is enabled (the contract of this function).
    let mut scratch = unsafe { Scratch::<V, R>::new() };
    let k = w.len() / W::SIZE;
    let w_tail = &w[k / BLOCK * BLOCK * W::SIZE..];
    scratch.w_end[..w_tail.len()].copy_from_slice(w_tail);
    let group_bytes = (x.stride_bytes * R).max(1);
    let groups_ahead = PREFETCH_BYTES.div_ceil(group_bytes);
    for (i, sums) in sums.chunks_exact_mut(R).enumerate() {
        let first = first + i * R;
        let mut rows = [[].as_slice(); R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = x.row(first + r);
        }
        for (row, end) in rows.iter().zip(&mut scratch.x_end) {
            let x_tail = &row[k / BLOCK * BLOCK * X::SIZE..];
            end[..x_tail.len()].copy_from_slice(x_tail);
        }
        // Whole groups ahead, so that the lines asked for are those of rows to come.
        let ahead = if first + groups_ahead * R < x.num_rows { groups_ahead * group_bytes } else { 0 };
        // SAFETY: the instruction set is enabled (the contract of this function), and every row has the `k` elements of w.
        unsafe { row_group::<V, X, W, R, LONG>(rows.map(<[u8]>::as_ptr), w.as_ptr(), k, ahead, &mut scratch) };
        for (sum, all) in sums.iter_mut().zip(&scratch.result) {
            // SAFETY: the instruction set is enabled (the contract of this function).
            *sum = unsafe { sum_over_l::<V>(all) };
        }
    }
}

/// Bits of [`NUM_W`], and one: sums of 1, 2, 4, .., 32 blocks.
const NUM_LEVELS: usize = 6;

/// What a group of `R` rows is worked on with, made once for many groups.
struct Scratch<V: Vector, const R: usize> {
    /// `pending[n]`: the sums of the last 2^n blocks that are not part of a larger sum yet.
    pending: [[V::All; R]; NUM_LEVELS],
    /// The sums over e and w.
    result: [V::All; R],
    /// The elements behind the last whole block, followed by 0: a block that adds nothing behind the end.
    x_end: [[u8; BLOCK * 4]; R],
    w_end: [u8; BLOCK * 4],
}

impl<V: Vector, const R: usize> Scratch<V, R> {
    /// # Safety
    /// As [`Vector`]: the instruction set is enabled.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the instruction set is enabled (the contract of this function).
        let zeros = unsafe { [V::zeros(); R] };
        Scratch { pending: [zeros; NUM_LEVELS], result: zeros, x_end: [[0; BLOCK * 4]; R], w_end: [0; BLOCK * 4] }
    }
}

/// The sums over e and w of `R` rows of `k` elements, in `scratch.result`.
///
/// # Safety
/// As [`Vector`]: the instruction set is enabled. Each of `rows`, and `w`, has `k` elements; the ends in `scratch` are theirs.
#[inline(always)]
unsafe fn row_group<V: Vector, X: Format, W: Format, const R: usize, const LONG: bool>(
    rows: [*const u8; R],
    w: *const u8,
    k: usize,
    ahead: usize,
    scratch: &mut Scratch<V, R>,
) {
    let Scratch { pending, result, x_end, w_end } = scratch;
    let (num_whole, num_blocks) = (k / BLOCK, k.div_ceil(BLOCK));
    let block = |b: usize| {
        let mut x = [std::ptr::null::<u8>(); R];
        for r in 0..R {
            // SAFETY: a block below `num_whole` lies inside the row (the contract of this function).
            x[r] = if b < num_whole { unsafe { rows[r].add(b * BLOCK * X::SIZE) } } else { x_end[r].as_ptr() };
        }
        // SAFETY: as above, for w.
        (x, if b < num_whole { unsafe { w.add(b * BLOCK * W::SIZE) } } else { w_end.as_ptr() })
    };
    let num_leaves = num_blocks.min(NUM_W);
    for leaf in 0..num_leaves {
        // SAFETY: the instruction set is enabled (the contract of this function); `block` gives pointers to whole blocks.
        let mut node =
            unsafe { if LONG { long_block::<V, X, W, R>(block, leaf, num_blocks) } else { one_block::<V, X, W, R>(block(leaf), ahead) } };
        let mut level = 0;
        while leaf >> level & 1 == 1 {
            // SAFETY: the instruction set is enabled (the contract of this function).
            unsafe { add_into::<V, R>(&pending[level], &mut node) };
            level += 1;
        }
        pending[level] = node;
    }
    if num_leaves == 0 {
        return; // `result` is still 0
    }
    // From the lowest level up: a missing right-hand side is absent, so the left-hand side stands for the sum.
    let lowest = num_leaves.trailing_zeros() as usize;
    *result = pending[lowest];
    for level in lowest + 1..NUM_LEVELS {
        if num_leaves >> level & 1 == 1 {
            // SAFETY: the instruction set is enabled (the contract of this function).
            unsafe { add_into::<V, R>(&pending[level], result) };
        }
    }
}

/// `node = left + node`.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn add_into<V: Vector, const R: usize>(left: &[V::All; R], node: &mut [V::All; R]) {
    for (left, node) in left.iter().zip(node) {
        for (left, node) in left.as_ref().iter().zip(node.as_mut()) {
            // SAFETY: the instruction set is enabled (the contract of this function).
            *node = unsafe { V::add(*left, *node) };
        }
    }
}

/// The sums over e of one block, for each row and l, in the order that [`sum_over_l`] knows.
///
/// # Safety
/// As [`Vector`]; the pointers of `block` have [`BLOCK`] elements.
#[inline(always)]
unsafe fn one_block<V: Vector, X: Format, W: Format, const R: usize>(block: ([*const u8; R], *const u8), ahead: usize) -> [V::All; R] {
    let (x, w) = block;
    // SAFETY: the instruction set is enabled, each of the 128 / LANES loads of 2 * LANES elements stays inside a block (the contract of this
    // function), and a prefetch may be of any address.
    unsafe {
        let mut sums = [V::zeros(); R];
        for group in 0..BLOCK / (8 * V::LANES) {
            let mut quads = [[V::zero(); 4]; R];
            for quad in 0..4 {
                let at = (group * 4 + quad) * 2 * V::LANES;
                let (w_even, w_odd) = W::load::<V>(w.add(at * W::SIZE));
                for r in 0..R {
                    let source = x[r].add(at * X::SIZE);
                    if ahead != 0 && (at * X::SIZE).is_multiple_of(LINE) {
                        for line in 0..(2 * V::LANES * X::SIZE).div_ceil(LINE) {
                            V::prefetch(source.wrapping_add(ahead + line * LINE));
                        }
                    }
                    let (even, odd) = X::load::<V>(source);
                    quads[r][quad] = V::add(V::mul(even, w_even), V::mul(odd, w_odd));
                }
            }
            for r in 0..R {
                sums[r].as_mut()[group] = add_quads(quads[r]);
            }
        }
        sums
    }
}

/// As [`one_block`] for a row with more than one block for each w: the fma over ascending j first.
///
/// # Safety
/// As [`Vector`]; the pointers of every block below `num_blocks` have [`BLOCK`] elements.
#[inline(always)]
unsafe fn long_block<V: Vector, X: Format, W: Format, const R: usize>(
    block: impl Fn(usize) -> ([*const u8; R], *const u8),
    leaf: usize,
    num_blocks: usize,
) -> [V::All; R] {
    // SAFETY: the instruction set is enabled and each of the 128 / LANES loads of 2 * LANES elements stays inside a block (the contract of
    // this function).
    unsafe {
        let mut sums = [V::zeros(); R];
        for group in 0..BLOCK / (8 * V::LANES) {
            let mut pairs = [[(V::zero(), V::zero()); 4]; R];
            for b in (leaf..num_blocks).step_by(NUM_W) {
                let (x, w) = block(b);
                for quad in 0..4 {
                    let at = (group * 4 + quad) * 2 * V::LANES;
                    let (w_even, w_odd) = W::load::<V>(w.add(at * W::SIZE));
                    for r in 0..R {
                        let (even, odd) = X::load::<V>(x[r].add(at * X::SIZE));
                        let (even_sum, odd_sum) = pairs[r][quad];
                        pairs[r][quad] = (V::mul_add(even, w_even, even_sum), V::mul_add(odd, w_odd, odd_sum));
                    }
                }
            }
            for r in 0..R {
                let mut quads = [V::zero(); 4];
                for quad in 0..4 {
                    quads[quad] = V::add(pairs[r][quad].0, pairs[r][quad].1);
                }
                sums[r].as_mut()[group] = add_quads(quads);
            }
        }
        sums
    }
}

/// Bits 1 and 2 of e: the four of each 128-bit lane of four vectors.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn add_quads<V: Vector>(quads: [V; 4]) -> V {
    // SAFETY: the instruction set is enabled (the contract of this function).
    unsafe { V::add_pairs(V::add_pairs(quads[0], quads[1]), V::add_pairs(quads[2], quads[3])) }
}

/// The pairs over l, and + 0.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn sum_over_l<V: Vector>(all: &V::All) -> f32 {
    let mut stored = [0f32; NUM_L];
    for (v, stored) in all.as_ref().iter().zip(stored.chunks_exact_mut(V::LANES)) {
        // SAFETY: the instruction set is enabled (the contract of this function), and the chunk has LANES elements.
        unsafe { v.store(stored.as_mut_ptr()) };
    }
    // Vector v, 128-bit lane q, element c came from load c of group v, so from l = v * LANES + c * (LANES / 4) + q.
    let mut sums = [0f32; NUM_L];
    for (l, sum) in sums.iter_mut().enumerate() {
        let (v, in_vector) = (l / V::LANES, l % V::LANES);
        let (c, q) = (in_vector / (V::LANES / 4), in_vector % (V::LANES / 4));
        *sum = stored[v * V::LANES + 4 * q + c];
    }
    for half in [16, 8, 4, 2, 1] {
        for l in 0..half {
            sums[l] = sums[2 * l] + sums[2 * l + 1];
        }
    }
    sums[0] + 0.0
}

/// Values of l (spec: the order of the sum).
const NUM_L: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;
