//! Several indexes as one: for every sector, the newest layer that says something about it.

use crate::MAX_LAYERS;
use crate::error::{Invalid, Result};
use crate::index::Index;
use crate::segment::Segment;

/// Merges the indexes of a stack, lowest first. Tags count from the newest, which is 0. Mappings
/// that go on where another ends, in the view and in the data of one layer, become one; what
/// lies beyond `virtual_sectors` is cut off.
///
/// # Errors
/// Invalid for no layer, or more than [`MAX_LAYERS`].
pub fn merge(layers: &[&Index], virtual_sectors: u64) -> Result<Index> {
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        return Err(Invalid::Layers(layers.len()).into());
    }
    Ok(Index::from_sorted(merged(layers, 0, virtual_sectors)))
}

/// A stack's index with one more layer on it: every tag of the stack becomes one higher.
pub(crate) fn with_layer(stack: &Index, layer: &Index, virtual_sectors: u64) -> Index {
    let mut lower = Joined::default();
    for segment in stack.segments().iter().take_while(|segment| segment.offset() < virtual_sectors) {
        lower.push(segment.clip(0, virtual_sectors).with_tag(segment.tag() + 1));
    }
    Index::from_sorted(over(&merged(&[layer], 0, virtual_sectors), &lower.segments))
}

/// Halves, so that each mapping is looked at once for each doubling of the stack. *newest* is
/// the tag of the last of *layers*.
fn merged(layers: &[&Index], newest: u8, end: u64) -> Vec<Segment> {
    if let [layer] = layers {
        let mut tagged = Joined::default();
        for segment in layer.segments().iter().take_while(|segment| segment.offset() < end) {
            tagged.push(segment.clip(0, end).with_tag(newest));
        }
        return tagged.segments;
    }
    let (lower, upper) = layers.split_at(layers.len() / 2);
    let next = newest + u8::try_from(upper.len()).expect("a stack has at most 255 layers");
    over(&merged(upper, newest, end), &merged(lower, next, end))
}

/// All of *upper*, and of *lower* what shows between.
fn over(upper: &[Segment], lower: &[Segment]) -> Vec<Segment> {
    let mut result = Joined { segments: Vec::with_capacity(upper.len().max(lower.len())) };
    let mut lower = lower.iter().copied().peekable();
    let mut at = 0;
    let mut show = |result: &mut Joined, from: u64, to: u64| {
        while let Some(segment) = lower.peek().copied().filter(|segment| segment.offset() < to) {
            if segment.end() > from && from < to {
                result.push(segment.clip(from, to));
            }
            if segment.end() > to {
                break;
            }
            lower.next();
        }
    };
    for segment in upper {
        show(&mut result, at, segment.offset());
        result.push(*segment);
        at = segment.end();
    }
    show(&mut result, at, u64::MAX);
    result.segments
}

#[derive(Default)]
struct Joined {
    segments: Vec<Segment>,
}

impl Joined {
    fn push(&mut self, segment: Segment) {
        if let Some(last) = self.segments.last_mut() {
            if let Some(joined) = last.join(segment) {
                *last = joined;
                return;
            }
        }
        self.segments.push(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u64, length: u64, moffset: u64) -> Segment {
        Segment::data(offset, length, moffset).unwrap()
    }

    #[test]
    fn the_newest_wins_and_zeros_hide() {
        let bottom = Index::from_sorted(vec![data(0, 100, 8)]);
        let middle = Index::from_sorted(vec![Segment::zeroed(10, 20, 8).unwrap(), data(50, 10, 8)]);
        let top = Index::from_sorted(vec![data(15, 5, 8), data(95, 10, 13)]);
        let found = merge(&[&bottom, &middle, &top], 1000).unwrap();
        let zeros = |offset, length| Segment::zeroed(offset, length, 8).unwrap().with_tag(1);
        assert_eq!(
            found.segments(),
            [
                data(0, 10, 8).with_tag(2),
                zeros(10, 5),
                data(15, 5, 8),
                zeros(20, 10),
                data(30, 20, 38).with_tag(2),
                data(50, 10, 8).with_tag(1),
                data(60, 35, 68).with_tag(2),
                data(95, 10, 13),
            ]
        );
        let cut = merge(&[&bottom, &middle, &top], 97).unwrap();
        assert_eq!(cut.segments().last(), Some(&data(95, 2, 13)));
    }

    #[test]
    fn what_goes_on_is_joined_up_to_the_longest() {
        let pages: Vec<_> = (0..4096).map(|page| data(page * 8, 8, 8 + page * 8)).collect();
        let found = merge(&[&Index::from_sorted(pages)], 1 << 40).unwrap();
        assert_eq!(found.segments(), [data(0, 16376, 8), data(16376, 16376, 16384), data(32752, 16, 32760)]);
    }

    #[test]
    fn a_stack_has_one_to_255_layers() {
        let empty = Index::default();
        assert!(merge(&[], 8).is_err());
        assert!(merge(&vec![&empty; 255], 8).is_ok());
        assert!(merge(&vec![&empty; 256], 8).is_err());
    }
}
