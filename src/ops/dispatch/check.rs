//! The validator of dispatch and replay.
#![forbid(unsafe_code)]

use super::{Input, NumTokens, Outputs, Payload, Routing, Sent};
use crate::ep::signal::Kind;
use crate::ep::{ExpertParallel, ROW_ALIGN};
use crate::error::{Error, Result};
use crate::space::Space;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

/// Rows at a fixed distance, in the memory of a space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<M> {
    pub memory: M,
    pub row_bytes: usize,
    pub stride_bytes: usize,
}

impl<'a> Rows<&'a [u8]> {
    /// Row `i`.
    pub fn row(&self, i: usize) -> &'a [u8] {
        &self.memory[i * self.stride_bytes..][..self.row_bytes]
    }
}

/// A dispatch that is known good, its tensors in memory `M`.
pub(super) struct Checked<M> {
    pub payload: CheckedPayload<M>,
    pub topk_idx: Rows<M>,
    pub topk_idx_dtype: DType,
    pub topk_weights: Option<Rows<M>>,
    /// Tokens of this call; may be above `max_tokens`, which all ranks must learn. With a count that only the device can read: the rows of x.
    pub num_tokens: usize,
    /// Where that count is.
    pub device_tokens: Option<M>,
}

/// Rows and scales that are known good.
#[derive(Clone, Copy)]
pub(super) struct CheckedPayload<M> {
    pub x: Rows<M>,
    /// Rows of x that may be read.
    pub x_rows: usize,
    pub scales: Option<Rows<M>>,
}

/// A matrix of at least `rows` rows of `columns` elements of one of `dtypes`.
pub(crate) fn matrix<'a, S: Space>(
    space: &S,
    op: &'static str,
    what: &str,
    view: &TensorView<'a>,
    dtypes: &[DType],
    rows: usize,
    columns: usize,
) -> Result<Rows<S::Read<'a>>> {
    let (row_bytes, stride_bytes) = shape(op, what, view.layout(), dtypes, rows, columns)?;
    Ok(Rows { memory: space.read(op, what, *view)?, row_bytes, stride_bytes })
}

/// As [`matrix`], with rows at multiples of 16 bytes: what vectors and bulk copies of every backend need.
pub(crate) fn aligned_matrix<'a, S: Space>(
    space: &S,
    op: &'static str,
    what: &str,
    view: &TensorView<'a>,
    dtypes: &[DType],
    rows: usize,
    columns: usize,
) -> Result<Rows<S::Read<'a>>> {
    let m = matrix(space, op, what, view, dtypes, rows, columns)?;
    let address = S::address(m.memory);
    if rows > 0 && !address.is_multiple_of(ROW_ALIGN as u64) {
        return Err(Error::invalid(op, format!("{what} address"), format!("{address:#x}"), format!("a multiple of {ROW_ALIGN}")));
    }
    if rows > 1 && !m.stride_bytes.is_multiple_of(ROW_ALIGN) {
        let (got, want) = (format!("{} bytes", m.stride_bytes), format!("a multiple of {ROW_ALIGN}"));
        return Err(Error::invalid(op, format!("{what} row stride"), got, want));
    }
    Ok(m)
}

/// Bytes of a row, and from one to the next.
fn shape(op: &'static str, what: &str, layout: &Layout, dtypes: &[DType], rows: usize, columns: usize) -> Result<(usize, usize)> {
    if !dtypes.contains(&layout.dtype()) {
        let want = dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
        return Err(Error::invalid(op, format!("{what} dtype"), layout.dtype(), want));
    }
    match *layout.shape() {
        [r, c] if r >= rows && c == columns => {}
        _ => return Err(Error::invalid(op, format!("{what} shape"), format!("{:?}", layout.shape()), format!("[{rows}, {columns}]"))),
    }
    let size = layout.dtype().size();
    Ok((columns * size, layout.strides()[0] * size))
}

const OP: &str = "dispatch";

pub(super) fn input<'a, S: Space>(space: &S, ep: &ExpertParallel, routing: &Routing, input: &Input<'a>) -> Result<Checked<S::Read<'a>>> {
    let c = ep.config();
    same_object(ep, routing, OP)?;
    let [rows, _] = *input.x.shape() else {
        return Err(Error::invalid(OP, "x shape", format!("{:?}", input.x.shape()), format!("[T, {}]", c.hidden)));
    };
    let (num_tokens, device_tokens) = match input.num_tokens {
        NumTokens::All => (rows, None),
        NumTokens::Host(n) => (n, None),
        NumTokens::Device(view) => {
            let memory = device_count(space, view)?;
            S::number(memory).map_or((rows, Some(memory)), |n| (n as usize, None))
        }
    };
    if num_tokens > rows && num_tokens <= c.max_tokens {
        return Err(Error::invalid(OP, "num_tokens", num_tokens, format!("at most the rows of x, {rows}")));
    }
    // A call above max_tokens sends nothing; its views only need to be well-formed.
    let checked_rows = if num_tokens > c.max_tokens { num_tokens.min(rows) } else { num_tokens };
    let payload = payload_rows(space, ep, OP, &input.x, input.scales.as_ref(), checked_rows)?;
    let topk_idx = matrix(space, OP, "topk_idx", &input.topk_idx, &[DType::I32, DType::I64], checked_rows, c.k)?;
    let weights = input.topk_weights.as_ref();
    let topk_weights = weights.map(|w| matrix(space, OP, "topk_weights", w, &[DType::F32], checked_rows, c.k)).transpose()?;
    Ok(Checked { payload, topk_idx, topk_idx_dtype: input.topk_idx.dtype(), topk_weights, num_tokens, device_tokens })
}

pub(super) fn payload<'a, S: Space>(
    space: &S,
    ep: &ExpertParallel,
    routing: &Routing,
    payload: &Payload<'a>,
) -> Result<CheckedPayload<S::Read<'a>>> {
    const OP: &str = "replay";
    same_object(ep, routing, OP)?;
    filled(routing, OP)?;
    payload_rows(space, ep, OP, &payload.x, payload.scales.as_ref(), routing.num_tokens())
}

fn payload_rows<'a, S: Space>(
    space: &S,
    ep: &ExpertParallel,
    op: &'static str,
    x: &TensorView<'a>,
    scales: Option<&TensorView<'a>>,
    rows: usize,
) -> Result<CheckedPayload<S::Read<'a>>> {
    let c = ep.config();
    let x_rows = x.shape().first().copied().unwrap_or(0);
    let x = aligned_matrix(space, op, "x", x, &[c.dtype], rows, c.hidden)?;
    let scales = match (scales, c.scale_bytes) {
        (None, 0) => None,
        (None, n) => return Err(Error::invalid(op, "scales", "None", format!("[T, {n}] bytes (scale_bytes)"))),
        (Some(_), 0) => return Err(Error::invalid(op, "scales", "a tensor", "None: the configuration has no scale_bytes")),
        (Some(view), n) => {
            let size = view.dtype().size();
            let columns = if n.is_multiple_of(size) { n / size } else { usize::MAX };
            Some(matrix(space, op, "scales", view, &[DType::Bytes, DType::E8M0, DType::F32, DType::U32], rows, columns)?)
        }
    };
    Ok(CheckedPayload { x, x_rows, scales })
}

fn device_count<'a, S: Space>(space: &S, view: TensorView<'a>) -> Result<S::Read<'a>> {
    if view.dtype() != DType::U32 || view.shape() != [1] {
        let got = format!("{} {:?}", view.dtype(), view.shape());
        return Err(Error::invalid(OP, "num_tokens", got, "u32 [1]"));
    }
    space.read(OP, "num_tokens", view)
}

/// Shapes and types; where the tensors must lie is the backend's to say.
pub(super) fn outputs(ep: &ExpertParallel, outputs: &Outputs<'_>) -> Result<()> {
    let local = ep.num_local_experts();
    let of = |what: &str, view: &Option<TensorViewMut<'_>>, dtype: DType| match view {
        Some(view) if view.dtype() != dtype => Err(Error::invalid(OP, format!("{what} dtype"), view.dtype(), dtype)),
        Some(view) if view.shape() != [local] => {
            let want = format!("[{local}], an entry per local expert");
            Err(Error::invalid(OP, format!("{what} shape"), format!("{:?}", view.shape()), want))
        }
        _ => Ok(()),
    };
    of("expert_statistics", &outputs.expert_statistics, DType::I64)?;
    of("counts_host", &outputs.counts_host, DType::U32)?;
    let on_host = |what: &str, view: &Option<TensorViewMut<'_>>| match view.as_ref().and_then(TensorViewMut::device) {
        Some(at) => Err(Error::invalid(OP, what, format!("at {:#x} of device {}", at.address, at.device), "in host memory")),
        None => Ok(()),
    };
    on_host("counts_host", &outputs.counts_host)?;
    match ep.shared.cuda() {
        None => on_host("expert_statistics", &outputs.expert_statistics),
        Some(_) => Ok(()),
    }
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
