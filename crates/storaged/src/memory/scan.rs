//! Which pages of a private mapping belong to the process alone: the ones it has changed.
//!
//! The `PAGEMAP_SCAN` ioctl (Linux 6.7) finds them fastest; older kernels are read through
//! /proc/PID/pagemap. Both give the same answer: present or swapped, and not a page of the file.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use sys::pagemap::{Region, scan_private};

use super::PAGE_BYTES;
use super::failure::about_process;
use crate::error::{Code, Error};

const REGIONS_PER_CALL: usize = 8192;
const PAGES_PER_READ: usize = 1 << 15;
const ENTRY_BYTES: usize = 8;
/// The top byte of a pagemap entry.
const PRESENT: u8 = 0x80;
const SWAPPED: u8 = 0x40;
const FILE: u8 = 0x20;

/// Yields the address ranges of private pages, lowest first, none touching the next. Memory is bounded.
pub struct Private<'a> {
    pid: i32,
    pagemap: &'a File,
    at: u64,
    end: u64,
    by_ioctl: bool,
    found: std::vec::IntoIter<(u64, u64)>,
    /// Waits to see whether the next range continues it.
    last: Option<(u64, u64)>,
    failed: bool,
}

impl<'a> Private<'a> {
    pub(super) fn new(pid: i32, pagemap: &'a File, start: u64, end: u64) -> Self {
        let found = Vec::new().into_iter();
        Self { pid, pagemap, at: start, end, by_ioctl: true, found, last: None, failed: false }
    }

    /// The same by way of the table of all pages, as on a kernel without the ioctl.
    #[must_use]
    pub fn from_table(self) -> Self {
        Self { by_ioctl: false, ..self }
    }

    fn refill(&mut self) -> Result<(), Error> {
        if self.by_ioctl {
            match self.scan() {
                Err(source)
                    if matches!(
                        Errno::from_io_error(&source),
                        Some(Errno::NOTTY | Errno::INVAL | Errno::OPNOTSUPP)
                    ) =>
                {
                    self.by_ioctl = false;
                }
                done => return done.map_err(|source| about_process(self.pid, source)),
            }
        }
        self.read_table().map_err(|source| about_process(self.pid, source))
    }

    fn scan(&mut self) -> io::Result<()> {
        let mut regions = vec![Region::default(); REGIONS_PER_CALL];
        let (count, walk_end) = scan_private(self.pagemap.as_fd(), self.at, self.end, &mut regions)?;
        regions.truncate(count);
        self.at = if count < REGIONS_PER_CALL {
            self.end
        } else {
            // After more than one round inside the kernel (512 regions each) its own note of where the walk
            // ended is the one of an earlier round (seen on 6.18), and going by it would report pages twice.
            walk_end.max(regions[count - 1].end)
        };
        self.found = regions.iter().map(|region| (region.start, region.end)).collect::<Vec<_>>().into_iter();
        Ok(())
    }

    fn read_table(&mut self) -> io::Result<()> {
        let pages =
            usize::try_from((self.end - self.at) / PAGE_BYTES).map_or(PAGES_PER_READ, |n| n.min(PAGES_PER_READ));
        let mut table = vec![0; pages * ENTRY_BYTES];
        self.pagemap.read_exact_at(&mut table, self.at / PAGE_BYTES * ENTRY_BYTES as u64).map_err(|source| {
            if source.kind() == io::ErrorKind::UnexpectedEof { Errno::SRCH.into() } else { source }
        })?;
        let mut found: Vec<(u64, u64)> = Vec::new();
        for entry in table.chunks_exact(ENTRY_BYTES) {
            let top = entry[ENTRY_BYTES - 1];
            if top & (PRESENT | SWAPPED) != 0 && top & FILE == 0 {
                match found.last_mut() {
                    Some(last) if last.1 == self.at => last.1 += PAGE_BYTES,
                    _ => found.push((self.at, self.at + PAGE_BYTES)),
                }
            }
            self.at += PAGE_BYTES;
        }
        self.found = found.into_iter();
        Ok(())
    }
}

impl Iterator for Private<'_> {
    type Item = Result<(u64, u64), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(range) = self.found.next() {
                match &mut self.last {
                    Some(last) if last.1 == range.0 => last.1 = range.1,
                    Some(last) if last.1 > range.0 => {
                        self.failed = true;
                        self.found = Vec::new().into_iter();
                        self.at = self.end;
                        self.last = None;
                        return Some(Err(Error::new(Code::Bug, "the kernel's page scan went backwards")));
                    }
                    last => {
                        if let Some(done) = last.replace(range) {
                            return Some(Ok(done));
                        }
                    }
                }
            } else if self.at < self.end && !self.failed {
                let before = self.at;
                let done = self.refill();
                let stuck = done.is_ok() && self.at <= before;
                if let Err(failure) = done {
                    self.failed = true;
                    return Some(Err(failure));
                }
                if stuck {
                    self.failed = true;
                    return Some(Err(Error::new(Code::Bug, "the kernel's page scan makes no progress")));
                }
            } else {
                return self.last.take().filter(|_| !self.failed).map(Ok);
            }
        }
    }
}
