//! The fuzz corpora of the checkpoint reader and mutations of them, in the normal suite: no panic, short messages, and what is accepted is well formed.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use moe_kernels::layer::checkpoint::Index;
use moe_kernels::layer::checkpoint::tensors::Header;
use moe_kernels::layer::{Checkpoint, Model};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Error, Expert};

use super::write::Draft;

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::corpus: config", || mutations("config", config)),
        Trial::test("checkpoint::corpus: header", || mutations("header", header)),
        Trial::test("checkpoint::corpus: index", || mutations("index", index)),
        Trial::test("checkpoint::corpus: folders", folders),
    ]
}

/// Mutations of each file (arbitrary: about a second in all).
const MUTATIONS: u64 = 1000;
/// Pieces that reach the reader's branches.
const PIECES: [&[u8]; 20] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"-1",
    b"0",
    b"1e999",
    b"18446744073709551616",
    b"1000000000000",
    b"\xFF",
    b"\"num_experts\":2,",
    b"\"text_config\":{},",
    b"\"model_type\":\"deepseek_v3\",",
    b"\"topk_method\":\"group_limited_greedy\",",
    b"\"dtype\":\"F8_E4M3\"",
    b"\"shape\":[1]",
    b"../",
];

/// What a reader made of a file: refused, or accepted and well formed or not.
type Checked = Result<Result<(), String>, Error>;

fn mutations(corpus: &str, check: fn(&[u8]) -> Checked) -> Result<(), Failed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(corpus);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    files.sort(); // the order of a folder is no order, and the seeds follow it
    let (mut accepted, mut refused) = (0u64, 0u64);
    for (i, file) in files.iter().enumerate() {
        let original = std::fs::read(file)?;
        for mutation in 0..MUTATIONS {
            let bytes = mutated(&original, i as u64, mutation, 4);
            match check(&bytes) {
                Ok(Ok(())) => accepted += 1,
                Ok(Err(why)) => return Err(format!("{}, mutation {mutation}: {why}", file.display()).into()),
                Err(error) => {
                    refused += 1;
                    let message = error.to_string();
                    if message.len() > 1500 {
                        return Err(format!("{}, mutation {mutation}: a message of {} bytes", file.display(), message.len()).into());
                    }
                }
            }
        }
    }
    // A reader that refuses or accepts everything would make this test idle.
    if accepted < files.len() as u64 * MUTATIONS / 50 || refused < files.len() as u64 * MUTATIONS / 20 {
        return Err(format!("{accepted} accepted, {refused} refused of {} files", files.len()).into());
    }
    Ok(())
}

/// The file itself first, then with one to `most` changes.
fn mutated(original: &[u8], file: u64, mutation: u64, most: u64) -> Vec<u8> {
    let mut random = SplitMix64::stream(file, mutation);
    let mut bytes = original.to_vec();
    for _ in 0..if mutation == 0 { 0 } else { 1 + random.below(most) } {
        mutate(&mut bytes, &mut random);
    }
    bytes
}

fn mutate(bytes: &mut Vec<u8>, random: &mut SplitMix64) {
    let at = random.below(bytes.len() as u64 + 1) as usize;
    let end = (at + random.below(40) as usize).min(bytes.len());
    match random.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 => drop(bytes.drain(at..end)),
        2 => bytes.truncate(at),
        3 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
        // Leaves the JSON intact: another digit.
        4..=6 => {
            if let Some(digit) = bytes[at..].iter_mut().find(|b| b.is_ascii_digit()) {
                *digit = b'0' + random.below(10) as u8;
            }
        }
        _ => drop(bytes.splice(at..at, PIECES[random.below(PIECES.len() as u64) as usize].iter().copied())),
    }
}

fn config(bytes: &[u8]) -> Checked {
    let model = Model::parse(bytes, "config".as_ref())?;
    let num_moe = model.moe_layers().take(100).count();
    let is_good = model.shape.check().is_ok() && num_moe <= model.num_layers && !model.is_moe(model.num_layers);
    Ok(if is_good { Ok(()) } else { Err(format!("accepted {model:?}")) })
}

fn header(bytes: &[u8]) -> Checked {
    let ranges = Header::parse(bytes, "header".as_ref())?.ranges();
    // One after the other up to the end of the file.
    let ends = ranges.windows(2).all(|pair| pair[0].1.end == pair[1].1.start) && ranges.iter().all(|(_, range)| range.start <= range.end);
    let last = ranges.last().map_or(bytes.len(), |(_, range)| range.end);
    Ok(if ends && last == bytes.len() { Ok(()) } else { Err(format!("accepted {ranges:?} of {} bytes", bytes.len())) })
}

fn index(bytes: &[u8]) -> Checked {
    let index = Index::parse(bytes, "index".as_ref())?;
    let is_good = |file: &str| {
        file.ends_with(".safetensors") && !file.starts_with('/') && !file.split('/').any(|part| part == ".." || part.is_empty())
    };
    let files: Vec<_> = index.names().filter_map(|name| index.file_of(name)).collect();
    Ok(if files.iter().all(|file| is_good(file)) { Ok(()) } else { Err(format!("accepted {files:?}")) })
}

/// A whole toy model, one of its files changed at a time: what opens can be read.
fn folders() -> Result<(), Failed> {
    let dirs = [Draft::toy().write()?, Draft::toy().write_sharded(|name| format!("{}.safetensors", name.len() % 2))?];
    let (mut opened, mut refused) = (0, 0);
    for (i, dir) in dirs.iter().enumerate() {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(dir.path())?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
        files.sort();
        for (j, file) in files.iter().enumerate() {
            let original = std::fs::read(file)?;
            for mutation in 0..200 {
                // A new file each time: the old one may be mapped.
                std::fs::remove_file(file)?;
                std::fs::write(file, mutated(&original, (8 * i + j) as u64, mutation, 1))?;
                match Checkpoint::open(dir.path()).and_then(|checkpoint| checkpoint.layer(0)) {
                    Ok(layer) => {
                        opened += 1;
                        let ids: Vec<_> = (0..layer.shape().router.num_experts as u32).map(Expert).collect();
                        let bytes = layer.experts(&ids)?.size_bytes() + layer.common()?.size_bytes();
                        let expected = layer.shape().layer_bytes(layer.weight_dtype());
                        if layer.weight_dtype() == moe_kernels::DType::BF16 && bytes != expected {
                            return Err(format!("{}, mutation {mutation}: {bytes} bytes, expected {expected}", file.display()).into());
                        }
                    }
                    Err(error) => {
                        refused += 1;
                        assert!(error.to_string().len() < 2000, "a message is short whatever the files hold: {error}");
                    }
                }
            }
            std::fs::write(file, &original)?;
        }
    }
    if opened < 100 || refused < 100 { Err(format!("{opened} opened, {refused} refused").into()) } else { Ok(()) }
}
