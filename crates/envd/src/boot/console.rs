//! Standard input, output and error of the first process and of all after it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// `/dev/console` cannot be opened before a driver for it is there, which may come as a module.
const CONSOLES: [&str; 4] = ["/dev/console", "/dev/hvc0", "/dev/ttyS0", "/dev/null"];

/// Connects the standard descriptors to the console, or to nothing.
///
/// Non-blocking: a console that nobody reads must not stop the machine.
pub(super) fn open() {
    let flags = i32::try_from(OFlags::NONBLOCK.bits() | OFlags::NOCTTY.bits()).unwrap_or(0);
    let opened =
        CONSOLES.iter().find_map(|path| File::options().read(true).write(true).custom_flags(flags).open(path).ok());
    if let Some(console) = opened {
        let _ = dup2_stdin(&console);
        let _ = dup2_stdout(&console);
        let _ = dup2_stderr(&console);
        // With the standard descriptors closed the console itself became one of them.
        if std::os::fd::AsRawFd::as_raw_fd(&console) < 3 {
            std::mem::forget(console);
        }
    }
}
