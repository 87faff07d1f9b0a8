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
use std::path::{Path, PathBuf};

use layers::{BLOCK, Header, Identity, Map, ReadAt, SECTOR, Segment};

use super::slots::Slots;
use crate::error::{Context, Error, Result};
use crate::layer::BLOCK_BYTES;
use crate::root::Root;

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
    /// Its name is not durable yet.
    unplaced: bool,
}

/// A log that is being written anew, beside the one that is in use.
pub(super) struct Anew {
    log: Log,
    temporary: PathBuf,
    /// How many entries of the old one are in it.
    covers: u64,
    done: bool,
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
        Ok(Self { file, count: 0, marked: 0, generation: 0, compact_at: COMPACT_ENTRIES, unplaced: false })
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
        let compact_at = COMPACT_ENTRIES.max(count);
        let log = Self { file, count, marked: 0, generation: 0, compact_at, unplaced: false };
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
        self.marked == self.count && !self.unplaced
    }

    /// Notes that the first *covered* entries have their data on disk. Sync the file, then say so
    /// with [`Log::marked`].
    pub(super) fn mark(&mut self, covered: u64) -> io::Result<Mark> {
        self.append(&[marking(covered)])?;
        // If nothing was written between, the mark covers itself.
        let marked = if covered + 1 == self.count { self.count } else { covered };
        Ok(Mark { marked, generation: self.generation })
    }

    /// The file was synced after *mark*. Says whether it is this log still that has the mark.
    pub(super) fn marked(&mut self, mark: &Mark) -> bool {
        let same = mark.generation == self.generation;
        if same {
            self.marked = self.marked.max(mark.marked);
        }
        same
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

    /// Starts a log that shall say the same as this one does now.
    pub(super) fn begin_anew(&self, root: &Root) -> Result<Anew> {
        let (identity, _) = open(&self.file)?;
        let (temporary, file) = root.temporary()?;
        let log = Self { generation: self.generation + 1, unplaced: true, ..Self::create(file, identity)? };
        Ok(Anew { log, temporary, covers: self.count, done: false })
    }

    /// Puts *anew* in place of this log, at *path*, if no flush has promised anything since it caught up: of what was
    /// appended since then nothing is known to be durable, and nothing has to be. Says whether it did.
    pub(super) fn replace_by(&mut self, anew: &mut Anew, path: &Path) -> Result<bool> {
        let missing = self.entries_from(anew.covers)?;
        if missing.iter().any(|segment| segment.is_padding()) {
            return Ok(false);
        }
        anew.log.append(&missing).during("cannot write an index anew")?;
        fs::rename(&anew.temporary, path).during("cannot put a new index in place")?;
        anew.done = true;
        let file = anew.log.file().during("cannot put a new index in place")?;
        *self = Self { file, ..anew.log };
        Ok(true)
    }

    fn entries_from(&self, first: u64) -> Result<Vec<Segment>> {
        let mut entries = Vec::new();
        for_each_from(&self.file, first, self.count, |_, segment| {
            entries.push(segment);
            Ok(())
        })?;
        Ok(entries)
    }

    /// Whether its name may still be an older log's after a crash of the host.
    pub(super) fn is_unplaced(&self) -> bool {
        self.unplaced
    }

    /// The directory was synced after the log of *generation* got its name.
    pub(super) fn placed(&mut self, generation: u64) {
        if self.generation == generation {
            self.unplaced = false;
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    fn end(&self) -> u64 {
        BLOCK + self.count * ENTRY
    }
}

impl Anew {
    /// Writes what the entries said when it was begun, as few as can be.
    pub(super) fn fill(&mut self, segments: &[Segment]) -> Result<()> {
        let mut parts = segments.chunks(BATCH / Segment::SIZE);
        parts.try_for_each(|part| self.log.append(part)).during("cannot write an index anew")
    }

    /// Adds what was appended to *log* before this moment. The caller then syncs the data, and after
    /// it the file, with [`Anew::sync`].
    pub(super) fn catch_up(&mut self, log: &Log) -> Result<()> {
        // Marks count the entries of the old log.
        let missing: Vec<Segment> =
            log.entries_from(self.covers)?.into_iter().filter(|segment| !segment.is_padding()).collect();
        self.log.append(&missing).during("cannot write an index anew")?;
        self.covers = log.count;
        Ok(())
    }

    /// All of whose data is on disk: so is the file when this returns.
    pub(super) fn sync(&mut self) -> Result<()> {
        let mark = self.log.mark(self.log.count).during("cannot write an index anew")?;
        self.log.file.sync_all().during("cannot write an index anew")?;
        self.log.marked(&mark);
        Ok(())
    }
}

/// One that came to nothing leaves nothing.
impl Drop for Anew {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.temporary);
        }
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

fn for_each(file: &File, count: u64, each: impl FnMut(u64, Segment) -> Result<()>) -> Result<()> {
    for_each_from(file, 0, count, each)
}

fn for_each_from(file: &File, first: u64, count: u64, mut each: impl FnMut(u64, Segment) -> Result<()>) -> Result<()> {
    let mut buf = vec![0; BATCH];
    let mut number = first;
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
