//! Frozen children of processes: made in a moment, written down at leisure.
//!
//! A child outlives the daemon, so there is a record of it before it does. What has the name of
//! our children and no record is left from a daemon that was killed in between, and is ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Node;
use crate::error::{Code, Context, Error, Result};
use crate::image::Parts;
use crate::image::captured::{self, Source};
use crate::image::record::{self, FrozenRecord, Key};
use crate::library::Held;
use crate::memory::freeze::{Frozen, Limits, Request, end_recorded, find_named, freeze};
use crate::memory::maps::{Backing, Image};
use crate::memory::process::Identity;
use crate::names::{Id, Owner};
use crate::protocol::{Compression, Stack};

/// For a VMM to be stopped and copied; it takes milliseconds where nothing is wrong.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);
/// For the memory of a child to be given back.
const THAW_TIMEOUT: Duration = Duration::from_secs(30);

/// A child, and what it maps.
pub(super) struct Child {
    frozen: Frozen,
    record: Mutex<FrozenRecord>,
    _held: Held,
}

/// What freezing came to.
pub struct Froze {
    pub frozen: Id,
    pub took: Duration,
    pub dirty_bytes: u64,
}

impl Node {
    /// A frozen child of the stopped process *pid*, which maps the memory that *owner* has attached.
    ///
    /// # Errors
    /// As [`freeze`]; `not_found` if nothing is attached. The process is as it was.
    pub fn freeze(&self, owner: &Owner, pid: i32) -> Result<Froze> {
        let _turn = self.owners.lock(owner);
        let memory = self.attached(owner)?;
        let image = self.mapped(&memory)?;
        let id = Id::random().during("no random bytes")?;
        let key = Key::Frozen(id);
        let stack = memory.stack().clone();
        let held = self.parts.library.hold(&stack.layers)?;
        let limits = Limits { most_anonymous_bytes: available_bytes()?, timeout: FREEZE_TIMEOUT };
        let name = child_name(&self.parts);
        let began = Instant::now();
        let mut written = None;
        let made = freeze(&Request { pid, image: &image, name: &name, limits }, |child| {
            let record = to_record(child, &image, stack)?;
            record::note(&self.parts.root, &key, &record)?;
            written = Some(record);
            Ok(())
        });
        let took = began.elapsed();
        let (Ok(frozen), Some(record)) = (made.as_ref(), written) else {
            let _ = record::forget(&self.parts.root, &key);
            return Err(made.err().unwrap_or_else(|| Error::new(Code::Bug, "a child without a record")));
        };
        let dirty_bytes = frozen.dirty_bytes()?;
        let child = Child { frozen: made?, record: Mutex::new(record), _held: held };
        self.images_mut().frozen.insert(id, Arc::new(child));
        Ok(Froze { frozen: id, took, dirty_bytes })
    }

    /// What the child had changed, as a layer on what it maps: the same one however often it is asked for.
    ///
    /// # Errors
    /// `not_found` if there is no such child, `unavailable` if it is gone, `exhausted` without room.
    pub fn capture_frozen(&self, id: Id, compression: Compression) -> Result<(Stack, Held, u64)> {
        let child = self.child(id)?;
        // One at a time, so that there is one layer.
        let mut record = child.record.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stack) = &record.captured {
            let held = self.parts.library.hold(&stack.layers)?;
            return Ok((stack.clone(), held, record.captured_bytes));
        }
        let source = Source { process: child.frozen.process(), image: child.frozen.image(), stack: &record.stack };
        let (stack, held, captured) = captured::write(&self.parts, &source, compression)?;
        let bytes = captured.data_bytes + captured.zero_bytes;
        let with_layer = FrozenRecord { captured: Some(stack.clone()), captured_bytes: bytes, ..record.clone() };
        record::note(&self.parts.root, &Key::Frozen(id), &with_layer)?;
        *record = with_layer;
        Ok((stack, held, bytes))
    }

    /// Ends the child.
    ///
    /// # Errors
    /// `not_found` if there is none; `unavailable` if it does not end in time: it can be tried again.
    pub fn thaw(&self, id: Id) -> Result<()> {
        let child = self.child(id)?;
        end_recorded(child.frozen.identity(), THAW_TIMEOUT)?;
        record::forget(&self.parts.root, &Key::Frozen(id))?;
        self.images_mut().frozen.remove(&id);
        Ok(())
    }

    fn child(&self, id: Id) -> Result<Arc<Child>> {
        let child = self.images().frozen.get(&id).cloned();
        child.ok_or_else(|| Error::new(Code::NotFound, format!("there is no frozen {id}")))
    }
}

/// The children that an earlier daemon left. Those that are of no use to anybody are ended.
///
/// # Errors
/// What the file system says.
pub(super) fn load(parts: &Arc<Parts>, keys: &[Key]) -> Result<BTreeMap<Id, Arc<Child>>> {
    let mut children = BTreeMap::new();
    for key in keys {
        let Key::Frozen(id) = key else { continue };
        match adopt(parts, key) {
            Ok(child) => {
                children.insert(*id, Arc::new(child));
            }
            // Gone, or damaged; a child without a record is ended below.
            Err(error) => {
                eprintln!("storaged: frozen {id}: {error}");
                record::forget(&parts.root, key)?;
            }
        }
    }
    let known: Vec<Identity> = children.values().map(|child| child.frozen.identity()).collect();
    for orphan in find_named(&child_name(parts)).unwrap_or_default() {
        if !known.contains(&orphan) {
            if let Err(error) = end_recorded(orphan, THAW_TIMEOUT) {
                eprintln!("storaged: {error}");
            }
        }
    }
    Ok(children)
}

fn adopt(parts: &Arc<Parts>, key: &Key) -> Result<Child> {
    let record: FrozenRecord = record::read(&parts.root, key)?;
    let backing = Backing::Inode { device: record.file_system, inode: record.inode };
    let image = Image { backing, size_bytes: record.stack.size_bytes };
    let frozen = Frozen::adopt(Identity { pid: record.pid, start_time: record.start_time }, &image)?;
    let held = parts.library.hold_unseen(&record.stack.layers);
    Ok(Child { frozen, record: Mutex::new(record), _held: held })
}

fn to_record(child: Identity, image: &Image, stack: Stack) -> Result<FrozenRecord> {
    let Backing::Inode { device, inode } = image.backing else {
        return Err(Error::new(Code::Bug, "an image without an inode"));
    };
    let Identity { pid, start_time } = child;
    Ok(FrozenRecord { pid, start_time, file_system: device, inode, stack, captured: None, captured_bytes: 0 })
}

/// What children of this directory's daemon are called, and no other's.
fn child_name(parts: &Parts) -> String {
    format!("frz-{:08x}", crc32c::crc32c(parts.root.path().as_os_str().as_encoded_bytes()))
}

/// Memory that the host has left: if guest and child part in every page, that much may be needed.
fn available_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").during("cannot tell how much memory there is")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let kib = kib.and_then(|kib| kib.parse::<u64>().ok());
    Ok(kib.ok_or_else(|| Error::new(Code::Unsupported, "the host does not tell how much memory it has"))? << 10)
}
