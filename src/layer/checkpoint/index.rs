//! `model.safetensors.index.json`: which file has which tensor.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::json::{self, Unique, quoted, wrong};
use crate::error::Result;

/// Longest index (arbitrary: several times that of DeepSeek-V3, 9 MB).
pub(super) const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The checked index of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    path: PathBuf,
    /// File of each tensor.
    files: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Content {
    weight_map: Unique<String>,
}

impl Index {
    /// Parses an index; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format): no JSON, no `weight_map`, a tensor twice, or a file that is no safetensors file inside the folder.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let Content { weight_map: Unique(files) } = json::parse(bytes, path)?;
        for (tensor, file) in &files {
            check(file).map_err(|why| wrong(path, format!("tensor `{}` is in `{}`, {why}", quoted(tensor), quoted(file))))?;
        }
        Ok(Index { path: path.to_path_buf(), files })
    }

    /// Where the index is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that has the tensor of that name, relative to the index.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.files.get(tensor).map(String::as_str)
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }
}

/// Fails, in words, for what is no name of a safetensors file below the folder. An index is none: so no index leads to itself or to another.
fn check(file: &str) -> Result<(), &'static str> {
    if !file.ends_with(".safetensors") {
        return Err("which is no safetensors file");
    }
    // A drive or a backslash is harmless here and leads elsewhere on another system.
    let is_inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
    if !is_inside || file.contains(['\\', ':', '\0']) {
        return Err("which is not inside the folder");
    }
    Ok(())
}
