//! Where in another process a few hundred bytes of code can lie that nothing else uses.
//!
//! Executable mappings end on a page boundary, what is in them rarely does: the rest is
//! zeros. The vDSO is in every process, static ones included, and is looked at first. The code
//! stays there: a thread that a signal handler holds up may still have to go through it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use sys::copy_code::{MAGIC, MAGIC_OFFSET};

use super::super::failure::about_process;
use crate::error::{Code, Error};
use crate::memory::maps::{self, Vma};
use crate::memory::process::Process;

/// Zeros at the end of what is in use may belong to it.
const GUARD_BYTES: usize = 64;
const ALIGNMENT: usize = 16;
const TAIL_BYTES: u64 = 4096;
/// More mappings than a program has of its own and its libraries.
const MOST_CANDIDATES: usize = 64;

/// Addresses [start, start + length) for the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) start: u64,
    pub(super) length: u64,
    /// Code of an earlier freeze is there.
    pub(super) was_used: bool,
}

impl Place {
    pub(super) fn holds(&self, address: u64) -> bool {
        (self.start..self.start + self.length).contains(&address)
    }
}

/// The memory of a process as a file, written past the protection of its mappings.
pub(super) fn open_memory(process: &Process) -> Result<File, Error> {
    let opened = File::options().read(true).write(true).open(format!("/proc/{}/mem", process.pid()));
    opened.map_err(|source| about_process(process.pid(), source))
}

pub(super) fn find(process: &Process, memory: &File, length: u64) -> Result<Place, Error> {
    let vmas = maps::parse(&process.read_proc("maps")?)?;
    let is_vdso = |vma: &&Vma| vma.path == b"[vdso]";
    let is_text = |vma: &&Vma| vma.executable && !vma.shared && vma.inode != 0;
    let candidates = vmas.iter().filter(is_vdso).chain(vmas.iter().filter(is_text));
    for vma in candidates.take(MOST_CANDIDATES) {
        let start = vma.end.saturating_sub(TAIL_BYTES).max(vma.start);
        let mut tail = vec![0; usize::try_from(vma.end - start).unwrap_or(0)];
        if memory.read_exact_at(&mut tail, start).is_err() {
            continue; // past the end of its file
        }
        if let Some((at, was_used)) = find_in(&tail, usize::try_from(length).unwrap_or(usize::MAX)) {
            return Ok(Place { start: start + at as u64, length, was_used });
        }
    }
    Err(Error::new(Code::Unsupported, format!("process {} has no room for the code that freezes it", process.pid())))
}

/// Where in *tail* there is room, and whether it was used before.
fn find_in(tail: &[u8], length: usize) -> Option<(usize, bool)> {
    let magic = MAGIC.to_le_bytes();
    if let Some(at) = (MAGIC_OFFSET..tail.len().saturating_sub(magic.len()))
        .step_by(8)
        .find(|&at| tail[at..at + magic.len()] == magic)
        .map(|at| at - MAGIC_OFFSET)
    {
        return (at + length <= tail.len()).then_some((at, true));
    }
    let used = tail.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1 + GUARD_BYTES);
    let at = used.next_multiple_of(ALIGNMENT);
    (at.checked_add(length)? <= tail.len()).then_some((at, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_what_is_zero_at_the_end_and_the_room_used_before() {
        let mut tail = [0; 1024];
        tail[100] = 1;
        assert_eq!(find_in(&tail, 512), Some((176, false)));
        assert_eq!(find_in(&tail, 900), None);

        tail[192..200].copy_from_slice(&MAGIC.to_le_bytes());
        tail[600] = 9;
        assert_eq!(find_in(&tail, 512), Some((176, true)));
        assert_eq!(find_in(&tail, 900), None);
        assert_eq!(find_in(&[], 1), None);
    }
}
