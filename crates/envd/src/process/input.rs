//! The input of a process: nothing, a pipe or a terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use sys::ready::AsyncFd;
use wire::process::Input as Bytes;
use wire::{Code, RpcError};

/// Where bytes for a process go.
pub(super) enum Input {
    Closed,
    Pipe(AsyncFd<OwnedFd>),
    Terminal(Rc<AsyncFd<OwnedFd>>),
}

impl Input {
    /// Writes all of *bytes*, for as long as the process takes to read them.
    ///
    /// # Errors
    /// `internal` when the input is closed or nobody reads it any more, `failed_precondition`
    /// when bytes for a terminal are sent to a pipe or the other way round.
    pub(super) async fn write(&self, bytes: &Bytes) -> Result<(), RpcError> {
        match (self, bytes) {
            (Self::Closed, _) => Err(RpcError::internal("the standard input of this process is closed")),
            (Self::Pipe(pipe), Bytes::Stdin(bytes)) => write_all(pipe, bytes).await,
            (Self::Terminal(terminal), Bytes::Pty(bytes)) => write_all(terminal, bytes).await,
            (Self::Pipe(_), Bytes::Pty(_)) => {
                Err(RpcError::new(Code::FailedPrecondition, "this process has no terminal: send stdin"))
            }
            (Self::Terminal(_), Bytes::Stdin(_)) => {
                Err(RpcError::new(Code::FailedPrecondition, "this process has a terminal: send pty input"))
            }
        }
    }

    /// Ends the input. Doing so again is fine.
    ///
    /// # Errors
    /// `failed_precondition` for a terminal, whose input ends by typing the end-of-file character.
    pub(super) fn close(&mut self) -> Result<(), RpcError> {
        if matches!(self, Self::Terminal(_)) {
            return Err(RpcError::new(Code::FailedPrecondition, "the input of a terminal cannot be closed"));
        }
        *self = Self::Closed;
        Ok(())
    }
}

async fn write_all(target: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> Result<(), RpcError> {
    while !bytes.is_empty() {
        let written = async {
            let mut ready = target.writable().await?;
            Ok(ready.try_io(|fd| rustix::io::write(fd, bytes).map_err(io::Error::from)))
        };
        match written.await {
            Ok(Ok(Ok(count))) => bytes = &bytes[count..],
            // Not ready after all.
            Ok(Err(_)) => {}
            Ok(Ok(Err(error))) | Err(error) => {
                return Err(RpcError::internal(format!("the process no longer reads its input: {error}")));
            }
        }
    }
    Ok(())
}
