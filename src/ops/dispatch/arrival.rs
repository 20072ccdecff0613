//! The rows that a rank received.

use super::cpu::{local_id, record_scales};
use super::record::Reader;
use crate::ep::object::Lease;
use crate::ep::{IdSpace, Layout};
use crate::error::{Error, Result};
use crate::id::{Rank, Slot, Token};
use crate::tensor::{DType, Layout as Strides, TensorView, TensorViewMut};

/// The lease of a bank, with views of what arrived in it. `combine` consumes it; dropping it gives the bank back.
#[derive(Debug)]
pub struct Arrival {
    pub(crate) lease: Lease,
    /// Epoch of the dispatch that made its routing.
    pub(crate) filled_by: u64,
}

impl Arrival {
    /// All rows of the lease's bank are complete and this rank's alone.
    pub(super) fn new(lease: Lease, filled_by: u64) -> Self {
        Arrival { lease, filled_by }
    }

    /// Valid rows. `ByToken`: received rows. `ByExpert`: `segment_start[L]`, padding included. `ByExpertFixed`: `L * rows_per_expert`.
    pub fn num_rows(&self) -> usize {
        self.lease.counts().num_rows
    }

    /// Rows of each local expert `[L]`; `ByToken`: how many rows have a route to it.
    pub fn num_rows_per_expert(&self) -> &[u32] {
        &self.lease.counts().num_rows_per_expert
    }

    /// Expert layouts: first slot of each segment and, last, the end `[L + 1]`. `ByToken`: empty.
    pub fn segment_start(&self) -> &[u32] {
        &self.lease.counts().segment_start
    }

    /// Rows dropped at this rank.
    pub fn num_dropped(&self) -> usize {
        self.lease.counts().num_dropped
    }

    /// Received rows `[max_rows, H]` (`ByExpertFixed`: `[L, rows_per_expert, H]`).
    pub fn x(&self) -> TensorView<'_> {
        let plan = &self.lease.shared.plan;
        let hidden = plan.row_bytes / plan.row_dtype.size();
        let bytes = self.region(plan.regions.x, plan.max_rows * plan.row_bytes);
        let view = match self.lease.shared.config.layout {
            Layout::ByExpertFixed { rows_per_expert } => {
                let local = self.num_rows_per_expert().len();
                TensorView::from_bytes(
                    &bytes[..local * rows_per_expert * plan.row_bytes],
                    plan.row_dtype,
                    &[local, rows_per_expert, hidden],
                )
            }
            _ => TensorView::from_bytes(bytes, plan.row_dtype, &[plan.max_rows, hidden]),
        };
        view.expect("the plan made the region for this shape")
    }

    /// The bytes of one row; empty for a slot beyond the buffer.
    pub fn row(&self, slot: Slot) -> &[u8] {
        let plan = &self.lease.shared.plan;
        if slot.index() >= plan.max_rows {
            return &[];
        }
        &self.region(plan.regions.x, plan.max_rows * plan.row_bytes)[slot.index() * plan.row_bytes..][..plan.row_bytes]
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
    fn is_row(&self, slot: Slot) -> bool {
        match self.lease.shared.config.layout {
            Layout::ByExpertFixed { rows_per_expert } => {
                let count = self.num_rows_per_expert().get(slot.index() / rows_per_expert);
                count.is_some_and(|&n| slot.index() % rows_per_expert < n as usize)
            }
            _ => slot.index() < self.num_rows(),
        }
    }

    /// Scale bytes of all rows: row-major `[max_rows, S]`, strided inside the records, or the column-major words
    /// `[groups, ceil(S / 4), aligned rows]` as `u32`. `None` without scales.
    pub fn scales(&self) -> Option<TensorView<'_>> {
        let plan = &self.lease.shared.plan;
        let view = if plan.has_column_scales() {
            let shape = [plan.scale_groups, plan.scale_bytes.div_ceil(4), plan.scale_rows];
            TensorView::from_bytes(self.region(plan.regions.scales, shape.iter().product::<usize>() * 4), DType::U32, &shape)
        } else {
            let offset = record_scales(&self.lease.shared)?;
            let bytes = self.region(plan.regions.records, plan.max_rows * plan.record_bytes);
            Strides::strided("arrival", DType::Bytes, &[plan.max_rows, plan.scale_bytes], &[plan.record_bytes, 1])
                .and_then(|strides| TensorView::new(&bytes[offset..], strides))
        };
        Some(view.expect("the plan made the region for this shape"))
    }

    /// Unpacks the records of the rows in `0..num_rows`: source `i32 [rows, 2]`, ids `i32 [rows, row_k]`, weights `f32 [rows, row_k]`. `row_k` is
    /// K for `ByToken` and 1 in the expert layouts. Slots without a row (`ByExpertFixed`) give -1, -1 and 0.
    ///
    /// # Errors
    /// `Invalid` when a slice is too short; nothing is written then.
    pub fn contiguous_metadata(&self, source: &mut [i32], topk_idx: &mut [i32], topk_weights: &mut [f32]) -> Result<()> {
        let row_k = self.lease.shared.plan.row_k;
        let rows = self.num_rows();
        for (what, got, want) in [
            ("source", source.len(), 2 * rows),
            ("topk_idx", topk_idx.len(), row_k * rows),
            ("topk_weights", topk_weights.len(), row_k * rows),
        ] {
            if got < want {
                return Err(Error::invalid("contiguous_metadata", what, format!("{got} entries"), format!("at least {want}")));
            }
        }
        for slot in 0..rows {
            let (ids, weights) = (&mut topk_idx[slot * row_k..][..row_k], &mut topk_weights[slot * row_k..][..row_k]);
            let to = &mut source[2 * slot..][..2];
            if self.is_row(Slot(slot as u32)) {
                let record = self.record(slot);
                to.copy_from_slice(&[record.source().0, record.source().1]);
                ids.copy_from_slice(record.ids());
                weights.copy_from_slice(record.weights());
            } else {
                to.fill(-1);
                ids.fill(-1);
                weights.fill(0.0);
            }
        }
        Ok(())
    }

    /// `ByToken`: for grouped GEMMs that gather. Fills `gather_idx` with the slots of the rows of each local expert, ascending, each segment
    /// padded to a multiple of `align` with -1, and `segment_start` `[L + 1]`; returns the entries used.
    ///
    /// # Errors
    /// `Invalid` for another layout, an `align` of 0, or a slice that is too short; nothing is written then.
    pub fn gather_idx(&self, align: usize, gather_idx: &mut [i32], segment_start: &mut [u32]) -> Result<usize> {
        const OP: &str = "gather_idx";
        let shared = &self.lease.shared;
        if shared.config.layout != Layout::ByToken {
            return Err(Error::invalid(OP, "layout", format!("{:?}", shared.config.layout), "ByToken"));
        }
        let counts = self.num_rows_per_expert();
        let padded = |n: u32| (n as usize).checked_next_multiple_of(align).filter(|_| align > 0);
        let total = counts.iter().try_fold(0usize, |sum, &n| sum.checked_add(padded(n)?)).filter(|&n| n <= u32::MAX as usize);
        let Some(total) = total else {
            return Err(Error::invalid(OP, "align", align, "at least 1, and segments that fit 32 bits"));
        };
        if segment_start.len() != counts.len() + 1 {
            let want = format!("{}, one per local expert and one", counts.len() + 1);
            return Err(Error::invalid(OP, "segment_start", format!("{} entries", segment_start.len()), want));
        }
        if gather_idx.len() < total {
            return Err(Error::invalid(OP, "gather_idx", format!("{} entries", gather_idx.len()), format!("at least {total}")));
        }
        let mut start = 0;
        for (l, &n) in counts.iter().enumerate() {
            segment_start[l] = start as u32;
            start += padded(n).unwrap_or(0);
        }
        segment_start[counts.len()] = start as u32;
        gather_idx[..total].fill(-1);
        // segment_start doubles as the cursor of each segment, and is put back afterwards.
        for slot in 0..self.num_rows() {
            for &id in self.record(slot).ids().iter().filter(|&&id| id >= 0) {
                let local = match shared.config.id_space {
                    IdSpace::Local => id,
                    IdSpace::Global if shared.plan.placement.owners()[id as usize] == shared.member.rank() => local_id(shared, id),
                    IdSpace::Global => continue,
                };
                let cursor = &mut segment_start[local as usize];
                gather_idx[*cursor as usize] = slot as i32;
                *cursor += 1;
            }
        }
        for (start, &n) in segment_start.iter_mut().zip(counts) {
            *start -= n;
        }
        Ok(total)
    }

    /// The rows that experts write for a zero-copy combine: `[max_rows, H]` of the combine type.
    pub fn expert_output(&mut self) -> TensorViewMut<'_> {
        let config = &self.lease.shared.config;
        let shape = [self.lease.shared.plan.max_rows, config.hidden];
        let dtype = config.combine_dtype;
        TensorViewMut::from_bytes(self.parts().1, dtype, &shape).expect("the plan made the region for this shape")
    }

    /// The received rows and, beside them, the rows that experts write: both as bytes of `max_rows` rows.
    pub fn parts(&mut self) -> (&[u8], &mut [u8]) {
        let shared = &self.lease.shared;
        let plan = &shared.plan;
        let memory = &shared.mine().bytes;
        let (x, y) = (self.lease.at(plan.regions.x), self.lease.at(plan.regions.expert_output));
        // SAFETY: as in `region`; the two regions do not overlap.
        let rows = unsafe { memory.bytes(x, plan.max_rows * plan.row_bytes) };
        // SAFETY: peers read what experts write only between this rank's ready word of a combine and their next counts; the arrival is consumed
        // before the first and the bank is leased again after the second (steps 8 to 10). `&mut self` excludes other borrows here.
        let output = unsafe { memory.bytes_mut(y, plan.max_rows * plan.expert_row_bytes) };
        (rows, output)
    }

    fn region(&self, region: usize, len: usize) -> &[u8] {
        // SAFETY: peers write this bank only between this rank's counts that name it and their done word, which this rank has waited for; it
        // posts no counts for the bank while the lease lives (steps 2 to 7).
        unsafe { self.lease.shared.mine().bytes.bytes(self.lease.at(region), len) }
    }

    fn record(&self, slot: usize) -> Reader<'_> {
        let plan = &self.lease.shared.plan;
        let bytes = self.region(plan.regions.records, plan.max_rows * plan.record_bytes);
        Reader::new(&bytes[slot * plan.record_bytes..][..plan.record_bytes], plan.row_k)
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
