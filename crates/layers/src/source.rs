//! Where bytes come from: all of those asked for, or an error.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A file, a cache, a remote object, or a reader of this crate on top of one.
pub trait ReadAt {
    /// The size in bytes.
    ///
    /// # Errors
    /// Whatever stands in the way of knowing it.
    fn size(&self) -> io::Result<u64>;

    /// Fills *buf* with the bytes from *offset* on.
    ///
    /// # Errors
    /// `UnexpectedEof` if the source ends before *buf* is full; whatever else stands in the way.
    /// After an error *buf* may hold anything. Missing bytes are never made up.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for [u8] {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = start.checked_add(buf.len()).and_then(|end| self.get(start..end));
        buf.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> io::Result<u64> {
        self.as_slice().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.as_slice().read_exact_at(buf, offset)
    }
}

impl ReadAt for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, offset)
    }
}

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<T: ReadAt + ?Sized> ReadAt for $pointer {
            fn size(&self) -> io::Result<u64> {
                (**self).size()
            }

            fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
                (**self).read_exact_at(buf, offset)
            }
        }
    )*};
}
forward!(&T, Box<T>, Arc<T>);

/// Reads as [`ReadAt`] does, with the place in the error.
pub(crate) fn read<S: ReadAt + ?Sized>(source: &S, buf: &mut [u8], offset: u64) -> Result<()> {
    source.read_exact_at(buf, offset).map_err(|error| Error::read(offset, buf.len(), error))
}

/// The size, as an error of this crate.
pub(crate) fn size<S: ReadAt + ?Sized>(source: &S) -> Result<u64> {
    source.size().map_err(|error| Error::read(0, 0, error))
}
