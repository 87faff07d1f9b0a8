//! Why an operation of the daemon failed, by what the caller should do next.

use serde::{Deserialize, Serialize};

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
    /// No space, no descriptor, no device: later may work.
    Exhausted,
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
    pub source: Option<std::io::Error>,
}
