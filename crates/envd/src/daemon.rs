//! The daemon's life: from its descriptors to an answering port.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use sys::signals::Blocked;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use crate::app::{App, Powers};
use crate::arguments::{CgroupChoice, Inherited, PORT, ServeOptions};
use crate::cgroup::Groups;
use crate::http::{listen, serve};
use crate::identity;
use crate::say;
use crate::store::Store;

/// Threads for file operations, which may hang on a file system that hangs.
const MAX_WORKERS: usize = 128;
const WORKER_STACK_BYTES: usize = 256 << 10;
const WORKER_IDLE: Duration = Duration::from_secs(10);
const OPEN_FILES: u64 = 1_048_576;

/// In a guest, under the supervisor.
///
/// # Errors
/// When something without which it cannot serve is missing; it is then started again.
pub(crate) fn run_in_guest(inherited: Inherited) -> io::Result<()> {
    let store = Store::open(sys::inherit::take(inherited.state)?);
    let cgroup = inherited.cgroup.map(sys::inherit::take).transpose()?;
    let groups = cgroup.map(Groups::open).transpose()?;
    let powers = Powers { identity: true, kernel: true, power: true };
    run(SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)), store, groups, powers, true, None, |_| {
        if inherited.restarts == 0 {
            say!("ready");
        } else {
            say!("daemon restarted ({})", inherited.restarts);
        }
    })
}

/// On a host, for tests; ends with the process.
///
/// # Errors
/// When the port or the control groups cannot be used.
pub(crate) fn run_on_host(options: &ServeOptions) -> io::Result<()> {
    let own = if options.cgroup == CgroupChoice::Own { Some(own_group()?) } else { None };
    let groups = match &options.cgroup {
        CgroupChoice::None => None,
        CgroupChoice::Own => own.as_deref().map(|path| Groups::open(open_directory(path)?)).transpose()?,
        CgroupChoice::Below(path) => Some(Groups::open(open_directory(path)?)?),
    };
    let powers = Powers { identity: options.identity, kernel: false, power: false };
    let told_to_stop = stop_signal()?;
    let ended = run(options.address, Store::create()?, groups, powers, false, Some(told_to_stop), |address| {
        println!("listening on {address}");
    });
    if let Some(path) = own {
        let _ = std::fs::remove_dir(path);
    }
    ended
}

/// Resolves when the daemon is told to end.
///
/// Signals are held back before any other thread is made, so that only this one gets them.
fn stop_signal() -> io::Result<oneshot::Receiver<()>> {
    let signals = Blocked::new(&[Signal::TERM, Signal::INT].map(Signal::as_raw))?;
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        // A wait also ends, with nothing, when the process was stopped and goes on.
        while signals.wait(None).is_none() {}
        let _ = sender.send(());
    });
    Ok(receiver)
}

fn run(
    address: SocketAddr,
    store: Store,
    groups: Option<Groups>,
    powers: Powers,
    protected: bool,
    told_to_stop: Option<oneshot::Receiver<()>>,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let max_open_files = raise_open_files();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let app = App::new(store, groups, powers, protected, max_open_files)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_WORKERS)
        .thread_stack_size(WORKER_STACK_BYTES)
        .thread_keep_alive(WORKER_IDLE)
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = listen(address)?;
        ready(listener.local_addr()?);
        // A daemon before this one may not have come to the end of it.
        identity::renew_soon(&app);
        match told_to_stop {
            None => serve(app, listener).await,
            Some(stop) => {
                tokio::select! {
                    () = serve(app.clone(), listener) => {}
                    _ = stop => app.end_workload(),
                }
            }
        }
        Ok(())
    })
}

/// Raises the limit of open files as far as it may go, and gives it: each stream is a connection, each process a handful of pipes.
fn raise_open_files() -> u64 {
    let highest = Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) };
    if setrlimit(Resource::Nofile, highest).is_ok() {
        return OPEN_FILES;
    }
    let allowed = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: allowed, maximum: allowed });
    allowed.unwrap_or(OPEN_FILES)
}

/// A new group at the top of the cgroup2 file system, named after this process.
fn own_group() -> io::Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mount =
        cgroup2_mount(&mounts).ok_or_else(|| io::Error::other("no cgroup2 file system is mounted; use --no-cgroup"))?;
    let group = mount.join(format!("aenv-{}", std::process::id()));
    std::fs::create_dir(&group)?;
    Ok(group)
}

fn cgroup2_mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ").then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    })
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_point_is_found_among_others() {
        let text = "29 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n30 29 0:27 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup2_mount(text), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(cgroup2_mount(""), None);
    }
}
