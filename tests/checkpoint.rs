//! Tests of the reader of checkpoints.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use moe_kernels::layer::Checkpoint;
use moe_kernels::{Error, Expert};

mod config;
mod corpus;
mod hostile;
mod samples;
mod variants;
mod write;

/// The recorded models, as transformers saved them.
const SAMPLES: [&str; 4] = ["qwen2_moe", "qwen3_moe", "deepseek_v3", "mixtral"];

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    [config::trials, corpus::trials, hostile::trials, samples::trials, variants::trials].iter().flat_map(|trials| trials()).collect()
}

fn folder(sample: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/checkpoints").join(sample)
}

fn open(sample: &str) -> Result<Checkpoint, Error> {
    Checkpoint::open(&folder(sample))
}

/// The first `num` ids.
fn ids(num: usize) -> Vec<Expert> {
    (0..num as u32).map(Expert).collect()
}

/// Fails with what was got and what was wanted.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Result<(), Failed> {
    if got == want { Ok(()) } else { Err(format!("{what}: got {got:?}, expected {want:?}").into()) }
}

/// Fails unless the call was refused with all of these words.
fn refused<T: std::fmt::Debug>(what: &str, result: Result<T, Error>, words: &[&str]) -> Result<(), Failed> {
    let message = match result {
        Ok(value) => return Err(format!("{what}: accepted as {:.200}, expected an error with {words:?}", format!("{value:?}")).into()),
        Err(error) => error.to_string(),
    };
    if message.len() > 1500 {
        return Err(format!("{what}: a message of {} bytes", message.len()).into());
    }
    match words.iter().find(|&&word| !message.contains(word)) {
        Some(word) => Err(format!("{what}: `{message}`, expected `{word}` in it").into()),
        None => Ok(()),
    }
}
