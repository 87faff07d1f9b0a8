//! Requests and answers on the daemon's socket, as `spec/storaged/protocol.md` has them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Code, Error, Left, Result};
use crate::names::{Id, LayerName, Owner};
use crate::remote::{Credentials, Digest, Source, Sums};
use crate::working_set::WorkingSet;

pub const VERSION: u32 = 1;

/// More than any request or answer needs; a longer frame ends the connection.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub struct Request {
    /// Chosen by the caller, unique on its connection, and repeated in the answer.
    pub id: u64,
    /// `Err` when it is none that this daemon knows: an answer can still be given.
    pub call: Result<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StackKind {
    Disk,
    Memory,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    /// Lowest first.
    pub layers: Vec<LayerName>,
    pub size_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    None,
    Lz4,
    Zstd,
}

/// Calls without arguments have braces, since serde ignores unknown fields of unit variants.
#[derive(Debug, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    Hello { protocol: u32 },
    CreateDisk { owner: Owner, stack: Stack },
    OpenDisk { owner: Owner },
    ResizeDisk { owner: Owner, size_bytes: u64 },
    SealDisk { owner: Owner },
    AttachMemory { owner: Owner, stack: Stack },
    Freeze { owner: Owner, pid: i32 },
    AttachFrozen { owner: Owner, frozen: Id },
    Thaw { frozen: Id },
    CaptureMemory { owner: Owner, pid: i32, compression: Compression },
    CaptureFrozen { frozen: Id, compression: Compression },
    Flatten { kind: StackKind, stack: Stack },
    Import { source: PathBuf, size_bytes: u64 },
    Detach { owner: Owner },
    Remove { owner: Owner },
    Owners {},
    Layers {},
    DeleteLayers { layers: Vec<LayerName> },
    AddRemoteLayer { layer: LayerName, source: Source, size_bytes: u64, digest: Digest, block_sums: Option<Sums> },
    DescribeLayer { layer: LayerName },
    SetCredentials { address: String, path: String, credentials: Option<Credentials> },
    FillLayers { layers: Vec<LayerName> },
    Record { owner: Owner, seconds: u64 },
    WorkingSet { kind: StackKind, stack: Stack },
    SetWorkingSet { kind: StackKind, stack: Stack, working_set: Option<WorkingSet> },
    Statistics {},
    Drain {},
    Shutdown {},
}

/// Reads one frame's bytes. `None` when it is no request at all: then no answer has an address.
pub fn parse(frame: &[u8]) -> Option<Request> {
    let mut fields: Map<String, Value> = serde_json::from_slice(frame).ok()?;
    let id = fields.remove("id")?.as_u64()?;
    let call = serde_json::from_value(Value::Object(fields)).map_err(|e| Error::invalid(e.to_string()));
    Some(Request { id, call })
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok(Value),
    Error { code: Code, left: Left, message: String },
}

#[derive(Debug, Serialize)]
pub struct Answer {
    pub id: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl Answer {
    pub fn new(id: u64, result: Result<Value>) -> Self {
        let outcome = match result {
            Ok(value) => Outcome::Ok(value),
            Err(Error { code, left, message, .. }) => Outcome::Error { code, left, message },
        };
        Self { id, outcome }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(frame: &str) -> Option<Code> {
        parse(frame.as_bytes()).map(|r| r.call.err().map_or(Code::Bug, |e| e.code))
    }

    #[test]
    fn what_is_no_request_has_no_answer() {
        for frame in ["", "[]", "{}", r#"{"id": -1, "call": "owners"}"#, r#"{"call": "owners"}"#, "\u{0}"] {
            assert!(parse(frame.as_bytes()).is_none(), "{frame:?}");
        }
    }

    #[test]
    fn unknown_calls_fields_and_names_are_invalid() {
        for frame in [
            r#"{"id": 1, "call": "dance"}"#,
            r#"{"id": 1}"#,
            r#"{"id": 1, "call": "owners", "x": 1}"#,
            r#"{"id": 1, "call": "open_disk", "owner": "../x"}"#,
            r#"{"id": 1, "call": "open_disk", "owner": "x", "more": 1}"#,
            r#"{"id": 1, "call": "hello"}"#,
            r#"{"id": 1, "call": "create_disk", "owner": "x", "stack": {"layers": ["a"], "size_bytes": 512}}"#,
        ] {
            assert_eq!(code(frame), Some(Code::Invalid), "{frame}");
        }
        assert!(parse(br#"{"id": 1, "call": "owners"}"#).is_some_and(|r| r.call.is_ok()));
    }

    #[test]
    fn answers_look_as_the_protocol_says() -> serde_json::Result<()> {
        let fine = Answer::new(7, Ok(serde_json::json!({"path": "/x"})));
        assert_eq!(serde_json::to_string(&fine)?, r#"{"id":7,"ok":{"path":"/x"}}"#);
        let failed = Answer::new(8, Err(Error::new(Code::Exhausted, "full").lost()));
        let text = r#"{"id":8,"error":{"code":"exhausted","left":"lost","message":"full"}}"#;
        assert_eq!(serde_json::to_string(&failed)?, text);
        Ok(())
    }
}
