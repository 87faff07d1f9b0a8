//! One block on its way, and everyone who waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::failure::Failure;

pub(super) type Landed = Result<Arc<Vec<u8>>, Failure>;

#[derive(Default)]
pub struct Flight {
    landed: Mutex<Option<Landed>>,
    done: Condvar,
    /// What it brought turned out to be wrong.
    void: AtomicBool,
}

impl Flight {
    pub fn wait(&self) -> Landed {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(landed) = &*landed {
                return landed.clone();
            }
            landed = self.done.wait(landed).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The first word counts.
    pub fn land(&self, what: Landed) {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
        self.done.notify_all();
    }

    pub fn make_void(&self) {
        self.void.store(true, Ordering::SeqCst);
    }

    pub fn is_void(&self) -> bool {
        self.void.load(Ordering::SeqCst)
    }
}
