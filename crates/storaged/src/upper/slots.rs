//! Where in the data file the sectors of the disk go.
//!
//! The disk is cut into chunks, and a chunk that is written to gets a place of its own size, for
//! good. So neighbours on the disk are neighbours in the file and share one mapping, whatever
//! was written when; and a file can never hold more than the disk has, however often it is
//! written or discarded. What is not written of a chunk is a hole and takes no room.

use std::collections::HashMap;
use std::ops::Range;

use layers::{BLOCK, SECTOR, Segment};

/// 256 KiB: a disk written all over in any order has 4096 mappings for each GiB.
pub(super) const CHUNK: u64 = (256 << 10) / SECTOR;
const FIRST: u64 = BLOCK / SECTOR;

/// All values are in sectors.
pub(super) struct Slots {
    places: HashMap<u64, u64>,
    next: u64,
}

/// A run on the disk and its place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) moffset: u64,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { places: HashMap::new(), next: FIRST }
    }

    /// Learns from a log where chunks have their place.
    pub(super) fn learn(&mut self, segment: Segment) {
        if segment.is_zeroed() {
            return;
        }
        let mut at = segment.offset();
        while at < segment.end() {
            let moffset = segment.moffset() + (at - segment.offset());
            // What another program placed differently stays mapped where it is; only new writes go here.
            if let Some(place) = moffset.checked_sub(at % CHUNK).filter(|place| *place >= FIRST) {
                self.places.insert(at / CHUNK, place);
                self.next = self.next.max(place + CHUNK);
            }
            at = (at / CHUNK + 1) * CHUNK;
        }
    }

    /// Nothing new is placed before sector *end* of the file.
    pub(super) fn skip_to(&mut self, end: u64) {
        self.next = self.next.max(FIRST + end.saturating_sub(FIRST).next_multiple_of(CHUNK));
    }

    /// The places of *range*, which are made where there are none; what goes on is one run.
    pub(super) fn place(&mut self, range: Range<u64>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let end = ((at / CHUNK + 1) * CHUNK).min(range.end);
            let next = &mut self.next;
            let place = *self.places.entry(at / CHUNK).or_insert_with(|| {
                *next += CHUNK;
                *next - CHUNK
            });
            let run = Run { offset: at, length: end - at, moffset: place + at % CHUNK };
            match runs.last_mut().filter(|last| last.moffset + last.length == run.moffset) {
                Some(last) => last.length += run.length,
                None => runs.push(run),
            }
            at = end;
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_keeps_its_place_and_neighbours_written_in_order_are_one_run() {
        let mut slots = Slots::new();
        let whole = slots.place(0..3 * CHUNK);
        assert_eq!(whole, [Run { offset: 0, length: 3 * CHUNK, moffset: FIRST }]);
        let again = slots.place(CHUNK + 8..CHUNK + 16);
        assert_eq!(again, [Run { offset: CHUNK + 8, length: 8, moffset: FIRST + CHUNK + 8 }]);
    }

    #[test]
    fn what_a_log_says_is_learnt() -> layers_result::Result {
        let mut slots = Slots::new();
        slots.learn(Segment::data(5 * CHUNK - 4, 8, FIRST + 3 * CHUNK - 4)?);
        assert_eq!(slots.place(5 * CHUNK..5 * CHUNK + 1)[0].moffset, FIRST + 3 * CHUNK);
        assert_eq!(slots.place(0..1)[0].moffset, FIRST + 4 * CHUNK);
        Ok(())
    }

    mod layers_result {
        pub(super) type Result = std::result::Result<(), layers::Error>;
    }
}
