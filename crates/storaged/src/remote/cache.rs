//! All that is cached of remote files, within one bound: what was used least lately goes first, and what nobody
//! has open before what somebody has.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock, statvfs};

use super::BLOCK_BYTES;
use super::meta::{Head, Identity};
use super::stored::{Stored, now_unix_s, remove_files};
use crate::error::{Code, Context, Error, Result};
use crate::files::Files;
use crate::names::LayerName;
use crate::root::private;

/// The name changes with the format: what another release cached is not ours to read.
const FOLDER: &str = "blocks-1";
/// How full it is when room is made, and how full after that, in percent of the bound.
const LOW_PERCENT: u64 = 90;
/// What is left free for others on the file system, in percent of it.
const FREE_PERCENT: u64 = 3;
/// Blocks between two looks at how full the file system is.
const LOOK_EVERY: u64 = 64;
/// A file that nobody had open for so long needs no memory.
const UNLOAD_AFTER_S: u64 = 60;

pub(super) struct Cache {
    place: PathBuf,
    limit_blocks: u64,
    files: Arc<Files>,
    slots: Mutex<HashMap<LayerName, Slot>>,
    /// Blocks in files that are loaded, and in those that are not.
    loaded: Arc<AtomicU64>,
    asleep: AtomicU64,
    stores: AtomicU64,
    evicted: AtomicU64,
    unkept: AtomicU64,
    /// Held for as long as the process lives.
    _lock: File,
}

enum Slot {
    Loaded(Arc<Stored>),
    Asleep { blocks: u64, used_unix_s: u64 },
}

/// What a cache holds and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Usage {
    pub bytes: u64,
    pub limit_bytes: u64,
    pub evicted_bytes: u64,
    /// Fetched and not kept, for want of room.
    pub unkept_bytes: u64,
}

impl Cache {
    /// Takes *directory*. What is in it of layers for which *known* is false goes; nothing else is touched.
    ///
    /// # Errors
    /// `conflict` when another daemon has it; what the file system says.
    pub(super) fn open(
        directory: &Path,
        limit_bytes: u64,
        files: &Arc<Files>,
        known: impl Fn(&LayerName) -> bool,
    ) -> Result<Self> {
        let place = directory.join(FOLDER);
        fs::create_dir_all(&place).during(format_args!("cannot make {}", place.display()))?;
        let lock = private().create(true).truncate(false).open(place.join("lock")).during("cannot open the lock")?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Error::new(Code::Conflict, format!("another daemon has {}", place.display())));
        }
        let (mut slots, mut asleep) = (HashMap::new(), 0);
        for entry in fs::read_dir(&place).during("cannot list the cache")? {
            let entry = entry.during("cannot list the cache")?;
            let name = entry.file_name().to_str().map(LayerName::parse);
            let Some(Ok(name)) = name else { continue };
            match head(&entry.path()).filter(|_| known(&name)) {
                Some(head) => {
                    asleep += head.blocks_there;
                    let (blocks, used_unix_s) = (head.blocks_there, head.used_unix_s);
                    slots.insert(name, Slot::Asleep { blocks, used_unix_s });
                }
                None => remove(&entry.path()),
            }
        }
        Ok(Self {
            place,
            limit_blocks: (limit_bytes / BLOCK_BYTES).max(1),
            files: Arc::clone(files),
            slots: Mutex::new(slots),
            loaded: Arc::default(),
            asleep: AtomicU64::new(asleep),
            stores: AtomicU64::default(),
            evicted: AtomicU64::default(),
            unkept: AtomicU64::default(),
            _lock: lock,
        })
    }

    /// What there is of *name*, to be read and added to.
    pub(super) fn load(&self, name: &LayerName, identity: Identity) -> Arc<Stored> {
        let mut slots = self.slots();
        match slots.get(name) {
            Some(Slot::Loaded(stored)) if stored.identity() == identity => return Arc::clone(stored),
            Some(Slot::Asleep { blocks, .. }) => drop(self.asleep.fetch_sub(*blocks, SeqCst)),
            _ => (),
        }
        let stored = Arc::new(Stored::open(self.directory(name), identity, &self.files, &self.loaded));
        slots.insert(name.clone(), Slot::Loaded(Arc::clone(&stored)));
        stored
    }

    /// Keeps a block, if there is room or room can be made.
    pub(super) fn put(&self, stored: &Stored, block: u64, bytes: &[u8]) {
        if !self.make_room(stored) {
            self.unkept.fetch_add(1, SeqCst);
            return;
        }
        let mut kept = stored.put(block, bytes);
        if kept.as_ref().is_err_and(is_full) {
            // Somebody else filled the disk: what we can give back may be enough.
            self.evict(self.limit_blocks / 20 + 1, stored);
            kept = stored.put(block, bytes);
        }
        if let Err(error) = kept {
            if self.unkept.fetch_add(1, SeqCst) == 0 {
                eprintln!("storaged: {}: what is fetched is not kept: {error}", self.place.display());
            }
        }
    }

    fn make_room(&self, stored: &Stored) -> bool {
        let used = self.used();
        if used >= self.limit_blocks {
            let low = self.limit_blocks * LOW_PERCENT / 100;
            self.evict(used + 1 - low.min(used), stored);
        }
        if self.stores.fetch_add(1, SeqCst) % LOOK_EVERY == 0 && self.short_of_space() {
            self.evict(LOOK_EVERY, stored);
            if self.short_of_space() {
                // Look again for the very next one.
                self.stores.store(0, SeqCst);
                return false;
            }
        }
        self.used() < self.limit_blocks
    }

    fn short_of_space(&self) -> bool {
        statvfs(&self.place).is_ok_and(|found| found.f_bavail < found.f_blocks / 100 * FREE_PERCENT)
    }

    /// Gives back *wanted* blocks, if there are so many. The file that they are for is the last to lose any.
    fn evict(&self, wanted: u64, for_whom: &Stored) {
        let mut left = wanted;
        let mut slots = self.slots();
        let mut order: Vec<(bool, bool, u64, LayerName)> = slots
            .iter()
            .map(|(name, slot)| match slot {
                Slot::Asleep { used_unix_s, .. } => (false, false, *used_unix_s, name.clone()),
                Slot::Loaded(stored) => {
                    let own = std::ptr::eq(stored.as_ref(), for_whom);
                    (own, Arc::strong_count(stored) > 1, stored.used_unix_s(), name.clone())
                }
            })
            .collect();
        order.sort();
        for (_, open, _, name) in order {
            if left == 0 {
                return;
            }
            let freed = match slots.get(&name) {
                Some(Slot::Loaded(stored)) => stored.evict(if open { left } else { u64::MAX }),
                Some(Slot::Asleep { blocks, .. }) => {
                    let blocks = *blocks;
                    remove(&self.directory(&name));
                    self.asleep.fetch_sub(blocks, SeqCst);
                    slots.remove(&name);
                    blocks
                }
                None => 0,
            };
            self.evicted.fetch_add(freed, SeqCst);
            left = left.saturating_sub(freed);
        }
    }

    /// Makes durable what was added, and forgets the insides of what nobody has open.
    pub(super) fn tidy(&self, everything: bool) {
        let loaded: Vec<(LayerName, Arc<Stored>)> = {
            let slots = self.slots();
            let loaded = slots.iter().filter_map(|(name, slot)| match slot {
                Slot::Loaded(stored) => Some((name.clone(), Arc::clone(stored))),
                Slot::Asleep { .. } => None,
            });
            loaded.collect()
        };
        for (name, stored) in loaded {
            if stored.dirty() > 0 {
                if let Err(error) = stored.checkpoint() {
                    eprintln!("storaged: what is cached of {name} is not kept: {error}");
                }
            }
            let idle = now_unix_s().saturating_sub(stored.used_unix_s()) >= UNLOAD_AFTER_S;
            let mut slots = self.slots();
            // The slot's, and ours.
            if !everything && idle && Arc::strong_count(&stored) == 2 && stored.dirty() == 0 {
                let blocks = stored.blocks_there();
                self.loaded.fetch_sub(blocks, SeqCst);
                self.asleep.fetch_add(blocks, SeqCst);
                slots.insert(name, Slot::Asleep { blocks, used_unix_s: stored.used_unix_s() });
            }
        }
    }

    /// Nobody needs *name* any more.
    pub(super) fn remove(&self, name: &LayerName) {
        let mut slots = self.slots();
        let removed = match slots.remove(name) {
            Some(Slot::Loaded(stored)) => stored.retire(),
            Some(Slot::Asleep { blocks, .. }) => {
                self.asleep.fetch_sub(blocks, SeqCst);
                remove_files(&self.directory(name))
            }
            None => remove_files(&self.directory(name)),
        };
        if let Err(error) = removed {
            eprintln!("storaged: what is cached of {name} stays: {error}");
        }
    }

    /// What *name* takes here, in bytes.
    pub(super) fn bytes(&self, name: &LayerName) -> u64 {
        BLOCK_BYTES
            * match self.slots().get(name) {
                Some(Slot::Loaded(stored)) => stored.blocks_there(),
                Some(Slot::Asleep { blocks, .. }) => *blocks,
                None => 0,
            }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            bytes: self.used() * BLOCK_BYTES,
            limit_bytes: self.limit_blocks * BLOCK_BYTES,
            evicted_bytes: self.evicted.load(SeqCst) * BLOCK_BYTES,
            unkept_bytes: self.unkept.load(SeqCst) * BLOCK_BYTES,
        }
    }

    fn used(&self) -> u64 {
        self.loaded.load(SeqCst) + self.asleep.load(SeqCst)
    }

    fn directory(&self, name: &LayerName) -> PathBuf {
        self.place.join(name.as_str())
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<LayerName, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn head(directory: &Path) -> Option<Head> {
    let mut bytes = [0; Head::BYTES];
    File::open(directory.join("meta")).ok()?.read_exact(&mut bytes).ok()?;
    Head::decode(&bytes)
}

fn remove(directory: &Path) {
    if let Err(error) = remove_files(directory) {
        eprintln!("storaged: {} stays: {error}", directory.display());
    }
}
