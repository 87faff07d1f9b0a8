//! All images of a node, and what may be asked about them.
//!
//! One operation of an owner at a time; operations of different owners wait for each other only for
//! as long as it takes to put something in a table. A table is never locked while a front end is called.

mod capturing;
mod freezing;
mod operations;
mod service;
mod showing;
#[cfg(test)]
mod tests;
mod touched;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::device::{Device, DeviceId, Kind};
use crate::directory::{Directory, Named};
use crate::error::{Code, Error, Result};
use crate::fuse::Front;
use crate::image::Parts;
use crate::image::disk::Disk;
use crate::image::memory::Memory;
use crate::image::record::{self, DiskRecord, Key, MemoryRecord};
use crate::keyed::Keyed;
use crate::library::Library;
use crate::merger::Merger;
use crate::names::{Id, LayerName, Owner};
use crate::protocol::Stack;
use crate::root::Root;
use crate::stack::Stacks;
use crate::ublk;
use crate::upper;
use crate::working_set::{Replay, WorkingSets};

pub use self::service::{Service, Session};

/// Layer files that are open at once.
const OPEN_LAYERS: usize = 4096;
/// Memory images that stay for a while when nobody has them attached.
const MAX_IDLE: usize = 32;

pub struct Node {
    merger: Merger,
    parts: Arc<Parts>,
    images: RwLock<Images>,
    owners: Keyed<Owner>,
    /// Attaching and detaching of one stack's memory.
    stacks: Keyed<Stack>,
    front: OnceLock<Front>,
    sets: Arc<WorkingSets>,
    replay: Arc<Replay>,
    /// How much memory a frozen child may come to need, in bytes, even if the host has more.
    freeze_limit_bytes: u64,
    /// What shows disks, if they are block devices.
    blocks: OnceLock<ublk::Front>,
}

#[derive(Default)]
struct Images {
    devices: BTreeMap<DeviceId, Image>,
    disks: BTreeMap<Owner, Arc<Disk>>,
    memories: HashMap<Stack, Arc<Memory>>,
    attached: BTreeMap<Owner, Arc<Memory>>,
    users: BTreeMap<DeviceId, BTreeSet<Owner>>,
    /// Owners whose record cannot be read. They can be removed, and nothing else.
    damaged: BTreeSet<Owner>,
    frozen: BTreeMap<Id, Arc<freezing::Child>>,
    /// Memory that nobody has attached now, used last at the end: the kernel still has its pages, and
    /// whoever attaches the same stack has them at once.
    idle: VecDeque<Arc<Memory>>,
}

impl Images {
    fn is_idle(&self, id: DeviceId) -> bool {
        self.idle.iter().any(|memory| memory.device() == id)
    }
}

enum Image {
    Disk(Arc<Disk>),
    Memory(Arc<Memory>),
}

impl Node {
    /// Takes the directory at *path*, and everything that an earlier daemon left in it.
    ///
    /// Images are opened when they are used: what is damaged fails then, and alone.
    ///
    /// # Errors
    /// As [`Root::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, crate::remote::Options::default())
    }

    /// The same, with *remote* for layers that lie elsewhere.
    ///
    /// # Errors
    /// As [`Root::open`].
    pub fn open_with(path: &Path, remote: crate::remote::Options) -> Result<Self> {
        let root = Arc::new(Root::open(path)?);
        if !root.same_boot() {
            upper::trim_all(&root)?;
        }
        let sets = Arc::new(WorkingSets::open(&root)?);
        let library = Library::new(&root, OPEN_LAYERS, remote)?;
        let parts = Arc::new(Parts { stacks: Stacks::new(&library), root, library });
        let images = load(&parts)?;
        if images.damaged.is_empty() {
            sweep(&parts, &images)?;
        }
        // What a damaged record needs is not known, so it needs everything.
        parts.library.hold_everything(!images.damaged.is_empty());
        parts.root.settle()?;
        Ok(Self {
            merger: Merger::new(&parts),
            parts,
            images: RwLock::new(images),
            owners: Keyed::default(),
            stacks: Keyed::default(),
            front: OnceLock::new(),
            sets,
            replay: Arc::default(),
            freeze_limit_bytes: u64::MAX,
            blocks: OnceLock::new(),
        })
    }

    /// A frozen child is refused if it could come to need more than so many bytes of memory.
    #[must_use]
    pub fn limit_freezing(self, limit_bytes: u64) -> Self {
        Self { freeze_limit_bytes: limit_bytes, ..self }
    }

    /// From now on images are seen through *front*, which asks this node for them.
    pub fn show_through(&self, front: Front) {
        // There is one: the first stays.
        let _ = self.front.set(front);
    }

    pub fn front(&self) -> Option<&Front> {
        self.front.get()
    }

    /// Whether somebody has been given a path, and has not said that it is not used any more.
    pub fn in_use(&self) -> bool {
        let images = self.images();
        !images.attached.is_empty() || images.disks.values().any(|disk| disk.is_open())
    }

    fn images(&self) -> RwLockReadGuard<'_, Images> {
        self.images.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn images_mut(&self) -> RwLockWriteGuard<'_, Images> {
        self.images.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, kind: Kind, name: &str) -> PathBuf {
        match self.front.get() {
            Some(front) => front.path(kind, name),
            None => self.parts.root.path().join("mount").join(name),
        }
    }

    fn hide(&self, kind: Kind, name: &str, id: DeviceId) {
        if let Some(front) = self.front.get() {
            front.removed(kind, name, id);
        }
    }
}

/// Every image of which there is a record.
fn load(parts: &Arc<Parts>) -> Result<Images> {
    let root = &parts.root;
    let mut images = Images::default();
    let mut highest = 0;
    let keys = record::list(root)?;
    if root.same_boot() {
        images.frozen = freezing::load(parts, &keys)?;
    }
    for key in keys {
        let loaded = match &key {
            Key::Disk(owner) => load_disk(parts, &mut images, owner, &key),
            // Nobody maps anything any more after another boot.
            Key::Memory(_) | Key::Frozen(_) if !root.same_boot() => record::remove(root, &key).map(|()| 0),
            Key::Memory(device) => load_memory(parts, &mut images, *device, &key),
            Key::Frozen(_) => Ok(0),
        };
        match loaded {
            Ok(device) => highest = highest.max(device),
            Err(error) if error.code == Code::Corrupt => {
                eprintln!("storaged: {error}");
                if let Key::Disk(owner) = key {
                    images.damaged.insert(owner);
                }
            }
            Err(error) => return Err(error),
        }
    }
    root.skip_devices(highest)?;
    Ok(images)
}

fn load_disk(parts: &Arc<Parts>, images: &mut Images, owner: &Owner, key: &Key) -> Result<u64> {
    let record: DiskRecord = record::read(&parts.root, key)?;
    let device = free_device(images, record.device)?;
    let disk = Arc::new(Disk::of_record(parts, owner.clone(), device, record));
    images.devices.insert(device, Image::Disk(Arc::clone(&disk)));
    images.disks.insert(owner.clone(), disk);
    Ok(device.0.get())
}

fn load_memory(parts: &Arc<Parts>, images: &mut Images, number: u64, key: &Key) -> Result<u64> {
    let record: MemoryRecord = record::read(&parts.root, key)?;
    let device = free_device(images, record.device)?;
    let twice = (!record.own && images.memories.contains_key(&record.stack))
        || record.owners.iter().any(|owner| images.attached.contains_key(owner));
    if twice || record.device != number || record.owners.is_empty() {
        return Err(Error::corrupt(format!("the record of memory {number} contradicts others")));
    }
    let memory = Memory::of_record(parts, device, record.stack.clone());
    let memory = match record.frozen {
        None => Arc::new(memory),
        Some(id) => match images.frozen.get(&id) {
            Some(child) => freezing::take_up(parts, child, id, memory)?,
            None => return Err(Error::corrupt(format!("memory {number} was made from frozen {id}, which is gone"))),
        },
    };
    images.devices.insert(device, Image::Memory(Arc::clone(&memory)));
    for owner in &record.owners {
        images.attached.insert(owner.clone(), Arc::clone(&memory));
    }
    images.users.insert(device, record.owners.into_iter().collect());
    if !record.own {
        images.memories.insert(record.stack, memory);
    }
    Ok(device.0.get())
}

fn free_device(images: &Images, number: u64) -> Result<DeviceId> {
    let id = NonZeroU64::new(number).map(DeviceId);
    id.filter(|id| !images.devices.contains_key(id))
        .ok_or_else(|| Error::corrupt(format!("a record has device {number}, as another one")))
}

/// Removes uppers that no disk has: made or left by an operation that was cut short.
fn sweep(parts: &Parts, images: &Images) -> Result<()> {
    let known: BTreeSet<_> = images.disks.values().flat_map(|disk| disk.uppers()).collect();
    for id in upper::list(&parts.root)? {
        if !known.contains(&id) {
            upper::remove(&parts.root, id)?;
        }
    }
    Ok(())
}

impl Image {
    fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::Disk(disk) => Arc::clone(disk) as Arc<dyn Device>,
            Self::Memory(memory) => Arc::clone(memory) as Arc<dyn Device>,
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Disk(_) => Kind::Disk,
            Self::Memory(_) => Kind::Memory,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Disk(disk) => disk.owner().to_string(),
            Self::Memory(memory) => memory_name(memory.device()),
        }
    }
}

/// What the memory of *device* is called in its folder.
fn memory_name(device: DeviceId) -> String {
    device.0.to_string()
}

impl Directory for Node {
    fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        let images = self.images();
        images.devices.get(&id).filter(|_| !images.is_idle(id)).map(Image::device)
    }

    fn find(&self, kind: Kind, name: &str) -> Option<DeviceId> {
        let images = self.images();
        match kind {
            Kind::Disk => images.disks.get(&Owner::parse(name).ok()?).map(|disk| disk.device()),
            Kind::Memory => {
                let id = DeviceId(name.parse().ok()?);
                let found = images.devices.get(&id).filter(|image| image.kind() == kind && image.name() == name);
                found.filter(|_| !images.is_idle(id)).map(|_| id)
            }
        }
    }

    fn list(&self, kind: Kind, after: Option<DeviceId>, limit: usize) -> Vec<Named> {
        let images = self.images();
        let later = images.devices.iter().filter(|(id, image)| Some(**id) > after && image.kind() == kind);
        let later = later.filter(|(id, _)| !images.is_idle(**id));
        later.take(limit).map(|(id, image)| Named { id: *id, name: image.name() }).collect()
    }
}

/// A layer that a call made or returns, by name.
fn last(stack: &Stack) -> Option<&LayerName> {
    stack.layers.last()
}
