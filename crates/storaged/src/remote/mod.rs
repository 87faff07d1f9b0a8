//! Layers that lie elsewhere: on a file server, in a registry, in an object store.
//!
//! Such a layer is a record (where it is, how large, its digest) under `remote/`, and a cache of its
//! blocks. It is read like any other; what is not here is fetched when it is needed. Absence, silence and wrong bytes stay
//! three things up to whoever asked ([`failure::Failure`]).

mod ahead;
mod answer;
mod cache;
mod challenge;
mod counters;
mod credentials;
mod failure;
mod fetch;
mod fill;
mod flight;
mod gate;
mod meta;
mod object;
mod source;
mod stored;
mod target;
#[cfg(test)]
mod tests;
mod tokens;
mod web;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use self::cache::Cache;
use self::counters::Counters;
pub use self::credentials::Credentials;
pub use self::failure::Failure;
use self::fill::Fills;
use self::meta::Identity;
pub use self::object::SharedObject;
use self::object::{Common, Keep, Object};
pub use self::source::{Digest, Remote, Source, Sums};
use self::target::Target;
use self::web::{Patience, Web};
use crate::error::{Code, Context, Error, Result};
use crate::files::Files;
use crate::image::record;
use crate::names::LayerName;
use crate::root::{Root, remove_if_there, sync_directory};

/// What is fetched, checked and kept at a time.
pub const BLOCK_BYTES: u64 = 256 << 10;
/// Blocks that wait to be kept, beyond which they are not.
const MAX_KEEPING: usize = 64;
const TIDY_EVERY: Duration = Duration::from_secs(5);
/// Records in memory, of some 100 bytes each.
const MAX_LAYERS: usize = 1_000_000;

#[derive(Clone, Debug)]
pub struct Options {
    /// Where blocks are kept, if not below the root, and how many bytes of them at most.
    pub cache: Option<PathBuf>,
    pub cache_bytes: u64,
    /// How long a reader waits for one block, with all that is tried to get it.
    pub patience: Duration,
    /// Certificates to trust besides the host's, in PEM.
    pub authorities: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { cache: None, cache_bytes: 20 << 30, patience: Duration::from_secs(30), authorities: None }
    }
}

pub struct Remotes {
    root: Arc<Root>,
    files: Arc<Files>,
    options: Options,
    known: RwLock<HashMap<LayerName, Known>>,
    objects: Mutex<HashMap<LayerName, Weak<Object>>>,
    /// Started with the first remote layer: most nodes have none.
    engine: OnceLock<Engine>,
    starting: Mutex<()>,
}

#[derive(Clone, Copy)]
struct Known {
    /// From an earlier daemon.
    inherited: bool,
}

/// What does the work.
struct Engine {
    common: Arc<Common>,
    cache: Arc<Cache>,
    fills: Arc<Fills>,
    /// Its end is the end of the thread that tidies.
    _tidying: Sender<()>,
}

impl Remotes {
    /// The remote layers that there are records of.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(root: &Arc<Root>, files: &Arc<Files>, options: Options) -> Result<Arc<Self>> {
        let mut known = HashMap::new();
        for entry in fs::read_dir(root.remote()).during("cannot list remote layers")? {
            let name = entry.during("cannot list remote layers")?.file_name();
            if let Some(Ok(name)) = name.to_str().map(LayerName::parse) {
                known.insert(name, Known { inherited: true });
            }
        }
        Ok(Arc::new(Self {
            root: Arc::clone(root),
            files: Arc::clone(files),
            options,
            known: RwLock::new(known),
            objects: Mutex::default(),
            engine: OnceLock::new(),
            starting: Mutex::default(),
        }))
    }

    pub fn has(&self, name: &LayerName) -> bool {
        self.known().contains_key(name)
    }

    /// Every remote layer, and what is cached of it in bytes.
    pub fn list(&self) -> Vec<(LayerName, u64)> {
        let names: Vec<LayerName> = self.known().keys().cloned().collect();
        names.into_iter().map(|name| (name.clone(), self.bytes(&name))).collect()
    }

    pub fn bytes(&self, name: &LayerName) -> u64 {
        self.engine.get().map_or(0, |engine| engine.cache.bytes(name))
    }

    /// From now on there is a layer *name* that lies where *remote* says. Again with another source, it has moved.
    ///
    /// # Errors
    /// `invalid` for what cannot be; `already_exists` for another content of the name; what the file system says.
    pub fn add(&self, name: &LayerName, remote: &Remote) -> Result<()> {
        remote.check()?;
        Target::new(remote)?;
        let mut known = self.known_mut();
        if known.contains_key(name) {
            // One that cannot be read is as good as none.
            if let Ok(old) = self.read(name) {
                if (old.size_bytes, old.digest) != (remote.size_bytes, remote.digest) {
                    return Err(Error::new(Code::AlreadyExists, format!("layer {name} has another content")));
                }
                if old == *remote {
                    if let Some(object) = self.opened(name) {
                        object.pardon();
                    }
                    return Ok(());
                }
            }
        } else if known.len() >= MAX_LAYERS {
            return Err(Error::new(Code::Exhausted, format!("{MAX_LAYERS} remote layers")));
        }
        record::save(&self.root, &self.root.remote().join(name.as_str()), remote)?;
        known.insert(name.clone(), Known { inherited: false });
        drop(known);
        // Whoever has the old one open goes on with it.
        self.objects().remove(name);
        Ok(())
    }

    /// Forgets *name*, which nobody holds. Gives what it took, in bytes.
    ///
    /// # Errors
    /// What the file system says.
    pub fn remove(&self, name: &LayerName) -> Result<u64> {
        let bytes = self.bytes(name);
        let mut known = self.known_mut();
        remove_if_there(&self.root.remote().join(name.as_str())).during("cannot forget a remote layer")?;
        sync_directory(&self.root.remote())?;
        known.remove(name);
        drop(known);
        self.objects().remove(name);
        self.engine()?.cache.remove(name);
        Ok(bytes)
    }

    /// The layer *name*, to be read.
    ///
    /// # Errors
    /// `not_found` if there is none, `corrupt` if its record is damaged.
    pub fn object(&self, name: &LayerName) -> Result<Arc<Object>> {
        let engine = self.engine()?;
        if let Some(object) = self.opened(name) {
            return Ok(object);
        }
        let known = self.known().get(name).copied();
        let known = known.ok_or_else(|| Error::new(Code::NotFound, format!("no layer {name}")))?;
        let remote = self.read(name)?;
        let target = Target::new(&remote)?;
        let mut objects = self.objects();
        if let Some(object) = objects.get(name).and_then(Weak::upgrade) {
            return Ok(object);
        }
        let identity = Identity { size_bytes: remote.size_bytes, digest: remote.digest };
        let stored = engine.cache.load(name, identity);
        let common = Arc::clone(&engine.common);
        let object = Object::new(name.clone(), remote, target, common, stored, known.inherited);
        objects.retain(|_, object| object.strong_count() > 0);
        objects.insert(name.clone(), Arc::downgrade(&object));
        drop(objects);
        // Header, trailer and index are what is read first.
        object.expect(0, 1);
        object.expect(object.remote().size_bytes - 1, 1);
        Ok(object)
    }

    /// Fetches all of *names*, while nobody needs the network for anything else, and compares each with its digest.
    ///
    /// # Errors
    /// `not_found` for one that is not remote; none is fetched then.
    pub fn fill(self: &Arc<Self>, names: &[LayerName]) -> Result<()> {
        for name in names {
            if !self.has(name) {
                return Err(Error::new(Code::NotFound, format!("no remote layer {name}")));
            }
        }
        self.engine()?.fills.add(self, names)
    }

    /// What opens the sources at *address*, below *path* there; `None`: nothing does.
    ///
    /// # Errors
    /// `invalid` for an address that is none.
    pub fn set_credentials(&self, address: &str, path: &str, credentials: Option<Credentials>) -> Result<()> {
        let web = &self.engine()?.common.web;
        let url = web.vault.set(address, path, credentials)?;
        web.tokens.forget(&url);
        Ok(())
    }

    pub fn statistics(&self) -> Value {
        let layers = self.known().len();
        let Some(engine) = self.engine.get() else { return json!({ "layers": layers }) };
        json!({
            "layers": layers,
            "cache": engine.cache.usage(),
            "counters": engine.common.counters.read(),
            "fills": engine.fills.statistics(),
        })
    }

    /// Makes durable what is cached, and ends what is fetched ahead of need.
    pub fn stop(&self) {
        if let Some(engine) = self.engine.get() {
            engine.common.gate.stop();
            engine.cache.tidy(true);
        }
    }

    fn opened(&self, name: &LayerName) -> Option<Arc<Object>> {
        self.objects().get(name).and_then(Weak::upgrade)
    }

    fn read(&self, name: &LayerName) -> Result<Remote> {
        let remote: Remote = record::load(&self.root.remote().join(name.as_str()))?;
        remote.check().map_err(|error| Error::corrupt(format!("the record of layer {name}: {error}")))?;
        Ok(remote)
    }

    fn engine(&self) -> Result<&Engine> {
        let _turn = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let engine = self.start()?;
        Ok(self.engine.get_or_init(|| engine))
    }

    fn start(&self) -> Result<Engine> {
        let options = &self.options;
        let place = options.cache.clone().unwrap_or_else(|| self.root.path().join("cache"));
        let cache = Cache::open(&place, options.cache_bytes, &self.files, |name| self.has(name))?;
        let cache = Arc::new(cache);
        let (keeping, to_keep) = mpsc::sync_channel(MAX_KEEPING);
        let (tidying, ended) = mpsc::channel();
        let web = Web::new(Patience::of(options.patience), options.authorities.as_deref())?;
        let common = Common { web, gate: Arc::default(), counters: Arc::<Counters>::default(), keeping };
        thread("keep", {
            let cache = Arc::clone(&cache);
            move || keep(&cache, &to_keep)
        })?;
        thread("tidy", {
            let cache = Arc::clone(&cache);
            move || tidy(&cache, &ended)
        })?;
        let fills = Arc::new(Fills::new(Arc::clone(&common.gate)));
        Ok(Engine { common: Arc::new(common), cache, fills, _tidying: tidying })
    }

    fn known(&self) -> RwLockReadGuard<'_, HashMap<LayerName, Known>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_mut(&self) -> RwLockWriteGuard<'_, HashMap<LayerName, Known>> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn objects(&self) -> MutexGuard<'_, HashMap<LayerName, Weak<Object>>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.common.gate.stop();
    }
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).during("no thread for remote layers").map(drop)
}

/// Keeps blocks as they come, until nobody can send any more.
fn keep(cache: &Cache, blocks: &Receiver<Keep>) {
    while let Ok(Keep { object, block, bytes, flight }) = blocks.recv() {
        cache.put(object.stored(), block, &bytes);
        if flight.is_void() {
            object.stored().forget(block..block + 1);
        }
        object.landed(block, &flight);
    }
}

fn tidy(cache: &Cache, ended: &Receiver<()>) {
    loop {
        let over = ended.recv_timeout(TIDY_EVERY) != Err(RecvTimeoutError::Timeout);
        cache.tidy(over);
        if over {
            return;
        }
    }
}
