//! Starting a process as a user, in a session and a control group of its own.
//!
//! The child is a copy of one thread of a process that may have others, so between
//! `clone3` and `execve` it makes system calls and nothing else: no allocation, no lock,
//! no library call that could take one. All it needs is prepared by the parent.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::credentials::Credentials;

/// Everything about a process that is to be started.
pub struct Plan<'a> {
    /// Paths to try one after the other, as a search through `PATH` would.
    pub programs: &'a [CString],
    pub arguments: &'a [CString],
    pub environment: &'a [CString],
    pub directory: &'a CStr,
    /// Start in `/` when *directory* cannot be entered, instead of failing.
    pub directory_is_optional: bool,
    pub credentials: &'a Credentials,
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    /// Make standard input the controlling terminal.
    pub terminal: bool,
    /// Directory of the control group to start in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Directory of a mounted proc; if given, the child undoes the daemon's protection from the OOM killer.
    pub proc: Option<BorrowedFd<'a>>,
    /// Soft and hard limit of open files.
    pub open_files: (u64, u64),
}

/// A started child, not yet known to have become the program.
pub struct Child {
    pub pid: u32,
    pub pidfd: OwnedFd,
    /// Ends empty when the program runs; has a [`Failure`] in it when it does not. Non-blocking.
    pub report: OwnedFd,
}

/// What a child was doing when it gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Session,
    Descriptors,
    Terminal,
    Protection,
    Limits,
    Identity,
    Directory,
    Program,
}

const STEPS: [Step; 8] = [
    Step::Session,
    Step::Descriptors,
    Step::Terminal,
    Step::Protection,
    Step::Limits,
    Step::Identity,
    Step::Directory,
    Step::Program,
];

/// Length of a report.
pub const REPORT_BYTES: usize = 8;

/// Why a child did not become the program.
#[derive(Debug)]
pub struct Failure {
    pub step: Step,
    pub error: io::Error,
}

impl Failure {
    /// Reads what a child wrote to its report; `None` when it wrote nothing.
    pub fn from_report(bytes: &[u8]) -> Option<Self> {
        let step = *bytes.first()?;
        let number: [u8; 4] = bytes.get(4..REPORT_BYTES)?.try_into().ok()?;
        let step = STEPS.get(usize::from(step)).copied().unwrap_or(Step::Program);
        Some(Self { step, error: io::Error::from_raw_os_error(i32::from_ne_bytes(number)) })
    }
}

/// Starts the child and returns at once; [`Child::report`] says how it went.
///
/// # Errors
/// When no process can be made: too many of them, no memory, no such control group.
pub fn spawn(plan: &Plan<'_>) -> io::Result<Child> {
    let (report_read, report_write) = pipe()?;
    let argv = pointers(plan.arguments);
    let envp = pointers(plan.environment);
    let mut pidfd: libc::c_int = -1;
    let mut flags = libc::CLONE_PIDFD as u64;
    if plan.cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let arguments = CloneArguments {
        flags,
        pidfd: (&raw mut pidfd).addr() as u64,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: plan.cgroup.map_or(0, |fd| u64::from(fd.as_raw_fd().unsigned_abs())),
        ..CloneArguments::default()
    };
    // SAFETY: without CLONE_VM this is a fork: the child has its own copy of everything,
    // and the only thing the kernel writes for us is the pidfd, which is alive here.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>()) };
    if pid == 0 {
        // SAFETY: we are the child of that clone; argv and envp are null-terminated arrays of the plan's strings.
        unsafe { become_program(plan, &argv, &envp, report_write.as_raw_fd()) }
    }
    let pid = u32::try_from(pid).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: clone3 succeeded, so it stored a new descriptor that is ours alone.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid, pidfd, report: report_read })
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `struct clone_args` of the kernel, up to and with the control group.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors into the array.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both were just made and are known to nobody else.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// # Safety
/// Only in a child that shares no memory with its parent; *argv* and *envp* must be null-terminated.
unsafe fn become_program(
    plan: &Plan<'_>,
    argv: &[*const libc::c_char],
    envp: &[*const libc::c_char],
    report: RawFd,
) -> ! {
    // SAFETY: as promised by the caller.
    let step = unsafe { prepare_and_exec(plan, argv, envp) };
    // SAFETY: errno is a location of this thread, the report is eight bytes on the stack, and _exit runs no destructors.
    unsafe {
        let number = (*libc::__errno_location()).to_ne_bytes();
        let bytes = [step as u8, 0, 0, 0, number[0], number[1], number[2], number[3]];
        libc::write(report, bytes.as_ptr().cast(), bytes.len());
        libc::_exit(127)
    }
}

/// Returns the step that failed, with the reason in `errno`; on success it does not return.
///
/// # Safety
/// As for [`become_program`].
unsafe fn prepare_and_exec(plan: &Plan<'_>, argv: &[*const libc::c_char], envp: &[*const libc::c_char]) -> Step {
    // SAFETY: plain system calls on numbers and on memory of the plan, which lives in this copy too.
    unsafe {
        if libc::setsid() < 0 {
            return Step::Session;
        }
        for (from, to) in [(plan.stdin, 0), (plan.stdout, 1), (plan.stderr, 2)] {
            if libc::dup2(from.as_raw_fd(), to) < 0 {
                return Step::Descriptors;
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 {
            return Step::Terminal;
        }
        if let Some(proc) = plan.proc {
            if !reset_oom_score(proc.as_raw_fd()) {
                return Step::Protection;
            }
            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
        }
        let limit = libc::rlimit64 { rlim_cur: plan.open_files.0, rlim_max: plan.open_files.1 };
        if libc::setrlimit64(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
            return Step::Limits;
        }
        if !take_identity(plan.credentials) {
            return Step::Identity;
        }
        if libc::chdir(plan.directory.as_ptr()) != 0 && !(plan.directory_is_optional && libc::chdir(c"/".as_ptr()) == 0)
        {
            return Step::Directory;
        }
        libc::umask(0o022);
        forget_signals();
        // Every descriptor of ours is close-on-exec already; this makes a mistake harmless.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC);
        let mut worst = libc::ENOENT;
        for program in plan.programs {
            libc::execve(program.as_ptr(), argv.as_ptr(), envp.as_ptr());
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => worst = libc::EACCES,
                other => {
                    worst = other;
                    break;
                }
            }
        }
        *libc::__errno_location() = worst;
    }
    Step::Program
}

const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;

/// # Safety
/// As for [`become_program`].
unsafe fn reset_oom_score(proc: RawFd) -> bool {
    // SAFETY: system calls on literals.
    unsafe {
        let file = libc::openat(proc, c"self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        file >= 0 && libc::write(file, c"0".as_ptr().cast(), 1) == 1 && libc::close(file) == 0
    }
}

/// The raw calls: those of the C library would take locks to tell the other threads, of which the child has none.
///
/// # Safety
/// As for [`become_program`].
unsafe fn take_identity(who: &Credentials) -> bool {
    // SAFETY: system calls on numbers and on one slice that is only read.
    unsafe {
        if libc::geteuid() != 0 {
            return true;
        }
        libc::syscall(libc::SYS_setgroups, who.groups.len(), who.groups.as_ptr()) == 0
            && libc::syscall(libc::SYS_setresgid, who.gid, who.gid, who.gid) == 0
            && libc::syscall(libc::SYS_setresuid, who.uid, who.uid, who.uid) == 0
    }
}

/// A program starts with no signal blocked, and with SIGPIPE, which Rust ignores, as it was.
///
/// # Safety
/// As for [`become_program`].
unsafe fn forget_signals() {
    // SAFETY: both calls only read a set that was just initialised on the stack.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    fn run(program: &CStr, directory: &CStr) -> (Option<Failure>, Option<i32>) {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        // SAFETY: take no arguments and cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let child = spawn(&Plan {
            programs: &[CString::from(program)],
            arguments: &[CString::from(program), c"-c".into(), c"exit 7".into()],
            environment: &[],
            directory,
            directory_is_optional: false,
            credentials: &Credentials { uid, gid, groups: vec![] },
            stdin: null.as_fd(),
            stdout: null.as_fd(),
            stderr: null.as_fd(),
            terminal: false,
            cgroup: None,
            proc: None,
            open_files: (256, 256),
        })
        .unwrap();
        poll(&mut [PollFd::new(&child.report, PollFlags::IN)], None).unwrap();
        let mut report = Vec::new();
        let _ = File::from(child.report).read_to_end(&mut report);
        let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
        (Failure::from_report(&report), status.exit_status())
    }

    #[test]
    fn a_program_that_runs_reports_nothing() {
        let (failure, status) = run(c"/bin/sh", c"/");
        assert!(failure.is_none());
        assert_eq!(status, Some(7));
    }

    #[test]
    fn a_failure_names_its_step() {
        let (failure, _) = run(c"/no/such/program", c"/");
        let failure = failure.unwrap();
        assert_eq!((failure.step, failure.error.raw_os_error()), (Step::Program, Some(libc::ENOENT)));
        let (failure, _) = run(c"/bin/sh", c"/no/such/directory");
        assert_eq!(failure.unwrap().step, Step::Directory);
    }
}
