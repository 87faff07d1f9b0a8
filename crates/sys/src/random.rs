//! The kernel's random number generator.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// More than this adds nothing; it bounds the buffer handed to the kernel.
const MAX_SEED_BYTES: usize = 512;

#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    size_bytes: libc::c_int,
    bytes: [u8; MAX_SEED_BYTES],
}

/// Mixes *seed* into the generator, credits it, and makes all later output depend on it at once.
///
/// # Errors
/// When `/dev/random` cannot be opened or the kernel refuses (only root may credit entropy).
pub fn reseed(seed: &[u8]) -> io::Result<()> {
    let device = File::options().read(true).write(true).open("/dev/random")?;
    let seed = &seed[..seed.len().min(MAX_SEED_BYTES)];
    let mut pool = PoolInfo { entropy_bits: 0, size_bytes: 0, bytes: [0; MAX_SEED_BYTES] };
    pool.bytes[..seed.len()].copy_from_slice(seed);
    pool.size_bytes = libc::c_int::try_from(seed.len()).unwrap_or(0);
    pool.entropy_bits = pool.size_bytes * 8;
    // SAFETY: the layout is that of `struct rand_pool_info`, and size_bytes is at most the buffer's length.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const pool) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
