//! Worlds of one process per rank: how they meet, pass each other memory, and learn that one of them ended.
#![forbid(unsafe_code)]

mod channel;
mod launcher;
mod meet;
mod place;
mod rendezvous;
mod secret;

pub use launcher::{Launched, launch, launch_command};
pub use rendezvous::Rendezvous;
pub use secret::Secret;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::channel::{Broken, Channel, MAX_FILES, Until};
use self::meet::Met;
use self::place::Place;
use super::World;
use super::meeting::Posted;
use super::page::Page;
use super::symmetric::Symmetric;
use super::world::{Member, lock};
use crate::backend::Backend;
use crate::error::{Error, Failure, FailureKind, Result};
use crate::id::Rank;
use crate::name::intern;

impl World {
    /// This process's membership of a world of one process per rank. Collective: it returns when all have come. Ranks of one machine and one user only.
    ///
    /// A process that ends without leaving, however it ends, makes every other rank fail at once with a record that names it. Afterwards no file and no
    /// memory is left.
    ///
    /// ```no_run
    /// use moe_kernels::{Backend, ep::{Rendezvous, World}};
    /// // In each process that torchrun, or `launch`, started:
    /// let world = World::join(&Backend::cpu(), &Rendezvous::from_env("experts")?)?;
    /// println!("rank {} of {}", world.rank(), world.size());
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Timeout` that names who did not come, `Poisoned` when one of them ended meanwhile; `Mismatch` when programs or sizes differ; `Invalid` for a wrong
    /// secret, a rank that is there already, or a folder that others can write to; `Busy` when another world is meeting as the same group; `Unsupported` when
    /// the ranks are on several machines.
    pub fn join(backend: &Backend, rendezvous: &Rendezvous) -> Result<World> {
        let (size, rank) = (rendezvous.size, rendezvous.rank);
        let place = Place::new(rendezvous.folder.as_deref(), &rendezvous.job, &rendezvous.key())?;
        // While this process lives the others' ends of its lifeline stay quiet.
        let (seen, lifeline) = pipe()?;
        let num_bytes = Page::num_bytes(size);
        let (memory, channels, lifelines) = if rank.index() == 0 {
            let memory = Symmetric::shared(num_bytes)?;
            let Met { mut channels, lifelines } = meet::await_all(rendezvous, &place)?;
            let missing = || io("meeting the other ranks", "a rank came without a lifeline");
            let mut files = vec![memory.file().ok_or_else(missing)?, seen.as_fd()];
            for lifeline in &lifelines[1..] {
                files.push(lifeline.as_ref().ok_or_else(missing)?.as_fd());
            }
            let met = Met { channels, lifelines: Vec::new() };
            meet::broadcast(&met, &Ok(()), &files)?;
            channels = met.channels;
            (memory, channels, lifelines)
        } else {
            let (channel, files) = meet::come(rendezvous, &place, seen.as_fd())?;
            let mut files = files.into_iter();
            let page = files.next().ok_or_else(|| io("meeting the other ranks", "rank 0 sent no memory"))?;
            (Symmetric::map(page.as_fd())?, vec![Some(channel)], files.map(Some).collect())
        };
        if lifelines.len() != size || memory.num_bytes() < num_bytes {
            return Err(io("meeting the other ranks", "rank 0 sent other files than were agreed on"));
        }
        let page = Arc::new(Page::new(Arc::new(memory), size));
        let lifelines: Vec<(Rank, OwnedFd)> = lifelines
            .into_iter()
            .enumerate()
            .filter(|(r, _)| *r != rank.index())
            .filter_map(|(r, lifeline)| lifeline.map(|lifeline| (Rank(r as u32), lifeline)))
            .collect();
        let watch = Watch::start(page.clone(), rank, lifelines)?;
        let link = Processes { channels: Mutex::new(channels), _watch: watch, _lifeline: lifeline };
        World::of_processes(backend, rendezvous, page, link)
    }
}

fn io(what: &str, why: impl ToString) -> Error {
    Error::Io { what: what.into(), why: why.to_string() }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|e| io("making a pipe", e))
}

/// What a process holds of the others. Rank 0 has a channel to each; what the others bring to a collective call goes through it.
#[derive(Debug)]
pub(crate) struct Processes {
    /// By rank on rank 0, else the one to rank 0. Locked for a collective call, of which a rank makes one at a time.
    channels: Mutex<Vec<Option<Channel>>>,
    /// Ends before the lifeline does.
    _watch: Watch,
    _lifeline: OwnedFd,
}

/// A rank's part of a collective call, as it travels.
#[derive(Serialize, Deserialize)]
struct Wire {
    key: u64,
    op: String,
    value: Result<Value>,
    num_files: usize,
}

impl Wire {
    fn new(key: u64, posted: &Posted) -> Self {
        Wire { key, op: posted.op.into(), value: posted.value.clone(), num_files: posted.files.len() }
    }

    fn posted(self, key: u64, files: &mut impl Iterator<Item = OwnedFd>) -> Result<Posted> {
        let files: Vec<_> = files.take(self.num_files).map(Arc::new).collect();
        if self.key != key || files.len() != self.num_files {
            return Err(io("a collective call", format!("call {} with {} files came in call {key}", self.key, files.len())));
        }
        Ok(Posted { op: intern(&self.op), value: self.value, files, memory: None, device_memory: None })
    }
}

impl Processes {
    /// What every rank brings to call `key`, which all have entered.
    pub fn exchange(&self, member: &Member, key: u64, posted: Posted, bound: Duration) -> Result<Vec<Posted>> {
        let most = MAX_FILES / member.size();
        let posted = match posted.files.len() <= most {
            true => posted,
            false => {
                let error = Error::invalid(posted.op, "files", posted.files.len(), format!("at most {most} of a rank"));
                Posted { value: Err(error), files: Vec::new(), ..posted }
            }
        };
        let until = Until { deadline: Instant::now() + bound, check: &|| member.check_alive() };
        let broken = |broken: Broken, peer: usize| {
            let peer = Rank(peer as u32);
            match broken {
                Broken::Error(error) => error,
                Broken::Closed => {
                    let kind = if member.has_left(peer.index()) { FailureKind::Left } else { FailureKind::Died };
                    member.timed_out(member.page().record(kind, peer), bound)
                }
                Broken::Late => {
                    let (rank, epoch) = (member.rank(), key + 1);
                    let failure = Failure {
                        kind: FailureKind::Timeout,
                        op: posted.op,
                        phase: "setup",
                        rank,
                        peer,
                        epoch,
                        seen: key,
                        blocks_arrived: 0,
                    };
                    member.timed_out(failure, bound)
                }
            }
        };
        let channels = lock(&self.channels);
        if member.rank().index() > 0 {
            let channel = channels[0].as_ref().ok_or_else(|| io("a collective call", "no connection to rank 0"))?;
            channel.send(&Wire::new(key, &posted), &borrowed(&posted.files), &until).map_err(|b| broken(b, 0))?;
            let (all, files) = channel.receive::<Vec<Wire>>(&until).map_err(|b| broken(b, 0))?;
            let mut files = files.into_iter();
            let all = all.into_iter().map(|wire| wire.posted(key, &mut files)).collect::<Result<Vec<_>>>()?;
            return match all.len() == member.size() {
                true => Ok(all),
                false => Err(io("a collective call", format!("{} ranks took part", all.len()))),
            };
        }
        let mut all = vec![posted.clone()];
        for (rank, channel) in channels.iter().enumerate() {
            let Some(channel) = channel else { continue };
            let (wire, files) = channel.receive::<Wire>(&until).map_err(|b| broken(b, rank))?;
            all.push(wire.posted(key, &mut files.into_iter())?);
        }
        let wires: Vec<_> = all.iter().map(|posted| Wire::new(key, posted)).collect();
        let files: Vec<_> = all.iter().flat_map(|posted| borrowed(&posted.files)).collect();
        for (rank, channel) in channels.iter().enumerate() {
            let Some(channel) = channel else { continue };
            channel.send(&wires, &files, &until).map_err(|b| broken(b, rank))?;
        }
        Ok(all)
    }
}

fn borrowed(files: &[Arc<OwnedFd>]) -> Vec<BorrowedFd<'_>> {
    files.iter().map(|file| file.as_fd()).collect()
}

/// How late a failure that another process wrote down is noticed where nobody waits on the host (arbitrary, as the nap of the waits).
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// The thread that notices the end of other processes: each holds the one writing end of its lifeline, which the system closes when it ends. It also looks
/// at the page from time to time, for failures of processes that live.
#[derive(Debug)]
struct Watch {
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(page: Arc<Page>, me: Rank, lifelines: Vec<(Rank, OwnedFd)>) -> Result<Self> {
        if lifelines.is_empty() {
            return Ok(Watch { stop: None, thread: None });
        }
        let (stopped, stop) = pipe()?;
        let thread = std::thread::Builder::new().name("moe watch".into()).spawn(move || watch(&page, me, lifelines, &stopped));
        Ok(Watch { stop: Some(stop), thread: Some(thread.map_err(|e| io("starting a thread", e))?) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did there is nothing more to do.
            let _ = thread.join();
        }
    }
}

fn watch(page: &Page, me: Rank, mut lifelines: Vec<(Rank, OwnedFd)>, stopped: &OwnedFd) {
    loop {
        // The end of a pipe's other side is reported without being asked for.
        let mut files = vec![PollFd::new(stopped, PollFlags::empty())];
        files.extend(lifelines.iter().map(|(_, lifeline)| PollFd::new(lifeline, PollFlags::empty())));
        match poll(&mut files, Some(&NAP)) {
            Ok(_) | Err(Errno::INTR) => {}
            // Out of kernel memory: without this thread a dead peer is found by the bounds of the waits.
            Err(_) => return,
        }
        let ended: Vec<bool> = files.iter().map(|file| !file.revents().is_empty()).collect();
        if ended[0] {
            return;
        }
        let mut ended = ended[1..].iter();
        lifelines.retain(|(rank, _)| {
            let is_alive = !ended.next().copied().unwrap_or(false);
            // Who leaves says so before it closes anything.
            if !is_alive && !page.has_left(rank.index()) {
                page.fail(me, page.record(FailureKind::Died, *rank));
            }
            is_alive
        });
        // What a process did that lives, or that has ended since: nobody here may be looking at the page.
        if page.first().is_some() {
            page.run_hooks();
        }
        page.tell_left();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::ep::page::News;

    /// The hook of a process runs so often after what `before` did to the page as ranks 1 and 2 see it, and when their lifelines have ended, unless they live.
    fn hooks_run(want: u32, ends_live: bool, before: impl Fn(&Page)) {
        let memory = Arc::new(Symmetric::new(Page::num_bytes(3)).unwrap());
        let page = Arc::new(Page::new(memory.clone(), 3));
        let count = Arc::new(AtomicU32::new(0));
        let counted = count.clone();
        let hook = page.on_news(Box::new(move |news| {
            counted.fetch_add(u32::from(news == News::Failed), Ordering::Relaxed);
        }));
        let ((seen_1, end_1), (seen_2, end_2)) = (pipe().unwrap(), pipe().unwrap());
        let watched = Watch::start(page.clone(), Rank(0), vec![(Rank(1), seen_1), (Rank(2), seen_2)]).unwrap();
        before(&Page::new(memory, 3));
        let ends = ends_live.then_some((end_1, end_2));
        let start = Instant::now();
        while count.load(Ordering::Relaxed) < want && start.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        // Enough for a second run, or for one that should not be (arbitrary).
        std::thread::sleep(Duration::from_millis(20));
        drop((watched, hook, ends));
        assert_eq!(count.load(Ordering::Relaxed), want);
    }

    #[test]
    fn the_failure_of_a_process_runs_the_hooks_of_the_others() {
        // Both are gone without a word: one failure.
        hooks_run(1, false, |_| ());
        // One has left, one is gone.
        hooks_run(1, false, |page| page.leave(1));
        // One has failed, and left.
        hooks_run(1, false, |page| {
            page.fail(Rank(1), page.record(FailureKind::Panicked, Rank(1)));
            [1, 2].into_iter().for_each(|rank| page.leave(rank));
        });
        // One has failed, and lives.
        hooks_run(1, true, |page| {
            page.fail(Rank(1), page.record(FailureKind::Panicked, Rank(1)));
        });
        hooks_run(0, true, |_| ());
        // Both have left, and nothing is wrong.
        hooks_run(0, false, |page| [1, 2].into_iter().for_each(|rank| page.leave(rank)));
    }
}
