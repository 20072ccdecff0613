//! Sums of rows: f32, in the order given, one rounding at the end.

use crate::cpu::copy::{Store, copy, prefetch};
use crate::cpu::quantize::quantize_row;
use crate::cpu::{Level, convert, float};
use crate::ep::{Quantize, SCALE_BLOCK, Wire};
use crate::tensor::DType;

/// How far ahead of the sum its rows are asked for. Measured on Zen 4, 2 cores, `cargo bench --bench cpu`, 2026-11-30: dispatch + combine reach 0.97
/// of memcpy with 512 or 1024, 0.91 without: the hardware's own prefetch stops at each page.
const PREFETCH_BYTES: usize = 512;

/// How a row's bytes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Elements of a type.
    Plain(DType),
    /// e4m3, then from the next multiple of 4 on an f32 scale per block.
    Block,
}

/// One addend: a row, and its factor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Term<'a> {
    pub row: &'a [u8],
    pub weight: Option<f32>,
}

/// What is done with a finished sum.
pub(super) struct Finish<'a> {
    /// Added last.
    pub add_to: Option<(DType, &'a [u8])>,
    pub level: Level,
    pub store: Store,
}

/// `out = round(sum of terms + add_to)`, of `dtype`. The first term is taken as it is (times its weight), the others are added (by fma with
/// their weights). Without terms: `add_to`, or +0.
pub(super) fn sum_row(form: Form, terms: &[Term<'_>], finish: &Finish<'_>, dtype: DType, out: &mut [u8]) {
    let hidden = out.len() / dtype.size();
    let mut block = 0;
    while block * SCALE_BLOCK < hidden {
        let at = block * SCALE_BLOCK;
        let len = SCALE_BLOCK.min(hidden - at);
        let mut sum = [0f32; SCALE_BLOCK];
        let sum = &mut sum[..len];
        let mut rounded = [0u8; 4 * SCALE_BLOCK];
        let rounded = &mut rounded[..len * dtype.size()];
        sum_block(finish.level, form, terms, hidden, block, sum);
        match finish.add_to {
            Some((add_dtype, bytes)) if terms.is_empty() && add_dtype == dtype => {
                rounded.copy_from_slice(&bytes[at * dtype.size()..][..len * dtype.size()]);
            }
            add_to => {
                if let Some((add_dtype, bytes)) = add_to {
                    let mut addend = [0f32; SCALE_BLOCK];
                    let addend = &mut addend[..len];
                    convert::widen(finish.level, add_dtype, &bytes[at * add_dtype.size()..][..len * add_dtype.size()], addend);
                    if terms.is_empty() {
                        sum.copy_from_slice(addend);
                    } else {
                        sum.iter_mut().zip(addend).for_each(|(s, a)| *s += *a);
                    }
                }
                convert::narrow(finish.level, dtype, sum, rounded);
            }
        }
        copy(finish.level, finish.store, rounded, &mut out[at * dtype.size()..][..len * dtype.size()]);
        block += 1;
    }
}

/// The unrounded sum of a whole row.
pub(super) fn sum_f32(level: Level, form: Form, terms: &[Term<'_>], sum: &mut [f32]) {
    let hidden = sum.len();
    for (block, sum) in sum.chunks_mut(SCALE_BLOCK).enumerate() {
        sum_block(level, form, terms, hidden, block, sum);
    }
}

/// A row of `dtype` in an fp8 wire form, or as f32.
pub(super) fn to_wire(level: Level, wire: Wire, dtype: DType, row: &[u8], hidden: usize, out: &mut [u8]) {
    match wire {
        Wire::AsIs => out[..row.len()].copy_from_slice(row),
        Wire::Fp8Direct => {
            for (q, row) in out[..hidden].chunks_mut(SCALE_BLOCK).zip(row.chunks(SCALE_BLOCK * dtype.size())) {
                let mut values = [0f32; SCALE_BLOCK];
                let values = &mut values[..q.len()];
                convert::widen(level, dtype, row, values);
                convert::narrow(level, DType::E4M3, values, q);
            }
        }
        Wire::Fp8Block => {
            let (q, scales) = out.split_at_mut(hidden.next_multiple_of(4));
            quantize_row(level, Quantize::F32, dtype, row, &mut q[..hidden], &mut scales[..4 * hidden.div_ceil(SCALE_BLOCK)]);
        }
    }
}

fn sum_block(level: Level, form: Form, terms: &[Term<'_>], hidden: usize, block: usize, sum: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    use crate::cpu::Isa;
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { sum_avx512(form, terms, hidden, block, sum) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { sum_avx2(form, terms, hidden, block, sum) },
        _ => sum_body(form, terms, hidden, block, sum),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn sum_avx512(form: Form, terms: &[Term<'_>], hidden: usize, block: usize, sum: &mut [f32]) {
    sum_body(form, terms, hidden, block, sum);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn sum_avx2(form: Form, terms: &[Term<'_>], hidden: usize, block: usize, sum: &mut [f32]) {
    sum_body(form, terms, hidden, block, sum);
}

#[inline(always)]
fn sum_body(form: Form, terms: &[Term<'_>], hidden: usize, block: usize, sum: &mut [f32]) {
    let of_two = |b: [u8; 2]| u16::from_le_bytes(b);
    match form {
        Form::Plain(DType::BF16) => add_terms(terms, block, sum, |b| float::f32_from_bf16(of_two(b)), |_| None),
        Form::Plain(DType::F16) => add_terms(terms, block, sum, |b| float::f32_from_f16(of_two(b)), |_| None),
        Form::Plain(DType::F32) => add_terms(terms, block, sum, f32::from_le_bytes, |_| None),
        Form::Plain(_) => add_terms(terms, block, sum, |[b]| float::f32_from_e4m3(b), |_| None),
        Form::Block => add_terms(
            terms,
            block,
            sum,
            |[b]| float::f32_from_e4m3(b),
            |row| {
                let scale = &row[hidden.next_multiple_of(4) + 4 * block..][..4];
                Some(f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]))
            },
        ),
    }
}

/// Adds block `block` of every term. Elements have SIZE bytes; `widen` reads one, and a row may have a scale for the block.
#[inline(always)]
fn add_terms<const SIZE: usize>(
    terms: &[Term<'_>],
    block: usize,
    sum: &mut [f32],
    widen: impl Fn([u8; SIZE]) -> f32,
    scale: impl Fn(&[u8]) -> Option<f32>,
) {
    let at = block * SCALE_BLOCK * SIZE;
    for (i, term) in terms.iter().enumerate() {
        prefetch(term.row, at + PREFETCH_BYTES, SCALE_BLOCK * SIZE);
        let (values, _) = term.row[at..][..sum.len() * SIZE].as_chunks::<SIZE>();
        let pairs = sum.iter_mut().zip(values);
        let scaled = |v: &[u8; SIZE], scale: Option<f32>| scale.map_or(widen(*v), |scale| widen(*v) * scale);
        match (i, term.weight, scale(term.row)) {
            (0, None, scale) => pairs.for_each(|(s, v)| *s = scaled(v, scale)),
            (0, Some(w), scale) => pairs.for_each(|(s, v)| *s = w * scaled(v, scale)),
            (_, None, None) => pairs.for_each(|(s, v)| *s += widen(*v)),
            (_, None, scale) => pairs.for_each(|(s, v)| *s += scaled(v, scale)),
            (_, Some(w), scale) => pairs.for_each(|(s, v)| *s = w.mul_add(scaled(v, scale), *s)),
        }
    }
}
