//! Memory that direct I/O can use: aligned to pages.

use std::io;
use std::ops::{Deref, DerefMut};

/// Zeroed bytes that start at a page. Huge pages where the kernel gives them.
pub struct Buffer {
    start: std::ptr::NonNull<u8>,
    length: usize,
}

impl Buffer {
    /// # Errors
    /// `ENOMEM`; `EINVAL` for a length of zero.
    pub fn new(length: usize) -> io::Result<Self> {
        // SAFETY: asks for new memory at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: advice about the mapping just made, which nobody else knows. A refusal changes nothing.
        unsafe { libc::madvise(start, length, libc::MADV_HUGEPAGE) };
        std::ptr::NonNull::new(start.cast()).map(|start| Self { start, length }).ok_or_else(io::Error::last_os_error)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has this length, is initialised (zeros) and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and self is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and is not used any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

// SAFETY: it owns its memory as a `Box<[u8]>` would.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}
