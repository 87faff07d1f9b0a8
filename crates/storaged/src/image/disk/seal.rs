//! A layer of what was written: crash-safe in this order. The upper to come is made, then named in the record
//! (`next`); the old one gets its index and is flushed; it is renamed to a layer; the record is written
//! without `next`. [`Disk::settle`] goes on from any of these.

use std::sync::{Arc, PoisonError};

use super::top::Top;
use super::{Disk, Kept, State, missing_is_corrupt};
use crate::error::{Context, Error, Result};
use crate::image::record::DiskRecord;
use crate::library::Held;
use crate::names::{Format, Id, LayerName};
use crate::protocol::Stack;
use crate::upper::{self, Upper};

impl Disk {
    /// Makes what was written so far a layer, and gives the whole stack, durable. The layers of it are held.
    ///
    /// # Errors
    /// `lost` when the disk cannot be flushed; otherwise the disk is as it was, and it can be tried again.
    pub fn seal(&self) -> Result<(Stack, Held)> {
        let mut kept = self.kept();
        let top = self.top(&mut kept)?;
        if !top.upper.is_empty() {
            // Most of it, while the guest can still write; what is left then is little.
            self.flush_for_seal(&top.upper)?;
            self.switch(&mut kept, &top)?;
            self.settle(&mut kept)?;
        }
        let stack = kept.record.stack.clone();
        let held = self.parts.library.hold(&stack.layers)?;
        Ok((stack, held))
    }

    /// Puts an empty upper on top; the old one has its index then.
    fn switch(&self, kept: &mut Kept, top: &Top) -> Result<()> {
        let root = &self.parts.root;
        let id = Id::random().during("no random bytes")?;
        let upper = Arc::new(Upper::create(root, id, kept.record.stack.size_bytes)?);
        let record = DiskRecord { next: Some(id), ..kept.record.clone() };
        let switched = self.keep(&record).and_then(|()| {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            top.upper.seal(record.stack.size_bytes)?;
            if let State::Open(shown) = &mut *state {
                shown.sealing = Some(std::mem::replace(&mut shown.upper, upper));
            }
            Ok(())
        });
        match switched {
            Ok(()) => kept.record = record,
            Err(error) => {
                // In this order: a record whose `next` is missing means the same as one without.
                let _ = upper::remove(root, id);
                let _ = self.keep(&kept.record);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Finishes the seal that the record speaks of, from wherever it was left.
    pub(super) fn settle(&self, kept: &mut Kept) -> Result<()> {
        let Some(next) = kept.record.next else { return Ok(()) };
        let root = &self.parts.root;
        let old = kept.record.upper;
        let name = LayerName::new(old, Format::Lsmt);
        let sealing = match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Open(top) => top.sealing.clone(),
            _ => None,
        };
        let data = upper::data_path(root, old);
        let layer = if data.exists() {
            if let Some(sealing) = sealing {
                self.flush_for_seal(&sealing)?;
            }
            self.parts.library.adopt(&data, &name)?
        } else {
            self.parts.library.hold(std::slice::from_ref(&name)).map_err(missing_is_corrupt)?
        };
        let mut stack = kept.record.stack.clone();
        stack.layers.push(name);
        let below = Arc::new(self.parts.stacks.open(&stack)?);
        let record = DiskRecord { stack, upper: next, next: None, ..kept.record.clone() };
        self.keep(&record)?;
        kept.record = record;
        let none = self.parts.library.hold_unseen(&[]);
        kept.held = std::mem::replace(&mut kept.held, none).and(layer);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if let State::Open(top) = &mut *state {
            top.below = below;
            top.sealing = None;
        }
        drop(state);
        if let Err(error) = upper::remove_index(root, old) {
            eprintln!("storaged: {error}");
        }
        Ok(())
    }

    fn flush_for_seal(&self, upper: &Upper) -> Result<()> {
        upper.flush().during(format_args!("cannot flush the disk of {}", self.owner)).map_err(Error::lost)
    }

    /// A seal that an earlier daemon began: undone when nothing depends on it, else done.
    pub(super) fn recover(&self, kept: &mut Kept) -> Result<()> {
        let Some(next) = kept.record.next else { return Ok(()) };
        let root = &self.parts.root;
        let size = kept.record.stack.size_bytes;
        let old = kept.record.upper;
        if upper::data_path(root, old).exists() {
            // It may be missing or empty, but what is damaged may have had writes.
            let written = upper::exists(root, next) && !Upper::open(root, next, size)?.is_empty();
            if !written {
                let record = DiskRecord { next: None, ..kept.record.clone() };
                self.keep(&record)?;
                kept.record = record;
                return upper::remove(root, next);
            }
            let old = Upper::open(root, old, size)?;
            old.seal(size)?;
            self.flush_for_seal(&old)?;
        }
        self.settle(kept)
    }
}
