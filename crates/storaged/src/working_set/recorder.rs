//! Noting what is read of an image for a while, at the price of one look when nothing is noted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::set::{UNIT_BYTES, WorkingSet};

/// Larger images are noted up to here only: 1 TiB, in 2 MiB of memory.
const MAX_UNITS: u64 = 1 << 24;

/// What an image has for the purpose.
#[derive(Default)]
pub struct Recorder {
    on: AtomicBool,
    touched: Mutex<Option<Arc<Touched>>>,
    turn: AtomicU64,
}

struct Touched {
    units: u64,
    bits: Vec<AtomicU64>,
}

impl Recorder {
    /// Begins anew, for an image of so many bytes. Gives the number of this time.
    pub fn start(&self, size_bytes: u64) -> u64 {
        let units = size_bytes.div_ceil(UNIT_BYTES).min(MAX_UNITS);
        let words = usize::try_from(units.div_ceil(64)).unwrap_or(0);
        let touched = Touched { units, bits: (0..words).map(|_| AtomicU64::new(0)).collect() };
        *self.touched.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(touched));
        self.on.store(true, Relaxed);
        self.turn.fetch_add(1, Relaxed) + 1
    }

    pub fn note(&self, offset: u64, length: usize) {
        if !self.on.load(Relaxed) || length == 0 {
            return;
        }
        let touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(touched) = touched else { return };
        let end = (offset + length as u64).div_ceil(UNIT_BYTES).min(touched.units);
        for unit in offset / UNIT_BYTES..end {
            if let Some(word) = usize::try_from(unit / 64).ok().and_then(|at| touched.bits.get(at)) {
                word.fetch_or(1 << (unit % 64), Relaxed);
            }
        }
    }

    /// Whether *turn* is the last time that it began.
    pub fn is_at(&self, turn: u64) -> bool {
        self.turn.load(Relaxed) == turn
    }

    /// Ends, and gives what was noted; nothing when nothing was begun.
    pub fn finish(&self) -> Option<WorkingSet> {
        self.on.store(false, Relaxed);
        let touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let word = |unit: u64| usize::try_from(unit / 64).ok().and_then(|at| touched.bits.get(at));
        Some(WorkingSet::of(touched.units, |unit| {
            word(unit).is_some_and(|word| word.load(Relaxed) >> (unit % 64) & 1 == 1)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_read_while_it_is_on_is_noted() {
        let recorder = Recorder::default();
        recorder.note(0, 10);
        assert_eq!(recorder.finish(), None);
        recorder.start(10 * UNIT_BYTES);
        recorder.note(UNIT_BYTES - 1, 2);
        recorder.note(9 * UNIT_BYTES, 1 << 30);
        let expected = WorkingSet::of(10, |unit| [0, 1, 9].contains(&unit));
        assert_eq!(recorder.finish(), Some(expected));
        assert_eq!(recorder.finish(), None);
    }
}
