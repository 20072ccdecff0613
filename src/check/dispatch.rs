//! Checks of dispatch.

use crate::Backend;
use crate::check::ep::buffer::{Matrix, Place, in_setup};
use crate::check::ep::cases::{Form, Part, Steps, Traffic, batch, combine_script, dispatch_script, low_latency, many_tokens, traffics};
use crate::check::ep::inputs::{Draw, Ids, draw};
use crate::check::ep::script::Rows;
use crate::check::ep::{self, Count, Phase, Script, Step};
use crate::check::{Failed, Group, variants};
use crate::ensure;
use crate::ep::{Config, ExpertParallel, Layout, Overflow, Quantize, ScaleLayout, Sums, Tuning, World};
use crate::id::{Expert, Rank, Slot};
use crate::ops::dispatch::{Input, NumTokens, Outputs, Routing};
use crate::oracle::dispatch::{Dispatched, dispatch};
use crate::tensor::DType;

/// Widths of rows: the least, one vector of 64 bytes and more, a scale block and a short one, two blocks.
const WIDTHS: [usize; 4] = [16, 64, 144, 256];

const LAYOUTS: [Layout; 4] = [
    Layout::ByToken,
    Layout::ByExpert { segment_align: 1 },
    Layout::ByExpert { segment_align: 8 },
    Layout::ByExpertFixed { rows_per_expert: 0 }, // set by the traffic
];

fn layout_name(layout: Layout) -> String {
    match layout {
        Layout::ByToken => "by token".into(),
        Layout::ByExpert { segment_align } => format!("by expert align {segment_align}"),
        Layout::ByExpertFixed { .. } => "by expert fixed".into(),
    }
}

/// Type of x, scale bytes of a token, quantisation, place of the scales.
type Payload = (&'static str, DType, usize, Option<Quantize>, ScaleLayout);

const PAYLOADS: [Payload; 12] = [
    ("f32", DType::F32, 0, None, ScaleLayout::RowMajor),
    ("f16", DType::F16, 0, None, ScaleLayout::RowMajor),
    ("bf16", DType::BF16, 0, None, ScaleLayout::RowMajor),
    ("e4m3 without scales", DType::E4M3, 0, None, ScaleLayout::ColumnMajor),
    ("e4m3 with scales", DType::E4M3, 12, None, ScaleLayout::RowMajor),
    ("e5m2 with column-major scales", DType::E5M2, 8, None, ScaleLayout::ColumnMajor),
    ("bytes with packed scales", DType::Bytes, 5, None, ScaleLayout::PackedE8M0),
    ("bytes with odd scales", DType::Bytes, 7, None, ScaleLayout::RowMajor),
    ("bf16 to e4m3", DType::BF16, 0, Some(Quantize::F32), ScaleLayout::RowMajor),
    ("f32 to e4m3, column-major", DType::F32, 0, Some(Quantize::F32), ScaleLayout::ColumnMajor),
    ("f16 to e4m3, power of two", DType::F16, 0, Some(Quantize::PowerOfTwo), ScaleLayout::RowMajor),
    ("bf16 to e4m3, packed power of two", DType::BF16, 0, Some(Quantize::PowerOfTwo), ScaleLayout::PackedE8M0),
];

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    for (l, layout) in LAYOUTS.into_iter().enumerate() {
        for (p, payload) in PAYLOADS.into_iter().enumerate() {
            let name = format!("{} {}", layout_name(layout), payload.0);
            // Each traffic with each payload in one layout, and with each layout for three payloads.
            let scripts = move |is_gpu| payload_scripts(layout, payload, Part::of(is_gpu, 4, l + p));
            groups.push(ep::group("dispatch", name, scripts));
        }
        let of = |what: &str| format!("{} {what}", layout_name(layout));
        groups.push(ep::group("dispatch", of("capacity"), move |is_gpu| capacity_scripts(layout, Part::of(is_gpu, 4, l))));
        groups.push(ep::group("dispatch", of("low latency"), move |is_gpu| low_latency_scripts(layout, Part::of(is_gpu, 4, l))));
        groups.push(ep::group("dispatch", of("two in flight"), move |is_gpu| in_flight_scripts(layout, Part::of(is_gpu, 4, l + 1))));
        let shapes = move || {
            property_shapes(layout, true)
                .into_iter()
                .map(|(_, traffic, config)| (traffic.world(), config, Tuning { sums: Sums::NONE, ..Tuning::default() }))
                .collect()
        };
        groups.push(Group::new("dispatch", of("properties"), move |backend| properties(backend, layout)).with_shapes(shapes));
    }
    let both = |script: Script| [script.shape(), low_latency(script).shape()];
    let shapes = move || same_bytes_scripts().into_iter().flat_map(both).collect();
    groups.push(Group::new("dispatch", "same bytes in 20 runs", same_bytes).with_shapes(shapes));
    groups.push(ep::group("dispatch", "7168 wide, 256 experts".into(), |_| large_scripts()));
    for form in SANITIZED {
        groups.push(ep::group("dispatch", format!("under a sanitizer, {form}"), move |_| vec![sanitizer_script(form)]));
    }
    groups
}

fn payload_scripts(layout: Layout, (name, dtype, scale_bytes, quantize, scale_layout): Payload, part: Part) -> Vec<Script> {
    let traffics = traffics().into_iter().chain([many_tokens()]).enumerate().filter(|(i, _)| part.takes(*i));
    let script = |(i, traffic): (usize, Traffic)| {
        let config = Config { scale_bytes, quantize, scale_layout, ..traffic.config(WIDTHS[i % 4], dtype, layout) };
        dispatch_script(name, config, &traffic, i)
    };
    traffics.map(script).collect()
}

/// `config` with room for exactly what `d` needs, less `missing`; `None` when that is no capacity.
fn with_capacity(config: &Config, d: &Dispatched, missing: usize) -> Option<Config> {
    let fullest = d.ranks.iter().flat_map(|r| &r.num_rows_per_expert).max().copied().unwrap_or(0) as usize;
    let rows = d.ranks.iter().map(|r| r.rows.len()).max().unwrap_or(0);
    let capacity = |full: usize| full.checked_sub(missing).filter(|&c| c > 0);
    Some(match (config.layout, config.overflow) {
        (Layout::ByExpertFixed { .. }, _) => {
            Config { layout: Layout::ByExpertFixed { rows_per_expert: capacity(fullest)? }, ..config.clone() }
        }
        (Layout::ByExpert { .. }, Overflow::Drop) => Config { max_rows_per_expert: Some(capacity(fullest)?), ..config.clone() },
        _ => Config { max_rows: Some(capacity(rows)?), ..config.clone() },
    })
}

/// Exactly full, one row short, nearly nothing, with both policies; too many tokens; then a batch that fits.
fn capacity_scripts(layout: Layout, part: Part) -> Vec<Script> {
    let mut scripts = Vec::new();
    for (i, traffic) in traffics().into_iter().enumerate().filter(|(i, _)| part.takes(*i)) {
        let base = Config { fold_weights: true, ..traffic.config(WIDTHS[i % 4], DType::BF16, layout) };
        let first = batch(&base, &traffic, &traffic.tokens, i, false);
        let Ok(full) = dispatch(&base, traffic.world(), &first.ranks) else { continue };
        let fullest = full.ranks.iter().map(|r| r.rows.len()).max().unwrap_or(0);
        for overflow in [Overflow::Error, Overflow::Drop] {
            let base = Config { overflow, ..base.clone() };
            for missing in [0, 1, 2, fullest.saturating_sub(1)] {
                let config = with_capacity(&base, &full, missing);
                let script = config.map(|config| capacity_script(config, &traffic, i, missing));
                scripts.extend(script.map(|script| if (i + missing) % 3 == 2 { low_latency(script) } else { script }));
            }
            // Dropping per segment does not help when the kept rows together are too many.
            if matches!((layout, overflow), (Layout::ByExpert { .. }, Overflow::Drop)) && fullest > 8 {
                let config = Config { max_rows: Some(fullest - 1), ..base.clone() };
                scripts.push(capacity_script(config, &traffic, i, 3));
            }
        }
        let most = traffic.tokens.iter().copied().max().unwrap_or(0);
        if most > 1 {
            scripts.push(capacity_script(Config { max_tokens: most - 1, ..base }, &traffic, i, i));
        }
    }
    scripts
}

fn capacity_script(config: Config, traffic: &Traffic, index: usize, form: usize) -> Script {
    let few = Traffic { ids: Ids::AllTo(0), ..traffic.clone() };
    let mut one_token = vec![0; traffic.world()];
    one_token[traffic.world() - 1] = 1;
    let first = batch(&config, traffic, &traffic.tokens, index, false);
    let second = batch(&config, &few, &one_token, index + 1, false);
    let form = Form::of(form, &config);
    let mut steps = Steps::default();
    for (b, batch) in [(0, &first), (1, &second), (0, &first), (1, &second)] {
        let fits = dispatch(&config, traffic.world(), &batch.ranks).is_ok();
        steps.dispatch_and(b, 0, form.phase, fits, |steps, arrival| steps.combine(arrival, form));
    }
    let Config { max_rows, max_rows_per_expert, max_tokens, overflow, layout, .. } = &config;
    let name = format!(
        "capacity: max_tokens {max_tokens}, max_rows {max_rows:?}, per expert {max_rows_per_expert:?}, {layout:?} {overflow:?} {traffic:?}"
    );
    Script {
        name,
        world: traffic.world(),
        config,
        batches: vec![first, second],
        steps: steps.steps,
        rows: Rows::BySlot,
        specials: false,
        delays: false,
    }
}

/// One-message form with fewer, exactly and more rows than a message holds (32), all payload forms.
fn low_latency_scripts(layout: Layout, part: Part) -> Vec<Script> {
    let mut scripts = Vec::new();
    let few = Ids::Distinct;
    let sizes = [vec![1, 1], vec![32, 33], vec![40, 0], vec![31, 32, 33, 90], vec![0, 0, 70]];
    let sized = sizes.map(|tokens| Traffic { tokens, k: 2, num_experts: 8, map: None, ids: few });
    if layout == Layout::ByToken {
        // In every part: more rows than messages, which the kernel of messages moves too, and says so by done words. An even number: global ids.
        let (name, dtype, ..) = PAYLOADS[0];
        let config = sized[3].config(WIDTHS[1], dtype, layout);
        scripts.push(low_latency(dispatch_script(&format!("{name} beyond messages"), config, &sized[3], 4)));
    }
    for (i, traffic) in sized.into_iter().chain(traffics()).enumerate().filter(|(i, _)| part.takes(*i)) {
        let (name, dtype, scale_bytes, quantize, scale_layout) = PAYLOADS[i % PAYLOADS.len()];
        let config = Config { scale_bytes, quantize, scale_layout, ..traffic.config(WIDTHS[i % 4], dtype, layout) };
        scripts.push(low_latency(dispatch_script(name, config.clone(), &traffic, i)));
        scripts.push(low_latency(combine_script(name, config, &traffic, i)));
    }
    scripts
}

/// Two arrivals alive at once, combined or dropped in either order; sends that overlap other calls.
fn in_flight_scripts(layout: Layout, part: Part) -> Vec<Script> {
    let mut scripts = Vec::new();
    for (i, traffic) in traffics().into_iter().enumerate().filter(|(i, _)| part.takes(*i)) {
        let config = Config { in_flight: 2, fold_weights: true, ..traffic.config(WIDTHS[i % 4], DType::F16, layout) };
        let batches: Vec<_> = (0..3).map(|b| batch(&config, &traffic, &traffic.tokens, 3 * i + b, false)).collect();
        let form = Form { in_place: i % 2 == 0, add_to: (i % 3 == 0).then_some(DType::F16), fold: true, phase: Phase::Both };
        let Form { in_place, add_to, fold, .. } = form;
        let combine_send = |arrival| Step::Combine { arrival, in_place, add_to, fold, phase: Phase::Send };
        let dispatch_send = |batch, routing| Step::Dispatch { batch, routing, phase: Phase::Send };

        let mut either_order = Steps::default();
        for order in [[0, 1], [1, 0]] {
            let pair = [either_order.dispatch(0, 0, Phase::Both), either_order.dispatch(1, 1, Phase::Send)];
            either_order.combine(pair[order[0]], form);
            either_order.combine(pair[order[1]], Form { in_place: !form.in_place, ..form });
        }
        let pair = [either_order.replay(2, 0, Phase::Both), either_order.replay(2, 1, Phase::Both)];
        either_order.drop_arrival(pair[1]);
        either_order.combine(pair[0], form);

        // Micro-batches: while one is computed, the other one's rows are on their way.
        let overlapped = vec![
            dispatch_send(0, 0),
            Step::Receive, // arrival 0
            dispatch_send(1, 1),
            combine_send(0),
            Step::Receive, // arrival 1
            Step::Receive, // sums of 0
            dispatch_send(2, 0),
            combine_send(1),
            Step::Receive, // arrival 2
            Step::Receive, // sums of 1
            combine_send(2),
            Step::Receive,
        ];
        // The same without combine, so that nothing but the next dispatch makes a fast rank wait for a slow one.
        let mut dropped = vec![dispatch_send(0, 0)];
        for n in 0..6 {
            dropped.extend([dispatch_send((n + 1) % 3, (n + 1) % 2), Step::Receive, Step::Drop { arrival: n }]);
        }
        dropped.push(Step::Receive);
        for (name, steps) in [("either order", either_order.steps), ("overlapped", overlapped), ("overlapped, dropped", dropped)] {
            let script = Script {
                name: format!("{name} {traffic:?}"),
                world: traffic.world(),
                config: config.clone(),
                batches: batches.clone(),
                steps,
                rows: Rows::BySlot,
                specials: false,
                delays: false,
            };
            let delays = name == "overlapped, dropped";
            if i % 3 == 2 || delays {
                scripts.push(low_latency(Script { delays, ..script.clone() }));
            }
            scripts.push(script);
        }
    }
    scripts
}

fn same_bytes_scripts() -> [Script; 4] {
    let traffic = Traffic { tokens: vec![9, 4, 0, 12], k: 8, num_experts: 60, map: None, ids: Ids::Messy };
    let quantize = Some(Quantize::F32);
    LAYOUTS.map(|layout| combine_script("same bytes", Config { quantize, ..traffic.config(144, DType::BF16, layout) }, &traffic, 2))
}

/// The same bytes in every run, phase, count form, id type, stride and mode.
fn same_bytes(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    for mut script in same_bytes_scripts() {
        let layout = script.config.layout;
        let prepared = script.clone().prepare()?;
        let first = prepared.run(backend)?;
        for run in 1..20 {
            ensure!(prepared.run(backend)? == first, "{} {layout:?}: run {run} gave other bytes than the first", script.name);
        }
        for i in 0..16 {
            for batch in &mut script.batches {
                batch.ids = if i & 1 == 0 { DType::I32 } else { DType::I64 };
                batch.padded = i & 2 != 0;
                batch.count = [Count::All, Count::Host, Count::Device][i % 3];
            }
            script.steps = in_place(&script.steps, i & 4 != 0);
            let script = if i & 8 == 0 { script.clone() } else { low_latency(script.clone()) };
            // Sums are made in other forms, so only they are compared.
            let same = script.clone().prepare()?.run(backend)?.out == first.out;
            ensure!(same, "{} {layout:?}: form {i} gave other bytes than the first", script.name);
        }
        num_cases += 35; // 20 runs of one form, 15 more forms
    }
    Ok(num_cases)
}

/// The same calls, every combine staged or in place.
fn in_place(steps: &[Step], yes: bool) -> Vec<Step> {
    let mut steps = steps.to_vec();
    for step in &mut steps {
        if let Step::Combine { in_place, .. } = step {
            *in_place = yes;
        }
    }
    steps
}

fn large_scripts() -> Vec<Script> {
    let traffic = Traffic { tokens: vec![5, 3, 0, 6], k: 8, num_experts: 256, map: None, ids: Ids::Distinct };
    let of = |layout, quantize, i| {
        let config = Config { quantize, ..traffic.config(7168, DType::BF16, layout) };
        dispatch_script("large", config, &traffic, i)
    };
    vec![of(Layout::ByToken, None, 0), of(LAYOUTS[2], Some(Quantize::F32), 1)]
}

/// Forms of dispatch that tools look at which make kernels slow.
const SANITIZED: [&str; 4] = ["by token", "low latency", "by expert, quantised", "many tokens"];

/// All of them, between processes.
pub(super) fn sanitizer_scripts() -> Vec<Script> {
    SANITIZED.into_iter().map(sanitizer_script).collect()
}

/// One of them once, small.
fn sanitizer_script(form: &str) -> Script {
    let name = format!("dispatch under a sanitizer, {form}");
    let traffic = Traffic { tokens: vec![5, 3], k: 3, num_experts: 8, map: None, ids: Ids::Messy };
    let of = |layout, quantize, i| dispatch_script(&name, Config { quantize, ..traffic.config(144, DType::BF16, layout) }, &traffic, i);
    match form {
        "by token" => of(Layout::ByToken, None, 0),
        "low latency" => low_latency(of(Layout::ByToken, None, 2)),
        "many tokens" => {
            let traffic = Traffic { tokens: vec![515, 513], ..traffic };
            dispatch_script(&name, Config { scale_bytes: 12, ..traffic.config(144, DType::E4M3, Layout::ByToken) }, &traffic, 3)
        }
        _ => of(LAYOUTS[2], Some(Quantize::F32), 1),
    }
}

/// What a rank received: source, token and global id of each valid row, and its counts.
type Received = (Vec<(usize, usize, Vec<i32>)>, Vec<u32>);

/// Numbers, traffics and configurations of the properties.
fn property_shapes(layout: Layout, is_gpu: bool) -> Vec<(usize, Traffic, Config)> {
    let part = Part::of(is_gpu, 4, LAYOUTS.iter().position(|other| *other == layout).unwrap_or(0) + 2);
    let shape = |(i, traffic): (usize, Traffic)| (i, traffic.clone(), traffic.config(WIDTHS[i % 4], DType::F32, layout));
    traffics().into_iter().enumerate().filter(|(i, _)| part.takes(*i)).map(shape).collect()
}

/// Without the oracle: every unmasked (token, rank), or (token, expert), has exactly one slot, and counts follow from the routes.
fn properties(backend: &Backend, layout: Layout) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let shapes = property_shapes(layout, ep::is_gpu(backend));
    for (i, traffic, config) in &shapes {
        let tokens = draw(config, &Draw { seed: 99, tokens: traffic.tokens.clone(), ids: traffic.ids, weights: true, specials: false });
        let placement = config.placement(traffic.world())?;
        let received = World::run(&variants[i % variants.len()].1, traffic.world(), |world| {
            let tuning = Tuning { sums: Sums::NONE, ..Tuning::default() };
            let mut ep = ExpertParallel::with_tuning(&world, config.clone(), tuning)?;
            let mut routing = Routing::new(&ep)?;
            let own = &tokens[world.rank().index()];
            let place = Place::new(world.backend()).map_err(in_setup)?;
            let matrix = |dtype, columns, bytes: &[u8]| Matrix::filled(&place, dtype, (own.num_tokens, columns), false, 0, bytes);
            let x = matrix(DType::F32, config.hidden, &own.x);
            let topk_idx = matrix(DType::I64, config.k, bytemuck::cast_slice(&own.topk_idx));
            let input = Input { x: x.view()?, topk_idx: topk_idx.view()?, topk_weights: None, scales: None, num_tokens: NumTokens::All };
            // As in a script: nobody allocates while another rank's kernels may wait, nor frees (below).
            world.barrier()?;
            let arrival = ep.dispatch(&mut routing, &input, Outputs::default())?;
            let arrived = arrival.on_host()?;
            let rows = (0..arrived.num_rows()).filter(|&slot| {
                let (expert, at) = segment_of(arrived.segment_start(), slot);
                layout == Layout::ByToken || at < arrived.num_rows_per_expert()[expert] as usize
            });
            let rows = rows.filter_map(|slot| {
                let m = arrived.metadata(Slot(slot as u32));
                m.source.map(|(rank, token)| (rank.index(), token.index(), m.topk_idx.to_vec()))
            });
            let received: Received = (rows.collect(), arrived.num_rows_per_expert().to_vec());
            world.barrier()?;
            Ok(received)
        })?;
        for (rank, received) in received.into_iter().enumerate() {
            let (mut rows, counts) = received?;
            let mut want = Vec::new();
            let mut want_counts = vec![0; placement.num_local(Rank(rank as u32))];
            for (source, own) in tokens.iter().enumerate() {
                for (token, ids) in own.topk_idx.chunks_exact(config.k).enumerate() {
                    let mut experts: Vec<usize> = ids.iter().filter_map(|&id| usize::try_from(id).ok()).collect();
                    experts.retain(|&e| e < config.num_experts && placement.owners()[e].index() == rank);
                    experts.sort_unstable();
                    experts.dedup();
                    experts.iter().for_each(|&e| want_counts[placement.local_of(Expert(e as u32)).unwrap_or(0)] += 1);
                    match layout {
                        Layout::ByToken if experts.is_empty() => {}
                        Layout::ByToken => want.push((source, token, None)),
                        _ => want.extend(experts.iter().map(|&e| (source, token, Some(e as i32)))),
                    }
                }
            }
            let by_token = layout == Layout::ByToken;
            let in_order = rows.windows(2).all(|w| (w[0].0, w[0].1) < (w[1].0, w[1].1));
            ensure!(!by_token || in_order, "{traffic:?}: rows of rank {rank} are not in the order of (source, token)");
            rows.sort();
            let got: Vec<_> = rows.into_iter().map(|(s, t, ids)| (s, t, if by_token { None } else { Some(ids[0]) })).collect();
            ensure!(got == want, "{traffic:?}: rank {rank} received {got:?}, its routes are {want:?}");
            ensure!(counts == want_counts, "{traffic:?}: rank {rank} counts {counts:?}, its routes give {want_counts:?}");
        }
    }
    Ok(shapes.len())
}

/// The segment of a slot, and its place there.
fn segment_of(segment_start: &[u32], slot: usize) -> (usize, usize) {
    let segment = segment_start.iter().rposition(|&start| start as usize <= slot).unwrap_or(0);
    (segment, slot - segment_start.get(segment).map_or(0, |&start| start as usize))
}
