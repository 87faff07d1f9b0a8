//! One function for each parser: takes any bytes at all, and must come back. `tests/hostile.rs`
//! runs them over known files and changes of these; `fuzz/` lets a fuzzer choose the bytes.

use layers::{
    BLOCK, Format, Header, Identity, Layer, Limits, Map, Place, ReadAt, SECTOR, Segment, Stack, ZFile, log, verify,
};

/// Little, so that a file which makes us keep more is found soon.
const LIMITS: Limits = Limits { mappings: 1 << 16, blocks: 1 << 16 };

/// A header or trailer that is read is written as it was, apart from what is not understood.
pub(crate) fn header(bytes: &[u8]) {
    let mut block = [0; 4096];
    let length = bytes.len().min(block.len());
    block[..length].copy_from_slice(&bytes[..length]);
    if let Ok(header) = Header::decode(&block) {
        let again = header.encode().expect("what was read can be written");
        assert_eq!(Header::decode(&again).expect("what was written can be read"), header);
    }
}

/// A whole file.
pub(crate) fn layer(bytes: &[u8]) {
    let _ = Format::of(bytes);
    let _ = verify(bytes, LIMITS);
    if let Ok(layer) = Layer::open_within(bytes, LIMITS) {
        look_at(&layer, bytes.len());
        if let Ok(stack) = Stack::new(vec![layer.clone(), layer]) {
            read_some(&stack, stack.virtual_size());
        }
    }
}

/// An index, in a file that is right in all else.
pub(crate) fn index(bytes: &[u8]) {
    let (data_sectors, virtual_sectors) = (64, 1 << 20);
    let identity = Identity::new(virtual_sectors * SECTOR);
    let index_offset = BLOCK + data_sectors * SECTOR;
    let count = (bytes.len() / Segment::SIZE) as u64;
    let mut file = Header::of_layer(identity.clone()).encode().expect("an identity").to_vec();
    file.resize(usize::try_from(index_offset).expect("small"), 7);
    file.extend_from_slice(bytes);
    file.extend_from_slice(&Header::trailer(identity, index_offset, count).encode().expect("an identity"));
    if let Ok(layer) = Layer::open_within(file.as_slice(), LIMITS) {
        look_at(&layer, file.len());
    }
}

/// The log of an upper: whatever is behind its header, the start that makes sense is used.
pub(crate) fn log(bytes: &[u8]) {
    let _ = log::replay(bytes, bytes.len() as u64, Map::new(), LIMITS);
    let data_bytes = 64 * SECTOR;
    let mut file = Header::of_log(Identity::new(1 << 29)).encode().expect("an identity").to_vec();
    file.extend_from_slice(bytes);
    if let Ok(replay) = log::replay(&file, data_bytes, Map::new(), LIMITS) {
        let dropped = replay.dropped.map_or(0, |dropped| dropped.bytes);
        assert_eq!(replay.log_end() + dropped, file.len() as u64, "used or said to be dropped");
        for segment in replay.map.segments().filter(|segment| !segment.is_zeroed()) {
            assert!((segment.moffset() + segment.length()) * SECTOR <= data_bytes, "{segment:?}");
        }
    }
}

/// A zfile, as it is, and with right digests so that the rest is reached.
pub(crate) fn zfile(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), with_digests(bytes.to_vec())] {
        let _ = verify(&bytes, LIMITS);
        if let Ok(zfile) = ZFile::open_within(bytes.as_slice(), LIMITS) {
            read_some(&zfile, zfile.original_size());
            let range = zfile.compressed_range(0..zfile.original_size());
            assert!(range.end <= bytes.len() as u64);
            let _ = Layer::open_within(zfile, LIMITS);
        }
    }
}

/// What an index that was accepted promises.
fn look_at(layer: &Layer<&[u8]>, file_bytes: usize) {
    assert!(layer.index().memory_bytes() <= 4 * file_bytes, "memory follows the file, not its claims");
    let mut end = 0;
    for segment in layer.index().segments() {
        assert!(segment.offset() >= end && segment.length() > 0, "{segment:?} after {end}");
        end = segment.end();
        let mut sector = [0; 512];
        layer.read_exact_at(&mut sector, (end - 1) * SECTOR).expect("what is mapped can be read");
        let piece = layer.index().pieces(end - 1..end).next().expect("a piece");
        assert_ne!(piece.place, Place::Hole);
    }
    read_some(layer, layer.identity().virtual_size);
}

fn read_some(source: &impl ReadAt, size: u64) {
    let mut buf = vec![0; 5000];
    for offset in [0, 1, 511, 4096, size / 2, size.saturating_sub(5000), size, u64::MAX - 10] {
        let _ = source.read_exact_at(&mut buf, offset);
    }
}

/// The same file, whose header, trailer and index match their digests.
fn with_digests(mut bytes: Vec<u8>) -> Vec<u8> {
    const END: usize = 512;
    let digest = |bytes: &[u8]| !crc32c::crc32c_append(u32::MAX, bytes);
    if bytes.len() < 2 * END {
        return bytes;
    }
    let end = bytes.len() - END;
    let word = |at: usize| {
        let found = bytes[end + at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        found.and_then(|word| usize::try_from(word).ok()).unwrap_or(usize::MAX)
    };
    let index = word(40)..word(40).saturating_add(word(48).saturating_mul(4));
    if let Some(index) = bytes.get(index).map(digest) {
        bytes[end + 64..end + 68].copy_from_slice(&index.to_le_bytes());
    }
    for block in [0..END, end..end + END] {
        bytes[block.start + 28..block.start + 32].fill(0);
        let own = digest(&bytes[block.clone()]);
        bytes[block.start + 28..block.start + 32].copy_from_slice(&own.to_le_bytes());
    }
    bytes
}
