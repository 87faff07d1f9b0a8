//! Requests and answers on the daemon's socket, as `spec/storaged/protocol.md` has them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Code, Left};

pub const VERSION: u32 = 1;

/// More than any request or answer needs; a longer frame ends the connection.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Chosen by the caller, unique on its connection, and repeated in the answer.
    pub id: u64,
    #[serde(flatten)]
    pub call: Call,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StackKind {
    Disk,
    Memory,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    /// Lowest first.
    pub layers: Vec<String>,
    pub size_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    None,
    Lz4,
    Zstd,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum Call {
    Hello { protocol: u32 },
    CreateDisk { owner: String, stack: Stack },
    OpenDisk { owner: String },
    ResizeDisk { owner: String, size_bytes: u64 },
    SealDisk { owner: String },
    AttachMemory { owner: String, stack: Stack },
    Freeze { owner: String, pid: i32 },
    AttachFrozen { owner: String, frozen: String },
    Thaw { frozen: String },
    CaptureMemory { owner: String, pid: i32, compression: Compression },
    CaptureFrozen { frozen: String, compression: Compression },
    Flatten { kind: StackKind, stack: Stack },
    Import { source: PathBuf, size_bytes: u64 },
    Detach { owner: String },
    Remove { owner: String },
    Owners,
    Layers,
    DeleteLayers { layers: Vec<String> },
    Statistics,
    Drain,
    Shutdown,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome<T: Serialize> {
    Ok(T),
    Error { code: Code, left: Left, message: String },
}

#[derive(Debug, Serialize)]
pub struct Answer<T: Serialize> {
    pub id: u64,
    #[serde(flatten)]
    pub outcome: Outcome<T>,
}
