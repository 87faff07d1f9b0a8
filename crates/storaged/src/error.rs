//! Why an operation of the daemon failed, by what the caller should do next.

use std::fmt::Display;
use std::io;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The words of [`Error`] on the wire; the same as the control plane's where both have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request can never succeed as it stands.
    Invalid,
    NotFound,
    AlreadyExists,
    /// It exists, but in a state in which this cannot be done; or another daemon has the directory.
    Conflict,
    /// No descriptor, no memory, no device: later may work.
    Exhausted,
    /// The disk is full. A word of its own because a pause turns back on it.
    NoSpace,
    /// Bytes on disk or from a source are not what they should be.
    Corrupt,
    /// A process, a source or a kernel interface does not answer; later may work.
    Unavailable,
    /// This kernel or this format cannot.
    Unsupported,
    /// A fault of the daemon.
    Bug,
}

/// What is left of the thing that was being changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// As it was before the call.
    RolledBack,
    /// Past the point of return: it cannot be used any more, only removed.
    Lost,
}

#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub code: Code,
    pub left: Left,
    pub message: String,
    #[source]
    pub source: Option<io::Error>,
}

impl Error {
    /// An error that left everything as it was.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, left: Left::RolledBack, message: message.into(), source: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }

    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(Code::Corrupt, message)
    }

    /// What the host's file system says about *what*.
    pub fn io(what: impl Display, source: io::Error) -> Self {
        let message = format!("{what}: {source}");
        Self { code: code_of(&source), left: Left::RolledBack, message, source: Some(source) }
    }

    /// The same, past the point of return.
    #[must_use]
    pub fn lost(self) -> Self {
        Self { left: Left::Lost, ..self }
    }
}

fn code_of(error: &io::Error) -> Code {
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Code::NoSpace,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Code::Exhausted,
        Some(Errno::NOENT) => Code::NotFound,
        Some(Errno::EXIST) => Code::AlreadyExists,
        Some(Errno::OPNOTSUPP | Errno::NOSYS) => Code::Unsupported,
        Some(Errno::IO) => Code::Corrupt,
        Some(_) => Code::Unavailable,
        None => match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => Code::Corrupt,
            io::ErrorKind::InvalidInput => Code::Invalid,
            io::ErrorKind::NotFound => Code::NotFound,
            _ => Code::Unavailable,
        },
    }
}

/// What the host's file system said, with what was being done.
pub trait Context<T> {
    /// # Errors
    /// The same failure, as [`Error::io`] words it.
    fn during(self, what: impl Display) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn during(self, what: impl Display) -> Result<T> {
        self.map_err(|source| Error::io(what, source.into()))
    }
}
