//! Descriptors in the event loop.

use std::io;
use std::os::fd::OwnedFd;

pub use tokio::io::Interest;
pub use tokio::io::unix::AsyncFd;

/// Puts *fd* into the event loop of this thread until it is dropped.
///
/// # Errors
/// When it cannot be waited for, or the kernel has no memory for it.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor is open and stays the same until it is dropped, and an
    // `AsyncFd` gives out only shared references to it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
