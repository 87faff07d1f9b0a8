//! `/init`: from a bare kernel to the image's file system with a supervisor in it.
//!
//! Nothing of the image is run or needed; a directory without a single file will do.

mod commandline;
mod console;
mod groups;
mod modules;
mod mounts;
mod network;

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::process::{getpid, setpriority_process};

use crate::arguments::Inherited;
use crate::etc;
use crate::identity::set_hostname;
use crate::say;
use crate::store::Store;
use crate::supervisor;
pub(crate) use groups::enter as enter_group;

use commandline::CommandLine;

/// Sets the machine up and does not return while it runs.
///
/// # Errors
/// What makes it impossible to go on; the kernel then panics, which ends the machine.
pub(crate) fn run() -> io::Result<()> {
    mounts::early()?;
    console::open();
    let line = CommandLine::read()?;
    modules::load();
    // The console may need a module.
    console::open();
    mounts::root(&line.root, &line.root_type)?;
    modules::forget();
    mounts::switch()?;
    mounts::rest();
    note("files in memory", mounts::volatile_files());
    let cgroup = note("control groups", groups::set_up(line.reserve_mib));
    protect();
    for (name, value) in SYSCTLS {
        note(name, etc_write(&format!("/proc/sys/{}", name.replace('.', "/")), value));
    }
    note("network", network::up(&line));
    note("resolv.conf", network::write_resolver(line.dns));
    note("host name", name_machine());

    let store = Store::create()?;
    let inherited = Inherited {
        state: sys::inherit::keep(store.as_fd())?,
        cgroup: cgroup.as_ref().map(|fd| sys::inherit::keep(fd.as_fd())).transpose()?,
        restarts: 0,
    };
    match line.init {
        None => supervisor::run(inherited, supervisor::Place::FirstProcess, line.power_off),
        Some(init) => supervisor::beside(&init, inherited, store, cgroup, line.power_off),
    }
}

const SYSCTLS: [(&str, &str); 9] = [
    // Groups by session would give each command as much CPU as the whole daemon.
    ("kernel.sched_autogroup_enabled", "0"),
    // The OOM killer is to kill, not to panic.
    ("vm.panic_on_oom", "0"),
    // Ours are counted with root's own.
    ("fs.inotify.max_user_instances", "1024"),
    ("net.ipv6.conf.all.accept_ra", "0"),
    ("net.ipv6.conf.default.accept_ra", "0"),
    ("net.ipv6.conf.all.autoconf", "0"),
    ("net.ipv6.conf.default.autoconf", "0"),
    // The link is there already, so what is set for all does not reach it.
    ("net.ipv6.conf.eth0.accept_ra", "0"),
    ("net.ipv6.conf.eth0.autoconf", "0"),
];

/// A step without which the machine is still of use: a failure is told, not fatal.
fn note<T>(what: &str, result: io::Result<T>) -> Option<T> {
    result.map_err(|error| say!("{what}: {error}")).ok()
}

fn etc_write(path: &str, text: &str) -> io::Result<()> {
    match std::fs::write(path, text) {
        // A kernel without that part needs no setting.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Keeps the supervisor and the daemon alive and responsive whatever the workload does.
fn protect() {
    note("OOM protection", std::fs::write("/proc/self/oom_score_adj", "-1000"));
    note("priority", setpriority_process(Some(getpid()), -20).map_err(io::Error::from));
}

fn name_machine() -> io::Result<()> {
    let name = etc::read(Path::new("/etc/hostname"))?.unwrap_or_default();
    let name = name.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    set_hostname(&wire::init::sanitise_hostname(name.unwrap_or("sandbox")))
}
