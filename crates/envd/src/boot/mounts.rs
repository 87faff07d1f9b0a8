//! File systems: those of the kernel, and the image as the root of everything.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount, mount_bind, mount_move};
use rustix::process::{chdir, chroot};

use crate::etc;
use crate::say;

const NEW_ROOT: &str = "/root-fs";
/// How long the disk may take to appear.
const DISK_LIMIT: Duration = Duration::from_secs(30);
const DISK_POLL: Duration = Duration::from_millis(5);
const VOLATILE: &str = "/run/agentenv";

/// Those without which nothing can be done, in the initramfs.
pub(super) fn early() -> io::Result<()> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        fs::create_dir_all(target)?;
        mount_kind(kind, target, MountFlags::NOSUID, "").map_err(|e| named(target, &e))?;
    }
    Ok(())
}

/// Mounts the image, waiting for its disk.
pub(super) fn root(device: &str, kind: &str) -> io::Result<()> {
    let began = Instant::now();
    while !Path::new(device).exists() {
        if began.elapsed() > DISK_LIMIT {
            let text = format!("the disk {device} did not appear within {} s", DISK_LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        std::thread::sleep(DISK_POLL);
    }
    fs::create_dir_all(NEW_ROOT)?;
    mount(device, NEW_ROOT, kind, MountFlags::NOATIME, None).map_err(|e| named(device, &e.into()))
}

/// Makes the image the root directory, as `switch_root` would, with the kernel's file systems moved along.
pub(super) fn switch() -> io::Result<()> {
    for name in ["proc", "sys", "dev"] {
        let target = format!("{NEW_ROOT}/{name}");
        make_mount_point(&target)?;
        mount_move(format!("/{name}"), &target).map_err(|e| named(&target, &e.into()))?;
    }
    chdir(NEW_ROOT)?;
    mount_move(".", "/")?;
    chroot(".")?;
    Ok(chdir("/")?)
}

/// Those that are good to have, in the image.
pub(super) fn rest() {
    let nothing = MountFlags::empty();
    let quiet = MountFlags::NOSUID | MountFlags::NODEV;
    for (kind, target, flags, options) in [
        ("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, "gid=5,mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", quiet, "mode=1777"),
        ("mqueue", "/dev/mqueue", quiet | MountFlags::NOEXEC, ""),
        ("tmpfs", "/run", quiet, "mode=755"),
    ] {
        let _ = fs::create_dir(target);
        match fs::symlink_metadata(target) {
            Ok(metadata) if metadata.is_dir() => {
                if let Err(error) = mount_kind(kind, target, flags | nothing, options) {
                    // A kernel may come without message queues.
                    if error.raw_os_error() != Some(rustix::io::Errno::NODEV.raw_os_error()) {
                        say!("{target}: {error}");
                    }
                }
            }
            _ => say!("{target} is not a directory: left as it is"),
        }
    }
    for (name, mode) in [("/run/lock", 0o1777), ("/tmp", 0o1777)] {
        // What the image has already is its own affair.
        if fs::create_dir(name).is_ok() {
            let _ = fs::set_permissions(name, fs::Permissions::from_mode(mode));
        }
    }
    let standard = [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    for (target, name) in standard {
        let _ = symlink(target, Path::new("/dev").join(name));
    }
}

/// Files of `/etc` that are new at every restore, in memory: a write to a disk's file system is
/// thousands of instructions that an emulated processor has not seen, before the guest may run.
///
/// The image's own content is what they start with. What is no plain file there is left alone.
pub(super) fn volatile_files() -> io::Result<()> {
    fs::create_dir_all(VOLATILE)?;
    fs::create_dir_all("/etc")?;
    for (name, mode) in [("hostname", 0o644), ("hosts", 0o644), ("machine-id", 0o444)] {
        let target = Path::new("/etc").join(name);
        match fs::symlink_metadata(&target) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => continue,
            Err(_) => fs::write(&target, "")?,
        }
        let source = Path::new(VOLATILE).join(name);
        fs::write(&source, etc::read(&target)?.unwrap_or_default())?;
        fs::set_permissions(&source, fs::Permissions::from_mode(mode))?;
        mount_bind(&source, &target).map_err(|e| named(name, &e.into()))?;
    }
    Ok(())
}

pub(super) fn mount_kind(kind: &str, target: &str, flags: MountFlags, options: &str) -> io::Result<()> {
    let options = std::ffi::CString::new(options)?;
    Ok(mount(kind, target, kind, flags, Some(options.as_c_str()))?)
}

/// A directory, in place of whatever else has that name: a link could lead anywhere.
fn make_mount_point(path: &str) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(path)?,
        Err(_) => {}
    }
    fs::create_dir(path).map_err(|e| named(path, &e))
}

fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}
