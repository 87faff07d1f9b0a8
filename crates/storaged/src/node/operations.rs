//! What a caller can have done to images. Each either does all of it, or leaves things as they were.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Image, MAX_IDLE, Node, memory_name};
use crate::device::{Device, Kind};
use crate::error::{Code, Error, Result};
use crate::image::disk::Disk;
use crate::image::memory::Memory;
use crate::image::record::{self, Key, MemoryRecord};
use crate::library::Held;
use crate::merger::{DISK_DEPTH, MEMORY_DEPTH};
use crate::names::{LayerName, Owner};
use crate::protocol::{Stack, StackKind};
use crate::transfer;

/// What an owner has.
pub struct Owned {
    pub owner: Owner,
    pub disk: Option<Stack>,
    pub memory: Option<Stack>,
    /// Its record cannot be read: it can only be removed.
    pub damaged: bool,
}

impl Node {
    /// # Errors
    /// `already_exists` if *owner* has a disk, and as for opening the stack.
    pub fn create_disk(&self, owner: &Owner, stack: Stack) -> Result<PathBuf> {
        let _turn = self.owners.lock(owner);
        {
            let images = self.images();
            if images.disks.contains_key(owner) || images.damaged.contains(owner) {
                return Err(Error::new(Code::AlreadyExists, format!("{owner} has a disk")));
            }
        }
        let disk = Arc::new(Disk::create(&self.parts, owner.clone(), stack)?);
        let mut images = self.images_mut();
        images.devices.insert(disk.device(), Image::Disk(Arc::clone(&disk)));
        images.disks.insert(owner.clone(), Arc::clone(&disk));
        drop(images);
        self.show_disk(&disk).inspect_err(|_| {
            if let Err(error) = self.forget_disk(owner, &disk) {
                eprintln!("storaged: the disk of {owner} is left over: {error}");
            }
        })
    }

    /// # Errors
    /// `not_found` if *owner* has none, `corrupt` if it cannot be used any more.
    pub fn open_disk(&self, owner: &Owner) -> Result<PathBuf> {
        let _turn = self.owners.lock(owner);
        let disk = self.disk(owner)?;
        disk.open()?;
        self.merger.ask(&disk.stack(), DISK_DEPTH);
        self.show_disk(&disk)
    }

    /// # Errors
    /// As [`Disk::resize`].
    pub fn resize_disk(&self, owner: &Owner, size_bytes: u64) -> Result<PathBuf> {
        let _turn = self.owners.lock(owner);
        let disk = self.disk(owner)?;
        self.may_grow(&disk)?;
        disk.resize(size_bytes)?;
        self.has_grown(&disk)?;
        self.show_disk(&disk)
    }

    /// # Errors
    /// As [`Disk::seal`].
    pub fn seal_disk(&self, owner: &Owner) -> Result<(Stack, Held)> {
        let _turn = self.owners.lock(owner);
        self.disk(owner)?.seal()
    }

    fn disk(&self, owner: &Owner) -> Result<Arc<Disk>> {
        let images = self.images();
        if images.damaged.contains(owner) {
            return Err(Error::corrupt(format!("the record of {owner}'s disk is damaged")).lost());
        }
        let disk = images.disks.get(owner).cloned();
        disk.ok_or_else(|| Error::new(Code::NotFound, format!("{owner} has no disk")))
    }

    /// # Errors
    /// `already_exists` if *owner* has memory attached, and as for opening the stack.
    pub fn attach_memory(&self, owner: &Owner, stack: &Stack) -> Result<PathBuf> {
        let _turn = self.owners.lock(owner);
        self.has_no_memory(owner)?;
        self.attach_in_turn(owner, stack)
    }

    pub(super) fn has_no_memory(&self, owner: &Owner) -> Result<()> {
        if self.images().attached.contains_key(owner) {
            return Err(Error::new(Code::AlreadyExists, format!("{owner} has memory attached")));
        }
        Ok(())
    }

    pub(super) fn attach_in_turn(&self, owner: &Owner, stack: &Stack) -> Result<PathBuf> {
        let _same = self.stacks.lock(stack);
        let known = self.images().memories.get(stack).cloned();
        let memory = if let Some(memory) = known {
            memory
        } else {
            Arc::new(Memory::new(&self.parts, self.parts.root.new_device()?, stack.clone())?)
        };
        let first = self.images().users.get(&memory.device()).is_none_or(BTreeSet::is_empty);
        let was_idle = self.take_from_idle(&memory);
        let attached =
            if was_idle { memory.wake() } else { Ok(()) }.and_then(|()| self.attach(owner, Arc::clone(&memory), false));
        if was_idle && attached.is_err() {
            self.forget_memory(&memory);
        }
        let path = attached?;
        self.merger.ask(stack, MEMORY_DEPTH);
        if first {
            self.memory_started(&memory, &path, was_idle);
        }
        Ok(path)
    }

    /// True for the one who took it.
    fn take_from_idle(&self, memory: &Arc<Memory>) -> bool {
        let mut images = self.images_mut();
        let before = images.idle.len();
        images.idle.retain(|other| !Arc::ptr_eq(other, memory));
        images.idle.len() < before
    }

    /// Nobody has *memory* attached, and nobody will.
    fn forget_memory(&self, memory: &Arc<Memory>) {
        let device = memory.device();
        let mut images = self.images_mut();
        if images.memories.get(memory.stack()).is_some_and(|shared| Arc::ptr_eq(shared, memory)) {
            images.memories.remove(memory.stack());
        }
        images.devices.remove(&device);
        drop(images);
        self.hide(Kind::Memory, &memory_name(device), device);
    }

    /// Puts *owner* to those who have *memory*; nobody else does so with it meanwhile.
    pub(super) fn attach(&self, owner: &Owner, memory: Arc<Memory>, own: bool) -> Result<PathBuf> {
        memory.open()?;
        let device = memory.device();
        let mut users = self.images().users.get(&device).cloned().unwrap_or_default();
        users.insert(owner.clone());
        self.keep_memory(&memory, &users, own)?;
        let mut images = self.images_mut();
        images.devices.entry(device).or_insert_with(|| Image::Memory(Arc::clone(&memory)));
        if !own {
            images.memories.insert(memory.stack().clone(), Arc::clone(&memory));
        }
        images.users.insert(device, users);
        images.attached.insert(owner.clone(), memory);
        drop(images);
        Ok(self.path(Kind::Memory, &memory_name(device)))
    }

    /// # Errors
    /// What the file system says; the memory is then attached as before.
    pub fn detach(&self, owner: &Owner) -> Result<()> {
        let _turn = self.owners.lock(owner);
        self.detach_in_turn(owner)
    }

    fn detach_in_turn(&self, owner: &Owner) -> Result<()> {
        let (disk, memory) = {
            let images = self.images();
            (images.disks.get(owner).cloned(), images.attached.get(owner).cloned())
        };
        if let Some(memory) = memory {
            self.detach_memory(owner, &memory)?;
        }
        if let Some(disk) = disk {
            self.hide_disk(&disk)?;
            disk.close();
        }
        Ok(())
    }

    fn detach_memory(&self, owner: &Owner, memory: &Arc<Memory>) -> Result<()> {
        let own = self.images().memories.get(memory.stack()).is_none_or(|shared| !Arc::ptr_eq(shared, memory));
        if own {
            return self.detach_own(owner, memory);
        }
        let _same = self.stacks.lock(memory.stack());
        self.detach_from(owner, memory, false)
    }

    /// Takes *owner* from those who have *memory*; nobody else does so with it meanwhile.
    pub(super) fn detach_from(&self, owner: &Owner, memory: &Arc<Memory>, own: bool) -> Result<()> {
        let device = memory.device();
        let mut users = self.images().users.get(&device).cloned().unwrap_or_default();
        users.remove(owner);
        self.keep_memory(memory, &users, own)?;
        if users.is_empty() {
            self.memory_ended(memory);
        }
        let mut images = self.images_mut();
        images.attached.remove(owner);
        if !users.is_empty() {
            images.users.insert(device, users);
            return Ok(());
        }
        images.users.remove(&device);
        if own {
            drop(images);
            self.forget_memory(memory);
            return Ok(());
        }
        images.idle.push_back(Arc::clone(memory));
        memory.rest();
        let oldest = if images.idle.len() > MAX_IDLE { images.idle.pop_front() } else { None };
        drop(images);
        if let Some(oldest) = oldest {
            self.forget_memory(&oldest);
        }
        Ok(())
    }

    /// Images that show one of *layers*, which have gone, are of no use.
    pub fn forget_layers(&self, layers: &[LayerName]) {
        let gone: Vec<_> = {
            let mut images = self.images_mut();
            let (gone, kept) = std::mem::take(&mut images.idle)
                .into_iter()
                .partition(|memory| memory.stack().layers.iter().any(|layer| layers.contains(layer)));
            images.idle = kept;
            Vec::from(gone)
        };
        for memory in &gone {
            self.forget_memory(memory);
        }
        self.parts.library.merges().forget(layers);
    }

    /// The record of *memory*, which is none when nobody uses it. For this boot only, so not synced.
    pub(super) fn keep_memory(&self, memory: &Memory, users: &BTreeSet<Owner>, own: bool) -> Result<()> {
        let root = &self.parts.root;
        let device = memory.device().0.get();
        if users.is_empty() {
            return record::forget(root, &Key::Memory(device));
        }
        let owners = users.iter().cloned().collect();
        let (stack, frozen) = (memory.stack().clone(), memory.waits_for());
        record::note(root, &Key::Memory(device), &MemoryRecord { device, stack, owners, own, frozen })
    }

    /// # Errors
    /// What the file system says; it can be tried again.
    pub fn remove(&self, owner: &Owner) -> Result<()> {
        let _turn = self.owners.lock(owner);
        self.detach_in_turn(owner)?;
        self.thaw_of(owner)?;
        let disk = self.images().disks.get(owner).cloned();
        let damaged = self.images().damaged.contains(owner);
        if let Some(disk) = disk {
            self.forget_disk(owner, &disk)?;
        } else if damaged {
            record::remove(&self.parts.root, &Key::Disk(owner.clone()))?;
            let mut images = self.images_mut();
            images.damaged.remove(owner);
            self.parts.library.hold_everything(!images.damaged.is_empty());
        }
        Ok(())
    }

    fn forget_disk(&self, owner: &Owner, disk: &Disk) -> Result<()> {
        disk.remove()?;
        let mut images = self.images_mut();
        images.disks.remove(owner);
        images.devices.remove(&disk.device());
        drop(images);
        self.hide(Kind::Disk, owner.as_str(), disk.device());
        Ok(())
    }

    /// Everyone who has anything.
    pub fn owned(&self) -> Vec<Owned> {
        let images = self.images();
        let everyone: BTreeSet<&Owner> =
            images.disks.keys().chain(images.attached.keys()).chain(&images.damaged).collect();
        // Not under the lock: a disk may be in the middle of an operation.
        let found: Vec<_> = everyone
            .into_iter()
            .map(|owner| {
                let disk = images.disks.get(owner).cloned();
                let memory = images.attached.get(owner).map(|memory| memory.stack().clone());
                (owner.clone(), disk, memory, images.damaged.contains(owner))
            })
            .collect();
        drop(images);
        found
            .into_iter()
            .map(|(owner, disk, memory, damaged)| {
                let disk = disk.map(|disk| disk.stack());
                Owned { owner, disk, memory, damaged }
            })
            .collect()
    }

    /// # Errors
    /// As [`transfer::flatten`]; `invalid` for memory of parts of pages.
    pub fn flatten(&self, kind: StackKind, stack: &Stack) -> Result<(Stack, Held)> {
        if kind == StackKind::Memory {
            crate::image::memory::check(stack)?;
        }
        transfer::flatten(&self.parts, stack)
    }

    /// # Errors
    /// As [`transfer::import`].
    pub fn import(&self, source: &Path, size_bytes: u64) -> Result<(Stack, Held)> {
        transfer::import(&self.parts, source, size_bytes)
    }

    /// Makes durable what is cached of remote layers, so that the next daemon need not fetch it.
    pub fn keep_cached(&self) {
        self.parts.library.remotes().stop();
    }

    /// Makes everything durable that was written to disks that are open.
    pub fn flush_all(&self) {
        let disks: Vec<_> = self.images().disks.values().cloned().collect();
        for disk in disks.iter().filter(|disk| disk.is_open()) {
            if let Err(error) = disk.flush() {
                eprintln!("storaged: the disk of {}: {error}", disk.owner());
            }
        }
    }
}
