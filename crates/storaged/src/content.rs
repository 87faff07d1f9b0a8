//! The bytes of a layer's file, wherever it lies.

use std::io;
use std::ops::Range;

use layers::ReadAt;

use crate::device::Answer;
use crate::files::Shared;
use crate::reading::Caching;
use crate::remote::SharedObject;

#[derive(Clone)]
pub enum Content {
    Local(Shared),
    Remote(SharedObject),
}

impl Content {
    /// Fills *buf* if that takes no wait for a disk or for a network.
    ///
    /// # Errors
    /// As [`ReadAt::read_exact_at`].
    pub fn read_now(&self, buf: &mut [u8], offset: u64, caching: Caching) -> io::Result<Answer> {
        match self {
            Self::Local(file) => file.0.read_now(buf, offset, caching),
            Self::Remote(object) => object.0.read_now(buf, offset),
        }
    }

    /// Says that the range will be read soon.
    pub fn expect(&self, offset: u64, length: u64) {
        match self {
            Self::Local(file) => file.0.expect(offset, length),
            Self::Remote(object) => object.0.expect(offset, length),
        }
    }

    /// The remote file that it is, if it is one.
    pub fn remote(&self) -> Option<&SharedObject> {
        match self {
            Self::Local(_) => None,
            Self::Remote(object) => Some(object),
        }
    }

    /// What was read from *range* is wrong. True if it is worth reading again, since it will come from elsewhere.
    pub fn distrust(&self, range: Range<u64>) -> bool {
        match self {
            Self::Local(_) => false,
            Self::Remote(object) => {
                object.0.distrust(range);
                true
            }
        }
    }
}

impl ReadAt for Content {
    fn size(&self) -> io::Result<u64> {
        match self {
            Self::Local(file) => file.size(),
            Self::Remote(object) => object.size(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Local(file) => file.read_exact_at(buf, offset),
            Self::Remote(object) => object.read_exact_at(buf, offset),
        }
    }
}
