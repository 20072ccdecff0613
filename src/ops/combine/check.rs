//! The validator of combine.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{ExpertRows, Input, Output, Sent};
use crate::ep::ExpertParallel;
use crate::ep::device::End;
use crate::error::{Error, Result};
use crate::ops::dispatch::{Arrival, Routing, Rows, aligned_matrix, filled, matrix, same_object};
use crate::space::Space;
use crate::tensor::{DType, TensorViewMut};

const OP: &str = "combine";

/// Rows that are known good, in memory `M`.
pub(super) struct Checked<M> {
    /// `None`: in place.
    pub y: Option<Rows<M>>,
    pub row_weights: Option<Rows<M>>,
}

/// Outputs that are known good.
pub(super) struct CheckedOutput<M> {
    pub out: Rows<M>,
    pub add_to: Option<(DType, Rows<M>)>,
    pub topk_weights: Option<Rows<M>>,
}

pub(super) fn input<'a, S: Space>(
    space: &S,
    ep: &ExpertParallel,
    routing: &Routing,
    arrival: &Arrival,
    input: &Input<'a>,
) -> Result<Checked<S::Read<'a>>> {
    let c = ep.config();
    same_object(ep, routing, OP)?;
    filled(routing, OP)?;
    if !Arc::ptr_eq(&arrival.lease.shared, &ep.shared) {
        return Err(Error::invalid(OP, "arrival", "of another object", "made by this object"));
    }
    if arrival.filled_by != routing.filled_by {
        let got = format!("of dispatch {}", arrival.filled_by);
        return Err(Error::invalid(OP, "arrival", got, format!("of the routing's dispatch {}", routing.filled_by)));
    }
    // What the caller has promised, as far as it can be seen here.
    if ep.shared.cuda().is_some_and(End::is_early) {
        let refused = |what, got| Err(Error::invalid(OP, what, got, "as the promise of Tuning::early says: rows in place, as they are"));
        match (&input.y, &input.row_weights) {
            (ExpertRows::InPlace, None) => {}
            (ExpertRows::Staged(_), _) => return refused("y", "staged"),
            (ExpertRows::InPlace, Some(_)) => return refused("row_weights", "weights to be folded"),
        }
    }
    // The host of a GPU does not know how many rows arrived.
    let rows = ep.shared.cuda().map_or_else(|| arrival.lease.counts().num_rows(), |_| ep.plan().max_rows);
    let y = match &input.y {
        ExpertRows::InPlace => None,
        ExpertRows::Staged(y) => Some(aligned_matrix(space, OP, "y", y, &[c.combine_dtype], rows, c.hidden)?),
    };
    let row_weights = match (&input.row_weights, c.fold_weights) {
        (None, false) => None,
        (Some(w), true) => Some(matrix(space, OP, "row_weights", w, &[DType::F32], rows, ep.plan().row_k)?),
        (None, true) => return Err(Error::invalid(OP, "row_weights", "None", "a tensor: the configuration has fold_weights")),
        (Some(_), false) => return Err(Error::invalid(OP, "row_weights", "a tensor", "None: the configuration has no fold_weights")),
    };
    Ok(Checked { y, row_weights })
}

pub(super) fn output<'a, S: Space>(
    space: &S,
    ep: &ExpertParallel,
    routing: &Routing,
    output: &'a Output<'_>,
) -> Result<CheckedOutput<S::Read<'a>>> {
    let c = ep.config();
    same_object(ep, routing, OP)?;
    filled(routing, OP)?;
    let tokens = routing.num_tokens();
    let out = aligned_matrix(space, OP, "out", &output.out.as_view(), &[c.combine_dtype], tokens, c.hidden)?;
    no_overlap("out", &output.out, tokens)?;
    let add_to = match &output.add_to {
        None => None,
        Some(add_to) => {
            let rows = aligned_matrix(space, OP, "add_to", add_to, &[c.combine_dtype, DType::F32], tokens, c.hidden)?;
            Some((add_to.dtype(), rows))
        }
    };
    let topk_weights = match (&output.topk_weights, c.fold_weights) {
        (None, _) => None,
        (Some(w), true) => {
            no_overlap("topk_weights", w, tokens)?;
            Some(matrix(space, OP, "topk_weights", &w.as_view(), &[DType::F32], tokens, c.k)?)
        }
        (Some(_), false) => {
            return Err(Error::invalid(OP, "topk_weights", "a tensor", "None: the configuration has no fold_weights"));
        }
    };
    Ok(CheckedOutput { out, add_to, topk_weights })
}

/// Rows that are written must not share bytes.
fn no_overlap(what: &str, view: &TensorViewMut<'_>, rows: usize) -> Result<()> {
    let (stride, columns) = (view.strides()[0], view.shape()[1]);
    if rows > 1 && stride < columns {
        return Err(Error::invalid(OP, format!("{what} row stride"), stride, format!("at least {columns} elements")));
    }
    Ok(())
}

pub(super) fn sent(ep: &ExpertParallel, routing: &Routing, sent: &Sent) -> Result<()> {
    if !Arc::ptr_eq(&sent.lease.shared, &ep.shared) || sent.filled_by != routing.filled_by {
        let got = format!("of dispatch {}", sent.filled_by);
        return Err(Error::invalid(OP, "sent", got, format!("of this object and the routing's dispatch {}", routing.filled_by)));
    }
    Ok(())
}
