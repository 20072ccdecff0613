//! Files that are broken, or made to do harm: each is refused in words.

use std::path::Path;

use libtest_mimic::{Failed, Trial};
use moe_kernels::Error;
use moe_kernels::layer::checkpoint::Index;
use moe_kernels::layer::checkpoint::tensors::Header;
use moe_kernels::layer::{Checkpoint, MoeLayer, TensorFile};
use safetensors::Dtype;
use serde_json::json;

use super::refused;
use super::write::Draft;

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::hostile: headers", headers),
        Trial::test("checkpoint::hostile: indices", indices),
        Trial::test("checkpoint::hostile: paths", paths),
        Trial::test("checkpoint::hostile: tensors", tensors),
        Trial::test("checkpoint::hostile: folders", folders),
    ]
}

/// A file of this header, with `data` bytes behind it.
fn file(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

fn headers() -> Result<(), Failed> {
    let entry = |name: &str, dtype: &str, shape: &str, from: &str, to: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let one = |shape: &str, from: &str, to: &str| format!("{{{}}}", entry("a", "BF16", shape, from, to));
    let two = |first: String, second: String| format!("{{{first},{second}}}");
    let a = |from, to| entry("a", "U8", "[4]", from, to);
    let max = u64::MAX.to_string();
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("nothing", vec![], &["has 0 bytes"]),
        ("seven bytes", vec![0; 7], &["has 7 bytes"]),
        ("no header", vec![0; 8], &["file:"]),
        ("longest header", u64::MAX.to_le_bytes().to_vec(), &["header of 18446744073709551615 bytes", "at most 100000000"]),
        ("long header", 100_000_000u64.to_le_bytes().to_vec(), &["header of 100000000 bytes in a file of 8"]),
        ("longer than the file", file("{}", 0)[..9].to_vec(), &["header of 2 bytes in a file of 9"]),
        ("no object", file("[]", 0), &["expected an object"]),
        ("no tensors but bytes", file("{}", 1), &["tensors end at byte 0, the file has 1"]),
        ("past the end", file(&one("[4]", "0", "8"), 7), &["`a`", "has bytes 0 to 8", "the file has 7"]),
        ("far past the end", file(&one("[4]", &max, &max), 8), &["`a`", "18446744073709551615"]),
        ("backwards", file(&one("[4]", "8", "0"), 8), &["`a`", "has bytes 8 to 0"]),
        ("negative", file(&one("[4]", "-8", "0"), 8), &["invalid value"]),
        ("fraction", file(&one("[4.5]", "0", "9"), 9), &["invalid type"]),
        ("too few bytes", file(&one("[4]", "0", "6"), 6), &["`a`, [4] of BF16, has 6 bytes, expected 8"]),
        ("product overflows", file(&one("[4294967296,4294967296,4294967296]", "0", "8"), 8), &["`a`", "more bytes than can be counted"]),
        ("bits overflow", file(&one(&format!("[{}]", 1u64 << 61), "0", "8"), 8), &["more bytes than can be counted"]),
        ("part of a byte", file(&two(entry("a", "F4", "[3]", "0", "1"), entry("b", "U8", "[1]", "1", "2")), 2), &["`a`"]),
        ("behind the last", file(&one("[4]", "0", "8"), 9), &["tensors end at byte 8, the file has 9"]),
        ("a hole", file(&two(a("0", "4"), entry("b", "U8", "[4]", "5", "9")), 9), &["`b` does not begin where the one before it ends"]),
        ("an overlap", file(&two(a("0", "4"), entry("b", "U8", "[4]", "3", "7")), 7), &["`b` does not begin"]),
        ("the same bytes", file(&two(a("0", "4"), entry("b", "U8", "[4]", "0", "4")), 4), &["`b` does not begin"]),
        ("a tensor twice", file(&two(a("0", "4"), a("0", "4")), 4), &["`a` is there twice"]),
        ("a field twice", file(r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1), &["duplicate field"]),
        ("metadata twice", file(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), &["`__metadata__` is there twice"]),
        ("no such type", file(r#"{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}"#, 1), &["unknown variant `Q4`"]),
        ("no shape", file(r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#, 1), &["missing field `shape`"]),
        ("three offsets", file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}}"#, 1), &["file:"]),
        ("deep metadata", file(&format!("{{\"a\":{}", "[".repeat(200_000)), 0), &["file:"]),
        ("deep lists", file(&format!("{{\"__metadata__\":{}", "[".repeat(200_000)), 0), &["file:"]),
        ("not UTF-8", [&2u64.to_le_bytes()[..], b"\xFF}"].concat(), &["file:"]),
        ("a long name", file(&format!("{{{}}}", entry(&"n".repeat(50_000), "U8", "[4]", "0", "4")), 3), &["nnn..."]),
    ];
    for (what, bytes, words) in cases {
        refused(what, Header::parse(&bytes, "file".as_ref()), words)?;
    }
    // What is allowed: no tensors, empty ones, spaces behind the header, any order.
    let other_order = two(entry("b", "U8", "[2]", "4", "6"), a("0", "4"));
    for (good, data) in [("{}", 0), ("{}   ", 0), (&one("[0]", "0", "0"), 0), (&one("[]", "0", "2"), 2), (&other_order, 6)] {
        Header::parse(&file(good, data), "file".as_ref()).map_err(|error| format!("{good}: {error}"))?;
    }
    Ok(())
}

fn indices() -> Result<(), Failed> {
    let parse = |text: &str| Index::parse(text.as_bytes(), "index".as_ref());
    let naming = |file: &str| parse(&json!({"weight_map": {"a": file}}).to_string());
    let cases: [(&str, &[&str]); 8] = [
        ("", &["index:"]),
        ("[]", &["index:1"]),
        ("{}", &["missing field `weight_map`"]),
        (r#"{"weight_map": []}"#, &["expected an object"]),
        (r#"{"weight_map": {"a": 1}}"#, &["expected a string"]),
        (r#"{"weight_map": {"a": {"b": "c"}}}"#, &["expected a string"]),
        (r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#, &["`a` is there twice"]),
        (r#"{"weight_map": {}, "weight_map": {}}"#, &["duplicate field `weight_map`"]),
    ];
    for (text, words) in cases {
        refused(text, parse(text), words)?;
    }
    refused("deep", parse(&format!("{{\"metadata\": {}", "[".repeat(200_000))), &["index:"])?;
    let outside = [
        "/etc/x.safetensors",
        "../x.safetensors",
        "a/../../x.safetensors",
        "./x.safetensors",
        "a\\x.safetensors",
        "C:x.safetensors",
        "a\0.safetensors",
    ];
    for file in outside {
        refused(file, naming(file), &["tensor `a`", "not inside the folder"])?;
    }
    // No index leads to an index, so none leads to itself.
    for file in ["model.safetensors.index.json", "config.json", "", "..", "pytorch_model.bin", "x.safetensors/"] {
        refused(file, naming(file), &["tensor `a`", "is no safetensors file"])?;
    }
    naming("deeper/x.safetensors")?;
    Ok(())
}

/// Links out of the folder, and what is no file.
fn paths() -> Result<(), Failed> {
    use std::os::unix::fs::symlink;
    let (outside, draft) = (Draft::toy().write()?, Draft::toy());
    let open = |dir: &Path| Checkpoint::open(dir).and_then(|checkpoint| checkpoint.layer(0));

    for name in ["model.safetensors", "config.json"] {
        let dir = draft.write()?;
        std::fs::remove_file(dir.path().join(name))?;
        symlink(outside.path().join(name), dir.path().join(name))?;
        refused(name, open(dir.path()), &[name, "leads out of the folder"])?;
        // A chain of links, and a ring of them.
        std::fs::rename(dir.path().join(name), dir.path().join("other"))?;
        symlink("other", dir.path().join(name))?;
        refused(name, open(dir.path()), &[name, "leads out of the folder"])?;
        std::fs::remove_file(dir.path().join("other"))?;
        symlink(name, dir.path().join("other"))?;
        refused(name, open(dir.path()), &[dir.path().to_str().ok_or("path")?])?;
    }
    // Through the index: a file, and a folder on the way.
    let dir = draft.write_sharded(|_| "deeper/x.safetensors".into())?;
    open(dir.path())?;
    let file = dir.path().join("deeper/x.safetensors");
    std::fs::remove_file(&file)?;
    symlink(outside.path().join("model.safetensors"), &file)?;
    refused("linked file", open(dir.path()), &["x.safetensors", "leads out of the folder"])?;
    std::fs::remove_dir_all(dir.path().join("deeper"))?;
    std::fs::rename(outside.path().join("model.safetensors"), outside.path().join("x.safetensors"))?;
    symlink(outside.path(), dir.path().join("deeper"))?;
    refused("linked folder", open(dir.path()), &["deeper/x.safetensors", "leads out of the folder"])?;

    // A link inside is fine.
    let dir = draft.write()?;
    std::fs::rename(dir.path().join("model.safetensors"), dir.path().join("real"))?;
    symlink("real", dir.path().join("model.safetensors"))?;
    open(dir.path())?;
    // No regular files: a folder, a device, a pipe (opening it would wait for ever).
    std::fs::remove_file(dir.path().join("model.safetensors"))?;
    std::fs::create_dir(dir.path().join("model.safetensors"))?;
    refused("folder", open(dir.path()), &["model.safetensors", "is not a regular file"])?;
    refused("device", TensorFile::open("/dev/zero".as_ref()), &["/dev/zero", "is not a regular file"])?;
    let pipe = dir.path().join("config.json");
    std::fs::remove_file(&pipe)?;
    if std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
        refused("pipe", open(dir.path()), &["config.json", "is not a regular file"])?;
    }
    Ok(())
}

fn layer(draft: &Draft) -> Result<MoeLayer, Error> {
    let dir = draft.write().map_err(|_| Error::Io { what: "write the draft".into(), why: "test".into() })?;
    Checkpoint::open(dir.path())?.layer(0)
}

/// Tensors that are missing or not what they should be, one at a time.
fn tensors() -> Result<(), Failed> {
    let mut rich = Draft::toy().set("model_type", json!("qwen2_moe")).set("shared_expert_intermediate_size", json!(16));
    for (name, shape) in [("gate_proj", [16, 8]), ("up_proj", [16, 8]), ("down_proj", [8, 16])] {
        rich.put(&format!("model.layers.0.mlp.shared_expert.{name}.weight"), Dtype::BF16, &shape);
    }
    rich.put("model.layers.0.mlp.shared_expert_gate.weight", Dtype::BF16, &[1, 8]);
    let mut v3 = Draft::toy().set("model_type", json!("deepseek_v3")).set("n_group", json!(1)).set("topk_group", json!(1));
    v3 = v3.set("first_k_dense_replace", json!(0)).set("n_shared_experts", json!(0));
    v3.put("model.layers.0.mlp.gate.e_score_correction_bias", Dtype::F32, &[2]);
    let mut fused = Draft::toy();
    fused.rename(|name| (!name.contains("experts")).then(|| name.to_string()));
    fused.put("model.layers.0.mlp.experts.gate_up_proj", Dtype::F16, &[2, 16, 8]);
    fused.put("model.layers.0.mlp.experts.down_proj", Dtype::F16, &[2, 8, 8]);
    for draft in [Draft::toy(), rich, v3, fused] {
        layer(&draft)?;
        for name in draft.tensors.keys() {
            let mut changed = draft.clone();
            let (dtype, shape, _) = changed.tensors.remove(name).ok_or("tensor")?;
            refused(name, layer(&changed), &["is missing"])?;
            // Some file names a whole row of tensors less, the error the first of them.
            if !name.contains("gate_up_proj") {
                refused(name, layer(&changed), &[name])?;
            }
            let wrong = [
                [&shape[..shape.len() - 1], &[shape[shape.len() - 1] + 1]].concat(),
                [&[1], &shape[..]].concat(),
                vec![],
                vec![shape.iter().product()],
            ];
            for wrong in wrong.into_iter().filter(|wrong| *wrong != shape) {
                changed.put(name, dtype, &wrong);
                refused(name, layer(&changed), &[name, &format!("has shape {wrong:?}, expected {shape:?}")])?;
            }
            for dtype in [Dtype::I32, Dtype::U8, Dtype::F8_E5M2, Dtype::F64, Dtype::BOOL] {
                changed.put(name, dtype, &shape);
                refused(name, layer(&changed), &[name, "is of type"])?;
            }
        }
    }
    Ok(())
}

fn folders() -> Result<(), Failed> {
    let dir = Draft::toy().write()?;
    refused("absent", Checkpoint::open(&dir.path().join("absent")), &["absent"])?;
    refused("a file", Checkpoint::open(&dir.path().join("config.json")), &["dir is", "a folder"])?;
    std::fs::remove_file(dir.path().join("model.safetensors"))?;
    refused("no weights", Checkpoint::open(dir.path()), &["has neither model.safetensors nor model.safetensors.index.json"])?;
    std::fs::write(dir.path().join("model.safetensors"), "")?;
    refused("empty weights", Checkpoint::open(dir.path()), &["model.safetensors", "is empty"])?;
    // A sparse file as large as a model: nothing but its first bytes is read.
    let big = std::fs::File::create(dir.path().join("model.safetensors"))?;
    big.set_len(1 << 40)?;
    refused("all zeros", Checkpoint::open(dir.path()), &["model.safetensors"])?;
    let config = std::fs::File::create(dir.path().join("config.json"))?;
    config.set_len(1 << 40)?;
    refused("long config", Checkpoint::open(dir.path()), &["config.json", "is longer than 4194304 bytes"])?;
    std::fs::remove_file(dir.path().join("config.json"))?;
    refused("no config", Checkpoint::open(dir.path()), &["config.json"])
}
