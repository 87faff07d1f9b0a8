//! Memory: a stack that any number of guests map privately. Nobody writes to it.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

use super::{Parts, check as check_range, unreadable};
use crate::device::{Answer, Device, DeviceId, Kind};
use crate::error::{Error, Result};
use crate::library::Held;
use crate::protocol::Stack;
use crate::stack::{self, View};

pub const PAGE_BYTES: u64 = 4096;

pub struct Memory {
    parts: Arc<Parts>,
    device: DeviceId,
    stack: Stack,
    view: OnceLock<View>,
    opening: Mutex<()>,
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
        Self { parts, device, stack, view: OnceLock::new(), opening: Mutex::default(), _held: held }
    }

    pub fn device(&self) -> DeviceId {
        self.device
    }

    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Makes sure that it can be read.
    ///
    /// # Errors
    /// `corrupt` and `unsupported` for layers that cannot be read, `invalid` for those of a disk.
    pub fn open(&self) -> Result<&View> {
        let _turn = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = self.view.get() {
            return Ok(view);
        }
        let view = self.parts.stacks.open(&self.stack)?;
        let odd = view.layers().find(|layer| !layer.paged || layer.size_bytes % PAGE_BYTES != 0);
        if let Some(layer) = odd {
            return Err(Error::invalid(format!("layer {} maps parts of pages and is none of memory", layer.name())));
        }
        Ok(self.view.get_or_init(|| view))
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

impl Device for Memory {
    fn kind(&self) -> Kind {
        Kind::Memory
    }

    fn size_bytes(&self) -> u64 {
        self.stack.size_bytes
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        check_range(self.size_bytes(), offset, buf.len() as u64)?;
        let view = match self.view.get() {
            Some(view) => view,
            None => self.open().map_err(|error| {
                eprintln!("storaged: memory {}: {error}", self.device.0);
                io::Error::from(Errno::IO)
            })?,
        };
        view.read(buf, offset).map_err(|e| self.failed(e))
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        check_range(self.size_bytes(), offset, buf.len() as u64)?;
        match self.view.get() {
            Some(view) => view.read_now(buf, offset).map_err(|e| self.failed(e)),
            None => Ok(Answer::WouldWait),
        }
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
