use std::fs;

use proptest::prelude::*;

use super::*;
use crate::library::Library;
use crate::names::{Format, LayerName};
use crate::root::Root;
use crate::stack::Stacks;

const SIZE: u64 = 1 << 20;

struct Bench {
    parts: Arc<Parts>,
    disk: Disk,
    _directory: tempfile::TempDir,
}

pub(super) fn parts(path: &std::path::Path) -> Arc<Parts> {
    let root = Arc::new(Root::open(path).unwrap());
    let library = Library::new(&root, 3, crate::remote::Options::default()).unwrap();
    Arc::new(Parts { stacks: Stacks::new(&library), root, library })
}

pub(super) fn owner() -> Owner {
    Owner::parse("box").unwrap()
}

fn key() -> Key {
    Key::Disk(owner())
}

fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let parts = parts(directory.path());
    let stack = Stack { layers: Vec::new(), size_bytes: SIZE };
    let disk = Disk::create(&parts, owner(), stack).unwrap();
    Bench { parts, disk, _directory: directory }
}

impl Bench {
    /// What a new daemon makes of what this one left.
    fn reopen(&mut self) {
        self.disk = of_record(&self.parts);
    }

    fn whole(&self) -> Vec<u8> {
        let mut buf = vec![0xee; usize::try_from(self.disk.size_bytes()).unwrap()];
        self.disk.read(&mut buf, 0).unwrap();
        buf
    }

    fn record(&self) -> DiskRecord {
        record::read(&self.parts.root, &key()).unwrap()
    }
}

pub(super) fn of_record(parts: &Arc<Parts>) -> Disk {
    let record: DiskRecord = record::read(&parts.root, &key()).unwrap();
    let device = DeviceId(std::num::NonZeroU64::new(record.device).unwrap());
    Disk::of_record(parts, owner(), device, record)
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64, u8),
    Discard(u64, u64),
    Seal,
    Reopen,
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = prop_oneof![
        (0..SIZE / 512, 0..200_u64).prop_map(|(at, length)| (at * 512, length * 512)),
        (0..SIZE, 0..3000_u64),
        (0..32_u64, 0..8_u64).prop_map(|(at, length)| (at * 4096, length * 4096)),
    ];
    let step = prop_oneof![
        6 => (place.clone(), 1..255_u8).prop_map(|((at, length), value)| Step::Write(at, length, value)),
        3 => place.prop_map(|(at, length)| Step::Discard(at, length)),
        1 => Just(Step::Seal),
        1 => Just(Step::Reopen),
        1 => Just(Step::Flush),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_is_an_array_of_bytes(steps in steps()) {
        let mut bench = bench();
        let mut model = vec![0; usize::try_from(SIZE).unwrap()];
        for step in steps {
            match step {
                Step::Write(at, length, value) => {
                    let length = length.min(SIZE - at);
                    let range = usize::try_from(at).unwrap()..usize::try_from(at + length).unwrap();
                    for (place, byte) in model[range.clone()].iter_mut().enumerate() {
                        *byte = value ^ u8::try_from(place / 512 % 7).unwrap();
                    }
                    bench.disk.write(&model[range], at, value % 16 == 0).unwrap();
                }
                Step::Discard(at, length) => {
                    let length = length.min(SIZE - at);
                    model[usize::try_from(at).unwrap()..usize::try_from(at + length).unwrap()].fill(0);
                    bench.disk.discard(at, length).unwrap();
                }
                Step::Seal => {
                    let before = bench.disk.device();
                    let (stack, _) = bench.disk.seal().unwrap();
                    prop_assert_eq!(stack, bench.disk.stack());
                    prop_assert_eq!(before, bench.disk.device());
                }
                Step::Reopen => bench.reopen(),
                Step::Flush => bench.disk.flush().unwrap(),
            }
            prop_assert!(bench.whole() == model);
        }
        let mut now = vec![0xee; model.len()];
        if bench.disk.read_now(&mut now, 0).unwrap() == Answer::Done {
            prop_assert!(now == model);
        }
        let (stack, held) = bench.disk.seal().unwrap();
        let view = bench.parts.stacks.open(&stack).unwrap();
        view.read(&mut now, 0).unwrap();
        prop_assert!(now == model);
        drop(held);
    }
}

#[test]
fn an_upper_with_nothing_in_it_adds_no_layer() {
    let bench = bench();
    assert!(bench.disk.seal().unwrap().0.layers.is_empty());
    bench.disk.write(&[1; 512], 0, false).unwrap();
    assert_eq!(bench.disk.seal().unwrap().0.layers.len(), 1);
    assert_eq!(bench.disk.seal().unwrap().0.layers.len(), 1);
}

#[test]
fn a_seal_that_was_cut_short_anywhere_loses_nothing() {
    for cut in 0..5 {
        let mut bench = bench();
        bench.disk.write(&[1; 4096], 0, false).unwrap();
        let old = bench.record();
        let (root, layers) = (bench.parts.root.clone(), bench.parts.root.layers());
        let next = Id::random().unwrap();
        let intent = DiskRecord { next: Some(next), ..old.clone() };
        match cut {
            // The record says so, and nothing else has happened: not even the upper is there.
            0 => (),
            1 => drop(Upper::create(&root, next, SIZE).unwrap()),
            // The index was written, and the guest has gone on.
            2..=4 => {
                Upper::open(&root, old.upper, SIZE).unwrap().seal(SIZE).unwrap();
                Upper::create(&root, next, SIZE).unwrap().write(&[2; 512], 1, false).unwrap();
                if cut == 3 {
                    // Torn within the trailer.
                    let data = fs::OpenOptions::new().write(true).open(upper::data_path(&root, old.upper)).unwrap();
                    data.set_len(data.metadata().unwrap().len() - 4000).unwrap();
                }
                if cut == 4 {
                    let name = LayerName::new(old.upper, Format::Lsmt);
                    fs::rename(upper::data_path(&root, old.upper), layers.join(name.as_str())).unwrap();
                }
            }
            _ => unreachable!(),
        }
        record::write(&root, &key(), &intent).unwrap();
        bench.reopen();
        let mut expected = vec![1; 4096];
        if cut >= 2 {
            expected[512..1024].fill(2);
        }
        assert_eq!(bench.whole()[..4096], expected, "cut {cut}");
        assert_eq!(bench.record().next, None, "cut {cut}");
        bench.disk.write(&[3; 512], 0, false).unwrap();
        bench.reopen();
        assert_eq!(bench.whole()[..512], [3; 512], "cut {cut}");
    }
}

#[test]
fn writes_go_on_during_seals_and_each_is_in_the_end_there() {
    let bench = bench();
    let done = std::sync::atomic::AtomicBool::new(false);
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for writer in 0..4_u64 {
            let (disk, done, written) = (&bench.disk, &done, &written);
            scope.spawn(move || {
                let mut round = 0_u64;
                while !done.load(Ordering::Relaxed) || round < 50 {
                    let at = (writer * 64 + round % 64) * 4096;
                    let value = u8::try_from(round % 250 + 1).unwrap();
                    disk.write(&[value; 4096], at, round % 20 == 0).unwrap();
                    let mut back = [0; 4096];
                    disk.read(&mut back, at).unwrap();
                    assert_eq!(back, [value; 4096]);
                    round += 1;
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..12 {
            // So that there is something to seal; a writer writes fifty times at least.
            let before = written.load(Ordering::Relaxed);
            while written.load(Ordering::Relaxed) < (before + 4).min(190) {
                std::thread::yield_now();
            }
            bench.disk.seal().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(bench.disk.stack().layers.len() > 1);
}

#[test]
fn a_damaged_layer_is_corrupt_for_what_needs_it() {
    let mut bench = bench();
    bench.disk.write(&[1; 4096], 0, false).unwrap();
    let (stack, _held) = bench.disk.seal().unwrap();
    let path = bench.parts.library.path(&stack.layers[0]);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    // Opened anew, with nothing remembered.
    let library = Library::new(&bench.parts.root, 3, crate::remote::Options::default()).unwrap();
    bench.parts = Arc::new(Parts { stacks: Stacks::new(&library), library, root: Arc::clone(&bench.parts.root) });
    bench.reopen();
    assert_eq!(bench.disk.open().err().map(|e| e.code), Some(Code::Corrupt));
    let failed = bench.disk.read(&mut [0; 512], 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(Errno::IO.raw_os_error()));
}

#[test]
fn a_disk_grows_and_what_is_new_is_zeros() {
    let mut bench = bench();
    bench.disk.write(&[1; 512], SIZE - 512, false).unwrap();
    assert!(bench.disk.resize(SIZE - 512).is_err());
    bench.disk.resize(2 * SIZE).unwrap();
    assert_eq!(bench.whole().len(), usize::try_from(2 * SIZE).unwrap());
    bench.disk.write(&[2; 512], 2 * SIZE - 512, false).unwrap();
    let (stack, _) = bench.disk.seal().unwrap();
    assert_eq!(stack.size_bytes, 2 * SIZE);
    bench.reopen();
    let whole = bench.whole();
    assert_eq!(whole[usize::try_from(SIZE).unwrap() - 512..][..1024], [[1; 512], [0; 512]].concat());
    assert!(whole.ends_with(&[2; 512]));
}

#[test]
fn outside_of_the_disk_there_is_nothing() {
    let bench = bench();
    let outside = |result: io::Result<()>| assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    outside(bench.disk.read(&mut [0; 2], SIZE - 1));
    outside(bench.disk.write(&[0; 2], SIZE - 1, false));
    outside(bench.disk.write(&[0; 2], u64::MAX, false));
    outside(bench.disk.discard(1, SIZE));
    bench.disk.remove().unwrap();
    assert!(bench.disk.read(&mut [0; 1], 0).is_err());
    assert!(fs::read_dir(bench.parts.root.uppers()).unwrap().next().is_none());
}
