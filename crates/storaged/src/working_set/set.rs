//! Which parts of an image a guest touches when it starts: sorted runs of equal units.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What is told apart. The kernel reads memory ahead by more than that, so less would be no truer.
pub(super) const UNIT_BYTES: u64 = 64 << 10;
const MAX_RUNS: usize = 1 << 16;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct WorkingSet {
    /// First unit and how many, in order, apart from each other.
    runs: Vec<(u64, u64)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    unit_bytes: u64,
    runs: Vec<(u64, u64)>,
}

impl WorkingSet {
    /// Of the units for which *touched* is true, of so many.
    pub fn of(units: u64, touched: impl Fn(u64) -> bool) -> Self {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for unit in (0..units).filter(|unit| touched(*unit)) {
            let full = runs.len() == MAX_RUNS;
            match runs.last_mut().filter(|(start, count)| *start + *count == unit) {
                Some((_, count)) => *count += 1,
                None if full => break,
                None => runs.push((unit, 1)),
            }
        }
        Self { runs }
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// In bytes: start and length, of an image of *size* bytes.
    pub fn ranges(&self, size: u64) -> impl Iterator<Item = (u64, u64)> {
        self.runs.iter().filter_map(move |(start, count)| {
            let end = (start + count).saturating_mul(UNIT_BYTES).min(size);
            let start = start.saturating_mul(UNIT_BYTES);
            (start < end).then(|| (start, end - start))
        })
    }

    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|(_, count)| count * UNIT_BYTES).sum()
    }
}

impl TryFrom<Written> for WorkingSet {
    type Error = Error;

    fn try_from(Written { unit_bytes, runs }: Written) -> Result<Self> {
        if unit_bytes != UNIT_BYTES {
            return Err(Error::invalid(format!("a working set in units of {unit_bytes} bytes, not {UNIT_BYTES}")));
        }
        let mut next = 0;
        for (start, count) in &runs {
            let end = start.checked_add(*count).filter(|end| *count > 0 && *end <= u64::MAX / UNIT_BYTES);
            if *start < next || end.is_none() {
                return Err(Error::invalid("a working set is runs in order that do not overlap"));
            }
            next = end.unwrap_or_default();
        }
        if runs.len() > MAX_RUNS {
            return Err(Error::invalid(format!("a working set of more than {MAX_RUNS} runs")));
        }
        Ok(Self { runs })
    }
}

impl From<WorkingSet> for Written {
    fn from(set: WorkingSet) -> Self {
        Self { unit_bytes: UNIT_BYTES, runs: set.runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_runs_of_what_was_touched() {
        let set = WorkingSet::of(10, |unit| [0, 3, 4, 9].contains(&unit));
        let size = 9 * UNIT_BYTES + 5;
        let expected = [(0, UNIT_BYTES), (3 * UNIT_BYTES, 2 * UNIT_BYTES), (9 * UNIT_BYTES, 5)];
        assert_eq!(set.ranges(size).collect::<Vec<_>>(), expected);
        // Of an image that is smaller than the set says.
        assert_eq!(set.ranges(UNIT_BYTES).collect::<Vec<_>>(), &expected[..1]);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_nothing_else_is() -> serde_json::Result<()> {
        let set = WorkingSet::of(10, |unit| unit % 3 == 0);
        assert_eq!(serde_json::from_str::<WorkingSet>(&serde_json::to_string(&set)?)?, set);
        for bad in [
            r#"{"unit_bytes": 1, "runs": []}"#,
            r#"{"unit_bytes": 65536, "runs": [[0, 0]]}"#,
            r#"{"unit_bytes": 65536, "runs": [[1, 2], [2, 1]]}"#,
            r#"{"unit_bytes": 65536, "runs": [[5, 1], [2, 1]]}"#,
            r#"{"unit_bytes": 65536, "runs": [[18446744073709551615, 1]]}"#,
            r#"{"unit_bytes": 65536, "runs": [[281474976710655, 1]]}"#,
            r#"{"unit_bytes": 65536, "runs": [[-1, 1]]}"#,
        ] {
            assert!(serde_json::from_str::<WorkingSet>(bad).is_err(), "{bad}");
        }
        Ok(())
    }
}
