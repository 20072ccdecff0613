//! The CPU backend of the gate's backward: logits by rows, then x by rows, then w by blocks of columns.
//!
//! `dlogit` is made first and read from its place by the two others, so that nothing else is kept. Every part of a result is made by one thread, in
//! scratch of a fixed size.
#![forbid(unsafe_code)]

use super::super::check::Gates;
use super::super::cpu::{self as forward, BATCH, for_each_batch, for_each_part, rows_per_part};
use super::super::view::{Rows, RowsMut};
use super::super::{Activation, dot};
use super::check::{GateBackward, GateMulBackward};
use super::elementwise::{self, BLOCK};
use crate::backend::Cpu;
use crate::cpu::convert;
use crate::tensor::DType;

/// Writes what was asked for.
pub(super) fn gate_backward(cpu: &Cpu, call: GateBackward<'_, Cpu>) {
    let GateBackward { gates, dg, mut dlogit, dx, dw, dbias } = call;
    let num_tokens = gates.x.num_rows;
    let mut dlogit_rows: Rows<&[u8]> = Rows { memory: &[], dtype: DType::F32, num_rows: num_tokens, row_bytes: 4, stride_bytes: 4 };
    if let Some(dlogit) = &mut dlogit {
        dlogits(cpu, &gates, dg, RowsMut { memory: &mut *dlogit.memory, ..*dlogit });
        dlogit_rows = Rows { memory: dlogit.memory, stride_bytes: dlogit.stride_bytes, ..dlogit_rows };
    }
    let dlogit = &dlogit_rows;
    if let Some(dx) = dx {
        products(cpu, dlogit, &gates.w, dx);
    }
    if let Some(dw) = dw {
        sums(cpu, dlogit, &gates.x, dw);
    }
    if let Some(dbias) = dbias {
        // A column of ones: rows without a distance.
        let one = 1f32.to_le_bytes();
        sums(cpu, dlogit, &Rows { memory: &one, dtype: DType::F32, num_rows: num_tokens, row_bytes: 4, stride_bytes: 0 }, dbias);
    }
}

/// The gradients of the logits.
fn dlogits(cpu: &Cpu, gates: &Gates<&[u8]>, dg: Rows<&[u8]>, out: RowsMut<&mut [u8]>) {
    // The gate whose scale is 1 is the activation itself.
    let unscaled = Gates { scale: 1.0, g_dtype: gates.x.dtype, ..*gates };
    let RowsMut { stride_bytes, row_bytes, .. } = out;
    for_each_part(cpu, out, rows_per_part(cpu, gates.x.num_rows, gates.x.row_bytes), |first, chunk| {
        let num_rows = chunk.len().div_ceil(stride_bytes);
        let mut store = |i: usize, len: usize, s: &[f32]| {
            let mut values = [0.0; BATCH];
            let values = &mut values[..len];
            for (r, value) in values.iter_mut().enumerate() {
                convert::widen(cpu.level(), dg.dtype, dg.row(first + i + r), std::slice::from_mut(value));
            }
            elementwise::dlogits(cpu.level(), gates.x.dtype, gates.rounding, gates.scale, s, values);
            for (value, out) in values.iter().zip(chunk[i * stride_bytes..].chunks_mut(stride_bytes)) {
                out[..row_bytes].copy_from_slice(&value.to_le_bytes());
            }
        };
        match gates.activation {
            Activation::Sigmoid => for_each_batch(cpu, &unscaled, first, num_rows, |i, s| store(i, s.len(), s)),
            // The derivative is 1 whatever the logit: nothing of x is read.
            Activation::Linear => (0..num_rows).step_by(BATCH).for_each(|i| store(i, (num_rows - i).min(BATCH), &[])),
        }
    });
}

/// `out[t] = dlogit[t] * w`.
fn products(cpu: &Cpu, dlogit: &Rows<&[u8]>, w: &Rows<&[u8]>, out: RowsMut<&mut [u8]>) {
    let RowsMut { dtype, stride_bytes, row_bytes, .. } = out;
    for_each_part(cpu, out, rows_per_part(cpu, dlogit.num_rows, row_bytes), |first, chunk| {
        for (i, out) in chunk.chunks_mut(stride_bytes).enumerate() {
            let mut factor = [0.0];
            convert::widen(cpu.level(), DType::F32, dlogit.row(first + i), &mut factor);
            elementwise::product_row(cpu.level(), dtype, w.dtype, factor[0], w.row(0), &mut out[..row_bytes]);
        }
    });
}

/// `out[k]` = the sum over t of `dlogit[t] * x[t, k]`; `out` has one element to a row, without distance.
fn sums(cpu: &Cpu, dlogit: &Rows<&[u8]>, x: &Rows<&[u8]>, out: RowsMut<&mut [u8]>) {
    let RowsMut { dtype, stride_bytes: size, .. } = out;
    let num_columns = x.row_bytes / x.dtype.size();
    let per_part = rows_per_part(cpu, num_columns, x.num_rows * x.dtype.size()).next_multiple_of(BLOCK);
    for_each_part(cpu, out, per_part, |first, chunk| {
        for (block, out) in chunk.chunks_mut(BLOCK * size).enumerate() {
            let mut sums = [0.0; BLOCK];
            let sums = &mut sums[..out.len() / size];
            elementwise::column_sums(cpu.level(), dlogit, x, first + block * BLOCK, sums);
            convert::narrow(cpu.level(), dtype, sums, out);
        }
    });
}

/// Writes what was asked for.
pub(super) fn gate_mul_backward(cpu: &Cpu, call: GateMulBackward<'_, Cpu>) {
    let GateMulBackward { gates, s, dout, dg, ds } = call;
    if let Some(dg) = dg {
        let RowsMut { stride_bytes, row_bytes, .. } = dg;
        for_each_part(cpu, dg, rows_per_part(cpu, s.num_rows, 2 * s.row_bytes), |first, chunk| {
            for (t, out) in (first..).zip(chunk.chunks_mut(stride_bytes)) {
                let other = Rows { memory: dout.row(t), num_rows: 1, stride_bytes: dout.row_bytes, ..dout };
                let mut sum = [0.0];
                dot::dots(cpu.level(), &s, t, &other, &mut sum);
                out[..row_bytes].copy_from_slice(&sum[0].to_le_bytes());
            }
        });
    }
    if let Some(ds) = ds {
        forward::gate_mul::<false>(cpu, &gates, dout, ds);
    }
}
