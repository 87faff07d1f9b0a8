//! What guests see: disks and memory, made of layers and uppers, kept in records.

pub mod captured;
pub mod disk;
pub mod memory;
pub mod record;

use std::io;
use std::sync::Arc;

use rustix::io::Errno;

use crate::library::Library;
use crate::root::Root;
use crate::stack::Stacks;

/// What every image needs.
pub struct Parts {
    pub root: Arc<Root>,
    pub library: Arc<Library>,
    pub stacks: Stacks,
}

/// A range of a device, or the error that says it is none.
fn check(size_bytes: u64, offset: u64, length: u64) -> io::Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// A guest knows one word for bytes that are missing or wrong.
fn unreadable(what: &dyn std::fmt::Display, error: io::Error) -> io::Error {
    eprintln!("storaged: {what}: {error}");
    match Errno::from_io_error(&error) {
        Some(Errno::NOENT) | None => Errno::IO.into(),
        Some(_) => error,
    }
}
