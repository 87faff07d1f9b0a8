//! What guests touched when they last started from a stack, so that it can be fetched before they ask.
//!
//! Sets are hints: one that is missing, old or damaged costs time and nothing else.

mod recorder;
mod replay;
mod set;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use self::recorder::Recorder;
pub use self::replay::{Replay, Statistics as Replayed};
pub use self::set::WorkingSet;
use crate::error::{Code, Context, Error, Result};
use crate::image::record;
use crate::names::LayerName;
use crate::protocol::{Stack, StackKind};
use crate::root::{Root, remove_if_there};

/// Small files; about 1 KiB of memory each.
const MAX_SETS: usize = 20_000;

pub struct WorkingSets {
    root: Arc<Root>,
    /// Which there are, by the name of their file.
    known: Mutex<HashMap<String, Vec<LayerName>>>,
}

/// What a file holds.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    kind: StackKind,
    stack: Stack,
    set: WorkingSet,
}

impl WorkingSets {
    /// Those that an earlier daemon kept; what cannot be read goes.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(root: &Arc<Root>) -> Result<Self> {
        let mut known = HashMap::new();
        for entry in fs::read_dir(root.working_sets()).during("cannot list working sets")? {
            let entry = entry.during("cannot list working sets")?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            match record::load::<Kept>(&entry.path()) {
                Ok(kept) if file_name(kept.kind, &kept.stack) == name => drop(known.insert(name, kept.stack.layers)),
                _ => remove_if_there(&entry.path()).during("cannot remove a damaged working set")?,
            }
        }
        Ok(Self { root: Arc::clone(root), known: Mutex::new(known) })
    }

    pub fn get(&self, kind: StackKind, stack: &Stack) -> Option<WorkingSet> {
        let name = file_name(kind, stack);
        if !self.known().contains_key(&name) {
            return None;
        }
        let kept = record::load::<Kept>(&self.path(&name)).ok()?;
        (kept.kind == kind && kept.stack == *stack).then_some(kept.set)
    }

    /// An empty set is none.
    ///
    /// # Errors
    /// `exhausted` for too many; what the file system says.
    pub fn put(&self, kind: StackKind, stack: &Stack, set: WorkingSet) -> Result<()> {
        let name = file_name(kind, stack);
        let mut known = self.known();
        if set.is_empty() {
            known.remove(&name);
            return remove_if_there(&self.path(&name)).during("cannot forget a working set");
        }
        if known.len() >= MAX_SETS && !known.contains_key(&name) {
            return Err(Error::new(Code::Exhausted, format!("{MAX_SETS} working sets")));
        }
        // Lost with the host at worst: no reason to wait for a disk.
        record::hint(&self.root, &self.path(&name), &Kept { kind, stack: stack.clone(), set })?;
        known.insert(name, stack.layers.clone());
        Ok(())
    }

    /// These layers are gone, and with them every stack that has one.
    pub fn forget(&self, layers: &[LayerName]) {
        let mut known = self.known();
        let gone = |used: &Vec<LayerName>| used.iter().any(|layer| layers.contains(layer));
        let names: Vec<String> = known.iter().filter(|(_, used)| gone(used)).map(|(name, _)| name.clone()).collect();
        for name in names {
            known.remove(&name);
            if let Err(error) = remove_if_there(&self.path(&name)) {
                eprintln!("storaged: the working set {name} stays: {error}");
            }
        }
    }

    pub fn count(&self) -> usize {
        self.known().len()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.working_sets().join(name)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Vec<LayerName>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file_name(kind: StackKind, stack: &Stack) -> String {
    let mut sum = Sha256::new();
    sum.update(match kind {
        StackKind::Disk => b"disk\n".as_slice(),
        StackKind::Memory => b"memory\n",
    });
    sum.update(stack.size_bytes.to_le_bytes());
    for layer in &stack.layers {
        sum.update(layer.as_str());
        sum.update(b"\n");
    }
    sum.finalize().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// By layer, what is to be fetched.
type Wanted = BTreeMap<LayerName, replay::Blocks>;
