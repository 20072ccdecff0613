//! Everything that an arrival shows, compared with the oracle.

use std::hash::{DefaultHasher, Hash};

use super::buffer::Place;
use super::rank::Before;
use crate::check::Failed;
use crate::check::guarded::{Guarded, POISON};
use crate::ensure;
use crate::ep::{Config, ExpertParallel, Layout, Quantize, ScaleLayout};
use crate::id::{Rank, Slot, Token};
use crate::ops::dispatch::{Arrival, Received};
use crate::oracle::compare;
use crate::oracle::dispatch::{Arrived, Row};
use crate::tensor::{DType, Layout as Strides};

/// Entries of an output behind those that are needed (arbitrary).
const EXTRA: usize = 3;

/// Compares counts, rows, metadata, scales and gather indices; then keeps what the bank holds for the next dispatch into it.
#[expect(clippy::too_many_arguments, reason = "what is compared, with what, and where it is noted")]
pub(super) fn check_arrival(
    place: &Place,
    ep: &ExpertParallel,
    rank: usize,
    arrival: &mut Arrival,
    want: &Arrived,
    before: &mut Before,
    hasher: &mut DefaultHasher,
    faults: &mut Vec<Failed>,
) {
    let config = ep.config();
    let num_local = ep.plan().placement.num_local(Rank(rank as u32));
    let received = match arrival.on_host() {
        Ok(received) => received,
        Err(error) => return faults.push(error.into()),
    };
    check_counts(&received, want, faults);
    if !faults.is_empty() {
        return; // slots and rows mean nothing now
    }
    check_rows(&received, want, faults);
    let results = [
        check_count_views(place, arrival, want),
        check_x_view(place, ep, num_local, arrival, want, before, hasher),
        check_metadata(&received, want),
        check_metadata_views(place, config, arrival, want),
        check_contiguous_metadata(place, ep, arrival, want),
        check_scales(place, config, arrival, want, before, hasher),
        check_gather_idx(place, ep, num_local, arrival, want),
        check_expert_output(ep, arrival),
    ];
    faults.extend(results.into_iter().filter_map(Result::err));
}

fn check_counts(arrival: &Received<'_>, want: &Arrived, faults: &mut Vec<Failed>) {
    let mut same = |what: &str, got: &dyn std::fmt::Debug, want: &dyn std::fmt::Debug| {
        let (got, want) = (format!("{got:?}"), format!("{want:?}"));
        if got != want {
            faults.push(Failed(format!("{what} is {got}, expected {want}")));
        }
    };
    same("num_rows", &arrival.num_rows(), &want.rows.len());
    same("num_rows_per_expert", &arrival.num_rows_per_expert(), &want.num_rows_per_expert);
    same("segment_start", &arrival.segment_start(), &want.segment_start);
    same("num_dropped", &arrival.num_dropped(), &want.num_dropped);
}

/// The numbers where the backend has them.
fn check_count_views(place: &Place, arrival: &Arrival, want: &Arrived) -> Result<(), Failed> {
    let num_rows: Vec<u32> = place.numbers("num_rows", &arrival.num_rows())?;
    ensure!(num_rows == [want.rows.len() as u32], "the view num_rows holds {num_rows:?}, expected {}", want.rows.len());
    // Twice: what is counted when it is asked for is counted once.
    for _ in 0..2 {
        let counts: Vec<u32> = place.numbers("num_rows_per_expert", &arrival.num_rows_per_expert()?)?;
        ensure!(
            counts == want.num_rows_per_expert,
            "the view num_rows_per_expert holds {counts:?}, expected {:?}",
            want.num_rows_per_expert
        );
    }
    let start: Vec<u32> = place.numbers("segment_start", &arrival.segment_start())?;
    ensure!(start == want.segment_start, "the view segment_start holds {start:?}, expected {:?}", want.segment_start);
    Ok(())
}

/// Sources, ids and weights in the records.
fn check_metadata_views(place: &Place, config: &Config, arrival: &Arrival, want: &Arrived) -> Result<(), Failed> {
    let row_k = if config.layout.is_by_expert() { 1 } else { config.k };
    let views = [("source", arrival.source(), 2), ("topk_idx", arrival.topk_idx(), row_k), ("topk_weights", arrival.topk_weights(), row_k)];
    for (field, (what, view, columns)) in views.into_iter().enumerate() {
        ensure!(view.shape()[1..] == [columns], "{what} has shape {:?}, expected {columns} columns", view.shape());
        let (bytes, stride) = (place.bytes(what, &view)?, view.strides()[0] * 4);
        for (slot, row) in valid(want) {
            let source = row.source.map_or([-1, -1], |(rank, token)| [rank as i32, token as i32]);
            let want: &[u8] = match field {
                0 => bytemuck::cast_slice(&source),
                1 => bytemuck::cast_slice(&row.topk_idx),
                _ => bytemuck::cast_slice(&row.topk_weights),
            };
            let dtype = if field == 2 { DType::F32 } else { DType::I32 };
            compare::equal(&format!("the view {what}, row {slot}"), dtype, &[columns], &bytes[slot * stride..][..4 * columns], want)?;
        }
    }
    Ok(())
}

fn valid(want: &Arrived) -> impl Iterator<Item = (usize, &Row)> {
    want.rows.iter().enumerate().filter_map(|(slot, row)| row.as_ref().map(|row| (slot, row)))
}

/// The payload of every row, by slot.
pub(super) fn check_rows(arrival: &Received<'_>, want: &Arrived, faults: &mut Vec<Failed>) {
    for (slot, row) in valid(want) {
        let what = format!("row {slot} of x (source {:?})", row.source);
        let result = compare::equal(&what, DType::Bytes, &[row.x.len()], arrival.row(Slot(slot as u32)), &row.x);
        if let Err(difference) = result {
            faults.push(difference.into());
            return;
        }
    }
}

/// Shape of the view, rows in it, and bytes that no row may touch.
fn check_x_view(
    place: &Place,
    ep: &ExpertParallel,
    num_local: usize,
    arrival: &Arrival,
    want: &Arrived,
    before: &mut Before,
    hasher: &mut DefaultHasher,
) -> Result<(), Failed> {
    let (config, plan) = (ep.config(), ep.plan());
    let view = arrival.x();
    let shape = match config.layout {
        Layout::ByExpertFixed { rows_per_expert } => vec![num_local, rows_per_expert, config.hidden],
        _ => vec![plan.max_rows, config.hidden],
    };
    ensure!(view.shape() == shape, "x has shape {:?}, expected {shape:?}", view.shape());
    let dtype = if config.quantize.is_some() { DType::E4M3 } else { config.dtype };
    ensure!(view.dtype() == dtype, "x is {}, expected {dtype}", view.dtype());
    let bytes = place.bytes("x", &view)?;
    let stride = view.strides()[shape.len() - 2] * dtype.size();
    let row_bytes = config.hidden * dtype.size();
    let num_slots: usize = shape[..shape.len() - 1].iter().product();
    if before.x.is_empty() {
        before.x = vec![0; num_slots * row_bytes];
    }
    for slot in 0..num_slots {
        let got = &bytes[slot * stride..][..row_bytes];
        let kept = &mut before.x[slot * row_bytes..][..row_bytes];
        match want.rows.get(slot).and_then(Option::as_ref) {
            Some(row) => kept.copy_from_slice(&row.x),
            None => ensure!(got == kept, "row {slot} of x was written; {} rows are valid", want.rows.len()),
        }
        ensure!(got == kept, "row {slot} of the view x is not the row at that slot");
    }
    before.x.hash(hasher);
    Ok(())
}

fn source(row: &Row) -> Option<(Rank, Token)> {
    row.source.map(|(rank, token)| (Rank(rank as u32), Token(token as u32)))
}

fn check_metadata(arrival: &Received<'_>, want: &Arrived) -> Result<(), Failed> {
    for (slot, row) in valid(want) {
        let got = arrival.metadata(Slot(slot as u32));
        ensure!(got.source == source(row), "source of row {slot} is {:?}, expected {:?}", got.source, row.source);
        ensure!(got.topk_idx == row.topk_idx, "topk_idx of row {slot} is {:?}, expected {:?}", got.topk_idx, row.topk_idx);
        let what = format!("topk_weights of row {slot}");
        let (got, want) = (bytemuck::cast_slice(got.topk_weights), bytemuck::cast_slice(&row.topk_weights));
        compare::equal(&what, DType::F32, &[row.topk_weights.len()], got, want)?;
    }
    Ok(())
}

fn check_contiguous_metadata(place: &Place, ep: &ExpertParallel, arrival: &Arrival, want: &Arrived) -> Result<(), Failed> {
    let row_k = ep.plan().row_k;
    // The host of a GPU must not know how many rows there are.
    let num_rows = if place.cuda().is_some() { ep.plan().max_rows } else { want.rows.len() };
    let [mut sources, mut ids, mut weights] = [2, row_k, row_k].map(|cols| place.guarded(4 * num_rows * cols));
    let layout = |dtype, columns| Strides::contiguous("check", dtype, &[num_rows, columns]);
    arrival.contiguous_metadata(
        sources.view_mut(&place.backend, 0, layout(DType::I32, 2)?)?,
        ids.view_mut(&place.backend, 0, layout(DType::I32, row_k)?)?,
        weights.view_mut(&place.backend, 0, layout(DType::F32, row_k)?)?,
    )?;
    for (what, guarded, columns) in [("source", &mut sources, 2), ("topk_idx", &mut ids, row_k), ("topk_weights", &mut weights, row_k)] {
        guarded.fetch(&place.backend)?;
        guarded.check(what)?;
        let behind = &guarded.bytes()[4 * columns * want.rows.len()..];
        ensure!(behind.iter().all(|&b| b == POISON), "contiguous {what} was written behind its {} rows", want.rows.len());
    }
    let none = Row { source: None, x: Vec::new(), scales: Vec::new(), topk_idx: vec![-1; row_k], topk_weights: vec![0.0; row_k] };
    for (slot, row) in want.rows.iter().enumerate() {
        let row = row.as_ref().unwrap_or(&none);
        let source = row.source.map_or([-1, -1], |(rank, token)| [rank as i32, token as i32]);
        let wants: [(&str, DType, &Guarded, &[u8]); 3] = [
            ("source", DType::I32, &sources, bytemuck::cast_slice(&source)),
            ("topk_idx", DType::I32, &ids, bytemuck::cast_slice(&row.topk_idx)),
            ("topk_weights", DType::F32, &weights, bytemuck::cast_slice(&row.topk_weights)),
        ];
        for (what, dtype, got, want) in wants {
            let got = &got.bytes()[slot * want.len()..][..want.len()];
            compare::equal(&format!("contiguous {what} of row {slot}"), dtype, &[want.len() / 4], got, want)?;
        }
    }
    Ok(())
}

fn check_scales(
    place: &Place,
    config: &Config,
    arrival: &Arrival,
    want: &Arrived,
    before: &mut Before,
    hasher: &mut DefaultHasher,
) -> Result<(), Failed> {
    let scale_bytes = match config.quantize {
        None => config.scale_bytes,
        Some(Quantize::F32) => 4 * config.hidden.div_ceil(128), // 128: spec (the scale block)
        Some(Quantize::PowerOfTwo) => config.hidden.div_ceil(128),
    };
    let Some(view) = arrival.scales() else {
        ensure!(scale_bytes == 0, "there are no scales, expected {scale_bytes} bytes a row");
        return Ok(());
    };
    ensure!(scale_bytes > 0, "there are scales of shape {:?}, expected none", view.shape());
    let bytes = place.bytes("scales", &view)?;
    if config.scale_layout == ScaleLayout::RowMajor {
        ensure!(view.dtype() == DType::Bytes, "scales are {}, expected bytes", view.dtype());
        let (shape, stride) = (view.shape(), view.strides()[0]);
        ensure!(shape.len() == 2 && shape[0] >= want.rows.len() && shape[1] == scale_bytes, "scales have shape {shape:?}");
        for (slot, row) in valid(want) {
            let got = &bytes[slot * stride..][..scale_bytes];
            compare::equal(&format!("scales of row {slot}"), DType::Bytes, &[scale_bytes], got, &row.scales)?;
            got.hash(hasher);
        }
        return Ok(());
    }
    let num_words = scale_bytes.div_ceil(4);
    ensure!(view.dtype() == DType::U32, "column-major scales are {}, expected u32", view.dtype());
    let &[groups, words, aligned_rows] = view.shape() else {
        return Err(Failed(format!("column-major scales have shape {:?}, expected three dimensions", view.shape())));
    };
    let (num_groups, rows_of_group) = match config.layout {
        Layout::ByExpertFixed { rows_per_expert } => (want.num_rows_per_expert.len(), rows_per_expert),
        _ => (1, want.rows.len()),
    };
    let fits = groups >= num_groups && words == num_words && aligned_rows % 4 == 0 && aligned_rows >= rows_of_group;
    ensure!(fits, "column-major scales have shape {:?}, expected [{num_groups}, {num_words}, {rows_of_group} or more]", view.shape());
    let strides = view.strides();
    ensure!(strides == [words * aligned_rows, aligned_rows, 1], "column-major scales have strides {strides:?}");
    if before.column_scales.is_empty() {
        before.column_scales = vec![0; groups * words * aligned_rows * 4];
    }
    for (slot, row) in valid(want) {
        let (group, r) = if num_groups == 1 { (0, slot) } else { (slot / rows_of_group, slot % rows_of_group) };
        for word in 0..num_words {
            let at = ((group * words + word) * aligned_rows + r) * 4;
            before.column_scales[at..at + 4].copy_from_slice(&row.scale_word(word).to_le_bytes());
        }
    }
    compare::equal("column-major scales", DType::U32, &[groups, words, aligned_rows], &bytes, &before.column_scales)?;
    before.column_scales.hash(hasher);
    Ok(())
}

fn check_gather_idx(place: &Place, ep: &ExpertParallel, num_local: usize, arrival: &Arrival, want: &Arrived) -> Result<(), Failed> {
    let config = ep.config();
    for (align, extra) in [(1, 0), (4, EXTRA), (16, 0)] {
        let (idx, start) = if config.layout.is_by_expert() { (Vec::new(), vec![0; num_local + 1]) } else { want.gather_idx(align) };
        // The host of a GPU must not know how many rows there are.
        let num_entries = match place.cuda() {
            None => idx.len() + extra,
            Some(_) => ep.plan().max_rows * config.k.min(num_local) + num_local * (align - 1) + extra,
        };
        let (mut got_idx, mut got_start) = (place.guarded(4 * num_entries), place.guarded(4 * (num_local + 1)));
        let layout = |dtype, len| Strides::contiguous("check", dtype, &[len]);
        let done = arrival.gather_idx(
            align,
            got_idx.view_mut(&place.backend, 0, layout(DType::I32, num_entries)?)?,
            got_start.view_mut(&place.backend, 0, layout(DType::U32, num_local + 1)?)?,
        );
        if config.layout.is_by_expert() {
            ensure!(done.is_err(), "gather_idx of an expert layout is {done:?}, expected an error");
            continue;
        }
        done?;
        got_idx.fetch(&place.backend)?;
        got_start.fetch(&place.backend)?;
        let used = idx.len();
        got_idx.check("gather_idx")?;
        got_start.check("segment_start")?;
        let what = format!("gather_idx with align {align}");
        compare::equal(&what, DType::I32, &[used], &got_idx.bytes()[..4 * used], bytemuck::cast_slice(&idx))?;
        compare::equal("segment_start of gather_idx", DType::U32, &[num_local + 1], got_start.bytes(), bytemuck::cast_slice(&start))?;
        ensure!(got_idx.bytes()[4 * used..].iter().all(|&b| b == 0xFF), "gather_idx with align {align} wrote behind its {used} entries");
    }
    Ok(())
}

fn check_expert_output(ep: &ExpertParallel, arrival: &mut Arrival) -> Result<(), Failed> {
    let config = ep.config();
    let view = arrival.expert_output();
    let shape = [ep.plan().max_rows, config.hidden];
    ensure!(view.shape() == shape, "expert_output has shape {:?}, expected {shape:?}", view.shape());
    ensure!(view.dtype() == config.combine_dtype, "expert_output is {}, expected {}", view.dtype(), config.combine_dtype);
    Ok(())
}
