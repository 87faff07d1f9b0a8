//! What has to be known of a process before it is frozen.

use sys::copy_code::MOST_RANGES;

use crate::error::{Code, Error};
use crate::memory::maps::{self, Area};
use crate::memory::process::Process;

/// From its status file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status {
    /// A filter decides which system calls it may make.
    pub(super) is_filtered: bool,
    /// Anonymous memory, present and swapped: the most that copies can come to cost.
    pub(super) anonymous_bytes: u64,
}

pub(super) fn read_status(process: &Process) -> Result<Status, Error> {
    let text = process.read_proc("status")?;
    let text = String::from_utf8_lossy(&text);
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.split_ascii_whitespace().next()?.parse::<u64>().ok())
    };
    let kib = |name| field(name).unwrap_or(0).saturating_mul(1024);
    Ok(Status {
        // A kernel without filters has no such line.
        is_filtered: field("Seccomp").unwrap_or(0) != 0,
        anonymous_bytes: kib("RssAnon").saturating_add(kib("VmSwap")),
    })
}

/// The ranges (start, length) of *areas* that the process keeps out of its forks.
pub(super) fn find_unforked(process: &Process, areas: &[Area]) -> Result<[(u64, u64); MOST_RANGES], Error> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (start, end) in unforked(&process.read_proc("smaps")?)? {
        if !areas.iter().any(|area| area.start < end && start < area.end) {
            continue;
        }
        match ranges.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += end - start,
            _ => ranges.push((start, end - start)),
        }
    }
    let mut found = [(0, 0); MOST_RANGES];
    if ranges.len() > found.len() {
        return Err(Error::new(Code::Unsupported, "guest memory is in too many pieces to be frozen"));
    }
    found[..ranges.len()].copy_from_slice(&ranges);
    Ok(found)
}

/// The mappings in *smaps* that are not copied to a child (`dc`), as (start, end).
fn unforked(smaps: &[u8]) -> Result<Vec<(u64, u64)>, Error> {
    let mut found = Vec::new();
    let mut heading: &[u8] = b"";
    for line in smaps.split(|&byte| byte == b'\n') {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            if flags.split(|&byte| byte == b' ').any(|flag| flag == b"dc") {
                found.extend(maps::parse(heading)?.iter().map(|vma| (vma.start, vma.end)));
            }
        } else if is_heading(line) {
            heading = line;
        }
    }
    Ok(found)
}

/// A heading starts with an address range; all other lines with a capital letter and a name that ends in a colon.
fn is_heading(line: &[u8]) -> bool {
    let first = line.split(|&byte| byte == b' ').next().unwrap_or_default();
    first.contains(&b'-') && first.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_are_kept_out_of_forks_are_told_apart() {
        let smaps = b"1000-2000 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr dc sd \n\
            a000-b000 rw-p 00000000 08:01 7   /k\nAnonHugePages: 0 kB\nVmFlags: rd wr dd \n\
            c000-d000 rw-p 00000000 08:01 7   /k dc\nVmFlags: rd dc\n";

        assert_eq!(unforked(smaps).unwrap(), [(0x1000, 0x2000), (0xc000, 0xd000)]);
    }
}
