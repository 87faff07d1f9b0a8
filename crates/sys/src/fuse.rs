//! The one call of `/dev/fuse` that is neither a read nor a write.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// `_IOR(229, 0, u32)`
const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;

/// Joins *fresh*, a newly opened `/dev/fuse`, to the connection of *session*.
///
/// What is read from one of the two is answered on the same one. Closing it for good ends
/// every request that was read from it with an error.
///
/// # Errors
/// `EINVAL` when *session* has no connection or *fresh* has one already.
pub fn join(fresh: OwnedFd, session: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let source = session.as_raw_fd();
    // SAFETY: the kernel reads 32 bits, which outlive the call.
    let done = unsafe { libc::ioctl(fresh.as_fd().as_raw_fd(), FUSE_DEV_IOC_CLONE, &raw const source) };
    if done == 0 { Ok(fresh) } else { Err(io::Error::last_os_error()) }
}
