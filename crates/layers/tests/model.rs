//! Whatever is done to a stack, it reads as a plain array of bytes to which the same was done.

#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod upper;

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use layers::{
    Algorithm, BLOCK, Identity, Index, Layer, LayerWriter, Limits, Map, Place, ReadAt, SECTOR, Segment, Stack, Uuid,
    ZFile, ZFileOptions, ZFileWriter, Zeroed, compact, compact_layer, merge, verify,
};
use proptest::collection::vec;
use proptest::prelude::*;
use upper::Upper;

const SECTORS: u64 = 300;
const SIZE: u64 = SECTORS * SECTOR;

type Source = Arc<dyn ReadAt>;

#[derive(Debug, Clone)]
enum Step {
    Write {
        sectors: Range<u64>,
        fill: u8,
        in_place: bool,
    },
    Discard {
        sectors: Range<u64>,
    },
    /// Close the upper, open what it left, and lay it on the stack.
    Seal,
    /// Stop without a word, with some bytes of the next entry written.
    Crash {
        torn: usize,
    },
    /// Write layers `from..to` of the stack as one.
    Merge {
        from: usize,
        to: usize,
    },
    /// Write one layer again without what it does not use.
    Commit {
        layer: usize,
    },
    Compress {
        layer: usize,
        algorithm: Algorithm,
        block_size: u32,
        checksums: bool,
    },
}

fn sectors() -> impl Strategy<Value = Range<u64>> {
    // Short runs and long ones, and often at places where others start and end.
    let offset = prop_oneof![0..SECTORS, (0..SECTORS / 16).prop_map(|n| n * 16)];
    (offset, prop_oneof![1..9_u64, 1..SECTORS]).prop_map(|(offset, length)| offset..(offset + length).min(SECTORS))
}

fn step() -> impl Strategy<Value = Step> {
    let algorithm = prop_oneof![Just(Algorithm::Lz4), Just(Algorithm::Zstd)];
    prop_oneof![
        8 => (sectors(), any::<u8>(), any::<bool>())
            .prop_map(|(sectors, fill, in_place)| Step::Write { sectors, fill, in_place }),
        3 => sectors().prop_map(|sectors| Step::Discard { sectors }),
        3 => Just(Step::Seal),
        1 => (0..16_usize).prop_map(|torn| Step::Crash { torn }),
        1 => (0..8_usize, 1..8_usize).prop_map(|(from, length)| Step::Merge { from, to: from + length }),
        1 => (0..8_usize).prop_map(|layer| Step::Commit { layer }),
        1 => (0..8_usize, algorithm, 0..5_u32, any::<bool>()).prop_map(|(layer, algorithm, shift, checksums)| {
            Step::Compress { layer, algorithm, block_size: 512 << shift, checksums }
        }),
    ]
}

/// Bytes that differ from sector to sector, so that one in the wrong place is seen.
fn content(sectors: &Range<u64>, fill: u8) -> Vec<u8> {
    let bytes = sectors.start * SECTOR..sectors.end * SECTOR;
    bytes.map(|n| fill ^ (n / SECTOR).to_le_bytes()[0] ^ (n * 3).to_le_bytes()[0]).collect()
}

struct Disk {
    joined: bool,
    upper: Upper,
    /// Lowest first.
    files: Vec<Source>,
    made: u8,
}

impl Disk {
    fn new(joined: bool) -> Self {
        Self { joined, upper: Upper::new(Identity::new(SIZE), Self::map(joined)), files: Vec::new(), made: 0 }
    }

    fn map(joined: bool) -> Map {
        if joined { Map::new() } else { Map::unjoined() }
    }

    fn identity(&mut self) -> Identity {
        self.made += 1;
        Identity::new(SIZE).named(Uuid::from_bytes([self.made; 16]), None)
    }

    fn stack(&self, range: Range<usize>) -> Option<Stack<Source>> {
        let layers: Vec<_> = self.files[range].iter().map(|file| Layer::open(file.clone()).unwrap()).collect();
        (!layers.is_empty()).then(|| Stack::new(layers).unwrap())
    }

    fn view(&self) -> Vec<u8> {
        self.upper.view(self.stack(0..self.files.len()).as_ref())
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Write { sectors, fill, in_place } => {
                let bytes = content(&sectors, fill);
                if in_place {
                    self.upper.write_in_place(sectors.start * SECTOR, &bytes);
                } else {
                    self.upper.write(sectors.start * SECTOR, &bytes);
                }
            }
            Step::Discard { sectors } => {
                self.upper.discard(sectors.start * SECTOR, (sectors.end - sectors.start) * SECTOR);
            }
            Step::Seal => {
                let next = Upper::new(self.identity(), Self::map(self.joined));
                let sealed = std::mem::replace(&mut self.upper, next).sealed();
                let before = self.stack(0..self.files.len());
                self.add(self.files.len()..self.files.len(), sealed);
                if let (Some(before), Some(anew)) = (before, self.stack(0..self.files.len())) {
                    let top = Layer::open(self.files[self.files.len() - 1].clone()).unwrap();
                    let grown = before.with_layer(top).unwrap();
                    let places = |stack: &Stack<Source>| places(stack.index().pieces(0..SECTORS));
                    assert_eq!(places(&grown), places(&anew), "laid on top, or opened anew");
                    assert_eq!(grown.identities(), anew.identities());
                }
            }
            Step::Crash { torn } => {
                self.upper.log.extend_from_slice(&Segment::PADDING.encode()[..torn]);
                let replay = self.upper.replayed(Self::map(self.joined));
                assert_eq!(replay.dropped.map_or(0, |dropped| dropped.bytes), torn as u64);
                self.upper.log.truncate(usize::try_from(replay.log_end()).unwrap());
                self.upper.map = replay.map;
            }
            Step::Merge { from, to } => {
                let range = from.min(self.files.len())..to.min(self.files.len());
                let zeroed = if range.start == 0 { Zeroed::Drop } else { Zeroed::Keep };
                if let Some(stack) = self.stack(range.clone()) {
                    let (merged, _) = compact(&stack, self.identity(), zeroed, Vec::new()).unwrap();
                    self.add(range, merged);
                }
            }
            Step::Commit { layer } => {
                if layer < self.files.len() {
                    let opened = Layer::open(self.files[layer].clone()).unwrap();
                    let (committed, _) = compact_layer(&opened, self.identity(), Zeroed::Keep, Vec::new()).unwrap();
                    self.add(layer..layer + 1, committed);
                }
            }
            Step::Compress { layer, algorithm, block_size, checksums } => {
                if layer < self.files.len() {
                    let mut bytes = vec![0; usize::try_from(self.files[layer].size().unwrap()).unwrap()];
                    self.files[layer].read_exact_at(&mut bytes, 0).unwrap();
                    let options = ZFileOptions { algorithm, block_size, checksums };
                    let mut writer = ZFileWriter::new(Vec::new(), options).unwrap();
                    // In parts of another size than a block.
                    for part in bytes.chunks(700) {
                        writer.write_all(part).unwrap();
                    }
                    let (compressed, length) = writer.finish().unwrap();
                    assert_eq!(length, compressed.len() as u64);
                    verify(&compressed, Limits::default()).unwrap();
                    self.files[layer] = Arc::new(ZFile::open(compressed).unwrap());
                }
            }
        }
    }

    /// Puts a new layer in the place of *range*.
    fn add(&mut self, range: Range<usize>, file: Vec<u8>) {
        let report = verify(&file, Limits::default()).unwrap();
        assert!(report.unused_bytes <= file.len() as u64);
        assert_eq!(file.len() as u64 % BLOCK, 0, "a sealed file ends with a whole block");
        self.files.splice(range, [Arc::new(file) as Source]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_reads_as_an_array_of_bytes_would(joined in any::<bool>(), steps in vec(step(), 1..40)) {
        let mut disk = Disk::new(joined);
        let mut model = vec![0; usize::try_from(SIZE).unwrap()];
        for step in steps {
            let (place, bytes) = match &step {
                Step::Write { sectors, fill, .. } => (sectors.start * SECTOR, content(sectors, *fill)),
                Step::Discard { sectors } => {
                    (sectors.start * SECTOR, vec![0; usize::try_from((sectors.end - sectors.start) * SECTOR).unwrap()])
                }
                _ => (0, Vec::new()),
            };
            model[usize::try_from(place).unwrap()..][..bytes.len()].copy_from_slice(&bytes);
            let told = format!("{step:?}");
            disk.apply(step);
            prop_assert!(disk.view() == model, "after {}", told);
        }
    }

    #[test]
    fn any_bytes_of_a_stack_can_be_read(
        steps in vec(step(), 1..20),
        ranges in vec((0..SIZE, 0..9000_u64), 1..20),
    ) {
        let mut disk = Disk::new(true);
        for step in steps {
            disk.apply(step);
        }
        disk.apply(Step::Seal);
        disk.apply(Step::Compress { layer: 0, algorithm: Algorithm::Lz4, block_size: 4096, checksums: true });
        let all = disk.view();
        let stack = disk.stack(0..disk.files.len()).unwrap();
        for (offset, length) in ranges {
            let mut found = vec![0xaa; usize::try_from(length.min(SIZE - offset)).unwrap()];
            stack.read_exact_at(&mut found, offset).unwrap();
            prop_assert_eq!(&found[..], &all[usize::try_from(offset).unwrap()..][..found.len()]);
        }
        prop_assert!(stack.read_exact_at(&mut [0; 2], SIZE - 1).is_err());
    }

    #[test]
    fn a_map_knows_of_each_sector_the_last_thing_said(
        joined in any::<bool>(),
        changes in vec((sectors(), 0..3_u8, 8..5000_u64), 1..60),
    ) {
        let mut map = Disk::map(joined);
        let mut model = vec![Place::Hole; usize::try_from(SECTORS).unwrap()];
        for (range, kind, moffset) in changes {
            let length = range.end - range.start;
            let mut displaced = Vec::new();
            match kind {
                0 => map.insert(Segment::data(range.start, length, moffset).unwrap(), |old| displaced.push(old)),
                1 => map.insert(Segment::zeroed(range.start, length, moffset).unwrap(), |old| displaced.push(old)),
                _ => map.remove(range.clone(), |old| displaced.push(old)),
            }
            for old in displaced.iter().filter(|old| !old.is_zeroed()) {
                for n in 0..old.length() {
                    let place = &mut model[usize::try_from(old.offset() + n).unwrap()];
                    prop_assert_eq!(*place, Place::Data { tag: 0, moffset: old.moffset() + n });
                    *place = Place::Hole;
                }
            }
            for sector in range.clone() {
                let place = &mut model[usize::try_from(sector).unwrap()];
                prop_assert!(!matches!(place, Place::Data { .. }), "sector {} went without a word", sector);
                *place = match kind {
                    0 => Place::Data { tag: 0, moffset: moffset + sector - range.start },
                    1 => Place::Zeroed,
                    _ => Place::Hole,
                };
            }
            prop_assert_eq!(&places(map.pieces(0..SECTORS)), &model);
            prop_assert!(Index::from_segments(map.segments()).is_ok());
        }
    }

    #[test]
    fn a_merge_shows_of_each_sector_the_newest_thing_said(
        layers in vec(vec((sectors(), any::<bool>(), 8..5000_u64), 0..12), 1..12),
        end in 1..SECTORS,
    ) {
        let mut model = vec![Place::Hole; usize::try_from(SECTORS).unwrap()];
        let mut indexes = Vec::new();
        for (n, mappings) in layers.iter().enumerate() {
            let tag = u8::try_from(layers.len() - 1 - n).unwrap();
            let mut map = Map::new();
            for (range, zeroed, moffset) in mappings {
                let make = if *zeroed { Segment::zeroed } else { Segment::data };
                map.insert(make(range.start, range.end - range.start, *moffset).unwrap(), |_| ());
            }
            for (place, new) in model.iter_mut().zip(places(map.pieces(0..SECTORS))) {
                match new {
                    Place::Hole => (),
                    Place::Zeroed => *place = Place::Zeroed,
                    Place::Data { moffset, .. } => *place = Place::Data { tag, moffset },
                }
            }
            indexes.push(Index::from_segments(map.segments()).unwrap());
        }
        model[usize::try_from(end).unwrap()..].fill(Place::Hole);
        let merged = merge(&indexes.iter().collect::<Vec<_>>(), end).unwrap();
        prop_assert_eq!(places(merged.pieces(0..SECTORS)), model);
        prop_assert!(Index::from_segments(merged.segments().iter().copied()).is_ok(), "sorted, none over another");
    }

    #[test]
    fn a_writer_writes_what_it_was_given(parts in vec((1..20_u64, 0..20_u64, any::<bool>(), any::<u8>()), 0..40)) {
        let mut writer = LayerWriter::new(Vec::new(), Identity::new(1 << 20)).unwrap();
        let mut model = vec![0; 1 << 20];
        let mut at = 0;
        for (length, gap, zeroed, fill) in parts {
            at += gap;
            if zeroed {
                writer.zeroed(at, length).unwrap();
            } else {
                let bytes = content(&(at..at + length), fill);
                writer.data(at, &bytes).unwrap();
                model[usize::try_from(at * SECTOR).unwrap()..][..bytes.len()].copy_from_slice(&bytes);
            }
            at += length;
            prop_assert!(writer.data(at - 1, &[0; 512]).is_err(), "not backwards");
        }
        let (file, written) = writer.finish().unwrap();
        prop_assert_eq!(written.file_bytes, file.len() as u64);
        verify(&file, Limits::default()).unwrap();
        let layer = Layer::open(file).unwrap();
        prop_assert_eq!(layer.index().len() as u64, written.mappings);
        let mut found = vec![0xaa; 1 << 20];
        layer.read_exact_at(&mut found, 0).unwrap();
        prop_assert!(found == model);
    }
}

/// One place for each sector.
fn places(pieces: impl Iterator<Item = layers::Piece>) -> Vec<Place> {
    let each = pieces.flat_map(|piece| {
        (0..piece.length).map(move |n| match piece.place {
            Place::Data { tag, moffset } => Place::Data { tag, moffset: moffset + n },
            other => other,
        })
    });
    each.collect()
}
