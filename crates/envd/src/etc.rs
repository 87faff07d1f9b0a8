//! Reading and replacing small system files of an image that may hold anything.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Larger than any sensible file of this kind, small enough for the daemon's memory.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The content of *path*, or `None` when there is no such file.
///
/// # Errors
/// When it is not a regular file (a pipe would block for ever), is too large or not readable.
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits() | OFlags::NOCTTY.bits()).unwrap_or(0);
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is not a small regular file", path.display()),
        ));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0) + 1);
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Makes *content* the content of *path*, at once and only if it is not so already.
///
/// Owner and mode of a file that is replaced are kept; a new one gets *mode* and is root's.
/// With *`through_links`* a link is followed, otherwise it is replaced by the file.
///
/// # Errors
/// Those of the file system. The old file is then still whole.
pub(crate) fn replace(path: &Path, content: &str, mode: u32, through_links: bool) -> io::Result<()> {
    let target = if through_links { resolve_links(path)? } else { path.to_owned() };
    let old = match fs::symlink_metadata(&target) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let regular = old.filter(fs::Metadata::is_file);
    if regular.is_some() && read(&target)?.as_deref() == Some(content) {
        return Ok(());
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".aenv-new");
    let temporary = target.with_file_name(name);
    // What a crash left, or someone put there, must not be written through.
    let _ = fs::remove_file(&temporary);
    let written = write_new(&temporary, content, mode, regular.as_ref()).and_then(|()| fs::rename(&temporary, &target));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Like [`replace`], but a regular file that is there is written over in place.
///
/// For files that change at every restore: a few system calls instead of a dozen, on code that an
/// emulated processor meets for the first time. The workload is frozen meanwhile, so nobody reads half of it.
///
/// # Errors
/// Those of the file system.
pub(crate) fn overwrite(path: &Path, content: &str, mode: u32, through_links: bool) -> io::Result<()> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | if through_links { OFlags::empty() } else { OFlags::NOFOLLOW };
    let custom = i32::try_from(flags.bits()).unwrap_or(0);
    let Ok(file) = File::options().read(true).write(true).custom_flags(custom).open(path) else {
        return replace(path, content, mode, through_links);
    };
    let metadata = file.metadata()?;
    // A second name of the file may lie anywhere: it must not be written through this one.
    if !metadata.is_file() || metadata.nlink() != 1 {
        return replace(path, content, mode, through_links);
    }
    let mut old = vec![0; content.len() + 1];
    let length = file.read_at(&mut old, 0)?;
    if old.get(..length) == Some(content.as_bytes()) {
        return Ok(());
    }
    file.write_all_at(content.as_bytes(), 0)?;
    if metadata.len() > content.len() as u64 { file.set_len(content.len() as u64) } else { Ok(()) }
}

fn write_new(path: &Path, content: &str, mode: u32, old: Option<&fs::Metadata>) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content.as_bytes())?;
    if let Some(old) = old {
        fchown(&file, Some(old.uid()), Some(old.gid()))?;
    }
    file.set_permissions(Permissions::from_mode(old.map_or(mode, |old| old.mode() & 0o7777)))
}

/// Where a chain of links leads, even if nothing is there yet.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..16 {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("/")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("too many links at {}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("envd-etc-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_equal_file_is_not_touched_and_a_different_one_keeps_its_mode() {
        let scratch = Scratch::new("equal");
        let path = scratch.0.join("hosts");
        replace(&path, "a\n", 0o640, false).unwrap();
        let first = fs::metadata(&path).unwrap().ino();
        replace(&path, "a\n", 0o600, false).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), first);
        replace(&path, "b\n", 0o600, false).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert_eq!(read(&path).unwrap().as_deref(), Some("b\n"));
    }

    #[test]
    fn a_file_is_overwritten_in_place_unless_it_has_another_name() {
        let scratch = Scratch::new("overwrite");
        let (path, second) = (scratch.0.join("hostname"), scratch.0.join("second"));
        overwrite(&path, "a long name\n", 0o644, false).unwrap();
        let first = fs::metadata(&path).unwrap().ino();
        overwrite(&path, "short\n", 0o644, false).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "short\n");
        assert_eq!(fs::metadata(&path).unwrap().ino(), first);

        fs::hard_link(&path, &second).unwrap();
        overwrite(&path, "other\n", 0o644, false).unwrap();
        assert_eq!(fs::read_to_string(&second).unwrap(), "short\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "other\n");
    }

    #[test]
    fn a_link_is_replaced_or_followed_as_asked() {
        let scratch = Scratch::new("links");
        let (path, target) = (scratch.0.join("resolv.conf"), scratch.0.join("run/resolv.conf"));
        symlink("run/resolv.conf", &path).unwrap();
        replace(&path, "through\n", 0o644, true).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "through\n");
        replace(&path, "instead\n", 0o644, false).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "through\n");
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn a_pipe_is_refused_instead_of_waited_for() {
        let scratch = Scratch::new("pipe");
        let path = scratch.0.join("passwd");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
        assert!(read(&path).is_err());
    }
}
