//! A disk: a stack, and an upper that one guest writes to.
//!
//! Whoever writes holds the state for reading, so that a seal, which holds it for writing, comes between
//! writes and never into one. Readers only take a copy of what to read from: they wait
//! for nobody, and what they read is what the disk held at some moment of their call.

mod seal;
mod top;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use layers::SECTOR;
use rustix::io::Errno;

use self::top::Top;
use super::record::{self, DiskRecord, Key};
use super::{Parts, check, unreadable};
use crate::device::{Answer, Device, DeviceId, Kind};
use crate::error::{Code, Context, Error, Result};
use crate::layer::MAX_SIZE_BYTES;
use crate::library::Held;
use crate::names::{Id, Owner};
use crate::protocol::Stack;
use crate::upper::{self, Upper};

pub struct Disk {
    parts: Arc<Parts>,
    owner: Owner,
    device: DeviceId,
    size_bytes: AtomicU64,
    /// Held by the one operation at a time.
    kept: Mutex<Kept>,
    state: RwLock<State>,
}

struct Kept {
    record: DiskRecord,
    held: Held,
}

enum State {
    /// Nobody has used it yet, or any more.
    Closed,
    Open(Top),
    Removed,
}

impl Disk {
    /// A new disk, durable.
    ///
    /// # Errors
    /// `not_found` for a layer that is not there, `corrupt` for one that is damaged, `invalid` for a stack that
    /// cannot be, `no_space` without room.
    pub fn create(parts: &Arc<Parts>, owner: Owner, stack: Stack) -> Result<Self> {
        let held = parts.library.hold(&stack.layers)?;
        let below = Arc::new(parts.stacks.open(&stack)?);
        let device = parts.root.new_device()?;
        let id = Id::random().during("no random bytes")?;
        let upper = Arc::new(Upper::create(&parts.root, id, stack.size_bytes)?);
        let record = DiskRecord { device: device.0.get(), stack, upper: id, next: None };
        if let Err(error) = record::write(&parts.root, &Key::Disk(owner.clone()), &record) {
            let _ = record::remove(&parts.root, &Key::Disk(owner));
            let _ = upper::remove(&parts.root, id);
            return Err(error);
        }
        let state = State::Open(Top { upper, sealing: None, below });
        Ok(Self::assemble(parts, owner, device, Kept { record, held }, state))
    }

    /// The disk of a record. It is opened when it is used.
    pub fn of_record(parts: &Arc<Parts>, owner: Owner, device: DeviceId, record: DiskRecord) -> Self {
        let held = parts.library.hold_unseen(&record.stack.layers);
        Self::assemble(parts, owner, device, Kept { record, held }, State::Closed)
    }

    fn assemble(parts: &Arc<Parts>, owner: Owner, device: DeviceId, kept: Kept, state: State) -> Self {
        let size_bytes = AtomicU64::new(kept.record.stack.size_bytes);
        let (parts, kept, state) = (Arc::clone(parts), Mutex::new(kept), RwLock::new(state));
        Self { parts, owner, device, size_bytes, kept, state }
    }

    pub fn device(&self) -> DeviceId {
        self.device
    }

    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The immutable part.
    pub fn stack(&self) -> Stack {
        self.kept().record.stack.clone()
    }

    /// The uppers that belong to it.
    pub fn uppers(&self) -> Vec<Id> {
        let kept = self.kept();
        [Some(kept.record.upper), kept.record.next].into_iter().flatten().collect()
    }

    /// Makes sure that it can be used.
    ///
    /// # Errors
    /// `corrupt` when any part of it is damaged, `not_found` when it was removed.
    pub fn open(&self) -> Result<()> {
        self.top(&mut self.kept()).map(|_| ())
    }

    /// Whether it has been used and not closed since.
    pub fn is_open(&self) -> bool {
        matches!(*self.state.read().unwrap_or_else(PoisonError::into_inner), State::Open(_))
    }

    /// Gives back what it takes to serve it; it is opened again when it is used.
    pub fn close(&self) {
        // Not while an operation relies on what is shown.
        let _kept = self.kept();
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Open(_)) {
            *state = State::Closed;
        }
    }

    /// Forgets the disk and its upper, durably.
    ///
    /// # Errors
    /// What the file system says; it can be tried again.
    pub fn remove(&self) -> Result<()> {
        let mut kept = self.kept();
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = State::Removed;
        record::remove(&self.parts.root, &Key::Disk(self.owner.clone()))?;
        for id in [Some(kept.record.upper), kept.record.next].into_iter().flatten() {
            upper::remove(&self.parts.root, id)?;
        }
        kept.held = self.parts.library.hold_unseen(&[]);
        Ok(())
    }

    /// Grows the disk; what is new is zeros.
    ///
    /// # Errors
    /// `invalid` for a size that is smaller or cannot be.
    pub fn resize(&self, size_bytes: u64) -> Result<()> {
        let mut kept = self.kept();
        let top = self.top(&mut kept)?;
        let now = kept.record.stack.size_bytes;
        if size_bytes < now || size_bytes > MAX_SIZE_BYTES || size_bytes % SECTOR != 0 {
            return Err(Error::invalid(format!("a disk of {now} bytes cannot become one of {size_bytes}")));
        }
        let mut record = kept.record.clone();
        record.stack.size_bytes = size_bytes;
        self.keep(&record)?;
        kept.record = record;
        let below = Arc::new(top.below.resized(size_bytes));
        self.show(Top { below, ..top });
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    /// Opens what the record says, unless it is open.
    fn top(&self, kept: &mut Kept) -> Result<Top> {
        match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Open(top) if kept.record.next.is_none() => return Ok(top.clone()),
            State::Removed => return Err(Error::new(Code::NotFound, format!("{} has no disk", self.owner))),
            _ => (),
        }
        if self.state_is_closed() {
            self.recover(kept)?;
            let record = &kept.record;
            let below = Arc::new(self.parts.stacks.open(&record.stack).map_err(missing_is_corrupt)?);
            let upper = Arc::new(Upper::open(&self.parts.root, record.upper, record.stack.size_bytes)?);
            self.show(Top { upper, sealing: None, below });
        } else {
            self.settle(kept)?;
        }
        match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Open(top) => Ok(top.clone()),
            _ => Err(Error::new(Code::Conflict, format!("the disk of {} was closed meanwhile", self.owner))),
        }
    }

    fn keep(&self, record: &DiskRecord) -> Result<()> {
        record::write(&self.parts.root, &Key::Disk(self.owner.clone()), record)
    }

    fn show(&self, top: Top) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, State::Removed) {
            *state = State::Open(top);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_is_closed(&self) -> bool {
        matches!(*self.state.read().unwrap_or_else(PoisonError::into_inner), State::Closed)
    }

    /// Lets the caller have what the disk shows, and keeps a seal out until it is done.
    fn with<T>(&self, use_it: impl FnOnce(&Top) -> io::Result<T>) -> io::Result<T> {
        loop {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            match &*state {
                State::Open(top) => return use_it(top),
                State::Removed => return Err(Errno::NODEV.into()),
                State::Closed => drop(state),
            }
            self.open().map_err(|error| {
                eprintln!("storaged: the disk of {}: {error}", self.owner);
                io::Error::from(Errno::IO)
            })?;
        }
    }

    /// What to read from, now.
    fn snapshot(&self) -> io::Result<Top> {
        self.with(|top| Ok(top.clone()))
    }

    fn alone<T>(&self, use_it: impl FnOnce(&Top) -> io::Result<T>) -> io::Result<T> {
        self.open().map_err(|_| io::Error::from(Errno::IO))?;
        match &*self.state.write().unwrap_or_else(PoisonError::into_inner) {
            State::Open(top) => use_it(top),
            _ => Err(Errno::NODEV.into()),
        }
    }

    fn failed(&self, error: io::Error) -> io::Error {
        unreadable(&format_args!("the disk of {}", self.owner), error)
    }

    fn checked(&self, offset: u64, length: u64) -> io::Result<()> {
        check(self.size_bytes(), offset, length)
    }
}

/// For what a record of ours says is there.
fn missing_is_corrupt(error: Error) -> Error {
    match error.code {
        Code::NotFound => Error { code: Code::Corrupt, ..error },
        _ => error,
    }
}

fn is_whole(offset: u64, length: u64) -> bool {
    offset % SECTOR == 0 && length % SECTOR == 0
}

impl Device for Disk {
    fn kind(&self) -> Kind {
        Kind::Disk
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.checked(offset, buf.len() as u64)?;
        self.snapshot()?.read(buf, offset).map_err(|e| self.failed(e))
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        self.checked(offset, buf.len() as u64)?;
        // Waits for no seal either.
        let Ok(state) = self.state.try_read() else { return Ok(Answer::WouldWait) };
        let State::Open(top) = &*state else { return Ok(Answer::WouldWait) };
        let top = top.clone();
        drop(state);
        top.read_now(buf, offset).map_err(|e| self.failed(e))
    }

    fn write(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        self.checked(offset, buf.len() as u64)?;
        let on_disk = if is_whole(offset, buf.len() as u64) {
            self.with(|top| top.upper.write(buf, offset / SECTOR, durable))?
        } else {
            self.alone(|top| top.write_bytes(buf, offset, durable))?
        };
        // Outside of the lock, so that no seal has to wait for it.
        if durable && !on_disk { self.flush() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.checked(offset, length)?;
        let (start, end) = (offset.div_ceil(SECTOR), (offset + length) / SECTOR);
        if !is_whole(offset, length) {
            let zeros = vec![0; usize::try_from(SECTOR).map_err(|_| io::ErrorKind::InvalidInput)?];
            let head = (offset, (start * SECTOR).min(offset + length));
            let tail = ((end * SECTOR).max(head.1), offset + length);
            for (from, to) in [head, tail] {
                if from < to {
                    let part = &zeros[..usize::try_from(to - from).map_err(|_| io::ErrorKind::InvalidInput)?];
                    self.alone(|top| top.write_bytes(part, from, false))?;
                }
            }
        }
        if start >= end {
            return Ok(());
        }
        self.with(|top| top.upper.zero(&top.occupied(start..end)))
    }

    fn flush(&self) -> io::Result<()> {
        let top = self.snapshot()?;
        // Both, the older one first: a flush covers what was acknowledged before a seal, too.
        if let Some(sealing) = &top.sealing {
            sealing.flush()?;
        }
        top.upper.flush()
    }
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
