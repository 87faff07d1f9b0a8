//! Messages of `filesystem.Filesystem`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use crate::json;
use crate::time::Timestamp;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub path: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub source: String,
    #[serde(deserialize_with = "json::null_default")]
    pub destination: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub path: String,
    /// How many levels to list; 0 means 1.
    #[serde(deserialize_with = "json::u32")]
    pub depth: u32,
}

/// `WatchDirRequest` and `CreateWatcherRequest`.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub path: String,
    #[serde(deserialize_with = "json::null_default")]
    pub recursive: bool,
    #[serde(alias = "include_entry", deserialize_with = "json::null_default")]
    pub include_entry: bool,
    #[serde(alias = "allow_network_mounts", deserialize_with = "json::null_default")]
    pub allow_network_mounts: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatcherRequest {
    #[serde(alias = "watcher_id", deserialize_with = "json::null_default")]
    pub watcher_id: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum FileType {
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

/// What is known about one directory entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    pub name: String,
    #[serde(rename = "type")]
    pub file_type: FileType,
    /// Absolute.
    pub path: String,
    /// Bytes.
    #[serde(serialize_with = "as_text")]
    pub size: u64,
    /// Permission bits only.
    pub mode: u32,
    /// As `ls -l` shows them, for example `-rw-r-----`.
    pub permissions: String,
    pub owner: String,
    pub group: String,
    pub modified_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn as_text<S: Serializer>(number: &u64, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(number)
}

#[derive(Debug, Serialize)]
pub struct EntryResponse {
    pub entry: EntryInfo,
}

#[derive(Debug, Serialize)]
pub struct ListDirResponse {
    pub entries: Vec<EntryInfo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EventType {
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// One change below a watched directory.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// Relative to the watched directory.
    pub name: String,
    #[serde(rename = "type")]
    pub event_type: EventType,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateWatcherResponse {
    pub watcher_id: String,
}

#[derive(Debug, Serialize)]
pub struct WatcherEventsResponse {
    pub events: Vec<Event>,
}

#[derive(Debug, Serialize)]
pub struct WatchEvent<'a> {
    pub filesystem: &'a Event,
}

/// Type letter and permission bits as `ls -l` writes them.
pub fn permissions(kind: char, mode: u32) -> String {
    let mut text = String::with_capacity(10);
    text.push(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_read_like_ls() {
        assert_eq!(permissions('-', 0o640), "-rw-r-----");
        assert_eq!(permissions('d', 0o1777), "drwxrwxrwt");
        assert_eq!(permissions('-', 0o4755), "-rwsr-xr-x");
        assert_eq!(permissions('-', 0o2644), "-rw-r-Sr--");
    }

    #[test]
    fn an_entry_has_its_size_as_text_and_no_empty_fields() {
        let entry = EntryInfo {
            name: "a".into(),
            file_type: FileType::File,
            path: "/tmp/a".into(),
            size: 5_000_000_000,
            mode: 0o644,
            permissions: permissions('-', 0o644),
            owner: "user".into(),
            group: "user".into(),
            modified_time: Timestamp { seconds: 0, nanos: 0 },
            symlink_target: None,
            metadata: BTreeMap::new(),
            is_symlink: false,
        };
        assert_eq!(
            String::from_utf8(json::write(&EntryResponse { entry })).unwrap(),
            r#"{"entry":{"name":"a","type":"FILE_TYPE_FILE","path":"/tmp/a","size":"5000000000","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"user","modifiedTime":"1970-01-01T00:00:00Z"}}"#
        );
    }

    #[test]
    fn both_spellings_of_a_field_are_read() {
        for text in [r#"{"path":"/a","includeEntry":true}"#, r#"{"path":"/a","include_entry":true}"#] {
            assert!(json::parse::<WatchRequest>(text.as_bytes()).unwrap().include_entry);
        }
    }
}
