//! Acting on files as another user, on one thread only.

use std::io;

/// Who a process runs as, and as whom files are touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Runs *action* with the file-system identity of *who*, so that the kernel decides what is allowed.
///
/// Only the calling thread changes: the raw calls are used, not the C library's, which
/// would change every thread. Leaving restores root. A daemon that is not root itself
/// runs *action* as it is.
///
/// # Errors
/// When the kernel refuses the change of identity; *action* has then not run.
pub fn impersonate<T>(who: &Credentials, action: impl FnOnce() -> T) -> io::Result<T> {
    // SAFETY: takes no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 || (who.uid == 0 && who.gid == 0) {
        return Ok(action());
    }
    let restore = Restore::remember()?;
    set_groups(&who.groups)?;
    set_fs_id(libc::SYS_setfsgid, who.gid)?;
    set_fs_id(libc::SYS_setfsuid, who.uid)?;
    let result = action();
    drop(restore);
    Ok(result)
}

/// Puts root's identity back, also when a step in between failed.
struct Restore {
    groups: Vec<u32>,
}

impl Restore {
    fn remember() -> io::Result<Self> {
        // SAFETY: a size of zero asks only for the count; nothing is written.
        let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
        let mut groups = vec![0; usize::try_from(count).map_err(|_| io::Error::last_os_error())?];
        // SAFETY: the vector has room for exactly *count* entries.
        let count = unsafe { libc::getgroups(count, groups.as_mut_ptr()) };
        groups.truncate(usize::try_from(count).map_err(|_| io::Error::last_os_error())?);
        Ok(Self { groups })
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        // A thread that could not become root again would serve the next request as the wrong user.
        let back = set_fs_id(libc::SYS_setfsuid, 0).and_then(|()| set_fs_id(libc::SYS_setfsgid, 0));
        if back.and_then(|()| set_groups(&self.groups)).is_err() {
            std::process::abort();
        }
    }
}

fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length describe a live slice; the kernel only reads it.
    let done = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_fs_id(call: libc::c_long, id: u32) -> io::Result<()> {
    // SAFETY: the two calls this is used for take one number. They answer with the
    // previous value and have no error, so a second call that changes nothing tells.
    let now = unsafe {
        libc::syscall(call, id);
        libc::syscall(call, u32::MAX)
    };
    if now == libc::c_long::from(id) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_are_created_as_the_other_user_and_root_comes_back() {
        // SAFETY: takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            println!("skipped: not root");
            return;
        }
        let directory = std::env::temp_dir().join(format!("sys-credentials-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let who = Credentials { uid: 4321, gid: 4321, groups: vec![] };
        let refused = impersonate(&who, || fs::write(directory.join("a"), "x")).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::write(directory.join("b"), "x").unwrap();
        fs::remove_dir_all(&directory).unwrap();
    }
}
