//! Compressing a stream of any length.

use std::fmt;
use std::io::{self, Write};

use crate::error::{Error, Invalid, Result};
use crate::zfile::codec::{CHECKSUM, Compressor, block_checksum, extend_digest};
use crate::zfile::header::{BLOCK, ZFileOptions, ZHeader};

/// Compressed bytes are handed to the sink in parts of about this size.
const AT_ONCE: usize = 512 << 10;

/// Takes the original as [`Write`] and gives the zfile to a sink, in order. In memory it keeps 4
/// bytes for each block. Without [`ZFileWriter::finish`] the file is no zfile.
pub struct ZFileWriter<W> {
    out: W,
    options: ZFileOptions,
    compressor: Compressor,
    /// The start of a block that is not full yet.
    pending: Vec<u8>,
    compressed: Vec<u8>,
    lengths: Vec<u32>,
    original_size: u64,
    /// Bytes of the file so far.
    place: u64,
    poisoned: bool,
}

impl<W> fmt::Debug for ZFileWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZFileWriter")
            .field("options", &self.options)
            .field("original_size", &self.original_size)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl<W: Write> ZFileWriter<W> {
    /// Starts a zfile with its header.
    ///
    /// # Errors
    /// Unsupported for a block size that readers do not take; whatever *out* reports.
    pub fn new(mut out: W, options: ZFileOptions) -> Result<Self> {
        options.check()?;
        out.write_all(&ZHeader::header(options).encode()).map_err(Error::Write)?;
        Ok(Self {
            out,
            options,
            compressor: Compressor::new(options).map_err(Error::Write)?,
            pending: Vec::new(),
            compressed: Vec::with_capacity(AT_ONCE),
            lengths: Vec::new(),
            original_size: 0,
            place: BLOCK as u64,
            poisoned: false,
        })
    }

    /// Ends the file with its index and trailer, and gives the sink and the size of the file.
    ///
    /// # Errors
    /// Invalid after a failed write; whatever the sink reports.
    pub fn finish(mut self) -> Result<(W, u64)> {
        if self.poisoned {
            return Err(Invalid::Poisoned.into());
        }
        if !self.pending.is_empty() {
            let last = std::mem::take(&mut self.pending);
            self.block(&last).map_err(Error::Write)?;
        }
        self.drain().map_err(Error::Write)?;

        let mut index_digest = 0;
        for part in self.lengths.chunks(AT_ONCE / 4) {
            let bytes: Vec<u8> = part.iter().flat_map(|length| length.to_le_bytes()).collect();
            index_digest = extend_digest(index_digest, &bytes);
            self.out.write_all(&bytes).map_err(Error::Write)?;
        }
        let index_count = self.lengths.len() as u64;
        let trailer = ZHeader {
            index_offset: self.place,
            index_count,
            original_size: self.original_size,
            index_digest,
            ..ZHeader::trailer(self.options)
        };
        self.out.write_all(&trailer.encode()).map_err(Error::Write)?;
        self.out.flush().map_err(Error::Write)?;
        Ok((self.out, self.place + index_count * 4 + BLOCK as u64))
    }

    /// Compresses what is a whole block, or the last one.
    fn block(&mut self, block: &[u8]) -> io::Result<()> {
        let compressed = self.compressor.compress(block)?;
        self.compressed.extend_from_slice(compressed);
        let mut length = compressed.len();
        if self.options.checksums {
            self.compressed.extend_from_slice(&block_checksum(compressed).to_le_bytes());
            length += CHECKSUM;
        }
        self.lengths.push(u32::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?);
        self.place += length as u64;
        self.original_size += block.len() as u64;
        if self.compressed.len() >= AT_ONCE {
            self.drain()?;
        }
        Ok(())
    }

    fn drain(&mut self) -> io::Result<()> {
        self.out.write_all(&self.compressed)?;
        self.compressed.clear();
        Ok(())
    }

    /// All of *bytes*, up to a last block that is not full.
    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let block_size = self.options.block_size as usize;
        if !self.pending.is_empty() {
            let (more, behind) = bytes.split_at(bytes.len().min(block_size - self.pending.len()));
            self.pending.extend_from_slice(more);
            bytes = behind;
            if self.pending.len() < block_size {
                return Ok(());
            }
            let mut block = std::mem::take(&mut self.pending);
            self.block(&block)?;
            block.clear();
            self.pending = block;
        }
        let blocks = bytes.chunks_exact(block_size);
        self.pending.extend_from_slice(blocks.remainder());
        for block in blocks {
            self.block(block)?;
        }
        Ok(())
    }
}

impl<W: Write> Write for ZFileWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.poisoned {
            return Err(Error::from(Invalid::Poisoned).into());
        }
        // A retry would write blocks twice: after a failure there is none.
        if let Err(error) = self.take(bytes) {
            self.poisoned = true;
            return Err(error);
        }
        Ok(bytes.len())
    }

    /// Hands complete blocks to the sink; the last one waits until it is full.
    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.drain().and_then(|()| self.out.flush());
        self.poisoned |= flushed.is_err();
        flushed
    }
}
