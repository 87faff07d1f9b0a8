//! File operations, away from the event loop and as the user they are for.

use std::io;

use sys::credentials::{Credentials, impersonate};

/// Runs *action* on another thread with the file-system identity of *who*, so that the kernel decides what is allowed.
///
/// # Errors
/// When the identity cannot be taken or the thread is lost; *action* may then not have run.
pub(crate) async fn as_user<T: Send + 'static>(
    who: &Credentials,
    action: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let who = who.clone();
    tokio::task::spawn_blocking(move || impersonate(&who, action)).await.map_err(io::Error::other)?
}
