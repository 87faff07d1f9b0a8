//! What the front end has done so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

pub(super) use crate::counter::Counter;
pub use crate::counter::Work;

#[derive(Default)]
pub(super) struct Counters {
    pub(super) reads: Counter,
    pub(super) writes: Counter,
    pub(super) flushes: Counter,
    pub(super) discards: Counter,
    /// Requests that could not be answered at once and went to the slow threads.
    pub(super) slow: AtomicU64,
    /// Slow reads that nobody waits for any more.
    pub(super) interrupted: AtomicU64,
    /// Requests that an earlier daemon had begun.
    pub(super) resent: AtomicU64,
    pub(super) malformed: AtomicU64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Statistics {
    pub reads: Work,
    pub writes: Work,
    pub flushes: Work,
    pub discards: Work,
    pub slow: u64,
    pub interrupted: u64,
    pub resent: u64,
    pub malformed: u64,
    /// Slow requests that wait for a thread now.
    pub queued: usize,
    /// Threads that serve slow requests now.
    pub slow_threads: usize,
    /// Times the keeper was found dead and made again.
    pub keepers_lost: u64,
}

impl Counters {
    pub(super) fn read(&self, queued: usize, slow_threads: usize, keepers_lost: u64) -> Statistics {
        Statistics {
            reads: self.reads.read(),
            writes: self.writes.read(),
            flushes: self.flushes.read(),
            discards: self.discards.read(),
            slow: self.slow.load(Relaxed),
            interrupted: self.interrupted.load(Relaxed),
            resent: self.resent.load(Relaxed),
            malformed: self.malformed.load(Relaxed),
            queued,
            slow_threads,
            keepers_lost,
        }
    }
}
