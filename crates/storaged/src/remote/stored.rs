//! The part of a remote file that is on the local disk.
//!
//! A block is read without a lock: its state before, and the epoch after, say whether what was read was there all
//! the time. Whoever takes blocks away first clears their state, then begins a new epoch, then makes the meta file
//! forget them, and only then gives their space back: zeros of a hole are never taken for data. Whoever adds one
//! writes it first and marks it after. After a restart the
//! first reader of a block compares it with its sum.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use layers::ReadAt;
use rustix::fs::{FallocateFlags, fallocate};

use super::BLOCK_BYTES;
use super::meta::{Identity, Meta};
use crate::device::Answer;
use crate::files::{Files, Handle, Shared};
use crate::reading::Caching;
use crate::root::{private, remove_if_there};

const ABSENT: u8 = 0;
/// There, and not yet compared with its sum by this daemon.
const UNSEEN: u8 = 1;
const GOOD: u8 = 2;
/// Good, and read since the last look for what may go.
const USED: u8 = 3;

pub struct Stored {
    directory: PathBuf,
    identity: Identity,
    states: Box<[AtomicU8]>,
    epoch: AtomicU64,
    used_unix_s: AtomicU64,
    /// Blocks that are there, here and in all files.
    there: AtomicU64,
    total: Arc<AtomicU64>,
    inner: Mutex<Inner>,
    data: Arc<Handle>,
}

struct Inner {
    sums: Vec<u32>,
    /// Blocks that the disk has for certain.
    durable: Vec<bool>,
    dirty: u64,
    retired: bool,
    validator: Option<String>,
    /// Where the search for what may go went on last.
    hand: usize,
}

impl Stored {
    /// What is left in *directory* of the file of *identity*; other things there are of no use and go.
    pub fn open(directory: PathBuf, identity: Identity, files: &Arc<Files>, total: &Arc<AtomicU64>) -> Self {
        let meta = fs::read(directory.join("meta")).ok().and_then(|bytes| Meta::decode(&bytes, identity));
        let blocks = usize::try_from(identity.blocks()).unwrap_or(usize::MAX);
        let (mut sums, mut durable, mut states) = (vec![0; blocks], vec![false; blocks], Vec::with_capacity(blocks));
        let mut there = 0;
        for block in 0..blocks {
            let sum = meta.as_ref().and_then(|meta| meta.sums[block]);
            if let Some(sum) = sum {
                (sums[block], durable[block]) = (sum, true);
                there += 1;
            }
            states.push(AtomicU8::new(if sum.is_some() { UNSEEN } else { ABSENT }));
        }
        if meta.is_none() {
            // What is in the data is not known, so it only takes room.
            let _ = remove_files(&directory);
        }
        total.fetch_add(there, SeqCst);
        let used = meta.as_ref().map_or_else(now_unix_s, |meta| meta.used_unix_s);
        let validator = meta.and_then(|meta| meta.validator);
        Self {
            data: files.handle(directory.join("data")),
            directory,
            identity,
            states: states.into_boxed_slice(),
            epoch: AtomicU64::new(0),
            used_unix_s: AtomicU64::new(used),
            there: AtomicU64::new(there),
            total: Arc::clone(total),
            inner: Mutex::new(Inner { sums, durable, dirty: 0, retired: false, validator, hand: 0 }),
        }
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }

    pub fn has(&self, block: u64) -> bool {
        self.state(block).is_some_and(|state| state.load(SeqCst) != ABSENT)
    }

    pub fn blocks_there(&self) -> u64 {
        self.there.load(SeqCst)
    }

    pub fn used_unix_s(&self) -> u64 {
        self.used_unix_s.load(SeqCst)
    }

    pub fn touch(&self) {
        self.used_unix_s.store(now_unix_s(), SeqCst);
    }

    /// What the source called the content when the blocks that are there were fetched.
    pub fn validator(&self) -> Option<String> {
        self.inner().validator.clone()
    }

    pub fn set_validator(&self, validator: Option<String>) {
        self.inner().validator = validator;
    }

    /// Fills *buf* from byte *at* of *block*. False when the block is not there, or not any more.
    pub fn read(&self, block: u64, buf: &mut [u8], at: usize) -> bool {
        let Some(state) = self.state(block) else { return false };
        // Again when other blocks went meanwhile, which is rare; a block that is being fought over is fetched.
        for _ in 0..4 {
            let epoch = self.epoch.load(SeqCst);
            match state.load(SeqCst) {
                ABSENT => return false,
                UNSEEN if !self.compare(block, epoch) => return false,
                UNSEEN => continue,
                _ => (),
            }
            let offset = block * BLOCK_BYTES + at as u64;
            if ReadAt::read_exact_at(&Shared(Arc::clone(&self.data)), buf, offset).is_err() {
                // The cache's disk is no better than none here.
                if epoch == self.epoch.load(SeqCst) {
                    self.forget(block..block + 1);
                }
                return false;
            }
            if epoch == self.epoch.load(SeqCst) {
                let _ = state.compare_exchange(GOOD, USED, SeqCst, SeqCst);
                return true;
            }
        }
        false
    }

    /// The same, if that takes no wait.
    pub fn read_now(&self, block: u64, buf: &mut [u8], at: usize) -> bool {
        let Some(state) = self.state(block) else { return false };
        let epoch = self.epoch.load(SeqCst);
        let seen = state.load(SeqCst);
        if seen < GOOD {
            return false;
        }
        let offset = block * BLOCK_BYTES + at as u64;
        let done = matches!(self.data.read_now(buf, offset, Caching::Keep), Ok(Answer::Done));
        if done && seen == GOOD {
            let _ = state.compare_exchange(GOOD, USED, SeqCst, SeqCst);
        }
        done && epoch == self.epoch.load(SeqCst)
    }

    /// Compares a block with its sum, once. False when it is not what it was.
    fn compare(&self, block: u64, epoch: u64) -> bool {
        let Some(state) = self.state(block) else { return false };
        let mut bytes = vec![0; self.length(block)];
        let read = ReadAt::read_exact_at(&Shared(Arc::clone(&self.data)), &mut bytes, block * BLOCK_BYTES);
        let inner = self.inner();
        if epoch != self.epoch.load(SeqCst) {
            return true; // look again
        }
        let sum = usize::try_from(block).ok().and_then(|block| inner.sums.get(block).copied());
        if read.is_ok() && sum == Some(crc32c::crc32c(&bytes)) {
            let _ = state.compare_exchange(UNSEEN, GOOD, SeqCst, SeqCst);
            return true;
        }
        drop(inner);
        eprintln!("storaged: block {block} of {} is damaged and fetched again", self.directory.display());
        self.forget(block..block + 1);
        false
    }

    /// Adds a block. Nothing is changed by an error.
    ///
    /// # Errors
    /// What the file system says.
    pub fn put(&self, block: u64, bytes: &[u8]) -> io::Result<()> {
        let (Some(state), Ok(place)) = (self.state(block), usize::try_from(block)) else { return Ok(()) };
        // Nothing goes while it is being added; readers do not need this lock.
        let mut inner = self.inner();
        if inner.retired || state.load(SeqCst) != ABSENT {
            return Ok(());
        }
        self.for_writing()?.write_all_at(bytes, block * BLOCK_BYTES)?;
        inner.sums[place] = crc32c::crc32c(bytes);
        inner.durable[place] = false;
        inner.dirty += 1;
        state.store(GOOD, SeqCst);
        self.count(1, 0);
        Ok(())
    }

    /// Takes it off the disk. Whoever still has it finds nothing, and can add nothing.
    ///
    /// # Errors
    /// What the file system says.
    pub fn retire(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.retired = true;
        for place in 0..self.states.len() {
            self.clear(place);
        }
        self.epoch.fetch_add(1, SeqCst);
        inner.dirty = 0;
        remove_files(&self.directory)
    }

    fn for_writing(&self) -> io::Result<File> {
        let path = self.directory.join("data");
        let file = match private().open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
                private().create(true).truncate(false).open(&path)?
            }
            other => other?,
        };
        if file.metadata()?.len() != self.identity.size_bytes {
            file.set_len(self.identity.size_bytes)?;
        }
        Ok(file)
    }

    /// How many blocks would be lost with the host now.
    pub fn dirty(&self) -> u64 {
        self.inner().dirty
    }

    /// Makes what is there durable, and then known.
    ///
    /// # Errors
    /// What the file system says. What could not be made durable is not believed to be there any more.
    pub fn checkpoint(&self) -> io::Result<()> {
        let there: Vec<bool> = {
            let inner = self.inner();
            if inner.dirty == 0 || inner.retired {
                return Ok(());
            }
            self.states.iter().map(|state| state.load(SeqCst) != ABSENT).collect()
        };
        // Without the lock: it may take long, and nobody who reads or fetches waits for it.
        let epoch = self.epoch.load(SeqCst);
        let synced = private().open(self.directory.join("data")).and_then(|file| file.sync_data());
        let mut inner = self.inner();
        if inner.retired {
            return Ok(());
        }
        if let Err(error) = synced {
            // The kernel may have dropped what it could not write.
            let doubtful: Vec<usize> = (0..inner.durable.len()).filter(|block| !inner.durable[*block]).collect();
            for block in doubtful {
                self.clear(block);
            }
            self.epoch.fetch_add(1, SeqCst);
            inner.dirty = 0;
            return Err(error);
        }
        // What went and came again meanwhile may be another block than the one that was synced.
        if epoch == self.epoch.load(SeqCst) {
            for (durable, there) in inner.durable.iter_mut().zip(there) {
                *durable |= there;
            }
            let now = self.states.iter().filter(|state| state.load(SeqCst) != ABSENT).count();
            inner.dirty = (now - inner.durable.iter().filter(|durable| **durable).count()) as u64;
        }
        self.write_meta(&inner)
    }

    /// The meta file, of what is durable.
    fn write_meta(&self, inner: &Inner) -> io::Result<()> {
        let sums = inner.sums.iter().zip(&inner.durable).map(|(sum, durable)| durable.then_some(*sum)).collect();
        let meta =
            Meta { identity: self.identity, used_unix_s: self.used_unix_s(), validator: inner.validator.clone(), sums };
        let temporary = self.directory.join("meta.new");
        let mut file = private().create(true).truncate(true).open(&temporary)?;
        file.write_all(&meta.encode())?;
        file.sync_all()?;
        fs::rename(&temporary, self.directory.join("meta"))?;
        sync(&self.directory)
    }

    /// Gives back *wanted* blocks or a few more, those first that were not read lately. Says how many.
    pub fn evict(&self, wanted: u64) -> u64 {
        let mut inner = self.inner();
        let count = self.states.len();
        let mut going = Vec::new();
        // Once round takes the marks away, twice takes what had none left, three times takes anything.
        for _ in 0..3 * count {
            if going.len() as u64 >= wanted {
                break;
            }
            let place = inner.hand % count;
            inner.hand = (place + 1) % count;
            let state = &self.states[place];
            match state.load(SeqCst) {
                ABSENT => (),
                USED => drop(state.compare_exchange(USED, GOOD, SeqCst, SeqCst)),
                _ => {
                    self.clear(place);
                    going.push(place);
                }
            }
        }
        if going.is_empty() {
            return 0;
        }
        self.let_go(&mut inner, &going);
        going.len() as u64
    }

    /// These blocks are not what they should be, or not wanted any more.
    pub fn forget(&self, blocks: std::ops::Range<u64>) {
        let mut inner = self.inner();
        let places = blocks.filter_map(|block| usize::try_from(block).ok());
        let going: Vec<usize> = places.filter(|place| self.clear(*place)).collect();
        if !going.is_empty() {
            self.let_go(&mut inner, &going);
        }
    }

    fn clear(&self, place: usize) -> bool {
        let there = self.states.get(place).is_some_and(|state| state.swap(ABSENT, SeqCst) != ABSENT);
        if there {
            self.count(0, 1);
        }
        there
    }

    /// The space of blocks whose state is cleared.
    fn let_go(&self, inner: &mut Inner, going: &[usize]) {
        self.epoch.fetch_add(1, SeqCst);
        for place in going {
            inner.durable[*place] = false;
        }
        // Without a meta file everything is unknown after a crash, which is right, too.
        let forgotten = self.write_meta(inner).or_else(|_| remove_if_there(&self.directory.join("meta")));
        let punched = forgotten.and_then(|()| {
            let file = private().open(self.directory.join("data"))?;
            for place in going {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&file, flags, *place as u64 * BLOCK_BYTES, BLOCK_BYTES)?;
            }
            Ok(())
        });
        match punched {
            Ok(()) => (),
            Err(e) if e.kind() == io::ErrorKind::NotFound => (),
            Err(e) => eprintln!("storaged: {} keeps room that it needs no more: {e}", self.directory.display()),
        }
    }

    fn count(&self, more: u64, fewer: u64) {
        for counter in [&self.there, self.total.as_ref()] {
            counter.fetch_add(more, SeqCst);
            counter.fetch_sub(fewer, SeqCst);
        }
    }

    /// Bytes of *block*: the last one is shorter.
    pub fn length(&self, block: u64) -> usize {
        let rest = self.identity.size_bytes.saturating_sub(block * BLOCK_BYTES);
        usize::try_from(rest.min(BLOCK_BYTES)).unwrap_or(0)
    }

    fn state(&self, block: u64) -> Option<&AtomicU8> {
        self.states.get(usize::try_from(block).ok()?)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The files of a cached file, meta first: what is left when this is cut short is of no use, and known to be.
///
/// # Errors
/// What the file system says.
pub(super) fn remove_files(directory: &Path) -> io::Result<()> {
    for name in ["meta", "meta.new", "data"] {
        remove_if_there(&directory.join(name))?;
    }
    match fs::remove_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

pub(super) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::super::source::Digest;
    use super::*;

    struct Bench {
        place: tempfile::TempDir,
        total: Arc<AtomicU64>,
    }

    const BLOCK: usize = 256 << 10;

    impl Bench {
        fn new() -> io::Result<Self> {
            Ok(Self { place: tempfile::tempdir()?, total: Arc::default() })
        }

        fn open(&self) -> Stored {
            let identity = Identity { size_bytes: 4 * BLOCK_BYTES - 100, digest: Digest([1; 32]) };
            self.total.store(0, SeqCst);
            Stored::open(self.place.path().join("x"), identity, &Files::new(4), &self.total)
        }

        fn data(&self) -> PathBuf {
            self.place.path().join("x/data")
        }
    }

    fn read(stored: &Stored, block: u64) -> Option<u8> {
        let mut buf = [0xee; 100];
        stored.read(block, &mut buf, 7).then_some(buf[99])
    }

    fn put(stored: &Stored, block: u64) -> io::Result<()> {
        stored.put(block, &vec![u8::try_from(block).unwrap_or(0) + 1; stored.length(block)])
    }

    #[test]
    fn only_what_was_made_durable_is_there_for_the_next_daemon() -> io::Result<()> {
        let bench = Bench::new()?;
        let stored = bench.open();
        put(&stored, 1)?;
        put(&stored, 3)?;
        stored.checkpoint()?;
        put(&stored, 0)?;
        assert_eq!([0, 1, 2, 3].map(|block| read(&stored, block)), [Some(1), Some(2), None, Some(4)]);
        let next = bench.open();
        assert_eq!([0, 1, 2, 3].map(|block| read(&next, block)), [None, Some(2), None, Some(4)]);
        assert_eq!(bench.total.load(SeqCst), 2);
        Ok(())
    }

    #[test]
    fn a_block_that_the_disk_changed_is_not_there() -> io::Result<()> {
        let bench = Bench::new()?;
        let stored = bench.open();
        for block in 0..4 {
            put(&stored, block)?;
        }
        stored.checkpoint()?;
        let file = File::options().write(true).open(bench.data())?;
        file.write_all_at(&[9], BLOCK_BYTES + 200_000)?;
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 2 * BLOCK_BYTES, BLOCK_BYTES)?;
        let next = bench.open();
        assert_eq!([0, 1, 2, 3].map(|block| read(&next, block)), [Some(1), None, None, Some(4)]);
        assert_eq!(next.blocks_there(), 2);
        Ok(())
    }

    #[test]
    fn what_was_given_back_is_absent_at_once_and_after_a_crash() -> io::Result<()> {
        let bench = Bench::new()?;
        let stored = bench.open();
        for block in 0..4 {
            put(&stored, block)?;
        }
        stored.checkpoint()?;
        assert!(read(&stored, 2).is_some());
        assert_eq!(stored.evict(3), 3);
        assert_eq!([0, 1, 2, 3].map(|block| read(&stored, block)), [None, None, Some(3), None]);
        let next = bench.open();
        assert_eq!([0, 1, 2, 3].map(|block| read(&next, block)), [None, None, Some(3), None]);
        assert_eq!(bench.total.load(SeqCst), 1);
        Ok(())
    }

    #[test]
    fn readers_never_see_a_hole_while_blocks_come_and_go() -> io::Result<()> {
        let bench = Bench::new()?;
        let stored = bench.open();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..200 {
                    for block in 0..4 {
                        let _ = put(&stored, block);
                    }
                    stored.evict(4);
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut buf = vec![0; BLOCK / 2];
                    for round in 0..2000_u64 {
                        let block = round % 4;
                        let found = match round % 3 {
                            0 => stored.read_now(block, &mut buf, 100),
                            _ => stored.read(block, &mut buf, 100),
                        };
                        assert!(!found || buf.iter().all(|byte| u64::from(*byte) == block + 1));
                    }
                });
            }
        });
        Ok(())
    }
}
