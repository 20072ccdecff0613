//! What a rank received, as values on the host.

use std::borrow::Cow;

use super::cpu::{local_id, record_scales};
use super::record::Reader;
use crate::ep::object::{Counts, Shared};
use crate::ep::{IdSpace, Layout};
use crate::id::{Rank, Slot, Token};

/// What a rank received, as values on the host: of a CPU rank its memory itself, of a GPU rank a copy.
#[derive(Debug)]
pub struct Received<'a> {
    pub(super) shared: &'a Shared,
    pub(super) counts: Cow<'a, Counts>,
    /// The region of rows, as far as rows are valid.
    pub(super) x: Cow<'a, [u8]>,
    /// The region of records, as far as rows are valid.
    pub(super) records: Cow<'a, [u8]>,
}

impl Received<'_> {
    /// Valid rows. `ByToken`: received rows. `ByExpert`: `segment_start[L]`, padding included. `ByExpertFixed`: `L * rows_per_expert`.
    pub fn num_rows(&self) -> usize {
        self.counts.num_rows[0] as usize
    }

    /// Rows of each local expert `[L]`; `ByToken`: how many rows have a route to it.
    pub fn num_rows_per_expert(&self) -> &[u32] {
        &self.counts.num_rows_per_expert
    }

    /// Expert layouts: first slot of each segment and, last, the end `[L + 1]`. `ByToken`: empty.
    pub fn segment_start(&self) -> &[u32] {
        &self.counts.segment_start
    }

    /// Rows dropped at this rank.
    pub fn num_dropped(&self) -> usize {
        self.counts.num_dropped
    }

    /// The bytes of one row; empty for a slot without a row of this call.
    pub fn row(&self, slot: Slot) -> &[u8] {
        let row_bytes = self.shared.plan.row_bytes;
        let at = slot.index().saturating_mul(row_bytes);
        self.x.get(at..at.saturating_add(row_bytes)).unwrap_or(&[])
    }

    /// The metadata of a row. A slot that holds no row of this call has no source, ids or weights.
    pub fn metadata(&self, slot: Slot) -> Metadata<'_> {
        if !self.is_row(slot) {
            return Metadata { source: None, topk_idx: &[], topk_weights: &[] };
        }
        let record = self.record(slot.index());
        let (rank, token) = record.source();
        let source = (rank >= 0).then_some((Rank(rank as u32), Token(token as u32)));
        Metadata { source, topk_idx: record.ids(), topk_weights: record.weights() }
    }

    /// Whether a slot holds a row of this call, padding included.
    pub(super) fn is_row(&self, slot: Slot) -> bool {
        match self.shared.config.layout {
            Layout::ByExpertFixed { rows_per_expert } => {
                let count = self.num_rows_per_expert().get(slot.index() / rows_per_expert);
                count.is_some_and(|&n| slot.index() % rows_per_expert < n as usize)
            }
            _ => slot.index() < self.num_rows(),
        }
    }

    pub(super) fn record(&self, slot: usize) -> Reader<'_> {
        let plan = &self.shared.plan;
        Reader::new(&self.records[slot * plan.record_bytes..][..plan.record_bytes], plan.row_k)
    }

    /// The scale bytes of a row, when they are in its record.
    pub fn scales(&self, slot: Slot) -> &[u8] {
        let plan = &self.shared.plan;
        match record_scales(self.shared) {
            Some(offset) if self.is_row(slot) => &self.records[slot.index() * plan.record_bytes + offset..][..plan.scale_bytes],
            _ => &[],
        }
    }

    /// The local experts of a row's routes.
    pub(super) fn local_experts(&self, slot: usize) -> impl Iterator<Item = usize> {
        let shared = self.shared;
        self.record(slot).ids().iter().filter(|&&id| id >= 0).filter_map(move |&id| match shared.config.id_space {
            IdSpace::Local => Some(id as usize),
            IdSpace::Global if shared.plan.placement.owners()[id as usize] == shared.member.rank() => Some(local_id(shared, id) as usize),
            IdSpace::Global => None,
        })
    }
}

/// The metadata record of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metadata<'a> {
    /// Where the row came from; `None` for a padding row (recorded as rank -1, token -1).
    pub source: Option<(Rank, Token)>,
    /// Ids of its routes `[row_k]`.
    pub topk_idx: &'a [i32],
    /// Weights of its routes `[row_k]`; 0 where masked.
    pub topk_weights: &'a [f32],
}
