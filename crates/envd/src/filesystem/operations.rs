//! The operations themselves. They block, and run as whatever user the thread has become.

use std::fs;
use std::io;
use std::path::Path;

use wire::filesystem::EntryInfo;
use wire::{Code, RpcError, json};

use super::{entry, failed};
use crate::accounts::Names;

/// The longest listing that is made; beyond it a client has to list in parts.
const MAX_LISTING_BYTES: usize = 8 << 20;
const MAX_DEPTH: u32 = 256;

pub(super) fn stat(path: &str) -> Result<EntryInfo, RpcError> {
    entry::describe(path, &Names::load()).map_err(|e| failed(path, &e))
}

pub(super) fn make_directory(path: &str) -> Result<EntryInfo, RpcError> {
    match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => {
            return Err(RpcError::new(Code::AlreadyExists, format!("{path} is there already")));
        }
        Ok(_) => return Err(RpcError::invalid(format!("{path} is there and is not a directory"))),
        Err(_) => {}
    }
    fs::create_dir_all(path).map_err(|error| match error.kind() {
        // A parent is a file.
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => RpcError::invalid(format!("{path}: {error}")),
        _ => failed(path, &error),
    })?;
    stat(path)
}

pub(super) fn rename(source: &str, destination: &str) -> Result<EntryInfo, RpcError> {
    fs::symlink_metadata(source).map_err(|e| failed(source, &e))?;
    if let Some(parent) = Path::new(destination).parent() {
        fs::create_dir_all(parent).map_err(|e| failed(destination, &e))?;
    }
    fs::rename(source, destination).map_err(|e| failed(destination, &e))?;
    stat(destination)
}

/// Removes *path* with all below it; that it is gone already is fine.
pub(super) fn remove(path: &str) -> Result<(), RpcError> {
    if path == "/" {
        return Err(RpcError::invalid("the root directory cannot be removed"));
    }
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(failed(path, &error))
        }
        _ => Ok(()),
    }
}

/// A `ListDirResponse`: each directory before what is in it, in the order of names, *depth* levels deep.
pub(super) fn list(path: &str, depth: u32) -> Result<Vec<u8>, RpcError> {
    let kind = fs::metadata(path).map_err(|e| failed(path, &e))?;
    if !kind.is_dir() {
        return Err(RpcError::invalid(format!("{path} is not a directory")));
    }
    let mut listing = Listing { names: Names::load(), json: b"{\"entries\":[".to_vec(), empty: true };
    let children = children(path).map_err(|e| failed(path, &e))?;
    listing.add(path, &children, depth.clamp(1, MAX_DEPTH))?;
    listing.json.extend_from_slice(b"]}");
    Ok(listing.json)
}

/// Written as it grows, because it takes a fraction of what the entries themselves would.
struct Listing {
    names: Names,
    json: Vec<u8>,
    empty: bool,
}

impl Listing {
    fn add(&mut self, directory: &str, children: &[String], depth: u32) -> Result<(), RpcError> {
        for name in children {
            let path = format!("{}/{name}", directory.trim_end_matches('/'));
            // What has vanished meanwhile is not listed.
            let Ok(entry) = entry::describe(&path, &self.names) else { continue };
            let is_directory = entry.file_type == wire::filesystem::FileType::Directory;
            if !self.empty {
                self.json.push(b',');
            }
            self.empty = false;
            self.json.extend_from_slice(&json::write(&entry));
            if self.json.len() > MAX_LISTING_BYTES {
                let text = format!("the listing is over {} MiB: list fewer levels", MAX_LISTING_BYTES >> 20);
                return Err(RpcError::new(Code::ResourceExhausted, text));
            }
            if is_directory && depth > 1 {
                // One that may not be read is listed itself, but has no children to show.
                let below = self::children(&path).unwrap_or_default();
                self.add(&path, &below, depth - 1)?;
            }
        }
        Ok(())
    }
}

fn children(path: &str) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
