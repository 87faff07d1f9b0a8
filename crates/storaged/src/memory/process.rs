//! One process, told apart from any later one with its pid, and its memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sys::remote;

use super::failure::about_process;
use super::maps::{self, Area, Image};
use super::scan::Private;
use crate::error::{Code, Error};

/// More than the kernel's usual limit of mappings fills; a longer maps file is refused.
const MOST_MAPS_BYTES: u64 = 64 << 20;

/// A process as a record can name it: the pid alone may be another process later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    pub pid: i32,
    /// In clock ticks since the host started.
    pub start_time: u64,
}

/// A process held by a descriptor. All calls block for as long as the kernel takes.
pub struct Process {
    identity: Identity,
    pidfd: OwnedFd,
    pagemap: File,
}

impl Process {
    /// Holds the process that has *pid* now.
    ///
    /// # Errors
    /// `unavailable` if there is none, `unsupported` if its memory is closed to us.
    pub fn open(pid: i32) -> Result<Self, Error> {
        let failed = |source| about_process(pid, source);
        let held = Pid::from_raw(pid).filter(|_| pid > 0).ok_or_else(|| failed(io::ErrorKind::NotFound.into()));
        let held = held.map_err(|_| Error::new(Code::Unavailable, format!("there is no process {pid}")))?;
        let pidfd = pidfd_open(held, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        // A file of /proc belongs to the process it was opened for, never to a later one.
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(failed)?;
        let start_time = read_start_time(pid).map_err(failed)?;
        let process = Self { identity: Identity { pid, start_time }, pidfd, pagemap };
        process.check_alive()?;
        Ok(process)
    }

    /// Holds exactly the process that *identity* names.
    ///
    /// # Errors
    /// As [`Process::open`]; `unavailable` also if another process has the pid by now.
    pub fn open_identity(identity: Identity) -> Result<Self, Error> {
        let process = Self::open(identity.pid)?;
        if process.identity != identity {
            return Err(Error::new(Code::Unavailable, format!("process {} is another one by now", identity.pid)));
        }
        Ok(process)
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }

    pub fn pid(&self) -> i32 {
        self.identity.pid
    }

    /// # Errors
    /// `unavailable` if the process has ended.
    pub fn check_alive(&self) -> Result<(), Error> {
        if self.wait_end(0)? {
            return Err(Error::new(Code::Unavailable, format!("process {} has ended", self.pid())));
        }
        Ok(())
    }

    /// Whether the process ended within that time.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn wait_end(&self, timeout_ms: u32) -> Result<bool, Error> {
        let limit =
            Timespec { tv_sec: i64::from(timeout_ms / 1000), tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000 };
        loop {
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(about_process(self.pid(), errno.into())),
            }
        }
    }

    /// Kills it; one that has ended already is as good.
    pub fn kill(&self) {
        // It fails for one that is gone, and for one that is not ours, which `open` would have refused.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Where it maps *image*. See [`maps::find_areas`].
    ///
    /// # Errors
    /// Those of [`maps::find_areas`], and as [`Process::open`].
    pub fn areas(&self, image: &Image) -> Result<Vec<Area>, Error> {
        maps::find_areas(&maps::parse(&self.read_proc("maps")?)?, image)
    }

    /// The pages inside [start, end) that are its own. See [`Private`].
    pub fn private(&self, start: u64, end: u64) -> Private<'_> {
        Private::new(self.pid(), &self.pagemap, start, end)
    }

    /// Copies the address ranges *pieces* one after the other to the start of *into*.
    ///
    /// # Errors
    /// `unavailable` if the process has ended or a page is not there; as [`Process::open`].
    pub fn read(&self, pieces: &[(u64, u64)], into: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        let mut left = pieces.to_vec();
        while !left.is_empty() {
            let read = remote::read(self.pid(), &left, &mut into[done..])
                .and_then(|read| if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) })
                .map_err(|source| about_process(self.pid(), source))?;
            done += read;
            drop_front(&mut left, read as u64);
        }
        Ok(())
    }

    /// A file of its directory in /proc.
    pub(super) fn read_proc(&self, name: &str) -> Result<Vec<u8>, Error> {
        let failed = |source| about_process(self.pid(), source);
        let file = File::open(format!("/proc/{}/{name}", self.pid())).map_err(failed)?;
        let mut text = Vec::new();
        file.take(MOST_MAPS_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
        if text.len() as u64 > MOST_MAPS_BYTES {
            return Err(Error::new(Code::Exhausted, format!("process {} has too many mappings", self.pid())));
        }
        self.check_alive()?; // else the file may be the one of a later process with this pid
        Ok(text)
    }
}

/// Takes the first *bytes* off *pieces*.
fn drop_front(pieces: &mut Vec<(u64, u64)>, mut bytes: u64) {
    let whole = pieces.iter().take_while(|(start, end)| {
        let length = end - start;
        let fits = length <= bytes;
        bytes -= if fits { length } else { 0 };
        fits
    });
    let whole = whole.count();
    pieces.drain(..whole);
    if let Some(first) = pieces.first_mut() {
        first.0 += bytes;
    }
}

fn read_start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    // The name may hold blanks and parentheses: fields are counted from the last one.
    let after = stat.iter().rposition(|&byte| byte == b')').map(|at| &stat[at + 1..]);
    after
        .and_then(|fields| std::str::from_utf8(fields).ok()?.split_ascii_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}
