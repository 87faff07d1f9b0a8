//! Which layers there are, and who needs them.
//!
//! A layer appears whole and durable, never changes, and goes only when nobody holds it. Holding is
//! counted by name; a layer that is being deleted cannot be held any more, and one that is held
//! cannot be deleted: both are decided under one lock.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use layers::SECTOR;

use crate::content::Content;
use crate::error::{Code, Context, Error, Result};
use crate::files::{Files, Handle, Shared};
use crate::merged::Merges;
use crate::names::{Format, Id, LayerName};
use crate::remote::{Remote, Remotes, SharedObject};
use crate::root::{Root, sync_directory};

pub struct Library {
    root: Arc<Root>,
    files: Arc<Files>,
    remotes: Arc<Remotes>,
    merges: Merges,
    holds: Mutex<Holds>,
    /// One for each layer, whoever reads it.
    handles: Mutex<HashMap<LayerName, Weak<Handle>>>,
}

#[derive(Default)]
struct Holds {
    counts: HashMap<LayerName, usize>,
    /// Somebody holds layers, and nobody knows which.
    everything: bool,
}

/// Layers that stay for as long as this value lives.
pub struct Held {
    names: Vec<LayerName>,
    library: Arc<Library>,
}

/// A layer that is being written. Dropped before [`NewLayer::finish`], it leaves nothing.
pub struct NewLayer {
    pub file: File,
    path: PathBuf,
    id: Id,
    done: bool,
    library: Arc<Library>,
}

/// One line of a listing.
pub struct Listed {
    pub name: LayerName,
    /// What it takes on disk.
    pub bytes: u64,
    pub held: bool,
}

impl Library {
    /// # Errors
    /// What the file system says.
    pub fn new(root: &Arc<Root>, open_files: usize, options: crate::remote::Options) -> Result<Arc<Self>> {
        let files = Files::new(open_files);
        let remotes = Remotes::open(root, &files, options)?;
        let exists = |name: &LayerName| root.layers().join(name.as_str()).exists() || remotes.has(name);
        Ok(Arc::new(Self {
            merges: Merges::open(root, exists)?,
            root: Arc::clone(root),
            remotes,
            files,
            holds: Mutex::default(),
            handles: Mutex::default(),
        }))
    }

    pub fn remotes(&self) -> &Arc<Remotes> {
        &self.remotes
    }

    /// Copies of runs of layers.
    pub fn merges(&self) -> &Merges {
        &self.merges
    }

    /// Holds *names*; each as often as it is named.
    ///
    /// # Errors
    /// `not_found` for one that is not there; none is held then.
    pub fn hold(self: &Arc<Self>, names: &[LayerName]) -> Result<Held> {
        let mut holds = self.holds();
        for name in names {
            if !holds.counts.contains_key(name) && !self.exists(name) {
                return Err(Error::new(Code::NotFound, format!("no layer {name}")));
            }
        }
        for name in names {
            *holds.counts.entry(name.clone()).or_default() += 1;
        }
        Ok(Held { names: names.to_vec(), library: Arc::clone(self) })
    }

    /// The same for what a record of ours names: whether it is there shows when it is needed.
    pub fn hold_unseen(self: &Arc<Self>, names: &[LayerName]) -> Held {
        let mut holds = self.holds();
        for name in names {
            *holds.counts.entry(name.clone()).or_default() += 1;
        }
        Held { names: names.to_vec(), library: Arc::clone(self) }
    }

    /// Holds every layer that there is, or no longer: for what cannot say which it needs.
    pub fn hold_everything(&self, everything: bool) {
        self.holds().everything = everything;
    }

    fn exists(&self, name: &LayerName) -> bool {
        self.path(name).exists() || self.remotes.has(name)
    }

    /// There is a layer *name* where *remote* says, and it is held.
    ///
    /// # Errors
    /// `already_exists` if it is here already, or is one with another content; `invalid` for what cannot be.
    pub fn add_remote(self: &Arc<Self>, name: &LayerName, remote: &Remote) -> Result<Held> {
        let held = self.hold_unseen(std::slice::from_ref(name));
        if self.path(name).exists() {
            return Err(Error::new(Code::AlreadyExists, format!("layer {name} is here")));
        }
        self.remotes.add(name, remote)?;
        Ok(held)
    }

    /// The bytes of *name*, which is held.
    ///
    /// # Errors
    /// `corrupt` for a record of a remote layer that is damaged; the file of one that is here is looked at when it is read.
    pub fn content(&self, name: &LayerName) -> Result<Content> {
        if self.remotes.has(name) {
            return Ok(Content::Remote(SharedObject(self.remotes.object(name)?)));
        }
        Ok(Content::Local(Shared(self.handle(name))))
    }

    /// The file of *name*, which is held and here.
    fn handle(&self, name: &LayerName) -> Arc<Handle> {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = handles.get(name).and_then(Weak::upgrade) {
            return handle;
        }
        let handle = self.files.handle(self.merges.path(name).unwrap_or_else(|| self.path(name)));
        handles.retain(|_, handle| handle.strong_count() > 0);
        handles.insert(name.clone(), Arc::downgrade(&handle));
        handle
    }

    pub fn open_files(&self) -> usize {
        self.files.count()
    }

    pub fn path(&self, name: &LayerName) -> PathBuf {
        self.root.layers().join(name.as_str())
    }

    /// What *name* takes on disk, which may be a merged one.
    ///
    /// # Errors
    /// What the file system says.
    pub fn read_bytes(&self, name: &LayerName) -> Result<u64> {
        let Some(path) = self.merges.path(name) else { return self.bytes(name) };
        let found = path.metadata().during(format_args!("cannot look at merged layer {name}"))?;
        Ok(found.blocks() * SECTOR)
    }

    /// What *name* takes on disk.
    ///
    /// # Errors
    /// What the file system says.
    pub fn bytes(&self, name: &LayerName) -> Result<u64> {
        if self.remotes.has(name) {
            return Ok(self.remotes.bytes(name));
        }
        let found = self.path(name).metadata().during(format_args!("cannot look at layer {name}"))?;
        Ok(found.blocks() * SECTOR)
    }

    /// A layer to be written, *id* to be its name.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(self: &Arc<Self>, id: Id) -> Result<NewLayer> {
        let (path, file) = self.root.temporary()?;
        Ok(NewLayer { file, path, id, done: false, library: Arc::clone(self) })
    }

    /// Takes the complete and durable file at *path* as the layer *name*, and holds it.
    ///
    /// # Errors
    /// What the file system says; the file is where it was unless it says so after the renaming.
    pub fn adopt(self: &Arc<Self>, path: &std::path::Path, name: &LayerName) -> Result<Held> {
        // Held before it is seen, so that no collector can come between.
        let held = self.hold_unseen(std::slice::from_ref(name));
        fs::rename(path, self.path(name)).during(format_args!("cannot put layer {name} in place"))?;
        sync_directory(&self.root.layers())?;
        Ok(held)
    }

    /// Every layer that there is.
    ///
    /// # Errors
    /// What the file system says.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.root.layers()).during("cannot list layers")? {
            let entry = entry.during("cannot list layers")?;
            let name = entry.file_name().to_str().map(LayerName::parse);
            let Some(Ok(name)) = name else { continue };
            match entry.metadata() {
                Ok(metadata) => found.push((name, metadata.blocks() * SECTOR)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => (),
                Err(e) => return Err(Error::io("cannot list layers", e)),
            }
        }
        found.extend(self.remotes.list());
        found.sort();
        found.dedup_by(|one, other| one.0 == other.0);
        let holds = self.holds();
        Ok(found.into_iter().map(|(name, bytes)| Listed { held: holds.has(&name), name, bytes }).collect())
    }

    /// Deletes those of *names* that are there and that nobody holds; gives them and their bytes.
    ///
    /// # Errors
    /// What the file system says; some may be gone then.
    pub fn delete(&self, names: &[LayerName]) -> Result<(Vec<LayerName>, u64)> {
        let mut deleted = Vec::new();
        let mut bytes = 0;
        for name in names {
            let holds = self.holds();
            if holds.has(name) {
                continue;
            }
            if self.remotes.has(name) {
                bytes += self.remotes.remove(name)?;
                deleted.push(name.clone());
                continue;
            }
            let path = self.path(name);
            let size = match path.metadata() {
                Ok(metadata) => metadata.blocks() * SECTOR,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(Error::io(format_args!("cannot look at layer {name}"), e)),
            };
            fs::remove_file(&path).during(format_args!("cannot delete layer {name}"))?;
            deleted.push(name.clone());
            bytes += size;
        }
        Ok((deleted, bytes))
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holds {
    fn has(&self, name: &LayerName) -> bool {
        self.everything || self.counts.contains_key(name)
    }
}

impl Held {
    pub fn names(&self) -> &[LayerName] {
        &self.names
    }

    /// Only *name*, which is among them, is held any longer.
    #[must_use]
    pub fn of(self, name: &LayerName) -> Self {
        // Held twice for a moment, so that it is held all the time.
        self.library.hold_unseen(std::slice::from_ref(name))
    }

    /// Both as one.
    #[must_use]
    pub fn and(mut self, mut other: Self) -> Self {
        self.names.append(&mut other.names);
        self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut holds = self.library.holds();
        for name in self.names.drain(..) {
            if let Some(count) = holds.counts.get_mut(&name) {
                *count -= 1;
                if *count == 0 {
                    holds.counts.remove(&name);
                }
            }
        }
    }
}

impl NewLayer {
    pub fn id(&self) -> Id {
        self.id
    }

    /// The file is complete: makes it durable, and a layer, which is held.
    ///
    /// # Errors
    /// What the file system says; there is no layer then.
    pub fn finish(mut self, format: Format) -> Result<(LayerName, Held)> {
        let name = LayerName::new(self.id, format);
        self.file.sync_all().during("cannot make a layer durable")?;
        let held = self.library.adopt(&self.path, &name)?;
        self.done = true;
        Ok((name, held))
    }
}

impl Drop for NewLayer {
    fn drop(&mut self) {
        if !self.done {
            // Start-up empties the directory if this does not.
            let _ = fs::remove_file(&self.path);
        }
    }
}
