//! Errors about a process, by what the caller should do next.

use std::io;

use rustix::io::Errno;

use crate::error::{Code, Error, Left};

/// What the kernel said about a process. Gone is `unavailable`, closed to us is `unsupported`.
pub(super) fn about_process(pid: i32, source: io::Error) -> Error {
    let (code, message) = match Errno::from_io_error(&source) {
        Some(Errno::SRCH | Errno::NOENT) => (Code::Unavailable, format!("there is no process {pid}")),
        Some(Errno::PERM | Errno::ACCESS) => {
            (Code::Unsupported, format!("the memory of process {pid} is closed to us: CAP_SYS_PTRACE is missing"))
        }
        Some(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
            (Code::Exhausted, format!("memory of process {pid}: {source}"))
        }
        _ => (Code::Unavailable, format!("memory of process {pid}: {source}")),
    };
    Error { code, left: Left::RolledBack, message, source: Some(source) }
}

/// What the kernel said about a file that is being written. A full disk is `no_space`.
pub(super) fn about_output(source: io::Error) -> Error {
    let code = match Errno::from_io_error(&source) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Code::NoSpace,
        Some(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => Code::Exhausted,
        _ => Code::Unavailable,
    };
    Error { code, left: Left::RolledBack, message: format!("cannot write the layer: {source}"), source: Some(source) }
}
