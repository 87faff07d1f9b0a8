//! Telling the kernel to begin writing parts of a file.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Begins to write the range to disk and does not wait for it. Says nothing about durability.
///
/// # Errors
/// Those of `sync_file_range`.
pub fn start(fd: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let signed = |number| i64::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    // SAFETY: takes numbers only.
    let done =
        unsafe { libc::sync_file_range(fd.as_raw_fd(), signed(offset)?, signed(length)?, libc::SYNC_FILE_RANGE_WRITE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
