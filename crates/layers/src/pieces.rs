//! Walking a range: every sector of it belongs to one piece, mapped or not.

use std::iter::Peekable;
use std::ops::Range;

use crate::segment::Segment;

/// A run of sectors with one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub offset: u64,
    pub length: u64,
    pub place: Place,
}

impl Piece {
    pub const fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }
}

/// Where the content of a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nothing is mapped: what is below decides, and at the bottom it reads as zeros.
    Hole,
    /// Zeros, whatever is below.
    Zeroed,
    /// At sector *moffset* of the file of layer *tag*; 0 is the newest.
    Data { tag: u8, moffset: u64 },
}

/// The pieces of a range, in order and without a gap.
#[derive(Debug, Clone)]
pub struct Pieces<I: Iterator<Item = Segment>> {
    segments: Peekable<I>,
    at: u64,
    end: u64,
}

impl<I: Iterator<Item = Segment>> Pieces<I> {
    /// *segments* are sorted, do not overlap, and start with the first one that ends in the range.
    pub(crate) fn new(segments: I, range: Range<u64>) -> Self {
        Self { segments: segments.peekable(), at: range.start, end: range.end }
    }
}

impl<I: Iterator<Item = Segment>> Iterator for Pieces<I> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.end {
            return None;
        }
        let offset = self.at;
        let piece = match self.segments.peek() {
            Some(segment) if segment.offset() <= offset => {
                let part = segment.clip(offset, self.end);
                let place = if part.is_zeroed() {
                    Place::Zeroed
                } else {
                    Place::Data { tag: part.tag(), moffset: part.moffset() }
                };
                self.segments.next();
                Piece { offset, length: part.length(), place }
            }
            next => {
                let end = next.map_or(self.end, |segment| segment.offset().min(self.end));
                Piece { offset, length: end - offset, place: Place::Hole }
            }
        };
        self.at += piece.length;
        Some(piece)
    }
}
