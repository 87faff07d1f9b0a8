//! Fetching a working set: into the cache of remote layers, in order and many blocks at a time, and then through the
//! front end, so that the kernel has the pages before a guest faults on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use layers::SECTOR;
use serde::Serialize;

use super::{Wanted, WorkingSet};
use crate::error::{Context, Result};
use crate::remote::SharedObject;
use crate::stack::View;

/// At once, on a node. What comes on top starts without.
const MAX_REPLAYS: usize = 8;
/// Of one image: more is no working set.
const MAX_BYTES: u64 = 2 << 30;
/// Blocks that are asked for together.
const RUN: u64 = 16;
const READ_BYTES: u64 = 256 << 10;

#[derive(Default)]
pub struct Replay {
    running: Mutex<usize>,
    ended: Condvar,
    stopping: AtomicBool,
    done: AtomicU64,
    skipped: AtomicU64,
    blocks: AtomicU64,
    page_bytes: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Statistics {
    running: usize,
    done: u64,
    /// There were too many at that moment.
    skipped: u64,
    /// Of remote layers, asked for.
    blocks: u64,
    /// Read through the front end.
    page_bytes: u64,
}

/// Of one layer.
pub(super) struct Blocks {
    object: SharedObject,
    numbers: BTreeSet<u64>,
}

impl Replay {
    /// Replays *set* of *view* while the caller goes on, until *over* is set; then reads it through *file*, if given.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn start(
        self: &Arc<Self>,
        view: View,
        set: WorkingSet,
        file: Option<PathBuf>,
        over: Arc<AtomicBool>,
    ) -> Result<()> {
        {
            let mut running = self.running();
            if *running >= MAX_REPLAYS || self.stopping.load(SeqCst) {
                self.skipped.fetch_add(1, SeqCst);
                return Ok(());
            }
            *running += 1;
        }
        let replay = Arc::clone(self);
        let started = std::thread::Builder::new().name("replay".into()).spawn(move || {
            replay.fetch(&view, &set, &over);
            if let Some(file) = file {
                // Whatever is wrong with it shows to those who need it.
                let _ = replay.read(&view, &set, &file, &over);
            }
            replay.done.fetch_add(1, SeqCst);
            replay.end();
        });
        if started.is_err() {
            self.end();
        }
        started.during("no thread for a replay").map(drop)
    }

    fn end(&self) {
        *self.running() -= 1;
        self.ended.notify_all();
    }

    fn running(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all of them, and waits until they let go of their files, but for no longer than *limit*: one may be waiting
    /// for a network.
    pub fn stop(&self, limit: Duration) {
        self.stopping.store(true, SeqCst);
        let running = self.running();
        drop(self.ended.wait_timeout_while(running, limit, |running| *running > 0));
    }

    fn is_over(&self, over: &AtomicBool) -> bool {
        over.load(SeqCst) || self.stopping.load(SeqCst)
    }

    fn fetch(&self, view: &View, set: &WorkingSet, over: &AtomicBool) {
        for (_, blocks) in wanted(view, set) {
            let mut numbers = blocks.numbers.into_iter().peekable();
            while let Some(start) = numbers.next() {
                let mut end = start + 1;
                while end - start < RUN && numbers.next_if_eq(&end).is_some() {
                    end += 1;
                }
                if !blocks.object.fetch(start..end, || self.is_over(over)) {
                    return;
                }
                self.blocks.fetch_add(end - start, SeqCst);
            }
        }
    }

    fn read(&self, view: &View, set: &WorkingSet, file: &PathBuf, over: &AtomicBool) -> std::io::Result<()> {
        let file = File::open(file)?;
        let mut buf = vec![0; usize::try_from(READ_BYTES).unwrap_or(0)];
        for (start, length) in within(set, view.size_bytes) {
            for at in (start..start + length).step_by(buf.len()) {
                if self.is_over(over) {
                    return Ok(());
                }
                let part = usize::try_from((start + length - at).min(READ_BYTES)).unwrap_or(0);
                file.read_exact_at(&mut buf[..part], at)?;
                self.page_bytes.fetch_add(part as u64, SeqCst);
            }
        }
        Ok(())
    }

    pub fn statistics(&self) -> Statistics {
        Statistics {
            running: *self.running(),
            done: self.done.load(SeqCst),
            skipped: self.skipped.load(SeqCst),
            blocks: self.blocks.load(SeqCst),
            page_bytes: self.page_bytes.load(SeqCst),
        }
    }
}

/// The ranges of *set*, as far as they are worth it.
fn within(set: &WorkingSet, size_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut all = 0;
    set.ranges(size_bytes).take_while(move |(_, length)| {
        all += length;
        all <= MAX_BYTES
    })
}

/// Blocks of remote layers, by layer and in order. What lies here comes when it is read through the front end.
fn wanted(view: &View, set: &WorkingSet) -> Wanted {
    let mut wanted = BTreeMap::new();
    for (start, length) in within(set, view.size_bytes) {
        view.places(start / SECTOR..(start + length).div_ceil(SECTOR), &mut |layer, place, length| {
            let Some((object, blocks)) = layer.remote_blocks(place, length) else { return };
            let new = || Blocks { object, numbers: BTreeSet::new() };
            wanted.entry(layer.name().clone()).or_insert_with(new).numbers.extend(blocks);
        });
    }
    wanted
}
