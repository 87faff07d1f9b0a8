//! What is kept of an image: one small file, whole or not there, and checked when it is read.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::{Context, Error, Result};
use crate::names::{Id, Owner};
use crate::protocol::Stack;
use crate::root::{Root, remove_if_there, sync_directory};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRecord {
    pub device: u64,
    pub stack: Stack,
    pub upper: Id,
    /// The upper to come, while *upper* becomes a layer.
    pub next: Option<Id>,
}

/// Of no use after another boot, when nobody maps anything any more.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRecord {
    pub device: u64,
    pub stack: Stack,
    pub owners: Vec<Owner>,
    /// It was made from a frozen child, so it is not the one that all owners of the stack share.
    pub own: bool,
    /// The child whose pages lie on the stack, while they are in no layer.
    pub frozen: Option<Id>,
}

/// A frozen child, and where it is to be found. Of no use after another boot.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrozenRecord {
    pub owner: Owner,
    pub pid: i32,
    pub start_time: u64,
    /// Of the image that it maps.
    pub file_system: (u32, u32),
    pub inode: u64,
    /// What that image shows.
    pub stack: Stack,
    /// The same with what the child had changed, once that is written down.
    pub captured: Option<Stack>,
    pub captured_bytes: u64,
    /// Nobody needs it but the memory that waits for it.
    pub thawed: bool,
}

/// Which file a record is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    Disk(Owner),
    Memory(u64),
    Frozen(Id),
}

impl Key {
    fn path(&self, root: &Root) -> PathBuf {
        root.images().join(match self {
            Self::Disk(owner) => format!("disk-{owner}"),
            Self::Memory(device) => format!("memory-{device}"),
            Self::Frozen(id) => format!("frozen-{id}"),
        })
    }

    fn parse(name: &str) -> Option<Self> {
        if let Some(owner) = name.strip_prefix("disk-") {
            return Owner::parse(owner).ok().map(Self::Disk);
        }
        if let Some(id) = name.strip_prefix("frozen-") {
            return Id::parse(id).ok().map(Self::Frozen);
        }
        name.strip_prefix("memory-")?.parse().ok().map(Self::Memory)
    }
}

/// Every record that there is, readable or not.
///
/// # Errors
/// What the file system says.
pub fn list(root: &Root) -> Result<Vec<Key>> {
    let mut keys = Vec::new();
    for entry in fs::read_dir(root.images()).during("cannot list images")? {
        let name = entry.during("cannot list images")?.file_name();
        keys.extend(name.to_str().and_then(Key::parse));
    }
    Ok(keys)
}

/// # Errors
/// `corrupt` when it is not what was written, what the file system says.
pub fn read<T: DeserializeOwned>(root: &Root, key: &Key) -> Result<T> {
    load(&key.path(root))
}

/// The record at *path*, which is none of an image.
///
/// # Errors
/// As [`read`].
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).during("cannot read a record")?;
    let damaged = || Error::corrupt(format!("the record {} is damaged", path.display()));
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(damaged)?;
    let sum = format!("{:08x}\n", crc32c::crc32c(&bytes[..end]));
    if bytes[end + 1..] != *sum.as_bytes() {
        return Err(damaged());
    }
    serde_json::from_slice(&bytes[..end]).map_err(|_| damaged())
}

/// Puts a record at *path*. Durable when it returns.
///
/// # Errors
/// As [`write`].
pub fn save<T: Serialize>(root: &Root, path: &Path, record: &T) -> Result<()> {
    root.replace(path, &encode(record)?)
}

/// The same, of what may get lost with the host.
///
/// # Errors
/// As [`write`].
pub fn hint<T: Serialize>(root: &Root, path: &Path, record: &T) -> Result<()> {
    root.replace_for_this_boot(path, &encode(record)?)
}

/// Durable when it returns.
///
/// # Errors
/// What the file system says; the old record is then there, or the new one.
pub fn write<T: Serialize>(root: &Root, key: &Key, record: &T) -> Result<()> {
    save(root, &key.path(root), record)
}

/// The same for as long as the host is up.
///
/// # Errors
/// What the file system says.
pub fn note<T: Serialize>(root: &Root, key: &Key, record: &T) -> Result<()> {
    root.replace_for_this_boot(&key.path(root), &encode(record)?)
}

/// Removes what was noted. It may be gone already.
///
/// # Errors
/// What the file system says.
pub fn forget(root: &Root, key: &Key) -> Result<()> {
    remove_if_there(&key.path(root)).during("cannot remove a record")
}

/// A record as it is in its file.
///
/// # Errors
/// None for a record of ours.
pub fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(record).map_err(|e| Error::new(crate::error::Code::Bug, e.to_string()))?;
    let sum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(format!("\n{sum:08x}\n").as_bytes());
    Ok(bytes)
}

/// Durable when it returns. It may be gone already.
///
/// # Errors
/// What the file system says.
pub fn remove(root: &Root, key: &Key) -> Result<()> {
    forget(root, key)?;
    sync_directory(&root.images())
}
