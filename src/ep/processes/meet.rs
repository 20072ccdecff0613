//! The meeting: rank 0 listens, the others come, each side proves what it knows, and all leave with the same open files.
//!
//! 1. Rank 0 sends a challenge: its version and a nonce.
//! 2. The other answers with its version, its nonce, who it is, and a proof over all of it; and with its lifeline, on a Unix socket.
//! 3. Rank 0 checks the proof and answers with its own, or refuses this process and goes on waiting.
//! 4. When all have come rank 0 sends all of them the page of the world and every lifeline; or what went wrong, to all.
#![forbid(unsafe_code)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::channel::{Broken, Channel, Until, wait};
use super::place::{Place, check_peer};
use super::rendezvous::{Rendezvous, on_several_machines};
use super::secret::{Bytes, nonce};
use crate::error::{Error, Failure, FailureKind, Result};
use crate::id::Rank;

const OP: &str = "world";
/// Both sides must be the same program: memory is laid out by it.
const PROTOCOL: &str = concat!("moe-kernels ", env!("CARGO_PKG_VERSION"), ", protocol 1");
/// Between two tries to connect (arbitrary: soon, and no burden on a machine that starts 64 ranks).
const RETRY: Duration = Duration::from_millis(10);
/// Bound of one process's greeting: it stands in the way of the others (arbitrary: some local messages).
const GREETING: Duration = Duration::from_secs(5);

#[derive(Serialize, Deserialize)]
struct Challenge {
    protocol: String,
    nonce: Bytes,
}

#[derive(Serialize, Deserialize)]
struct Hello {
    nonce: Bytes,
    who: Who,
    proof: Bytes,
}

/// Who comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Who {
    protocol: String,
    rank: u32,
    size: usize,
    key: String,
    machine: Machine,
}

/// Where a process is: the boot of a system, whatever name a container gives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Machine {
    name: String,
    boot: String,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    proof: Bytes,
    result: Result<()>,
}

impl Machine {
    fn here() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Machine { name: rustix::system::uname().nodename().to_string_lossy().into(), boot: boot.trim().into() }
    }
}

impl Who {
    fn of(rendezvous: &Rendezvous) -> Self {
        Who { protocol: PROTOCOL.into(), rank: rendezvous.rank.0, size: rendezvous.size, key: rendezvous.key(), machine: Machine::here() }
    }

    /// What is proved: every field.
    fn text(&self) -> String {
        format!("{self:?}")
    }
}

fn failure(kind: FailureKind, rank: Rank, peer: Rank) -> Failure {
    Failure { kind, op: OP, phase: "setup", rank, peer, epoch: 0, seen: 0, blocks_arrived: 0 }
}

fn wrong_secret() -> Error {
    Error::invalid(OP, "secret", "another one", "that of the job, which its launcher made, on both sides")
}

/// The others of a world, as rank 0 meets them, by rank; its own place is empty.
pub(super) struct Met {
    pub channels: Vec<Option<Channel>>,
    /// Of each rank but 0.
    pub lifelines: Vec<Option<OwnedFd>>,
}

/// Where rank 0 listens.
trait Listen: AsFd {
    /// The next connection that may speak, if one is there.
    fn next(&self) -> Result<Option<Channel>>;
}

impl Listen for std::os::unix::net::UnixListener {
    fn next(&self) -> Result<Option<Channel>> {
        // Of another user, or gone again: it gets no word.
        let Ok((socket, _)) = self.accept() else { return Ok(None) };
        if check_peer(&socket).is_err() { Ok(None) } else { Channel::new(socket).map(Some) }
    }
}

impl Listen for TcpListener {
    fn next(&self) -> Result<Option<Channel>> {
        let Ok((socket, _)) = self.accept() else { return Ok(None) };
        Channel::new(socket).map(Some)
    }
}

/// Rank 0's side, up to the point at which all have come.
pub(super) fn await_all(rendezvous: &Rendezvous, place: &Place) -> Result<Met> {
    let deadline = Instant::now() + rendezvous.timeout;
    if let Some(address) = &rendezvous.address {
        let listener = TcpListener::bind(address).map_err(|e| Error::Io { what: format!("listening at {address}"), why: e.to_string() })?;
        listener.set_nonblocking(true).map_err(|e| Error::Io { what: format!("listening at {address}"), why: e.to_string() })?;
        // The place is there before anybody is sent to it.
        let claim = place.claim()?;
        let met = accept_all(rendezvous, &listener, deadline)?;
        broadcast(&met, &Ok(()), &[])?;
        return accept_all(rendezvous, &claim.listener, deadline);
    }
    let claim = place.claim()?;
    accept_all(rendezvous, &claim.listener, deadline)
}

fn accept_all(rendezvous: &Rendezvous, listener: &impl Listen, deadline: Instant) -> Result<Met> {
    let size = rendezvous.size;
    let mut met = Met { channels: (0..size).map(|_| None).collect(), lifelines: (0..size).map(|_| None).collect() };
    let result = (|| {
        while let Some(missing) = (1..size).find(|&r| met.channels[r].is_none()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let failure = failure(FailureKind::Timeout, Rank(0), Rank(missing as u32));
                return Err(Error::Timeout { failure, bound: rendezvous.timeout });
            }
            let mut files = vec![PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            let ranks: Vec<usize> = (1..size).filter(|&r| met.channels[r].is_some()).collect();
            files.extend(ranks.iter().flat_map(|&r| &met.channels[r]).map(|c| PollFd::from_borrowed_fd(c.as_fd(), PollFlags::RDHUP)));
            wait(&mut files, left)?;
            let gone = files[1..].iter().position(|file| !file.revents().is_empty());
            if let Some(rank) = gone.map(|i| Rank(ranks[i] as u32)) {
                return Err(Error::Poisoned { first: failure(FailureKind::Died, rank, rank) });
            }
            if let Some(channel) = listener.next()? {
                greet(rendezvous, &mut met, channel)?;
            }
        }
        Ok(())
    })();
    match result {
        Ok(()) => Ok(met),
        Err(error) => {
            // The others report the same; who is gone by now needs nothing.
            let told = match &error {
                Error::Timeout { failure, .. } => Error::Poisoned { first: *failure },
                other => other.clone(),
            };
            let _ = broadcast(&met, &Err(told), &[]);
            Err(error)
        }
    }
}

/// Sends the end of the meeting to all.
pub(super) fn broadcast(met: &Met, result: &Result<()>, files: &[BorrowedFd<'_>]) -> Result<()> {
    let until = Until { deadline: Instant::now() + GREETING, check: &|| Ok(()) };
    let mut first = Ok(());
    for (rank, channel) in met.channels.iter().enumerate() {
        let Some(channel) = channel else { continue };
        let sent = channel.send(result, files, &until);
        first = first.and(sent.map_err(|broken| end_of(broken, Rank(0), Rank(rank as u32), GREETING)));
    }
    first
}

/// One process: it joins, or is refused and told why. An error ends the meeting.
fn greet(rendezvous: &Rendezvous, met: &mut Met, channel: Channel) -> Result<()> {
    let until = Until { deadline: Instant::now() + GREETING, check: &|| Ok(()) };
    let challenge = Challenge { protocol: PROTOCOL.into(), nonce: nonce()? };
    if channel.send(&challenge, &[], &until).is_err() {
        return Ok(());
    }
    // Whoever cannot even say hello is no rank.
    let Ok((Hello { nonce, who, proof }, mut files)) = channel.receive::<Hello>(&until) else { return Ok(()) };
    let text = who.text();
    let parts = |role: &'static str| [role.as_bytes(), &challenge.nonce, &nonce, text.as_bytes()].map(<[u8]>::to_vec);
    let proved = |parts: [Vec<u8>; 4]| rendezvous.secret.check(&parts.each_ref().map(Vec::as_slice), &proof);
    if !proved(parts("rank")) {
        // No proof in return: a stranger learns nothing.
        let _ = channel.send(&Answer { proof: [0; _], result: Err(wrong_secret()) }, &[], &until);
        return Ok(());
    }
    let proof = rendezvous.secret.prove(&parts("rank 0").each_ref().map(Vec::as_slice));
    let answer = |result: Result<()>| channel.send(&Answer { proof, result }, &[], &until);
    let mine = Who::of(rendezvous);
    let rank = who.rank as usize;
    let is_free = (1..rendezvous.size).contains(&rank) && met.channels[rank].is_none();
    if who.key != mine.key || who.size == mine.size && !is_free {
        let got = format!("{rank}, of the world {}", who.key);
        let _ = answer(Err(Error::invalid(OP, "rank", got, format!("one that is missing in the world {}", mine.key))));
        return Ok(());
    }
    if let Err(error) = same_world(&mine, &who) {
        let _ = answer(Err(error.clone()));
        return Err(error);
    }
    if answer(Ok(())).is_ok() {
        met.lifelines[rank] = files.pop();
        met.channels[rank] = Some(channel);
    }
    Ok(())
}

/// What must be equal on all ranks.
fn same_world(mine: &Who, theirs: &Who) -> Result<()> {
    let differs = |what: &str, first_value: &dyn ToString, second_value: &dyn ToString| Error::Mismatch {
        op: OP,
        first: Rank(0),
        second: Rank(theirs.rank),
        what: what.into(),
        first_value: first_value.to_string(),
        second_value: second_value.to_string(),
    };
    if mine.protocol != theirs.protocol {
        return Err(differs("program", &mine.protocol, &theirs.protocol));
    }
    if mine.size != theirs.size {
        return Err(differs("world size", &mine.size, &theirs.size));
    }
    if mine.machine.boot != theirs.machine.boot {
        let names = format!(
            "{} ranks on several machines: rank 0 on {}, rank {} on {}",
            mine.size, mine.machine.name, theirs.rank, theirs.machine.name
        );
        return Err(on_several_machines(names));
    }
    Ok(())
}

/// Another rank's side. The files are the page of the world and the lifelines of all ranks.
pub(super) fn come(rendezvous: &Rendezvous, place: &Place, lifeline: BorrowedFd<'_>) -> Result<(Channel, Vec<OwnedFd>)> {
    let deadline = Instant::now() + rendezvous.timeout;
    if let Some(address) = &rendezvous.address {
        let connect = || match TcpStream::connect(address) {
            Ok(socket) => Ok(Some(Channel::new(socket)?)),
            Err(_) => Ok(None),
        };
        come_to(rendezvous, deadline, connect, &[])?;
    }
    let connect = || place.connect()?.map(Channel::new).transpose();
    come_to(rendezvous, deadline, connect, &[lifeline])
}

fn come_to(
    rendezvous: &Rendezvous,
    deadline: Instant,
    connect: impl Fn() -> Result<Option<Channel>>,
    files: &[BorrowedFd<'_>],
) -> Result<(Channel, Vec<OwnedFd>)> {
    let (me, bound) = (rendezvous.rank, rendezvous.timeout);
    let until = Until { deadline, check: &|| Ok(()) };
    let end = |broken| end_of(broken, me, Rank(0), bound);
    let (channel, challenge) = loop {
        if let Some(channel) = connect()? {
            match channel.receive::<Challenge>(&until) {
                Ok((challenge, _)) => break (channel, challenge),
                // A rank 0 that ended before it spoke: the awaited one may come yet.
                Err(Broken::Closed) => {}
                Err(broken) => return Err(end(broken)),
            }
        }
        if Instant::now() >= deadline {
            return Err(end(Broken::Late));
        }
        std::thread::sleep(RETRY);
    };
    let (nonce, who) = (nonce()?, Who::of(rendezvous));
    let text = who.text();
    let parts = |role: &'static str| [role.as_bytes(), &challenge.nonce, &nonce, text.as_bytes()].map(<[u8]>::to_vec);
    let proof = rendezvous.secret.prove(&parts("rank").each_ref().map(Vec::as_slice));
    channel.send(&Hello { nonce, who, proof }, files, &until).map_err(end)?;
    let (Answer { proof, result }, _) = channel.receive(&until).map_err(end)?;
    let is_proved = rendezvous.secret.check(&parts("rank 0").each_ref().map(Vec::as_slice), &proof);
    match result {
        Err(error) if is_proved || error == wrong_secret() => return Err(error),
        _ if !is_proved => return Err(wrong_secret()),
        _ => {}
    }
    // Rank 0 knows who is missing: its bound passes first, if it came at the same time.
    let until = Until { deadline: deadline + bound / 4, check: &|| Ok(()) };
    let (result, files) = channel.receive::<Result<()>>(&until).map_err(end)?;
    result.map(|()| (channel, files))
}

/// The error of a broken connection to `peer`.
fn end_of(broken: Broken, me: Rank, peer: Rank, bound: Duration) -> Error {
    match broken {
        Broken::Closed => Error::Poisoned { first: failure(FailureKind::Died, peer, peer) },
        Broken::Late => Error::Timeout { failure: failure(FailureKind::Timeout, me, peer), bound },
        Broken::Error(error) => error,
    }
}
