//! What the front end has done so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

pub(super) use crate::counter::Counter;
use crate::counter::Work;

#[derive(Default)]
pub(super) struct Counters {
    pub(super) reads: Counter,
    pub(super) writes: Counter,
    pub(super) flushes: Counter,
    pub(super) discards: Counter,
    slow: AtomicU64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Statistics {
    pub reads: Work,
    pub writes: Work,
    pub flushes: Work,
    pub discards: Work,
    /// Requests that could not be answered at once.
    pub slow: u64,
    /// Devices there are now, and may be.
    pub devices: usize,
    pub max_devices: usize,
    /// Devices of an earlier daemon that could not go on: whoever has them open gets errors.
    pub lost: u64,
}

impl Counters {
    /// Counts a request that has to wait.
    pub(super) fn slow(&self) {
        self.slow.fetch_add(1, Relaxed);
    }

    pub(super) fn read(&self, devices: usize, max_devices: usize, lost: u64) -> Statistics {
        Statistics {
            reads: self.reads.read(),
            writes: self.writes.read(),
            flushes: self.flushes.read(),
            discards: self.discards.read(),
            slow: self.slow.load(Relaxed),
            devices,
            max_devices,
            lost,
        }
    }
}
