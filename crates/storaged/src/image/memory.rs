//! Memory: a stack that any number of guests map privately. Nobody writes to it.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rustix::io::Errno;

use super::{Parts, check as check_range, unreadable};
use crate::device::{Answer, Device, DeviceId, Kind};
use crate::error::{Error, Result};
use crate::library::Held;
use crate::memory::freeze::Frozen;
use crate::memory::source::Holder;
use crate::names::Id;
use crate::protocol::Stack;
use crate::stack::{self, View};
use crate::working_set::Recorder;

pub const PAGE_BYTES: u64 = 4096;

pub struct Memory {
    parts: Arc<Parts>,
    device: DeviceId,
    stack: Stack,
    view: RwLock<Option<Arc<View>>>,
    opening: Mutex<()>,
    /// None while nobody has it attached: then a layer of it may go.
    held: Mutex<Option<Held>>,
    /// Who has the newest pages, until they are in a layer.
    child: Option<(Id, Arc<Frozen>)>,
    over: OnceLock<Over>,
    pub recorder: Recorder,
    /// Nobody uses it any more.
    pub gone: Arc<AtomicBool>,
}

/// What is shown once the pages of a frozen child are in a layer.
struct Over {
    stack: Stack,
    view: View,
    _held: Held,
}

impl Memory {
    /// Memory that shows *stack*.
    ///
    /// # Errors
    /// `not_found` for a layer that is not there; `invalid` for sizes that are no whole pages.
    pub fn new(parts: &Arc<Parts>, device: DeviceId, stack: Stack) -> Result<Self> {
        check(&stack)?;
        let held = parts.library.hold(&stack.layers)?;
        Ok(Self::assemble(parts, device, stack, held))
    }

    /// The memory of a record. Whether it can be read shows when it is.
    pub fn of_record(parts: &Arc<Parts>, device: DeviceId, stack: Stack) -> Self {
        let held = parts.library.hold_unseen(&stack.layers);
        Self::assemble(parts, device, stack, held)
    }

    fn assemble(parts: &Arc<Parts>, device: DeviceId, stack: Stack, held: Held) -> Self {
        let parts = Arc::clone(parts);
        let (view, over) = (RwLock::default(), OnceLock::new());
        let held = Mutex::new(Some(held));
        Self {
            parts,
            device,
            stack,
            view,
            opening: Mutex::default(),
            held,
            child: None,
            over,
            recorder: Recorder::default(),
            gone: Arc::default(),
        }
    }

    /// The same with the pages of *child* on top, which had mapped the stack.
    #[must_use]
    pub fn on_child(mut self, id: Id, child: Arc<Frozen>) -> Self {
        self.child = Some((id, child));
        self
    }

    /// The frozen child that is still needed.
    pub fn waits_for(&self) -> Option<Id> {
        self.child.as_ref().filter(|_| self.over.get().is_none()).map(|(id, _)| *id)
    }

    /// From now on *stack* is read, which shows the same.
    ///
    /// # Errors
    /// As [`Memory::open`]; nothing has changed then.
    pub fn go_over(&self, stack: Stack, held: Held) -> Result<()> {
        let view = self.parts.stacks.open(&stack)?.of_image();
        // The first stays: they show the same.
        let _ = self.over.set(Over { stack, view, _held: held });
        Ok(())
    }

    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Nobody has it attached: its layers are not held any longer.
    pub fn rest(&self) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Somebody attaches it again, and reads through what was merged meanwhile.
    ///
    /// # Errors
    /// `not_found` for a layer that has gone meanwhile, and as [`Memory::open`].
    pub fn wake(&self) -> Result<()> {
        let held = self.parts.library.hold(&self.stack.layers)?;
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        let _turn = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        self.open_anew().map(|_| ())
    }

    /// What it shows, but for the pages of a child that it still waits for.
    pub fn stack(&self) -> &Stack {
        self.over.get().map_or(&self.stack, |over| &over.stack)
    }

    /// Makes sure that it can be read.
    ///
    /// # Errors
    /// `corrupt` and `unsupported` for layers that cannot be read, `invalid` for those of a disk.
    pub fn open(&self) -> Result<Arc<View>> {
        let _turn = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        match self.view() {
            Some(view) => Ok(view),
            None => self.open_anew(),
        }
    }

    fn view(&self) -> Option<Arc<View>> {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn open_anew(&self) -> Result<Arc<View>> {
        let view = self.parts.stacks.open(&self.stack)?;
        let odd = view.layers().find(|layer| !layer.paged || layer.size_bytes != self.stack.size_bytes);
        if let Some(layer) = odd {
            let message = format!("layer {} is none of {} bytes of memory", layer.name(), self.stack.size_bytes);
            return Err(Error::invalid(message));
        }
        let view = Arc::new(view.of_image());
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&view));
        Ok(view)
    }

    fn failed(&self, error: io::Error) -> io::Error {
        unreadable(&format_args!("memory {}", self.device.0), error)
    }
}

/// Whether there can be such memory.
///
/// # Errors
/// `invalid` if not.
pub fn check(stack: &Stack) -> Result<()> {
    stack::check(stack)?;
    if stack.size_bytes % PAGE_BYTES != 0 {
        return Err(Error::invalid(format!("memory of {} bytes is no whole pages", stack.size_bytes)));
    }
    Ok(())
}

impl Memory {
    /// Reads through the child.
    fn read_child(&self, child: &Frozen, base: &View, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if (offset | buf.len() as u64) % PAGE_BYTES != 0 {
            let start = offset / PAGE_BYTES * PAGE_BYTES;
            let end = (offset + buf.len() as u64).next_multiple_of(PAGE_BYTES);
            let size = |bytes: u64| usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
            let mut whole = vec![0; size(end - start)?];
            self.read_child(child, base, &mut whole, start)?;
            buf.copy_from_slice(&whole[size(offset - start)?..][..buf.len()]);
            return Ok(());
        }
        let parts = match child.read(buf, offset) {
            Ok(parts) => parts,
            // Ended meanwhile, because its pages are in a layer.
            Err(error) => return self.over.get().map_or(Err(error), |over| over.view.read(buf, offset)),
        };
        for part in parts.into_iter().filter(|part| part.holder == Holder::Stack) {
            let start = usize::try_from(part.offset - offset).map_err(|_| io::ErrorKind::InvalidInput)?;
            let length = usize::try_from(part.length).map_err(|_| io::ErrorKind::InvalidInput)?;
            base.read(&mut buf[start..start + length], part.offset)?;
        }
        Ok(())
    }
}

impl Device for Memory {
    fn kind(&self) -> Kind {
        Kind::Memory
    }

    fn size_bytes(&self) -> u64 {
        self.stack.size_bytes
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        check_range(self.size_bytes(), offset, buf.len() as u64)?;
        self.recorder.note(offset, buf.len());
        let view = match self.view() {
            Some(view) => view,
            None => self.open().map_err(|error| {
                eprintln!("storaged: memory {}: {error}", self.device.0);
                io::Error::from(Errno::IO)
            })?,
        };
        let read = match (self.over.get(), &self.child) {
            (Some(over), _) => over.view.read(buf, offset),
            (None, Some((_, child))) => self.read_child(child, &view, buf, offset),
            (None, None) => view.read(buf, offset),
        };
        read.map_err(|e| self.failed(e))
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        check_range(self.size_bytes(), offset, buf.len() as u64)?;
        if self.waits_for().is_some() {
            return Ok(Answer::WouldWait);
        }
        self.recorder.note(offset, buf.len());
        let read = match (self.over.get(), self.view()) {
            (Some(over), _) => over.view.read_now(buf, offset),
            (None, Some(view)) => view.read_now(buf, offset),
            (None, None) => return Ok(Answer::WouldWait),
        };
        read.map_err(|e| self.failed(e))
    }

    fn write(&self, _buf: &[u8], _offset: u64, _durable: bool) -> io::Result<()> {
        Err(Errno::ROFS.into())
    }

    fn discard(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Err(Errno::ROFS.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
