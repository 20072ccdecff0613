//! Where and as whom a process meets the others of its world.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use super::secret::Secret;
use crate::ep::world::{SETUP_TIMEOUT, check_size, timeout_scale};
use crate::error::{Error, Result};
use crate::id::Rank;

/// Environment of a rank, as torchrun and our launcher set it.
pub(super) const RANK: &str = "RANK";
pub(super) const WORLD_SIZE: &str = "WORLD_SIZE";
pub(super) const LOCAL_RANK: &str = "LOCAL_RANK";
pub(super) const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
pub(super) const MASTER_ADDR: &str = "MASTER_ADDR";
pub(super) const MASTER_PORT: &str = "MASTER_PORT";
/// Ours: what tells this job from others, the secret of its ranks, and the folder in which they meet.
pub(super) const JOB: &str = "MOE_JOB";
pub(super) const SECRET: &str = "MOE_SECRET";
pub(super) const FOLDER: &str = "MOE_FOLDER";

const OP: &str = "world";

/// Where and as whom a process meets the others of its world: the job, the group inside it, the rank.
///
/// Processes of one machine and one user meet at a Unix socket in a folder that is private to that user. With [`over_tcp`](Self::over_tcp) they meet
/// at an address first, where each proves that it knows the job's secret.
///
/// ```
/// use moe_kernels::Rank;
/// use moe_kernels::ep::Rendezvous;
/// // Rank 1 of 4 in the group `experts` of a job that the caller names.
/// let rendezvous = Rendezvous::new("my job", "experts", Rank(1), 4)?;
/// // After a failure the same processes build their world again.
/// let again = rendezvous.clone().generation(1);
/// assert_ne!(rendezvous, again);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    pub(super) job: String,
    pub(super) group: String,
    pub(super) generation: u64,
    pub(super) rank: Rank,
    pub(super) size: usize,
    pub(super) local_rank: usize,
    pub(super) folder: Option<PathBuf>,
    pub(super) address: Option<String>,
    pub(super) secret: Secret,
    pub(super) timeout: Duration,
}

impl Rendezvous {
    /// Rank `rank` of `size` in the group `group` of the job `job`.
    ///
    /// # Errors
    /// `Invalid` for a size of 0 or above 64, or a rank that it does not have.
    pub fn new(job: impl Into<String>, group: impl Into<String>, rank: Rank, size: usize) -> Result<Self> {
        check_size(size)?;
        if rank.index() >= size {
            return Err(Error::invalid(OP, "rank", rank, format!("below the size, {size}")));
        }
        Ok(Rendezvous {
            job: job.into(),
            group: group.into(),
            generation: 0,
            rank,
            size,
            local_rank: rank.index(),
            folder: None,
            address: None,
            secret: Secret::default(),
            timeout: SETUP_TIMEOUT.mul_f64(timeout_scale()?),
        })
    }

    /// Whether the environment says which rank this process is.
    pub fn is_in_env() -> bool {
        std::env::var_os(RANK).is_some() && std::env::var_os(WORLD_SIZE).is_some()
    }

    /// The rank that torchrun or [`launch`](super::super::launch) made this process: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and
    /// `MASTER_PORT`, which name the job (with torchrun's run and restart, and with `MOE_JOB`), and `MOE_SECRET`.
    ///
    /// # Errors
    /// `Invalid` for a variable that is missing or makes no sense; `Unsupported` when the ranks are on several machines.
    pub fn from_env(group: impl Into<String>) -> Result<Self> {
        Self::from_variables(group, |name| std::env::var(name).ok())
    }

    pub(super) fn from_variables(group: impl Into<String>, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name) else { return Ok(None) };
            text.parse().map(Some).map_err(|_| Error::invalid(OP, name, format!("`{text}`"), "a number"))
        };
        let needed = |name: &str| number(name)?.ok_or_else(|| Error::invalid(OP, name, "not set", "set, as torchrun sets it"));
        let (rank, size) = (needed(RANK)?, needed(WORLD_SIZE)?);
        let local_size = number(LOCAL_WORLD_SIZE)?.unwrap_or(size);
        if local_size != size {
            return Err(on_several_machines(format!("{size} ranks of which {local_size} are here")));
        }
        let texts = [MASTER_ADDR, MASTER_PORT, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", JOB];
        let job = texts.map(|name| variable(name).unwrap_or_default()).join("/");
        let rank = u32::try_from(rank).map_err(|_| Error::invalid(OP, RANK, rank, format!("below {size}")))?;
        let mut rendezvous = Self::new(job, group, Rank(rank), size)?;
        rendezvous.local_rank = number(LOCAL_RANK)?.unwrap_or(rendezvous.rank.index());
        rendezvous.folder = variable(FOLDER).map(PathBuf::from);
        if let Some(secret) = variable(SECRET) {
            rendezvous.secret = Secret::from_text(&secret)?;
        }
        Ok(rendezvous)
    }

    /// Another rank in a world of another size: of those that are left after a failure, for example.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn as_rank(self, rank: Rank, size: usize) -> Result<Self> {
        Self::new("", "", rank, size).map(|_| Rendezvous { rank, size, ..self })
    }

    /// Another world of the same group: after a failure every rank takes the next number.
    pub fn generation(self, generation: u64) -> Self {
        Rendezvous { generation, ..self }
    }

    /// The ranks meet in this folder, which must be private to this user [default: one of that user below `XDG_RUNTIME_DIR`, or below the system's
    /// folder of temporary files].
    pub fn folder(self, folder: impl Into<PathBuf>) -> Self {
        Rendezvous { folder: Some(folder.into()), ..self }
    }

    /// The ranks meet at this address (`host:port`), on which rank 0 listens, and prove there that they know the secret.
    pub fn over_tcp(self, address: impl Into<String>, secret: Secret) -> Self {
        Rendezvous { address: Some(address.into()), secret, ..self }
    }

    /// The ranks also prove that they know this secret.
    pub fn secret(self, secret: Secret) -> Self {
        Rendezvous { secret, ..self }
    }

    /// Bound of the meeting and of each collective call of setup afterwards [default: 60 seconds]. Multiplied by `MOE_TIMEOUT_SCALE`.
    ///
    /// # Errors
    /// `Invalid` when the variable makes no sense.
    pub fn timeout(self, timeout: Duration) -> Result<Self> {
        Ok(Rendezvous { timeout: crate::ep::wait::scaled(timeout, timeout_scale()?)?, ..self })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Number of this rank among those of its machine: which GPU it takes, for example.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Bound of the meeting and of collective calls.
    pub(in crate::ep) fn bound(&self) -> Duration {
        self.timeout
    }

    /// What all ranks of the world agree on, as text.
    pub(super) fn key(&self) -> String {
        // The lengths keep two pairs of names apart whose texts run together.
        format!("{}:{}, {}:{}, {}", self.job.len(), self.job, self.group.len(), self.group, self.generation)
    }
}

pub(super) fn on_several_machines(what: String) -> Error {
    let why = "ranks exchange memory, which must be of one machine in this version".into();
    Error::Unsupported { op: OP, what: format!("a world of {what}"), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Rendezvous> {
        Rendezvous::from_variables("g", |name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn torchrun_names_rank_and_job() {
        let all =
            [(RANK, "5"), (WORLD_SIZE, "8"), (LOCAL_RANK, "5"), (LOCAL_WORLD_SIZE, "8"), (MASTER_ADDR, "host"), (MASTER_PORT, "29500")];
        let first = of(&all).unwrap();
        assert_eq!((first.rank(), first.size(), first.local_rank()), (Rank(5), 8, 5));
        // A restart is another job.
        let restarted = of(&[&all[..], &[("TORCHELASTIC_RESTART_COUNT", "1")]].concat()).unwrap();
        assert_ne!(first.key(), restarted.key());
        assert_ne!(first.key(), first.clone().generation(1).key());
    }

    #[test]
    fn names_do_not_run_together() {
        let key = |job: &str, group: &str| Rendezvous::new(job, group, Rank(0), 1).unwrap().key();
        assert_ne!(key("a, 1:b", "c"), key("a", "b, 1:c"));
    }

    #[test]
    fn nonsense_is_named() {
        let is_invalid = |variables: &[(&str, &str)], name: &str| {
            assert!(matches!(of(variables), Err(Error::Invalid { what, .. }) if what == name), "{variables:?}: {:?}", of(variables));
        };
        is_invalid(&[], RANK);
        is_invalid(&[(RANK, "0")], WORLD_SIZE);
        is_invalid(&[(RANK, "x"), (WORLD_SIZE, "2")], RANK);
        is_invalid(&[(RANK, "2"), (WORLD_SIZE, "2")], "rank");
        is_invalid(&[(RANK, "0"), (WORLD_SIZE, "65")], "size");
        is_invalid(&[(RANK, "0"), (WORLD_SIZE, "2"), (SECRET, "short")], "secret");
        let two_machines = of(&[(RANK, "0"), (WORLD_SIZE, "16"), (LOCAL_WORLD_SIZE, "8")]);
        assert!(matches!(two_machines, Err(Error::Unsupported { .. })), "{two_machines:?}");
    }
}
