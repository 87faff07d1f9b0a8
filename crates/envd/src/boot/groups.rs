//! The control groups of the machine.
//!
//! The workload gets a view of its own in which its group is the root. So an image may
//! run an init or a container engine that makes groups at the top, and all of that is
//! still inside what is limited and frozen; the daemon keeps the real root as a descriptor.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountFlags, UnmountFlags, unmount};

use super::mounts::mount_kind;
use crate::say;

const MOUNT: &str = "/sys/fs/cgroup";
const DAEMON_WEIGHT: &str = "10000";
/// Memory of the daemon that is not reclaimed before all else is.
const DAEMON_MIN_BYTES: u64 = 16 << 20;
/// Tasks that only the system may have, so that a fork bomb leaves room for the daemon's threads.
const RESERVED_TASKS: u64 = 256;

/// Makes the groups and gives the real root; afterwards this process is in the daemon's group.
pub(super) fn set_up(reserve_mib: u64) -> io::Result<OwnedFd> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_kind("cgroup2", MOUNT, flags, "")?;
    let root = openat(CWD, MOUNT, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for controller in ["cpu", "memory", "pids"] {
        set("cgroup.subtree_control", &format!("+{controller}"));
    }
    for group in ["daemon", "workload", "workload/exec"] {
        fs::create_dir(format!("{MOUNT}/{group}"))?;
    }
    set("daemon/cpu.weight", DAEMON_WEIGHT);
    set("daemon/memory.min", &DAEMON_MIN_BYTES.to_string());
    if let Some(limit) = memory_limit(&fs::read_to_string("/proc/meminfo")?, reserve_mib) {
        set("workload/memory.max", &limit.to_string());
    }
    if let Some(limit) = task_limit() {
        set("workload/pids.max", &limit.to_string());
    }
    fs::write(format!("{MOUNT}/workload/cgroup.procs"), "0")?;
    sys::namespace::new_cgroup_root()?;
    unmount(MOUNT, UnmountFlags::DETACH)?;
    mount_kind("cgroup2", MOUNT, flags, "")?;
    enter(&root, "daemon")?;
    Ok(root)
}

/// Moves this process to another group.
pub(crate) fn enter(root: &OwnedFd, group: &str) -> io::Result<()> {
    let path = format!("{group}/cgroup.procs");
    let file = openat(root, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).write_all(b"0")
}

/// A limit that cannot be set is told, and the machine runs without it.
fn set(name: &str, value: &str) {
    if let Err(error) = fs::write(format!("{MOUNT}/{name}"), value) {
        say!("{name}: {error}");
    }
}

/// All memory but the reserve. What the kernel has taken for itself by now nobody will get back,
/// so counting from the total would let the workload use up the reserve.
fn memory_limit(meminfo: &str, reserve_mib: u64) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available_kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    (available_kib * 1024).checked_sub(reserve_mib << 20).filter(|limit| *limit > 0)
}

fn task_limit() -> Option<u64> {
    let number = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?.trim().parse::<u64>().ok();
    number("threads-max")?.min(number("pid_max")?).checked_sub(RESERVED_TASKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workload_gets_all_but_the_reserve() {
        assert_eq!(memory_limit("MemTotal: 204800 kB\nMemAvailable:  102400 kB\n", 24), Some(76 << 20));
        assert_eq!(memory_limit("MemAvailable:  1024 kB\n", 24), None);
        assert_eq!(memory_limit("", 24), None);
    }
}
