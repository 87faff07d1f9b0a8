//! Waking a thread out of a system call.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

/// Of no use to anybody else in our programs.
const SIGNAL: libc::c_int = libc::SIGUSR2;

extern "C" fn nothing(_: libc::c_int) {}

/// Lets threads of this process be interrupted instead of ending the process.
///
/// # Errors
/// Those of `sigaction`.
pub fn allow() -> io::Result<()> {
    // SAFETY: all members are numbers, sets or pointers, for which zero is a valid value. Without SA_RESTART
    // in the flags, calls return.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as libc::sighandler_t;
    // SAFETY: the kernel reads one sigaction, whose handler does nothing and so may run at any time.
    let done = unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes the system call that *thread* waits in, if any, fail with `EINTR`. [`allow`] comes first.
pub fn interrupt<T>(thread: &JoinHandle<T>) {
    // SAFETY: the handle has not been joined, so that the thread, ended or not, still has its identity.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_read_that_waits_is_interrupted() {
        allow().expect("a handler");
        let (mut reader, writer) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let thread = std::thread::spawn(move || reader.read(&mut [0]).map_err(|error| error.kind()));

        while !thread.is_finished() {
            interrupt(&thread);
            std::thread::yield_now();
        }

        assert_eq!(thread.join().expect("no panic"), Err(io::ErrorKind::Interrupted));
        drop(writer);
    }
}
