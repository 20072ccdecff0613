//! Every size that follows from a configuration, and the one validator of configurations.
#![forbid(unsafe_code)]

use super::config::{
    Config, Layout, MAX_K, MAX_RANKS, MAX_TOKENS, Mode, Overflow, Quantize, ROW_ALIGN, Reduce, SCALE_BLOCK, ScaleLayout, Wire,
};
use super::signal::{Machine, Rules, num_signal_words};
use crate::error::{Error, Result};
use crate::routing::Placement;
use crate::tensor::DType;

/// Rows that a low-latency message holds (from DESIGN 5: below about 32 expected rows one message beats the credit form).
const LOW_LATENCY_ROWS: usize = 32;

const OP: &str = "ep config";

/// Sizes of one rank's symmetric memory. The same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Ranks.
    pub world: usize,
    /// Owners of the experts.
    pub placement: Placement,
    /// Most experts that one rank owns.
    pub max_local: usize,
    /// Bytes of a payload row as it travels and arrives.
    pub row_bytes: usize,
    /// Element type of a payload row as it arrives.
    pub row_dtype: DType,
    /// Scale bytes of a row.
    pub scale_bytes: usize,
    /// Rows of the receive buffer.
    pub max_rows: usize,
    /// Most (token, rank) pairs that a rank receives in one call.
    pub max_arrivals: usize,
    /// Rows that a segment keeps.
    pub max_rows_per_expert: usize,
    /// Routes in the record of one row: `k` for `ByToken`, 1 in the expert layouts.
    pub row_k: usize,
    /// Bytes of a row's metadata record.
    pub record_bytes: usize,
    /// Bytes of the record of one (token, rank) pair, internal to the expert layouts.
    pub transit_bytes: usize,
    /// Rows per column of a column-major scale matrix.
    pub scale_rows: usize,
    /// Scale matrices: local experts for `ByExpertFixed`, otherwise 1.
    pub scale_groups: usize,
    /// Bytes of a row that experts write.
    pub expert_row_bytes: usize,
    /// Bytes of a row on the wire of combine.
    pub wire_row_bytes: usize,
    /// Rows of one sender that a low-latency message holds; 0 without such messages.
    pub staged_rows: usize,
    /// Bytes of one row of such a message: payload, then its record, then (column-major layouts) its scales.
    pub message_bytes: usize,
    /// Where everything is in the memory of one rank.
    pub regions: Regions,
    /// Signal words a sender writes to each peer per call.
    pub num_count_words: usize,
}

/// Byte offsets of the regions. Bank `b` of a banked region is at `offset + b * bank_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regions {
    /// Payload rows.
    pub x: usize,
    /// Metadata records of rows.
    pub records: usize,
    /// Records of (token, rank) pairs (expert layouts).
    pub transit: usize,
    /// Column-major scales.
    pub scales: usize,
    /// Rows that experts write.
    pub expert_output: usize,
    /// Rows in wire form, when that is not what experts write.
    pub wire: usize,
    /// Per-row weights to be folded back.
    pub fold: usize,
    /// Bytes of one bank.
    pub bank_bytes: usize,
    /// Low-latency staging: `[in_flight + 1, world, staged_rows]` of row + record; behind the banks.
    pub staging: usize,
    /// Words that peers poll.
    pub signals: usize,
    /// All bytes of one rank.
    pub total_bytes: usize,
}

fn too_large(what: &str) -> Error {
    Error::invalid(OP, what, "a product of sizes beyond usize", "sizes whose buffers can be addressed")
}

/// Adds up regions; every step is checked.
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, what: &str, count: usize, bytes: usize) -> Result<usize> {
        let start = self.0;
        let size = count.checked_mul(bytes).ok_or_else(|| too_large(what))?;
        let end = start.checked_add(size).and_then(|e| e.checked_next_multiple_of(64)); // 64: a cache line (derived)
        self.0 = end.filter(|&e| e <= isize::MAX as usize).ok_or_else(|| too_large(what))?;
        Ok(start)
    }
}

impl Plan {
    pub(super) fn new(c: &Config, world: usize) -> Result<Self> {
        check_ranges(c, world)?;
        let placement = c.placement(world)?;
        let max_local = (0..world).map(|r| placement.num_local(crate::id::Rank(r as u32))).max().unwrap_or(0);
        let (row_bytes, row_dtype, scale_bytes) = payload(c)?;

        let max_arrivals = world.checked_mul(c.max_tokens).ok_or_else(|| too_large("max_tokens"))?;
        let worst_segment = max_arrivals;
        let per_arrival = c.k.min(max_local.max(1));
        let (max_rows, max_rows_per_expert) = match c.layout {
            Layout::ByToken => (c.max_rows.unwrap_or(max_arrivals), worst_segment),
            Layout::ByExpert { segment_align } => {
                let kept = c.max_rows_per_expert.unwrap_or(worst_segment).min(worst_segment);
                let routes = max_arrivals.checked_mul(per_arrival).ok_or_else(|| too_large("max_tokens"))?;
                let routes = match c.overflow {
                    Overflow::Drop => routes.min(kept.checked_mul(max_local).ok_or_else(|| too_large("max_rows_per_expert"))?),
                    Overflow::Error => routes,
                };
                let padding = max_local.checked_mul(segment_align - 1).ok_or_else(|| too_large("segment_align"))?;
                let worst = routes.checked_add(padding).ok_or_else(|| too_large("segment_align"))?;
                (c.max_rows.unwrap_or(worst), kept)
            }
            Layout::ByExpertFixed { rows_per_expert } => {
                (max_local.checked_mul(rows_per_expert).ok_or_else(|| too_large("rows_per_expert"))?, rows_per_expert)
            }
        };
        if max_rows >= u32::MAX as usize {
            return Err(Error::invalid(OP, "max_rows", max_rows, "fewer than 4294967295 rows in all: slots are 32 bits"));
        }
        let row_k = if c.layout.is_by_expert() { 1 } else { c.k };
        let column_scales = c.scale_layout != ScaleLayout::RowMajor && scale_bytes > 0;
        let scale_words = if column_scales { scale_bytes.div_ceil(4) } else { 0 };
        let (scale_groups, rows_of_group) = match c.layout {
            Layout::ByExpertFixed { rows_per_expert } => (max_local, rows_per_expert),
            _ => (1, max_rows),
        };
        let scale_rows = rows_of_group.next_multiple_of(4);
        let record_scales = if column_scales { 0 } else { scale_bytes };
        let record_bytes = (8 + 8 * row_k + record_scales).next_multiple_of(ROW_ALIGN);
        // Source rank and token, then id, weight and slot of each route, then the scales.
        let transit_bytes = (8 + 12 * c.k + scale_bytes).next_multiple_of(ROW_ALIGN);
        let expert_row_bytes = row_size("combine_dtype", c.hidden, c.combine_dtype)?;
        let blocks = c.hidden.div_ceil(SCALE_BLOCK);
        let wire_row_bytes = match (c.wire, c.reduce) {
            (Wire::Fp8Direct, _) => c.hidden.next_multiple_of(ROW_ALIGN),
            (Wire::Fp8Block, _) => (c.hidden.next_multiple_of(4) + 4 * blocks).next_multiple_of(ROW_ALIGN),
            (Wire::AsIs, Reduce::AtRankF32) if c.layout.is_by_expert() => row_size("hidden", c.hidden, DType::F32)?,
            (Wire::AsIs, _) => expert_row_bytes,
        };
        let wire_rows = match c.wire {
            // The rows of y travel as they are, or a partial sum takes the place of the first row that it sums.
            Wire::AsIs if wire_row_bytes == expert_row_bytes => 0,
            _ => max_rows,
        };
        let expected_rows = c.expected_tokens.saturating_mul(c.k.min(world));
        let staged_rows = match c.mode {
            Mode::LowLatency if expected_rows <= LOW_LATENCY_ROWS => LOW_LATENCY_ROWS.min(c.max_tokens),
            _ => 0,
        };

        let mut at = Cursor(0);
        let x = at.take("max_rows", max_rows, row_bytes)?;
        let records = at.take("max_rows", max_rows, record_bytes)?;
        let transit = at.take("max_tokens", if c.layout.is_by_expert() { max_arrivals } else { 0 }, transit_bytes)?;
        let scales = at.take("scale_bytes", scale_groups * scale_words, scale_rows.checked_mul(4).ok_or_else(|| too_large("max_rows"))?)?;
        let expert_output = at.take("combine_dtype", max_rows, expert_row_bytes)?;
        let wire = at.take("wire", wire_rows, wire_row_bytes)?;
        let fold = at.take("fold_weights", if c.fold_weights { max_rows } else { 0 }, 4 * row_k)?;
        let bank_bytes = at.0;
        let mut at = Cursor(bank_bytes.checked_mul(c.in_flight).ok_or_else(|| too_large("in_flight"))?);
        let message_record = if c.layout.is_by_expert() { transit_bytes } else { record_bytes + scale_words * 4 };
        let message_bytes =
            row_bytes.checked_add(message_record).and_then(|b| b.checked_next_multiple_of(64)).ok_or_else(|| too_large("hidden"))?;
        // One more than banks: a peer that holds every bank unread has posted the counts that let this rank stage one more epoch.
        let staging = at.take("expected_tokens", Machine::staging_copies(c.in_flight) * world * staged_rows, message_bytes)?;
        let num_count_words = world + if c.layout.is_by_expert() { c.num_experts } else { 0 };
        let signals = at.take("num_experts", num_signal_words(world, num_count_words), size_of::<u64>())?;
        Ok(Plan {
            world,
            placement,
            max_local,
            row_bytes,
            row_dtype,
            scale_bytes,
            max_rows,
            max_arrivals,
            max_rows_per_expert,
            row_k,
            record_bytes,
            transit_bytes,
            scale_rows,
            scale_groups,
            expert_row_bytes,
            wire_row_bytes,
            staged_rows,
            message_bytes,
            regions: Regions { x, records, transit, scales, expert_output, wire, fold, bank_bytes, staging, signals, total_bytes: at.0 },
            num_count_words,
        })
    }

    /// `true` when scales are in a column-major region and not in the records.
    pub fn has_column_scales(&self) -> bool {
        self.regions.scales != self.regions.expert_output
    }
}

fn row_size(what: &str, hidden: usize, dtype: DType) -> Result<usize> {
    hidden.checked_mul(dtype.size()).filter(|&b| b <= isize::MAX as usize).ok_or_else(|| too_large(what))
}

/// Bytes, element type and scale bytes of a row as it arrives.
fn payload(c: &Config) -> Result<(usize, DType, usize)> {
    let x_bytes = row_size("hidden", c.hidden, c.dtype)?;
    if !x_bytes.is_multiple_of(ROW_ALIGN) {
        return Err(Error::invalid(
            OP,
            "hidden",
            format!("{} ({x_bytes} bytes of {})", c.hidden, c.dtype),
            "a row of a multiple of 16 bytes",
        ));
    }
    let Some(quantize) = c.quantize else { return Ok((x_bytes, c.dtype, c.scale_bytes)) };
    if !c.hidden.is_multiple_of(ROW_ALIGN) {
        return Err(Error::invalid(OP, "hidden", c.hidden, "a multiple of 16, so that e4m3 rows are multiples of 16 bytes"));
    }
    let blocks = c.hidden.div_ceil(SCALE_BLOCK);
    Ok((c.hidden, DType::E4M3, if quantize == Quantize::F32 { 4 * blocks } else { blocks }))
}

fn check_ranges(c: &Config, world: usize) -> Result<()> {
    let range = |what: &str, got: usize, low: usize, high: usize| {
        let ok = (low..=high).contains(&got);
        ok.then_some(()).ok_or_else(|| Error::invalid(OP, what, got, format!("{low} to {high}")))
    };
    range("world", world, 1, MAX_RANKS)?;
    range("hidden", c.hidden, 1, isize::MAX as usize)?;
    range("num_experts", c.num_experts, 1, i32::MAX as usize)?;
    range("k", c.k, 1, MAX_K)?;
    if c.k > c.num_experts {
        return Err(Error::invalid(OP, "k", c.k, format!("at most num_experts, {}", c.num_experts)));
    }
    range("max_tokens", c.max_tokens, 1, MAX_TOKENS)?;
    range("in_flight", c.in_flight, 1, 2)?;
    let is_payload = c.dtype.is_float() || c.dtype.is_fp8() || c.dtype == DType::Bytes;
    if !is_payload {
        return Err(Error::invalid(OP, "dtype", c.dtype, "f32, f16, bf16, an FP8 format or bytes"));
    }
    if !c.combine_dtype.is_float() {
        return Err(Error::invalid(OP, "combine_dtype", c.combine_dtype, "f32, f16 or bf16"));
    }
    if let Some(rows) = c.max_rows {
        range("max_rows", rows, 1, u32::MAX as usize)?;
    }
    match c.layout {
        Layout::ByToken => {}
        Layout::ByExpert { segment_align } => range("segment_align", segment_align, 1, u32::MAX as usize)?,
        Layout::ByExpertFixed { rows_per_expert } => {
            range("rows_per_expert", rows_per_expert, 1, u32::MAX as usize)?;
            if let Some(rows) = c.max_rows {
                return Err(Error::invalid(OP, "max_rows", rows, "None: rows_per_expert is the capacity of this layout"));
            }
        }
    }
    if let Some(rows) = c.max_rows_per_expert {
        if !matches!(c.layout, Layout::ByExpert { .. }) || c.overflow != Overflow::Drop {
            return Err(Error::invalid(OP, "max_rows_per_expert", rows, "None, unless the layout is ByExpert and overflow is Drop"));
        }
        range("max_rows_per_expert", rows, 1, u32::MAX as usize)?;
    }
    check_scales(c)?;
    check_combine(c)
}

fn check_scales(c: &Config) -> Result<()> {
    if c.quantize.is_some() {
        if c.scale_bytes != 0 {
            return Err(Error::invalid(OP, "scale_bytes", c.scale_bytes, "0 with quantize, which makes the scales"));
        }
        if !c.dtype.is_float() {
            return Err(Error::invalid(OP, "dtype", c.dtype, "f32, f16 or bf16 with quantize"));
        }
    }
    if c.scale_bytes > 1 << 20 {
        return Err(Error::invalid(OP, "scale_bytes", c.scale_bytes, "at most 1048576"));
    }
    match (c.scale_layout, c.quantize) {
        (ScaleLayout::ColumnMajor, Some(Quantize::PowerOfTwo)) => {
            Err(Error::invalid(OP, "scale_layout", "ColumnMajor", "RowMajor or PackedE8M0 with power-of-two scales"))
        }
        (ScaleLayout::PackedE8M0, Some(Quantize::F32)) => {
            Err(Error::invalid(OP, "scale_layout", "PackedE8M0", "RowMajor or ColumnMajor with f32 scales"))
        }
        (ScaleLayout::ColumnMajor, None) if !c.scale_bytes.is_multiple_of(4) => {
            Err(Error::invalid(OP, "scale_bytes", c.scale_bytes, "a multiple of 4 with ColumnMajor"))
        }
        _ => Ok(()),
    }
}

fn check_combine(c: &Config) -> Result<()> {
    if !c.layout.is_by_expert() {
        if c.weighted {
            return Err(Error::invalid(
                OP,
                "weighted",
                "true with ByToken",
                "an expert layout: a ByToken row is already a sum over experts",
            ));
        }
        if c.reduce != Reduce::AtRank {
            let got = format!("{:?} with ByToken", c.reduce);
            return Err(Error::invalid(OP, "reduce", got, "AtRank: a ByToken row is already this rank's sum"));
        }
    }
    if c.reduce == Reduce::AtRankF32 && c.wire != Wire::AsIs {
        return Err(Error::invalid(OP, "wire", format!("{:?} with AtRankF32", c.wire), "AsIs: the partial sum travels as f32"));
    }
    let row = row_size("hidden", c.hidden, c.combine_dtype)?;
    if !row.is_multiple_of(ROW_ALIGN) {
        let got = format!("{} ({row} bytes of {})", c.hidden, c.combine_dtype);
        return Err(Error::invalid(OP, "hidden", got, "a row of y of a multiple of 16 bytes"));
    }
    Ok(())
}
