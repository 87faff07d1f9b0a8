//! Runs of layers that are also there as one: copies, made in the background, that a long stack is read through.
//!
//! Nobody names them: a stack lists what it always did, and whoever opens it takes the copies that there are. A copy goes
//! when one of its layers goes, or when a longer one has all of it and nobody reads it. It is
//! whole before its record is there, and worth nothing without.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use layers::SECTOR;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Result};
use crate::image::record;
use crate::names::{Format, Id, LayerName};
use crate::root::{Root, remove_if_there};

pub struct Merges {
    root: Arc<Root>,
    /// By the lowest of the layers.
    known: Mutex<HashMap<LayerName, Vec<Arc<Merged>>>>,
}

/// One layer that shows what several do. It stays for as long as anybody has this.
#[derive(Debug)]
pub struct Merged {
    pub name: LayerName,
    /// Lowest first.
    pub sources: Vec<LayerName>,
    bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sources {
    sources: Vec<LayerName>,
}

/// A part of a stack as it is read.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: LayerName,
    /// Which of the layers of the stack it is.
    pub of: Range<usize>,
    pub merged: Option<Arc<Merged>>,
}

impl Merges {
    /// What an earlier daemon made. What is not whole, or is of layers that are gone, is removed.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(root: &Arc<Root>, exists: impl Fn(&LayerName) -> bool) -> Result<Self> {
        let merges = Self { root: Arc::clone(root), known: Mutex::default() };
        let mut ids = Vec::new();
        for entry in fs::read_dir(root.merged()).during("cannot list merged layers")? {
            let path = entry.during("cannot list merged layers")?.path();
            ids.extend(path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| Id::parse(stem).ok()));
        }
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let found = record::load::<Sources>(&merges.record(id)).ok().filter(|found| !found.sources.is_empty());
            let bytes = bytes_of(&merges.file(id));
            match found.filter(|found| found.sources.iter().all(&exists)).zip(bytes) {
                Some((found, bytes)) => merges.insert(id, found.sources, bytes),
                None => merges.remove_files(id).during("cannot remove a merged layer")?,
            }
        }
        merges.prune();
        Ok(merges)
    }

    /// How a stack of *names* is best read.
    pub fn steps(&self, names: &[LayerName]) -> Vec<Step> {
        let known = self.known();
        let mut steps = Vec::new();
        let mut at = 0;
        while let Some(name) = names.get(at) {
            let fitting = known.get(name).into_iter().flatten().filter(|one| names[at..].starts_with(&one.sources));
            let merged = fitting.max_by_key(|one| one.sources.len()).cloned();
            let length = merged.as_ref().map_or(1, |one| one.sources.len());
            let name = merged.as_ref().map_or(name, |one| &one.name).clone();
            steps.push(Step { name, of: at..at + length, merged });
            at += length;
        }
        steps
    }

    /// Where the file of *name* is, if it is a merged one.
    pub fn path(&self, name: &LayerName) -> Option<PathBuf> {
        let known = self.known();
        let ours = known.values().flatten().any(|one| one.name == *name);
        ours.then(|| self.root.merged().join(name.as_str()))
    }

    /// Takes the complete and durable file at *path* as what *sources* are together, which are held.
    ///
    /// # Errors
    /// What the file system says; nothing is there then.
    pub fn add(&self, path: &Path, sources: Vec<LayerName>) -> Result<()> {
        let id = Id::random().during("no random bytes")?;
        let placed = (|| {
            fs::rename(path, self.file(id)).during("cannot put a merged layer in place")?;
            let record = record::encode(&Sources { sources: sources.clone() })?;
            self.root.replace(&self.record(id), &record)
        })();
        match placed {
            Ok(()) => {
                self.insert(id, sources, bytes_of(&self.file(id)).unwrap_or(0));
                self.prune();
                Ok(())
            }
            Err(error) => {
                let _ = self.remove_files(id);
                Err(error)
            }
        }
    }

    /// Forgets what is made of any of *names*.
    pub fn forget(&self, names: &[LayerName]) {
        self.retain(|one, _| !one.sources.iter().any(|source| names.contains(source)));
    }

    /// Forgets one that cannot be read.
    pub fn discard(&self, name: &LayerName) {
        self.retain(|one, _| one.name != *name);
    }

    /// How many there are, and what they take on disk.
    pub fn count(&self) -> (usize, u64) {
        let known = self.known();
        (known.values().map(Vec::len).sum(), known.values().flatten().map(|one| one.bytes).sum())
    }

    /// Forgets those that a longer one makes needless.
    fn prune(&self) {
        self.retain(|one, all| {
            let within = |other: &Arc<Merged>| {
                other.sources.len() > one.sources.len()
                    && other.sources.windows(one.sources.len()).any(|part| part == one.sources)
            };
            // One that is read is known here, and to its reader.
            Arc::strong_count(one) > 2 || !all.iter().any(within)
        });
    }

    fn retain(&self, keep: impl Fn(&Arc<Merged>, &[Arc<Merged>]) -> bool) {
        let mut known = self.known();
        // The second reference that `prune` counts with.
        let all: Vec<_> = known.values().flatten().cloned().collect();
        for of_one in known.values_mut() {
            of_one.retain(|one| keep(one, &all));
        }
        known.retain(|_, of_one| !of_one.is_empty());
        for one in &all {
            let kept = known.values().flatten().any(|other| other.name == one.name);
            if let Some(id) = one.name.as_str().split('.').next().filter(|_| !kept).and_then(|id| Id::parse(id).ok()) {
                if let Err(error) = self.remove_files(id) {
                    eprintln!("storaged: merged layer {id} stays: {error}");
                }
            }
        }
    }

    fn insert(&self, id: Id, sources: Vec<LayerName>, bytes: u64) {
        let Some(first) = sources.first().cloned() else { return };
        let merged = Merged { name: LayerName::new(id, Format::Lsmt), sources, bytes };
        self.known().entry(first).or_default().push(Arc::new(merged));
    }

    /// The record first: without it the file is nothing.
    fn remove_files(&self, id: Id) -> io::Result<()> {
        remove_if_there(&self.record(id))?;
        remove_if_there(&self.file(id))
    }

    fn file(&self, id: Id) -> PathBuf {
        self.root.merged().join(LayerName::new(id, Format::Lsmt).as_str())
    }

    fn record(&self, id: Id) -> PathBuf {
        self.root.merged().join(format!("{id}.sources"))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<LayerName, Vec<Arc<Merged>>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes_of(path: &Path) -> Option<u64> {
    path.metadata().ok().map(|found| found.blocks() * SECTOR)
}
