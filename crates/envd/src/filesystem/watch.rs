//! All watchers there are, and those that are polled by their id.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use wire::{Code, RpcError};

use super::watcher::Watcher;

/// Directories watched at the same time, by streams and by polling together.
const MAX_WATCHERS: usize = 512;

#[derive(Default)]
pub(crate) struct Watchers {
    kept: RefCell<BTreeMap<String, Rc<Watcher>>>,
    next_id: Cell<u64>,
    count: Rc<Cell<usize>>,
}

/// One of the watchers that may exist.
pub(super) struct Place(Rc<Cell<usize>>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Watchers {
    /// # Errors
    /// `resource_exhausted` when there are too many.
    pub(super) fn place(&self) -> Result<Place, RpcError> {
        if self.count.get() >= MAX_WATCHERS {
            return Err(RpcError::new(Code::ResourceExhausted, format!("there are {MAX_WATCHERS} watchers already")));
        }
        self.count.set(self.count.get() + 1);
        Ok(Place(self.count.clone()))
    }

    /// Keeps *watcher* until it is removed, and gives its id.
    pub(super) fn keep(&self, watcher: Rc<Watcher>) -> String {
        let id = format!("w{}-{}", std::process::id(), self.next_id.get());
        self.next_id.set(self.next_id.get() + 1);
        self.kept.borrow_mut().insert(id.clone(), watcher);
        id
    }

    /// # Errors
    /// `not_found`.
    pub(super) fn get(&self, id: &str) -> Result<Rc<Watcher>, RpcError> {
        self.kept.borrow().get(id).cloned().ok_or_else(|| unknown(id))
    }

    /// # Errors
    /// `not_found`.
    pub(super) fn remove(&self, id: &str) -> Result<(), RpcError> {
        self.kept.borrow_mut().remove(id).map(drop).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::not_found(format!("watcher {id} not found"))
}
