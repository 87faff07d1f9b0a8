//! What has to be true before the Rust runtime starts.
//!
//! The runtime opens `/dev/null` for standard descriptors that are closed, and aborts if it
//! cannot. The first process of a machine may have neither: its console may need a driver that
//! is loaded later, and its `/dev` may be empty.

/// Called by the C library before `main`, as every entry of this section.
#[used]
// SAFETY: the section holds pointers to functions that the C library calls with three arguments, which
// this one ignores; it makes system calls only, so it needs nothing that is not initialised yet.
#[unsafe(link_section = ".init_array")]
static FILL_STANDARD_DESCRIPTORS: extern "C" fn() = fill_standard_descriptors;

extern "C" fn fill_standard_descriptors() {
    let name = c"/dev-null";
    // SAFETY: system calls on numbers and literals.
    unsafe {
        for fd in 0..3 {
            if libc::fcntl(fd, libc::F_GETFD) >= 0 {
                continue;
            }
            // The lowest free number is the one that is missing.
            if libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) < 0 && libc::getpid() == 1 {
                libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3));
                libc::open(name.as_ptr(), libc::O_RDWR);
                libc::unlink(name.as_ptr());
            }
        }
    }
}

/// Has to be called from `main`, or the linker leaves this module out.
pub fn link() {
    std::hint::black_box(&FILL_STANDARD_DESCRIPTORS);
}
