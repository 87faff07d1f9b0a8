//! Frozen children of processes: made in a moment, written down at leisure.
//!
//! A child outlives the daemon, so there is a record of it before it does. What has the name of
//! our children and no record is left from a daemon that was killed in between, and is ended.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Node;
use crate::error::{Code, Context, Error, Result};
use crate::image::Parts;
use crate::image::captured::{self, Source};
use crate::image::memory::Memory;
use crate::image::record::{self, FrozenRecord, Key};
use crate::library::Held;
use crate::memory::freeze::{Frozen, Limits, Request, end_recorded, find_named, freeze};
use crate::memory::maps::{Backing, Image};
use crate::memory::process::Identity;
use crate::merger::MEMORY_DEPTH;
use crate::names::{Id, Owner};
use crate::protocol::{Compression, Stack};

/// For a VMM to be stopped and copied; it takes milliseconds where nothing is wrong.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);
/// For the memory of a child to be given back.
const THAW_TIMEOUT: Duration = Duration::from_secs(30);

/// A child, and what it maps.
pub(super) struct Child {
    /// Whose process it was made of.
    owner: Owner,
    frozen: Arc<Frozen>,
    state: Mutex<ChildState>,
    _held: Held,
}

struct ChildState {
    record: FrozenRecord,
    /// The memory that shows it, one for all who attach it.
    memory: Option<Arc<Memory>>,
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
        self.settle_memory(&memory)?;
        let image = self.mapped(&memory)?;
        let id = Id::random().during("no random bytes")?;
        let key = Key::Frozen(id);
        let stack = memory.stack().clone();
        let held = self.parts.library.hold(&stack.layers)?;
        let limits =
            Limits { most_anonymous_bytes: available_bytes()?.min(self.freeze_limit_bytes), timeout: FREEZE_TIMEOUT };
        let name = child_name(&self.parts);
        let began = Instant::now();
        let mut written = None;
        let made = freeze(&Request { pid, image: &image, name: &name, limits }, |child| {
            let record = to_record(owner, child, &image, stack)?;
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
        let state = Mutex::new(ChildState { record, memory: None });
        let child = Child { owner: owner.clone(), frozen: Arc::new(made?), state, _held: held };
        self.images_mut().frozen.insert(id, Arc::new(child));
        Ok(Froze { frozen: id, took, dirty_bytes })
    }

    /// What the child had changed, as a layer on what it maps: the same one however often it is asked for.
    ///
    /// # Errors
    /// `not_found` if there is no such child, `unavailable` if it is gone, `no_space` without room.
    pub fn capture_frozen(&self, id: Id, compression: Compression) -> Result<(Stack, Held, u64)> {
        let child = self.child(id)?;
        // One at a time, so that there is one layer.
        let mut state = child.state();
        let (stack, held, bytes) = self.captured(id, &child, &mut state, compression)?;
        if let Some(memory) = &state.memory {
            memory.go_over(stack.clone(), self.parts.library.hold(&stack.layers)?)?;
            let users = self.images().users.get(&memory.device()).cloned().unwrap_or_default();
            // Until this is written, the child's record says the same to the next daemon.
            self.keep_memory(memory, &users, true)?;
            state.memory = None;
        }
        if state.record.thawed {
            if let Err(error) = self.end(id, &child) {
                eprintln!("storaged: {error}");
            }
        }
        Ok((stack, held, bytes))
    }

    fn captured(
        &self,
        id: Id,
        child: &Child,
        state: &mut ChildState,
        compression: Compression,
    ) -> Result<(Stack, Held, u64)> {
        let record = &mut state.record;
        if let Some(stack) = &record.captured {
            let held = self.parts.library.hold(&stack.layers)?;
            return Ok((stack.clone(), held, record.captured_bytes));
        }
        let source = Source { process: child.frozen.process(), image: child.frozen.image(), stack: &record.stack };
        let (stack, held, captured) = captured::write(&self.parts, &source, compression)?;
        self.merger.ask(&stack, MEMORY_DEPTH);
        let bytes = captured.data_bytes + captured.zero_bytes;
        let with_layer = FrozenRecord { captured: Some(stack.clone()), captured_bytes: bytes, ..record.clone() };
        record::note(&self.parts.root, &Key::Frozen(id), &with_layer)?;
        *record = with_layer;
        Ok((stack, held, bytes))
    }

    /// Memory as the child has it, before anything is written down; the layer, once there is one.
    ///
    /// # Errors
    /// `not_found` if there is no such child; as for attaching memory.
    pub fn attach_frozen(&self, owner: &Owner, id: Id) -> Result<PathBuf> {
        let _turn = self.owners.lock(owner);
        self.has_no_memory(owner)?;
        let child = self.child(id)?;
        let mut state = child.state();
        if let Some(stack) = &state.record.captured {
            return self.attach_in_turn(owner, stack);
        }
        let memory = if let Some(memory) = &state.memory {
            Arc::clone(memory)
        } else {
            let device = self.parts.root.new_device()?;
            let memory = Memory::new(&self.parts, device, state.record.stack.clone())?;
            Arc::new(memory.on_child(id, Arc::clone(&child.frozen)))
        };
        let path = self.attach(owner, Arc::clone(&memory), true)?;
        state.memory = Some(memory);
        Ok(path)
    }

    /// Detaches memory that was made from a child.
    pub(super) fn detach_own(&self, owner: &Owner, memory: &Arc<Memory>) -> Result<()> {
        let child = memory.waits_for().and_then(|id| Some((id, self.images().frozen.get(&id).cloned()?)));
        let Some((id, child)) = child else {
            // It has gone over: nobody else attaches it any more.
            let _same = self.stacks.lock(memory.stack());
            return self.detach_from(owner, memory, true);
        };
        let mut state = child.state();
        self.detach_from(owner, memory, true)?;
        if !self.images().users.contains_key(&memory.device()) {
            state.memory = None;
            if state.record.thawed {
                self.end(id, &child)?;
            }
        }
        Ok(())
    }

    /// The pages of the child that *memory* waits for become a layer.
    pub(super) fn settle_memory(&self, memory: &Memory) -> Result<()> {
        match memory.waits_for() {
            Some(id) => self.capture_frozen(id, Compression::None).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Ends the child, or has it end when the memory that shows it has gone over.
    ///
    /// # Errors
    /// `not_found` if there is none; `unavailable` if it does not end in time: it can be tried again.
    pub fn thaw(&self, id: Id) -> Result<()> {
        let child = self.child(id)?;
        let mut state = child.state();
        if state.memory.is_some() {
            let record = FrozenRecord { thawed: true, ..state.record.clone() };
            record::note(&self.parts.root, &Key::Frozen(id), &record)?;
            state.record = record;
            return Ok(());
        }
        self.end(id, &child)
    }

    /// The same for all that were made of processes of *owner*.
    pub(super) fn thaw_of(&self, owner: &Owner) -> Result<()> {
        let its: Vec<Id> = {
            let images = self.images();
            images.frozen.iter().filter(|(_, child)| child.owner == *owner).map(|(id, _)| *id).collect()
        };
        for id in its {
            match self.thaw(id) {
                // Somebody else was faster.
                Err(error) if error.code == Code::NotFound => (),
                other => other?,
            }
        }
        Ok(())
    }

    fn end(&self, id: Id, child: &Child) -> Result<()> {
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

impl Child {
    fn state(&self) -> MutexGuard<'_, ChildState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of an earlier daemon that shows *child*.
pub(super) fn take_up(parts: &Arc<Parts>, child: &Child, id: Id, memory: Memory) -> Result<Arc<Memory>> {
    let mut state = child.state();
    let memory = Arc::new(memory.on_child(id, Arc::clone(&child.frozen)));
    match &state.record.captured {
        Some(stack) => memory.go_over(stack.clone(), parts.library.hold_unseen(&stack.layers))?,
        None => state.memory = Some(Arc::clone(&memory)),
    }
    Ok(memory)
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
    let owner = record.owner.clone();
    let state = Mutex::new(ChildState { record, memory: None });
    Ok(Child { owner, frozen: Arc::new(frozen), state, _held: held })
}

fn to_record(owner: &Owner, child: Identity, image: &Image, stack: Stack) -> Result<FrozenRecord> {
    let Backing::Inode { device, inode } = image.backing else {
        return Err(Error::new(Code::Bug, "an image without an inode"));
    };
    let Identity { pid, start_time } = child;
    Ok(FrozenRecord {
        owner: owner.clone(),
        pid,
        start_time,
        file_system: device,
        inode,
        stack,
        captured: None,
        captured_bytes: 0,
        thawed: false,
    })
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
