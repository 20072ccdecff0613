//! The private folder and the socket at which the ranks of one machine meet.
#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::net::sockopt::socket_peercred;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Longest path of a Unix socket (spec: `sun_path` of Linux, less the zero at its end).
const MAX_PATH_BYTES: usize = 107;

fn io(what: impl Into<String>, why: impl ToString) -> Error {
    Error::Io { what: what.into(), why: why.to_string() }
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Refuses another user.
pub(crate) fn same_user(theirs: u32, mine: u32) -> Result<()> {
    match theirs == mine {
        true => Ok(()),
        false => Err(Error::invalid("world", "the process at the other end", format!("of user {theirs}"), format!("of user {mine}"))),
    }
}

/// Refuses a connection to a process of another user.
pub(crate) fn check_peer(socket: &UnixStream) -> Result<()> {
    let theirs = socket_peercred(socket).map_err(|e| io("asking whose process is at the other end", e))?;
    same_user(theirs.uid.as_raw(), me())
}

/// The folder of this user below the system's.
fn default_folder() -> PathBuf {
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_dir());
    base.unwrap_or_else(std::env::temp_dir).join(format!("moe-kernels-{}", me()))
}

/// Makes a folder that is this user's alone, or checks that it is. `false`: it, or the one around it, went away meanwhile.
fn private_folder(path: &Path) -> Result<bool> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == ErrorKind::NotFound && path.parent().is_some_and(|around| !around.exists()) => return Ok(false),
        Err(error) => return Err(io(format!("making {}", path.display()), error)),
    }
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        found => found.map_err(|e| io(format!("reading {}", path.display()), e))?,
    };
    if !found.is_dir() || found.uid() != me() || found.mode() & 0o077 != 0 {
        let got = format!("{} of user {} with mode {:o}", path.display(), found.uid(), found.mode() & 0o7777);
        return Err(Error::invalid("world", "folder", got, format!("a folder of user {} with mode 700", me())));
    }
    Ok(true)
}

/// Hexadecimal digits that stand for a name (derived: 64 bits, far more than the names of a machine need to differ).
fn short(text: &str) -> String {
    Sha256::digest(text)[..8].iter().map(|b| format!("{b:02x}")).collect()
}

/// Where the ranks of one world meet.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Of the user.
    base: PathBuf,
    /// Of the job.
    folder: PathBuf,
    name: String,
}

impl Place {
    /// The place of a world, known by its key, in a job. Makes nothing.
    pub fn new(base: Option<&Path>, job: &str, key: &str) -> Result<Self> {
        let base = base.map_or_else(default_folder, Path::to_owned);
        let place = Place { folder: base.join(short(job)), base, name: short(key) };
        let len = place.socket().as_os_str().len();
        match len <= MAX_PATH_BYTES {
            true => Ok(place),
            false => Err(Error::invalid("world", "folder", format!("{} ({len} bytes in all)", place.socket().display()), "a shorter path")),
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    fn lock(&self) -> PathBuf {
        self.folder.join(format!("{}.lock", self.name))
    }

    /// Connects to rank 0 of the world, which must be of this user. `None`: it is not there yet.
    pub fn connect(&self) -> Result<Option<UnixStream>> {
        match UnixStream::connect(self.socket()) {
            Ok(socket) => check_peer(&socket).map(|()| Some(socket)),
            // The socket of a dead job refuses; the rank 0 that is awaited replaces it.
            Err(error) if [ErrorKind::NotFound, ErrorKind::ConnectionRefused, ErrorKind::WouldBlock].contains(&error.kind()) => Ok(None),
            Err(error) => Err(io(format!("connecting to {}", self.socket().display()), error)),
        }
    }

    /// Takes the place for rank 0, as a new socket; what a dead job left here goes.
    ///
    /// # Errors
    /// `Busy` when another living process has it, `Invalid` when the folder is not private.
    pub fn claim(&self) -> Result<Claim> {
        // Whoever leaves a place removes its folder if it is empty: then it must be made again.
        const TRIES: usize = 100; // arbitrary: each means that another rank 0 left in the same moment
        for _ in 0..TRIES {
            if !private_folder(&self.base)? || !private_folder(&self.folder)? {
                continue;
            }
            if let Some(lock) = self.try_lock()? {
                match fs::remove_file(self.socket()) {
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        return Err(io(format!("removing {}", self.socket().display()), error));
                    }
                    _ => {}
                }
                match UnixListener::bind(self.socket()) {
                    Ok(listener) => {
                        listener.set_nonblocking(true).map_err(|e| io("setting up a socket", e))?;
                        return Ok(Claim { listener, place: self.clone(), _lock: lock });
                    }
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(io(format!("listening at {}", self.socket().display()), error)),
                }
            }
        }
        Err(io(format!("listening at {}", self.socket().display()), "its folder disappears again and again"))
    }

    /// The lock of the place, which the system gives back when its holder dies. `None`: the file went away meanwhile.
    fn try_lock(&self) -> Result<Option<File>> {
        let path = self.lock();
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = match file {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|e| io(format!("opening {}", path.display()), e))?,
        };
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            return match error {
                rustix::io::Errno::WOULDBLOCK => Err(Error::Busy {
                    op: "world",
                    what: format!("the meeting place {}", self.socket().display()),
                    why: "another rank 0 of the same job, group and generation is alive".into(),
                }),
                error => Err(io(format!("locking {}", path.display()), error)),
            };
        }
        // The lock counts only while its file is the one that others find.
        let mine = file.metadata().map(|found| (found.dev(), found.ino()));
        let there = fs::metadata(&path).map(|found| (found.dev(), found.ino()));
        Ok(matches!((mine, there), (Ok(mine), Ok(there)) if mine == there).then_some(file))
    }

    /// Removes what ranks of a job left, when all of them have ended.
    pub fn remove_job(base: Option<&Path>, job: &str) {
        let base = base.map_or_else(default_folder, Path::to_owned);
        // Nothing there is the usual case; what cannot be removed harms nobody.
        let _ = fs::remove_dir_all(base.join(short(job)));
        let _ = fs::remove_dir(base);
    }
}

/// A place with rank 0 in it. Dropping it removes socket, lock and empty folders.
#[derive(Debug)]
pub(crate) struct Claim {
    pub listener: UnixListener,
    place: Place,
    _lock: File,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The lock is held until the files are gone. Folders with other worlds in them stay.
        let _ = fs::remove_file(self.place.socket());
        let _ = fs::remove_file(self.place.lock());
        let _ = fs::remove_dir(&self.place.folder);
        let _ = fs::remove_dir(&self.place.base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_user_is_refused() {
        assert_eq!(same_user(1000, 1000), Ok(()));
        assert!(matches!(same_user(1001, 1000), Err(Error::Invalid { got, .. }) if got == "of user 1001"));
        assert!(matches!(same_user(0, 1000), Err(Error::Invalid { .. })), "not even the administrator");
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(check_peer(&socket), Ok(()));
    }

    #[test]
    fn a_place_has_one_owner_and_leaves_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let base = temporary.path().join("base");
        let place = Place::new(Some(&base), "job", "key").unwrap();
        assert!(place.connect().unwrap().is_none());
        let claim = place.claim().unwrap();
        assert!(place.connect().unwrap().is_some());
        assert!(matches!(place.claim(), Err(Error::Busy { .. })));
        let other = Place::new(Some(&base), "job", "another key").unwrap();
        let second = other.claim().unwrap();
        drop(claim);
        assert!(other.connect().unwrap().is_some());
        drop(second);
        assert!(!base.exists());
    }

    #[test]
    fn what_a_dead_job_left_is_replaced() {
        let temporary = tempfile::tempdir().unwrap();
        let base = temporary.path().join("base");
        let place = Place::new(Some(&base), "job", "key").unwrap();
        // As after SIGKILL: the files stay, the lock does not.
        private_folder(&base).unwrap();
        private_folder(&place.folder).unwrap();
        drop(UnixListener::bind(place.socket()).unwrap());
        fs::write(place.lock(), "").unwrap();
        assert!(place.connect().unwrap().is_none());
        let claim = place.claim().unwrap();
        assert!(place.connect().unwrap().is_some());
        drop(claim);
        assert!(!base.exists());
    }

    #[test]
    fn a_folder_of_all_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let temporary = tempfile::tempdir().unwrap();
        let base = temporary.path().join("base");
        fs::create_dir(&base).unwrap();
        fs::set_permissions(&base, fs::Permissions::from_mode(0o755)).unwrap();
        let place = Place::new(Some(&base), "job", "key").unwrap();
        assert!(matches!(place.claim(), Err(Error::Invalid { what, .. }) if what == "folder"));
        let elsewhere = temporary.path().join("link");
        std::os::unix::fs::symlink(temporary.path(), &elsewhere).unwrap();
        assert!(matches!(Place::new(Some(&elsewhere), "job", "key").unwrap().claim(), Err(Error::Invalid { .. })));
        let long = temporary.path().join("x".repeat(100));
        assert!(matches!(Place::new(Some(&long), "job", "key"), Err(Error::Invalid { .. })));
    }
}
