//! Reading any bytes of a zfile.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

use crate::error::{Corruption, Error, Result};
use crate::index::Limits;
use crate::source::{ReadAt, read, size};
use crate::zfile::codec::{CHECKSUM, Expander, block_checksum, extend_digest};
use crate::zfile::header::{BLOCK, COMPLETE_HEADER, IS_DATA, IS_HEADER, SEALED, ZFileOptions, ZHeader};

/// Neighbouring blocks are read from the source together up to this many compressed bytes.
const AT_ONCE: u64 = 64 << 10;
/// The place of every 64th block is kept, and found for those between by adding up lengths.
const STEP: usize = 64;
/// Sets of buffers that are kept for the next reads.
const KEPT: usize = 8;

/// A compressed file and where it is read from; as a [`ReadAt`] it is the original. Many threads
/// may read at once. In memory it keeps 4 bytes for each block.
pub struct ZFile<S> {
    source: S,
    options: ZFileOptions,
    original_size: u64,
    /// Bytes of each block in the file, checksum included.
    lengths: Vec<u32>,
    places: Vec<u64>,
    idle: Mutex<Vec<Buffers>>,
}

#[derive(Default)]
struct Buffers {
    compressed: Vec<u8>,
    block: Vec<u8>,
    expander: Expander,
}

impl<S> fmt::Debug for ZFile<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZFile")
            .field("options", &self.options)
            .field("original_size", &self.original_size)
            .field("blocks", &self.lengths.len())
            .finish_non_exhaustive()
    }
}

impl<S: ReadAt> ZFile<S> {
    /// Reads header, trailer and index, and checks their digests.
    ///
    /// # Errors
    /// Corrupt if they are not those of a complete zfile, unsupported for a dictionary or an
    /// unknown algorithm, exhausted for an index beyond the default [`Limits`].
    pub fn open(source: S) -> Result<Self> {
        Self::open_within(source, Limits::default())
    }

    /// The same with limits of the caller's.
    ///
    /// # Errors
    /// As for [`ZFile::open`].
    pub fn open_within(source: S, limits: Limits) -> Result<Self> {
        let (trailer, end) = read_trailer(&source)?;
        let (lengths, places) = load_lengths(&source, &trailer, end, limits)?;
        let (options, original_size) = (trailer.options, trailer.original_size);
        Ok(Self { source, options, original_size, lengths, places, idle: Mutex::default() })
    }

    pub fn options(&self) -> ZFileOptions {
        self.options
    }

    /// Bytes of the original.
    pub fn original_size(&self) -> u64 {
        self.original_size
    }

    pub fn source(&self) -> &S {
        &self.source
    }

    /// Compressed blocks in it.
    pub fn blocks(&self) -> u64 {
        self.lengths.len() as u64
    }

    /// The bytes of the file that hold the blocks of *range*, which is in bytes of the original;
    /// for a cache that fetches them ahead.
    pub fn compressed_range(&self, range: Range<u64>) -> Range<u64> {
        let block_size = u64::from(self.options.block_size);
        let block = |byte: u64| usize::try_from(byte / block_size).unwrap_or(usize::MAX).min(self.lengths.len());
        self.place(block(range.start))..self.place(block(range.end.saturating_add(block_size - 1)))
    }

    /// Byte of the file where *block* starts, or for the one behind the last, where the last ends.
    fn place(&self, block: usize) -> u64 {
        let near = block / STEP * STEP;
        self.places[block / STEP] + self.lengths[near..block].iter().map(|length| u64::from(*length)).sum::<u64>()
    }

    fn fill(&self, buf: &mut [u8], offset: u64, buffers: &mut Buffers) -> Result<()> {
        let block_size = u64::from(self.options.block_size);
        let end = offset + buf.len() as u64;
        let last = index_of(end.div_ceil(block_size));
        let mut block = index_of(offset / block_size);
        let mut place = self.place(block);
        let mut rest = buf;
        while block < last {
            let run = self.run(block, last);
            let length = self.lengths[run.clone()].iter().map(|length| *length as usize).sum();
            buffers.compressed.resize(length, 0);
            read(&self.source, &mut buffers.compressed, place)?;
            let mut compressed = &buffers.compressed[..];
            for block in run.clone() {
                let (own, behind) = compressed.split_at(self.lengths[block] as usize);
                compressed = behind;
                let start = block as u64 * block_size;
                let whole = start..self.original_size.min(start + block_size);
                let wanted = whole.start.max(offset)..whole.end.min(end);
                let (part, behind) = std::mem::take(&mut rest).split_at_mut(index_of(wanted.end - wanted.start));
                rest = behind;
                if wanted == whole {
                    self.expand(block, own, part, &mut buffers.expander)?;
                } else {
                    buffers.block.resize(index_of(whole.end - whole.start), 0);
                    self.expand(block, own, &mut buffers.block, &mut buffers.expander)?;
                    let from = index_of(wanted.start - whole.start);
                    part.copy_from_slice(&buffers.block[from..from + part.len()]);
                }
            }
            place += length as u64;
            block = run.end;
        }
        Ok(())
    }

    /// The blocks from *block* on, before *last*, that are read together: at least one.
    fn run(&self, block: usize, last: usize) -> Range<usize> {
        let mut bytes = u64::from(self.lengths[block]);
        let more = self.lengths[block + 1..last].iter().take_while(|length| {
            bytes += u64::from(**length);
            bytes <= AT_ONCE
        });
        block..block + 1 + more.count()
    }

    fn expand(&self, block: usize, bytes: &[u8], into: &mut [u8], expander: &mut Expander) -> Result<()> {
        let fault = |fault| {
            let (block, offset) = (block as u64, self.place(block));
            Error::Corrupt(Corruption::Block { block, offset, fault })
        };
        let compressed = if self.options.checksums {
            let (compressed, sum) = bytes.split_last_chunk::<CHECKSUM>().ok_or_else(|| fault("is too short"))?;
            if block_checksum(compressed) != u32::from_le_bytes(*sum) {
                return Err(fault("does not match its checksum"));
            }
            compressed
        } else {
            bytes
        };
        if expander.expand(self.options.algorithm, compressed, into)? {
            return Ok(());
        }
        Err(fault("does not expand to what it should"))
    }
}

/// Blocks fit into memory, so their numbers and sizes do into a word.
fn index_of(value: u64) -> usize {
    usize::try_from(value).expect("bounded by what is in memory")
}

/// The block that says where the index is, and the byte before which it ends.
fn read_trailer<S: ReadAt + ?Sized>(source: &S) -> Result<(ZHeader, u64)> {
    const LEN: u64 = BLOCK as u64;
    let bytes = size(source)?;
    if bytes < LEN {
        return Err(Corruption::TooShort { what: "a zfile", bytes }.into());
    }
    let header = read_header(source, 0, "zfile header")?;
    if header.flags & (IS_HEADER | IS_DATA) != IS_HEADER | IS_DATA {
        return Err(Corruption::Flags { what: "zfile header", flags: header.flags }.into());
    }
    if header.flags & COMPLETE_HEADER != 0 {
        return Ok((header, bytes));
    }
    if bytes < 2 * LEN {
        return Err(Corruption::TooShort { what: "a zfile", bytes }.into());
    }
    let end = bytes - LEN;
    let trailer = read_header(source, end, "zfile trailer")?;
    if trailer.flags & (IS_HEADER | IS_DATA | SEALED) != IS_DATA | SEALED {
        return Err(Corruption::Flags { what: "zfile trailer", flags: trailer.flags }.into());
    }
    if trailer.options != header.options {
        return Err(Corruption::HeaderAndTrailerDiffer.into());
    }
    Ok((trailer, end))
}

fn read_header<S: ReadAt + ?Sized>(source: &S, offset: u64, what: &'static str) -> Result<ZHeader> {
    let mut block = [0; BLOCK];
    read(source, &mut block, offset)?;
    ZHeader::decode(&block, what)
}

/// The lengths of all blocks, and the places of some.
fn load_lengths<S: ReadAt + ?Sized>(
    source: &S,
    trailer: &ZHeader,
    end: u64,
    limits: Limits,
) -> Result<(Vec<u32>, Vec<u64>)> {
    let (offset, count) = (trailer.index_offset, trailer.index_count);
    let block_size = u64::from(trailer.options.block_size);
    let index_end = count.checked_mul(4).and_then(|length| offset.checked_add(length));
    let fits = offset >= BLOCK as u64 && index_end.is_some_and(|index_end| index_end <= end);
    if !fits || count != trailer.original_size.div_ceil(block_size) {
        return Err(Corruption::IndexPlace { offset, count }.into());
    }
    if count > limits.blocks {
        return Err(Error::Exhausted { what: "compressed blocks", count, limit: limits.blocks });
    }
    let longest = trailer.options.algorithm.bound(trailer.options.block_size as usize) + CHECKSUM;
    let shortest = if trailer.options.checksums { CHECKSUM } else { 0 };
    let mut lengths = Vec::new();
    let mut places = Vec::new();
    let mut place = BLOCK as u64;
    let mut sum = 0;
    let mut buf = vec![0; index_of(count.min(16384)) * 4];
    while (lengths.len() as u64) < count {
        let left = index_of(count) - lengths.len();
        let part = &mut buf[..left.min(16384) * 4];
        read(source, part, offset + lengths.len() as u64 * 4)?;
        sum = extend_digest(sum, part);
        for bytes in part.chunks_exact(4) {
            let length = u32::from_le_bytes(*bytes.first_chunk().expect("four bytes"));
            if length as usize <= shortest || length as usize > longest {
                let block = lengths.len() as u64;
                return Err(Corruption::Block { block, offset: place, fault: "has an impossible length" }.into());
            }
            if lengths.len() % STEP == 0 {
                places.push(place);
            }
            lengths.push(length);
            place += u64::from(length);
        }
    }
    if lengths.len() % STEP == 0 {
        places.push(place);
    }
    if trailer.has_digest() && sum != trailer.index_digest {
        return Err(Corruption::Digest { what: "zfile index" }.into());
    }
    if place != offset {
        return Err(Corruption::BlockLengths { found: place - BLOCK as u64, expected: offset - BLOCK as u64 }.into());
    }
    lengths.shrink_to_fit();
    Ok((lengths, places))
}

impl<S: ReadAt> ReadAt for ZFile<S> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.original_size)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let inside = offset.checked_add(buf.len() as u64).is_some_and(|end| end <= self.original_size);
        if !inside {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buf.is_empty() {
            return Ok(());
        }
        // Buffers are lost, not broken, if a thread panics while it holds the lock.
        let kept = self.idle.lock().ok().and_then(|mut idle| idle.pop());
        let mut buffers = kept.unwrap_or_default();
        let done = self.fill(buf, offset, &mut buffers);
        if let Ok(mut idle) = self.idle.lock() {
            if idle.len() < KEPT {
                idle.push(buffers);
            }
        }
        Ok(done?)
    }
}
