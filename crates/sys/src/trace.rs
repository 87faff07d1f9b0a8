//! Tracing a thread of another process (x86-64).
//!
//! Whoever attaches is the tracer: the calling *thread*, and only it may make the other
//! calls. When that thread ends, the kernel detaches everything it traces.

use std::io;

pub const OPTION_FORK: i32 = libc::PTRACE_O_TRACEFORK;
pub const OPTION_VFORK: i32 = libc::PTRACE_O_TRACEVFORK;
pub const OPTION_CLONE: i32 = libc::PTRACE_O_TRACECLONE;
/// System calls stop with `SIGTRAP | 0x80`, which no signal does.
pub const OPTION_SYSCALL_GOOD: i32 = libc::PTRACE_O_TRACESYSGOOD;
/// Filters of system calls do not apply while the tracer lives. Needs `CAP_SYS_ADMIN`.
pub const OPTION_SUSPEND_SECCOMP: i32 = libc::PTRACE_O_SUSPEND_SECCOMP;

/// What a traced thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It made the process or thread *child*, which is traced as well.
    Child,
    /// It was interrupted, or has just been made and has not run.
    Interrupted,
    /// A signal that stops the whole process is in force.
    Group,
    /// It enters or leaves a system call.
    Syscall,
    /// This signal is about to be delivered.
    Signal(i32),
    Exited(i32),
    Killed(i32),
    Other(i32),
}

/// The registers of a stopped thread.
#[derive(Clone, Copy)]
pub struct Registers(pub libc::user_regs_struct);

/// How a stopped thread goes on.
#[derive(Clone, Copy)]
pub enum Until {
    Event,
    Syscall,
}

fn call(request: libc::c_uint, tid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: only for requests whose address and data are numbers, or addresses in the other process.
    if unsafe { libc::ptrace(request, tid, address, data) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Becomes the tracer of *tid*, which is not stopped by that.
///
/// # Errors
/// `EPERM` when it is traced already or not ours to trace, `ESRCH` when it is gone, `EINVAL` for options
/// that this kernel does not have.
pub fn seize(tid: i32, options: i32) -> io::Result<()> {
    call(libc::PTRACE_SEIZE, tid, 0, usize::try_from(options).unwrap_or(0))
}

/// Asks *tid* to stop; [`wait`] tells when it has.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn interrupt(tid: i32) -> io::Result<()> {
    call(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Lets stopped *tid* go on, with *signal* delivered unless 0.
///
/// # Errors
/// `ESRCH` when it is gone or not stopped.
pub fn resume(tid: i32, until: Until, signal: i32) -> io::Result<()> {
    let request = match until {
        Until::Event => libc::PTRACE_CONT,
        Until::Syscall => libc::PTRACE_SYSCALL,
    };
    call(request, tid, 0, usize::try_from(signal).unwrap_or(0))
}

/// Lets go of stopped *tid*, with *signal* delivered unless 0.
///
/// # Errors
/// `ESRCH` when it is gone or not stopped.
pub fn detach(tid: i32, signal: i32) -> io::Result<()> {
    call(libc::PTRACE_DETACH, tid, 0, usize::try_from(signal).unwrap_or(0))
}

/// Moves the instruction pointer of stopped *tid*: one word, all or nothing.
///
/// # Errors
/// `ESRCH` when it is gone or not stopped.
pub fn set_instruction(tid: i32, address: u64) -> io::Result<()> {
    let word = usize::try_from(address).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    call(libc::PTRACE_POKEUSER, tid, std::mem::offset_of!(libc::user_regs_struct, rip), word)
}

/// # Errors
/// `ESRCH` when *tid* is gone or not stopped.
pub fn registers(tid: i32) -> io::Result<Registers> {
    let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
    // SAFETY: the kernel fills in the structure, which is ours; all zeros are a valid value of it.
    unsafe {
        if libc::ptrace(libc::PTRACE_GETREGS, tid, 0, registers.as_mut_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Registers(registers.assume_init()))
    }
}

/// The id that came with a [`Stop::Child`].
///
/// # Errors
/// `ESRCH` when *tid* is gone or not stopped.
pub fn event_child(tid: i32) -> io::Result<i32> {
    let mut message: libc::c_ulong = 0;
    // SAFETY: the kernel writes one word, which is ours.
    if unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, tid, 0, &raw mut message) } < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(message).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))
}

/// Where stopped *tid* keeps its record of restartable sequences, 0 if nowhere or the kernel does not say (before 5.13).
pub fn rseq_address(tid: i32) -> u64 {
    const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    let mut configuration = [0_u64; 3];
    // SAFETY: the kernel writes at most as many bytes as we say, to an array that is ours.
    let got =
        unsafe { libc::ptrace(GET_RSEQ_CONFIGURATION, tid, size_of_val(&configuration), configuration.as_mut_ptr()) };
    if got < 0 { 0 } else { configuration[0] }
}

/// What *tid* did, or `None` while there is nothing. Collects it if it has ended.
///
/// # Errors
/// `ECHILD` when it is not traced by this thread (any more).
pub fn wait_nowait(tid: i32) -> io::Result<Option<Stop>> {
    let mut status = 0;
    // SAFETY: the kernel writes one number, which is ours.
    match unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG | libc::__WNOTHREAD) } {
        0 => Ok(None),
        found if found == tid => Ok(Some(decode(status))),
        _ => Err(io::Error::last_os_error()),
    }
}

fn decode(status: i32) -> Stop {
    if libc::WIFEXITED(status) {
        return Stop::Exited(libc::WEXITSTATUS(status));
    }
    if libc::WIFSIGNALED(status) {
        return Stop::Killed(libc::WTERMSIG(status));
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        0 if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
        0 => Stop::Signal(signal),
        libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => Stop::Child,
        libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupted,
        libc::PTRACE_EVENT_STOP => Stop::Group,
        event => Stop::Other(event),
    }
}
