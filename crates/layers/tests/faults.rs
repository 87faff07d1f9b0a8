//! Sinks and sources that fail: an error at every step, and nothing that looks complete after it.

#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod upper;

use std::io::{self, Write};

use layers::{
    Algorithm, Corruption, Error, Identity, Invalid, Kind, Layer, LayerWriter, Limits, Map, MappingFault, ReadAt,
    SECTOR, Segment, Stack, ZFile, ZFileOptions, ZFileWriter, log, seal, verify,
};
use upper::Upper;

/// Room for so many bytes.
#[derive(Debug)]
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    });
    next.take(length).collect()
}

fn layer() -> Vec<u8> {
    let mut writer = LayerWriter::new(Vec::new(), Identity::new(1 << 20)).unwrap();
    writer.data(0, &noise(8192)).unwrap();
    writer.zeroed(32, 8).unwrap();
    writer.data(64, &noise(4096)).unwrap();
    writer.finish().unwrap().0
}

fn zfile(checksums: bool) -> Vec<u8> {
    let options = ZFileOptions { checksums, ..ZFileOptions::new(Algorithm::Lz4) };
    let mut writer = ZFileWriter::new(Vec::new(), options).unwrap();
    writer.write_all(&layer()).unwrap();
    writer.finish().unwrap().0
}

#[test]
fn a_full_disk_ends_a_layer_at_any_byte() {
    for room in (0..layer().len()).step_by(509) {
        let written = LayerWriter::new(Full(room), Identity::new(1 << 20)).and_then(|mut writer| {
            let failed = writer.data(0, &noise(8192));
            if failed.is_err() {
                let again = writer.data(16, &noise(512)).unwrap_err();
                assert!(matches!(again, Error::Invalid(Invalid::Poisoned)), "{again}");
                return writer.finish().map(|_| ());
            }
            writer.zeroed(32, 8)?;
            writer.data(64, &noise(4096))?;
            writer.finish().map(|_| ())
        });
        assert!(written.is_err(), "{room} bytes of room");
    }
}

#[test]
fn a_full_disk_ends_a_zfile_at_any_byte() {
    let content = noise(2 << 20);
    let options = ZFileOptions::new(Algorithm::Zstd);
    for room in (0..2 << 20).step_by(100_003) {
        let written = ZFileWriter::new(Full(room), options).and_then(|mut writer| {
            if writer.write_all(&content).is_err() {
                assert!(writer.write_all(&content[..1]).is_err(), "no second try");
            }
            writer.finish().map(|_| ())
        });
        assert!(written.is_err(), "{room} bytes of room");
    }
}

#[test]
fn an_upper_that_could_not_be_sealed_is_still_the_upper() {
    let mut upper = Upper::new(Identity::new(1 << 20), Map::new());
    upper.write(0, &noise(4096));
    let before = upper.view::<Vec<u8>>(None);
    for room in [0, 16, 600, 4096, 5000] {
        assert!(seal(Full(room), &upper.identity, &upper.map, upper.data.len() as u64).is_err());
    }
    assert_eq!(upper.view::<Vec<u8>>(None), before);
    assert!(Layer::open(upper.sealed()).is_ok());
}

/// A source in which one byte range cannot be read.
struct Broken {
    bytes: Vec<u8>,
    bad: std::ops::Range<u64>,
}

impl ReadAt for Broken {
    fn size(&self) -> io::Result<u64> {
        self.bytes.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if offset < self.bad.end && offset + buf.len() as u64 > self.bad.start {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.bytes.read_exact_at(buf, offset)
    }
}

#[test]
fn an_error_of_the_source_is_that_error_and_never_zeros() {
    for bytes in [layer(), zfile(true)] {
        let size = bytes.len() as u64;
        for at in (0..size).step_by(97) {
            let error = verify(Broken { bytes: bytes.clone(), bad: at..at + 1 }, Limits::default());
            // The end of a zfile that is not the last block, and so on: all of it is looked at.
            assert_eq!(error.map(|_| ()).unwrap_err().kind(), Kind::Io, "byte {at}");
        }
    }
    let stack = Stack::new(vec![Layer::open(Broken { bytes: layer(), bad: 4096..4097 }).unwrap()]).unwrap();
    let mut buf = [0xaa; 1024];
    assert_eq!(stack.read_exact_at(&mut buf, 0).unwrap_err().raw_os_error(), Some(5));
    stack.read_exact_at(&mut buf, 1024).unwrap();
    assert_eq!(buf[..], noise(2048)[1024..]);
}

#[test]
fn a_truncated_file_is_corrupt_at_any_length() {
    for whole in [layer(), zfile(true), zfile(false)] {
        for length in (0..whole.len()).step_by(61).chain([whole.len() - 1]) {
            let error = verify(whole[..length].to_vec(), Limits::default()).map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupt, "{length} bytes: {error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_reads_as_an_error() {
    let file = layer();
    let index = Layer::open(file.as_slice()).unwrap();
    let short = Layer::open(Shrunk { opened: file.clone(), now: 5000 }).unwrap();
    assert_eq!(short.index(), index.index());
    let error = short.read_exact_at(&mut [0; 8192], 0).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

/// All there while its ends and index are read; data beyond *now* is gone.
struct Shrunk {
    opened: Vec<u8>,
    now: u64,
}

impl ReadAt for Shrunk {
    fn size(&self) -> io::Result<u64> {
        self.opened.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let data = 4096..16384;
        if data.contains(&offset) && offset + buf.len() as u64 > self.now {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.opened.read_exact_at(buf, offset)
    }
}

#[test]
fn every_flipped_bit_of_a_compressed_layer_is_found() {
    let good = zfile(true);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(verify(bad, Limits::default()).is_err(), "byte {at} of {}", good.len());
    }
}

#[test]
fn corruption_through_a_zfile_keeps_its_name() {
    let mut bad = zfile(true);
    bad[600] ^= 1;
    let zfile = ZFile::open(bad).unwrap();
    let through = Layer::open(zfile).map(|_| ()).unwrap_err();
    assert!(matches!(through, Error::Corrupt(Corruption::Block { block: 0, offset: 512, .. })), "{through}");
}

#[test]
fn the_end_of_a_log_is_left_out_and_said() {
    let mut upper = Upper::new(Identity::new(1 << 20), Map::new());
    upper.write(0, &noise(512));
    upper.write(512, &noise(512));
    let good = upper.log.len();
    let segment = |offset, moffset| Segment::data(offset, 1, moffset).unwrap().encode();
    let cases: [(&str, Vec<u8>, Option<MappingFault>, u64); 5] = [
        ("torn", segment(4, 8)[..11].to_vec(), None, 0),
        ("zeros", vec![0; 40], Some(MappingFault::Empty), 0),
        ("data that was not written", segment(4, 10).to_vec(), Some(MappingFault::OutsideData), 0),
        ("beyond the disk", segment(1 << 20, 8).to_vec(), Some(MappingFault::BeyondVirtualSize), 0),
        ("a hole in it", [[0; 16], segment(4, 8)].concat(), Some(MappingFault::Empty), 1),
    ];
    for (name, end, fault, plausible) in cases {
        upper.log.truncate(good);
        upper.log.extend_from_slice(&end);
        let replay = upper.replayed(Map::new());
        assert_eq!((replay.entries, replay.log_end()), (2, good as u64), "{name}");
        assert_eq!(replay.dropped, Some(log::Dropped { bytes: end.len() as u64, fault, plausible }), "{name}");
        assert_eq!(replay.map, upper.map, "{name}");
    }
}

#[test]
fn limits_hold_before_memory_is_taken() {
    let mut upper = Upper::new(Identity::new(1 << 20), Map::unjoined());
    for n in 0..100 {
        upper.write(n * SECTOR, &[1; 512]);
    }
    let few = Limits { mappings: 99, blocks: 3 };
    let error = log::replay(&upper.log, upper.data.len() as u64, Map::new(), few).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    let error = Layer::open_within(upper.sealed(), few).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    assert_eq!(ZFile::open_within(zfile(true), few).map(|_| ()).unwrap_err().kind(), Kind::Exhausted);
}

#[test]
fn what_cannot_be_written_down_is_refused() {
    assert!(LayerWriter::new(Vec::new(), Identity::new(0)).is_err());
    let mut identity = Identity::new(4096);
    identity.user_tag = vec![1; 257];
    assert!(LayerWriter::new(Vec::new(), identity).is_err());
    let mut writer = LayerWriter::new(Vec::new(), Identity::new(4096)).unwrap();
    assert!(writer.data(0, &[0; 100]).is_err());
    assert!(writer.data(7, &[0; 1024]).is_err());
    assert!(writer.zeroed(u64::MAX, 2).is_err());
    writer.data(7, &[0; 512]).unwrap();
    assert!(writer.finish().is_ok());
    for block_size in [0, 100, 4097, 2 << 20] {
        let options = ZFileOptions { block_size, ..ZFileOptions::new(Algorithm::Lz4) };
        assert!(ZFileWriter::new(Vec::new(), options).is_err());
    }
}
