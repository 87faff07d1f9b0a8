//! The writable file on top of a disk: what one guest wrote, and nothing else.
//!
//! Two files, `<id>.data` and `<id>.index`. What is mapped is overwritten in place; what is not
//! gets a place ([`slots`]), is written there, and then mapped by an entry of the index ([`log`]). So a
//! write is never half acknowledged, and one that fails for want of space has changed nothing.
//!
//! Locks are taken in the order log, map. The map's is held for as long as it takes to look something up
//! or to put it in, never over a write or a read: readers do not wait for writers.

mod log;
mod slots;

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use layers::{BLOCK, Header, Identity, Map, Piece, Place, ReadAt, SECTOR, Segment};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

use self::log::Log;
use self::slots::Slots;
use crate::device::Answer;
use crate::error::{Code, Context, Error, Result};
use crate::files::read_cached;
use crate::names::Id;
use crate::reading::{Caching, Store};
use crate::root::{Root, private, remove_if_there, sync_directory};

use self::log::trim;

pub struct Upper {
    id: Id,
    root: Arc<Root>,
    data: File,
    map: RwLock<Map>,
    slots: Mutex<Slots>,
    log: Mutex<Log>,
    flushes: Flushes,
    /// Held by the one who writes the log anew.
    compacting: Mutex<()>,
}

/// How often a log that is written anew may catch up with the one in use.
const COMPACT_ATTEMPTS: usize = 8;

/// Many may ask for a flush at once; one that begins after they asked answers all of them.
#[derive(Default)]
struct Flushes {
    begun: AtomicU64,
    /// The number of the last one that succeeded.
    done: Mutex<u64>,
    /// A flush failed: the kernel may have dropped what it could not write, so no later
    /// one can be believed.
    failed: AtomicBool,
}

impl Upper {
    /// An upper with nothing in it, durable.
    ///
    /// # Errors
    /// `no_space` when there is no room; what the file system says.
    pub fn create(root: &Arc<Root>, id: Id, virtual_bytes: u64) -> Result<Self> {
        let identity = identity(id, virtual_bytes)?;
        let (data_path, index_path) = (data_path(root, id), index_path(root, id));
        let made = (|| {
            let data = private().create_new(true).open(&data_path).during("cannot make an upper")?;
            let header = Header::of_upper(identity.clone()).encode().map_err(|e| Error::invalid(e.to_string()))?;
            data.write_all_at(&header, 0).during("cannot make an upper")?;
            data.sync_all().during("cannot make an upper")?;
            let index = private().create_new(true).open(&index_path).during("cannot make an upper")?;
            let log = Log::create(index, identity)?;
            log.file().and_then(|file| file.sync_all()).during("cannot make an upper")?;
            sync_directory(&root.uppers())?;
            Ok((data, log))
        })();
        let (data, log) = made.inspect_err(|_| {
            let _ = remove(root, id);
        })?;
        Self::assemble(root, id, data, Map::new(), Slots::new(), log)
    }

    /// The upper as it was left, however that was; the disk is so large.
    ///
    /// # Errors
    /// `corrupt` when its files are not those of an upper, or say what cannot be.
    pub fn open(root: &Arc<Root>, id: Id, virtual_bytes: u64) -> Result<Self> {
        let missing = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => Error::corrupt(format!("a file of upper {id} is missing")),
            _ => Error::io(format_args!("cannot open upper {id}"), e),
        };
        let data = private().open(data_path(root, id)).map_err(missing)?;
        let index = private().open(index_path(root, id)).map_err(missing)?;
        let bytes = data.metadata().during("cannot read an upper")?.len();
        let mut replay = Log::replay(index, bytes, virtual_bytes)?;
        if replay.identity.uuid != identity(id, virtual_bytes)?.uuid {
            return Err(Error::corrupt(format!("the files of upper {id} are another's")));
        }
        replay.slots.skip_to(bytes.div_ceil(SECTOR));
        Self::assemble(root, id, data, replay.map, replay.slots, replay.log)
    }

    fn assemble(root: &Arc<Root>, id: Id, data: File, map: Map, slots: Slots, log: Log) -> Result<Self> {
        fadvise(&data, 0, None, Advice::Random).during("cannot advise about an upper")?;
        Ok(Self {
            id,
            root: Arc::clone(root),
            data,
            map: RwLock::new(map),
            slots: Mutex::new(slots),
            log: Mutex::new(log),
            flushes: Flushes::default(),
            compacting: Mutex::default(),
        })
    }

    pub fn id(&self) -> Id {
        self.id
    }

    /// Whether anything was ever mapped in it.
    pub fn is_empty(&self) -> bool {
        self.map.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// What each sector of *range* is.
    pub fn pieces(&self, range: std::ops::Range<u64>) -> Vec<Piece> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).pieces(range).collect()
    }

    /// All mappings, in order.
    pub fn segments(&self) -> Vec<Segment> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).segments().collect()
    }

    /// Bytes that its data takes on the host's file system.
    ///
    /// # Errors
    /// What the file system says.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.data.metadata()?.blocks() * SECTOR)
    }

    /// Writes whole sectors at *sector*. See [`crate::device::Device::write`], but the answer says whether it
    /// is durable; it is tried only if *durable* is asked for, and else takes a flush.
    ///
    /// # Errors
    /// What the file system says; what was mapped to nothing before is so still.
    pub fn write(&self, buf: &[u8], sector: u64, durable: bool) -> io::Result<bool> {
        let range = sector..sector + buf.len() as u64 / SECTOR;
        let pieces = self.pieces(range);
        let in_place = pieces.iter().all(|piece| matches!(piece.place, Place::Data { .. }));
        // Alone enough only if the mapping is durable, too.
        let through = durable && in_place && self.log().is_marked() && !self.flushes.failed.load(Ordering::Acquire);
        let mut fresh = Vec::new();
        for piece in pieces {
            let part = |offset: u64, length: u64| &buf[bytes(offset - sector)..bytes(offset - sector + length)];
            if let Place::Data { moffset, .. } = piece.place {
                self.put(part(piece.offset, piece.length), moffset, through)?;
                continue;
            }
            let runs = self.slots.lock().unwrap_or_else(PoisonError::into_inner).place(piece.range());
            for run in runs {
                self.put(part(run.offset, run.length), run.moffset, false)?;
                fresh.extend(Segment::run_of_data(run.offset, run.length, run.moffset)?);
            }
        }
        self.map_to(&fresh)?;
        Ok(through)
    }

    /// Maps whole sectors to zeros, and gives back the room of what was there.
    ///
    /// # Errors
    /// What the file system says.
    pub fn zero(&self, ranges: &[std::ops::Range<u64>]) -> io::Result<()> {
        let mut zeros = Vec::new();
        let mut freed = Vec::new();
        for range in ranges {
            zeros.extend(Segment::run_of_zeros(range.start, range.end - range.start, BLOCK / SECTOR)?);
            freed.extend(self.pieces(range.clone()));
        }
        self.map_to(&zeros)?;
        for piece in freed {
            let Place::Data { moffset, .. } = piece.place else { continue };
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match fallocate(&self.data, flags, moffset * SECTOR, piece.length * SECTOR) {
                // It reads as zeros by now; that a file system cannot give room back is no fault of the guest's.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => (),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn put(&self, mut buf: &[u8], moffset: u64, through: bool) -> io::Result<()> {
        let mut at = moffset * SECTOR;
        if !through {
            return self.data.write_all_at(buf, at);
        }
        while !buf.is_empty() {
            match pwritev2(&self.data, &[io::IoSlice::new(buf)], at, ReadWriteFlags::DSYNC) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    buf = &buf[written..];
                    at += written as u64;
                }
                Err(Errno::INTR) => (),
                Err(Errno::IO) => {
                    self.flushes.failed.store(true, Ordering::Release);
                    return Err(Errno::IO.into());
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn map_to(&self, segments: &[Segment]) -> io::Result<()> {
        if segments.is_empty() {
            return Ok(());
        }
        let mut log = self.log();
        log.append(segments)?;
        let live = {
            let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            for segment in segments {
                map.insert(*segment, |_| ());
            }
            map.len()
        };
        let wanted = log.wants_compaction(live);
        drop(log);
        if wanted {
            self.compact();
        }
        Ok(())
    }

    /// Writes the index anew while others go on. What goes wrong here is no fault of the write that happened to be the last one.
    fn compact(&self) {
        let Ok(_alone) = self.compacting.try_lock() else { return };
        let done = self.try_compact();
        if let Err(error) = &done {
            eprintln!("storaged: the index of upper {} stays long: {error}", self.id);
        }
        if !done.unwrap_or(false) {
            self.log().put_off();
        }
    }

    /// Catches up with the log, without keeping anybody from it, until there is a moment with no flush since.
    fn try_compact(&self) -> Result<bool> {
        let (mut anew, segments) = {
            let log = self.log();
            (log.begin_anew(&self.root)?, self.segments())
        };
        anew.fill(&segments)?;
        for _ in 0..COMPACT_ATTEMPTS {
            self.data
                .sync_data()
                .inspect_err(|_| self.flushes.failed.store(true, Ordering::Release))
                .during("flush")?;
            anew.sync()?;
            let mut log = self.log();
            if log.replace_by(&mut anew, &index_path(&self.root, self.id))? {
                let generation = log.generation();
                drop(log);
                sync_directory(&self.root.uppers())?;
                self.log().placed(generation);
                return Ok(true);
            }
            anew.catch_up(&log)?;
        }
        Ok(false)
    }

    /// See [`crate::device::Device::flush`].
    ///
    /// # Errors
    /// What the file system says.
    pub fn flush(&self) -> io::Result<()> {
        let asked_at = self.flushes.begun.load(Ordering::Acquire);
        let mut done = self.flushes.done.lock().unwrap_or_else(PoisonError::into_inner);
        if self.flushes.failed.load(Ordering::Acquire) {
            return Err(Errno::IO.into());
        }
        if *done > asked_at {
            return Ok(());
        }
        let number = self.flushes.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let flushed = self.flush_now();
        if flushed.is_err() {
            self.flushes.failed.store(true, Ordering::Release);
        } else {
            *done = number;
        }
        flushed
    }

    fn flush_now(&self) -> io::Result<()> {
        loop {
            // Entries up to here have their data in the kernel, which has it on disk after the first sync.
            let (covered, generation) = {
                let log = self.log();
                (log.count(), log.generation())
            };
            self.data.sync_data()?;
            let mut log = self.log();
            if log.is_marked() {
                return Ok(());
            }
            if log.generation() != generation {
                // Written anew meanwhile: its entries have other numbers.
                continue;
            }
            let unplaced = log.is_unplaced();
            let mark = log.mark(covered)?;
            let file = log.file()?;
            drop(log);
            file.sync_data()?;
            if unplaced {
                sync_directory(&self.root.uppers())
                    .map_err(|error| error.source.unwrap_or_else(|| Errno::IO.into()))?;
            }
            let mut log = self.log();
            if unplaced {
                log.placed(generation);
            }
            // Else the promise was written into a log that is none any more.
            if log.marked(&mark) {
                return Ok(());
            }
        }
    }

    /// Writes what makes the data file a layer behind the data. Nobody writes to the upper meanwhile.
    /// Not durable before a flush.
    ///
    /// # Errors
    /// What the file system says; the upper is then as it was.
    pub fn seal(&self, virtual_bytes: u64) -> Result<()> {
        let identity = identity(self.id, virtual_bytes)?;
        let end = self.data.metadata().during("cannot seal an upper")?.len().next_multiple_of(BLOCK);
        let sealed = (|| {
            // The disk may have grown since the upper was made.
            let header = Header::of_upper(identity.clone()).encode().map_err(|e| Error::invalid(e.to_string()))?;
            self.data.write_all_at(&header, 0).during("cannot seal an upper")?;
            let mut out = io::BufWriter::new(self.data.try_clone().during("cannot seal an upper")?);
            out.seek(SeekFrom::Start(end)).during("cannot seal an upper")?;
            let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
            layers::seal(&mut out, &identity, &map, end).map_err(io::Error::from).during("cannot seal an upper")?;
            out.flush().during("cannot seal an upper")
        })();
        if sealed.is_err() {
            // Behind the data nothing is mapped: what cannot be cut away now is cut by the next attempt.
            let _ = self.data.set_len(end);
        }
        sealed
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Upper {
    fn read(&self, buf: &mut [u8], at: u64, _: Caching) -> io::Result<()> {
        ReadAt::read_exact_at(&self.data, buf, at)
    }

    fn read_now(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<Answer> {
        read_cached(&self.data, buf, at, caching)
    }
}

/// Where the data file of *id* is.
pub fn data_path(root: &Root, id: Id) -> PathBuf {
    root.uppers().join(format!("{id}.data"))
}

fn index_path(root: &Root, id: Id) -> PathBuf {
    root.uppers().join(format!("{id}.index"))
}

/// Whether there is anything of *id*.
pub fn exists(root: &Root, id: Id) -> bool {
    data_path(root, id).exists() && index_path(root, id).exists()
}

/// Removes the index of an upper whose data has become a layer.
///
/// # Errors
/// What the file system says.
pub fn remove_index(root: &Root, id: Id) -> Result<()> {
    remove_if_there(&index_path(root, id)).during("cannot remove an index")
}

/// Removes both files, whatever is there of them.
///
/// # Errors
/// What the file system says.
pub fn remove(root: &Root, id: Id) -> Result<()> {
    remove_if_there(&data_path(root, id)).during("cannot remove an upper")?;
    remove_index(root, id)
}

/// After another boot: every upper forgets what no flush had covered. What cannot be read is left
/// for the one that needs it to find.
///
/// # Errors
/// What the file system says.
pub fn trim_all(root: &Root) -> Result<()> {
    for entry in fs::read_dir(root.uppers()).during("cannot list uppers")? {
        let path = entry.during("cannot list uppers")?.path();
        if path.extension().is_some_and(|ending| ending == "index") {
            match trim(&path) {
                Err(error) if error.code == Code::Corrupt => {
                    eprintln!("storaged: {} is damaged: {error}", path.display());
                }
                other => other?,
            }
        }
    }
    Ok(())
}

/// The ids of the uppers that have any file.
///
/// # Errors
/// What the file system says.
pub fn list(root: &Root) -> Result<Vec<Id>> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(root.uppers()).during("cannot list uppers")? {
        let path = entry.during("cannot list uppers")?.path();
        let id = path.file_stem().and_then(|stem| stem.to_str()).map(Id::parse);
        ids.extend(id.and_then(Result::ok));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn identity(id: Id, virtual_bytes: u64) -> Result<Identity> {
    let uuid = id.uuid().parse().map_err(|e: layers::Invalid| Error::invalid(e.to_string()))?;
    Ok(Identity::new(virtual_bytes).named(uuid, None))
}

fn bytes(sectors: u64) -> usize {
    usize::try_from(sectors * SECTOR).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
