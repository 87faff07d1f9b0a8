//! What a file is, by its first bytes.

use crate::error::Result;
use crate::source::{ReadAt, read, size};

/// The kinds of file that this crate reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A layer, sealed or not; or the log of an upper.
    Layer,
    /// Compressed: open it as a [`crate::ZFile`], which is most likely the source of a layer.
    ZFile,
    /// Something else.
    Other,
}

impl Format {
    /// Looks at the first bytes of *source*.
    ///
    /// # Errors
    /// Whatever the source reports. A short or empty file is [`Format::Other`].
    pub fn of<S: ReadAt + ?Sized>(source: &S) -> Result<Self> {
        let mut magic = [0; 8];
        if size(source)? < magic.len() as u64 {
            return Ok(Self::Other);
        }
        read(source, &mut magic, 0)?;
        Ok(match &magic {
            b"LSMT\0\x01\x02\0" => Self::Layer,
            b"ZFile\0\x01\0" => Self::ZFile,
            _ => Self::Other,
        })
    }
}
