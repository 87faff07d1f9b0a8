//! What is told about one file.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use wire::filesystem::{EntryInfo, FileType, permissions};
use wire::time::Timestamp;

use crate::accounts::Names;
use crate::files::METADATA_ATTRIBUTE;

/// More attributes than this on one file are not reported.
const MAX_ATTRIBUTE_BYTES: usize = 16 << 10;

/// Describes *path* itself, not what a link there leads to.
///
/// # Errors
/// Those of the file system.
pub(super) fn describe(path: &str, names: &Names) -> io::Result<EntryInfo> {
    let metadata = fs::symlink_metadata(path)?;
    let kind = metadata.file_type();
    let (file_type, letter) = if kind.is_symlink() {
        (FileType::Symlink, 'l')
    } else if kind.is_dir() {
        (FileType::Directory, 'd')
    } else {
        // Clients drop entries of unknown type, so everything else is a file.
        (FileType::File, letter(&metadata))
    };
    let mode = metadata.mode() & 0o7777;
    Ok(EntryInfo {
        name: Path::new(path).file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned()),
        file_type,
        path: path.to_owned(),
        size: metadata.size(),
        mode,
        permissions: permissions(letter, mode),
        owner: names.user(metadata.uid()),
        group: names.group(metadata.gid()),
        modified_time: Timestamp {
            seconds: metadata.mtime(),
            nanos: u32::try_from(metadata.mtime_nsec()).unwrap_or(0),
        },
        symlink_target: kind.is_symlink().then(|| target(path)),
        metadata: if kind.is_symlink() { BTreeMap::new() } else { attributes(path) },
        is_symlink: kind.is_symlink(),
    })
}

fn letter(metadata: &Metadata) -> char {
    let kind = metadata.file_type();
    if kind.is_fifo() {
        'p'
    } else if kind.is_socket() {
        's'
    } else if kind.is_block_device() {
        'b'
    } else if kind.is_char_device() {
        'c'
    } else {
        '-'
    }
}

/// Where a link leads in the end, or what it says if that leads nowhere.
fn target(path: &str) -> String {
    let end = fs::canonicalize(path).or_else(|_| fs::read_link(path));
    end.map_or_else(|_| String::new(), |target| target.to_string_lossy().into_owned())
}

fn attributes(path: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut list = [0; 1024];
    // Most files have none; one with more names than fit here is not one of ours.
    let Ok(length) = rustix::fs::llistxattr(path, &mut list) else { return found };
    for name in list[..length].split(|&b| b == 0).filter_map(|name| std::str::from_utf8(name).ok()) {
        let Some(key) = name.strip_prefix(METADATA_ATTRIBUTE) else { continue };
        let mut value = vec![0; MAX_ATTRIBUTE_BYTES];
        if let Ok(length) = rustix::fs::lgetxattr(path, name, &mut value) {
            found.insert(key.to_owned(), String::from_utf8_lossy(&value[..length]).into_owned());
        }
    }
    found
}
