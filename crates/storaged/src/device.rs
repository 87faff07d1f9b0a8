//! What a front end serves: the one seam between images and the kernel interfaces that show them.

use std::io;
use std::num::NonZeroU64;

/// A number that names a device for as long as it exists, across restarts of the daemon.
///
/// The kernel keeps it (as an inode number) while the daemon is away, so it is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub NonZeroU64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read and written by one VMM, never through the page cache of the front end.
    Disk,
    /// Mapped privately by any number of VMMs, which share its pages in the page cache. Never written.
    Memory,
}

/// Whether an answer was given, or would have had to wait for something slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    /// Nothing was done: ask again with the blocking call, where waiting hurts nobody else.
    WouldWait,
}

/// Bytes with a size. All offsets and lengths are in bytes.
///
/// A call either does the whole of what was asked or fails: a short, missing or corrupt
/// read is an error and never zeros. An offset or length outside of the device is `InvalidInput`.
/// Every call may come from many threads at once; overlapping writes are ordered somehow.
pub trait Device: Send + Sync {
    fn kind(&self) -> Kind;

    fn size_bytes(&self) -> u64;

    /// Fills *buf* from *offset*. May wait: for a disk, or for a network.
    ///
    /// # Errors
    /// `EIO` for bytes that are lost, wrong or out of reach; whatever the host's file system says.
    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Like [`Device::read`], and never waits for a network or for another request.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        self.read(buf, offset).map(|()| Answer::Done)
    }

    /// Writes all of *buf*. Survives a crash of the daemon once it returns, and a crash of the host
    /// once a later flush returns, or at once with *durable* (FUA).
    ///
    /// # Errors
    /// `EROFS` for memory, `ENOSPC` when the host is full (then the old bytes are still there).
    fn write(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<()>;

    /// Makes the range read as zeros and gives its space back.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Returns once everything acknowledged so far is durable. After a failure nothing may be
    /// believed to be: it fails again until the device is attached anew.
    ///
    /// # Errors
    /// Whatever the host's file system says.
    fn flush(&self) -> io::Result<()>;
}
