//! The router on the CPU: blocks of 16 tokens, one token a vector lane.
//!
//! With a token in each lane every sum keeps the order of the specification and is a vector operation all the same; nothing is reduced across
//! lanes. The loops are compiled once for each [`Level`](crate::cpu::Level).
#![allow(unsafe_code)] // calls of functions compiled for instructions that a Level proves

use std::cell::RefCell;

use super::{Args, Scores};
use crate::backend::Cpu;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;
use crate::cpu::{Level, convert, float};
use crate::routing::routes::MAX_K;
use crate::tensor::DType;

/// Tokens of a block (derived: f32 lanes of an AVX-512 register, two AVX2 registers).
const LANES: usize = 16;
/// Tokens of a task: about 20 us of work, several times the cost of starting it (arbitrary above a few blocks).
const TASK_TOKENS: usize = 4 * LANES;

/// One value for each token of a block.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes<T>([T; LANES]);

/// Tables of one block. They grow to the largest model seen by their thread and stay.
#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    /// Logits, then scores: `[num_experts]`.
    scores: Vec<Lanes<f32>>,
    keys: Vec<Lanes<i32>>,
    group_keys: Vec<Lanes<i32>>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

pub(super) fn route(cpu: &Cpu, args: &Args, logits: &[u8], topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    use rayon::prelude::*;
    let task =
        |(i, (idx, weights)): (usize, (&mut [i32], &mut [f32]))| route_task(cpu.level(), args, logits, i * TASK_TOKENS, idx, weights);
    let len = TASK_TOKENS * args.k;
    if cpu.is_serial() || topk_idx.len() <= len {
        topk_idx.chunks_mut(len).zip(topk_weights.chunks_mut(len)).enumerate().for_each(task);
    } else {
        cpu.install(|| topk_idx.par_chunks_mut(len).zip(topk_weights.par_chunks_mut(len)).enumerate().for_each(task));
    }
}

fn route_task(level: Level, args: &Args, logits: &[u8], first_token: usize, topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    SCRATCH.with_borrow_mut(|scratch| {
        let len = LANES * args.k;
        for (block, (idx, weights)) in topk_idx.chunks_mut(len).zip(topk_weights.chunks_mut(len)).enumerate() {
            let num_tokens = idx.len() / args.k;
            scratch.row.resize(args.num_experts, 0.0);
            scratch.scores.resize(args.num_experts, Lanes([0.0; LANES]));
            scratch.keys.resize(args.num_experts, Lanes([0; LANES]));
            for lane in 0..num_tokens {
                let start = (first_token + block * LANES + lane) * args.row_stride_bytes;
                let row = &logits[start..][..args.num_experts * args.logits_dtype.size()];
                convert::widen(level, args.logits_dtype, row, &mut scratch.row);
                // Here and not in `block`: there the compiler makes scatters of these stores.
                for (column, &x) in scratch.scores.iter_mut().zip(&scratch.row) {
                    column.0[lane] = x;
                }
            }
            route_block(level, args, scratch, idx, weights);
        }
    });
}

fn route_block(level: Level, args: &Args, scratch: &mut Scratch, topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    match level.0 {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { block_avx512(args, scratch, topk_idx, topk_weights) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { block_avx2(args, scratch, topk_idx, topk_weights) },
        _ => block(args, scratch, topk_idx, topk_weights),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi2")]
fn block_avx512(args: &Args, scratch: &mut Scratch, topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    block(args, scratch, topk_idx, topk_weights);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn block_avx2(args: &Args, scratch: &mut Scratch, topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    block(args, scratch, topk_idx, topk_weights);
}

/// Evaluates to the array of `$value` over the lanes `$r`. A plain loop: closures, as in `array::from_fn`, are not compiled for the instructions of
/// the function around them (measured: 26 ms against 2.6).
macro_rules! lanes {
    ($r:ident => $value:expr) => {{
        let mut out = [Default::default(); LANES];
        for $r in 0..LANES {
            out[$r] = $value;
        }
        out
    }};
}

/// Routes up to 16 tokens. Lanes beyond the last token compute on whatever the scratch holds and are not stored.
#[inline(always)]
fn block(args: &Args, scratch: &mut Scratch, topk_idx: &mut [i32], topk_weights: &mut [f32]) {
    let Scratch { scores, keys, group_keys, .. } = scratch;
    match args.scores {
        Scores::Softmax => {
            softmax(scores);
            for (key, score) in keys.iter_mut().zip(scores.iter()) {
                key.0 = lanes!(r => key_of(score.0[r]));
            }
        }
        Scores::Sigmoid(bias) => {
            for ((key, score), bias) in keys.iter_mut().zip(scores.iter_mut()).zip(bias) {
                score.0 = lanes!(r => float::sigmoid(score.0[r]));
                key.0 = lanes!(r => key_of(score.0[r] + bias));
            }
        }
    }
    if let Some(groups) = args.groups {
        let size = args.num_experts / groups.num_groups;
        group_keys.clear();
        for group in keys.chunks_exact(size) {
            group_keys.push(worth(group, matches!(args.scores, Scores::Sigmoid(_))));
        }
        for _ in 0..groups.topk_groups {
            take_first(group_keys);
        }
        for (group, kept) in keys.chunks_exact_mut(size).zip(group_keys.iter()) {
            for key in group {
                key.0 = lanes!(r => if kept.0[r] == TAKEN { key.0[r] } else { TAKEN });
            }
        }
    }

    let mut idx = [Lanes([0i32; LANES]); MAX_K];
    let mut weights = [Lanes([0f32; LANES]); MAX_K];
    let (idx, weights) = (&mut idx[..args.k], &mut weights[..args.k]);
    for (idx, weight) in idx.iter_mut().zip(weights.iter_mut()) {
        *idx = take_first(keys);
        weight.0 = lanes!(r => scores[idx.0[r] as usize].0[r]);
    }
    weigh(args, weights);
    for (lane, (out_idx, out_weights)) in topk_idx.chunks_exact_mut(args.k).zip(topk_weights.chunks_exact_mut(args.k)).enumerate() {
        for j in 0..args.k {
            out_idx[j] = idx[j].0[lane];
            out_weights[j] = weights[j].0[lane];
        }
    }
}

/// Logits to probabilities, in place.
#[inline(always)]
fn softmax(columns: &mut [Lanes<f32>]) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for x in columns.iter() {
        largest = lanes!(r => if x.0[r] > largest[r] { x.0[r] } else { largest[r] });
    }
    let mut sum = [0f32; LANES];
    for x in columns.iter_mut() {
        x.0 = lanes!(r => float::exp(x.0[r] - largest[r]));
        sum = lanes!(r => sum[r] + x.0[r]);
    }
    for x in columns {
        x.0 = lanes!(r => x.0[r] / sum[r]);
    }
}

/// Marks what was chosen or may not be: below the key of every number.
const TAKEN: i32 = i32::MIN;

/// An integer that orders as the specification orders values: ascending, every NaN the same and highest. -0 would come before +0, but does not
/// occur: scores are +0 or more, and a sum is -0 only when both terms are.
#[inline(always)]
fn key_of(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    let ordered = bits ^ ((bits >> 31) as u32 >> 1) as i32;
    if x.is_nan() { i32::MAX } else { ordered }
}

/// The value of a key; its NaN is a NaN.
#[inline(always)]
fn value_of(key: i32) -> f32 {
    f32::from_bits((key ^ ((key >> 31) as u32 >> 1) as i32) as u32)
}

/// What a group is worth: its best key, or the key of the sum of its two best.
#[inline(always)]
fn worth(group: &[Lanes<i32>], two_best: bool) -> Lanes<i32> {
    let (mut first, mut second) = ([TAKEN; LANES], [TAKEN; LANES]);
    for key in group {
        second = lanes!(r => second[r].max(first[r].min(key.0[r])));
        first = lanes!(r => first[r].max(key.0[r]));
    }
    Lanes(if two_best { lanes!(r => key_of(value_of(first[r]) + value_of(second[r]))) } else { first })
}

/// The position of each lane's largest key, the lowest of equals, and marks it.
#[inline(always)]
fn take_first(keys: &mut [Lanes<i32>]) -> Lanes<i32> {
    let (mut best, mut idx) = ([TAKEN; LANES], [0i32; LANES]);
    for (e, key) in keys.iter().enumerate() {
        idx = lanes!(r => if key.0[r] > best[r] { e as i32 } else { idx[r] });
        best = lanes!(r => best[r].max(key.0[r]));
    }
    for r in 0..LANES {
        keys[idx[r] as usize].0[r] = TAKEN;
    }
    Lanes(idx)
}

/// Renormalises, scales and rounds the weights of the choice.
#[inline(always)]
fn weigh(args: &Args, weights: &mut [Lanes<f32>]) {
    if let Some(epsilon) = args.renormalize {
        let mut sum = weights[0].0;
        for w in &weights[1..] {
            sum = lanes!(r => sum[r] + w.0[r]);
        }
        for w in weights.iter_mut() {
            w.0 = lanes!(r => w.0[r] / (sum[r] + epsilon));
        }
    }
    for w in weights {
        w.0 = lanes!(r => round(args.weight_dtype, w.0[r] * args.scale));
    }
}

#[inline(always)]
fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => float::f32_from_bf16(float::bf16_from_f32(x)),
        DType::F16 => float::f32_from_f16(float::f16_from_f32(x)),
        _ => x,
    }
}
