//! The CPU backend of the gate: rows in parts, a part on one thread, a batch of gates at a time.
#![forbid(unsafe_code)]

use super::check::Gates;
use super::elementwise::{self, Steps};
use super::view::{Rows, RowsMut};
use super::{Activation, Rounding, dot};
use crate::backend::Cpu;
use crate::cpu::convert;
use crate::id::Expert;
use crate::tensor::DType;

/// Gates that are made at a time: enough for the vectors of their last steps, and little to keep (arbitrary above 16; a multiple of the rows
/// that share a load).
pub(super) const BATCH: usize = 64;
/// A part reads and writes at least this much: below, waking another thread costs more than it gives (arbitrary within a factor of two or
/// so: a thread reads about this much in the few microseconds that a wake-up takes).
const PART_BYTES: usize = 128 << 10;
/// Parts for each thread, so that a thread which started late has less to do (arbitrary above 1).
const PARTS_PER_THREAD: usize = 4;

/// `out[t] = g[t]`.
pub(super) fn gate(cpu: &Cpu, gates: &Gates<&[u8]>, out: RowsMut<&mut [u8]>) {
    let RowsMut { dtype, stride_bytes, row_bytes, .. } = out;
    let rows_per_part = rows_per_part(cpu, gates.x.num_rows, gates.x.row_bytes);
    for_each_part(cpu, out, rows_per_part, |first, chunk| {
        for_each_batch(cpu, gates, first, chunk.len().div_ceil(stride_bytes), |i, g| {
            for (g, out) in g.iter().zip(chunk[i * stride_bytes..].chunks_mut(stride_bytes)) {
                convert::narrow(cpu.level(), dtype, &[*g], &mut out[..row_bytes]);
            }
        });
    });
}

/// `out = g * s`, or `out + g * s` with `ADD`.
pub(super) fn gate_mul<const ADD: bool>(cpu: &Cpu, gates: &Gates<&[u8]>, s: Rows<&[u8]>, out: RowsMut<&mut [u8]>) {
    let RowsMut { dtype, stride_bytes, row_bytes, .. } = out;
    let rows_per_part = rows_per_part(cpu, s.num_rows, gates.x.row_bytes + 2 * row_bytes);
    for_each_part(cpu, out, rows_per_part, |first, chunk| {
        for_each_batch(cpu, gates, first, chunk.len().div_ceil(stride_bytes), |i, g| {
            for (r, (g, out)) in g.iter().zip(chunk[i * stride_bytes..].chunks_mut(stride_bytes)).enumerate() {
                elementwise::scale_row(cpu.level(), dtype, gates.rounding, ADD, *g, s.row(first + i + r), &mut out[..row_bytes]);
            }
        });
    });
}

/// The gate and the shared expert behind the routed top-k.
pub(super) fn gate_append_topk(
    cpu: &Cpu,
    gates: &Gates<&[u8]>,
    shared_expert: Expert,
    idx: RowsMut<&mut [u8]>,
    weights: RowsMut<&mut [u8]>,
) {
    let (idx, weights) = (idx.last_element(), weights.last_element());
    let id = u64::from(shared_expert.0).to_le_bytes();
    let id = &id[..idx.row_bytes];
    let (idx_stride, weight_stride) = (idx.stride_bytes, weights.stride_bytes);
    let rows_per_part = rows_per_part(cpu, gates.x.num_rows, gates.x.row_bytes);
    for_each_part(cpu, idx, gates.x.num_rows, |_, chunk| {
        for row in chunk.chunks_mut(idx_stride) {
            row[..id.len()].copy_from_slice(id);
        }
    });
    for_each_part(cpu, weights, rows_per_part, |first, chunk| {
        for_each_batch(cpu, gates, first, chunk.len().div_ceil(weight_stride), |i, g| {
            for (g, row) in g.iter().zip(chunk[i * weight_stride..].chunks_mut(weight_stride)) {
                row[..4].copy_from_slice(&g.to_le_bytes());
            }
        });
    });
}

/// `out = s * sigmoid(g)`.
pub(super) fn sigmoid_mul(cpu: &Cpu, s: Rows<&[u8]>, g: Rows<&[u8]>, rounding: Rounding, out: RowsMut<&mut [u8]>) {
    let RowsMut { dtype, stride_bytes, row_bytes, .. } = out;
    let g_per_row = g.row_bytes / g.dtype.size();
    let steps = Steps { bias: None, activation: Activation::Sigmoid, rounding, scale: 1.0, dtype: g.dtype, g_dtype: g.dtype };
    let rows_per_part = rows_per_part(cpu, s.num_rows, 2 * row_bytes + g.row_bytes);
    for_each_part(cpu, out, rows_per_part, |first, chunk| {
        for (i, out) in chunk.chunks_mut(stride_bytes).enumerate() {
            let (s, g_row) = (s.row(first + i), g.row(first + i));
            let out = &mut out[..row_bytes];
            if g_per_row == 1 {
                let mut one = [0.0];
                convert::widen(cpu.level(), g.dtype, g_row, &mut one);
                elementwise::gates(cpu.level(), &steps, &[], &mut one);
                elementwise::scale_row(cpu.level(), dtype, rounding, false, one[0], s, out);
            } else {
                elementwise::sigmoid_mul_row(cpu.level(), dtype, g.dtype, rounding, s, g_row, out);
            }
        }
    });
}

pub(super) fn rows_per_part(cpu: &Cpu, num_rows: usize, bytes_per_row: usize) -> usize {
    let least = PART_BYTES.div_ceil(bytes_per_row.max(1));
    let even = num_rows.div_ceil(PARTS_PER_THREAD * cpu.num_threads());
    // Whole batches leave no odd rows at the end of a part, unless a batch is long.
    even.max(least).next_multiple_of(dot::ROWS)
}

/// Calls `work(first row, bytes from there to the end of the part)` for each part of the output, on the backend's threads.
pub(super) fn for_each_part(cpu: &Cpu, out: RowsMut<&mut [u8]>, rows_per_part: usize, work: impl Fn(usize, &mut [u8]) + Sync + Send) {
    use rayon::prelude::*;
    if cpu.is_serial() || out.num_rows <= rows_per_part {
        return work(0, out.memory);
    }
    let chunks = out.memory.par_chunks_mut(rows_per_part * out.stride_bytes).enumerate();
    cpu.install(|| chunks.for_each(|(part, chunk)| work(part * rows_per_part, chunk)));
}

/// Calls `store(i, gates of the rows first + i ..)` for batches of `num_rows` rows from `first` on.
pub(super) fn for_each_batch(cpu: &Cpu, gates: &Gates<&[u8]>, first: usize, num_rows: usize, mut store: impl FnMut(usize, &[f32])) {
    let one = |row: &[u8], dtype: DType| {
        let mut value = [0.0];
        convert::widen(cpu.level(), dtype, row, &mut value);
        value[0]
    };
    let steps = Steps {
        bias: gates.bias.map(|bias| one(bias.row(0), bias.dtype)),
        activation: gates.activation,
        rounding: gates.rounding,
        scale: gates.scale,
        dtype: gates.x.dtype,
        g_dtype: gates.g_dtype,
    };
    for i in (0..num_rows).step_by(BATCH) {
        let len = (num_rows - i).min(BATCH);
        let (mut values, mut addends) = ([0.0; BATCH], [0.0; BATCH]);
        let values = &mut values[..len];
        dot::dots(cpu.level(), &gates.x, first + i, &gates.w, values);
        let num_addends = if let Some(addend) = &gates.addend {
            for (r, value) in addends[..len].iter_mut().enumerate() {
                *value = one(addend.row(first + i + r), addend.dtype);
            }
            len
        } else {
            0
        };
        elementwise::gates(cpu.level(), &steps, &addends[..num_addends], values);
        store(i, values);
    }
}
