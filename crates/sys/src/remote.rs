//! Bytes of another process's memory, many pieces in one system call.

use std::io;

/// What the kernel takes in one call (`IOV_MAX`).
pub const MOST_PIECES: usize = 1024;

/// Copies the address ranges *pieces* (start, one past the end) of process *pid* one after the other
/// to the start of *into*, and returns how many bytes that was: fewer than asked for where a
/// later page could not be read. Takes at most the first [`MOST_PIECES`].
///
/// # Errors
/// Those of `process_vm_readv`: `ESRCH` when there is no such process, `EFAULT` when the first
/// page is not there, `EPERM` when it is not ours to read.
pub fn read(pid: i32, pieces: &[(u64, u64)], into: &mut [u8]) -> io::Result<usize> {
    let pieces = &pieces[..pieces.len().min(MOST_PIECES)];
    let remote: Vec<libc::iovec> = pieces
        .iter()
        .map(|&(start, end)| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(usize::try_from(start).unwrap_or(usize::MAX)),
            iov_len: usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX),
        })
        .collect();
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: the kernel writes at most `iov_len` bytes to *into*, which is ours and of that length; the
    // remote addresses are only ever used inside the other process.
    let read =
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}
