//! Which sectors are mapped, and where to: sorted, never overlapping, never changed.
//!
//! A mapping takes 16 bytes. Every 64th offset is kept a second time, close together, so that a
//! lookup among a million touches the cache and then one small part of the index.

use std::iter::Copied;
use std::ops::Range;
use std::slice;

use crate::error::{Corruption, Error, MappingFault, Result};
use crate::pieces::Pieces;
use crate::segment::Segment;
use crate::source::{ReadAt, read};
use crate::{BLOCK, SECTOR};

/// What a file may make us keep in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Mappings of one layer or log, padding included; 16 bytes each.
    pub mappings: u64,
    /// Compressed blocks of one zfile; 4 bytes each.
    pub blocks: u64,
}

impl Default for Limits {
    /// 256 MiB in either case: 64 GiB of single pages, or 256 GiB of compressed blocks of 4 KiB.
    fn default() -> Self {
        Self { mappings: 16 << 20, blocks: 64 << 20 }
    }
}

impl Limits {
    pub(crate) fn check_mappings(self, count: u64) -> Result<()> {
        if count > self.mappings {
            return Err(Error::Exhausted { what: "mappings", count, limit: self.mappings });
        }
        Ok(())
    }
}

const FENCE: usize = 64;

/// The mappings of a layer, or of a stack of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    segments: Vec<Segment>,
    /// The offset of every 64th segment.
    fences: Vec<u64>,
}

impl Index {
    /// An index of mappings that did not come from a file, tags as they are.
    ///
    /// # Errors
    /// Corrupt if one is empty, or not behind the one before it.
    pub fn from_segments(segments: impl IntoIterator<Item = Segment>) -> Result<Self> {
        let mut sorted: Vec<Segment> = Vec::new();
        for segment in segments {
            let entry = sorted.len() as u64;
            let end = sorted.last().map_or(0, |last| last.end());
            let fault = match segment.length() {
                0 => Some(MappingFault::Empty),
                _ => (segment.offset() < end).then_some(MappingFault::Unsorted),
            };
            if let Some(fault) = fault {
                return Err(Corruption::Mapping { entry, fault }.into());
            }
            sorted.push(segment);
        }
        Ok(Self::from_sorted(sorted))
    }

    /// *segments* are sorted and do not overlap.
    pub(crate) fn from_sorted(mut segments: Vec<Segment>) -> Self {
        segments.shrink_to_fit();
        let fences = segments.iter().step_by(FENCE).map(|segment| segment.offset()).collect();
        Self { segments, fences }
    }

    /// Loads *count* entries at byte *offset*, of a layer whose data ends there.
    ///
    /// # Errors
    /// Corrupt for an entry that is empty, out of order, or reaches outside the view or the data.
    pub(crate) fn load<S: ReadAt + ?Sized>(
        source: &S,
        offset: u64,
        count: u64,
        virtual_size: u64,
        limits: Limits,
    ) -> Result<Self> {
        limits.check_mappings(count)?;
        let bounds = Bounds { data: BLOCK / SECTOR..offset / SECTOR, virtual_sectors: virtual_size / SECTOR };
        let mut segments: Vec<Segment> = Vec::new();
        let mut end = 0;
        for_each_entry(source, offset, count, |entry, segment| {
            if segment.is_padding() {
                return Ok(());
            }
            bounds
                .check(segment)
                .and(if segment.offset() < end { Err(MappingFault::Unsorted) } else { Ok(()) })
                .map_err(|fault| Corruption::Mapping { entry, fault })?;
            end = segment.end();
            // The tag says which layer of some other stack it came from: nothing to us.
            segments.push(segment.with_tag(0));
            Ok(())
        })?;
        Ok(Self::from_sorted(segments))
    }

    /// Mappings in it.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The memory it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.segments.capacity() * size_of::<Segment>() + self.fences.capacity() * size_of::<u64>()
    }

    /// What each sector of *range* is, in order. Sectors behind the last mapping are a hole.
    pub fn pieces(&self, range: Range<u64>) -> Pieces<Copied<slice::Iter<'_, Segment>>> {
        Pieces::new(self.segments[self.first_ending_after(range.start)..].iter().copied(), range)
    }

    fn first_ending_after(&self, sector: u64) -> usize {
        let fence = self.fences.partition_point(|offset| *offset <= sector).saturating_sub(1);
        let start = fence * FENCE;
        let near = &self.segments[start..self.segments.len().min(start + FENCE)];
        start + near.partition_point(|segment| segment.end() <= sector)
    }
}

/// What a mapping of a file may reach.
pub(crate) struct Bounds {
    /// Sectors of the file that hold data.
    pub(crate) data: Range<u64>,
    pub(crate) virtual_sectors: u64,
}

impl Bounds {
    pub(crate) fn check(&self, segment: Segment) -> Result<(), MappingFault> {
        if segment.length() == 0 {
            return Err(MappingFault::Empty);
        }
        if segment.end() > self.virtual_sectors {
            return Err(MappingFault::BeyondVirtualSize);
        }
        let inside = segment.moffset() >= self.data.start && segment.moffset() + segment.length() <= self.data.end;
        if !segment.is_zeroed() && !inside {
            return Err(MappingFault::OutsideData);
        }
        Ok(())
    }
}

/// Reads *count* entries at byte *offset*, a little at a time, and hands each out with its number.
pub(crate) fn for_each_entry<S: ReadAt + ?Sized>(
    source: &S,
    offset: u64,
    count: u64,
    mut take: impl FnMut(u64, Segment) -> Result<()>,
) -> Result<()> {
    const AT_ONCE: usize = 16384;
    let mut buf = vec![0; AT_ONCE.min(usize::try_from(count).unwrap_or(AT_ONCE)) * Segment::SIZE];
    let mut entry = 0;
    while entry < count {
        let length = buf.len().min(usize::try_from((count - entry) * Segment::SIZE as u64).unwrap_or(usize::MAX));
        read(source, &mut buf[..length], offset + entry * Segment::SIZE as u64)?;
        for bytes in buf[..length].chunks_exact(Segment::SIZE) {
            take(entry, Segment::decode(bytes.first_chunk().expect("an entry")))?;
            entry += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pieces::{Piece, Place};

    #[test]
    fn a_range_is_covered_without_a_gap() {
        let index = Index::from_sorted(vec![
            Segment::data(8, 8, 100).unwrap(),
            Segment::zeroed(16, 4, 0).unwrap(),
            Segment::data(40, 10, 200).unwrap(),
        ]);
        let found: Vec<_> = index.pieces(10..45).collect();
        let piece = |offset, length, place| Piece { offset, length, place };
        assert_eq!(
            found,
            [
                piece(10, 6, Place::Data { tag: 0, moffset: 102 }),
                piece(16, 4, Place::Zeroed),
                piece(20, 20, Place::Hole),
                piece(40, 5, Place::Data { tag: 0, moffset: 200 }),
            ]
        );
        assert_eq!(index.pieces(50..60).collect::<Vec<_>>(), [piece(50, 10, Place::Hole)]);
        assert_eq!(index.pieces(5..5).count(), 0);
    }

    #[test]
    fn every_sector_is_found_across_fences() {
        let segments = (0..1000).map(|n| Segment::data(n * 3, 2, 8 + n * 2).unwrap()).collect();
        let index = Index::from_sorted(segments);
        for sector in 0..3000 {
            let wanted = match (sector / 3, sector % 3) {
                (_, 2) => Place::Hole,
                (n, rest) => Place::Data { tag: 0, moffset: 8 + n * 2 + rest },
            };
            assert_eq!(index.pieces(sector..sector + 1).next().unwrap().place, wanted, "sector {sector}");
        }
    }
}
