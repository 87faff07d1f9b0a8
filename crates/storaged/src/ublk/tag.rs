//! Which of the host's ublk devices are this daemon's, and what each stands for.
//!
//! The driver keeps 64 bits for whoever makes a device: 24 that are the daemon's, and a device's number.

use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;

use crate::device::DeviceId;
use crate::error::{Code, Context, Error, Result};
use crate::root::{private, sync_directory};

const ID_BITS: u32 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u64);

impl Tag {
    /// The tag in the file *path*; a new one if there is no such file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).ok_or_else(|| Error::corrupt(format!("{} is no tag", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::make(path),
            Err(error) => Err(Error::io(path.display(), error)),
        }
    }

    fn make(path: &Path) -> Result<Self> {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes[..3], rustix::rand::GetRandomFlags::empty()).during("no random bytes")?;
        // Others that use these bits of the driver at all have small numbers there.
        let tag = Self(u64::from_le_bytes(bytes) | 1 << 23);
        let new = path.with_extension("new");
        let written = private().create(true).truncate(true).open(&new).and_then(|mut file| {
            io::Write::write_all(&mut file, format!("{:06x}\n", tag.0).as_bytes())?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&new, path)).during(path.display())?;
        path.parent().map_or(Ok(()), sync_directory)?;
        Ok(tag)
    }

    fn parse(text: &str) -> Option<Self> {
        let tag = u64::from_str_radix(text.strip_suffix('\n')?, 16).ok()?;
        (text.len() == 7 && tag >> 23 == 1).then_some(Self(tag))
    }

    /// What the driver is to keep.
    pub(super) fn of(self, id: DeviceId) -> Result<u64> {
        if id.0.get() >> ID_BITS == 0 {
            return Ok(self.0 << ID_BITS | id.0.get());
        }
        Err(Error::new(Code::Exhausted, "all device numbers have been used"))
    }

    /// What the driver has kept, if it is ours: `Err` for a device of ours that never was one.
    pub(super) fn owner(self, kept: u64) -> Option<std::result::Result<DeviceId, ()>> {
        (kept >> ID_BITS == self.0).then(|| NonZeroU64::new(kept & ((1 << ID_BITS) - 1)).map(DeviceId).ok_or(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> DeviceId {
        DeviceId(NonZeroU64::new(number).unwrap())
    }

    #[test]
    fn a_tag_is_made_once_and_tells_its_devices_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let tag = Tag::open(&directory.path().join("tag")).unwrap();
        assert_eq!(Tag::open(&directory.path().join("tag")).unwrap(), tag);
        let kept = tag.of(id(77)).unwrap();

        assert_eq!(tag.owner(kept), Some(Ok(id(77))));
        assert_eq!(tag.owner(kept ^ 1 << 40), None);
        assert_eq!(tag.owner(0), None);
        assert_eq!(tag.owner(kept & !((1 << 40) - 1)), Some(Err(())));
        assert_eq!(tag.of(id(1 << 40)).map_err(|error| error.code), Err(Code::Exhausted));
    }

    #[test]
    fn a_damaged_tag_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tag");
        for text in ["", "\n", "800000", "7fffff\n", "x00000\n", "1800000\n", "+80000\n"] {
            fs::write(&path, text).unwrap();
            assert_eq!(Tag::open(&path).map_err(|error| error.code), Err(Code::Corrupt), "{text:?}");
        }
    }
}
