//! How the C library's allocator behaves.

/// Keeps the allocator small: one arena for all threads, and freed memory goes back early.
///
/// Every page of the daemon is part of every snapshot of its sandbox.
pub fn use_little() {
    // SAFETY: mallopt takes two numbers; called before any thread is started.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 10);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}
