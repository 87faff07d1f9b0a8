//! The directory that holds everything, and the rules of keeping files in it.
//!
//! One daemon has it at a time. What is in `temporary/` is nobody's. A file elsewhere is complete:
//! it was written under a temporary name, made durable, and renamed. `boot` names the boot of
//! the host that last had the directory: until another one has, all that was ever written is
//! still to be read, flushed or not.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{FlockOperation, flock};

use crate::device::DeviceId;
use crate::error::{Code, Context, Error, Result};
use crate::names::Id;

/// What this release writes, and the newest that it reads.
const VERSION: u32 = 1;
/// Numbers are promised to us on disk in blocks, so that most need no write.
const DEVICE_BLOCK: u64 = 1024;

pub struct Root {
    path: PathBuf,
    /// Whether the host has been up ever since the directory was last in use.
    same_boot: bool,
    boot: String,
    devices: Mutex<Devices>,
    /// Held for as long as the process lives.
    _lock: File,
}

struct Devices {
    next: u64,
    promised: u64,
}

impl Root {
    /// Takes the directory, and makes what is missing in it.
    ///
    /// # Errors
    /// `conflict` when another daemon has it, `unsupported` when a newer release wrote it,
    /// `corrupt` when its own few files are damaged; what the file system says.
    pub fn open(path: &Path) -> Result<Self> {
        make_directory(path)?;
        let path = path.canonicalize().during("cannot resolve the directory")?;
        let lock = private().create(true).truncate(false).open(path.join("lock")).during("cannot open the lock")?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Error::new(Code::Conflict, format!("another daemon has {}", path.display())));
        }
        check_version(&path)?;
        for name in ["layers", "uppers", "images", "merged", "remote", "temporary", "working-sets"] {
            make_directory(&path.join(name))?;
        }
        empty(&path.join("temporary"))?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").during("cannot tell this boot from others")?;
        let same_boot = fs::read_to_string(path.join("boot")).is_ok_and(|last| last == boot);
        let promised = read_promised(&path)?;
        let devices = Mutex::new(Devices { next: promised, promised });
        Ok(Self { path, same_boot, boot, devices, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn layers(&self) -> PathBuf {
        self.path.join("layers")
    }

    pub fn uppers(&self) -> PathBuf {
        self.path.join("uppers")
    }

    pub fn images(&self) -> PathBuf {
        self.path.join("images")
    }

    /// Layers that are copies of others, merged.
    pub fn merged(&self) -> PathBuf {
        self.path.join("merged")
    }

    /// What guests touch when they start.
    pub fn working_sets(&self) -> PathBuf {
        self.path.join("working-sets")
    }

    /// Records of layers that lie elsewhere.
    pub fn remote(&self) -> PathBuf {
        self.path.join("remote")
    }

    pub fn same_boot(&self) -> bool {
        self.same_boot
    }

    /// Everything that another boot left is settled: from now on this one has the directory.
    ///
    /// # Errors
    /// What the file system says.
    pub fn settle(&self) -> Result<()> {
        if self.same_boot {
            return Ok(());
        }
        sync_directory(&self.uppers())?;
        sync_directory(&self.images())?;
        self.replace(&self.path.join("boot"), self.boot.as_bytes())
    }

    /// A number that no device of this directory ever had.
    ///
    /// # Errors
    /// What the file system says.
    pub fn new_device(&self) -> Result<DeviceId> {
        let mut devices = self.devices.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if devices.next == devices.promised {
            let promised = devices.promised + DEVICE_BLOCK;
            self.replace(&self.path.join("devices"), promised.to_string().as_bytes())?;
            devices.promised = promised;
        }
        let number = NonZeroU64::new(devices.next).ok_or_else(|| Error::new(Code::Bug, "device 0"))?;
        devices.next += 1;
        Ok(DeviceId(number))
    }

    /// No number up to *highest* is given: a record has it.
    ///
    /// # Errors
    /// What the file system says.
    pub fn skip_devices(&self, highest: u64) -> Result<()> {
        let mut devices = self.devices.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if highest >= devices.next {
            let promised = highest.saturating_add(DEVICE_BLOCK);
            self.replace(&self.path.join("devices"), promised.to_string().as_bytes())?;
            *devices = Devices { next: highest.saturating_add(1), promised };
        }
        Ok(())
    }

    /// A new file of nobody's, to be renamed when it is complete.
    ///
    /// # Errors
    /// What the file system says.
    pub fn temporary(&self) -> Result<(PathBuf, File)> {
        let path = self.path.join("temporary").join(Id::random().during("no random bytes")?.to_string());
        let file = private().create_new(true).open(&path).during("cannot make a temporary file")?;
        Ok((path, file))
    }

    /// Puts *content* at *path*, whole and durable, or leaves what is there.
    ///
    /// # Errors
    /// What the file system says.
    pub fn replace(&self, path: &Path, content: &[u8]) -> Result<()> {
        self.put(path, content, File::sync_all)?;
        path.parent().map_or(Ok(()), sync_directory)
    }

    /// The same, but it lasts only as long as the host is up.
    ///
    /// # Errors
    /// What the file system says.
    pub fn replace_for_this_boot(&self, path: &Path, content: &[u8]) -> Result<()> {
        self.put(path, content, |_| Ok(()))
    }

    fn put(&self, path: &Path, content: &[u8], sync: impl FnOnce(&File) -> io::Result<()>) -> Result<()> {
        let (temporary, mut file) = self.temporary()?;
        let written = file.write_all(content).and_then(|()| sync(&file));
        let placed = written.and_then(|()| fs::rename(&temporary, path));
        if placed.is_err() {
            // Of no use, and not worth another error: start-up empties the directory.
            let _ = fs::remove_file(&temporary);
        }
        placed.during(format_args!("cannot write {}", path.display()))
    }
}

/// Files of ours are for their owner only.
pub(crate) fn private() -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    options
}

/// Makes the names in *path* durable.
///
/// # Errors
/// What the file system says.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).during(format_args!("cannot sync {}", path.display()))
}

/// Removes a file that may be gone already.
///
/// # Errors
/// What the file system says.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn make_directory(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).during(format_args!("cannot make {}", path.display()))
}

fn empty(path: &Path) -> Result<()> {
    let entries = fs::read_dir(path).during("cannot list what is temporary")?;
    for entry in entries {
        let entry = entry.during("cannot list what is temporary")?;
        remove_if_there(&entry.path()).during("cannot remove what is temporary")?;
    }
    Ok(())
}

fn check_version(path: &Path) -> Result<()> {
    let file = path.join("VERSION");
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            // Nothing else can be there before it: a rename that was cut short is made again.
            let temporary = path.join("VERSION.new");
            let mut new = private().create(true).truncate(true).open(&temporary).during("cannot write VERSION")?;
            writeln!(new, "{VERSION}").and_then(|()| new.sync_all()).during("cannot write VERSION")?;
            fs::rename(&temporary, &file).during("cannot write VERSION")?;
            return sync_directory(path);
        }
        Err(e) => return Err(Error::io("cannot read VERSION", e)),
    };
    match text.trim().parse::<u32>() {
        Ok(VERSION) => Ok(()),
        Ok(other) => {
            let message = format!("{} has version {other}, this release knows {VERSION}", path.display());
            Err(Error::new(Code::Unsupported, message))
        }
        Err(_) => Err(Error::corrupt(format!("{} is no version", file.display()))),
    }
}

fn read_promised(path: &Path) -> Result<u64> {
    match fs::read_to_string(path.join("devices")) {
        Ok(text) => match text.parse::<u64>() {
            Ok(number) if number > 1 => Ok(number),
            _ => Err(Error::corrupt("the count of devices is damaged")),
        },
        // 1 is the root of a front end's file system.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(2),
        Err(e) => Err(Error::io("cannot read the count of devices", e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_is_refused_and_a_later_one_is_not() -> Result<()> {
        let directory = tempfile::tempdir().during("no directory")?;
        let first = Root::open(directory.path())?;
        assert_eq!(Root::open(directory.path()).err().map(|e| e.code), Some(Code::Conflict));
        drop(first);
        Root::open(directory.path())?;
        Ok(())
    }

    #[test]
    fn what_a_newer_release_wrote_is_left_alone() -> Result<()> {
        let directory = tempfile::tempdir().during("no directory")?;
        for (text, code) in [("2\n", Code::Unsupported), ("", Code::Corrupt), ("x", Code::Corrupt)] {
            fs::write(directory.path().join("VERSION"), text).during("no file")?;
            assert_eq!(Root::open(directory.path()).err().map(|e| e.code), Some(code), "{text:?}");
        }
        Ok(())
    }

    #[test]
    fn a_device_number_is_never_given_twice() -> Result<()> {
        let directory = tempfile::tempdir().during("no directory")?;
        let mut seen = std::collections::HashSet::new();
        for _ in 0..3 {
            let root = Root::open(directory.path())?;
            for _ in 0..1500 {
                assert!(seen.insert(root.new_device()?));
            }
        }
        Ok(())
    }

    #[test]
    fn another_boot_is_noticed_until_it_is_settled() -> Result<()> {
        let directory = tempfile::tempdir().during("no directory")?;
        let root = Root::open(directory.path())?;
        assert!(!root.same_boot());
        drop(root);
        let root = Root::open(directory.path())?;
        assert!(!root.same_boot());
        root.settle()?;
        drop(root);
        assert!(Root::open(directory.path())?.same_boot());
        Ok(())
    }
}
