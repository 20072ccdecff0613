//! Tests of the program `moe`: what it prints, and with which status it ends.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use libtest_mimic::{Failed, Trial};
use moe_kernels::DType;
use moe_kernels::layer::{BlockConfig, Memory, Preset};
use serde_json::Value;

mod tools;

type Outcome = Result<(), Failed>;
type Test = fn() -> Outcome;

/// The program; absent from a build without the feature `cli`, whose trials are then ignored.
const PROGRAM: Option<&str> = option_env!("CARGO_BIN_EXE_moe");

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let all: [(&str, Test); 22] = [
        ("info", info),
        ("info_as_json", info_as_json),
        ("closed_pipe", closed_pipe),
        ("usage", usage),
        ("check_router", check_router),
        ("check_nonsense", check_nonsense),
        ("check_filter", check_filter),
        ("run_is_the_default", run_is_the_default),
        ("run_prints_everything", run_prints_everything),
        ("run_forms_agree", run_forms_agree),
        ("check_processes", check_processes),
        ("run_at_source_does_not_depend_on_ranks", run_at_source_does_not_depend_on_ranks),
        ("run_types", run_types),
        ("run_bad_options", run_bad_options),
        ("trace", trace),
        ("trace_bad_line", trace_bad_line),
        ("trace_of_another_model", trace_of_another_model),
        ("too_little_memory", too_little_memory),
        ("golden", golden),
        ("golden_of_another_model", golden_of_another_model),
        ("checkpoint_without_golden", checkpoint_without_golden),
        ("checkpoint_bad_options", checkpoint_bad_options),
    ];
    all.into_iter()
        .chain(tools::TRIALS)
        .map(|(name, test)| Trial::test(format!("cli::{name}"), test).with_ignored_flag(PROGRAM.is_none()))
        .collect()
}

/// What the program did.
struct Ran {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

fn moe<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Ran, Failed> {
    let Output { status, stdout, stderr } =
        Command::new(PROGRAM.ok_or("no program")?).args(arguments).env("MOE_CACHE_DIR", "cache-of-a-test").stdin(Stdio::null()).output()?;
    Ok(Ran { status: status.code(), stdout: String::from_utf8(stdout)?, stderr: String::from_utf8(stderr)? })
}

/// Splits at spaces.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

impl Ran {
    /// Ended with `status`, and without a panic or anything else on stderr unless it failed.
    fn ended(&self, status: i32) -> Outcome {
        let Ran { status: got, stdout, stderr } = self;
        if *got != Some(status) || (status == 0 && !stderr.is_empty()) || stderr.contains("panicked") {
            return Err(format!("status {got:?}, expected {status}\nstdout:\n{stdout}\nstderr:\n{stderr}").into());
        }
        Ok(())
    }

    /// Ended with an error in one line that has all of `parts`.
    fn refused(&self, parts: &[&str]) -> Outcome {
        self.ended(2)?;
        let is_one_line = self.stderr.starts_with("error: ") && self.stderr.trim_end().lines().count() == 1;
        if !is_one_line {
            return Err(format!("not one line of an error: {}", self.stderr).into());
        }
        has("stderr", &self.stderr, parts)
    }
}

/// `text` has all of `parts`; where lines end and how wide gaps are does not matter.
fn has(what: &str, text: &str, parts: &[&str]) -> Outcome {
    let text = words(text).join(" ");
    match parts.iter().find(|part| !text.contains(**part)) {
        Some(part) => Err(format!("{what} lacks `{part}`:\n{text}").into()),
        None => Ok(()),
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Outcome {
    if got == want { Ok(()) } else { Err(format!("{what} is {got:?}, expected {want:?}").into()) }
}

fn info() -> Outcome {
    let ran = moe(["info"])?;
    ran.ended(0)?;
    let level = moe_kernels::cpu::Level::detect().name();
    has("info", &ran.stdout, &["cpu ", level, "memory ", "gpu ", "libcuda.so.1", env!("CARGO_PKG_VERSION"), "cache-of-a-test"])
}

fn info_as_json() -> Outcome {
    let ran = moe(["info", "--json"])?;
    ran.ended(0)?;
    let json: Value = serde_json::from_str(&ran.stdout)?;
    same("version", json["environment"]["version"].as_str(), Some(env!("CARGO_PKG_VERSION")))?;
    same("cache_folder", json["cache_folder"].as_str(), Some("cache-of-a-test"))?;
    let cores = json["environment"]["num_cores"].as_u64();
    if cores.is_some_and(|n| n > 0) { Ok(()) } else { Err(format!("num_cores is {cores:?}").into()) }
}

/// A reader that goes away (`moe info | head -1`) is no failure and no panic.
fn closed_pipe() -> Outcome {
    for arguments in [&["info"][..], &["--help"], &["check", "router"]] {
        let mut child = Command::new(PROGRAM.ok_or("no program")?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        drop(child.stdout.take());
        let Output { status, stderr, .. } = child.wait_with_output()?;
        Ran { status: status.code(), stdout: String::new(), stderr: String::from_utf8(stderr)? }.ended(0)?;
    }
    Ok(())
}

fn usage() -> Outcome {
    let ran = moe(["--help"])?;
    ran.ended(0)?;
    has("help", &ran.stdout, &["run", "check", "info", "--trace", "--ranks"])?;
    moe(["--version"])?.ended(0)?;
    for line in [
        "--nonsense",
        "nonsense",
        "run --ranks many",
        "run --layout sideways",
        "run --trace f --routing even",
        "check a b",
        "--keep-warmup",
    ] {
        let ran = moe(words(line))?;
        ran.ended(2).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
        has("stderr", &ran.stderr, &["error: "])?;
    }
    Ok(())
}

/// The closing line, as numbers: passed, failed, ignored.
fn closing_line(stdout: &str) -> Result<[usize; 3], Failed> {
    let line = stdout.lines().last().unwrap_or_default();
    let numbers: Vec<usize> = line.split(", ").filter_map(|part| part.split(' ').next()?.parse().ok()).collect();
    let numbers = <[usize; 3]>::try_from(numbers).map_err(|_| format!("no closing line: {line}"))?;
    let [passed, failed, ignored] = numbers;
    same("closing line", line, &format!("{passed} passed, {failed} failed, {ignored} ignored"))?;
    Ok(numbers)
}

fn check_router() -> Outcome {
    let ran = moe(["check", "router"])?;
    ran.ended(0)?;
    let num_groups = moe_kernels::check::groups().iter().filter(|group| group.op == "router").count();
    same("closing line", closing_line(&ran.stdout)?, [num_groups, 0, 0])?;
    same("lines", ran.stdout.lines().count(), num_groups + 1)?;
    let is_good = |line: &str| line.starts_with("router ") && line.ends_with("  ok") && line.contains(" cases ");
    match ran.stdout.lines().take(num_groups).find(|line| !is_good(line)) {
        Some(line) => Err(format!("not a good line: {line}").into()),
        None => Ok(()),
    }
}

fn check_nonsense() -> Outcome {
    let ops: Vec<&str> = moe_kernels::check::groups().iter().map(|group| group.op).collect();
    moe(["check", "nonsense"])?.refused(&[&["`nonsense`"], &ops[..]].concat())?;
    moe(["check", "--backend", "hip"])?.refused(&["hip", "not supported"])?;
    moe(["check", "--backend", "cuda:x"])?.refused(&["backend", "cuda:x"])
}

/// Nothing chosen is not a pass.
fn check_filter() -> Outcome {
    moe(["check", "router", "--filter", "no such group"])?.refused(&["--filter", "no such group", "router "])?;
    let name = moe_kernels::check::groups().into_iter().find(|group| group.op == "router").ok_or("no group")?.name;
    let ran = moe(["check", "--filter", &name])?;
    ran.ended(0)?;
    has("check", &ran.stdout, &[&name])
}

/// A quick run, and its record.
fn run_record(line: &str) -> Result<Value, Failed> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("run.json");
    fs::write(&path, "x".repeat(1 << 20))?; // longer than a record: it must be cut
    let quick = words("run --model tiny --check-tokens 12");
    let iterations = if line.contains("--iterations") { "" } else { "--iterations 1" };
    let ran = moe(quick
        .into_iter()
        .chain(words(line))
        .chain(words(iterations))
        .chain(["--json", path.to_str().ok_or("a path that is not UTF-8")?]))?;
    ran.ended(0).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
    has("run", &ran.stdout, &["verdict right"])?;
    let record: Value = serde_json::from_slice(&fs::read(&path)?)?;
    same("is_right", record["verdict"]["is_right"].as_bool(), Some(true))?;
    Ok(record)
}

fn run_is_the_default() -> Outcome {
    let ran = moe(words("--model tiny --tokens 20 --ranks 3 --iterations 1"))?;
    ran.ended(0)?;
    has("run", &ran.stdout, &["Tiny", "3 on cpu", "verdict right"])
}

fn run_prints_everything() -> Outcome {
    let line = "run --model tiny --tokens 50 --ranks 3 --iterations 2";
    let ran = moe(words(line))?;
    ran.ended(0)?;
    let parts = ["machine", "memory", "router", "dispatch", "experts", "shared expert", "combine", "GB/s", "imbalance", "####", "note "];
    has("run", &ran.stdout, &parts)?;
    let is_long = |line: &&str| line.chars().count() > 100;
    if let Some(line) = ran.stdout.lines().find(is_long) {
        return Err(format!("a line of {} columns: {line}", line.chars().count()).into());
    }
    let record = run_record("--tokens 50 --ranks 3 --iterations 2")?;
    same("level", record["environment"]["level"].as_str(), Some(moe_kernels::cpu::Level::detect().name()))?;
    let num_routes: u64 = record["load"]["routes_per_rank"].as_array().into_iter().flatten().filter_map(Value::as_u64).sum();
    let k = Preset::named("tiny")?.shape.router.k as u64;
    same("routes", num_routes, 50 * k)?;
    let samples = record["stages"][1]["seconds"].as_array().map(Vec::len);
    same("samples of a stage", samples, Some(2))
}

/// The digest of a run's results.
fn digest(line: &str) -> Result<String, Failed> {
    let record = run_record(line)?;
    Ok(record["verdict"]["digest"].as_str().ok_or("no digest")?.to_owned())
}

fn run_forms_agree() -> Outcome {
    let base = "--tokens 41 --ranks 3 --routing zipf:0.7 --layout by-expert";
    let want = digest(base)?;
    for line in [
        format!("{base} --segment-align 8"),
        format!("{base} --mode low-latency"),
        format!("{base} --processes"),
        format!("{base} --processes --mode low-latency"),
        format!("{base}-fixed"),
        format!("{base}-fixed --rows-per-expert 41"),
    ] {
        same(&line, digest(&line)?, want.clone())?;
    }
    let other = digest(&format!("{base} --seed 2"))?;
    if other == want { Err("another seed has the same digest".into()) } else { Ok(()) }
}

fn check_processes() -> Outcome {
    let ran = moe(words("check --processes --ranks 2"))?;
    ran.ended(0)?;
    has("check", &ran.stdout, &["processes, 2 ranks", "ok"])?;
    moe(words("check --processes --ranks 5"))?.refused(&["--ranks", "5"])
}

fn run_at_source_does_not_depend_on_ranks() -> Outcome {
    let of = |ranks: usize| digest(&format!("--tokens 41 --reduce at-source --ranks {ranks}"));
    let want = of(1)?;
    [2, 4, 8].into_iter().try_for_each(|ranks| same(&format!("digest of {ranks} ranks"), of(ranks)?, want.clone()))
}

fn run_types() -> Outcome {
    for line in [
        "--dtype f16",
        "--dtype f32 --weights bf16",
        "--weights fp8",
        "--wire fp8-block",
        "--wire fp8-direct --layout by-expert",
        "--reduce at-rank-f32",
        "--routing one",
        "--routing even --ranks 1",
        "--routing uniform --tokens 1",
    ] {
        let tokens = if line.contains("--tokens") { "" } else { " --tokens 33" };
        run_record(&format!("{line}{tokens}"))?;
    }
    Ok(())
}

fn run_bad_options() -> Outcome {
    for (line, parts) in [
        ("--tokens 0", &["--tokens", "0"][..]),
        ("--ranks 0", &["--ranks", "0"]),
        ("--ranks 65", &["--ranks", "65", "64"]),
        ("--model tiny --ranks 17", &["--ranks", "17", "Tiny"]),
        ("--model tiny --ranks 17 --processes", &["--ranks", "17", "Tiny"]),
        ("--iterations 0", &["--iterations"]),
        ("--check-tokens 0", &["--check-tokens"]),
        ("--model gpt", &["--model", "gpt", "Mixtral-8x7B"]),
        ("--routing zipf", &["--routing", "zipf:0.7"]),
        ("--dtype e4m3", &["--dtype", "bf16"]),
        ("--weights i32", &["--weights", "fp8"]),
        ("--backend hip", &["hip", "not supported"]),
        ("--backend tpu", &["tpu", "auto"]),
        ("--segment-align 8", &["--segment-align", "by-expert"]),
        ("--layout by-expert --rows-per-expert 8", &["--rows-per-expert", "by-expert-fixed"]),
        ("--model tiny --tokens 40 --layout by-expert-fixed --rows-per-expert 1", &["capacity", "rank 0", "has 1"]),
        ("--layout by-expert --segment-align 0", &["segment_align", "0"]),
        ("--layout by-token --reduce at-source", &["reduce", "ByToken"]),
        ("--model tiny --json no/such/folder/x.json", &["no/such/folder/x.json"]),
        ("--trace no/such/file.jsonl", &["no/such/file.jsonl"]),
    ] {
        moe(words(line))?.refused(parts).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// A trace for the preset Tiny: `num_warmup` equal rows, then `num_rows` different ones.
fn tiny_trace(path: &Path, meta: &str, num_warmup: usize, num_rows: usize) -> Outcome {
    let router = Preset::named("tiny")?.shape.router;
    let mut text = meta.to_owned();
    for row in (0..num_warmup).map(|_| 0).chain(0..num_rows) {
        let ids: Vec<usize> = (0..router.k).map(|j| (row + j * 5) % router.num_experts).collect();
        let weights = vec![0.25; router.k];
        writeln!(text, "{{\"type\":\"route\",\"layer\":7,\"topk_ids\":{ids:?},\"topk_weights\":{weights:?}}}")?;
    }
    fs::write(path, text)?;
    Ok(())
}

fn trace() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("trace.jsonl");
    let name = path.to_str().ok_or("a path that is not UTF-8")?;
    // The first of the different rows is like the warm-up's: one more row in the run.
    tiny_trace(&path, "{\"type\":\"meta\",\"model_id\":\"someone/Tiny-Chat\"}\n", 70, 30)?;
    let ran = moe(["--trace", name, "--iterations", "1"])?;
    ran.ended(0)?;
    has("run", &ran.stdout, &["Tiny", "71 of the trace's 100 rows", "left out", "29 of bf16", "layer 7", "verdict right"])?;
    let ran = moe(["--trace", name, "--iterations", "1", "--keep-warmup"])?;
    ran.ended(0)?;
    has("run", &ran.stdout, &["100 of bf16", "kept, as asked"])?;
    let ran = moe(["--trace", name, "--iterations", "1", "--tokens", "40"])?;
    ran.ended(0)?;
    has("run", &ran.stdout, &["40 of bf16", "29 rows for 40 tokens", "starts again"])?;
    moe(["--trace", name, "--trace-layer", "8"])?.refused(&["layer", "8", "7"])
}

fn trace_bad_line() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("bad.jsonl");
    let name = path.to_str().ok_or("a path that is not UTF-8")?;
    tiny_trace(&path, "", 0, 5)?;
    let good = fs::read_to_string(&path)?;
    for (bad, part) in [
        ("{\"type\":\"route\"", "JSON"),
        ("{\"type\":\"route\",\"layer\":7,\"topk_weights\":[]}", "topk_ids"),
        ("{\"type\":\"route\",\"layer\":7,\"topk_ids\":[1,1],\"topk_weights\":[0,0]}", "topk_ids"),
    ] {
        fs::write(&path, format!("{good}{bad}\n"))?;
        moe(["--model", "tiny", "--trace", name])?.refused(&[&format!("{name}:6: "), part])?;
    }
    fs::write(&path, "")?;
    moe(["--trace", name])?.refused(&[name])
}

fn trace_of_another_model() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("other.jsonl");
    let name = path.to_str().ok_or("a path that is not UTF-8")?;
    let route = |ids: &str, weights: &str| format!("{{\"type\":\"route\",\"layer\":0,\"topk_ids\":{ids},\"topk_weights\":{weights}}}\n");
    fs::write(&path, route("[63, 1, 2, 3, 4, 5, 6, 7]", "[1, 1, 1, 1, 1, 1, 1, 1]"))?;
    moe(["--trace", name])?.refused(&[&format!("{name}:1: "), "63", "Qwen1.5-MoE-A2.7B", "60", "--model OLMoE-1B-7B"])?;
    fs::write(&path, route("[3, 1]", "[1, 1]"))?;
    moe(["--trace", name])?.refused(&[name, "2 experts a token", "4, as Qwen1.5-MoE-A2.7B has", "--model"])
}

/// DeepSeek-V3 in bf16 has 21 GiB of weights: where that is too much, the error has both figures and what to change, before anything is allocated.
fn too_little_memory() -> Outcome {
    let preset = Preset::named("DeepSeek-V3")?;
    let config = BlockConfig::new(preset.shape, DType::BF16, 2048 / 4);
    let need = Memory::of(&config, 4)?.total_bytes();
    let Some(have) = moe_kernels::measure::available_bytes() else { return Ok(()) };
    if have / 10 * 9 >= need / 100 * 99 {
        return Ok(()); // enough, or so near to it that the next moment decides
    }
    let ran = moe(words("--model DeepSeek-V3"))?;
    let need = moe_kernels::measure::report::count(need);
    ran.refused(&[&format!("({need} bytes)"), "available are", "GiB", "fp8"])
}

fn sample(model: &str) -> String {
    format!("{}/tests/vectors/checkpoints/{model}", env!("CARGO_MANIFEST_DIR"))
}

fn golden() -> Outcome {
    for model in ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral"] {
        for options in ["", "--ranks 1", "--layout by-token --ranks 3", "--layout by-expert-fixed", "--reduce at-rank-f32"] {
            let folder = tempfile::tempdir()?;
            let json = folder.path().join("golden.json");
            let json = json.to_str().ok_or("a path that is not UTF-8")?;
            let dir = sample(model);
            let ran = moe(["run", "--checkpoint", &dir, "--layer", "1", "--json", json].into_iter().chain(words(options)))?;
            ran.ended(0)?;
            has(model, &ran.stdout, &[model, "layer 1", "golden_layer1", "f32", "bf16", "framework", "fused", "verdict right"])?;
            let record: Value = serde_json::from_slice(&fs::read(json)?)?;
            let comparisons = record["comparisons"].as_array().ok_or("no comparisons")?;
            same("comparisons", comparisons.len(), 4)?;
            let has_error = |c: &Value| c["output"]["error"].is_f64() && c["routed"]["bound"].is_f64() && c["num_wrong_ids"] == 0;
            same(model, comparisons.iter().all(has_error) && record["is_right"] == true, true)?;
            let is_at_source = record["job"]["reduce"] == "at-source";
            same(options, is_at_source, matches!(options, "" | "--ranks 1" | "--layout by-expert-fixed"))?;
        }
    }
    Ok(())
}

fn golden_of_another_model() -> Outcome {
    // The same sizes, other weights.
    let (dir, other) = (sample("qwen3_moe"), sample("qwen2_moe"));
    let ran = moe(["run", "--checkpoint", &dir, "--layer", "1", "--golden", &format!("{other}/golden_layer1.safetensors")])?;
    let Ran { status, stdout, .. } = &ran;
    same("status", *status, Some(1))?;
    has("run", stdout, &["wrong f32, framework: 48 tokens have other experts", "routed sum: error", "verdict WRONG"])?;
    // Other sizes.
    let dir = sample("mixtral");
    moe(["run", "--checkpoint", &dir, "--layer", "1", "--golden", &format!("{other}/golden_layer1.safetensors")])?.refused(&[
        "golden_layer1.safetensors",
        "f32.gate.0",
        "[48, 16]",
        "[48, 8]",
    ])
}

fn checkpoint_without_golden() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("trace.jsonl");
    let trace = path.to_str().ok_or("a path that is not UTF-8")?;
    tiny_trace(&path, "", 0, 40)?;
    let dir = sample("qwen2_moe");
    for (options, parts) in [
        // The first MoE layer, which has no recording; its weights, seeded tokens.
        ("--iterations 1", &["layer 0", "2,048 of bf16", "the layer's router"][..]),
        ("--layer 1 --tokens 33 --rounding framework", &["layer 1", "33 of bf16", "rounding framework"]),
        ("--layer 1 --tokens 33 --dtype f16 --reduce at-source --rounding framework", &["33 of f16", "weights bf16"]),
        ("--layer 1 --routing zipf:0.7 --iterations 1", &["zipf:0.7"]),
        (&format!("--layer 1 --trace {trace}"), &["recorded", "40 of bf16"]),
    ] {
        let ran = moe(["run", "--checkpoint", &dir].into_iter().chain(words(options)))?;
        ran.ended(0)?;
        has(options, &ran.stdout, parts)?;
        has(options, &ran.stdout, &["qwen2_moe", "0 wrong", "verdict right"])?;
    }
    Ok(())
}

fn checkpoint_bad_options() -> Outcome {
    let dir = sample("mixtral");
    for (options, parts) in [
        ("--layer 2", &["layer", "2", "less than 2"][..]),
        ("--layer 1 --ranks 9", &["--ranks", "9", "8 experts"]),
        ("--layer 1 --golden x --tokens 3", &["--golden", "--tokens"]),
        ("--layer 1 --golden x --routing one", &["--golden", "--routing"]),
        ("--layer 1 --golden no/such/file", &["no/such/file"]),
    ] {
        moe(["run", "--checkpoint", &dir].into_iter().chain(words(options)))?
            .refused(parts)
            .map_err(|failed| format!("{options}: {}", failed.message().unwrap_or_default()))?;
    }
    moe(["run", "--checkpoint", "no/such/folder"])?.refused(&["no/such/folder"])?;
    for line in ["--layer 1", "--golden x", &format!("--checkpoint {dir} --model tiny"), &format!("--checkpoint {dir} --weights fp8")] {
        moe(words(line))?.ended(2).map_err(|failed| format!("{line}: {}", failed.message().unwrap_or_default()))?;
    }
    Ok(())
}
