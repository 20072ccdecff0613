//! The rows that a rank received, where they are.

use std::borrow::Cow;

use super::cpu::record_scales;
use super::cuda;
use super::received::Received;
use super::record::{WEIGHTS_BEHIND, ids_offset};
use crate::ep::Layout;
use crate::ep::object::Lease;
use crate::error::{Error, Result};
use crate::id::Slot;
use crate::tensor::{DType, DeviceAddress, Layout as Strides, TensorView, TensorViewMut};

/// The lease of a bank, with views of what arrived in it, in the memory of the backend. `combine` consumes it; dropping it gives the bank back.
///
/// On a GPU what the views show is there when the stream has come to it. [`on_host`](Self::on_host) waits, and gives values.
#[derive(Debug)]
pub struct Arrival {
    pub(crate) lease: Lease,
    /// Epoch of the dispatch that made its routing.
    pub(crate) filled_by: u64,
}

/// Why a view of a region cannot fail.
const PLANNED: &str = "the plan made the region for this shape";

impl Arrival {
    /// All rows of the lease's bank are complete and this rank's alone (on a GPU: for the stream).
    pub(super) fn new(lease: Lease, filled_by: u64) -> Self {
        Arrival { lease, filled_by }
    }

    /// Valid rows `u32 [1]`. `ByToken`: received rows. `ByExpert`: `segment_start[L]`, padding included. `ByExpertFixed`: `L * rows_per_expert`.
    pub fn num_rows(&self) -> TensorView<'_> {
        match self.lease.shared.cuda() {
            None => TensorView::from_slice(&self.lease.counts().num_rows, &[1]).expect(PLANNED),
            Some(cuda) => self.own(cuda.num_rows(self.lease.bank), &[1]),
        }
    }

    /// Rows of each local expert `u32 [L]`; `ByToken`: how many rows have a route to it.
    ///
    /// # Errors
    /// On a GPU `ByToken` counts when it is asked first; the errors of a launch.
    pub fn num_rows_per_expert(&self) -> Result<TensorView<'_>> {
        let shared = &self.lease.shared;
        let local = shared.plan.placement.num_local(shared.member.rank());
        match shared.cuda() {
            None => TensorView::from_slice(&self.lease.counts().num_rows_per_expert, &[local]),
            Some(cuda) => {
                cuda::count_rows_per_expert(self)?;
                Ok(self.own(cuda.num_rows_per_expert(self.lease.bank), &[local]))
            }
        }
    }

    /// Expert layouts: first slot of each segment and, last, the end `u32 [L + 1]`. `ByToken`: empty.
    pub fn segment_start(&self) -> TensorView<'_> {
        let shared = &self.lease.shared;
        let local = shared.plan.placement.num_local(shared.member.rank());
        let len = if shared.config.layout.is_by_expert() { local + 1 } else { 0 };
        match shared.cuda() {
            None => TensorView::from_slice(&self.lease.counts().segment_start, &[len]).expect(PLANNED),
            Some(cuda) => self.own(cuda.segment_start(self.lease.bank), &[len]),
        }
    }

    /// Received rows `[max_rows, H]` (`ByExpertFixed`: `[L, rows_per_expert, H]`).
    pub fn x(&self) -> TensorView<'_> {
        let plan = &self.lease.shared.plan;
        let hidden = plan.row_bytes / plan.row_dtype.size();
        let local = plan.placement.num_local(self.lease.shared.member.rank());
        let layout = match self.lease.shared.config.layout {
            Layout::ByExpertFixed { rows_per_expert } => Strides::contiguous("arrival", plan.row_dtype, &[local, rows_per_expert, hidden]),
            _ => Strides::contiguous("arrival", plan.row_dtype, &[plan.max_rows, hidden]),
        };
        self.view(plan.regions.x, layout.expect(PLANNED))
    }

    /// Source rank and token of each row `i32 [max_rows, 2]`; -1 and -1 for padding.
    pub fn source(&self) -> TensorView<'_> {
        self.record_view(0, DType::I32, 2)
    }

    /// Expert ids of each row `i32 [max_rows, row_k]`, global or local as configured, -1 where masked. `row_k` is K for `ByToken`, else 1.
    pub fn topk_idx(&self) -> TensorView<'_> {
        self.record_view(ids_offset(), DType::I32, self.lease.shared.plan.row_k)
    }

    /// Router weights of each row `f32 [max_rows, row_k]`, 0 where masked.
    pub fn topk_weights(&self) -> TensorView<'_> {
        let row_k = self.lease.shared.plan.row_k;
        self.record_view(ids_offset() + WEIGHTS_BEHIND * row_k, DType::F32, row_k)
    }

    /// Fields of the records, a record apart.
    fn record_view(&self, offset: usize, dtype: DType, columns: usize) -> TensorView<'_> {
        let plan = &self.lease.shared.plan;
        let strides = [plan.record_bytes / dtype.size(), 1];
        let layout = Strides::strided("arrival", dtype, &[plan.max_rows, columns], &strides).expect(PLANNED);
        self.view(plan.regions.records + offset, layout)
    }

    /// Scale bytes of all rows: row-major `[max_rows, S]`, strided inside the records, or the column-major words
    /// `[groups, ceil(S / 4), aligned rows]` as `u32`. `None` without scales.
    pub fn scales(&self) -> Option<TensorView<'_>> {
        let plan = &self.lease.shared.plan;
        if plan.has_column_scales() {
            let shape = [plan.scale_groups, plan.scale_bytes.div_ceil(4), plan.scale_rows];
            return Some(self.view(plan.regions.scales, Strides::contiguous("arrival", DType::U32, &shape).expect(PLANNED)));
        }
        Some(self.record_view(record_scales(&self.lease.shared)?, DType::Bytes, plan.scale_bytes))
    }

    /// Everything as values on the host. On a GPU it waits for the object's stream and copies; that is for tests, for finding errors, and for
    /// hosts that compute.
    ///
    /// # Errors
    /// On a GPU: what the dispatch met, as `Capacity`; see [`ExpertParallel::dispatch`](crate::ep::ExpertParallel::dispatch).
    pub fn on_host(&self) -> Result<Received<'_>> {
        let shared = &*self.lease.shared;
        if shared.cuda().is_some() {
            return cuda::received(self);
        }
        let (plan, counts) = (&shared.plan, self.lease.counts());
        let rows = counts.num_rows[0] as usize;
        Ok(Received {
            shared,
            counts: Cow::Borrowed(counts),
            x: Cow::Borrowed(self.region(plan.regions.x, rows * plan.row_bytes)),
            records: Cow::Borrowed(self.region(plan.regions.records, rows * plan.record_bytes)),
        })
    }

    /// Unpacks the records of the valid rows: source `i32 [rows, 2]`, ids `i32 [rows, row_k]`, weights `f32 [rows, row_k]`. `row_k` is
    /// K for `ByToken` and 1 in the expert layouts. Slots without a row (`ByExpertFixed`) give -1, -1 and 0. What is behind the valid rows stays.
    ///
    /// # Errors
    /// `Invalid` for a tensor that is not contiguous or has fewer rows (on a GPU, whose host does not know how many there are: than
    /// `max_rows`); nothing is written then.
    pub fn contiguous_metadata(
        &self,
        mut source: TensorViewMut<'_>,
        mut topk_idx: TensorViewMut<'_>,
        mut topk_weights: TensorViewMut<'_>,
    ) -> Result<()> {
        const OP: &str = "contiguous_metadata";
        let plan = &self.lease.shared.plan;
        let row_k = plan.row_k;
        let rows = self.lease.shared.cuda().map_or_else(|| self.lease.counts().num_rows[0] as usize, |_| plan.max_rows);
        for (what, view, dtype, columns) in [
            ("source", &source, DType::I32, 2),
            ("topk_idx", &topk_idx, DType::I32, row_k),
            ("topk_weights", &topk_weights, DType::F32, row_k),
        ] {
            let is_whole = matches!(*view.shape(), [r, c] if r >= rows && c == columns);
            if view.dtype() != dtype || !is_whole || view.shape()[0] > 1 && view.strides()[0] != columns {
                let got = format!("{} {:?} with strides {:?}", view.dtype(), view.shape(), view.strides());
                return Err(Error::invalid(OP, what, got, format!("{dtype} [{rows} or more, {columns}], contiguous")));
            }
        }
        if self.lease.shared.cuda().is_some() {
            return cuda::contiguous_metadata(self, OP, source, topk_idx, topk_weights);
        }
        let received = self.on_host()?;
        let source = bytemuck::cast_slice_mut::<u8, i32>(&mut source.host_mut(OP, "source")?[..8 * rows]);
        let topk_idx = bytemuck::cast_slice_mut::<u8, i32>(&mut topk_idx.host_mut(OP, "topk_idx")?[..4 * row_k * rows]);
        let topk_weights = bytemuck::cast_slice_mut::<u8, f32>(&mut topk_weights.host_mut(OP, "topk_weights")?[..4 * row_k * rows]);
        for slot in 0..rows {
            let (ids, weights) = (&mut topk_idx[slot * row_k..][..row_k], &mut topk_weights[slot * row_k..][..row_k]);
            let to = &mut source[2 * slot..][..2];
            if received.is_row(Slot(slot as u32)) {
                let record = received.record(slot);
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

    /// `ByToken`: for grouped GEMMs that gather. Fills `gather_idx` (`i32 [n]`) with the slots of the rows of each local expert, ascending, each
    /// segment padded to a multiple of `align` with -1, and `segment_start` (`u32 [L + 1]`), whose last entry says how many there are. What is
    /// behind them stays.
    ///
    /// # Errors
    /// `Invalid` for another layout, an `align` of 0, or a tensor that is too short (on a GPU, whose host does not know the counts: for
    /// `max_rows` rows with `min(K, L)` routes each); nothing is written then.
    pub fn gather_idx(&self, align: usize, mut gather_idx: TensorViewMut<'_>, mut segment_start: TensorViewMut<'_>) -> Result<()> {
        const OP: &str = "gather_idx";
        let shared = &self.lease.shared;
        let plan = &shared.plan;
        if shared.config.layout != Layout::ByToken {
            return Err(Error::invalid(OP, "layout", format!("{:?}", shared.config.layout), "ByToken"));
        }
        let local = plan.placement.num_local(shared.member.rank());
        let padded = |n: usize| n.checked_next_multiple_of(align).filter(|_| align > 0);
        let total = match shared.cuda() {
            None => self.lease.counts().num_rows_per_expert.iter().try_fold(0usize, |sum, &n| sum.checked_add(padded(n as usize)?)),
            Some(_) => {
                let routes = plan.max_rows.checked_mul(shared.config.k.min(local));
                routes.and_then(|n| n.checked_add(local.checked_mul(align.checked_sub(1)?)?))
            }
        };
        let Some(total) = total.filter(|&n| n <= i32::MAX as usize) else {
            return Err(Error::invalid(OP, "align", align, "at least 1, and segments that fit 31 bits"));
        };
        for (what, view, dtype, want) in
            [("gather_idx", &gather_idx, DType::I32, total), ("segment_start", &segment_start, DType::U32, local + 1)]
        {
            let is_long_enough = matches!(*view.shape(), [n] if if what == "gather_idx" { n >= want } else { n == want });
            if view.dtype() != dtype || !is_long_enough {
                let want = format!("{dtype} [{want}]{}", if what == "gather_idx" { " or more" } else { ", one per local expert and one" });
                return Err(Error::invalid(OP, what, format!("{} {:?}", view.dtype(), view.shape()), want));
            }
        }
        if shared.cuda().is_some() {
            return cuda::gather_idx(self, OP, align, gather_idx, segment_start);
        }
        let gather_idx = bytemuck::cast_slice_mut::<u8, i32>(&mut gather_idx.host_mut(OP, "gather_idx")?[..4 * total]);
        let segment_start = bytemuck::cast_slice_mut::<u8, u32>(&mut segment_start.host_mut(OP, "segment_start")?[..4 * (local + 1)]);
        let received = self.on_host()?;
        let counts = received.num_rows_per_expert();
        let mut start = 0;
        for (l, &n) in counts.iter().enumerate() {
            segment_start[l] = start as u32;
            start += padded(n as usize).unwrap_or(0);
        }
        segment_start[local] = start as u32;
        gather_idx.fill(-1);
        // segment_start doubles as the cursor of each segment, and is put back afterwards.
        for slot in 0..received.num_rows() {
            for expert in received.local_experts(slot) {
                let cursor = &mut segment_start[expert];
                gather_idx[*cursor as usize] = slot as i32;
                *cursor += 1;
            }
        }
        segment_start.iter_mut().zip(counts).for_each(|(start, &n)| *start -= n);
        Ok(())
    }

    /// The rows that experts write for a zero-copy combine: `[max_rows, H]` of the combine type.
    pub fn expert_output(&mut self) -> TensorViewMut<'_> {
        self.parts().1
    }

    /// The received rows `[max_rows, H]` and, beside them, the rows that experts write `[max_rows, H]` of the combine type.
    pub fn parts(&mut self) -> (TensorView<'_>, TensorViewMut<'_>) {
        let shared = &self.lease.shared;
        let (plan, config) = (&shared.plan, &shared.config);
        let rows = [plan.max_rows, plan.row_bytes / plan.row_dtype.size()];
        let rows = Strides::contiguous("arrival", plan.row_dtype, &rows).expect(PLANNED);
        let output = Strides::contiguous("arrival", config.combine_dtype, &[plan.max_rows, config.hidden]).expect(PLANNED);
        (self.view(plan.regions.x, rows), self.output_view(0, output))
    }

    /// Rows `first` to `first + num` of [`expert_output`](Self::expert_output): for experts that write one segment after the other.
    ///
    /// # Errors
    /// `Invalid` for rows beyond `max_rows`.
    pub fn expert_rows(&mut self, first: usize, num: usize) -> Result<TensorViewMut<'_>> {
        let (plan, config) = (&self.lease.shared.plan, &self.lease.shared.config);
        if first.checked_add(num).is_none_or(|end| end > plan.max_rows) {
            return Err(Error::invalid("expert_rows", "rows", format!("{num} from {first}"), format!("within {}", plan.max_rows)));
        }
        let output = Strides::contiguous("arrival", config.combine_dtype, &[num, config.hidden])?;
        Ok(self.output_view(first * plan.expert_row_bytes, output))
    }

    /// A part of the rows that experts write; whoever calls has `&mut self`, and gives out one at a time.
    fn output_view(&self, offset: usize, output: Strides) -> TensorViewMut<'_> {
        let shared = &self.lease.shared;
        let at = self.lease.at(shared.plan.regions.expert_output) + offset;
        let output = match shared.cuda() {
            None => {
                let memory = &shared.mine().bytes;
                // SAFETY: peers read what experts write only between this rank's ready word of a combine and their next counts; the arrival is
                // consumed before the first and the bank is leased again after the second (steps 8 to 10). `&mut self` of the callers excludes other
                // borrows, and the rows that arrived are another region.
                TensorViewMut::new(unsafe { memory.bytes_mut(at, output.extent_bytes()) }, output)
            }
            // SAFETY: the region is this rank's memory, which lives as long as its lease; the steps of above hold in the order of the stream.
            Some(cuda) => unsafe { TensorViewMut::from_device(cuda.address(at), output) },
        };
        output.expect(PLANNED)
    }

    /// A view of a region of this bank.
    fn view(&self, region: usize, layout: Strides) -> TensorView<'_> {
        let view = match self.lease.shared.cuda() {
            None => TensorView::new(self.region(region, layout.extent_bytes()), layout),
            // SAFETY: the region is this rank's memory, which lives as long as its lease.
            Some(cuda) => unsafe { TensorView::from_device(cuda.address(self.lease.at(region)), layout) },
        };
        view.expect(PLANNED)
    }

    /// A view of `u32` numbers that describe this bank on a GPU.
    fn own(&self, at: DeviceAddress, shape: &[usize]) -> TensorView<'_> {
        let layout = Strides::contiguous("arrival", DType::U32, shape).expect(PLANNED);
        // SAFETY: numbers of this rank alone, in memory that lives as long as the lease.
        unsafe { TensorView::from_device(at, layout) }.expect(PLANNED)
    }

    fn region(&self, region: usize, len: usize) -> &[u8] {
        // SAFETY: peers write this bank only between this rank's counts that name it and their done word, which this rank has waited for; it
        // posts no counts for the bank while the lease lives (steps 2 to 7).
        unsafe { self.lease.shared.mine().bytes.bytes(self.lease.at(region), len) }
    }
}
