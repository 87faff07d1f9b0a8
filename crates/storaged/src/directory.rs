//! Which devices there are, by number and by name: what a front end that shows names asks.

use std::sync::Arc;

use crate::device::{Device, DeviceId, Kind};

/// A name in the folder of its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub id: DeviceId,
    /// 1 to 255 bytes, without `/` and NUL.
    pub name: String,
}

/// The devices that are attached now.
///
/// Asked from many threads at once, for every request: answers come from memory, and no lock is held
/// while a front end is called ([`crate::fuse::Front::removed`] waits for requests in progress, which ask here).
pub trait Directory: Send + Sync {
    fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>>;

    fn find(&self, kind: Kind, name: &str) -> Option<DeviceId>;

    /// The devices of *kind* with numbers above *after*, in order of their numbers, *limit* at most.
    fn list(&self, kind: Kind, after: Option<DeviceId>, limit: usize) -> Vec<Named>;
}
