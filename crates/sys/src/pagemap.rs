//! Finding pages of a process by their state (`PAGEMAP_SCAN`, Linux 6.7).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;

/// The page belongs to a file (or to shared memory), so it is not the process's own.
pub const FILE: u64 = 1 << 2;
pub const PRESENT: u64 = 1 << 3;
pub const SWAPPED: u64 = 1 << 4;

/// Pages next to each other in one state: addresses [start, end).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

#[repr(C)]
struct Argument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    most_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    reported: u64,
}

/// Finds pages in [start, end) that are not `FILE`, and `PRESENT` or `SWAPPED`: writes them to
/// *regions*, lowest first, and returns how many regions that is and where the walk ended.
///
/// The end is the kernel's word and may be too low (Linux 6.18, after more than 512 regions).
///
/// # Errors
/// Those of the ioctl; `ENOTTY`, `EINVAL` or `EOPNOTSUPP` where the kernel has none.
pub fn scan_private(pagemap: BorrowedFd<'_>, start: u64, end: u64, regions: &mut [Region]) -> io::Result<(usize, u64)> {
    let mut argument = Argument {
        size: size_of::<Argument>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        regions: regions.as_mut_ptr().expose_provenance() as u64,
        regions_count: regions.len() as u64,
        most_pages: 0,
        inverted: FILE,
        all_of: FILE,
        any_of: PRESENT | SWAPPED,
        // Always clear here, so that neighbours are reported as one region.
        reported: FILE,
    };
    // SAFETY: the layout is that of `struct pm_scan_arg`; the kernel fills in `walk_end` and at most
    // `regions_count` regions, which are ours.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
    let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
    Ok((found, argument.walk_end))
}
