//! How fast an index is loaded, searched and merged, and what it takes in memory.
//!
//! `cargo run --release -p layers --example figures`: one JSON object on a line.

use std::fs;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use layers::{Identity, Index, Layer, Map, ReadAt, Result, SECTOR, Segment, ZFile, ZFileOptions, ZFileWriter, merge};

const MAPPINGS: u64 = 1 << 20;
/// A page in each of the 32 KiB of 32 GiB.
const APART: u64 = 64;
const VIRTUAL_SECTORS: u64 = MAPPINGS * APART;

/// A source that only knows its index: data of this much would be nothing but slow to make.
struct IndexOnly {
    head: Vec<u8>,
    index_offset: u64,
    tail: Vec<u8>,
}

impl ReadAt for IndexOnly {
    fn size(&self) -> std::io::Result<u64> {
        Ok(self.index_offset + self.tail.len() as u64)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        match offset.checked_sub(self.index_offset) {
            Some(offset) => self.tail.read_exact_at(buf, offset),
            None => self.head.read_exact_at(buf, offset),
        }
    }
}

fn layer_of_pages(shift: u64) -> Result<IndexOnly> {
    let identity = Identity::new(VIRTUAL_SECTORS * SECTOR);
    let head = layers::Header::of_layer(identity.clone()).encode()?.to_vec();
    let index_offset = (8 + MAPPINGS * 8) * SECTOR;
    let mut tail = Vec::new();
    for page in 0..MAPPINGS {
        tail.extend_from_slice(&Segment::data(page * APART + shift, 8, 8 + page * 8)?.encode());
    }
    tail.extend_from_slice(&layers::Header::trailer(identity, index_offset, MAPPINGS).encode()?);
    Ok(IndexOnly { head, index_offset, tail })
}

fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or_default() * 4096
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX)) / 1024.0
}

fn lookups_per_s(mut one: impl FnMut(u64)) -> f64 {
    const COUNT: u32 = 2_000_000;
    let mut random = Random(7);
    f64::from(COUNT) / seconds(|| (0..COUNT).for_each(|_| one(random.next() % VIRTUAL_SECTORS)))
}

fn main() -> Result<()> {
    let file = layer_of_pages(0)?;
    let before = resident_bytes();
    let start = Instant::now();
    let layer = Layer::open(file)?;
    let load_s = start.elapsed().as_secs_f64();
    let resident = resident_bytes().saturating_sub(before);
    let index = layer.index();
    let index_lookups = lookups_per_s(|sector| {
        black_box(index.pieces(sector..sector + 8).next());
    });

    let mut map = Map::new();
    let before = resident_bytes();
    let mut random = Random(3);
    let fill_s = seconds(|| {
        for write in 0..MAPPINGS {
            let offset = random.next() % MAPPINGS * APART;
            let segment = Segment::data(offset, 8, 8 + write * 8);
            map.insert(segment.unwrap_or(Segment::PADDING), |old| {
                black_box(old);
            });
        }
    });
    let map_resident = resident_bytes().saturating_sub(before);
    let map_lookups = lookups_per_s(|sector| {
        black_box(map.pieces(sector..sector + 8).next());
    });

    // 16 layers of 64 Ki mappings each, none of which lies where another does.
    let parts: Vec<Index> = (0..16)
        .map(|layer| {
            let pages = (0..MAPPINGS / 16).map(|page| Segment::data((page * 16 + layer) * APART, 8, 8 + page * 8));
            Index::from_segments(pages.collect::<Result<Vec<_>>>()?)
        })
        .collect::<Result<_>>()?;
    let start = Instant::now();
    let merged = merge(&parts.iter().collect::<Vec<_>>(), VIRTUAL_SECTORS)?;
    let merge_s = start.elapsed().as_secs_f64();
    let merged_lookups = lookups_per_s(|sector| {
        black_box(merged.pieces(sector..sector + 8).next());
    });

    let content: Vec<u8> = (0..64_u64 << 20).map(|n| ((n / 3) ^ (n >> 9)).to_le_bytes()[0]).collect();
    let mut zfiles = Vec::new();
    for (name, algorithm) in [("lz4", layers::Algorithm::Lz4), ("zstd", layers::Algorithm::Zstd)] {
        let mut writer = ZFileWriter::new(Vec::new(), ZFileOptions::new(algorithm))?;
        let compress_s = seconds(|| drop(writer.write_all(&content)));
        let zfile = ZFile::open(writer.finish()?.0)?;
        let mut buf = vec![0; 1 << 20];
        let expand_s = seconds(|| (0..64_u64).for_each(|n| drop(zfile.read_exact_at(&mut buf, n << 20))));
        let mut page = vec![0; 4096];
        let random_s =
            seconds(|| (0..20_000).for_each(|_| drop(zfile.read_exact_at(&mut page, random.next() % 16384 * 4096))));
        let (compress, expand, pages) = (64.0 / compress_s, 64.0 / expand_s, 20_000.0 / random_s);
        zfiles.push(format!(
            "\"{name}_compress_mib_s\": {compress:.0}, \"{name}_expand_mib_s\": {expand:.0}, \"{name}_pages_s\": {pages:.0}"
        ));
    }

    println!(
        "{{\"mappings\": {}, \"index_load_s\": {load_s:.4}, \"index_mib\": {:.1}, \"index_resident_mib\": {:.1}, \
         \"index_lookups_s\": {index_lookups:.0}, \"map_fill_s\": {fill_s:.3}, \"map_mappings\": {}, \
         \"map_resident_mib\": {:.1}, \"map_lookups_s\": {map_lookups:.0}, \"merge_16_s\": {merge_s:.4}, \
         \"merged_mappings\": {}, \"merged_lookups_s\": {merged_lookups:.0}, {}}}",
        index.len(),
        mib(index.memory_bytes() as u64),
        mib(resident),
        map.len(),
        mib(map_resident),
        merged.len(),
        zfiles.join(", "),
    );
    Ok(())
}
