use std::fs::OpenOptions;

use super::*;

const SIZE: u64 = 4 << 20;

struct Bench {
    root: Arc<Root>,
    id: Id,
    upper: Upper,
    _directory: tempfile::TempDir,
}

fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let root = Arc::new(Root::open(directory.path()).unwrap());
    let id = Id::random().unwrap();
    let upper = Upper::create(&root, id, SIZE).unwrap();
    Bench { root, id, upper, _directory: directory }
}

impl Bench {
    fn reopened(&self) -> Result<Upper> {
        Upper::open(&self.root, self.id, SIZE)
    }

    fn index(&self) -> PathBuf {
        index_path(&self.root, self.id)
    }
}

fn one(range: std::ops::Range<u64>) -> [std::ops::Range<u64>; 1] {
    std::array::from_fn(|_| range.clone())
}

fn content(upper: &Upper, sector: u64, sectors: u64) -> Vec<u8> {
    let mut found = Vec::new();
    for piece in upper.pieces(sector..sector + sectors) {
        let mut part = vec![0; bytes(piece.length)];
        if let Place::Data { moffset, .. } = piece.place {
            upper.read(&mut part, moffset * SECTOR, Caching::Keep).unwrap();
        }
        found.append(&mut part);
    }
    found
}

#[test]
fn what_was_written_is_there_without_a_flush_when_it_is_opened_again() {
    let bench = bench();
    bench.upper.write(&[1; 4096], 8, false).unwrap();
    bench.upper.write(&[2; 1024], 9, false).unwrap();
    bench.upper.zero(&one(12..14)).unwrap();
    for upper in [&bench.upper, &bench.reopened().unwrap()] {
        let expected = [vec![1; 512], vec![2; 1024], vec![1; 512], vec![0; 1024], vec![1; 1024]].concat();
        assert_eq!(content(upper, 8, 8), expected);
    }
}

#[test]
fn another_boot_believes_what_was_flushed_and_nothing_later() {
    let bench = bench();
    bench.upper.write(&[1; 512], 0, false).unwrap();
    bench.upper.flush().unwrap();
    bench.upper.write(&[2; 512], 100, false).unwrap();
    for _ in 0..2 {
        trim_all(&bench.root).unwrap();
        let upper = bench.reopened().unwrap();
        assert_eq!(content(&upper, 0, 1), [1; 512]);
        assert_eq!(content(&upper, 100, 1), [0; 512]);
    }
    let upper = bench.reopened().unwrap();
    assert!(!upper.write(&[3; 512], 100, true).unwrap());
    upper.flush().unwrap();
    trim_all(&bench.root).unwrap();
    assert_eq!(content(&bench.reopened().unwrap(), 100, 1), [3; 512]);
}

#[test]
fn a_durable_write_is_durable_with_its_mapping_and_when_it_overwrites() {
    let bench = bench();
    assert!(!bench.upper.write(&[1; 4096], 0, true).unwrap());
    bench.upper.flush().unwrap();
    assert!(bench.upper.write(&[2; 512], 3, true).unwrap());
    trim_all(&bench.root).unwrap();
    let expected = [[1; 1536].as_slice(), &[2; 512], &[1; 2048]].concat();
    assert_eq!(content(&bench.reopened().unwrap(), 0, 8), expected);
}

#[test]
fn a_torn_last_entry_is_cut_and_a_wrong_one_is_corrupt() {
    let bench = bench();
    bench.upper.write(&[1; 512], 0, false).unwrap();
    let index = OpenOptions::new().read(true).write(true).open(bench.index()).unwrap();
    let end = index.metadata().unwrap().len();
    index.write_all_at(&[9; 7], end).unwrap();
    assert_eq!(content(&bench.reopened().unwrap(), 0, 1), [1; 512]);
    assert_eq!(index.metadata().unwrap().len(), end);
    for entry in [[0xff; 16], [0; 16], [9; 16]] {
        index.write_all_at(&entry, end).unwrap();
        assert_eq!(bench.reopened().err().map(|e| e.code), Some(Code::Corrupt), "{entry:?}");
    }
}

#[test]
fn files_that_hold_anything_are_an_error_and_never_a_panic() {
    let bench = bench();
    bench.upper.write(&vec![1; 65536], 0, false).unwrap();
    let good = fs::read(bench.index()).unwrap();
    for at in (0..300).chain(4096..good.len()) {
        for bit in [0, 3, 7] {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            fs::write(bench.index(), &bad).unwrap();
            let _ = bench.reopened();
        }
    }
    for length in [0, 1, 4095, 4096, 4100] {
        fs::write(bench.index(), &good[..length]).unwrap();
        let _ = bench.reopened();
        let _ = trim_all(&bench.root);
    }
    fs::remove_file(bench.index()).unwrap();
    assert_eq!(bench.reopened().err().map(|e| e.code), Some(Code::Corrupt));
}

#[test]
fn writing_the_same_place_for_ever_needs_no_more_room() {
    let bench = bench();
    let block = vec![5; 1 << 20];
    for round in 0..100_u64 {
        bench.upper.write(&block, 0, false).unwrap();
        bench.upper.zero(&one(0..2048)).unwrap();
        bench.upper.write(&block[..4096], round * 8, false).unwrap();
    }
    let data = bench.upper.data.metadata().unwrap();
    assert!(data.len() <= SIZE + BLOCK, "{} bytes long", data.len());
    assert!(bench.upper.allocated_bytes().unwrap() <= (2 << 20) + BLOCK);
}

#[test]
fn an_index_that_is_mostly_dead_is_written_anew_and_says_the_same() {
    let bench = bench();
    let block = [7; 512];
    for round in 0..20_000_u64 {
        bench.upper.write(&block, round % 50 * 10, false).unwrap();
        bench.upper.zero(&one(round % 50 * 10..round % 50 * 10 + 1)).unwrap();
    }
    bench.upper.write(&block, 3, false).unwrap();
    assert!(fs::metadata(bench.index()).unwrap().len() < 4096 + 5000 * 16);
    let reopened = bench.reopened().unwrap();
    assert_eq!(reopened.segments(), bench.upper.segments());
    assert_eq!(content(&reopened, 3, 1), block);
    assert_eq!(content(&reopened, 10, 1), [0; 512]);
}

#[test]
fn a_sealed_upper_is_a_layer_with_the_same_bytes() {
    let bench = bench();
    bench.upper.write(&[1; 8192], 16, false).unwrap();
    bench.upper.write(&[2; 512], 8000, false).unwrap();
    bench.upper.zero(&one(20..24)).unwrap();
    bench.upper.seal(SIZE).unwrap();
    bench.upper.flush().unwrap();
    let layer = layers::Layer::open(File::open(data_path(&bench.root, bench.id)).unwrap()).unwrap();
    let mut view = vec![9; bytes(SIZE / SECTOR)];
    layer.read_exact_at(&mut view, 0).unwrap();
    assert_eq!(view, content(&bench.upper, 0, SIZE / SECTOR));
    // A crash before it became a layer: it is still the upper it was, and can be sealed again.
    let again = bench.reopened().unwrap();
    again.write(&[3; 512], 4000, false).unwrap();
    again.seal(SIZE).unwrap();
    layers::Layer::open(File::open(data_path(&bench.root, bench.id)).unwrap()).unwrap();
    assert_eq!(content(&again, 4000, 1), [3; 512]);
}

#[test]
fn a_mark_covers_only_what_was_there_before_the_data_was_synced() {
    let bench = bench();
    bench.upper.write(&[1; 512], 0, false).unwrap();
    let covered = bench.upper.log().count();
    bench.upper.write(&[2; 512], 100, false).unwrap();
    let mark = bench.upper.log().mark(covered).unwrap();
    bench.upper.log().marked(&mark);
    assert!(!bench.upper.log().is_marked());
    trim_all(&bench.root).unwrap();
    let upper = bench.reopened().unwrap();
    assert_eq!(upper.segments().len(), 1);
}

#[test]
fn a_flush_that_failed_fails_for_ever_and_no_write_is_durable_then() {
    let bench = bench();
    bench.upper.write(&[1; 512], 0, false).unwrap();
    bench.upper.flush().unwrap();
    // As the kernel would have it after an error: told once, and fine from then on.
    bench.upper.flushes.failed.store(true, Ordering::Release);
    for _ in 0..2 {
        assert_eq!(bench.upper.flush().unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
        assert!(!bench.upper.write(&[2; 512], 0, true).unwrap());
    }
    bench.reopened().unwrap().flush().unwrap();
}

#[test]
fn an_index_is_written_anew_under_writes_and_flushes_and_forgets_none() {
    let bench = bench();
    let upper = &bench.upper;
    let left = &AtomicU64::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while left.load(Ordering::Acquire) > 0 {
                upper.flush().unwrap();
            }
        });
        for part in 0..2_u64 {
            scope.spawn(move || {
                for round in 0..15_000_u64 {
                    let at = part * 4096 + round % 50 * 10;
                    upper.write(&[u8::try_from(round % 251).unwrap(); 512], at, false).unwrap();
                    upper.zero(&one(at..at + 1)).unwrap();
                }
                upper.write(&[9; 512], part * 4096 + 5, false).unwrap();
                left.fetch_sub(1, Ordering::AcqRel);
            });
        }
    });
    upper.flush().unwrap();
    assert!(upper.log().generation() > 0, "it was never written anew");
    trim_all(&bench.root).unwrap();
    assert_eq!(bench.reopened().unwrap().segments(), upper.segments());
    assert!(fs::read_dir(bench.root.path().join("temporary")).unwrap().next().is_none());
}
