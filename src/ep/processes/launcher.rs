//! Starts the processes of a world on this machine.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::place::Place;
use super::rendezvous::{FOLDER, JOB, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RANK, Rendezvous, SECRET, WORLD_SIZE};
use super::secret::Secret;
use crate::ep::world::check_size;
use crate::error::{Error, Result};
use crate::id::Rank;

/// Processes of a world. Those that still run are ended when this is dropped, and what they left is removed.
#[derive(Debug)]
pub struct Launched {
    children: Vec<Child>,
    rendezvous: Rendezvous,
}

/// Starts `program` once for each of `num_ranks` ranks, with `args` and the environment of [`Rendezvous::from_env`]: a job of its own, with a secret of
/// its own.
///
/// ```no_run
/// use moe_kernels::ep::launch;
/// let statuses = launch("./my_ranks", ["--tokens", "4096"], 4)?.wait()?;
/// assert!(statuses.iter().all(|status| status.success()));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// `Invalid` for 0 ranks or more than 64, `Io` when one of them cannot be started: then none is left.
pub fn launch(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = impl AsRef<OsStr>>, num_ranks: usize) -> Result<Launched> {
    let mut command = Command::new(program.as_ref());
    command.args(args);
    launch_command(&mut command, num_ranks, None)
}

/// As [`launch`], of a prepared command, with another meeting folder than the user's.
#[doc(hidden)]
pub fn launch_command(command: &mut Command, num_ranks: usize, folder: Option<PathBuf>) -> Result<Launched> {
    check_size(num_ranks)?;
    let secret = Secret::random()?;
    // The secret is new for each job, so a part of it that proves nothing names the job.
    let job = format!("launch {} {}", std::process::id(), Secret::random()?.to_text());
    command.env(WORLD_SIZE, num_ranks.to_string()).env(LOCAL_WORLD_SIZE, num_ranks.to_string());
    command.env(MASTER_ADDR, "127.0.0.1").env(MASTER_PORT, "0").env(JOB, &job).env(SECRET, secret.to_text());
    command.env_remove("TORCHELASTIC_RUN_ID").env_remove("TORCHELASTIC_RESTART_COUNT");
    match &folder {
        Some(folder) => command.env(FOLDER, folder),
        None => command.env_remove(FOLDER),
    };
    let variable = |name: &str| {
        let set = command.get_envs().find(|(key, _)| *key == name);
        set.and_then(|(_, value)| value).and_then(OsStr::to_str).map(str::to_owned)
    };
    let rank_0 = |name: &str| if name == RANK || name == LOCAL_RANK { Some("0".to_owned()) } else { variable(name) };
    let rendezvous = Rendezvous::from_variables("", rank_0)?;
    let mut launched = Launched { children: Vec::with_capacity(num_ranks), rendezvous };
    for rank in 0..num_ranks {
        command.env(RANK, rank.to_string()).env(LOCAL_RANK, rank.to_string());
        let child = command.spawn().map_err(|e| Error::Io {
            what: format!("starting {} as rank {rank}", command.get_program().to_string_lossy()),
            why: e.to_string(),
        })?;
        launched.children.push(child);
    }
    Ok(launched)
}

impl Launched {
    /// Waits until all have ended; how each did, by rank.
    ///
    /// # Errors
    /// `Io` from the system.
    pub fn wait(mut self) -> Result<Vec<ExitStatus>> {
        let wait = |child: &mut Child| child.wait().map_err(|e| Error::Io { what: "waiting for a rank".into(), why: e.to_string() });
        self.children.iter_mut().map(wait).collect()
    }

    /// Waits until all have ended, and says which failed first, if any did. The others then get `grace` to end by themselves.
    ///
    /// # Errors
    /// `Io` from the system.
    pub fn relay(mut self, grace: Duration) -> Result<Option<(Rank, ExitStatus)>> {
        const NAP: Duration = Duration::from_millis(10); // arbitrary: nobody notices, and it costs nothing
        let mut statuses = vec![None; self.children.len()];
        let mut failed: Option<(Rank, ExitStatus, Instant)> = None;
        loop {
            for (child, status) in self.children.iter_mut().zip(&mut statuses) {
                if status.is_none() {
                    *status = child.try_wait().map_err(|e| Error::Io { what: "waiting for a rank".into(), why: e.to_string() })?;
                }
            }
            if failed.is_none() {
                let bad = |(rank, status): (usize, &Option<ExitStatus>)| {
                    let status = status.filter(|status| !status.success())?;
                    Some((Rank(rank as u32), status, Instant::now()))
                };
                // Of several the one that could not even say why: the others heard of its end.
                failed = statuses.iter().enumerate().filter_map(bad).min_by_key(|(_, status, _)| status.code().is_some());
            }
            let is_over = failed.is_some_and(|(_, _, since)| since.elapsed() >= grace);
            if is_over || statuses.iter().all(Option::is_some) {
                return Ok(failed.map(|(rank, status, _)| (rank, status)));
            }
            std::thread::sleep(NAP);
        }
    }

    /// The process of a rank, to be watched, read from or ended. `None` for a rank that the world does not have.
    pub fn child(&mut self, rank: Rank) -> Option<&mut Child> {
        self.children.get_mut(rank.index())
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Both fail only for a process that has ended and was waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
        Place::remove_job(self.rendezvous.folder.as_deref(), &self.rendezvous.job);
    }
}
