//! Waiting for signals instead of being interrupted by them.

use std::io;
use std::time::Duration;

/// The last signal that Linux has.
const LAST: libc::c_int = 64;

/// Lets no signal be ignored because whoever started this process ignored it. Call it before there are threads.
///
/// The C library's own signals are among them, which its `sigaction` refuses to touch: GNU make,
/// built on some releases of it, starts every command with those ignored. SIGPIPE is left as
/// the Rust runtime set it.
pub fn heed_all() {
    let default_action = [0_u64; 4]; // handler, flags, restorer, mask, as the kernel has them
    for signal in (1..=LAST).filter(|&signal| signal != libc::SIGPIPE) {
        // SAFETY: the kernel reads the action, which lives until the call returns, and is given no place to
        // write to. For SIGKILL and SIGSTOP it refuses, which is as good.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default_action.as_ptr(),
                std::ptr::null_mut::<u64>(),
                size_of::<u64>(),
            )
        };
    }
}

/// Holds back no signal, whatever the process that started this one did. For the calling thread.
pub fn unblock_all() {
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set, which is only read after that.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
}

/// A set of signals that are held back until they are waited for.
pub struct Blocked(libc::sigset_t);

impl Blocked {
    /// Holds back *signals* for the calling thread, and for threads and processes it starts later.
    ///
    /// # Errors
    /// Those of `sigprocmask`.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set, sigaddset changes an initialised one; after
        // that it may be read, also by sigprocmask, which is given no place to write to.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let set = set.assume_init();
            if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(set))
        }
    }

    /// The next of these signals, or `None` when none came for *timeout*.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<i32> {
        let limit = timeout.map(|t| libc::timespec {
            tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(t.subsec_nanos()),
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the set is initialised, no information is asked for, and the limit is null or lives until the call returns.
        let signal = unsafe { libc::sigtimedwait(&raw const self.0, std::ptr::null_mut(), limit) };
        (signal > 0).then_some(signal)
    }

    /// Lets these signals through again, for a program that is about to take over this process.
    pub fn unblock(self) {
        // SAFETY: the set is initialised; sigprocmask is given no place to write to.
        unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const self.0, std::ptr::null_mut()) };
    }
}
