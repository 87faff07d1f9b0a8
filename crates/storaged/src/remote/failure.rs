//! Why bytes of a source could not be had. None of these is ever answered with zeros, kept, or taken for another.

use std::io;

/// What the caller of a read can do about it differs, so they stay apart up to the end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The source answers, and says that there is no such thing.
    #[error("{0}: it is not there")]
    Absent(String),
    /// The source answers, and does not let us have it.
    #[error("{0}: not allowed")]
    Denied(String),
    /// No answer, or one that says to come again, up to the end of our patience.
    #[error("{0}")]
    Unreachable(String),
    /// The answer is not what was asked for, or the bytes are not what they should be.
    #[error("{0}")]
    Corrupt(String),
}

impl Failure {
    /// With what was being asked for in front.
    #[must_use]
    pub fn of(self, what: &str) -> Self {
        let said = |text: String| format!("{what}: {text}");
        match self {
            Self::Absent(text) => Self::Absent(said(text)),
            Self::Denied(text) => Self::Denied(said(text)),
            Self::Unreachable(text) => Self::Unreachable(said(text)),
            Self::Corrupt(text) => Self::Corrupt(said(text)),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        let kind = match failure {
            Failure::Absent(_) => io::ErrorKind::NotFound,
            Failure::Denied(_) => io::ErrorKind::PermissionDenied,
            Failure::Unreachable(_) => io::ErrorKind::TimedOut,
            Failure::Corrupt(_) => io::ErrorKind::InvalidData,
        };
        Self::new(kind, failure)
    }
}
