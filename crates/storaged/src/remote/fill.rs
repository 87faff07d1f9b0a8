//! Fetching whole layers while nobody needs the network for anything else.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::gate::{Gate, Priority};
use super::object::Object;
use super::source::Digest;
use super::{BLOCK_BYTES, Remotes};
use crate::error::{Code, Error, Result};
use crate::names::LayerName;

/// Layers at once.
const MAX_THREADS: usize = 2;
/// Blocks that are asked for together.
const AT_ONCE: u64 = 8;
/// Failures in a row, after which it is left to whoever needs the rest.
const MAX_FAILURES: u32 = 5;
const MAX_QUEUED: usize = 100_000;
/// What is remembered of layers that are done.
const MAX_DONE: usize = 100;

pub(super) struct Fills {
    gate: Arc<Gate>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<LayerName>,
    threads: usize,
    running: BTreeMap<LayerName, u64>,
    done: VecDeque<(LayerName, Outcome)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// All of it is here and is what its digest says.
    Complete,
    /// All of it is here, and is something else.
    Corrupt,
    /// Not all of it could be fetched.
    Failed,
    /// It was removed, or the daemon ends.
    GivenUp,
}

#[derive(Debug, Serialize)]
pub(super) struct Statistics {
    queued: usize,
    /// Blocks of each that were gone through.
    running: BTreeMap<String, u64>,
    /// The last ones.
    done: Vec<(String, Outcome)>,
}

impl Fills {
    pub(super) fn new(gate: Arc<Gate>) -> Self {
        Self { gate, state: Mutex::default() }
    }

    /// Queues *names*.
    ///
    /// # Errors
    /// `exhausted` when too many wait already, or without a thread.
    pub(super) fn add(self: &Arc<Self>, remotes: &Arc<Remotes>, names: &[LayerName]) -> Result<()> {
        let mut state = self.state();
        if state.queue.len() + names.len() > MAX_QUEUED {
            return Err(Error::new(Code::Exhausted, format!("{MAX_QUEUED} layers wait to be filled")));
        }
        for name in names {
            if !state.queue.contains(name) && !state.running.contains_key(name) {
                state.queue.push_back(name.clone());
            }
        }
        while state.threads < MAX_THREADS.min(state.queue.len()) {
            let (fills, remotes) = (Arc::clone(self), Arc::downgrade(remotes));
            super::thread("fill", move || fills.work(&remotes))?;
            state.threads += 1;
        }
        Ok(())
    }

    pub(super) fn statistics(&self) -> Statistics {
        let state = self.state();
        Statistics {
            queued: state.queue.len(),
            running: state.running.iter().map(|(name, blocks)| (name.to_string(), *blocks)).collect(),
            done: state.done.iter().map(|(name, outcome)| (name.to_string(), *outcome)).collect(),
        }
    }

    fn work(&self, remotes: &Weak<Remotes>) {
        loop {
            let name = {
                let mut state = self.state();
                let Some(name) = state.queue.pop_front() else {
                    state.threads -= 1;
                    return;
                };
                state.running.insert(name.clone(), 0);
                name
            };
            let outcome = self.fill(remotes, &name);
            let mut state = self.state();
            state.running.remove(&name);
            state.done.push_back((name, outcome));
            if state.done.len() > MAX_DONE {
                state.done.pop_front();
            }
        }
    }

    fn fill(&self, remotes: &Weak<Remotes>, name: &LayerName) -> Outcome {
        let object = remotes.upgrade().map(|remotes| remotes.object(name));
        let Some(Ok(object)) = object else { return Outcome::GivenUp };
        let wanted = || remotes.upgrade().is_some_and(|remotes| remotes.has(name));
        let (mut block, mut failures) = (0, 0);
        while block < object.blocks() {
            let end = (block + AT_ONCE).min(object.blocks());
            let Some(pass) = self.gate.wait_ahead(|| !wanted()) else { return Outcome::GivenUp };
            let flights = object.start(block..end, Priority::Ahead);
            // Each run has a pass of its own by now.
            drop(pass);
            if flights.values().filter(|boarded| boarded.flight.wait().is_err()).count() == 0 {
                (block, failures) = (end, 0);
                self.state().running.insert(name.clone(), block);
            } else {
                failures += 1;
                if failures >= MAX_FAILURES {
                    return Outcome::Failed;
                }
            }
        }
        match digest(&object) {
            Ok(digest) if digest == object.remote().digest => Outcome::Complete,
            Ok(_) => {
                eprintln!("storaged: layer {name} is not what its digest says");
                object.condemn();
                Outcome::Corrupt
            }
            Err(_) => Outcome::Failed,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn digest(object: &Arc<Object>) -> io::Result<Digest> {
    let mut sum = Sha256::new();
    let mut buf = Vec::new();
    for block in 0..object.blocks() {
        buf.resize(object.stored().length(block), 0);
        object.read(&mut buf, block * BLOCK_BYTES)?;
        sum.update(&buf);
    }
    Ok(Digest(sum.finalize().into()))
}
