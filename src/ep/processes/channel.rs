//! Messages and open files over a socket, with a bound on every wait.
#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_setfd, ioctl_fionbio};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Most open files in one message (spec: SCM_MAX_FD of Linux).
pub(crate) const MAX_FILES: usize = 253;
/// Longest message (arbitrary: far above every description of a configuration; what is large travels as memory).
const MAX_BYTES: usize = 64 << 20;
/// How late a failure of the world or a deadline is noticed by who waits for a message (arbitrary, as the nap of the waits).
const NAP: Duration = Duration::from_millis(20);
/// Two counts: bytes and files.
const HEAD_BYTES: usize = 8;

/// Why a message did not pass.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The other side is gone.
    Closed,
    /// The bound passed.
    Late,
    /// What ended the wait, or what is wrong.
    Error(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Broken::Error(error)
    }
}

/// When to give up: the bound, and a check between naps.
pub(crate) struct Until<'a> {
    pub deadline: Instant,
    pub check: &'a dyn Fn() -> Result<()>,
}

impl Until<'_> {
    /// Waits until `file` is ready, at most a nap.
    fn nap(&self, file: BorrowedFd<'_>, ready: PollFlags) -> Result<(), Broken> {
        (self.check)()?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Broken::Late);
        }
        wait(&mut [PollFd::from_borrowed_fd(file, ready)], left.min(NAP))?;
        Ok(())
    }
}

/// Waits until one of the files is ready, at most `bound`.
pub(crate) fn wait(files: &mut [PollFd<'_>], bound: Duration) -> Result<()> {
    let bound = Timespec::try_from(bound).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match poll(files, Some(&bound)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(failed("waiting for a socket", error)),
    }
}

fn failed(what: &str, why: impl ToString) -> Error {
    Error::Io { what: what.into(), why: why.to_string() }
}

/// One end of a connected stream socket.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Channel {
    /// Takes over a connected socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Result<Self> {
        let socket = socket.into();
        ioctl_fionbio(&socket, true).map_err(|e| failed("setting up a socket", e))?;
        fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC).map_err(|e| failed("setting up a socket", e))?;
        Ok(Channel { socket })
    }

    /// Sends a message and, over a Unix socket, open files: the other side gets files of its own that are the same.
    pub fn send(&self, message: &impl Serialize, files: &[BorrowedFd<'_>], until: &Until<'_>) -> Result<(), Broken> {
        let body = serde_json::to_vec(message).map_err(|e| failed("writing a message", e))?;
        if body.len() > MAX_BYTES || files.len() > MAX_FILES {
            let got = format!("a message of {} bytes and {} files", body.len(), files.len());
            return Err(Error::invalid("world", "message", got, format!("at most {MAX_BYTES} bytes and {MAX_FILES} files")).into());
        }
        let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend((files.len() as u32).to_le_bytes());
        bytes.extend(body);
        let mut sent = 0;
        while sent < bytes.len() {
            // The files travel with the first byte.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
                return Err(failed("sending open files", "no room").into());
            }
            match sendmsg(&self.socket, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
                Ok(num) => sent += num,
                Err(Errno::AGAIN) => until.nap(self.as_fd(), PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::Closed),
                Err(error) => return Err(failed("sending to a rank", error).into()),
            }
        }
        Ok(())
    }

    /// Receives a message and the open files that came with it.
    pub fn receive<T: DeserializeOwned>(&self, until: &Until<'_>) -> Result<(T, Vec<OwnedFd>), Broken> {
        let mut files = Vec::new();
        let mut head = [0; HEAD_BYTES];
        self.fill(&mut head, &mut files, until)?;
        let [num_bytes, num_files] = [0, 4].map(|at| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize);
        if num_bytes > MAX_BYTES || num_files > MAX_FILES {
            return Err(failed("receiving from a rank", format!("a message of {num_bytes} bytes and {num_files} files")).into());
        }
        let mut body = vec![0; num_bytes];
        self.fill(&mut body, &mut files, until)?;
        if files.len() != num_files {
            return Err(failed("receiving from a rank", format!("{} open files, {num_files} were sent", files.len())).into());
        }
        let message = serde_json::from_slice(&body).map_err(|e| failed("reading a message of a rank", e))?;
        Ok((message, files))
    }

    fn fill(&self, bytes: &mut [u8], files: &mut Vec<OwnedFd>, until: &Until<'_>) -> Result<(), Broken> {
        let mut at = 0;
        while at < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut to = [IoSliceMut::new(&mut bytes[at..])];
            match recvmsg(&self.socket, &mut to, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(more) = message {
                            files.extend(more);
                        }
                    }
                    if received.flags.contains(ReturnFlags::CTRUNC) {
                        return Err(failed("receiving open files", "some were lost: too many are open in this process").into());
                    }
                    if received.bytes == 0 {
                        return Err(Broken::Closed);
                    }
                    at += received.bytes;
                }
                Err(Errno::AGAIN) => until.nap(self.as_fd(), PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(Broken::Closed),
                Err(error) => return Err(failed("receiving from a rank", error).into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::ep::symmetric::Symmetric;

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().unwrap();
        (Channel::new(a).unwrap(), Channel::new(b).unwrap())
    }

    fn soon() -> Until<'static> {
        Until { deadline: Instant::now() + Duration::from_secs(20), check: &|| Ok(()) }
    }

    #[test]
    fn messages_and_files_arrive() {
        let (a, b) = pair();
        // Larger than the socket's buffer.
        let text = "row ".repeat(1 << 20);
        let memory = Symmetric::shared(4096).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| a.send(&text, &[memory.file().unwrap(); 3], &soon()).unwrap());
            let (got, files) = b.receive::<String>(&soon()).unwrap();
            assert!(got == text && files.len() == 3);
            assert_eq!(Symmetric::map(files[2].as_fd()).unwrap().num_bytes(), 4096);
        });
    }

    #[test]
    fn a_wait_ends() {
        let (a, b) = pair();
        let until = |millis| Instant::now() + Duration::from_millis(millis);
        assert!(matches!(b.receive::<()>(&Until { deadline: until(50), check: &|| Ok(()) }), Err(Broken::Late)));
        let check = || Err(Error::invalid("test", "world", "dead", "alive"));
        assert!(matches!(b.receive::<()>(&Until { deadline: until(20_000), check: &check }), Err(Broken::Error(Error::Invalid { .. }))));
        drop(a);
        assert!(matches!(b.receive::<()>(&soon()), Err(Broken::Closed)));
        assert!(matches!(b.send(&7, &[], &soon()), Err(Broken::Closed)));
    }

    #[test]
    fn nonsense_is_refused() {
        let (a, b) = pair();
        rustix::io::write(&a, &[0xFF; 16]).unwrap();
        assert!(matches!(b.receive::<()>(&soon()), Err(Broken::Error(Error::Io { .. }))));
        let (a, b) = pair();
        a.send(&"text", &[], &soon()).unwrap();
        assert!(matches!(b.receive::<u32>(&soon()), Err(Broken::Error(Error::Io { .. }))));
    }
}
