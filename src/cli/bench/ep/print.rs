//! The tables of a measurement.
#![forbid(unsafe_code)]

use moe_kernels::Result;
use moe_kernels::measure::link::LinkCeiling;
use moe_kernels::measure::{Statistics, report};

use super::record::{GpuRecord, Job, RankRecord, Record, Run, Use};
use crate::output::Output;

/// Prints every run, then what is wrong.
pub fn print(record: &Record, output: &mut Output) -> Result<()> {
    let Job { ranks, hidden, top_k, experts, dtype, layout, mode, wire, routing, .. } = &record.job;
    let what = if record.job.is_processes { "processes" } else { "threads" };
    let on = match (&record.job.gpu, record.job.num_gpus) {
        (None, _) => "the CPU".to_owned(),
        (Some(gpu), 0 | 1) => format!("one {gpu} that they share"),
        (Some(gpu), num) if num == *ranks => format!("{num} {gpu}, one each"),
        (Some(gpu), num) => format!("{num} {gpu} that they share in turns"),
    };
    output.line(format_args!("{ranks} ranks ({what}) on {on}"))?;
    output.line(format_args!(
        "hidden {hidden}, {dtype}, top {top_k} of {experts} experts, {routing} routing, {layout}, {mode}, wire {wire}"
    ))?;
    for idle in record.idle.iter().filter(|idle| !idle.is_idle()) {
        output.line(format_args!("NOT IDLE: {}: {}", idle.device, idle.reasons.join("; ")))?;
    }
    for run in &record.runs {
        print_run(run, output)?;
    }
    for wrong in record.runs.iter().flat_map(|run| &run.wrong) {
        output.line(format_args!("WRONG: {wrong}"))?;
    }
    let note = if record.job.backend == "cpu" { "call by call" } else { "graphs replayed on all ranks at once" };
    output.line(format_args!(
        "\nus per call: {note}, the slowest rank of each sample; combine = pair - dispatch; overhead = dispatch - payload alone"
    ))
}

fn us(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e6)
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".into(), show)
}

fn giga(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / 1e9)
}

fn print_run(run: &Run, output: &mut Output) -> Result<()> {
    let launches = run.launches.map_or_else(String::new, |launches| {
        let [dispatch, combine] = run.num_launches.unwrap_or_default();
        format!("; dispatch {} ({dispatch} launches), combine {} ({combine})", launches.dispatch, launches.combine)
    });
    let mut how = String::new();
    if let Some(sms) = run.tuning.dispatch.sms {
        how.push_str(&format!("dispatch on {sms} SMs, "));
    }
    if let Some(sms) = run.tuning.combine.sms {
        how.push_str(&format!("combine on {sms} SMs, "));
    }
    how.push_str(match (run.is_programmatic, run.tuning.early) {
        (false, _) => "",
        (true, false) => "programmatic launch, ",
        (true, true) => "programmatic launch, early, ",
    });
    output.heading(format_args!("{} tokens a rank, {how}{} calls a sample{launches}", report::count(run.num_tokens as u64), run.rounds))?;
    let slowest = &run.slowest;
    let of_copy = |times: Option<Statistics>, copy: &Option<moe_kernels::measure::ceiling::CopyCeiling>| match (times, copy) {
        (Some(times), Some(copy)) => format!("{:.3}", copy.best_seconds / times.median),
        _ => "-".into(),
    };
    let least = |value: fn(&RankRecord) -> Option<f64>| run.ranks.iter().filter_map(value).reduce(f64::min);
    // Of several GPUs the one whose link is used least; of one what leaves its ranks.
    let link = |of_gpu: fn(&GpuRecord) -> Option<Use>, of_rank: fn(&RankRecord) -> Option<f64>| {
        let least_used = run.gpus.iter().filter_map(of_gpu).min_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        let ratio = or_dash(least_used, |used| format!("{:.3}", used.of_ceiling));
        [or_dash(least_used.map(|used| used.bytes_per_second).or_else(|| least(of_rank)), giga), ratio]
    };
    let nothing = || ["-".to_owned(), "-".to_owned()];
    let row = |name: &str, times: Option<Statistics>, copy: String, [link, of_link]: [String; 2], algorithm: Option<f64>| {
        times.map(|t| {
            let mut cells = vec![name.to_owned(), us(t.median), us(t.mean), us(t.sd), us(t.min), link];
            cells.extend((!run.gpus.is_empty()).then_some(of_link));
            cells.extend([or_dash(algorithm, giga), copy]);
            cells
        })
    };
    let rows = [
        row(
            "dispatch",
            slowest.dispatch,
            of_copy(slowest.dispatch, &run.copy_of_dispatch),
            link(|gpu| gpu.dispatch, |rank| rank.dispatch_link_bytes_per_second),
            least(|r| r.dispatch_algorithm_bytes_per_second),
        ),
        row(
            "payload alone",
            slowest.payload_alone,
            of_copy(slowest.payload_alone, &run.copy_of_dispatch),
            link(|gpu| gpu.payload_alone, |_| None),
            None,
        ),
        row("skip payload", slowest.skip_payload, "-".into(), nothing(), None),
        row("local rows", slowest.local, "-".into(), nothing(), None),
        row(
            "combine",
            slowest.combine,
            of_copy(slowest.combine, &run.copy_of_combine),
            link(|gpu| gpu.combine, |rank| rank.combine_link_bytes_per_second),
            least(|r| r.combine_algorithm_bytes_per_second),
        ),
        row("pair", slowest.pair, "-".into(), nothing(), None),
    ];
    let mut header = vec!["<us", "median", "mean", "sd", "best", "link GB/s"];
    header.extend((!run.gpus.is_empty()).then_some("of link"));
    header.extend(["algorithm", "of copy"]);
    output.table(&header, rows.into_iter().flatten())?;
    if let (Some(overhead), Some(share)) = (slowest.overhead, slowest.routing_share) {
        output.line(format_args!("overhead {} us, {:.1} % of a dispatch", us(overhead), 100.0 * share))?;
    }
    if let Some(copy) = &run.copy_of_dispatch {
        let cached = if copy.is_beyond_cache { "" } else { ", within the cache" };
        output.line(format_args!(
            "copy of what a dispatch moves ({}): {} us{cached}",
            report::bytes(copy.moved_bytes),
            us(copy.best_seconds)
        ))?;
    }
    if let (Some(dispatch), Some(combine)) = (&run.links_of_dispatch, &run.links_of_combine) {
        output.line(of_links(dispatch))?;
        if combine.bytes != dispatch.bytes {
            output.line(of_links(combine))?;
        }
    }
    let range = |value: fn(&RankRecord) -> u64| {
        let (least, most) = run.ranks.iter().map(value).fold((u64::MAX, 0), |(least, most), n| (least.min(n), most.max(n)));
        if least == most { report::count(most) } else { format!("{} to {}", report::count(least), report::count(most)) }
    };
    output.line(format_args!(
        "a rank: {} rows out, {} in, {} bytes of metadata out",
        range(|r| r.traffic.rows_out),
        range(|r| r.traffic.rows_in),
        range(|r| r.traffic.metadata_bytes)
    ))?;
    let of_rank = |rank: &RankRecord| {
        let host = |value: fn(&super::record::Host) -> f64| or_dash(rank.host.as_ref(), |host| us(value(host)));
        vec![
            rank.rank.to_string(),
            or_dash(rank.times.dispatch, |t| us(t.median)),
            or_dash(rank.times.dispatch, |t| us(t.sd)),
            or_dash(rank.times.combine, |t| us(t.median)),
            or_dash(rank.times.combine, |t| us(t.sd)),
            or_dash(rank.dispatch_link_bytes_per_second, giga),
            or_dash(rank.combine_link_bytes_per_second, giga),
            host(|h| h.dispatch.median),
            host(|h| h.combine.median),
            host(|h| h.bare_launch.median),
            host(|h| h.bare_launch_in_turns.median),
        ]
    };
    // Link: GB/s that leave the rank for other GPUs, or for other ranks of the one that all share. Host: what a call takes it, beside a bare launch, and one of two kernels in turns.
    let header = ["rank", "dispatch", "sd", "combine", "sd", "link d", "link c", "host d", "host c", "bare", "in turns"];
    output.table(&header, run.ranks.iter().map(of_rank))
}

/// What links can do at best with some bytes.
fn of_links(links: &LinkCeiling) -> String {
    let [write, read, engine] = [&links.write, &links.read, &links.copy_engine]
        .map(|way| format!("{} ({})", giga(way.together.bytes_per_second), giga(way.alone.bytes_per_second)));
    let (cached, trip) = (if links.is_beyond_cache { "" } else { ", within the cache" }, us(links.round_trip.median));
    format!(
        "links, all at once (alone), {} a GPU{cached}: written {write}, read {read}, copied {engine} GB/s; signal and back {trip} us",
        report::bytes(links.bytes)
    )
}
