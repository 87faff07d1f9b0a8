//! One live process: its output is pumped to subscribers until it has ended.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, kill_process, kill_process_group, waitid};
use rustix::termios::{Winsize, tcsetwinsize};
use sys::ready::{AsyncFd, Interest};
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use wire::process::{Ended, Output, ProcessConfig, Signal, Size, data_frame, end_event_frame};
use wire::{Code, RpcError};

use super::broadcast::Broadcast;
use super::ending;
use super::input::Input;
use crate::app::App;
use crate::cgroup::Leaf;

/// Most bytes of output in one frame.
pub(super) const CHUNK_BYTES: usize = 32 << 10;
/// The same for terminals, which are read in smaller pieces to feel quick.
const TERMINAL_CHUNK_BYTES: usize = 16 << 10;
/// What is still read of the output of a killed process, whose children may go on writing.
const LAST_WORDS_BYTES: usize = 1 << 20;

pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) tag: Option<String>,
    pub(super) config: ProcessConfig,
    pub(super) broadcast: Rc<Broadcast>,
    /// A lock, so that the bytes of two calls do not mix.
    pub(super) input: Mutex<Input>,
    pub(super) terminal: Option<Rc<AsyncFd<OwnedFd>>>,
    pub(super) leaf: RefCell<Option<Leaf>>,
    /// Set once a client or the deadline ended it: then the end does not wait for its children.
    pub(super) killed: Cell<bool>,
    pub(super) cut: Notify,
}

/// What only the task of a process needs.
pub(super) struct Ends {
    pub(super) pidfd: AsyncFd<OwnedFd>,
    pub(super) outputs: Vec<(Output, Rc<AsyncFd<OwnedFd>>)>,
    /// When it is killed.
    pub(super) deadline: Option<Instant>,
    pub(super) oom_kills_before: u64,
}

impl Process {
    /// Sends *signal* to the process, its group and its session; with *tree*, kills everything it ever started.
    ///
    /// # Errors
    /// `internal` when the kernel refuses.
    pub(super) fn signal(&self, signal: Signal, tree: bool) -> Result<(), RpcError> {
        let number = match signal {
            Signal::Term => rustix::process::Signal::TERM,
            Signal::Kill => rustix::process::Signal::KILL,
        };
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
        // The process itself is not reaped before it leaves the registry, so its number cannot mean another.
        let sent = kill_process_group(pid, number);
        if signal == Signal::Kill {
            self.kill_session(pid, tree);
        }
        self.killed.set(true);
        self.cut.notify_waiters();
        match sent {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(RpcError::internal(format!("the signal could not be sent: {error}"))),
        }
    }

    /// Jobs of an interactive shell have groups of their own; they are found by their session.
    fn kill_session(&self, session: Pid, tree: bool) {
        let leaf = self.leaf.borrow();
        let Some(leaf) = leaf.as_ref() else { return };
        if tree && leaf.kill().is_ok() {
            return;
        }
        for member in leaf.members().into_iter().filter_map(Pid::from_raw) {
            if tree || rustix::process::getsid(Some(member)) == Ok(session) {
                let _ = kill_process(member, rustix::process::Signal::KILL);
            }
        }
    }

    /// # Errors
    /// `failed_precondition` without a terminal, `invalid_argument` for an impossible size.
    pub(super) fn resize(&self, size: Size) -> Result<(), RpcError> {
        let Some(terminal) = &self.terminal else {
            return Err(RpcError::new(Code::FailedPrecondition, "this process has no terminal"));
        };
        let size = window_size(size)?;
        tcsetwinsize(terminal.get_ref(), size)
            .map_err(|e| RpcError::internal(format!("the terminal was not resized: {e}")))
    }
}

/// # Errors
/// `invalid_argument` for a size terminals cannot have.
pub(super) fn window_size(size: Size) -> Result<Winsize, RpcError> {
    match (u16::try_from(size.rows), u16::try_from(size.cols)) {
        (Ok(ws_row), Ok(ws_col)) => Ok(Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }),
        _ => Err(RpcError::invalid("a terminal has at most 65535 rows and columns")),
    }
}

/// Runs a process to its end and tells its subscribers.
pub(super) async fn supervise(app: Rc<App>, process: Rc<Process>, ends: Ends) {
    let mut status = None;
    {
        let pumps = pump_all(&app, &process, &ends.outputs);
        let exit = wait_exit(&ends.pidfd);
        let deadline = expire(&process, ends.deadline);
        tokio::pin!(pumps, exit, deadline);
        let (mut drained, mut expired) = (false, false);
        while status.is_none() || !drained {
            // After a kill the end is told at once, though children may hold the pipes open.
            if status.is_some() && process.killed.get() {
                break;
            }
            tokio::select! {
                () = &mut pumps, if !drained => drained = true,
                ended = &mut exit, if status.is_none() => status = Some(ended),
                () = &mut deadline, if !expired => expired = true,
                () = process.cut.notified() => {}
            }
        }
        if !drained {
            for (output, source) in &ends.outputs {
                last_words(&app, &process, *output, source);
            }
        }
    }
    // First out of the registry, then reaped: from then on its number may mean another process.
    app.processes.remove(process.pid);
    let ended = end(&app, &ends, status.flatten());
    process.broadcast.finish(end_event_frame(&ended));
    if let (Some(groups), Some(leaf)) = (&app.groups, process.leaf.take()) {
        groups.release(leaf);
    }
}

async fn expire(process: &Process, deadline: Option<Instant>) {
    match deadline {
        None => std::future::pending().await,
        Some(at) => {
            tokio::time::sleep_until(at).await;
            let _ = process.signal(Signal::Kill, false);
        }
    }
}

async fn pump_all(app: &App, process: &Process, outputs: &[(Output, Rc<AsyncFd<OwnedFd>>)]) {
    match outputs {
        [(first, a), (second, b)] => {
            tokio::join!(pump(app, process, *first, a), pump(app, process, *second, b));
        }
        [(only, a)] => pump(app, process, *only, a).await,
        _ => {}
    }
}

/// Publishes everything from *source* until it ends.
async fn pump(app: &App, process: &Process, output: Output, source: &AsyncFd<OwnedFd>) {
    loop {
        process.broadcast.room().await;
        let Ok(mut ready) = source.readable().await else { return };
        // A terminal whose last user is gone says EIO.
        if let Ok(Ok(0) | Err(_)) = ready.try_io(|fd| read_once(app, process, output, fd.get_ref())) {
            return;
        }
    }
}

fn read_once(app: &App, process: &Process, output: Output, source: &OwnedFd) -> io::Result<usize> {
    let mut scratch = app.scratch.borrow_mut();
    let limit = if output == Output::Pty { TERMINAL_CHUNK_BYTES } else { CHUNK_BYTES };
    let count = rustix::io::read(source, &mut scratch[..limit])?;
    if count > 0 {
        process.broadcast.publish(data_frame(output, &scratch[..count]));
    }
    Ok(count)
}

/// What a killed process had written before it died.
fn last_words(app: &App, process: &Process, output: Output, source: &AsyncFd<OwnedFd>) {
    let mut total = 0;
    while total < LAST_WORDS_BYTES {
        match read_once(app, process, output, source.get_ref()) {
            Ok(count) if count > 0 => total += count,
            _ => return,
        }
    }
}

/// The exit status, with the process left unreaped so that its number stays taken.
async fn wait_exit(pidfd: &AsyncFd<OwnedFd>) -> Option<WaitIdStatus> {
    loop {
        let mut ready = pidfd.ready(Interest::READABLE).await.ok()?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), options) {
            Ok(Some(status)) => return Some(status),
            Ok(None) => ready.clear_ready(),
            Err(_) => return None,
        }
    }
}

/// Reaps the process and says how it ended.
fn end(app: &App, ends: &Ends, status: Option<WaitIdStatus>) -> Ended {
    let _ = waitid(WaitId::PidFd(ends.pidfd.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    let out_of_memory = app.groups.as_ref().is_some_and(|groups| groups.oom_kills() > ends.oom_kills_before);
    match status {
        Some(status) => ending::describe(&status, out_of_memory),
        // Somebody else reaped it: nothing is known but that it is gone.
        None => Ended {
            exit_code: -1,
            exited: false,
            status: "unknown".to_owned(),
            error: Some("the exit status of the process was lost".to_owned()),
        },
    }
}
