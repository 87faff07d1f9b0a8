//! From a `StartRequest` to a running process.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{InputModes, OptionalActions, tcgetattr, tcsetattr, tcsetwinsize};
use sys::ready::{AsyncFd, Interest, watch};
use sys::spawn::{Child, Failure, Plan, Step, spawn};
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use wire::process::{Output, ProcessConfig, Pty, Size, StartRequest};
use wire::{Code, RpcError, path};

use super::broadcast::{Broadcast, Subscription};
use super::input::Input;
use super::running::{Ends, Process, supervise, window_size};
use crate::accounts::User;
use crate::app::App;
use crate::cgroup::{Groups, Leaf};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Open files a process may have before it asks for more.
const OPEN_FILES: u64 = 65_536;

/// Starts the process and gives a subscription that misses nothing of it.
///
/// Waits while the workload is frozen. Once it returns, the process lives on whatever the caller does.
///
/// # Errors
/// `invalid_argument` when the program or directory cannot be used, `resource_exhausted` when
/// the kernel makes no more processes.
pub(super) async fn start(
    app: Rc<App>,
    user: User,
    request: StartRequest,
    deadline: Option<Instant>,
) -> Result<(Rc<Process>, Subscription), RpcError> {
    let prepared = Prepared::new(&app, &user, &request.process)?;
    if let Some(groups) = &app.groups {
        groups.wait_thawed().await;
    }
    let files = match request.pty {
        Some(pty) => Files::terminal(pty, &user)?,
        None => Files::pipes(request.stdin.unwrap_or(true))?,
    };
    let oom_kills_before = app.groups.as_ref().map_or(0, Groups::oom_kills);
    let leaf = app.groups.as_ref().map(Groups::acquire).transpose().map_err(|e| no_more(&e))?;
    let Files { child, input, terminal, outputs } = files;
    let job = Job {
        prepared,
        user,
        child,
        terminal: terminal.is_some(),
        leaf,
        proc: app.proc.clone(),
        max_open_files: app.max_open_files,
    };
    // On another thread, because a file system may take its time to give a program.
    let (job, spawned) =
        tokio::task::spawn_blocking(move || job.run()).await.map_err(|e| RpcError::internal(e.to_string()))?;
    let watched = spawned.map_err(|failure| refusal(&failure, &request.process, &job.prepared)).and_then(|child| {
        let pid = child.pid;
        let pidfd = watch(child.pidfd, Interest::READABLE).map_err(|e| abandon(pid, &e))?;
        Ok((pid, pidfd))
    });
    let (pid, pidfd) = match watched {
        Ok(started) => started,
        Err(error) => {
            if let (Some(groups), Some(leaf)) = (&app.groups, job.leaf) {
                groups.release(leaf);
            }
            return Err(error);
        }
    };
    let leaf = job.leaf;
    let process = Rc::new(Process {
        pid,
        tag: request.tag,
        config: request.process,
        broadcast: Broadcast::new(app.processes.budget.clone()),
        input: Mutex::new(input),
        terminal,
        leaf: RefCell::new(leaf),
        killed: Cell::new(false),
        cut: Notify::new(),
    });
    let subscription = process.broadcast.subscribe();
    app.processes.add(process.clone());
    let ends = Ends { pidfd, outputs, deadline, oom_kills_before };
    tokio::task::spawn_local(supervise(app.clone(), process.clone(), ends));
    Ok((process, subscription))
}

/// Everything that starting takes, to be moved to another thread and back.
struct Job {
    prepared: Prepared,
    user: User,
    /// Dropped as soon as the process has its copies; ours would keep the pipes open after it is gone.
    child: [Arc<OwnedFd>; 3],
    terminal: bool,
    leaf: Option<Leaf>,
    proc: Option<Arc<OwnedFd>>,
    max_open_files: u64,
}

/// What is left of a job when it is done.
struct Done {
    prepared: Prepared,
    leaf: Option<Leaf>,
}

impl Job {
    fn run(self) -> (Done, Result<Child, Failure>) {
        let spawned = spawn(&Plan {
            programs: &self.prepared.programs,
            arguments: &self.prepared.arguments,
            environment: &self.prepared.environment,
            directory: &self.prepared.directory,
            directory_is_optional: self.prepared.directory_is_optional,
            credentials: &self.user.credentials,
            stdin: self.child[0].as_fd(),
            stdout: self.child[1].as_fd(),
            stderr: self.child[2].as_fd(),
            terminal: self.terminal,
            cgroup: self.leaf.as_ref().map(Leaf::directory),
            proc: self.proc.as_ref().map(AsFd::as_fd),
            open_files: (OPEN_FILES.min(self.max_open_files), self.max_open_files),
        });
        (Done { prepared: self.prepared, leaf: self.leaf }, spawned)
    }
}

/// The strings of the plan, which must live as long as it.
struct Prepared {
    programs: Vec<CString>,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    directory: CString,
    directory_is_optional: bool,
}

impl Prepared {
    fn new(app: &App, user: &User, config: &ProcessConfig) -> Result<Self, RpcError> {
        if config.cmd.is_empty() {
            return Err(RpcError::invalid("no command is given"));
        }
        let settings = app.settings();
        let environment = environment(user, settings.environment(), &config.envs);
        let search = environment.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let programs = candidates(&config.cmd, search);
        let requested = config.cwd.as_deref().filter(|cwd| !cwd.is_empty());
        let directory = path::resolve(requested.unwrap_or(""), &user.home, settings.default_workdir.as_deref());
        let pairs = environment.iter().map(|(name, value)| format!("{name}={value}"));
        Ok(Self {
            programs: programs.into_iter().map(c_string).collect::<Result<_, _>>()?,
            arguments: std::iter::once(&config.cmd)
                .chain(&config.args)
                .cloned()
                .map(c_string)
                .collect::<Result<_, _>>()?,
            environment: pairs.map(c_string).collect::<Result<_, _>>()?,
            directory: c_string(directory)?,
            directory_is_optional: requested.is_none(),
        })
    }
}

fn environment(
    user: &User,
    global: BTreeMap<String, String>,
    own: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let basis = [("PATH", DEFAULT_PATH), ("HOME", &user.home), ("USER", &user.name), ("LOGNAME", &user.name)];
    let mut all: BTreeMap<String, String> = basis.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    all.extend(global);
    all.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
    // Such a name would end up as part of another variable.
    all.retain(|name, _| !name.is_empty() && !name.contains('='));
    all
}

fn candidates(command: &str, search: &str) -> Vec<String> {
    if command.contains('/') {
        return vec![command.to_owned()];
    }
    search
        .split(':')
        .filter(|directory| directory.starts_with('/'))
        .map(|directory| format!("{directory}/{command}"))
        .collect()
}

fn c_string(text: String) -> Result<CString, RpcError> {
    CString::new(text).map_err(|_| RpcError::invalid("commands, arguments, variables and paths cannot contain NUL"))
}

/// Both sides of the standard streams.
struct Files {
    child: [Arc<OwnedFd>; 3],
    input: Input,
    terminal: Option<Rc<AsyncFd<OwnedFd>>>,
    outputs: Vec<(Output, Rc<AsyncFd<OwnedFd>>)>,
}

impl Files {
    fn pipes(with_input: bool) -> Result<Self, RpcError> {
        let attempt = || -> io::Result<Self> {
            let (stdin, input) = if with_input {
                let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
                set_nonblocking(&write)?;
                (read, Input::Pipe(watch(write, Interest::WRITABLE)?))
            } else {
                (OwnedFd::from(File::open("/dev/null")?), Input::Closed)
            };
            let (out_read, out_write) = pipe_with(PipeFlags::CLOEXEC)?;
            let (err_read, err_write) = pipe_with(PipeFlags::CLOEXEC)?;
            let outputs = vec![(Output::Stdout, readable(out_read)?), (Output::Stderr, readable(err_read)?)];
            Ok(Self { child: [stdin, out_write, err_write].map(Arc::new), input, terminal: None, outputs })
        };
        attempt().map_err(|e| no_more(&e))
    }

    fn terminal(pty: Pty, user: &User) -> Result<Self, RpcError> {
        let size = window_size(pty.size.unwrap_or(Size { cols: 80, rows: 24 }))?;
        let attempt = || -> io::Result<Self> {
            let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
            unlockpt(&master)?;
            tcsetwinsize(&master, size)?;
            let slave =
                Arc::new(ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?);
            // Programs that open their terminal by name must be allowed to.
            let owner = Some(rustix::fs::Uid::from_raw(user.credentials.uid));
            rustix::fs::fchown(&*slave, owner, None)?;
            let mut modes = tcgetattr(&*slave)?;
            modes.input_modes |= InputModes::IUTF8;
            tcsetattr(&*slave, OptionalActions::Now, &modes)?;
            set_nonblocking(&master)?;
            let master = Rc::new(watch(master, Interest::READABLE | Interest::WRITABLE)?);
            Ok(Self {
                child: [slave.clone(), slave.clone(), slave],
                input: Input::Terminal(master.clone()),
                terminal: Some(master.clone()),
                outputs: vec![(Output::Pty, master)],
            })
        };
        attempt().map_err(|e| no_more(&e))
    }
}

fn readable(fd: OwnedFd) -> io::Result<Rc<AsyncFd<OwnedFd>>> {
    set_nonblocking(&fd)?;
    Ok(Rc::new(watch(fd, Interest::READABLE)?))
}

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?)
}

/// Ends a process that runs but cannot be watched.
fn abandon(pid: u32, error: &io::Error) -> RpcError {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
        tokio::task::spawn_blocking(move || waitpid(Some(pid), WaitOptions::empty()));
    }
    no_more(error)
}

fn no_more(error: &io::Error) -> RpcError {
    RpcError::new(Code::ResourceExhausted, format!("no process can be started: {error}"))
}

fn refusal(failure: &Failure, config: &ProcessConfig, prepared: &Prepared) -> RpcError {
    match failure {
        Failure::NoChild(error) => no_more(error),
        Failure::GaveUp { step: Step::Program, error } => {
            RpcError::invalid(format!("cannot run {}: {error}", config.cmd))
        }
        Failure::GaveUp { step: Step::Directory, error } => {
            RpcError::invalid(format!("cannot start in {}: {error}", prepared.directory.to_string_lossy()))
        }
        Failure::GaveUp { step, error } => {
            RpcError::internal(format!("the process could not be set up ({step:?}): {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use sys::credentials::Credentials;

    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            home: "/home/user".into(),
            credentials: Credentials { uid: 1, gid: 1, groups: vec![] },
        }
    }

    #[test]
    fn later_variables_win() {
        let global = BTreeMap::from([("A".into(), "global".into()), ("HOME".into(), "/other".into())]);
        let own = BTreeMap::from([("A".into(), "own".into()), ("B=C".into(), "x".into()), (String::new(), "x".into())]);
        let all = environment(&user(), global, &own);
        assert_eq!((all["A"].as_str(), all["HOME"].as_str(), all["LOGNAME"].as_str()), ("own", "/other", "user"));
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn a_name_is_searched_for_and_a_path_is_not() {
        assert_eq!(candidates("sh", "/a:/b::rel"), ["/a/sh", "/b/sh"]);
        assert_eq!(candidates("./sh", "/a"), ["./sh"]);
    }
}
