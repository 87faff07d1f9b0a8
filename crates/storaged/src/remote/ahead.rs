//! Guessing what is read next: when blocks are asked for in order, those that follow.

use std::ops::Range;

/// The farthest we look.
const MAX_WINDOW: u64 = 16;

#[derive(Default)]
pub(super) struct Ahead {
    /// The block behind the last one that was read.
    next: u64,
    /// How many in a row came in order.
    run: u32,
    /// Up to here it was guessed before.
    guessed: u64,
}

impl Ahead {
    /// Blocks of *read* are being read: what to fetch besides, of so many blocks in all.
    pub(super) fn see(&mut self, read: &Range<u64>, all: u64) -> Range<u64> {
        let nothing = read.end..read.end;
        if read.start + 1 == self.next && read.end == self.next {
            return nothing; // more of the block that was read last
        }
        let in_order = self.next > 0 && (read.start == self.next || read.start + 1 == self.next);
        self.run = if in_order { (self.run + 1).min(16) } else { 0 };
        self.next = read.end;
        if self.run == 0 {
            self.guessed = read.end;
            return nothing;
        }
        let end = (read.end + (1 << self.run).min(MAX_WINDOW)).min(all);
        let start = read.end.max(self.guessed).min(end);
        self.guessed = end.max(self.guessed);
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_in_order_looks_farther_and_farther_and_never_twice() {
        let mut ahead = Ahead::default();
        assert!(ahead.see(&(10..11), 100).is_empty());
        assert_eq!(ahead.see(&(11..12), 100), 12..14);
        assert_eq!(ahead.see(&(12..13), 100), 14..17);
        assert!(ahead.see(&(12..13), 100).is_empty());
        assert_eq!(ahead.see(&(13..14), 100), 17..22);
    }

    #[test]
    fn jumping_about_and_the_end_are_no_reason_to_fetch() {
        let mut ahead = Ahead::default();
        for block in [50, 3, 90, 7] {
            assert!(ahead.see(&(block..block + 1), 100).is_empty());
        }
        ahead.see(&(98..99), 100);
        assert_eq!(ahead.see(&(99..100), 100), 100..100);
    }
}
