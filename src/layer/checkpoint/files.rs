//! Files of a checkpoint's folder: only from inside it, only regular ones, read whole or mapped.
#![deny(unsafe_code)]

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::json::{quoted, wrong};
use crate::error::{Error, Result};

/// A folder, with what its files may be links to.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    path: PathBuf,
    /// The folder without links and, in a cache of the Hugging Face hub, the folder `blobs` to which all files of a snapshot are links.
    roots: Vec<PathBuf>,
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let root = canonical(path)?;
        if !root.is_dir() {
            return Err(Error::invalid("checkpoint", "dir", path.display(), "a folder"));
        }
        let mut roots = vec![root.clone()];
        // spec: `models--A--B/snapshots/REVISION/config.json` -> `models--A--B/blobs/HASH`.
        if let Some(model) = root.parent().filter(|p| p.ends_with("snapshots")).and_then(Path::parent) {
            roots.push(model.join("blobs"));
        }
        Ok(Folder { path: path.to_path_buf(), roots })
    }

    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.join(name).exists()
    }

    /// Where the file of that name really is, after all links.
    pub(super) fn resolve(&self, name: &str) -> Result<PathBuf> {
        let path = self.join(name);
        let real = canonical(&path)?;
        match self.roots.iter().any(|root| real.starts_with(root)) {
            true => Ok(real),
            false => Err(wrong(&path, format!("leads out of the folder, to {}", quoted(&real.display().to_string())))),
        }
    }
}

fn canonical(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|error| failed("open", path, error))
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::Io { what: format!("{what} {}", path.display()), why: error.to_string() }
}

/// Opens a regular file: opening a pipe would wait for its writer. Also its size.
fn open(path: &Path) -> Result<(File, u64)> {
    let metadata = std::fs::metadata(path).map_err(|error| failed("open", path, error))?;
    if !metadata.is_file() {
        return Err(wrong(path, "is not a regular file"));
    }
    Ok((File::open(path).map_err(|error| failed("open", path, error))?, metadata.len()))
}

/// The whole of a file of at most `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let (file, _) = open(path)?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| failed("read", path, error))?;
    if bytes.len() as u64 > limit {
        return Err(wrong(path, format!("is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// Maps a file; nothing of it is read yet.
pub(super) fn map(path: &Path) -> Result<Arc<Mmap>> {
    let (file, size) = open(path)?;
    if size == 0 {
        return Err(wrong(path, "is empty"));
    }
    // SAFETY: the map is only read, through slices of bytes, for which every content is valid; it lives as long as its `Arc`. That nobody truncates or
    // rewrites the file meanwhile is asked of the caller in the documentation of `Checkpoint::open` and `TensorFile::open`.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) };
    map.map(Arc::new).map_err(|error| failed("map", path, error))
}
