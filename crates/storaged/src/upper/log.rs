//! The index file of an upper: a header, then one entry for each mapping that a write or discard made.
//!
//! An entry is appended after its data was written and before the write is acknowledged, so
//! a daemon that dies loses nothing: the kernel has both. A host that dies may keep
//! an entry and lose its data. Therefore each flush leaves a mark that says how many entries had their
//! data on disk, and another boot believes no entry beyond the last mark ([`trim`]). A mark is
//! what the format calls padding: it maps nothing.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use layers::{BLOCK, Header, Identity, Map, ReadAt, SECTOR, Segment};

use super::slots::Slots;
use crate::error::{Context, Error, Result};
use crate::layer::BLOCK_BYTES;
use crate::root::{Root, sync_directory};

const ENTRY: u64 = Segment::SIZE as u64;
/// A log is written anew when it is longer than this, and mostly dead.
const COMPACT_ENTRIES: u64 = 4096;
const DEAD_FACTOR: u64 = 4;
/// More than a log of ours can hold, since it is compacted; 1 GiB.
const MAX_ENTRIES: u64 = 64 << 20;
const BATCH: usize = 64 << 10;

pub(super) struct Log {
    file: File,
    /// Entries in it, marks included.
    count: u64,
    /// How many of them are on disk, as their data is.
    marked: u64,
    /// Changes when the log is written anew.
    generation: u64,
    /// Not to be compacted before it is so long; grows after a failure.
    compact_at: u64,
}

/// A mark that was written, and is not durable yet.
pub(super) struct Mark {
    marked: u64,
    generation: u64,
}

/// A log, read back.
pub(super) struct Replay {
    pub(super) identity: Identity,
    pub(super) map: Map,
    pub(super) slots: Slots,
    pub(super) log: Log,
}

impl Log {
    /// Starts a log. Not durable before a sync of the file and of its directory.
    pub(super) fn create(file: File, identity: Identity) -> Result<Self> {
        let header = Header::of_log(identity).encode().map_err(|e| Error::invalid(e.to_string()))?;
        file.write_all_at(&header, 0).during("cannot start an index")?;
        Ok(Self { file, count: 0, marked: 0, generation: 0, compact_at: COMPACT_ENTRIES })
    }

    /// Reads a log back; given the sizes of the file it maps to and of the disk.
    ///
    /// # Errors
    /// `corrupt` for any entry that cannot be: nothing behind it could be believed.
    pub(super) fn replay(file: File, data_bytes: u64, virtual_bytes: u64) -> Result<Replay> {
        let (identity, count) = open(&file)?;
        let mut map = Map::new();
        let mut slots = Slots::new();
        for_each(&file, count, |number, segment| {
            if let Some(covered) = mark(segment) {
                if covered > number {
                    return Err(Error::corrupt(format!("entry {number} marks {covered} entries")));
                }
                return Ok(());
            }
            let data_end = segment.moffset() + segment.length();
            let inside = segment.length() > 0
                && segment.end() <= virtual_bytes / SECTOR
                && (segment.is_zeroed()
                    || (segment.moffset() >= BLOCK / SECTOR && data_end <= data_bytes.div_ceil(SECTOR)));
            if !inside {
                return Err(Error::corrupt(format!("entry {number} maps {segment:?}, which cannot be")));
            }
            slots.learn(segment);
            map.insert(segment, |_| ());
            Ok(())
        })?;
        // A last entry that is not whole was never acknowledged.
        file.set_len(BLOCK + count * ENTRY).during("cannot cut an index")?;
        // Whether the last mark is on disk is not known here: the next flush sees to it.
        let log = Self { file, count, marked: 0, generation: 0, compact_at: COMPACT_ENTRIES.max(count) };
        Ok(Replay { identity, map, slots, log })
    }

    /// Appends all of *segments*, or none.
    pub(super) fn append(&mut self, segments: &[Segment]) -> io::Result<()> {
        let bytes: Vec<u8> = segments.iter().flat_map(|segment| segment.encode()).collect();
        if let Err(error) = self.file.write_all_at(&bytes, self.end()) {
            // Entries that were written whole would count after a restart.
            self.file.set_len(self.end())?;
            return Err(error);
        }
        self.count += segments.len() as u64;
        Ok(())
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Whether every entry had its data on disk at the last flush.
    pub(super) fn is_marked(&self) -> bool {
        self.marked == self.count
    }

    /// Notes that the first *covered* entries have their data on disk. Sync the file, then say so
    /// with [`Log::marked`].
    pub(super) fn mark(&mut self, covered: u64) -> io::Result<Mark> {
        self.append(&[marking(covered)])?;
        // If nothing was written between, the mark covers itself.
        let marked = if covered + 1 == self.count { self.count } else { covered };
        Ok(Mark { marked, generation: self.generation })
    }

    /// The file was synced after *mark*.
    pub(super) fn marked(&mut self, mark: &Mark) {
        if mark.generation == self.generation {
            self.marked = self.marked.max(mark.marked);
        }
    }

    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    pub(super) fn wants_compaction(&self, live: usize) -> bool {
        self.count >= self.compact_at && self.count > DEAD_FACTOR * live as u64
    }

    /// Not again before the log has grown to twice its length.
    pub(super) fn put_off(&mut self) {
        self.compact_at = self.count * 2;
    }

    /// Writes the log at *path* anew with what *map* says, all of whose data is on disk.
    pub(super) fn compact(&mut self, root: &Root, path: &Path, identity: Identity, map: &Map) -> Result<()> {
        let (temporary, file) = root.temporary()?;
        let done = (|| {
            let mut log = Self::create(file, identity)?;
            let segments: Vec<Segment> = map.segments().collect();
            for part in segments.chunks(BATCH / Segment::SIZE) {
                log.append(part).during("cannot write an index anew")?;
            }
            let mark = log.mark(log.count).during("cannot write an index anew")?;
            log.generation = self.generation + 1;
            log.marked = mark.marked;
            log.file.sync_all().during("cannot write an index anew")?;
            fs::rename(&temporary, path).during("cannot put a new index in place")?;
            Ok(log)
        })();
        match done {
            Ok(log) => {
                *self = log;
                sync_directory(&root.uppers())
            }
            Err(error) => {
                let _ = fs::remove_file(&temporary);
                Err(error)
            }
        }
    }

    fn end(&self) -> u64 {
        BLOCK + self.count * ENTRY
    }
}

/// After another boot: forgets the entries whose data may have been lost, durably.
///
/// # Errors
/// `corrupt` when it is no log; what the file system says.
pub(crate) fn trim(path: &Path) -> Result<()> {
    let file = crate::root::private().open(path).during(format_args!("cannot open {}", path.display()))?;
    let (_, count) = open(&file)?;
    let mut covered = 0;
    for_each(&file, count, |number, segment| {
        covered = mark(segment).filter(|covered| *covered <= number).unwrap_or(covered);
        Ok(())
    })?;
    // One more mark, so that the next boot finds the same.
    file.set_len(BLOCK + covered * ENTRY).during("cannot cut an index")?;
    file.write_all_at(&marking(covered).encode(), BLOCK + covered * ENTRY).during("cannot mark an index")?;
    file.sync_all().during("cannot sync an index")
}

/// The head of a log, and how many whole entries follow it.
pub(super) fn open(file: &File) -> Result<(Identity, u64)> {
    let size = file.metadata().during("cannot read an index")?.len();
    let mut block = [0; BLOCK_BYTES];
    ReadAt::read_exact_at(file, &mut block, 0).during("cannot read the head of an index")?;
    let header = Header::decode(&block).map_err(|e| Error::corrupt(format!("an index: {e}")))?;
    let count = (size - BLOCK) / ENTRY;
    if header.flags != Header::of_log(header.identity.clone()).flags || count > MAX_ENTRIES {
        return Err(Error::corrupt("a file that is no index of an upper"));
    }
    Ok((header.identity, count))
}

fn for_each(file: &File, count: u64, mut each: impl FnMut(u64, Segment) -> Result<()>) -> Result<()> {
    let mut buf = vec![0; BATCH];
    let mut number = 0;
    while number < count {
        let entries = (count - number).min((BATCH / Segment::SIZE) as u64);
        let part = &mut buf[..usize::try_from(entries * ENTRY).unwrap_or(BATCH)];
        ReadAt::read_exact_at(file, part, BLOCK + number * ENTRY).during("cannot read an index")?;
        for entry in part.chunks_exact(Segment::SIZE).filter_map(<[u8]>::first_chunk) {
            each(number, Segment::decode(entry))?;
            number += 1;
        }
    }
    Ok(())
}

fn marking(covered: u64) -> Segment {
    let mut entry = Segment::PADDING.encode();
    entry[8..].copy_from_slice(&covered.to_le_bytes());
    Segment::decode(&entry)
}

fn mark(segment: Segment) -> Option<u64> {
    segment.is_padding().then(|| segment.moffset())
}
