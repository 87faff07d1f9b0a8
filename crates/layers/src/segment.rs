//! One mapping: a run of sectors of the view, and where its content lies.
//!
//! In memory as in the file: two words, so that a million of them take 16 MB.

use std::fmt;

use crate::error::{Invalid, Result};

const OFFSET_BITS: u32 = 50;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const MOFFSET_MASK: u64 = (1 << 55) - 1;
const ZEROED: u64 = 1 << 55;
const TAG_SHIFT: u32 = 56;

/// All values are in sectors. The content of a zeroed mapping is zeros, and it lies nowhere: its
/// `moffset` is kept as found, and does not grow when the front is cut off.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// offset | length << 50
    low: u64,
    /// moffset | zeroed << 55 | tag << 56
    high: u64,
}

impl Segment {
    /// The longest mapping that can be written down.
    pub const MAX_LENGTH: u64 = (1 << 14) - 1;
    /// The longest one in which every following one stays aligned to 4 KiB.
    const WHOLE_PAGES: u64 = Self::MAX_LENGTH / 8 * 8;
    /// Bytes of an entry in a file.
    pub const SIZE: usize = 16;
    /// The entry that fills up an index. It maps nothing.
    pub const PADDING: Self = Self { low: OFFSET_MASK, high: 0 };

    /// A mapping of *length* sectors at *offset* to data at *moffset*.
    ///
    /// # Errors
    /// Invalid if a value does not fit, or the mapping is empty.
    pub fn data(offset: u64, length: u64, moffset: u64) -> Result<Self> {
        let fits = length > 0
            && length <= Self::MAX_LENGTH
            && offset < OFFSET_MASK
            && offset + length <= OFFSET_MASK
            && moffset <= MOFFSET_MASK - length;
        if !fits {
            return Err(Invalid::Segment { offset, length, moffset }.into());
        }
        Ok(Self { low: offset | length << OFFSET_BITS, high: moffset })
    }

    /// A mapping of *length* sectors at *offset* to zeros; *moffset* is only noted.
    ///
    /// # Errors
    /// As for [`Segment::data`].
    pub fn zeroed(offset: u64, length: u64, moffset: u64) -> Result<Self> {
        let data = Self::data(offset, length, moffset)?;
        Ok(Self { high: data.high | ZEROED, ..data })
    }

    /// Mappings for a run of any length, cut so that each can be written down.
    ///
    /// # Errors
    /// As for [`Segment::data`], for the whole run at once.
    pub fn run_of_data(offset: u64, length: u64, moffset: u64) -> Result<impl Iterator<Item = Self> + Clone> {
        Self::run(offset, length, moffset, 0)
    }

    /// The same for zeros.
    ///
    /// # Errors
    /// As for [`Segment::data`], for the whole run at once.
    pub fn run_of_zeros(offset: u64, length: u64, moffset: u64) -> Result<impl Iterator<Item = Self> + Clone> {
        Self::run(offset, length, moffset, ZEROED)
    }

    fn run(offset: u64, length: u64, moffset: u64, zeroed: u64) -> Result<impl Iterator<Item = Self> + Clone> {
        let end = offset.checked_add(length).filter(|end| length > 0 && *end <= OFFSET_MASK);
        let moved = if zeroed == 0 { length } else { 0 };
        let mend = moffset.checked_add(moved).filter(|end| *end <= MOFFSET_MASK);
        if end.is_none() || mend.is_none() {
            return Err(Invalid::Segment { offset, length, moffset }.into());
        }
        let pieces = length.div_ceil(Self::WHOLE_PAGES);
        Ok((0..pieces).map(move |piece| {
            let done = piece * Self::WHOLE_PAGES;
            let length = (length - done).min(Self::WHOLE_PAGES);
            let moved = if zeroed == 0 { done } else { 0 };
            Self { low: (offset + done) | length << OFFSET_BITS, high: (moffset + moved) | zeroed }
        }))
    }

    pub const fn offset(self) -> u64 {
        self.low & OFFSET_MASK
    }

    pub const fn length(self) -> u64 {
        self.low >> OFFSET_BITS
    }

    /// The first sector behind it.
    pub const fn end(self) -> u64 {
        self.offset() + self.length()
    }

    /// Where the content lies. Of a zeroed one: the end of the data when it was made.
    pub const fn moffset(self) -> u64 {
        self.high & MOFFSET_MASK
    }

    pub const fn is_zeroed(self) -> bool {
        self.high & ZEROED != 0
    }

    /// Which layer of a stack it is of; the newest is 0.
    pub const fn tag(self) -> u8 {
        (self.high >> TAG_SHIFT) as u8
    }

    #[must_use]
    pub const fn with_tag(self, tag: u8) -> Self {
        Self { low: self.low, high: self.high & (ZEROED | MOFFSET_MASK) | (tag as u64) << TAG_SHIFT }
    }

    /// The part within *start..end*, which it must reach into.
    #[must_use]
    pub(crate) fn clip(self, start: u64, end: u64) -> Self {
        let from = self.offset().max(start);
        let to = self.end().min(end);
        debug_assert!(from < to, "{self:?} has nothing in {start}..{end}");
        let moved = if self.is_zeroed() { 0 } else { from - self.offset() };
        Self { low: from | (to - from) << OFFSET_BITS, high: self.high + moved }
    }

    /// Both as one, if *next* goes on where this one ends, in the view and in the data.
    pub(crate) fn join(self, next: Self) -> Option<Self> {
        let length = self.length() + next.length();
        let goes_on = self.end() == next.offset()
            && self.tag() == next.tag()
            && self.is_zeroed() == next.is_zeroed()
            && (self.is_zeroed() || self.moffset() + self.length() == next.moffset())
            && length <= Self::MAX_LENGTH;
        goes_on.then_some(Self { low: self.offset() | length << OFFSET_BITS, high: self.high })
    }

    /// The entry of a file.
    pub fn encode(self) -> [u8; Self::SIZE] {
        let mut entry = [0; Self::SIZE];
        entry[..8].copy_from_slice(&self.low.to_le_bytes());
        entry[8..].copy_from_slice(&self.high.to_le_bytes());
        entry
    }

    /// Any sixteen bytes are an entry; whether it makes sense depends on the file around it.
    pub fn decode(entry: &[u8; Self::SIZE]) -> Self {
        let [l0, l1, l2, l3, l4, l5, l6, l7, high @ ..] = *entry;
        Self { low: u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]), high: u64::from_le_bytes(high) }
    }

    /// Whether it is the filler of an index.
    pub const fn is_padding(self) -> bool {
        self.low == OFFSET_MASK
    }

    /// One word that sorts by offset, and the rest: what a map keeps.
    pub(crate) const fn to_sorted(self) -> (u64, u64) {
        (self.offset() << 14 | self.length(), self.high)
    }

    pub(crate) const fn from_sorted(key: u64, high: u64) -> Self {
        Self { low: key >> 14 | (key & Self::MAX_LENGTH) << OFFSET_BITS, high }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}@{}", self.offset(), self.length(), self.moffset())?;
        if self.is_zeroed() {
            f.write_str("z")?;
        }
        write!(f, "#{}", self.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_laid_out_as_the_format_says() {
        let segment = Segment::zeroed(0x2810, 16, 0x68).unwrap().with_tag(3);
        let entry = segment.encode();
        assert_eq!(entry, [0x10, 0x28, 0, 0, 0, 0, 0x40, 0, 0x68, 0, 0, 0, 0, 0, 0x80, 3]);
        assert_eq!(Segment::decode(&entry), segment);
    }

    #[test]
    fn cutting_the_front_moves_data_and_leaves_zeros() {
        let data = Segment::data(100, 10, 8).unwrap();
        assert_eq!(data.clip(103, 200), Segment::data(103, 7, 11).unwrap());
        let zeros = Segment::zeroed(100, 10, 8).unwrap();
        assert_eq!(zeros.clip(0, 105).clip(103, 200), Segment::zeroed(103, 2, 8).unwrap());
    }

    #[test]
    fn a_long_run_is_cut_into_pieces_that_join_without_a_gap() {
        let run: Vec<_> = Segment::run_of_data(8, 50_000, 16).unwrap().collect();
        assert_eq!(run.iter().map(|piece| piece.length()).sum::<u64>(), 50_000);
        assert!(run.windows(2).all(|pair| pair[0].end() == pair[1].offset()));
        assert!(run.windows(2).all(|pair| pair[0].moffset() + pair[0].length() == pair[1].moffset()));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Segment::data(0, 0, 0).is_err());
        assert!(Segment::data(0, 1 << 14, 0).is_err());
        assert!(Segment::data(1 << 50, 1, 0).is_err());
        assert!(Segment::data(u64::MAX, 1, 0).is_err());
        assert!(Segment::data(0, 1, 1 << 55).is_err());
        assert!(Segment::run_of_zeros(0, 1 << 50, 0).is_err());
        assert!(Segment::run_of_data(0, u64::MAX, 2).is_err());
    }
}
