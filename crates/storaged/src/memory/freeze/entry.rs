//! How a stopped thread is sent through the code, so that it comes back as it was.

use sys::copy_code::{Constants, Layout};
use sys::trace::Registers;

/// Segment of 64-bit user code.
const USER_CODE_64: u64 = 0x33;
/// What a system call that a signal interrupted has in `rax` while its thread is stopped: the kernel
/// starts it again, or makes it fail with `EINTR` if the signal has a handler.
const RESTARTS: [i64; 4] = [-512, -513, -514, RESTART_BLOCK];
const RESTART_BLOCK: i64 = -516;
const RESTART_SYSCALL: u64 = 219;
/// The result `EINTR`.
const INTERRUPTED: u64 = 4_u64.wrapping_neg();
/// Length of the instruction that enters the kernel.
const SYSCALL_BYTES: u64 = 2;

/// Where the thread is, by what the kernel will do when it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Where to send it, from the start of the code.
    pub(super) offset: u64,
    /// It was not in a system call, so it may be in a restartable sequence.
    pub(super) was_in_user_code: bool,
}

/// How to send a thread with *registers*, and the constants that bring it back. `None` if it does not run 64-bit code.
///
/// A thread that the kernel sends back into its system call keeps its registers: the kernel takes two off
/// the instruction pointer and loads the number, and that is what it comes to in the code, too.
pub(super) fn plan(registers: &Registers, layout: &Layout) -> Option<(Entry, Constants)> {
    let at = &registers.0;
    if at.cs != USER_CODE_64 {
        return None;
    }
    let in_syscall = signed(at.orig_rax) >= 0;
    let result = signed(at.rax);
    let restarts = in_syscall && RESTARTS.contains(&result);
    let (offset, again) = match result {
        RESTART_BLOCK if restarts => (layout.restart_entry, (RESTART_SYSCALL, at.rip - SYSCALL_BYTES)),
        _ if restarts => (layout.restart_entry, (at.orig_rax, at.rip - SYSCALL_BYTES)),
        _ => (0, (at.rax, at.rip)),
    };
    let constants = Constants {
        again,
        interrupted: (INTERRUPTED, at.rip),
        registers: [at.rdi, at.rsi, at.rdx, at.r10, at.r8, at.r11, at.r9, at.rcx],
        ..Constants::default()
    };
    Some((Entry { offset, was_in_user_code: !in_syscall }, constants))
}

fn signed(register: u64) -> i64 {
    i64::from_ne_bytes(register.to_ne_bytes())
}
