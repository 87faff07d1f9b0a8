//! Making a sealed layer of an upper where it lies: an index and a trailer behind its data.

use std::io::Write;

use crate::error::{Error, Result};
use crate::header::{Header, Identity};
use crate::layer::sectors;
use crate::map::Map;
use crate::segment::Segment;
use crate::writer::Written;
use crate::{BLOCK, BLOCK_LEN, SECTOR};

/// Writes what belongs behind the data of an upper, which ends at byte `data_end` of its file.
/// The data and its header stay as they are; *identity* is that of the header. The caller makes
/// the data durable before, and all of it after.
///
/// # Errors
/// Invalid if `data_end` is not a whole sector behind the header; whatever *out* reports, after
/// which the file is still the upper it was, once it is cut at `data_end` again.
pub fn seal<W: Write>(mut out: W, identity: &Identity, map: &Map, data_end: u64) -> Result<Written> {
    sectors(data_end)?;
    let count = map.len() as u64;
    // The last sector of the index is filled up with ones, the rest of the last block with zeros.
    let index_bytes = count * Segment::SIZE as u64;
    let ones = index_bytes.next_multiple_of(SECTOR) - index_bytes;
    let index_end = data_end + index_bytes + ones;
    let zeros = index_end.next_multiple_of(BLOCK) - index_end;
    let trailer = Header::trailer(identity.clone(), data_end, count).encode()?;

    write_entries(&mut out, map.segments())?;
    write_filler(&mut out, 0xff, ones)?;
    write_filler(&mut out, 0, zeros)?;
    out.write_all(&trailer).map_err(Error::Write)?;
    Ok(Written { data_bytes: data_end.saturating_sub(BLOCK), mappings: count, file_bytes: index_end + zeros + BLOCK })
}

pub(crate) fn write_entries<W: Write>(out: &mut W, segments: impl Iterator<Item = Segment>) -> Result<()> {
    const AT_ONCE: usize = 64 << 10;
    let mut buf = Vec::with_capacity(AT_ONCE);
    for segment in segments {
        buf.extend_from_slice(&segment.encode());
        if buf.len() == AT_ONCE {
            out.write_all(&buf).map_err(Error::Write)?;
            buf.clear();
        }
    }
    out.write_all(&buf).map_err(Error::Write)
}

/// Less than a block of one byte.
pub(crate) fn write_filler<W: Write>(out: &mut W, byte: u8, length: u64) -> Result<()> {
    let block = [byte; BLOCK_LEN];
    let length = usize::try_from(length).unwrap_or(block.len()).min(block.len());
    out.write_all(&block[..length]).map_err(Error::Write)
}
