//! From a program's text to a loaded kernel: in memory, on disk, or compiled now.

use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::device::Device;
use super::launch::Kernel;
use super::nvrtc::{Nvrtc, OPTIONS};
use super::program::{Program, Spec};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::measure::environment::cache_folder;

/// Where machine code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The compiler made it now.
    Compiler,
    /// It lay in the cache folder.
    Disk,
}

/// Machine code of a program.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The cubin.
    pub image: Vec<u8>,
    /// What the compiler said, with registers and spills; empty when it came from the disk.
    pub log: String,
    /// Where it came from.
    pub origin: Origin,
    /// How long that took.
    pub time: Duration,
}

/// By device and spec.
type Loaded<S> = HashMap<(u32, S), Kernel, BuildHasherDefault<Mixer>>;

/// The kernels of one operation that are loaded, by device and spec. Made as a `static`.
pub struct Kernels<S: Spec> {
    loaded: RwLock<Option<Loaded<S>>>,
}

/// A hash of the few small fields of a spec, a multiplication for each: looking a kernel up is a part of every hot call, and nobody chooses specs
/// to collide.
#[derive(Default)]
struct Mixer(u64);

impl Mixer {
    fn mix(&mut self, value: u64) {
        // The golden ratio's bits (arbitrary: any odd number of many bits).
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        // The table takes the low bits, a product's best are the high ones.
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.mix(u64::from(*byte)));
    }

    fn write_u32(&mut self, value: u32) {
        self.mix(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }
}

/// Two threads that need the same kernel do not both make it; for different ones they seldom wait for each other (16 is arbitrary: threads that compile
/// at once).
static COMPILING: [Mutex<()>; 16] = [const { Mutex::new(()) }; 16];

impl<S: Spec> Kernels<S> {
    /// None loaded.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Kernels { loaded: RwLock::new(None) }
    }

    fn find(&self, ordinal: u32, spec: S) -> Option<Kernel> {
        let loaded = self.loaded.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        loaded.as_ref()?.get(&(ordinal, spec)).copied()
    }

    /// The kernel of `spec` on the stream's device. Allocates nothing when it is loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when it is not loaded while the stream is being captured; [`Error::Library`] without a compiler; [`Error::Compile`] with
    /// the compiler's whole log; [`Error::Gpu`] from the driver.
    pub fn get(&self, op: &'static str, stream: &Stream, spec: S) -> Result<Kernel> {
        if let Some(kernel) = self.find(stream.device().ordinal(), spec) {
            return Ok(kernel);
        }
        if stream.is_capturing()? {
            return Err(Error::Unsupported {
                op,
                what: format!("loading kernel `{}` while the stream is captured", spec.program().name),
                why: "a capture cannot compile or load; call `precompile` of the operation, or the operation itself, once before it".into(),
            });
        }
        self.load(stream.device(), spec).map(|(kernel, _)| kernel)
    }

    /// Compiles and loads the kernel of `spec` unless it is loaded; says where it came from, `None` when it was loaded before.
    pub fn load(&self, device: &Device, spec: S) -> Result<(Kernel, Option<Origin>)> {
        let lock = &COMPILING[BuildHasherDefault::<Mixer>::default().hash_one(spec) as usize % COMPILING.len()];
        let _one = lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(kernel) = self.find(device.ordinal(), spec) {
            return Ok((kernel, None));
        }
        let program = spec.program();
        let compiled = compile(&program, &architecture(device), cache_folder().as_deref())?;
        let kernel = Kernel::load(device, &program, &compiled.image)?;
        let mut loaded = self.loaded.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        loaded.get_or_insert_default().insert((device.ordinal(), spec), kernel);
        Ok((kernel, Some(compiled.origin)))
    }
}

/// The architecture to compile for: with all features of this very one where they exist (spec: `a` targets from 9.0 on).
pub fn architecture(device: &Device) -> String {
    let (major, minor) = device.compute_capability();
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// Machine code of `program` for `arch`, from the cache folder if there is a whole file in it, else from the compiler; a new one is put there.
///
/// # Errors
/// [`Error::Library`] without a compiler, [`Error::Compile`] with its whole log. A cache that cannot be written is not an error: the next process
/// compiles again.
pub fn compile(program: &Program, arch: &str, cache: Option<&Path>) -> Result<Compiled> {
    let start = Instant::now();
    let nvrtc = Nvrtc::get()?;
    let text = program.text();
    let file = match cache {
        Some(folder) => Some(file_of(folder, &key(&text, program.entry, arch, nvrtc.version()?))),
        None => None,
    };
    if let Some(image) = file.as_ref().and_then(|file| read(file)) {
        return Ok(Compiled { image, log: String::new(), origin: Origin::Disk, time: start.elapsed() });
    }
    let (image, log) = nvrtc.compile(&program.name, &text, arch)?;
    if let Some(file) = &file {
        write(file, &image);
    }
    Ok(Compiled { image, log, origin: Origin::Compiler, time: start.elapsed() })
}

/// Whether the cache folder has a file for `program`; whether it is whole, whoever reads it finds out.
///
/// # Errors
/// [`Error::Library`] without a compiler, whose version is a part of the file's name.
pub fn is_cached(program: &Program, arch: &str, folder: &Path) -> Result<bool> {
    Ok(file_of(folder, &key(&program.text(), program.entry, arch, Nvrtc::get()?.version()?)).is_file())
}

type Hash = [u8; 32];

/// What decides the machine code: sources with constants, entry, architecture, flags, compiler. Never a number that follows the data.
fn key(text: &str, entry: &str, arch: &str, (major, minor): (u32, u32)) -> Hash {
    let mut hash = Sha256::new();
    let version = format!("{major}.{minor}");
    for part in [text, entry, arch, version.as_str()].into_iter().chain(OPTIONS) {
        // With its length, so that no two lists run together to the same bytes.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// First bytes of a file of the cache; a change of its form changes them (arbitrary).
const MAGIC: &[u8; 8] = b"MOECUBN1";

fn file_of(folder: &Path, key: &Hash) -> PathBuf {
    let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    folder.join("kernels").join(format!("{name}.cubin"))
}

/// The image of a file whose length and checksum are right.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (magic, rest) = bytes.split_first_chunk::<8>()?;
    let (checksum, image) = rest.split_first_chunk::<32>()?;
    let is_whole = magic == MAGIC && Hash::from(Sha256::digest(image)) == *checksum;
    is_whole.then(|| image.to_vec())
}

/// Puts a file in place in one step, so that no process reads half of it; of several writers one wins, and all have the same bytes.
fn write(file: &Path, image: &[u8]) {
    let Some(folder) = file.parent() else { return };
    let whole = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        new.write_all(MAGIC)?;
        new.write_all(&Hash::from(Sha256::digest(image)))?;
        new.write_all(image)?;
        new.as_file().sync_all()?;
        new.persist(file)?;
        Ok(())
    };
    // The cache only saves time: a folder that cannot be written costs it, nothing else.
    let _ = whole();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_of(folder.path(), &[7; 32]);
        assert_eq!(read(&file), None);
        let image: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        write(&file, &image);
        assert_eq!(read(&file), Some(image.clone()));
        let good = fs::read(&file).unwrap();
        for cut in [0, 7, 8, 39, 40, good.len() - 1] {
            fs::write(&file, &good[..cut]).unwrap();
            assert_eq!(read(&file), None, "{cut} bytes");
        }
        for at in [0, 8, 39, 40, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&file, &bad).unwrap();
            assert_eq!(read(&file), None, "byte {at}");
        }
        let mut long = good.clone();
        long.push(0);
        fs::write(&file, &long).unwrap();
        assert_eq!(read(&file), None, "one byte too many");
        // A bad file is replaced.
        write(&file, &image);
        assert_eq!(read(&file), Some(image));
        assert_eq!(fs::read_dir(folder.path().join("kernels")).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a file");
        fs::write(&file, "x").unwrap();
        write(&file_of(&file, &[1; 32]), b"image");
        assert_eq!(read(&file_of(&file, &[1; 32])), None);
    }

    #[test]
    fn keys_differ_in_every_part() {
        let keys = [
            key("text", "entry", "sm_90a", (13, 0)),
            key("texte", "ntry", "sm_90a", (13, 0)),
            key("text", "entry", "sm_80", (13, 0)),
            key("text", "entry", "sm_90a", (12, 8)),
            key("text ", "entry", "sm_90a", (13, 0)),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b), "{i}");
        }
        assert_eq!(keys[0], key("text", "entry", "sm_90a", (13, 0)));
    }

    #[test]
    fn specs_do_not_share_a_hash() {
        use std::hash::Hash;
        let hash = |spec: (u32, [Option<bool>; 2], u64, [u8; 3])| {
            let mut mixer = Mixer::default();
            spec.hash(&mut mixer);
            mixer.finish()
        };
        let mut hashes = std::collections::HashSet::new();
        let flags = [None, Some(false), Some(true)];
        for (i, j) in (0..9).flat_map(|i| (0..64u64).map(move |j| (i, j))) {
            hashes.insert(hash((1, [flags[i / 3], flags[i % 3]], j % 8, [j as u8 / 8, 0, 1])));
        }
        assert_eq!(hashes.len(), 9 * 64);
        // Its low bits choose the place: they spread too.
        let places: std::collections::HashSet<u64> = hashes.iter().map(|hash| hash % 1024).collect();
        assert!(places.len() > 350, "{} places", places.len()); // 439 of 1024 if the hash were random
    }

    #[test]
    fn writers_do_not_disturb_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_of(folder.path(), &[3; 32]);
        let image = vec![5u8; 1 << 16];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        write(&file, &image);
                        assert_eq!(read(&file).as_ref(), Some(&image));
                    }
                });
            }
        });
    }
}
