//! The calls of the protocol: from a request to an operation, and from its result to an answer.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::{Node, last};
use crate::error::{Code, Error, Result};
use crate::fuse::Start;
use crate::library::Held;
use crate::names::LayerName;
use crate::protocol::{Call, Stack};
use crate::remote::Remote;
use crate::transfer;

/// One connection: what it made is held until it ends.
#[derive(Default)]
pub struct Session {
    held: Mutex<HashMap<LayerName, Held>>,
}

/// Answers calls from many threads.
pub struct Service {
    node: Arc<Node>,
    mounted: Option<Start>,
    work: Mutex<Work>,
    done: Condvar,
}

#[derive(Default)]
struct Work {
    stage: Stage,
    running: usize,
    calls: BTreeMap<&'static str, Counted>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd)]
enum Stage {
    #[default]
    Serving,
    /// Nothing new is attached.
    Draining,
    /// Nothing is done any more.
    Ended,
}

#[derive(Clone, Copy, Default)]
struct Counted {
    calls: u64,
    errors: u64,
}

impl Service {
    pub fn new(node: Arc<Node>) -> Self {
        Self { node, mounted: None, work: Mutex::default(), done: Condvar::new() }
    }

    /// For callers to learn what became of the paths that an earlier daemon gave.
    #[must_use]
    pub fn mounted(mut self, start: Start) -> Self {
        self.mounted = Some(start);
        self
    }

    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Does what *call* says and waits for it.
    ///
    /// # Errors
    /// As the protocol says.
    pub fn call(&self, session: &Session, call: Call) -> Result<Value> {
        let name = name(&call);
        // Those two wait for all others, and so do not count among them.
        if let Call::Drain {} | Call::Shutdown {} = call {
            self.drain(if let Call::Drain {} = call { Stage::Draining } else { Stage::Ended });
            return Ok(json!({}));
        }
        self.enter(&call)?;
        let result = self.perform(session, call);
        let mut work = self.work();
        work.running -= 1;
        let counted = work.calls.entry(name).or_default();
        counted.calls += 1;
        counted.errors += u64::from(result.is_err());
        self.done.notify_all();
        result
    }

    fn enter(&self, call: &Call) -> Result<()> {
        let mut work = self.work();
        let attaches = matches!(
            call,
            Call::CreateDisk { .. } | Call::OpenDisk { .. } | Call::AttachMemory { .. } | Call::AttachFrozen { .. }
        );
        if work.stage == Stage::Ended || (attaches && work.stage == Stage::Draining) {
            return Err(Error::new(Code::Unavailable, "the daemon is ending"));
        }
        work.running += 1;
        Ok(())
    }

    /// Refuses what is new, waits for what is running, and makes durable what was written.
    fn drain(&self, stage: Stage) {
        let mut work = self.work();
        if stage > work.stage {
            work.stage = stage;
        }
        while work.running > 0 {
            work = self.done.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        drop(work);
        self.node.flush_all();
    }

    /// As the call `shutdown`.
    pub fn end(&self) {
        self.drain(Stage::Ended);
    }

    fn perform(&self, session: &Session, call: Call) -> Result<Value> {
        let node = &self.node;
        match call {
            Call::Hello { .. } | Call::Drain {} | Call::Shutdown {} => Ok(json!({})),
            Call::CreateDisk { owner, stack } => node.create_disk(&owner, stack).map(disk),
            Call::OpenDisk { owner } => node.open_disk(&owner).map(disk),
            Call::ResizeDisk { owner, size_bytes } => node.resize_disk(&owner, size_bytes).map(disk),
            Call::SealDisk { owner } => node.seal_disk(&owner).map(|made| session.keep(made)),
            Call::AttachMemory { owner, stack } => {
                node.attach_memory(&owner, &stack).map(|path| json!({ "path": path }))
            }
            Call::CaptureMemory { owner, pid, compression } => {
                let (stack, held, bytes) = node.capture_memory(&owner, pid, compression)?;
                let mut answer = session.keep((stack, held));
                answer["captured_bytes"] = json!(bytes);
                Ok(answer)
            }
            Call::Flatten { kind, stack } => node.flatten(kind, &stack).map(|made| session.keep(made)),
            Call::Import { source, size_bytes } => node.import(&source, size_bytes).map(|made| session.keep(made)),
            Call::Detach { owner } => node.detach(&owner).map(|()| json!({})),
            Call::Remove { owner } => node.remove(&owner).map(|()| json!({})),
            Call::Owners {} => Ok(self.owners()),
            Call::Layers {} => self.layers(),
            Call::DeleteLayers { layers } => {
                session.release(&layers);
                let (deleted, bytes) = node.parts.library.delete(&layers)?;
                node.forget_layers(&deleted);
                node.sets.forget(&deleted);
                Ok(json!({ "deleted": deleted, "bytes": bytes }))
            }
            Call::AddRemoteLayer { layer, source, size_bytes, digest, block_sums } => {
                let remote = Remote { source, size_bytes, digest, block_sums };
                let held = node.parts.library.add_remote(&layer, &remote)?;
                session.hold(layer, held);
                Ok(json!({}))
            }
            Call::DescribeLayer { layer } => transfer::describe(&node.parts, &layer),
            Call::SetCredentials { address, path, credentials } => {
                node.parts.library.remotes().set_credentials(&address, &path, credentials).map(|()| json!({}))
            }
            Call::FillLayers { layers } => node.parts.library.remotes().fill(&layers).map(|()| json!({})),
            Call::Record { owner, seconds } => node.record(&owner, seconds).map(|()| json!({})),
            Call::WorkingSet { kind, stack } => Ok(json!({ "working_set": node.working_set(kind, &stack) })),
            Call::SetWorkingSet { kind, stack, working_set } => {
                node.set_working_set(kind, &stack, working_set).map(|()| json!({}))
            }
            Call::Statistics {} => Ok(self.statistics()),
            Call::Freeze { owner, pid } => node.freeze(&owner, pid).map(|froze| {
                let copy_ms = froze.took.as_secs_f64() * 1000.0;
                json!({ "frozen": froze.frozen, "copy_ms": copy_ms, "dirty_bytes": froze.dirty_bytes })
            }),
            Call::CaptureFrozen { frozen, compression } => {
                let (stack, held, bytes) = node.capture_frozen(frozen, compression)?;
                let mut answer = session.keep((stack, held));
                answer["captured_bytes"] = json!(bytes);
                Ok(answer)
            }
            Call::Thaw { frozen } => node.thaw(frozen).map(|()| json!({})),
            Call::AttachFrozen { owner, frozen } => {
                node.attach_frozen(&owner, frozen).map(|path| json!({ "path": path }))
            }
        }
    }

    fn owners(&self) -> Value {
        let owners: Vec<Value> = self
            .node
            .owned()
            .into_iter()
            .map(|owned| {
                let (owner, disk, memory) = (owned.owner, owned.disk, owned.memory);
                json!({ "owner": owner, "disk": disk, "memory": memory, "damaged": owned.damaged })
            })
            .collect();
        let frozen: Vec<_> = self.node.images().frozen.keys().copied().collect();
        json!({ "owners": owners, "frozen": frozen })
    }

    fn layers(&self) -> Result<Value> {
        let listed = self.node.parts.library.list()?;
        let layers: Vec<Value> = listed
            .into_iter()
            .map(|layer| json!({ "layer": layer.name, "size_bytes": layer.bytes, "held": layer.held }))
            .collect();
        Ok(json!({ "layers": layers }))
    }

    fn statistics(&self) -> Value {
        let (disks, memories, damaged, frozen) = {
            let images = self.node.images();
            (images.disks.len(), images.memories.len() - images.idle.len(), images.damaged.len(), images.frozen.len())
        };
        let (merged, merged_bytes) = self.node.parts.library.merges().count();
        let work = self.work();
        let calls: BTreeMap<_, _> = work
            .calls
            .iter()
            .map(|(name, counted)| (*name, json!({ "calls": counted.calls, "errors": counted.errors })))
            .collect();
        json!({
            "disks": disks,
            "memories": memories,
            "damaged": damaged,
            "frozen": frozen,
            "open_layers": self.node.parts.library.open_files(),
            "index_bytes": self.node.parts.stacks.memory_bytes(),
            "running": work.running,
            "working_sets": self.node.touched_statistics(),
            "remote": self.node.parts.library.remotes().statistics(),
            "merging": self.node.merger.waiting(),
            "merged": { "layers": merged, "bytes": merged_bytes },
            "calls": calls,
            "fuse": self.node.front().map(crate::fuse::Front::statistics),
            "ublk": self.node.blocks().map(crate::ublk::Front::statistics),
        })
    }

    /// What a caller learns first.
    pub fn greeting(&self) -> Value {
        let front = self.node.front();
        json!({
            "protocol": crate::protocol::VERSION,
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "front_ends": front.map(|_| "fuse").into_iter().chain(self.node.blocks().map(|_| "ublk")).collect::<Vec<_>>(),
            "mount": front.map(crate::fuse::Front::mount_point),
            "mounted": self.mounted,
        })
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Holds the layer that a call made for as long as the connection lives.
    fn keep(&self, (stack, held): (Stack, Held)) -> Value {
        // Only the one on top: those below are held by whoever has them.
        if let Some(made) = last(&stack).filter(|made| held.names().contains(made)) {
            let only = held.of(made);
            self.held().insert(made.clone(), only);
        }
        json!({ "stack": stack })
    }

    fn hold(&self, layer: LayerName, held: Held) {
        self.held().insert(layer, held);
    }

    fn release(&self, layers: &[LayerName]) {
        let mut held = self.held();
        for layer in layers {
            held.remove(layer);
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<LayerName, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the last step of a chain")]
fn disk(path: std::path::PathBuf) -> Value {
    json!({ "path": path, "format": "raw" })
}

fn name(call: &Call) -> &'static str {
    match call {
        Call::Hello { .. } => "hello",
        Call::CreateDisk { .. } => "create_disk",
        Call::OpenDisk { .. } => "open_disk",
        Call::ResizeDisk { .. } => "resize_disk",
        Call::SealDisk { .. } => "seal_disk",
        Call::AttachMemory { .. } => "attach_memory",
        Call::Freeze { .. } => "freeze",
        Call::AttachFrozen { .. } => "attach_frozen",
        Call::Thaw { .. } => "thaw",
        Call::CaptureMemory { .. } => "capture_memory",
        Call::CaptureFrozen { .. } => "capture_frozen",
        Call::Flatten { .. } => "flatten",
        Call::Import { .. } => "import",
        Call::Detach { .. } => "detach",
        Call::Remove { .. } => "remove",
        Call::Owners {} => "owners",
        Call::Layers {} => "layers",
        Call::DeleteLayers { .. } => "delete_layers",
        Call::AddRemoteLayer { .. } => "add_remote_layer",
        Call::DescribeLayer { .. } => "describe_layer",
        Call::SetCredentials { .. } => "set_credentials",
        Call::FillLayers { .. } => "fill_layers",
        Call::Record { .. } => "record",
        Call::WorkingSet { .. } => "working_set",
        Call::SetWorkingSet { .. } => "set_working_set",
        Call::Statistics {} => "statistics",
        Call::Drain {} => "drain",
        Call::Shutdown {} => "shutdown",
    }
}
