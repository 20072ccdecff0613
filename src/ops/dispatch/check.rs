//! The validator of dispatch and replay.
#![forbid(unsafe_code)]

use super::{Input, NumTokens, Outputs, Payload, Routing, Sent};
use crate::ep::signal::Kind;
use crate::ep::{ExpertParallel, ROW_ALIGN};
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorView};

/// Rows of bytes at a fixed distance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    stride_bytes: usize,
}

impl<'a> Rows<'a> {
    pub const EMPTY: Self = Rows { bytes: &[], row_bytes: 0, stride_bytes: 0 };

    /// Row `i`.
    pub fn row(&self, i: usize) -> &'a [u8] {
        &self.bytes[i * self.stride_bytes..][..self.row_bytes]
    }
}

/// A dispatch that is known good.
pub(super) struct Checked<'a> {
    pub payload: CheckedPayload<'a>,
    pub topk_idx: Rows<'a>,
    pub topk_idx_dtype: DType,
    pub topk_weights: Option<Rows<'a>>,
    /// Tokens of this call; may be above `max_tokens`, which all ranks must learn.
    pub num_tokens: usize,
}

/// Rows and scales that are known good.
#[derive(Clone, Copy)]
pub(super) struct CheckedPayload<'a> {
    pub x: Rows<'a>,
    pub scales: Rows<'a>,
}

/// A matrix of at least `rows` rows of `columns` elements of one of `dtypes`.
pub(crate) fn matrix<'a>(
    op: &'static str,
    what: &str,
    view: &TensorView<'a>,
    dtypes: &[DType],
    rows: usize,
    columns: usize,
) -> Result<Rows<'a>> {
    if !dtypes.contains(&view.dtype()) {
        let want = dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
        return Err(Error::invalid(op, format!("{what} dtype"), view.dtype(), want));
    }
    match *view.shape() {
        [r, c] if r >= rows && c == columns => {}
        _ => return Err(Error::invalid(op, format!("{what} shape"), format!("{:?}", view.shape()), format!("[{rows}, {columns}]"))),
    }
    let size = view.dtype().size();
    Ok(Rows { bytes: view.host(op, what)?, row_bytes: columns * size, stride_bytes: view.strides()[0] * size })
}

/// As [`matrix`], with rows at multiples of 16 bytes: what vectors and bulk copies of every backend need.
pub(crate) fn aligned_matrix<'a>(
    op: &'static str,
    what: &str,
    view: &TensorView<'a>,
    dtypes: &[DType],
    rows: usize,
    columns: usize,
) -> Result<Rows<'a>> {
    let m = matrix(op, what, view, dtypes, rows, columns)?;
    if rows > 0 && !m.bytes.as_ptr().addr().is_multiple_of(ROW_ALIGN) {
        let got = format!("{:#x}", m.bytes.as_ptr().addr());
        return Err(Error::invalid(op, format!("{what} address"), got, format!("a multiple of {ROW_ALIGN}")));
    }
    if rows > 1 && !m.stride_bytes.is_multiple_of(ROW_ALIGN) {
        return Err(Error::invalid(
            op,
            format!("{what} row stride"),
            format!("{} bytes", m.stride_bytes),
            format!("a multiple of {ROW_ALIGN}"),
        ));
    }
    Ok(m)
}

const OP: &str = "dispatch";

pub(super) fn input<'a>(ep: &ExpertParallel, routing: &Routing, input: &Input<'a>) -> Result<Checked<'a>> {
    let c = ep.config();
    same_object(ep, routing, OP)?;
    let [rows, _] = *input.x.shape() else {
        return Err(Error::invalid(OP, "x shape", format!("{:?}", input.x.shape()), format!("[T, {}]", c.hidden)));
    };
    let num_tokens = match input.num_tokens {
        NumTokens::All => rows,
        NumTokens::Host(n) => n,
        NumTokens::Device(view) => device_count(&view)?,
    };
    if num_tokens > rows && num_tokens <= c.max_tokens {
        return Err(Error::invalid(OP, "num_tokens", num_tokens, format!("at most the rows of x, {rows}")));
    }
    // A call above max_tokens sends nothing; its views only need to be well-formed.
    let checked_rows = if num_tokens > c.max_tokens { num_tokens.min(rows) } else { num_tokens };
    let payload = payload_rows(ep, OP, &input.x, input.scales.as_ref(), checked_rows)?;
    let topk_idx = matrix(OP, "topk_idx", &input.topk_idx, &[DType::I32, DType::I64], checked_rows, c.k)?;
    let weights = input.topk_weights.as_ref();
    let topk_weights = weights.map(|w| matrix(OP, "topk_weights", w, &[DType::F32], checked_rows, c.k)).transpose()?;
    Ok(Checked { payload, topk_idx, topk_idx_dtype: input.topk_idx.dtype(), topk_weights, num_tokens })
}

pub(super) fn payload<'a>(ep: &ExpertParallel, routing: &Routing, payload: &Payload<'a>) -> Result<CheckedPayload<'a>> {
    const OP: &str = "replay";
    same_object(ep, routing, OP)?;
    filled(routing, OP)?;
    payload_rows(ep, OP, &payload.x, payload.scales.as_ref(), routing.num_tokens())
}

fn payload_rows<'a>(
    ep: &ExpertParallel,
    op: &'static str,
    x: &TensorView<'a>,
    scales: Option<&TensorView<'a>>,
    rows: usize,
) -> Result<CheckedPayload<'a>> {
    let c = ep.config();
    let x = aligned_matrix(op, "x", x, &[c.dtype], rows, c.hidden)?;
    let scales = match (scales, c.scale_bytes) {
        (None, 0) => Rows::EMPTY,
        (None, n) => return Err(Error::invalid(op, "scales", "None", format!("[T, {n}] bytes (scale_bytes)"))),
        (Some(_), 0) => return Err(Error::invalid(op, "scales", "a tensor", "None: the configuration has no scale_bytes")),
        (Some(view), n) => {
            let size = view.dtype().size();
            let columns = if n.is_multiple_of(size) { n / size } else { usize::MAX };
            matrix(op, "scales", view, &[DType::Bytes, DType::E8M0, DType::F32, DType::U32], rows, columns)?
        }
    };
    Ok(CheckedPayload { x, scales })
}

fn device_count(view: &TensorView<'_>) -> Result<usize> {
    if view.dtype() != DType::U32 || view.shape() != [1] {
        let got = format!("{} {:?}", view.dtype(), view.shape());
        return Err(Error::invalid(OP, "num_tokens", got, "u32 [1]"));
    }
    let bytes = view.host(OP, "num_tokens")?;
    Ok(bytes[..4].iter().rev().fold(0, |n, &b| n << 8 | usize::from(b)))
}

pub(super) fn outputs(ep: &ExpertParallel, outputs: &Outputs<'_>) -> Result<()> {
    let local = ep.num_local_experts();
    let lengths = [
        ("expert_statistics", outputs.expert_statistics.as_ref().map(|s| s.len())),
        ("counts_host", outputs.counts_host.as_ref().map(|s| s.len())),
    ];
    for (what, length) in lengths {
        if length.is_some_and(|n| n != local) {
            return Err(Error::invalid(OP, what, format!("{} entries", length.unwrap_or(0)), format!("{local}, one per local expert")));
        }
    }
    Ok(())
}

/// The routing was made for an object like this one.
pub(crate) fn same_object(ep: &ExpertParallel, routing: &Routing, op: &'static str) -> Result<()> {
    if routing.rank != ep.rank() || routing.config != *ep.config() {
        let got = format!("of rank {} and another configuration", routing.rank);
        return Err(Error::invalid(op, "routing", got, format!("made by Routing::new for rank {} and this configuration", ep.rank())));
    }
    Ok(())
}

/// The routing holds a call.
pub(crate) fn filled(routing: &Routing, op: &'static str) -> Result<()> {
    match routing.filled_by {
        0 => Err(Error::invalid(op, "routing", "empty", "filled by a dispatch")),
        _ => Ok(()),
    }
}

pub(super) fn sent(routing: &Routing, sent: &Sent, kind: Kind) -> Result<()> {
    if sent.filled_by != routing.filled_by || sent.kind != kind {
        let got = format!("of dispatch {} by {:?}", sent.filled_by, sent.kind);
        return Err(Error::invalid(OP, "sent", got, format!("of the routing's dispatch {} by {kind:?}", routing.filled_by)));
    }
    Ok(())
}
