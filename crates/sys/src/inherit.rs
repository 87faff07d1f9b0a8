//! Descriptors handed from one process to the next by their number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Takes over descriptor *number*, which an `exec` left open for us, and closes it for the next one.
///
/// # Errors
/// When no such descriptor is open.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD reads two numbers and touches no memory.
    if number < 3 || unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, as just seen, and nobody else in this process knows its number:
    // this is called once per number at start, before any other descriptor is made.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Lets *fd* stay open over the next `exec`, and gives its number.
///
/// # Errors
/// Those of `fcntl`.
pub fn keep(fd: BorrowedFd<'_>) -> io::Result<RawFd> {
    // SAFETY: F_SETFD reads two numbers and touches no memory.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd.as_raw_fd())
}

/// Closes everything but standard input, output and error.
///
/// For a process that outlives its starter: a pipe of the starter's that it held would seem to be in use for ever.
/// Call it before anything is opened.
pub fn close_all_but_standard() {
    // SAFETY: takes three numbers. What it closes was open before this program began, so nothing here owns it.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
}
