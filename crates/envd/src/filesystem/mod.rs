//! Files of the sandbox: looked at, listed, moved, removed and watched through `filesystem.Filesystem`.
//!
//! Every operation runs on a worker thread as the user of the call.

mod entry;
mod operations;
pub(crate) mod service;
mod tree;
mod watch;
mod watch_stream;
mod watcher;

pub(crate) use watch::Watchers;

use std::io;

use rustix::io::Errno;
use wire::{Code, RpcError};

/// The error of a file operation on *path*, by what the caller can do about it.
fn failed(path: &str, error: &io::Error) -> RpcError {
    let code = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT | Errno::NOTDIR) => Code::NotFound,
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Code::PermissionDenied,
        Some(Errno::EXIST) => Code::AlreadyExists,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Code::ResourceExhausted,
        Some(Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL | Errno::ISDIR) => Code::InvalidArgument,
        Some(Errno::NOTEMPTY | Errno::XDEV | Errno::BUSY | Errno::TXTBSY) => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    RpcError::new(code, format!("{path}: {error}"))
}
