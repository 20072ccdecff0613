//! The trace reader: what it accepts, and the message for everything that it refuses.

use std::path::Path;

use libtest_mimic::{Failed, Trial};
use moe_kernels::Error;
use moe_kernels::routing::Trace;
use moe_kernels::routing::trace::{MAX_LINE_BYTES, Options, WARMUP_ROWS, parse};

use super::{refused, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("trace::accepted", accepted),
        Trial::test("trace::every message", every_message),
        Trial::test("trace::layers", layers),
        Trial::test("trace::experts", experts),
        Trial::test("trace::warm-up", warmup),
        Trial::test("trace::tokens", tokens),
        Trial::test("trace::files", files),
    ]
}

const DEFAULT: Options = Options { num_experts: None, layer: None, keep_warmup: false };

fn read(text: impl AsRef<[u8]>, options: &Options) -> Result<Trace, Error> {
    parse(text.as_ref(), Path::new("t.jsonl"), options)
}

fn row(layer: u32, ids: &[i32]) -> String {
    let weights: Vec<f64> = ids.iter().map(|&id| 0.5 + id as f64).collect();
    format!("{{\"type\": \"route\", \"layer\": {layer}, \"topk_ids\": {ids:?}, \"topk_weights\": {weights:?}}}\n")
}

fn accepted() -> Result<(), Failed> {
    let text = concat!(
        "{\"type\":\"meta\",\"model_id\":\"x\",\"top_k\":9,\"num_experts\":64,\"layers_logged\":[1]}\r\n",
        "\n",
        "{\"req_id\":\"r\",\"token_idx\":0,\"layer\":1,\"topk_ids\":[3,63],\"topk_weights\":[0.1,1],\"type\":\"route\",\"more\":{\"a\":[null]}}\r\n",
        "  \t \n",
        "{\"type\":\"route\",\"layer\":1,\"topk_ids\":[-1,-9000000000],\"topk_weights\":[0.25,-3e-3]}\n",
        "{\"type\":\"route\",\"layer\":1,\"topk_ids\":[0,-2],\"topk_weights\":[-0.5,1e-60]}\n\n\n",
        "{\"type\":\"route\",\"layer\":1,\"topk_ids\":[7,8],\"topk_weights\":[3,0]}",
    );
    let trace = read(text, &DEFAULT)?;
    same("ids", &trace.routes.topk_idx[..], &[3, 63, -1, -1, 0, -1, 7, 8])?;
    same("weights", &trace.routes.topk_weights[..], &[0.1, 1.0, 0.0, 0.0, -0.5, 0.0, 3.0, 0.0])?;
    same("counts", (trace.routes.num_tokens, trace.routes.k, trace.num_rows, trace.num_warmup), (4, 2, 4, 0))?;
    same("experts and layer", (trace.num_experts, trace.layer), (64, 1))?;
    let longest = format!("{}{}\n", row(0, &[1]).trim_end(), " ".repeat(MAX_LINE_BYTES - row(0, &[1]).len()));
    same("the longest line", longest.len(), MAX_LINE_BYTES)?;
    same("the longest line", read(longest, &DEFAULT)?.num_rows, 1)?;
    let ids: Vec<i32> = (0..32).collect();
    same("the largest k", read(row(0, &ids), &DEFAULT)?.routes.k, 32)
}

fn every_message() -> Result<(), Failed> {
    let route = |fields: &str| format!("{{\"type\":\"route\",{fields}}}\n");
    let ids = |ids: &str| route(&format!("\"layer\":0,\"topk_ids\":[{ids}],\"topk_weights\":[1,1]"));
    let weights = |weights: &str| route(&format!("\"layer\":0,\"topk_ids\":[0,1],\"topk_weights\":[{weights}]"));
    let layer = |layer: &str| route(&format!("\"layer\":{layer},\"topk_ids\":[0,1],\"topk_weights\":[1,1]"));
    let many = |n: usize| row(0, &(0..n as i32).collect::<Vec<_>>());
    let meta = |fields: &str| format!("{{\"type\":\"meta\"{fields}}}\n");
    let long = " ".repeat(MAX_LINE_BYTES) + "\n";
    let deep = "[".repeat(1000);
    for (line, why) in [
        ("{\n", "not a JSON object: EOF while parsing an object at column 0"),
        ("7\n", "not a JSON object: invalid type: integer `7`, expected a map at column 1"),
        ("{\"type\":NaN}\n", "not a JSON object: expected value at column 9"),
        ("{} {}\n", "not a JSON object: trailing characters at column 4"),
        (&deep, "not a JSON object: invalid type: sequence, expected a map at column 0"),
        (&format!("{{\"type\":{deep}"), "not a JSON object: recursion limit exceeded at column 135"),
        (&long, "the line is longer than 1048576 bytes"),
        (&long[..MAX_LINE_BYTES + 1], "the line is longer than 1048576 bytes"),
        ("{}\n", "type is missing"),
        ("{\"type\":3}\n", "type is 3, expected \"route\" or \"meta\""),
        ("{\"type\":\"token\"}\n", "type is \"token\", expected \"route\" or \"meta\""),
        (&meta(""), "type is \"meta\", expected \"route\": only the first line may be meta"),
        (&route("\"topk_ids\":[0],\"topk_weights\":[1]"), "layer is missing"),
        (&layer("-1"), "layer is -1, expected an integer from 0 to 4294967295"),
        (&layer("4294967296"), "layer is 4294967296, expected an integer from 0 to 4294967295"),
        (&layer("1.0"), "layer is 1.0, expected an integer from 0 to 4294967295"),
        (&layer("\"1\""), "layer is \"1\", expected an integer from 0 to 4294967295"),
        (&layer(&format!("\"{}\"", "x".repeat(33))), "layer is a long string, expected an integer from 0 to 4294967295"),
        (&route("\"layer\":0,\"topk_weights\":[1]"), "topk_ids is missing"),
        (&route("\"layer\":0,\"topk_ids\":[1]"), "topk_weights is missing"),
        (&route("\"layer\":0,\"topk_ids\":1,\"topk_weights\":[1]"), "topk_ids is 1, expected an array"),
        (&route("\"layer\":0,\"topk_ids\":[1],\"topk_weights\":{}"), "topk_weights is an object, expected an array"),
        (&ids("0"), "topk_weights has 2 entries, expected as many as topk_ids, 1"),
        (&route("\"layer\":0,\"topk_ids\":[],\"topk_weights\":[]"), "topk_ids has 0 entries, expected 1 to 32"),
        (&many(33), "topk_ids has 33 entries, expected 1 to 32"),
        (&many(3), "topk_ids has 3 entries, expected 2 as in the rows before"),
        (&ids("0,1.5"), "topk_ids[1] is 1.5, expected an integer"),
        (&ids("null,1"), "topk_ids[0] is null, expected an integer"),
        (&ids("0,1e2"), "topk_ids[1] is 100.0, expected an integer"),
        (&ids("0,[1]"), "topk_ids[1] is an array, expected an integer"),
        (&ids("0,9223372036854775808"), "topk_ids[1] is 9223372036854775808, expected an integer"),
        (&ids("65536,0"), "topk_ids[0] is 65536, expected less than 65536"),
        (&ids("5,5"), "topk_ids[1] is 5, which the row has already"),
        (&ids("0,0"), "topk_ids[1] is 0, which the row has already"),
        (&weights("1,\"1\""), "topk_weights[1] is \"1\", expected a number that f32 holds"),
        (&weights("1e39,1"), "topk_weights[0] is 1e+39, expected a number that f32 holds"),
        (&weights("1e999,1"), "not a JSON object: number out of range at column 64"),
    ] {
        // Behind a good row and a blank line, so that the third is meant.
        let text = format!("{}\n{line}", row(0, &[1, 2]));
        refused(line.get(..80).unwrap_or(line), read(text, &DEFAULT), &format!("t.jsonl:3: {why}"))?;
    }
    let not_utf8 = [row(0, &[1, 2]).as_bytes(), b"{\"type\":\"\xFF\"}"].concat();
    refused("not UTF-8", read(not_utf8, &DEFAULT), "t.jsonl:2: not UTF-8 from byte 10 on")?;
    let limit = Options { num_experts: Some(60), ..DEFAULT };
    refused(
        "experts",
        read(row(0, &[59]) + &row(0, &[60]), &limit),
        "t.jsonl:2: topk_ids[0] is 60, expected less than the number of experts, 60",
    )?;
    for num_experts in ["0", "65537", "-3", "\"64\""] {
        let why = format!("t.jsonl:1: num_experts is {num_experts}, expected an integer from 1 to 65536");
        refused("meta", read(meta(&format!(",\"num_experts\":{num_experts}")), &DEFAULT), &why)?;
    }
    refused("empty", read("", &DEFAULT), "t.jsonl:0: the file has no route line")?;
    refused("meta only", read(meta("") + "\n", &DEFAULT), "t.jsonl:2: the file has no route line")?;
    let zero = Options { num_experts: Some(0), ..DEFAULT };
    refused("option", read("", &zero), "trace: num_experts is 0, expected 1 to 65536")
}

fn layers() -> Result<(), Failed> {
    let text = row(3, &[1, 2]) + &row(0, &[3, 4]) + &row(3, &[5, 6]) + &row(12, &[7, 8]);
    refused("no choice", read(&text, &DEFAULT), "trace: layer is not chosen, and t.jsonl has 3, expected one of 0, 3, 12")?;
    let of = |layer| read(&text, &Options { layer: Some(layer), ..DEFAULT });
    same("layer 3", of(3)?.routes.topk_idx, vec![1, 2, 5, 6])?;
    same("layer 12", (of(12)?.routes.topk_idx, of(12)?.num_experts, of(12)?.num_rows), (vec![7, 8], 9, 1))?;
    refused("another", of(1), "trace: layer is 1, expected one of t.jsonl: 0, 3, 12")?;
    let many: String = (0..66).map(|l| row(l, &[1])).collect();
    let error = read(many, &DEFAULT).expect_err("66 layers and no choice").to_string();
    same("not all are named", error.ends_with(", 62, 63, .."), true)?;
    // A bad line of another layer is still a bad line.
    let bad = row(0, &[1, 2]) + &row(1, &[2, 2]);
    let zero = Options { layer: Some(0), ..DEFAULT };
    refused("other layer", read(bad, &zero), "t.jsonl:2: topk_ids[1] is 2, which the row has already")
}

fn experts() -> Result<(), Failed> {
    let meta = "{\"type\":\"meta\",\"num_experts\":16}\n";
    let text = row(0, &[4, 9]);
    same("inferred", read(&text, &DEFAULT)?.num_experts, 10)?;
    same("all masked", read(row(0, &[-1, -1]), &DEFAULT)?.num_experts, 1)?;
    same("meta", read(meta.to_string() + &text, &DEFAULT)?.num_experts, 16)?;
    let twelve = Options { num_experts: Some(12), ..DEFAULT };
    same("the caller before meta", read(meta.to_string() + &text, &twelve)?.num_experts, 12)?;
    refused(
        "meta",
        read(meta.to_string() + &row(0, &[16]), &DEFAULT),
        "t.jsonl:2: topk_ids[0] is 16, expected less than the number of experts, 16",
    )
}

fn warmup() -> Result<(), Failed> {
    let run = |id, n: usize| row(0, &[id]).repeat(n);
    let keep = Options { keep_warmup: true, ..DEFAULT };
    // In front, in the middle and at the end; 63 in a row are traffic.
    for (text, rows, left) in [
        (run(1, WARMUP_ROWS - 1), WARMUP_ROWS - 1, WARMUP_ROWS - 1),
        (run(1, WARMUP_ROWS), WARMUP_ROWS, 0),
        (run(1, 100) + &run(2, 3), 103, 3),
        (run(2, 3) + &run(1, 64) + &run(2, 63), 130, 66),
        (run(2, 3) + &run(1, 64) + &run(3, 64) + &run(2, 1), 132, 4),
    ] {
        let (trace, kept) = (read(&text, &DEFAULT)?, read(&text, &keep)?);
        same("rows left", (trace.num_rows, trace.routes.num_tokens, trace.num_warmup), (rows, left, rows - left))?;
        same("rows kept", (kept.num_rows, kept.routes.num_tokens, kept.num_warmup), (rows, rows, rows - left))?;
        same("ids", trace.routes.topk_idx.len(), left)?;
        same("none is warm-up", trace.routes.topk_idx.iter().filter(|&&id| id == 1).count(), if left == 63 { 63 } else { 0 })?;
        same("the experts do not depend on it", trace.num_experts, kept.num_experts)?;
    }
    // Equal ids with other weights are no run.
    let other = row(0, &[1]).replace("1.5", "1.25");
    same("weights count", read(run(1, 40) + &other + &run(1, 40), &DEFAULT)?.num_warmup, 0)
}

fn tokens() -> Result<(), Failed> {
    let trace = read(row(0, &[1, 2]) + &row(0, &[3, 4]) + &row(0, &[5, 6]), &DEFAULT)?;
    let ids = |n| trace.tokens(n).map(|r| (r.num_tokens, r.k, r.topk_idx));
    same("none", ids(0)?, (0, 2, vec![]))?;
    same("fewer", ids(2)?, (2, 2, vec![1, 2, 3, 4]))?;
    same("more", ids(5)?, (5, 2, vec![1, 2, 3, 4, 5, 6, 1, 2, 3, 4]))?;
    same("weights too", &trace.tokens(4)?.topk_weights[6..], &[1.5, 2.5])?;
    let much = usize::MAX / 2;
    refused("too many", trace.tokens(much), &format!("trace: num_tokens is {much}, expected a table of at most isize::MAX bytes"))?;
    let empty = read(row(0, &[1]).repeat(64), &DEFAULT)?;
    same("none of none", empty.tokens(0)?.num_tokens, 0)?;
    let message = "trace: number of rows is 0, 64 left out as warm-up, expected at least 1 (the warm-up can be kept)";
    refused("some of none", empty.tokens(1), message)
}

fn files() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, row(2, &[1, 0]) + "x\n")?;
    let why = "not a JSON object: expected value at column 1";
    refused("bad file", Trace::read(&path, &DEFAULT), &format!("{}:2: {why}", path.display()))?;
    std::fs::write(&path, row(2, &[1, 0]))?;
    same("good file", Trace::read(&path, &DEFAULT)?.layer, 2)?;
    let missing = folder.path().join("b.jsonl");
    match Trace::read(&missing, &DEFAULT) {
        Err(Error::Io { what, .. }) => same("missing file", what, format!("opening {}", missing.display()))?,
        other => return Err(format!("missing file: {other:?}").into()),
    }
    match Trace::read(folder.path(), &DEFAULT) {
        Err(Error::Io { .. }) => Ok(()),
        other => Err(format!("a folder: {other:?}").into()),
    }
}
