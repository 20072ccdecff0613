//! The fuzz corpus of the trace reader and mutations of it, in the normal suite: no panic, and what is accepted is well formed.

use std::path::Path;

use libtest_mimic::{Failed, Trial};
use moe_kernels::random::SplitMix64;
use moe_kernels::routing::trace::{Options, Trace, parse};
use moe_kernels::routing::{Load, Placement};

pub fn trials() -> Vec<Trial> {
    vec![Trial::test("trace::corpus and mutations", corpus)]
}

/// Mutations of each file (arbitrary: about a second in all).
const MUTATIONS: u64 = 400;
/// Pieces that reach the reader's branches.
const PIECES: [&[u8]; 16] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\n",
    b"\"type\":\"route\"",
    b"\"type\":\"meta\"",
    b"\"layer\":1",
    b"\"topk_ids\":[0]",
    b"\"num_experts\":2",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"\xFF",
    b"null",
];

fn corpus() -> Result<(), Failed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/trace");
    let mut files: Vec<_> = std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    files.sort(); // the order of a folder is no order, and the seeds follow it
    let (mut accepted, mut refused) = (0, 0);
    for (i, file) in files.iter().enumerate() {
        let original = std::fs::read(file)?;
        for mutation in 0..MUTATIONS {
            let mut random = SplitMix64::stream(i as u64, mutation);
            let mut text = original.clone();
            // The file itself first, then one to four changes.
            for _ in 0..if mutation == 0 { 0 } else { 1 + random.below(4) } {
                mutate(&mut text, &mut random);
            }
            let options = Options {
                num_experts: (mutation % 7 == 1).then_some(mutation as usize % 70),
                layer: (mutation % 7 == 2).then_some(mutation as u32 % 3),
                keep_warmup: mutation % 2 == 1,
            };
            match parse(&text[..], file, &options) {
                Ok(trace) => {
                    accepted += 1;
                    well_formed(&trace).map_err(|why| format!("{}, mutation {mutation}: {why}", file.display()))?;
                }
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().len() < 1000, "a message is short whatever the file holds: {error}");
                }
            }
        }
    }
    // A reader that refuses or accepts everything would make this test idle.
    if accepted < files.len() * MUTATIONS as usize / 20 || refused < files.len() * MUTATIONS as usize / 20 {
        return Err(format!("{accepted} accepted, {refused} refused of {} files", files.len()).into());
    }
    Ok(())
}

fn mutate(text: &mut Vec<u8>, random: &mut SplitMix64) {
    let at = random.below(text.len() as u64 + 1) as usize;
    let end = (at + random.below(40) as usize).min(text.len());
    match random.below(9) {
        0 if at < text.len() => text[at] ^= 1 << random.below(8),
        1 => drop(text.drain(at..end)),
        2 => text.truncate(at),
        3 => drop(text.splice(at..at, text[at..end].to_vec())),
        // These leave the JSON intact: another digit, a line twice.
        4 | 5 => {
            if let Some(digit) = text[at..].iter_mut().find(|b| b.is_ascii_digit()) {
                *digit = b'0' + random.below(10) as u8;
            }
        }
        6 | 7 => {
            let start = text[..at].iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
            let end = text[at..].iter().position(|&b| b == b'\n').map_or(text.len(), |i| at + i + 1);
            drop(text.splice(start..start, text[start..end].to_vec()));
        }
        _ => drop(text.splice(at..at, PIECES[random.below(PIECES.len() as u64) as usize].iter().copied())),
    }
}

fn well_formed(trace: &Trace) -> Result<(), String> {
    let routes = &trace.routes;
    let len = routes.num_tokens * routes.k;
    if routes.topk_idx.len() != len || routes.topk_weights.len() != len || routes.num_tokens > trace.num_rows {
        return Err(format!(
            "{} ids, {} weights, {} tokens of {}",
            routes.topk_idx.len(),
            routes.topk_weights.len(),
            routes.num_tokens,
            trace.num_rows
        ));
    }
    for t in 0..routes.num_tokens {
        let ids = routes.idx_of(t);
        for (j, &id) in ids.iter().enumerate() {
            if !(-1..trace.num_experts as i32).contains(&id) || id >= 0 && ids[..j].contains(&id) || !routes.weights_of(t)[j].is_finite() {
                return Err(format!("row {t} is {ids:?} {:?}", routes.weights_of(t)));
            }
        }
    }
    let placement = Placement::blocks(trace.num_experts, 1).map_err(|e| e.to_string())?;
    let negative = routes.topk_idx.iter().filter(|&&id| id < 0).count() as u64;
    if Load::new(routes, &placement).num_masked != negative {
        return Err("a route is masked that is not negative".into());
    }
    let wrapped = trace.tokens(3).map(|r| r.topk_idx.len());
    if wrapped.is_ok() != (routes.num_tokens > 0) { Err("tokens".into()) } else { Ok(()) }
}
