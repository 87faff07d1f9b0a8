//! What an upper maps: an index that changes with every write.
//!
//! A B-tree of two words for each mapping; a change costs O(log n), and O(1) more for each
//! mapping it covers.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::pieces::Pieces;
use crate::segment::Segment;

/// Mappings, sorted and never overlapping. Tags are 0: an upper is one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Map {
    /// offset and length in one word, the rest in the other: see [`Segment::to_sorted`].
    entries: BTreeMap<u64, u64>,
    apart: bool,
}

impl Map {
    /// A map in which a mapping joins its neighbours where it goes on from them, so that writing
    /// a disk from front to end, page by page, leaves few mappings.
    pub fn new() -> Self {
        Self::default()
    }

    /// A map that keeps every mapping as it was inserted, as another implementation does.
    pub fn unjoined() -> Self {
        Self { apart: true, ..Self::default() }
    }

    /// Maps what *segment* says. *displaced* is told what is no longer mapped to where it was,
    /// in order from the last to the first: the space of data among it is free again.
    pub fn insert(&mut self, segment: Segment, mut displaced: impl FnMut(Segment)) {
        if segment.length() == 0 {
            return;
        }
        let segment = segment.with_tag(0);
        self.cut(segment.offset()..segment.end(), &mut displaced);
        let (key, high) = if self.apart { segment } else { self.joined(segment) }.to_sorted();
        self.entries.insert(key, high);
    }

    /// Unmaps *range*: it is a hole again, and shows what is below.
    pub fn remove(&mut self, range: Range<u64>, mut displaced: impl FnMut(Segment)) {
        if range.start < range.end {
            self.cut(range, &mut displaced);
        }
    }

    /// Mappings in it.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All mappings, in order.
    pub fn segments(&self) -> impl DoubleEndedIterator<Item = Segment> + Clone + '_ {
        self.entries.iter().map(|(key, high)| Segment::from_sorted(*key, *high))
    }

    /// What each sector of *range* is, in order.
    pub fn pieces(&self, range: Range<u64>) -> Pieces<impl Iterator<Item = Segment> + Clone + '_> {
        let before = self.last_before(range.start).filter(|segment| segment.end() > range.start);
        let first = before.map_or(range.start, Segment::offset);
        // A walk ends by itself: pieces asks for no segment behind its range but one.
        let segments = self.entries.range(first << KEY_SHIFT..).map(|(key, high)| Segment::from_sorted(*key, *high));
        Pieces::new(segments, range)
    }

    /// The last mapping that starts before *sector*.
    fn last_before(&self, sector: u64) -> Option<Segment> {
        let (key, high) = self.entries.range(..sector << KEY_SHIFT).next_back()?;
        Some(Segment::from_sorted(*key, *high))
    }

    fn first_from(&self, sector: u64) -> Option<Segment> {
        let (key, high) = self.entries.range(sector << KEY_SHIFT..).next()?;
        Some(Segment::from_sorted(*key, *high))
    }

    /// Makes room: what lies in *range* goes, what reaches into it is shortened.
    fn cut(&mut self, range: Range<u64>, displaced: &mut impl FnMut(Segment)) {
        while let Some(old) = self.last_before(range.end).filter(|old| old.end() > range.start) {
            self.entries.remove(&old.to_sorted().0);
            displaced(old.clip(range.start, range.end));
            for part in [old.offset()..range.start, range.end..old.end()] {
                if part.start < part.end {
                    let (key, high) = old.clip(part.start, part.end).to_sorted();
                    self.entries.insert(key, high);
                }
            }
        }
    }

    /// *segment* with the neighbours that it goes on from or into; they leave the map.
    fn joined(&mut self, segment: Segment) -> Segment {
        let mut segment = segment;
        if let Some(before) = self.last_before(segment.offset()) {
            if let Some(joined) = before.join(segment) {
                self.entries.remove(&before.to_sorted().0);
                segment = joined;
            }
        }
        if let Some(after) = self.first_from(segment.end()) {
            if let Some(joined) = segment.join(after) {
                self.entries.remove(&after.to_sorted().0);
                segment = joined;
            }
        }
        segment
    }
}

const KEY_SHIFT: u32 = 14;

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u64, length: u64, moffset: u64) -> Segment {
        Segment::data(offset, length, moffset).unwrap()
    }

    #[test]
    fn a_write_in_the_middle_leaves_both_ends_and_tells_what_went() {
        let mut map = Map::new();
        map.insert(data(0, 100, 8), |_| panic!("nothing was there"));
        let mut went = Vec::new();
        map.insert(data(40, 10, 108), |old| went.push(old));
        assert_eq!(map.segments().collect::<Vec<_>>(), [data(0, 40, 8), data(40, 10, 108), data(50, 50, 58)]);
        assert_eq!(went, [data(40, 10, 48)]);
    }

    #[test]
    fn a_disk_written_in_order_stays_small_and_one_written_apart_does_not() {
        let (mut joined, mut apart) = (Map::new(), Map::unjoined());
        for page in 0..4096 {
            joined.insert(data(page * 8, 8, 8 + page * 8), |_| ());
            apart.insert(data(page * 8, 8, 8 + page * 8), |_| ());
        }
        assert_eq!((joined.len(), apart.len()), (3, 4096));
        assert!(joined.pieces(0..32768).map(|piece| piece.length).sum::<u64>() == 32768);
    }

    #[test]
    fn what_is_removed_is_a_hole() {
        let mut map = Map::new();
        map.insert(data(0, 100, 8), |_| ());
        map.remove(10..90, |_| ());
        assert_eq!(map.segments().collect::<Vec<_>>(), [data(0, 10, 8), data(90, 10, 98)]);
        map.remove(0..u64::MAX >> KEY_SHIFT, |_| ());
        assert!(map.is_empty());
    }
}
