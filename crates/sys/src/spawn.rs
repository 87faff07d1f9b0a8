//! Starting a process as a user, in a session and a control group of its own.
//!
//! The child borrows the memory of its parent until it has become the program, and the
//! calling thread stands still meanwhile. That spares copying an address space, which
//! costs more than all the rest where the machine is emulated, and lets the child say
//! what went wrong by writing it down. Other threads may run and hold locks, so between
//! `clone3` and `execve` the child makes system calls and nothing else: no allocation,
//! no lock, no library call that could take one. All it needs is prepared by the parent.

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

/// A process that has become its program.
pub struct Child {
    pub pid: u32,
    pub pidfd: OwnedFd,
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

/// Why a child did not become the program.
#[derive(Debug)]
pub enum Failure {
    /// There is no child: too many processes, no memory, no such control group.
    NoChild(io::Error),
    /// There was one and it has ended; nothing of it is left.
    GaveUp { step: Step, error: io::Error },
}

/// Starts a process and returns when it has become its program.
///
/// Blocks its thread for as long as the file systems of the program and of the directory take.
///
/// # Errors
/// See [`Failure`].
pub fn spawn(plan: &Plan<'_>) -> Result<Child, Failure> {
    let argv = pointers(plan.arguments);
    let envp = pointers(plan.environment);
    let mut request = Request { plan, argv: &argv, envp: &envp, gave_up: None };
    let mut stack = vec![0_u8; STACK_BYTES];
    let mut pidfd: libc::c_int = -1;
    let mut flags = (libc::CLONE_PIDFD | libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    if plan.cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let arguments = CloneArguments {
        flags,
        pidfd: (&raw mut pidfd).addr() as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr().addr() as u64,
        // The top has to be aligned for the first call on it.
        stack_size: (STACK_BYTES - stack.as_ptr().addr() % 16) as u64,
        cgroup: plan.cgroup.map_or(0, |fd| u64::from(fd.as_raw_fd().unsigned_abs())),
        ..CloneArguments::default()
    };
    // SAFETY: the child runs on a stack of its own, which like the request lives until this returns, and by
    // CLONE_VFORK this returns only when the child no longer uses our memory. It calls only what is safe then.
    let result = unsafe { clone_and_call(&arguments, become_program, (&raw mut request).cast()) };
    // Signed to tell errors; a pid always fits.
    let Ok(pid) = u32::try_from(result) else {
        return Err(Failure::NoChild(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EAGAIN))));
    };
    // SAFETY: clone3 succeeded, so it stored a new descriptor that is ours alone.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: the child wrote to it through a pointer that the compiler does not see.
    let gave_up = unsafe { (&raw const request.gave_up).read_volatile() };
    match gave_up {
        None => Ok(Child { pid, pidfd }),
        Some((step, number)) => {
            reap(pid);
            Err(Failure::GaveUp { step, error: io::Error::from_raw_os_error(number) })
        }
    }
}

/// Enough for a handful of calls that keep next to nothing on the stack.
const STACK_BYTES: usize = 32 << 10;

/// What the child gets, and where it says why it gave up.
struct Request<'a> {
    plan: &'a Plan<'a>,
    argv: &'a [*const libc::c_char],
    envp: &'a [*const libc::c_char],
    gave_up: Option<(Step, i32)>,
}

/// `clone3`, after which the child calls *entry* with *argument* on the stack it was given.
///
/// # Safety
/// *entry* must not return, and must be sound to run in the child that *arguments* describe.
unsafe fn clone_and_call(
    arguments: &CloneArguments,
    entry: unsafe extern "C" fn(*mut libc::c_void) -> !,
    argument: *mut libc::c_void,
) -> i64 {
    let result;
    // SAFETY: in the parent this is a system call, with the registers it destroys named. The child comes out of it
    // with the same registers but a new stack, on which it calls *entry* as the calling convention wants it.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {argument}",
            "call {entry}",
            "ud2",
            "2:",
            argument = in(reg) argument,
            entry = in(reg) entry,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") std::ptr::from_ref(arguments),
            in("rsi") size_of::<CloneArguments>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

fn reap(pid: u32) {
    let pid = libc::pid_t::try_from(pid).unwrap_or(-1);
    // SAFETY: a null status is allowed; the child has ended or is about to.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
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

/// # Safety
/// Only as the entry of a child that borrows its parent's memory, with a pointer to a [`Request`].
unsafe extern "C" fn become_program(request: *mut libc::c_void) -> ! {
    // SAFETY: the parent stands still, so the request is ours alone. errno is that of the parent's thread, which
    // reads it no more, and _exit runs nothing of the program we are a part of.
    unsafe {
        let request = &mut *request.cast::<Request<'_>>();
        let step = prepare_and_exec(request.plan, request.argv, request.envp);
        (&raw mut request.gave_up).write_volatile(Some((step, *libc::__errno_location())));
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
    use std::os::fd::AsFd;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    fn run(program: &CStr, directory: &CStr) -> Result<Option<i32>, Failure> {
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
        })?;
        let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
        Ok(status.exit_status())
    }

    #[test]
    fn a_program_runs() {
        assert_eq!(run(c"/bin/sh", c"/").unwrap(), Some(7));
    }

    #[test]
    fn a_failure_names_its_step() {
        let Err(Failure::GaveUp { step, error }) = run(c"/no/such/program", c"/") else { panic!("it ran") };
        assert_eq!((step, error.raw_os_error()), (Step::Program, Some(libc::ENOENT)));
        let Err(Failure::GaveUp { step, error }) = run(c"/bin/sh", c"/no/such/directory") else { panic!("it ran") };
        assert_eq!((step, error.raw_os_error()), (Step::Directory, Some(libc::ENOENT)));
    }

    #[test]
    fn many_threads_start_programs_at_the_same_time() {
        let threads: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(|| (0..25).all(|_| run(c"/bin/sh", c"/").is_ok_and(|code| code == Some(7)))))
            .collect();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
    }
}
