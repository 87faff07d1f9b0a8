//! Makes long stacks short, in the background: one thread, one stack at a time, at most half of the time.
//!
//! What lies above a layer that is larger than twice all of it is merged into one; so a stack of ever new layers on a large
//! base copies what changed, not the base. It starts when a stack is deeper than its limit, so each layer
//! is copied once for many that come.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use layers::{Identity, LayerWriter, SECTOR};
use rustix::fs::{Advice, fadvise};

use crate::error::{Context, Result};
use crate::image::Parts;
use crate::layer::worded;
use crate::merged::Step;
use crate::names::LayerName;
use crate::protocol::Stack;

/// Deeper stacks of memory are merged: each layer may be asked for each page.
pub const MEMORY_DEPTH: usize = 16;
/// A disk's are joined in memory, and deep only when its sandbox was paused often.
pub const DISK_DEPTH: usize = 64;
/// Stacks that wait. Others are merged when they are attached again.
const MAX_WAITING: usize = 64;
const SLICE: usize = 1 << 20;
/// How much may be on its way to the disk.
const SYNC_BYTES: u64 = 32 << 20;
const MAX_REST: Duration = Duration::from_secs(1);
/// Of the whole index, what is looked at in one go.
const WINDOW_SECTORS: u64 = (1 << 30) / SECTOR;

pub struct Merger {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    parts: Arc<Parts>,
    work: Mutex<Work>,
    changed: Condvar,
}

#[derive(Default)]
struct Work {
    waiting: VecDeque<Stack>,
    busy: bool,
    ended: bool,
}

impl Merger {
    pub fn new(parts: &Arc<Parts>) -> Self {
        let shared = Shared { parts: Arc::clone(parts), work: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// Has *stack* merged at some time if it is read through more than *most* layers.
    pub fn ask(&self, stack: &Stack, most: usize) {
        if stack.layers.len() <= most || self.shared.parts.library.merges().steps(&stack.layers).len() <= most {
            return;
        }
        let mut work = self.shared.work();
        if work.ended || work.waiting.len() >= MAX_WAITING || work.waiting.contains(stack) {
            return;
        }
        work.waiting.push_back(stack.clone());
        self.shared.changed.notify_all();
        drop(work);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            match std::thread::Builder::new().name("merger".into()).spawn(move || shared.run()) {
                Ok(started) => *thread = Some(started),
                // The stack waits for the next one who asks.
                Err(error) => eprintln!("storaged: nothing is merged: {error}"),
            }
        }
    }

    /// Stacks that wait to be merged, or are being merged.
    pub fn waiting(&self) -> usize {
        let work = self.shared.work();
        work.waiting.len() + usize::from(work.busy)
    }

    /// Returns when nothing is left to do.
    pub fn wait_idle(&self) {
        let mut work = self.shared.work();
        while work.busy || !work.waiting.is_empty() {
            work = self.shared.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What was begun is given up, and leaves nothing.
impl Drop for Merger {
    fn drop(&mut self) {
        self.shared.work().ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        // Of this thread only: guests come first, at the disk too.
        let _ = rustix::process::setpriority_process(None, 19);
        while let Some(stack) = self.next() {
            if let Err(error) = self.merge(&stack) {
                eprintln!("storaged: a stack of {} layers stays as it is: {error}", stack.layers.len());
            }
            self.work().busy = false;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Stack> {
        let mut work = self.work();
        loop {
            if work.ended {
                return None;
            }
            if let Some(stack) = work.waiting.pop_front() {
                work.busy = true;
                return Some(stack);
            }
            work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn merge(&self, stack: &Stack) -> Result<()> {
        let library = &self.parts.library;
        let _held = library.hold(&stack.layers)?;
        let steps = library.merges().steps(&stack.layers);
        // What lies elsewhere is not fetched for this.
        let remote = steps.iter().rposition(|step| library.remotes().has(&step.name)).map_or(0, |last| last + 1);
        let steps = &steps[remote..];
        let bytes = steps.iter().map(|step| library.read_bytes(&step.name)).collect::<Result<Vec<_>>>()?;
        let run = worth_merging(&bytes);
        let (steps, bytes) = (&steps[run.clone()], &bytes[run.clone()]);
        if steps.len() < 2 || !self.has_room(bytes.iter().sum())? {
            return Ok(());
        }
        let sources = stack.layers[steps[0].of.start..steps[steps.len() - 1].of.end].to_vec();
        let (path, file) = self.parts.root.temporary()?;
        let done = self.write(steps, stack.size_bytes, steps[0].of.start > 0, &file);
        let done = done.and_then(|complete| if complete { library.merges().add(&path, sources) } else { Ok(()) });
        // Still there only if nothing came of it.
        let _ = fs::remove_file(&path);
        done
    }

    /// Whether the copy leaves as much room as it takes.
    fn has_room(&self, bytes: u64) -> Result<bool> {
        let there = rustix::fs::statvfs(self.parts.root.path()).during("cannot tell how much room there is")?;
        Ok(there.f_bavail.saturating_mul(there.f_frsize) / 2 > bytes)
    }

    /// False if it was given up.
    fn write(&self, steps: &[Step], size_bytes: u64, on_others: bool, file: &File) -> Result<bool> {
        let names: Vec<LayerName> = steps.iter().map(|step| step.name.clone()).collect();
        let view = self.parts.stacks.open_names(&names, size_bytes)?.passing();
        let virtual_bytes = view.layers().map(|layer| layer.size_bytes).max().unwrap_or(size_bytes);
        let out = BufWriter::with_capacity(SLICE, file);
        let mut out = LayerWriter::new(out, Identity::new(virtual_bytes)).map_err(|e| worded("a merged layer", e))?;
        let mut buf = vec![0; SLICE];
        let (mut written, mut synced) = (0, 0);
        for start in (0..virtual_bytes / SECTOR).step_by(usize::try_from(WINDOW_SECTORS).unwrap_or(usize::MAX)) {
            let end = (start + WINDOW_SECTORS).min(virtual_bytes / SECTOR);
            for run in view.mapped(start..end) {
                let mut at = run.sectors.start;
                if run.zeroed {
                    // Where nothing is below, what is not mapped is zeros.
                    let length = if on_others { run.sectors.end - at } else { 0 };
                    out.zeroed(at, length).map_err(|e| worded("a merged layer", e))?;
                    continue;
                }
                while at < run.sectors.end {
                    let began = Instant::now();
                    let length = (run.sectors.end - at).min(SLICE as u64 / SECTOR);
                    let part = &mut buf[..usize::try_from(length * SECTOR).unwrap_or(SLICE)];
                    view.read(part, at * SECTOR).during("cannot read what is to be merged")?;
                    out.data(at, part).map_err(|e| worded("a merged layer", e))?;
                    at += length;
                    written += length * SECTOR;
                    if written - synced >= SYNC_BYTES {
                        synced = written;
                        settle(file).during("cannot write a merged layer")?;
                    }
                    if self.rest(began.elapsed()) {
                        return Ok(false);
                    }
                }
            }
        }
        let (mut out, _) = out.finish().map_err(|e| worded("a merged layer", e))?;
        io::Write::flush(&mut out).during("cannot write a merged layer")?;
        file.sync_all().during("cannot write a merged layer")?;
        settle(file).during("cannot write a merged layer")?;
        Ok(true)
    }

    /// Does nothing for as long as was worked. True if it is over.
    fn rest(&self, worked: Duration) -> bool {
        let work = self.work();
        let until = worked.min(MAX_REST);
        let waited = self.changed.wait_timeout_while(work, until, |work| !work.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts on disk what was written, and keeps none of it in memory.
fn settle(file: &File) -> io::Result<()> {
    file.sync_data()?;
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

/// Which of the layers, lowest first and so large: the longest run up to the top that has no giant at its bottom.
fn worth_merging(bytes: &[u64]) -> Range<usize> {
    let mut start = 0;
    while start < bytes.len() && bytes[start] > 2 * bytes[start + 1..].iter().sum::<u64>() {
        start += 1;
    }
    start..bytes.len().min(start + layers::MAX_LAYERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_base_is_left_alone_and_a_grown_one_is_not() {
        assert_eq!(worth_merging(&[1000, 10, 10, 10]), 1..4);
        assert_eq!(worth_merging(&[1000, 400, 10, 200]), 0..4);
        assert_eq!(worth_merging(&[1000, 100, 1, 1]), 2..4);
        assert_eq!(worth_merging(&[]), 0..0);
        assert_eq!(worth_merging(&[5]), 1..1);
        assert_eq!(worth_merging(&[1; 300]), 0..255);
    }
}
