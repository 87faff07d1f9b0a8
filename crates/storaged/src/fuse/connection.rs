//! The descriptors of one FUSE connection, and what is written to them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::answer::{self, Failure};

/// What is read from one channel is answered on the same one. The first is the one that was mounted;
/// the others were joined to it.
pub(super) struct Connection {
    channels: Vec<OwnedFd>,
}

pub(super) fn open_device() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

impl Connection {
    /// The descriptors that another process kept.
    pub(super) fn of(channels: Vec<OwnedFd>) -> Option<Self> {
        (!channels.is_empty()).then_some(Self { channels })
    }

    pub(super) fn new(session: OwnedFd) -> Self {
        Self { channels: vec![session] }
    }

    /// The same with *count* channels in all. The kernel must have agreed on its terms already.
    pub(super) fn wider(mut self, count: usize) -> std::io::Result<Self> {
        while self.channels.len() < count {
            self.channels.push(sys::fuse::join(open_device()?, self.channels[0].as_fd())?);
        }
        Ok(self)
    }

    pub(super) fn channel(&self, number: usize) -> BorrowedFd<'_> {
        self.channels[number % self.channels.len()].as_fd()
    }

    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.channels.iter().map(AsFd::as_fd).collect()
    }

    /// Whether the kernel still has a file system at the other end.
    pub(super) fn alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.channels[0], PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Answers *unique*. Nothing is left to do when the kernel does not take it: then nobody waits for it any more.
    pub(super) fn answer(&self, channel: usize, unique: u64, result: Result<&[u8], Failure>) {
        match result {
            Ok(payload) => {
                let header = answer::header(unique, payload.len());
                let parts = [std::io::IoSlice::new(&header), std::io::IoSlice::new(payload)];
                let sent = rustix::io::writev(self.channel(channel), &parts).map(drop);
                self.must_end(channel, unique, sent);
            }
            Err(failure) => {
                let sent = rustix::io::write(self.channel(channel), &answer::failure(unique, failure)).map(drop);
                self.must_end(channel, unique, sent);
            }
        }
    }

    /// Sends *message*, header included, in answer to *unique*.
    pub(super) fn answer_whole(&self, channel: usize, unique: u64, message: &[u8]) {
        self.must_end(channel, unique, rustix::io::write(self.channel(channel), message).map(drop));
    }

    /// An answer that the kernel refuses for its form would leave its caller waiting for ever.
    fn must_end(&self, channel: usize, unique: u64, sent: Result<(), Errno>) {
        if !matches!(sent, Ok(()) | Err(Errno::NOENT | Errno::NODEV)) {
            let _ = rustix::io::write(self.channel(channel), &answer::failure(unique, Errno::IO.into()));
        }
    }

    pub(super) fn notify(&self, message: &[u8]) -> Result<(), Errno> {
        rustix::io::write(self.channel(0), message).map(drop)
    }
}
