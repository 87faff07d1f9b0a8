//! Kernel modules that the initramfs carries.

use std::fs::{self, File};
use std::io;

use rustix::system::finit_module;

use crate::say;

const DIRECTORY: &str = "/modules";

/// Loads every `*.ko` in the order of their names.
pub(super) fn load() {
    let mut paths: Vec<_> = match fs::read_dir(DIRECTORY) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(error) => return say!("{DIRECTORY}: {error}"),
    };
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ko"));
    paths.sort();
    for path in paths {
        let loaded = File::open(&path).and_then(|file| Ok(finit_module(&file, c"", 0)?));
        match loaded {
            Ok(()) => {}
            // Built in, or another's dependency by chance.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => say!("{}: {error}", path.display()),
        }
    }
}

/// Frees the memory the files take.
pub(super) fn forget() {
    let _ = fs::remove_dir_all(DIRECTORY);
}
