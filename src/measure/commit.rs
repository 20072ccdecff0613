//! The source and the compiler of the running program.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::{env, fs};

use sha2::{Digest, Sha256};

/// The commit that a program was built from, and how the files differed from it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Commit {
    /// Hash of the commit.
    pub id: String,
    /// Files that the commit holds were changed.
    pub is_dirty: bool,
    /// Files that it does not hold, those that git ignores left out. 0 when the build gave the commit.
    pub num_untracked: usize,
    /// The changes, when there are any and the checkout is there.
    pub diff: Option<Diff>,
}

/// The output of `git diff HEAD`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Diff {
    /// SHA-256 of all of it, in hexadecimal digits.
    pub sha256: String,
    /// Its size.
    pub bytes: usize,
    /// Its beginning, as long as was asked for.
    pub text: Option<String>,
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // 12 digits are arbitrary: enough to name a commit.
        let id = self.id.get(..12).unwrap_or(&self.id);
        write!(f, "{id}{}", if self.is_dirty { "-dirty" } else { "" })
    }
}

impl Commit {
    /// The commit of the checkout of this crate in whose `target` folder the running program lies; elsewhere the one that the build was given as
    /// `MOE_COMMIT` (with `-dirty` behind it for changed files): a program that was carried into another checkout is not of that one. With `max_diff_bytes` above 0 the diff's text is kept up to that size.
    pub(super) fn of_program(max_diff_bytes: usize) -> Option<Self> {
        let program = env::current_exe().ok();
        let checkout = program.as_deref().and_then(checkout_around);
        checkout
            .and_then(|folder| Commit::of_checkout(&folder, max_diff_bytes))
            .or_else(|| option_env!("MOE_COMMIT").and_then(Commit::of_build))
    }

    fn of_checkout(folder: &Path, max_diff_bytes: usize) -> Option<Self> {
        let id = String::from_utf8(git(folder, &["rev-parse", "HEAD"])?).ok()?.trim().to_owned();
        // The same bytes whatever the user's configuration says.
        let diff = git(folder, &["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD"])?;
        let untracked = git(folder, &["ls-files", "--others", "--exclude-standard", "-z"])?;
        Some(Commit {
            id,
            is_dirty: !diff.is_empty(),
            num_untracked: untracked.iter().filter(|byte| **byte == 0).count(),
            diff: (!diff.is_empty()).then(|| Diff::of(&diff, max_diff_bytes)),
        })
    }

    fn of_build(text: &str) -> Option<Self> {
        let (id, is_dirty) = match text.trim().strip_suffix("-dirty") {
            Some(id) => (id, true),
            None => (text.trim(), false),
        };
        (!id.is_empty()).then(|| Commit { id: id.to_owned(), is_dirty, num_untracked: 0, diff: None })
    }
}

impl Diff {
    fn of(bytes: &[u8], max_bytes: usize) -> Self {
        let sha256 = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let text = (max_bytes > 0).then(|| String::from_utf8_lossy(&bytes[..bytes.len().min(max_bytes)]).into_owned());
        Diff { sha256, bytes: bytes.len(), text }
    }
}

/// The nearest folder around `program` that holds this crate's manifest, if it was built there.
fn checkout_around(program: &Path) -> Option<PathBuf> {
    let is_ours = |folder: &&Path| {
        fs::read_to_string(folder.join("Cargo.toml")).is_ok_and(|text| text.contains(concat!("name = \"", env!("CARGO_PKG_NAME"), "\"")))
    };
    program.ancestors().find(is_ours).filter(|folder| program.starts_with(folder.join("target"))).map(Path::to_owned)
}

fn git(folder: &Path, args: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("git").arg("-C").arg(folder).args(args).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then_some(output.stdout)
}

/// The compiler, from the note that it leaves in the program's file: `rustc 1.95.0 (59807616e 2026-04-14)`. `None` where the note was stripped or the
/// platform has none. The file is searched once.
pub(super) fn rustc() -> Option<&'static str> {
    static RUSTC: OnceLock<Option<String>> = OnceLock::new();
    RUSTC.get_or_init(|| compiler_note(&fs::read(env::current_exe().ok()?).ok()?)).as_deref()
}

fn compiler_note(program: &[u8]) -> Option<String> {
    const NOTE: &[u8] = b"rustc version ";
    let mut rest = program;
    loop {
        // The first letter alone first: the file has tens of megabytes.
        let start = rest.iter().position(|byte| *byte == NOTE[0])?;
        rest = &rest[start + 1..];
        // This function's own constant is followed by no digit.
        let Some(version) = rest.strip_prefix(&NOTE[1..]).filter(|version| version.first().is_some_and(u8::is_ascii_digit)) else {
            continue;
        };
        let end = version.iter().position(|byte| !(b' '..=b'~').contains(byte))?;
        return Some(format!("rustc {}", std::str::from_utf8(&version[..end]).ok()?));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkout with one committed file.
    fn checkout() -> Option<tempfile::TempDir> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.txt"), "one\n").unwrap();
        git(folder.path(), &["init", "-q"])?;
        git(folder.path(), &["add", "a.txt"])?;
        git(folder.path(), &["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "t"])?;
        Some(folder)
    }

    #[test]
    fn changes_are_seen() {
        // Without git there is no commit to find, here and in the library.
        let Some(folder) = checkout() else { return };
        let commit = |max| Commit::of_checkout(folder.path(), max).unwrap();
        let clean = commit(100);
        assert_eq!((clean.id.len(), clean.is_dirty, clean.num_untracked, &clean.diff), (40, false, 0, &None));
        assert_eq!(clean.to_string(), clean.id[..12]);
        fs::write(folder.path().join("b.txt"), "").unwrap();
        assert_eq!((commit(0).is_dirty, commit(0).num_untracked), (false, 1));
        fs::write(folder.path().join("a.txt"), "two\n").unwrap();
        let dirty = commit(30);
        let diff = dirty.diff.clone().unwrap();
        assert!(dirty.is_dirty && dirty.to_string().ends_with("-dirty"));
        assert_eq!(diff.text.as_deref(), Some("diff --git a/a.txt b/a.txt\nind"));
        let whole = commit(usize::MAX).diff.unwrap();
        assert!(whole.text.as_ref().is_some_and(|text| text.contains("+two") && text.len() == whole.bytes));
        assert_eq!((&whole.sha256, whole.bytes), (&diff.sha256, diff.bytes));
        assert_eq!(commit(0).diff.unwrap().text, None);
        fs::write(folder.path().join("a.txt"), "three\n").unwrap();
        assert_ne!(commit(0).diff.unwrap().sha256, diff.sha256);
    }

    #[test]
    fn a_carried_program_is_not_of_the_checkout_around_it() {
        let folder = tempfile::tempdir().unwrap();
        let around = |program: &str| checkout_around(&folder.path().join(program));
        assert_eq!(around("target/release/moe"), None);
        fs::write(folder.path().join("Cargo.toml"), "name = \"moe-kernels\"\n").unwrap();
        assert_eq!(around("target/release/moe").as_deref(), Some(folder.path()));
        assert_eq!(around("elsewhere/moe"), None);
    }

    #[test]
    fn hash_is_the_standard_one() {
        // Spec: FIPS 180-4, example of one block.
        assert_eq!(Diff::of(b"abc", 0).sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn a_build_may_name_its_commit() {
        let of = |text| Commit::of_build(text).map(|commit| (commit.id, commit.is_dirty));
        assert_eq!(of("abc-dirty\n"), Some(("abc".into(), true)));
        assert_eq!([of("abc"), of("")], [Some(("abc".into(), false)), None]);
    }

    #[test]
    fn the_compiler_left_its_name() {
        let file = b"r\0rrustc version \0 rustc version x rustc version 1.2.3 (abc 2026-01-01)\0GCC";
        assert_eq!(compiler_note(file).as_deref(), Some("rustc 1.2.3 (abc 2026-01-01)"));
        assert_eq!([compiler_note(b"rustc version 1.2"), compiler_note(b"")], [None, None]);
        if cfg!(target_os = "linux") {
            assert!(rustc().is_some_and(|version| version.starts_with("rustc 1.")));
        }
    }
}
