//! A sealed layer, opened: its ends and its index are right, its data is read when asked for.

use std::io;

use crate::error::{Corruption, Invalid, Result};
use crate::header::{Flags, Header, Identity};
use crate::index::{Index, Limits};
use crate::pieces::Place;
use crate::source::{ReadAt, read, size};
use crate::{BLOCK, BLOCK_LEN, SECTOR};

/// A layer and where it is read from. As a [`ReadAt`] it is the view that this layer alone gives,
/// with zeros where it maps nothing.
#[derive(Debug, Clone)]
pub struct Layer<S> {
    source: S,
    trailer: Header,
    index: Index,
}

impl<S: ReadAt> Layer<S> {
    /// Reads header, trailer and index, and checks all of them.
    ///
    /// # Errors
    /// Corrupt if they are not those of a sealed layer, unsupported for another version,
    /// exhausted for an index beyond the default [`Limits`].
    pub fn open(source: S) -> Result<Self> {
        Self::open_within(source, Limits::default())
    }

    /// The same with limits of the caller's.
    ///
    /// # Errors
    /// As for [`Layer::open`].
    pub fn open_within(source: S, limits: Limits) -> Result<Self> {
        let trailer = read_trailer(&source)?;
        let Header { index_offset, index_count, ref identity, .. } = trailer;
        let index = Index::load(&source, index_offset, index_count, identity.virtual_size, limits)?;
        Ok(Self { source, trailer, index })
    }

    pub fn identity(&self) -> &Identity {
        &self.trailer.identity
    }

    /// Byte where the data ends and the index starts.
    pub fn data_end(&self) -> u64 {
        self.trailer.index_offset
    }

    /// Entries of the index in the file, padding included.
    pub fn index_count(&self) -> u64 {
        self.trailer.index_count
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    pub fn source(&self) -> &S {
        &self.source
    }

    /// Its parts; the index without a tag.
    pub fn into_parts(self) -> (S, Identity, Index) {
        (self.source, self.trailer.identity, self.index)
    }
}

/// The trailer, once it agrees with the header and with the size of the file.
fn read_trailer<S: ReadAt + ?Sized>(source: &S) -> Result<Header> {
    let bytes = size(source)?;
    if bytes < BLOCK {
        return Err(Corruption::TooShort { what: "a layer", bytes }.into());
    }
    let header = read_header(source, 0)?;
    if !header.flags.contains(Flags::HEADER.with(Flags::DATA)) {
        return Err(Corruption::Flags { what: "header", flags: header.flags.0.into() }.into());
    }
    // A layer that was never sealed ends in data, which is no trailer, or it ends early.
    let end = bytes - BLOCK;
    let trailer = match read_header(source, end) {
        Err(crate::Error::Corrupt(Corruption::Magic { .. })) => return Err(Corruption::NotSealed.into()),
        other => other?,
    };
    if trailer.flags.contains(Flags::HEADER) {
        return Err(Corruption::NotSealed.into());
    }
    if !trailer.flags.contains(Flags::DATA.with(Flags::SEALED)) {
        return Err(Corruption::Flags { what: "trailer", flags: trailer.flags.0.into() }.into());
    }
    if header.identity != trailer.identity {
        return Err(Corruption::HeaderAndTrailerDiffer.into());
    }
    let (offset, count) = (trailer.index_offset, trailer.index_count);
    let index_end = count.checked_mul(16).and_then(|length| offset.checked_add(length));
    if offset < BLOCK || offset % SECTOR != 0 || index_end.is_none_or(|index_end| index_end > end) {
        return Err(Corruption::IndexPlace { offset, count }.into());
    }
    Ok(trailer)
}

pub(crate) fn read_header<S: ReadAt + ?Sized>(source: &S, offset: u64) -> Result<Header> {
    let mut block = [0; BLOCK_LEN];
    read(source, &mut block, offset)?;
    Header::decode(&block)
}

impl<S: ReadAt> ReadAt for Layer<S> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.identity().virtual_size)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        read_view(&self.index, self.identity().virtual_size, buf, offset, |_, buf, at| {
            self.source.read_exact_at(buf, at)
        })
    }
}

/// Fills *buf* from byte *offset* of the view that *index* gives; *data* reads from the file of a
/// layer, by its tag. Any bytes may be asked for, not whole sectors only.
pub(crate) fn read_view(
    index: &Index,
    virtual_size: u64,
    buf: &mut [u8],
    offset: u64,
    mut data: impl FnMut(u8, &mut [u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= virtual_size);
    let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut rest = buf;
    for piece in index.pieces(offset / SECTOR..end.div_ceil(SECTOR)) {
        let from = offset.max(piece.offset * SECTOR);
        let to = end.min((piece.offset + piece.length) * SECTOR);
        let length = usize::try_from(to - from).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(length);
        rest = behind;
        match piece.place {
            Place::Hole | Place::Zeroed => part.fill(0),
            Place::Data { tag, moffset } => data(tag, part, moffset * SECTOR + from - piece.offset * SECTOR)?,
        }
    }
    Ok(())
}

/// Bytes as whole sectors.
pub(crate) fn sectors(bytes: u64) -> Result<u64> {
    if bytes % SECTOR != 0 {
        return Err(Invalid::Unaligned(bytes).into());
    }
    Ok(bytes / SECTOR)
}
