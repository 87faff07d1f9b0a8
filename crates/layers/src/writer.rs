//! Writing a layer from front to end, knowing nothing of its content beforehand.

use std::io::Write;

use crate::error::{Error, Invalid, Result};
use crate::header::{Header, Identity};
use crate::layer::sectors;
use crate::seal::{write_entries, write_filler};
use crate::segment::Segment;
use crate::{BLOCK, SECTOR};

/// The index is filled up to a multiple of this many entries, which is a block.
const INDEX_STEP: u64 = BLOCK / Segment::SIZE as u64;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Data of the layer, without what surrounds it.
    pub data_bytes: u64,
    /// Mappings, padding not included.
    pub mappings: u64,
    /// The whole file.
    pub file_bytes: u64,
}

/// Writes a sealed layer to anything that takes bytes in order. Its content is given in ascending
/// order; what is not given is a hole. In memory it keeps the index: 16 bytes for each mapping,
/// at most one for each run or 8 MiB of data.
#[derive(Debug)]
pub struct LayerWriter<W> {
    out: W,
    identity: Identity,
    index: Vec<Segment>,
    /// Sector of the file where the next data goes.
    moffset: u64,
    /// Sector of the view behind the last mapping.
    end: u64,
    poisoned: bool,
}

impl<W: Write> LayerWriter<W> {
    /// Starts a layer with its header.
    ///
    /// # Errors
    /// Invalid for an identity that cannot be written down; whatever *out* reports.
    pub fn new(mut out: W, identity: Identity) -> Result<Self> {
        let header = Header::of_layer(identity.clone()).encode()?;
        out.write_all(&header).map_err(Error::Write)?;
        Ok(Self { out, identity, index: Vec::new(), moffset: BLOCK / SECTOR, end: 0, poisoned: false })
    }

    /// Adds *bytes* as the content from sector *offset* on. They go straight through: give many
    /// at once.
    ///
    /// # Errors
    /// Invalid if they are not whole sectors, not behind what was given before, or beyond the
    /// virtual size; nothing is written then. Whatever the sink reports, after which nothing more
    /// is accepted.
    pub fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.tagged_data(0, offset, bytes)
    }

    /// Adds *length* sectors of zeros at *offset*, which hide what is below.
    ///
    /// # Errors
    /// As for [`LayerWriter::data`].
    pub fn zeroed(&mut self, offset: u64, length: u64) -> Result<()> {
        self.tagged_zeroed(0, offset, length)
    }

    /// Data that came from layer *tag* of a stack. The tag stays in the entry, and parts from
    /// different layers stay apart, as another implementation writes them.
    pub(crate) fn tagged_data(&mut self, tag: u8, offset: u64, bytes: &[u8]) -> Result<()> {
        let length = sectors(bytes.len() as u64)?;
        if length == 0 {
            return Ok(());
        }
        self.check(offset, length)?;
        let run = Segment::run_of_data(offset, length, self.moffset)?;
        if let Err(error) = self.out.write_all(bytes) {
            self.poisoned = true;
            return Err(Error::Write(error));
        }
        self.push(tag, run);
        self.moffset += length;
        Ok(())
    }

    pub(crate) fn tagged_zeroed(&mut self, tag: u8, offset: u64, length: u64) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        self.check(offset, length)?;
        let run = Segment::run_of_zeros(offset, length, self.moffset)?;
        self.push(tag, run);
        Ok(())
    }

    fn push(&mut self, tag: u8, run: impl Iterator<Item = Segment>) {
        for segment in run.map(|segment| segment.with_tag(tag)) {
            self.end = segment.end();
            match self.index.last().and_then(|last| last.join(segment)) {
                Some(joined) => *self.index.last_mut().expect("there is a last") = joined,
                None => self.index.push(segment),
            }
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<()> {
        if self.poisoned {
            return Err(Invalid::Poisoned.into());
        }
        if offset < self.end {
            return Err(Invalid::OutOfOrder { offset, end: self.end }.into());
        }
        let virtual_sectors = self.identity.virtual_size / SECTOR;
        let end = offset.saturating_add(length);
        if end > virtual_sectors {
            return Err(Invalid::BeyondVirtualSize { end, virtual_sectors }.into());
        }
        Ok(())
    }

    /// Ends the layer with its index and trailer, and gives the sink back. Without this call the
    /// file is no layer.
    ///
    /// # Errors
    /// Invalid after a failed write; whatever the sink reports.
    pub fn finish(mut self) -> Result<(W, Written)> {
        if self.poisoned {
            return Err(Invalid::Poisoned.into());
        }
        let mappings = self.index.len() as u64;
        let count = mappings.next_multiple_of(INDEX_STEP);
        let padding = std::iter::repeat_n(Segment::PADDING, usize::try_from(count - mappings).unwrap_or_default());
        let index_offset = self.moffset * SECTOR;
        let index_end = index_offset + count * Segment::SIZE as u64;
        let zeros = index_end.next_multiple_of(BLOCK) - index_end;
        let trailer = Header::trailer(self.identity, index_offset, count).encode()?;

        write_entries(&mut self.out, self.index.into_iter().chain(padding))?;
        write_filler(&mut self.out, 0, zeros)?;
        self.out.write_all(&trailer).map_err(Error::Write)?;
        self.out.flush().map_err(Error::Write)?;
        let data_bytes = index_offset - BLOCK;
        Ok((self.out, Written { data_bytes, mappings, file_bytes: index_end + zeros + BLOCK }))
    }
}
