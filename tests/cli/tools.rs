//! The tools of expert parallelism on CPU ranks: `moe bench dispatch`, `combine`, `pair` and `gap`, `moe stress`, `moe tune`.

use std::fs;

use libtest_mimic::Failed;
use serde_json::Value;

use super::{Outcome, Test, has, moe, same, words};

pub const TRIALS: [(&str, Test); 10] = [
    ("bench_forms", bench_forms),
    ("bench_as_json", bench_as_json),
    ("bench_processes", bench_processes),
    ("bench_recorded_routes", bench_recorded_routes),
    ("bench_bad_options", bench_bad_options),
    ("gap", gap),
    ("gap_bad_options", gap_bad_options),
    ("stress", stress),
    ("stress_bad_options", stress_bad_options),
    ("tune_rule_and_bad_options", tune_rule_and_bad_options),
];

const SMALL: &str = "--hidden 256 --experts 16 --top-k 3 --tokens 9 --repeats 2 --rounds 3";

/// What `--json` holds.
fn record(line: &str) -> Result<Value, Failed> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("x.json");
    let ran = moe(words(line).into_iter().chain(["--json", file.to_str().ok_or("a path that is no text")?]))?;
    ran.ended(0)?;
    Ok(serde_json::from_slice(&fs::read(file)?)?)
}

fn refused(lines: &[(&str, &[&str])]) -> Outcome {
    for (line, parts) in lines {
        moe(words(line))?.refused(parts).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
    }
    Ok(())
}

fn bench_forms() -> Outcome {
    for (form, parts) in [
        ("dispatch", &["2 ranks (threads) on the CPU", "dispatch", "9 tokens a rank, 3 calls"][..]),
        ("combine --layout by-expert --segment-align 4 --reduce at-rank-f32", &["by-expert", "combine", "pair"]),
        ("pair --layout by-expert-fixed --reduce at-source --wire fp8-block --ranks 3", &["3 ranks", "fp8-block"]),
        ("pair --dtype e4m3 --staged --inputs 2 --routing zipf:1", &["e4m3", "zipf:1"]),
        ("pair --quantize power-of-two --mode low-latency --tokens 0,1 --routing even", &["low-latency", "0 tokens", "1 tokens"]),
        ("pair --dtype bytes --ranks 1 --expected-tokens 4 --seed 7", &["1 ranks", "bytes"]),
        ("pair --dtype f32 --routing one --geometry dispatch=3x64 --sms 4", &["one routing", "dispatch on 4 SMs"]),
    ] {
        let ran = moe(words(&format!("bench {form} {SMALL}")))?;
        ran.ended(0).map_err(|failed| format!("{form}: {}", failed.message().unwrap_or_default()))?;
        has(form, &ran.stdout, parts)?;
        if ran.stdout.contains("WRONG") {
            return Err(format!("{form}: {}", ran.stdout).into());
        }
    }
    Ok(())
}

fn bench_as_json() -> Outcome {
    // Every token goes to expert 0, which is rank 0's.
    let record = record(&format!("bench pair {SMALL} --routing one --ranks 2"))?;
    same("phase", record["job"]["phase"].as_str(), Some("pair"))?;
    same("version", record["environment"]["version"].as_str(), Some(env!("CARGO_PKG_VERSION")))?;
    let run = &record["runs"][0];
    same("wrong", run["wrong"].as_array().map(Vec::len), Some(0))?;
    for times in ["dispatch", "combine", "pair"] {
        same(times, run["slowest"][times]["num_samples"].as_u64(), Some(2))?;
    }
    same("payload alone on a CPU", &run["slowest"]["payload_alone"], &Value::Null)?;
    let number = |rank: usize, what: &str| run["ranks"][rank]["traffic"][what].as_u64();
    same("rows out", [number(0, "rows_out"), number(1, "rows_out")], [Some(0), Some(9)])?;
    same("rows in", [number(0, "rows_in"), number(1, "rows_in")], [Some(18), Some(0)])?;
    // A record of 3 routes is 8 + 3 * 8 bytes, and a rank sends a count word of 8 bytes for each rank to its peer.
    same("metadata", [number(0, "metadata_bytes"), number(1, "metadata_bytes")], [Some(16), Some(9 * 32 + 16)])?;
    let row_bytes = 512;
    same("dispatch out", number(1, "dispatch_out_bytes"), Some(9 * (row_bytes + 32) + 16))?;
    same("dispatch in", number(0, "dispatch_in_bytes"), Some(18 * row_bytes))?;
    same("read and written", number(1, "dispatch_moved_bytes"), Some((9 + 9) * row_bytes))?;
    same("combine out", [number(0, "combine_out_bytes"), number(1, "combine_out_bytes")], [Some(9 * row_bytes), Some(0)])?;
    same("combine moves", number(1, "combine_moved_bytes"), Some((9 + 9) * row_bytes))?;
    same("all rows", run["traffic"]["rows_in"].as_u64(), Some(18))?;
    // All ranks share the CPU: what would go over links is what leaves a rank, and nothing is compared with them.
    same("link bytes", run["ranks"][1]["dispatch_link_bytes"].as_u64(), number(1, "dispatch_out_bytes"))?;
    same("GPUs", [&record["job"]["num_gpus"], &run["ranks"][1]["gpu"]].map(Value::as_u64), [Some(0); 2])?;
    same("links", (run["gpus"].as_array().map(Vec::len), &run["links_of_dispatch"]), (Some(0), &Value::Null))?;
    let per_second = run["ranks"][1]["dispatch_link_bytes_per_second"].as_f64().unwrap_or(0.0);
    let seconds = run["ranks"][1]["times"]["dispatch"]["median"].as_f64().unwrap_or(0.0);
    let bytes = (9 * (row_bytes + 32) + 16) as f64;
    if (per_second * seconds / bytes - 1.0).abs() < 1e-9 { Ok(()) } else { Err(format!("{per_second} bytes/s in {seconds} s").into()) }
}

fn bench_processes() -> Outcome {
    let record = record(&format!("bench pair {SMALL} --ranks 3 --processes --layout by-expert"))?;
    same("processes", record["job"]["is_processes"].as_bool(), Some(true))?;
    same("ranks", record["runs"][0]["ranks"].as_array().map(Vec::len), Some(3))?;
    same("wrong", record["runs"][0]["wrong"].as_array().map(Vec::len), Some(0))
}

fn bench_recorded_routes() -> Outcome {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("trace.jsonl");
    let line = r#"{"type":"route","layer":0,"topk_ids":[15,1,8],"topk_weights":[0.5,0.25,0.25]}"#;
    fs::write(&file, format!("{line}\n{line}\n"))?;
    let path = file.to_str().ok_or("a path that is no text")?.to_owned();
    let record = record(&format!("bench dispatch {SMALL} --ranks 4 --routing {path}"))?;
    // Experts 15, 1 and 8 of 16 are on ranks 3, 0 and 2 of 4.
    let rows = |rank: usize| record["runs"][0]["ranks"][rank]["traffic"]["rows_in"].as_u64();
    same("rows in", [0, 1, 2, 3].map(rows), [36, 0, 36, 36].map(Some))?;
    refused(&[(&format!("bench dispatch --experts 16 --top-k 2 --routing {path}"), &["--top-k", "3"])])
}

fn bench_bad_options() -> Outcome {
    refused(&[
        ("bench dispatch --ranks 0", &["--ranks", "1 to 64"]),
        ("bench dispatch --ranks 65", &["--ranks", "65"]),
        ("bench dispatch --tokens 600000", &["--tokens", "524288"]),
        ("bench pair --top-k 33", &["--top-k", "32"]),
        ("bench pair --dtype i32", &["--dtype", "bf16"]),
        ("bench pair --dtype e4m3 --quantize f32", &["quantize"]),
        ("bench pair --routing sometimes", &["--routing", "zipf:0.7"]),
        ("bench pair --geometry 64", &["--geometry", "64x256"]),
        ("bench pair --geometry 64x100", &["--geometry", "multiple of 64"]),
        ("bench pair --geometry send=64x256", &["--geometry", "dispatch"]),
        ("bench pair --sms 0", &["--sms"]),
        ("bench pair --sweep-sms 4,0", &["--sweep-sms"]),
        ("bench pair --segment-align 4", &["--segment-align", "by-expert"]),
        ("bench pair --reduce at-source", &["reduce", "ByToken"]),
        ("bench pair --programmatic", &["--programmatic", "cpu"]),
        ("bench dispatch --skip-payload", &["--skip-payload", "CPU"]),
        ("bench dispatch --local", &["--local", "CPU"]),
        ("bench pair --backend tpu", &["tpu"]),
        ("bench pair --json no/such/folder/x.json", &["no/such/folder/x.json"]),
        ("bench pair --hidden 7", &["hidden"]),
    ])
}

fn gap() -> Outcome {
    let folder = tempfile::tempdir()?;
    let results = folder.path().join("bench_results");
    let results = results.to_str().ok_or("a path that is no text")?.to_owned();
    let line = format!(
        "bench gap --label first-1 --results {results} --hidden 256 --experts 16 --top-k 3 --tokens 5,9 --warmup 1 --iterations 4 --rounds 2"
    );
    let ran = moe(words(&line))?;
    ran.ended(0)?;
    has("gap", &ran.stdout, &["first-1: 4 iterations of 2 calls after 1", "of combine", "kept in"])?;
    let file = |name: &str| fs::read_to_string(format!("{results}/first-1/{name}"));
    let raw = file("raw.csv")?;
    // Two numbers of tokens, two ranks, four iterations.
    same("lines of raw.csv", raw.lines().count(), 1 + 2 * 2 * 4)?;
    same("its columns", raw.lines().map(|line| line.split(',').count()).collect::<Vec<_>>(), vec![6; 17])?;
    let summary: Value = serde_json::from_str(&file("summary.json")?)?;
    same("iterations", summary["runs"][1]["gap"]["num_samples"].as_u64(), Some(4))?;
    let mean = |what: &str| summary["runs"][1][what]["mean"].as_f64().unwrap_or(f64::NAN);
    let difference = mean("dispatch") - mean("combine") - mean("gap");
    if difference.abs() > 1e-12 {
        return Err(format!("dispatch - combine - gap is {difference}").into());
    }
    let machine: Value = serde_json::from_str(&file("environment.json")?)?;
    same("version", machine["environment"]["version"].as_str(), Some(env!("CARGO_PKG_VERSION")))?;
    // What is kept is never overwritten.
    refused(&[(&line, &["first-1"])])
}

fn gap_bad_options() -> Outcome {
    refused(&[
        ("bench gap --label ../x", &["--label"]),
        ("bench gap --label .x", &["--label"]),
        ("bench gap --label x --ranks 65", &["--ranks"]),
        ("bench gap --label x --processes", &["--processes"]),
        ("bench gap --label x --programmatic both", &["--programmatic"]),
        ("bench gap --label x --geometry combine=0x64", &["--geometry"]),
    ])?;
    let ran = moe(["bench", "gap"])?;
    same("status without a label", ran.status, Some(2))?;
    has("stderr", &ran.stderr, &["--label"])
}

fn stress() -> Outcome {
    for (line, parts) in [
        ("stress --rounds 60 --ranks 3 --tokens 12", &["60 rounds on 3 threads", "every output was right"][..]),
        ("stress --rounds 30 --ranks 2 --tokens 8 --processes", &["30 rounds on 2 processes", "every output was right"]),
        // As many objects of 25 rounds as the time allows.
        ("stress --minutes 0.001 --ranks 1 --only plain,fixed --seed 5", &[" rounds on 1 threads", "every output was right"]),
    ] {
        let ran = moe(words(line))?;
        ran.ended(0).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
        has(line, &ran.stdout, parts)?;
    }
    // Without an option it is 200 rounds.
    has("stress", &moe(words("stress --tokens 4 --hidden 16 --only plain"))?.stdout, &["200 rounds on 4 threads"])
}

fn stress_bad_options() -> Outcome {
    refused(&[
        ("stress --ranks 0", &["--ranks"]),
        ("stress --tokens 0", &["--tokens"]),
        ("stress --minutes 0", &["--minutes"]),
        ("stress --only fast", &["--only", "plain"]),
        ("stress --hidden 3", &["hidden"]),
        ("stress --programmatic both", &["--programmatic"]),
    ])
}

fn tune_rule_and_bad_options() -> Outcome {
    let ran = moe(["tune", "--rule"])?;
    ran.ended(0)?;
    has("tune --rule", &ran.stdout, &["the caller", "a table that was measured on this model", "the rule", "NVIDIA H200"])?;
    refused(&[
        ("tune", &["--backend", "cuda"]),
        ("tune --backend cpu", &["--backend", "geometry"]),
        ("tune --backend cuda --processes", &["--processes"]),
        ("tune --backend cuda --margin -1", &["--margin"]),
        ("tune --backend cuda --programmatic both", &["--programmatic"]),
        ("tune --backend cuda --tokens 600000", &["--tokens"]),
    ])
}
