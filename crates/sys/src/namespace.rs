//! Namespaces of the calling process.

use std::io;

/// Makes the control group the process is in the root of what it and its children see.
///
/// # Errors
/// Those of `unshare`.
pub fn new_cgroup_root() -> io::Result<()> {
    // SAFETY: takes one number; affects no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWCGROUP) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
