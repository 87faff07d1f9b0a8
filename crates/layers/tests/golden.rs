//! The files of `spec/layers`, written by another implementation: read, and written again.

#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

use std::fs;
use std::path::PathBuf;

mod upper;

use layers::{
    Algorithm, Identity, Index, Layer, Limits, Map, Place, ReadAt, SECTOR, Segment, Stack, Uuid, ZFile, ZFileOptions,
    ZFileWriter, Zeroed, compact, compact_layer, log, merge, verify,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use upper::Upper;

const VIRTUAL_SIZE: u64 = 8 << 20;

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../spec/layers").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[derive(Deserialize)]
struct Plan {
    layers: Vec<PlannedLayer>,
    sha256: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct PlannedLayer {
    layer: u8,
    /// number, offset, length in bytes
    writes: Vec<(u64, u64, usize)>,
    discards: Vec<(u64, u64)>,
    then_writes: Vec<(u64, u64, usize)>,
}

fn plan() -> Plan {
    serde_json::from_slice(&golden("plan.json")).unwrap()
}

fn content(write: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| (write * 131 + i * 7 + (i >> 9) * 13).to_le_bytes()[0]).collect()
}

fn identity(layer: u8) -> Identity {
    let name = |n: u8| format!("{n:08}-0000-4000-8000-{n:012}").parse::<Uuid>().unwrap();
    let parent = (layer > 1 && layer < 9).then(|| name(layer - 1));
    Identity::new(VIRTUAL_SIZE).named(name(layer), parent)
}

/// The upper that the plan's writer had.
fn upper_of(planned: &PlannedLayer) -> Upper {
    let mut upper = Upper::new(identity(planned.layer), Map::unjoined());
    for (write, offset, length) in &planned.writes {
        upper.write(*offset, &content(*write, *length));
    }
    for (offset, length) in &planned.discards {
        upper.discard(*offset, *length);
    }
    for (write, offset, length) in &planned.then_writes {
        upper.write(*offset, &content(*write, *length));
    }
    upper
}

fn open(name: &str) -> Layer<Vec<u8>> {
    Layer::open(golden(name)).unwrap()
}

fn stack_of(names: &[&str]) -> Stack<Vec<u8>> {
    Stack::new(names.iter().map(|name| open(name)).collect()).unwrap()
}

fn view(source: &impl ReadAt) -> Vec<u8> {
    let mut all = vec![0xaa; usize::try_from(source.size().unwrap()).unwrap()];
    source.read_exact_at(&mut all, 0).unwrap();
    all
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Compares without printing megabytes.
fn assert_same(name: &str, found: &[u8], wanted: &[u8]) {
    let first = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    assert_eq!(first, None, "{name}: first difference");
    assert_eq!(found.len(), wanted.len(), "{name}: length");
}

#[test]
fn the_layers_are_read_and_show_what_was_planned() {
    let sums = plan().sha256;
    for kind in ["", ".commit"] {
        let names: Vec<_> = (1..=3).map(|n| format!("layer{n}{kind}.lsmt")).collect();
        for depth in 1..=3 {
            let stack = stack_of(&names[..depth].iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(sha256(&view(&stack)), sums[&format!("stack{depth}")], "{depth} of {kind}");
        }
    }
    assert_eq!(sha256(&view(&open("merged.lsmt"))), sums["stack3"]);
}

/// offset, length, moffset, zeroed, and in a stack the tag
#[derive(Deserialize, Debug, PartialEq, Eq)]
#[serde(untagged)]
enum Mapping {
    InFile(u64, u64, u64, bool),
    InStack(u64, u64, u64, bool, u8),
}

#[test]
fn their_indexes_are_those_that_were_listed() {
    let listed: std::collections::BTreeMap<String, Vec<Mapping>> =
        serde_json::from_slice(&golden("mappings.json")).unwrap();
    for (name, mappings) in listed {
        let segments: Vec<Segment> = mappings
            .iter()
            .map(|mapping| {
                let (Mapping::InFile(offset, length, moffset, zeroed)
                | Mapping::InStack(offset, length, moffset, zeroed, _)) = *mapping;
                let tag = if let Mapping::InStack(.., tag) = mapping { *tag } else { 0 };
                let make = if zeroed { Segment::zeroed } else { Segment::data };
                make(offset, length, moffset).unwrap().with_tag(tag)
            })
            .collect();
        if let Some(depth) = name.strip_prefix("stack") {
            let depth: usize = depth.parse().unwrap();
            let names = ["layer1.lsmt", "layer2.lsmt", "layer3.lsmt"];
            let stack = stack_of(&names[..depth]);
            // Ours joins what goes on, which the list does not: compare what each sector is.
            let places = |segments: &[Segment]| -> Vec<(u64, u8, Option<u64>)> {
                let sectors = segments.iter().flat_map(|segment| {
                    (0..segment.length()).map(|n| {
                        let moffset = (!segment.is_zeroed()).then(|| segment.moffset() + n);
                        (segment.offset() + n, segment.tag(), moffset)
                    })
                });
                sectors.collect()
            };
            assert_eq!(places(stack.index().segments()), places(&segments), "{name}");
        } else {
            assert_eq!(open(&name).index().segments(), segments, "{name}");
        }
    }
}

#[test]
fn the_sealed_layers_are_written_again_byte_for_byte() {
    for planned in &plan().layers {
        let name = format!("layer{}.lsmt", planned.layer);
        assert_same(&name, &upper_of(planned).sealed(), &golden(&name));
    }
}

#[test]
fn the_commits_are_written_again_byte_for_byte() {
    for layer in 1..=3 {
        let name = format!("layer{layer}.commit.lsmt");
        let sealed = open(&format!("layer{layer}.lsmt"));
        let (found, written) = compact_layer(&sealed, identity(layer), Zeroed::Keep, Vec::new()).unwrap();
        assert_same(&name, &found, &golden(&name));
        assert_eq!(written.file_bytes, found.len() as u64);
    }
}

#[test]
fn the_merged_layer_is_written_again_byte_for_byte() {
    let stack = stack_of(&["layer1.lsmt", "layer2.lsmt", "layer3.lsmt"]);
    let (found, _) = compact(&stack, identity(9), Zeroed::Keep, Vec::new()).unwrap();
    assert_same("merged.lsmt", &found, &golden("merged.lsmt"));
}

#[test]
fn the_unsealed_upper_is_written_again_and_reopened() {
    let upper = upper_of(&plan().layers[2]);
    assert_same("data", &upper.data, &golden("upper3.unsealed.lsmt"));
    assert_same("log", &upper.log, &golden("upper3.unsealed.index"));

    let data = golden("upper3.unsealed.lsmt");
    let replay =
        log::replay(&golden("upper3.unsealed.index"), data.len() as u64, Map::unjoined(), Limits::default()).unwrap();
    assert_eq!(replay.identity, identity(3));
    assert_eq!(replay.map, upper.map);
    assert_eq!(replay.data_end * SECTOR, data.len() as u64);
    assert_eq!((replay.entries, replay.dropped), (3, None));
}

#[test]
fn the_zfiles_expand_to_the_layer_and_verify() {
    let layer = golden("layer1.lsmt");
    for name in ["layer1.lz4.zfile", "layer1.zstd.zfile", "layer1.lz4.nocrc.zfile"] {
        let zfile = ZFile::open(golden(name)).unwrap();
        assert_same(name, &view(&zfile), &layer);
        assert!(verify(golden(name), Limits::default()).unwrap().compressed);
        let on_top = Layer::open(zfile).unwrap();
        assert_eq!(sha256(&view(&on_top)), plan().sha256["stack1"], "{name}");
    }
}

#[test]
fn the_zfiles_are_written_again_byte_for_byte() {
    let kinds = [
        ("layer1.lz4.zfile", Algorithm::Lz4, 4096, true),
        ("layer1.zstd.zfile", Algorithm::Zstd, 65536, true),
        ("layer1.lz4.nocrc.zfile", Algorithm::Lz4, 8192, false),
    ];
    for (name, algorithm, block_size, checksums) in kinds {
        let mut writer = ZFileWriter::new(Vec::new(), ZFileOptions { algorithm, block_size, checksums }).unwrap();
        for part in golden("layer1.lsmt").chunks(1000) {
            std::io::Write::write_all(&mut writer, part).unwrap();
        }
        let (found, bytes) = writer.finish().unwrap();
        assert_eq!(bytes, found.len() as u64);
        assert_same(name, &found, &golden(name));
    }
}

#[test]
fn all_of_them_verify() {
    let unused = [("layer1", 1536), ("layer2", 0), ("layer3", 8192)];
    let compacted = ["layer1.commit", "layer2.commit", "layer3.commit", "merged"].map(|name| (name, 0));
    for (name, bytes) in unused.into_iter().chain(compacted) {
        let report = verify(golden(&format!("{name}.lsmt")), Limits::default()).unwrap();
        assert_eq!(report.unused_bytes, bytes, "{name}: {report:?}");
    }
}

#[test]
fn an_upper_is_not_taken_for_a_layer() {
    assert!(Layer::open(golden("upper3.unsealed.lsmt")).is_err());
    assert!(Layer::open(golden("upper3.unsealed.index")).is_err());
}

#[test]
fn merging_shows_holes_only_where_no_layer_says_anything() {
    let layers: Vec<_> = ["layer1.lsmt", "layer2.lsmt"].iter().map(|name| open(name)).collect();
    let index = merge(&layers.iter().map(Layer::index).collect::<Vec<&Index>>(), VIRTUAL_SIZE / SECTOR).unwrap();
    let kinds: Vec<_> = index.pieces(0..40).map(|piece| (piece.offset, piece.place == Place::Hole)).collect();
    assert_eq!(kinds.iter().filter(|(_, hole)| *hole).map(|(at, _)| *at).collect::<Vec<_>>(), [32]);
}
