//! Which devices there are now, and whose turn it is to change one.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::line::Line;
use crate::device::DeviceId;
use crate::error::{Code, Error, Result};

/// A device that is served.
pub(super) struct Serving {
    pub(super) line: Arc<Line>,
    pub(super) thread: JoinHandle<()>,
}

enum Slot {
    /// Somebody is making or ending it.
    Changing,
    There(Serving),
}

pub(super) struct Slots {
    devices: Mutex<HashMap<DeviceId, Slot>>,
    changed: Condvar,
    max: usize,
}

pub(super) enum Found<'a> {
    There(u32),
    Ours(Place<'a>),
}

/// The right to change one device. Dropped, there is no such device.
pub(super) struct Place<'a> {
    slots: &'a Slots,
    id: DeviceId,
    filled: bool,
}

impl Place<'_> {
    pub(super) fn fill(mut self, serving: Serving) {
        self.filled = true;
        self.slots.lock().insert(self.id, Slot::There(serving));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.filled {
            self.slots.lock().remove(&self.id);
        }
        self.slots.changed.notify_all();
    }
}

impl Slots {
    pub(super) fn new(max: usize) -> Self {
        Self { devices: Mutex::default(), changed: Condvar::new(), max }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DeviceId, Slot>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settled(&self, id: DeviceId, deadline: Instant) -> Result<MutexGuard<'_, HashMap<DeviceId, Slot>>> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let changing = |slots: &mut HashMap<DeviceId, Slot>| matches!(slots.get(&id), Some(Slot::Changing));
        let waited = self.changed.wait_timeout_while(self.lock(), limit, changing);
        let (slots, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(Error::new(Code::Unavailable, "the device is being changed, and that does not end"));
        }
        Ok(slots)
    }

    /// Finds the device, or reserves a place for it.
    ///
    /// # Errors
    /// `exhausted` when there are as many as there may be; `unavailable` when another has its turn until *deadline*.
    pub(super) fn enter(&self, id: DeviceId, deadline: Instant) -> Result<Found<'_>> {
        let mut slots = self.settled(id, deadline)?;
        if let Some(Slot::There(serving)) = slots.get(&id) {
            return Ok(Found::There(serving.line.number));
        }
        if slots.len() >= self.max {
            let message = format!("all {} block devices are in use", self.max);
            return Err(Error::new(Code::Exhausted, message));
        }
        slots.insert(id, Slot::Changing);
        Ok(Found::Ours(Place { slots: self, id, filled: false }))
    }

    /// Reserves a place for a device that exists already, however many there are.
    pub(super) fn adopt(&self, id: DeviceId) -> Option<Place<'_>> {
        let mut slots = self.lock();
        if slots.contains_key(&id) {
            return None;
        }
        slots.insert(id, Slot::Changing);
        Some(Place { slots: self, id, filled: false })
    }

    /// Takes the device out, to be ended. Nothing, if there is none.
    ///
    /// # Errors
    /// `unavailable` when another has its turn until *deadline*.
    pub(super) fn leave(&self, id: DeviceId, deadline: Instant) -> Result<Option<(Place<'_>, Serving)>> {
        let mut slots = self.settled(id, deadline)?;
        match slots.remove(&id) {
            Some(Slot::There(serving)) => {
                slots.insert(id, Slot::Changing);
                Ok(Some((Place { slots: self, id, filled: false }, serving)))
            }
            _ => Ok(None),
        }
    }

    pub(super) fn number(&self, id: DeviceId) -> Option<u32> {
        match self.lock().get(&id) {
            Some(Slot::There(serving)) => Some(serving.line.number),
            _ => None,
        }
    }

    pub(super) fn lines(&self) -> Vec<Arc<Line>> {
        let slots = self.lock();
        let lines = slots.values().filter_map(|slot| match slot {
            Slot::There(serving) => Some(Arc::clone(&serving.line)),
            Slot::Changing => None,
        });
        lines.collect()
    }

    /// How many there are, and may be.
    pub(super) fn load(&self) -> (usize, usize) {
        (self.lock().len(), self.max)
    }
}
