//! The mount of a connection: made, found again, recognised as dead, removed.
//!
//! Nothing here looks at the mounted tree: a file system that nobody serves answers no question,
//! and one that is dead answers all with an error.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::terms::MAX_REQUEST_BYTES;

/// What `mount` and `df` show as the source.
const SOURCE: &str = "aenv-storaged";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// The device number of the file system, as `major:minor`.
    pub(super) device: String,
    pub(super) is_fuse: bool,
}

/// Reads the table of mounts of a process, and gives those at *place*, lowest first.
fn mounted_at(table: &[u8], place: &Path) -> Vec<Mounted> {
    table.split(|byte| *byte == b'\n').filter_map(|line| mounted_line(line, place)).collect()
}

fn mounted_line(line: &[u8], place: &Path) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
    let point = unescape(fields.nth(1)?);
    if point != place.as_os_str().as_bytes() {
        return None;
    }
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some(Mounted { device, is_fuse: kind == b"fuse" })
}

/// Spaces and the like are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        if let (b'\\', Some(byte)) = (first, octal) {
            plain.push(byte);
            rest = &after[3..];
        } else {
            plain.push(*first);
            rest = after;
        }
    }
    plain
}

/// The last one mounted at *place* is the one that is seen.
pub(super) fn at(place: &Path) -> io::Result<Option<Mounted>> {
    Ok(mounted_at(&fs::read("/proc/self/mountinfo")?, place).pop())
}

/// *path* with its parents resolved, made if need be. Its last part is not looked at if something is mounted there.
pub(super) fn prepare(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = parent.canonicalize()?.join(name);
    if at(&place)?.is_none() {
        match fs::create_dir(&place) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ if fs::symlink_metadata(&place)?.is_dir() => {}
            _ => return Err(Errno::NOTDIR.into()),
        }
    }
    Ok(place)
}

/// Mounts the connection of *session*, which has none yet, at *place*.
///
/// Modes are checked by the kernel, so that no other user reaches an image whatever the folders above allow.
pub(super) fn mount(session: BorrowedFd<'_>, place: &Path, uid: u32, gid: u32) -> io::Result<Mounted> {
    let options = format!(
        "fd={},rootmode=40000,user_id={uid},group_id={gid},allow_other,default_permissions,max_read={MAX_REQUEST_BYTES}",
        session.as_raw_fd(),
    );
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    rustix::mount::mount(SOURCE, place, "fuse", flags, CString::new(options)?.as_c_str())?;
    at(place)?.ok_or_else(|| Errno::NOENT.into())
}

/// Ends whatever is at *place*, dead or stuck: requests in flight fail, and it is gone from the tree even
/// where something still has it open.
///
/// # Errors
/// `EBUSY` for a mount that is not of FUSE: that is not ours.
pub(super) fn end(place: &Path) -> io::Result<bool> {
    let mut found = false;
    while let Some(mounted) = at(place)? {
        if !mounted.is_fuse {
            return Err(Errno::BUSY.into());
        }
        found = true;
        // Force aborts the connection, and fails for a mount that is in use.
        let _ = rustix::mount::unmount(place, UnmountFlags::FORCE);
        match rustix::mount::unmount(place, UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

/// Removes a mount that nothing uses.
///
/// # Errors
/// `EBUSY` when something does.
pub(super) fn unmount(place: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(place, UnmountFlags::NOFOLLOW)?)
}

/// How far the kernel reads ahead in cached files.
pub(super) fn set_read_ahead(mounted: &Mounted, kib: u32) -> io::Result<()> {
    fs::write(format!("/sys/class/bdi/{}/read_ahead_kb", mounted.device), kib.to_string())
}

/// Requests that are not answered yet, if this kernel's control file system says.
pub(super) fn waiting(mounted: &Mounted) -> Option<u64> {
    let minor = mounted.device.split(':').nth(1)?;
    fs::read_to_string(format!("/sys/fs/fuse/connections/{minor}/waiting")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &[u8] = b"22 1 0:21 / /sys rw,relatime shared:7 - sysfs sysfs rw\n\
        90 22 0:58 / /var/a\\040b rw,nosuid,nodev shared:1 master:2 - fuse aenv-storaged rw,user_id=0\n\
        91 90 0:59 / /var/a\\040b rw - ext4 /dev/x rw\n\
        92 90 0:60 / /var/a - fuse.other x rw\n";

    #[test]
    fn mounts_are_found_by_their_whole_path() {
        let of = |device: &str, is_fuse| Mounted { device: device.into(), is_fuse };
        assert_eq!(mounted_at(TABLE, Path::new("/var/a b")), [of("0:58", true), of("0:59", false)]);
        assert_eq!(mounted_at(TABLE, Path::new("/var")), []);
    }

    proptest! {
        #[test]
        fn no_table_is_too_strange(table in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = mounted_at(&table, Path::new("/"));
            let _ = unescape(&table);
        }
    }
}
