//! Reading through an upper: what it maps, and where it does not, what is below.

use std::ops::Range;

use crate::index::Index;
use crate::map::Map;
use crate::pieces::{Piece, Place};

/// An upper over a stack. It borrows both; making one costs nothing.
#[derive(Debug, Clone, Copy)]
pub struct Overlay<'a> {
    pub upper: &'a Map,
    pub lower: &'a Index,
}

/// Whose file a piece is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The upper's.
    Upper,
    /// That of the lower layer with the piece's tag. Holes are always lower ones.
    Lower,
}

impl<'a> Overlay<'a> {
    /// What each sector of *range* is, in order.
    pub fn pieces(self, range: Range<u64>) -> impl Iterator<Item = (Origin, Piece)> + 'a {
        self.upper.pieces(range).flat_map(move |piece| {
            let hole = piece.place == Place::Hole;
            let below = hole.then(|| self.lower.pieces(piece.range()));
            let own = (!hole).then_some((Origin::Upper, piece));
            own.into_iter().chain(below.into_iter().flatten().map(|piece| (Origin::Lower, piece)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    #[test]
    fn the_upper_hides_the_lower_and_shows_it_in_its_holes() {
        let lower = Index::from_sorted(vec![Segment::data(0, 30, 8).unwrap()]);
        let mut upper = Map::new();
        upper.insert(Segment::data(10, 5, 8).unwrap(), |_| ());
        upper.insert(Segment::zeroed(15, 5, 13).unwrap(), |_| ());
        let found: Vec<_> = Overlay { upper: &upper, lower: &lower }
            .pieces(5..40)
            .map(|(origin, piece)| (origin, piece.offset, piece.length, piece.place))
            .collect();
        let data = |moffset| Place::Data { tag: 0, moffset };
        assert_eq!(
            found,
            [
                (Origin::Lower, 5, 5, data(13)),
                (Origin::Upper, 10, 5, data(8)),
                (Origin::Upper, 15, 5, Place::Zeroed),
                (Origin::Lower, 20, 10, data(28)),
                (Origin::Lower, 30, 10, Place::Hole),
            ]
        );
    }
}
