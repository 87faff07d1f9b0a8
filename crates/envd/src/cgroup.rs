//! Control groups: where processes live, how they are frozen, and what the OOM killer did.
//!
//! ```text
//! root ── daemon              the supervisor and the daemon (made at boot)
//!      └─ workload            everything else: limits and the freezer
//!          └─ exec ── N       one leaf for each process the daemon starts
//! ```
//!
//! Leaves have no controllers, so making one is cheap; empty ones are used again. They
//! are what makes "this process and all it ever started" a thing that can be killed.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, mkdirat, openat, unlinkat};
use sys::ready::{Interest, watch};
use tokio::sync::Notify;

use crate::turns::{Late, Turns};

/// How long a workload may take to stand still where the caller does not say.
pub(crate) const FREEZE_LIMIT: Duration = Duration::from_secs(1);
/// Empty leaves kept for the next processes.
const SPARE_LEAVES: usize = 8;

/// The control groups of one sandbox.
pub(crate) struct Groups {
    root: OwnedFd,
    /// Kept open, because it is read at every start; not there without the memory controller.
    memory_events: Option<OwnedFd>,
    frozen: Cell<bool>,
    /// Whether the kernel holds the workload: an empty one is frozen by our word alone.
    held: Cell<bool>,
    /// Leaves that were given out and have not come back: a process may be on its way into one.
    given_out: Cell<usize>,
    thawed: Notify,
    turns: Turns,
    spare: RefCell<Vec<Leaf>>,
    /// Leaves whose process is gone but which still hold others that it started.
    lingering: RefCell<Vec<Leaf>>,
    next_leaf: Cell<u64>,
}

/// Why the workload was not frozen or thawed.
pub(crate) enum OrderError {
    Late,
    Failed(io::Error),
}

impl From<Late> for OrderError {
    fn from(_: Late) -> Self {
        Self::Late
    }
}

impl From<io::Error> for OrderError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// The group of one process.
pub(crate) struct Leaf {
    name: String,
    directory: OwnedFd,
}

impl Groups {
    /// Uses the control group *root*, making what is missing below it.
    ///
    /// # Errors
    /// When the file system is not cgroup2 or may not be changed.
    pub(crate) fn open(root: OwnedFd) -> io::Result<Self> {
        for name in ["workload", "workload/exec"] {
            make_directory(&root, name)?;
        }
        let memory_events = openat(&root, "workload/memory.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let groups = Self {
            root,
            memory_events: memory_events.ok(),
            frozen: Cell::new(false),
            held: Cell::new(false),
            given_out: Cell::new(0),
            thawed: Notify::new(),
            turns: Turns::default(),
            spare: RefCell::default(),
            lingering: RefCell::default(),
            // Leaves of a daemon before this one may still be in use.
            next_leaf: Cell::new(u64::from(std::process::id()) << 32),
        };
        for name in groups.leaves() {
            if let Ok(directory) = open_group(&groups.root, &name) {
                groups.lingering.borrow_mut().push(Leaf { name, directory });
            }
        }
        groups.held.set(groups.read("workload/cgroup.freeze")?.trim() == "1");
        groups.frozen.set(groups.held.get());
        Ok(groups)
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.get()
    }

    /// Returns once the workload is not frozen.
    pub(crate) async fn wait_thawed(&self) {
        while self.frozen.get() {
            self.thawed.notified().await;
        }
    }

    /// Stops every task of the workload and returns when the kernel says they have stopped.
    ///
    /// # Errors
    /// When it takes longer than *limit* (a task may wait for the disk, uninterruptibly); the workload then runs on.
    /// When an order later than *turn* came, before or meanwhile; the workload is then as that one says.
    pub(crate) async fn freeze(&self, turn: Option<u64>, limit: Duration) -> Result<(), OrderError> {
        let turn = self.turns.take(turn)?;
        self.frozen.set(true);
        let frozen = tokio::select! {
            frozen = tokio::time::timeout(limit, self.stop_all()) => frozen,
            () = self.turns.wait_passed(turn) => return Err(OrderError::Late),
        };
        match frozen {
            Ok(Ok(())) if self.turns.is_latest(turn) => Ok(()),
            _ if !self.turns.is_latest(turn) => Err(OrderError::Late),
            failed => {
                let _ = self.let_go();
                self.mark_thawed();
                failed.unwrap_or_else(|_| {
                    let text = format!("the workload did not freeze within {} ms", limit.as_millis());
                    Err(io::Error::new(io::ErrorKind::TimedOut, text))
                })?;
                Ok(())
            }
        }
    }

    /// Lets the workload run. The kernel needs no time for this, so nothing is waited for.
    ///
    /// # Errors
    /// When the kernel refuses, or an order later than *turn* was there first.
    pub(crate) fn thaw(&self, turn: Option<u64>) -> Result<(), OrderError> {
        self.turns.take(turn)?;
        self.let_go()?;
        self.mark_thawed();
        Ok(())
    }

    /// From here on orders come from the node of another generation, which counts for itself.
    pub(crate) fn start_anew(&self) {
        self.turns.start_anew();
    }

    fn mark_thawed(&self) {
        self.frozen.set(false);
        self.thawed.notify_waiters();
    }

    /// Has the kernel stop the workload, unless there is nothing in it: then nothing comes into it either, since
    /// whoever wants a leaf first has the kernel stop it after all ([`Self::acquire`]). A restored sandbox without
    /// processes is let run without a call that an emulated processor meets for the first time.
    async fn stop_all(&self) -> io::Result<()> {
        let file = openat(&self.root, "workload/cgroup.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        if self.given_out.get() == 0 && says(&file, "populated 0")? {
            return Ok(());
        }
        let events = watch(file, Interest::PRIORITY)?;
        self.hold()?;
        loop {
            if says(events.get_ref(), "frozen 1")? {
                return Ok(());
            }
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }

    fn hold(&self) -> io::Result<()> {
        self.held.set(true);
        self.write("workload/cgroup.freeze", "1")
    }

    fn let_go(&self) -> io::Result<()> {
        if self.held.get() {
            self.write("workload/cgroup.freeze", "0")?;
            self.held.set(false);
        }
        Ok(())
    }

    /// How many tasks the OOM killer has ended in the workload so far.
    pub(crate) fn oom_kills(&self) -> u64 {
        let Some(file) = &self.memory_events else { return 0 };
        let mut text = [0; 512];
        let length = rustix::io::pread(file, &mut text, 0).unwrap_or(0);
        let events = String::from_utf8_lossy(&text[..length]);
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    /// A group for a new process.
    ///
    /// # Errors
    /// When the kernel makes no more groups.
    pub(crate) fn acquire(&self) -> io::Result<Leaf> {
        if self.frozen.get() && !self.held.get() {
            self.hold()?;
        }
        let leaf = self.free_leaf()?;
        self.given_out.set(self.given_out.get() + 1);
        Ok(leaf)
    }

    fn free_leaf(&self) -> io::Result<Leaf> {
        if let Some(leaf) = self.spare.borrow_mut().pop() {
            return Ok(leaf);
        }
        let number = self.next_leaf.get();
        self.next_leaf.set(number + 1);
        let name = format!("workload/exec/{number}");
        make_directory(&self.root, &name)?;
        let directory = open_group(&self.root, &name)?;
        Ok(Leaf { name, directory })
    }

    /// Gives a group back after its process has ended; what still runs in it is left alone.
    pub(crate) fn release(&self, leaf: Leaf) {
        self.given_out.set(self.given_out.get().saturating_sub(1));
        let mut lingering = self.lingering.borrow_mut();
        lingering.push(leaf);
        let mut spare = self.spare.borrow_mut();
        for leaf in std::mem::take(&mut *lingering) {
            if leaf.is_populated() {
                lingering.push(leaf);
            } else if spare.len() < SPARE_LEAVES {
                spare.push(leaf);
            } else if unlinkat(&self.root, &*leaf.name, AtFlags::REMOVEDIR).is_err() {
                lingering.push(leaf);
            }
        }
    }

    /// Kills what is left in the workload and removes its groups, as far as they are empty by then.
    pub(crate) fn remove(&self) {
        let _ = self.write("workload/cgroup.kill", "1");
        let _ = self.wait_empty();
        for leaf in self.leaves() {
            let _ = unlinkat(&self.root, &*leaf, AtFlags::REMOVEDIR);
        }
        for name in ["workload/exec", "workload"] {
            let _ = unlinkat(&self.root, name, AtFlags::REMOVEDIR);
        }
    }

    /// Waits, not for long, until nothing is left in the workload; blocks the thread.
    fn wait_empty(&self) -> io::Result<()> {
        let events = openat(&self.root, "workload/cgroup.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        loop {
            let mut text = [0; 128];
            let length = rustix::io::pread(&events, &mut text, 0)?;
            let empty = String::from_utf8_lossy(&text[..length]).lines().any(|line| line == "populated 0");
            if empty || poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&limit))? == 0 {
                return Ok(());
            }
        }
    }

    /// The names of all leaves there are, whoever made them.
    fn leaves(&self) -> Vec<String> {
        let open =
            openat(&self.root, "workload/exec", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let Ok(entries) = open.and_then(Dir::new) else { return Vec::new() };
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_str().ok()?.to_owned()));
        names
            .filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
            .map(|name| format!("workload/exec/{name}"))
            .collect()
    }

    fn read(&self, name: &str) -> io::Result<String> {
        let file = openat(&self.root, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        io::read_to_string(File::from(file))
    }

    fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let file = openat(&self.root, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        File::from(file).write_all(text.as_bytes())
    }
}

impl Leaf {
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// The processes in this group.
    pub(crate) fn members(&self) -> Vec<i32> {
        let file = openat(&self.directory, "cgroup.procs", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let text = file.map_err(io::Error::from).and_then(|file| io::read_to_string(File::from(file)));
        text.unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills everything in this group at once.
    ///
    /// # Errors
    /// On kernels before 5.14, which cannot.
    pub(crate) fn kill(&self) -> io::Result<()> {
        let file = openat(&self.directory, "cgroup.kill", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        File::from(file).write_all(b"1")
    }

    fn is_populated(&self) -> bool {
        let file = openat(&self.directory, "cgroup.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let text = file.map_err(io::Error::from).and_then(|file| io::read_to_string(File::from(file)));
        text.is_ok_and(|text| text.lines().any(|line| line == "populated 1"))
    }
}

/// Whether one of the lines of an events file is *line*.
fn says(events: &OwnedFd, line: &str) -> io::Result<bool> {
    let mut text = [0; 128];
    let length = rustix::io::pread(events, &mut text, 0)?;
    Ok(String::from_utf8_lossy(&text[..length]).lines().any(|found| found == line))
}

fn open_group(root: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    Ok(openat(root, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn make_directory(root: &OwnedFd, name: &str) -> io::Result<()> {
    match mkdirat(root, name, Mode::from_raw_mode(0o755)) {
        Err(error) if error != rustix::io::Errno::EXIST => Err(error.into()),
        _ => Ok(()),
    }
}
