//! What guests touch when they start: noted the first time, fetched ahead of them the next.
//!
//! Nothing here may fail an attachment, or hold it up.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::Node;
use crate::error::{Code, Context, Error, Result};
use crate::image::memory::{self, Memory};
use crate::names::Owner;
use crate::protocol::{Stack, StackKind};
use crate::working_set::{WorkingSet, WorkingSets};

/// How long what a guest does counts as its start, unless somebody says otherwise.
const USUAL_S: u64 = 10;
const MAX_S: u64 = 600;

impl Node {
    /// The first guest is about to map *memory*, which is seen at *path*; *known*: guests had it a while ago, and
    /// the kernel may have pages that it need not ask for.
    pub(super) fn memory_started(&self, memory: &Arc<Memory>, path: &Path, known: bool) {
        memory.gone.store(false, Ordering::SeqCst);
        let Ok(view) = memory.open() else { return };
        if let Some(set) = self.sets.get(StackKind::Memory, memory.stack()) {
            let file = self.front().map(|_| path.to_owned());
            let started = self.replay.start(view.as_ref().clone(), set, file, Arc::clone(&memory.gone));
            started.unwrap_or_else(|error| eprintln!("storaged: {error}"));
        } else if !known && view.layers().any(|layer| layer.is_remote()) {
            note(&self.sets, memory, USUAL_S).unwrap_or_else(|error| eprintln!("storaged: {error}"));
        }
    }

    /// The last guest has gone.
    pub(super) fn memory_ended(&self, memory: &Memory) {
        memory.gone.store(true, Ordering::SeqCst);
        keep(&self.sets, memory);
    }

    /// Notes what is read of the memory of *owner* from now on, for so many seconds or until it is detached. It takes
    /// the place of what was noted before.
    ///
    /// # Errors
    /// `not_found` if it has none, `invalid` for more than 600 s.
    pub fn record(&self, owner: &Owner, seconds: u64) -> Result<()> {
        if !(1..=MAX_S).contains(&seconds) {
            return Err(Error::invalid(format!("{seconds} s are not 1 to {MAX_S}")));
        }
        let memory = self.images().attached.get(owner).cloned();
        let memory = memory.ok_or_else(|| Error::new(Code::NotFound, format!("{owner} has no memory attached")))?;
        note(&self.sets, &memory, seconds)
    }

    pub fn working_set(&self, kind: StackKind, stack: &Stack) -> Option<WorkingSet> {
        self.sets.get(kind, stack)
    }

    /// # Errors
    /// `invalid` for a stack that cannot be.
    pub fn set_working_set(&self, kind: StackKind, stack: &Stack, set: Option<WorkingSet>) -> Result<()> {
        match kind {
            StackKind::Memory => memory::check(stack)?,
            StackKind::Disk => return Err(Error::new(Code::Unsupported, "working sets are of memory")),
        }
        // An empty one is none.
        self.sets.put(kind, stack, set.unwrap_or_default())
    }

    /// No memory is fetched ahead any more, and no file of the front end is open for it. Waits for no longer than *limit*.
    pub fn stop_replays(&self, limit: Duration) {
        self.replay.stop(limit);
    }

    pub(super) fn touched_statistics(&self) -> Value {
        json!({ "sets": self.sets.count(), "replays": self.replay.statistics() })
    }
}

/// Notes for so long, and then keeps.
fn note(sets: &Arc<WorkingSets>, memory: &Arc<Memory>, seconds: u64) -> Result<()> {
    let turn = memory.recorder.start(memory.stack().size_bytes);
    let (sets, memory) = (Arc::clone(sets), Arc::downgrade(memory));
    let waiting = std::thread::Builder::new().name("record".into()).stack_size(64 << 10).spawn(move || {
        std::thread::sleep(Duration::from_secs(seconds));
        // Not held meanwhile: it may go, and its layers with it.
        if let Some(memory) = memory.upgrade().filter(|memory| memory.recorder.is_at(turn)) {
            keep(&sets, &memory);
        }
    });
    waiting.during("no thread for a record").map(drop)
}

fn keep(sets: &WorkingSets, memory: &Memory) {
    let Some(set) = memory.recorder.finish().filter(|set| !set.is_empty()) else { return };
    if let Err(error) = sets.put(StackKind::Memory, memory.stack(), set) {
        eprintln!("storaged: what memory {} touched is not kept: {error}", memory.device().0);
    }
}
