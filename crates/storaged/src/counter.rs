//! Counts one kind of request: how many, how much, how long.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::Serialize;

/// Class *n* holds what took less than 2^n microseconds; the last one holds the rest (8 s and more).
const CLASSES: usize = 24;

#[derive(Default)]
pub(crate) struct Counter {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    classes: [AtomicU64; CLASSES],
}

impl Counter {
    pub(crate) fn add(&self, bytes: usize, failed: bool, took: Duration) {
        self.requests.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.errors.fetch_add(u64::from(failed), Relaxed);
        self.classes[class_of(took)].fetch_add(1, Relaxed);
    }

    pub(crate) fn read(&self) -> Work {
        Work {
            requests: self.requests.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            latency_classes: self.classes.iter().map(|class| class.load(Relaxed)).collect(),
        }
    }
}

fn class_of(took: Duration) -> usize {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    ((u64::BITS - micros.leading_zeros()) as usize).min(CLASSES - 1)
}

/// Of one kind of request, since this daemon started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Work {
    pub requests: u64,
    pub bytes: u64,
    pub errors: u64,
    /// Element *n* counts what took less than 2^n microseconds and not less than half of that; the last one has no upper end.
    pub latency_classes: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_ends_before_its_power_of_two() {
        assert_eq!(class_of(Duration::ZERO), 0);
        assert_eq!(class_of(Duration::from_micros(1)), 1);
        assert_eq!(class_of(Duration::from_micros(1023)), 10);
        assert_eq!(class_of(Duration::from_micros(1024)), 11);
        assert_eq!(class_of(Duration::MAX), CLASSES - 1);
    }
}
