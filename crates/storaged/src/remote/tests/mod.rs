//! Remote layers against a server that does as it is told.

mod auth;
mod layers;
mod server;

use std::io;
use std::thread;

use sha2::{Digest as _, Sha256};

use self::server::{Fault, Server};
use super::*;
use crate::names::{Format, Id};

const BLOCK: usize = 256 << 10;
const _: () = assert!(BLOCK as u64 == BLOCK_BYTES);
/// Enough for a machine that is busy with something else.
const LONG: Duration = Duration::from_secs(60);
/// Short, since it is waited for.
const SHORT: Duration = Duration::from_millis(600);

struct Bench {
    directory: tempfile::TempDir,
    remotes: Arc<Remotes>,
    server: Server,
    options: Options,
}

/// A daemon with room for so many blocks, and a server.
fn bench_of(blocks: u64, patience: Duration) -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { cache_bytes: blocks * BLOCK_BYTES, patience, ..Options::default() };
    let remotes = open(&directory, &options);
    Bench { directory, remotes, server: Server::start().unwrap(), options }
}

fn bench(patience: Duration) -> Bench {
    bench_of(1000, patience)
}

fn open(directory: &tempfile::TempDir, options: &Options) -> Arc<Remotes> {
    let root = Arc::new(Root::open(&directory.path().join("root")).unwrap());
    Remotes::open(&root, &Files::new(8), options.clone()).unwrap()
}

/// Bytes that differ everywhere.
fn content(blocks: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; blocks * BLOCK - 1000];
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

fn described(source: Source, content: &[u8], sums: bool) -> Remote {
    let block_sums = sums.then(|| Sums::new(content.chunks(BLOCK).flat_map(Sha256::digest).collect()));
    let digest = Digest(Sha256::digest(content).into());
    Remote { source, size_bytes: content.len() as u64, digest, block_sums }
}

fn new_name() -> LayerName {
    LayerName::new(Id::random().unwrap(), Format::Lsmt)
}

impl Bench {
    /// The next daemon, after the last one ended in order or did not.
    fn reopen(&mut self, in_order: bool) {
        if in_order {
            self.remotes.stop();
        }
        // A directory has one daemon: wait until the threads of the last one have let go.
        let (old, options) = (Arc::downgrade(&self.remotes), self.options.clone());
        self.remotes = Remotes::open(
            &Arc::new(Root::open(&self.directory.path().join("elsewhere")).unwrap()),
            &Files::new(1),
            Options::default(),
        )
        .unwrap();
        while old.strong_count() > 0 {
            thread::yield_now();
        }
        let lock = self.directory.path().join("root/cache/blocks-1/lock");
        while Cache::open(&self.directory.path().join("root/cache"), 0, &Files::new(1), |_| true).is_err() {
            assert!(lock.exists());
            thread::yield_now();
        }
        self.remotes = open(&self.directory, &options);
    }

    fn put(&self, content: &[u8], sums: bool) -> LayerName {
        let name = new_name();
        let path = format!("/{name}");
        self.server.put(&path, content.to_vec());
        let source = Source::Http { url: format!("{}{path}", self.server.address) };
        self.remotes.add(&name, &described(source, content, sums)).unwrap();
        name
    }

    fn read(&self, name: &LayerName, offset: usize, length: usize) -> io::Result<Vec<u8>> {
        let mut buf = vec![0xee; length];
        self.remotes.object(name)?.read(&mut buf, offset as u64)?;
        Ok(buf)
    }

    /// Waits until so many blocks of *name* are kept: that happens after they are read.
    fn wait_kept(&self, name: &LayerName, blocks: u64) {
        let object = self.remotes.object(name).unwrap();
        while object.stored().blocks_there() < blocks {
            thread::yield_now();
        }
    }

    fn asked(&self) -> usize {
        self.server.asked().len()
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}

fn kind(result: io::Result<Vec<u8>>) -> Option<io::ErrorKind> {
    result.err().map(|error| error.kind())
}

#[test]
fn any_bytes_are_those_of_the_source_and_come_once() {
    let mut bench = bench(LONG);
    let whole = content(5, 1);
    let name = bench.put(&whole, false);
    for (offset, length) in [(0, 1), (BLOCK - 1, 2), (3 * BLOCK + 7, BLOCK), (0, whole.len()), (whole.len() - 5, 5)] {
        assert_eq!(bench.read(&name, offset, length).unwrap(), &whole[offset..offset + length]);
    }
    assert_eq!(kind(bench.read(&name, whole.len() - 5, 6)), Some(io::ErrorKind::UnexpectedEof));
    bench.wait_kept(&name, 5);
    let before = bench.asked();
    assert!(before <= 5);
    bench.reopen(true);
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    assert_eq!(bench.asked(), before);
}

#[test]
fn what_goes_wrong_once_is_tried_again_at_the_right_place() {
    let faults = [
        Fault::Status(500),
        Fault::Status(429),
        Fault::CutAfter(0),
        Fault::CutAfter(100_001),
        Fault::CutAfter(BLOCK + 3),
        Fault::StallAfter(70_000),
        Fault::Silence,
        Fault::Everything,
        Fault::WrongRange,
        Fault::WrongBytes,
        Fault::Half,
        Fault::Size(7),
        Fault::NoRange,
        Fault::Header("Content-Encoding: gzip"),
    ];
    for fault in faults {
        let bench = bench(Duration::from_secs(9));
        let whole = content(4, 2);
        let name = bench.put(&whole, true);
        bench.server.next(fault.clone());
        bench.server.next(fault.clone());
        assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole, "{fault:?}");
    }
}

#[test]
fn each_lasting_fault_has_its_error_and_none_outlives_it() {
    use io::ErrorKind::{InvalidData, NotFound, PermissionDenied, TimedOut};
    let faults = [
        (Fault::Status(404), NotFound),
        (Fault::Status(410), NotFound),
        (Fault::Status(403), PermissionDenied),
        (Fault::Status(503), TimedOut),
        (Fault::Silence, TimedOut),
        (Fault::CutAfter(10), TimedOut),
        (Fault::StallAfter(10), TimedOut),
        (Fault::Trickle, TimedOut),
        (Fault::Everything, InvalidData),
        (Fault::WrongRange, InvalidData),
        (Fault::WrongBytes, InvalidData),
        (Fault::Size(1 << 40), InvalidData),
        (Fault::NoRange, InvalidData),
    ];
    for (fault, expected) in faults {
        let bench = bench(SHORT);
        let whole = content(3, 3);
        let name = bench.put(&whole, true);
        bench.server.always(Some(fault.clone()));
        assert_eq!(kind(bench.read(&name, BLOCK, 10)), Some(expected), "{fault:?}");
        bench.server.always(None);
        let read = (0..20).find_map(|_| bench.read(&name, 0, whole.len()).ok());
        assert_eq!(read, Some(whole), "{fault:?}");
    }
}

#[test]
fn nobody_there_is_no_answer_and_not_absence() {
    let bench = bench(SHORT);
    let name = new_name();
    let source = Source::Http { url: "http://127.0.0.1:1/x".into() };
    bench.remotes.add(&name, &described(source, &content(1, 4), false)).unwrap();
    assert_eq!(kind(bench.read(&name, 0, 1)), Some(io::ErrorKind::TimedOut));
}

#[test]
fn two_contents_are_never_mixed() {
    let mut bench = bench(LONG);
    let whole = content(4, 5);
    let name = bench.put(&whole, false);
    assert_eq!(bench.read(&name, 0, 10).unwrap(), &whole[..10]);
    // Both ends are here by now, or on their way.
    bench.read(&name, whole.len() - 10, 10).unwrap();
    bench.wait_kept(&name, 2);
    bench.server.always(Some(Fault::Tag("\"two\"")));
    assert_eq!(kind(bench.read(&name, BLOCK, 10)), Some(io::ErrorKind::InvalidData));
    bench.reopen(true);
    assert_eq!(kind(bench.read(&name, BLOCK, 10)), Some(io::ErrorKind::InvalidData));
    assert_eq!(bench.read(&name, 0, 10).unwrap(), &whole[..10]);
    bench.server.always(None);
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
}

#[test]
fn many_readers_of_one_block_are_one_request() {
    let bench = bench(LONG);
    let whole = content(9, 6);
    let name = bench.put(&whole, false);
    let object = bench.remotes.object(&name).unwrap();
    bench.read(&name, 0, 1).unwrap();
    bench.read(&name, whole.len() - 1, 1).unwrap();
    bench.wait_kept(&name, 2);
    let before = bench.asked();
    bench.server.close(true);
    thread::scope(|scope| {
        for reader in 0..8 {
            let (object, whole) = (&object, &whole);
            scope.spawn(move || {
                let (mut buf, at) = ([0; 10], 4 * BLOCK + reader * 1000);
                object.read(&mut buf, at as u64).unwrap();
                assert_eq!(buf, whole[at..at + 10]);
            });
        }
        bench.server.wait_asked(before + 1);
        bench.server.close(false);
    });
    assert_eq!(bench.asked(), before + 1);
}

#[test]
fn a_host_that_stalls_holds_up_nobody_else() {
    let bench = bench(LONG);
    let whole = content(2, 7);
    let stalled = bench.put(&whole, false);
    bench.server.close(true);
    let other = Server::start().unwrap();
    other.put("/x", whole.clone());
    let fine = new_name();
    let source = Source::Http { url: format!("{}/x", other.address) };
    bench.remotes.add(&fine, &described(source, &whole, false)).unwrap();
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| bench.read(&stalled, 0, whole.len()).unwrap());
        }
        bench.server.wait_asked(1);
        assert_eq!(bench.read(&fine, 0, whole.len()).unwrap(), whole);
        assert_eq!(
            bench.remotes.object(&stalled).unwrap().read_now(&mut [0; 1], 0).unwrap(),
            crate::device::Answer::WouldWait
        );
        bench.server.close(false);
    });
}

#[test]
fn a_cache_that_is_too_small_stays_so_and_the_bytes_are_right() {
    let bench = bench_of(4, LONG);
    let files: Vec<_> = (0..3).map(|seed| content(6, 10 + seed)).collect();
    let names: Vec<_> = files.iter().map(|whole| bench.put(whole, true)).collect();
    let objects: Vec<_> = names.iter().map(|name| bench.remotes.object(name).unwrap()).collect();
    for round in 0..60_usize {
        let at = (round * 7919 * 101) % (5 * BLOCK);
        let mut buf = vec![0; 5000];
        objects[round % 3].read(&mut buf, at as u64).unwrap();
        assert_eq!(buf, &files[round % 3][at..at + 5000]);
        let usage = &bench.remotes.engine().unwrap().cache.usage();
        assert!(usage.bytes <= usage.limit_bytes, "{usage:?}");
    }
}

#[test]
fn a_crash_costs_what_was_not_durable_and_a_damaged_cache_is_fetched_again() {
    let mut bench = bench(LONG);
    let whole = content(4, 8);
    let name = bench.put(&whole, false);
    bench.read(&name, 0, whole.len()).unwrap();
    bench.wait_kept(&name, 4);
    bench.remotes.stop();
    let data = bench.directory.path().join("root/cache/blocks-1").join(name.as_str()).join("data");
    let mut bytes = fs::read(&data).unwrap();
    bytes[2 * BLOCK + 5] ^= 1;
    fs::write(&data, bytes).unwrap();
    bench.reopen(false);
    let before = bench.asked();
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    assert_eq!(bench.asked(), before + 1);
    fs::write(data.with_file_name("meta"), b"nonsense").unwrap();
    bench.reopen(false);
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
}

#[test]
fn what_is_not_the_cache_s_own_is_left_alone() {
    let mut bench = bench(LONG);
    let name = bench.put(&content(1, 9), false);
    bench.read(&name, 0, 1).unwrap();
    bench.wait_kept(&name, 1);
    let place = bench.directory.path().join("root/cache/blocks-1");
    fs::create_dir_all(place.join("precious")).unwrap();
    fs::write(place.join("precious/file"), b"x").unwrap();
    let orphan = place.join(new_name().as_str());
    fs::create_dir_all(&orphan).unwrap();
    bench.reopen(true);
    bench.read(&name, 0, 1).unwrap();
    assert!(place.join("precious/file").exists());
    assert!(!orphan.exists());
}

#[test]
fn without_room_on_the_disk_bytes_are_read_and_not_kept() {
    let place = tempfile::tempdir().unwrap();
    let mounted =
        rustix::mount::mount("x", place.path(), "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=600k"));
    if mounted.is_err() {
        println!("SKIPPED: no file system can be mounted here");
        return;
    }
    let options = Options { cache: Some(place.path().to_owned()), patience: LONG, ..Options::default() };
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench { remotes: open(&directory, &options), directory, server: Server::start().unwrap(), options };
    let whole = content(8, 11);
    let name = bench.put(&whole, true);
    for _ in 0..3 {
        assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    }
    drop(bench);
    let _ = rustix::mount::unmount(place.path(), rustix::mount::UnmountFlags::DETACH);
}

fn wait_filled(bench: &Bench, count: usize) -> Value {
    loop {
        let done = bench.remotes.statistics()["fills"]["done"].clone();
        if done.as_array().is_some_and(|done| done.len() >= count) {
            return done;
        }
        thread::yield_now();
    }
}

#[test]
fn a_layer_is_filled_and_compared_with_its_digest() {
    let bench = bench(LONG);
    let whole = content(20, 12);
    let name = bench.put(&whole, false);
    bench.remotes.fill(std::slice::from_ref(&name)).unwrap();
    assert_eq!(wait_filled(&bench, 1)[0][1], "complete");
    let before = bench.asked();
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    assert_eq!(bench.asked(), before);
    assert_eq!(bench.remotes.fill(&[new_name()]).err().map(|e| e.code), Some(Code::NotFound));
}

#[test]
fn a_layer_that_is_another_is_found_out_and_may_be_tried_again() {
    let bench = bench(LONG);
    let whole = content(3, 13);
    let name = bench.put(&whole, false);
    bench.server.put(&format!("/{name}"), content(3, 14));
    let object = bench.remotes.object(&name).unwrap();
    bench.remotes.fill(std::slice::from_ref(&name)).unwrap();
    assert_eq!(wait_filled(&bench, 1)[0][1], "corrupt");
    assert_eq!(kind(bench.read(&name, 0, 10)), Some(io::ErrorKind::InvalidData));
    bench.server.put(&format!("/{name}"), whole.clone());
    bench.remotes.add(&name, object.remote()).unwrap();
    bench.remotes.fill(std::slice::from_ref(&name)).unwrap();
    assert_eq!(wait_filled(&bench, 2)[1][1], "complete");
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
}

#[test]
fn a_name_has_one_content_and_may_move() {
    let bench = bench(LONG);
    let whole = content(2, 15);
    let name = bench.put(&whole, false);
    let moved = Source::Http { url: format!("{}/moved", bench.server.address) };
    let other = bench.remotes.add(&name, &described(moved.clone(), &content(2, 16), false));
    assert_eq!(other.err().map(|e| e.code), Some(Code::AlreadyExists));
    bench.server.put("/moved", whole.clone());
    bench.remotes.add(&name, &described(moved, &whole, false)).unwrap();
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    assert!(bench.server.asked().iter().all(|asked| asked.target == "/moved"));
}

#[test]
fn what_is_removed_leaves_nothing_and_takes_nothing_later() {
    let bench = bench(LONG);
    let whole = content(3, 17);
    let name = bench.put(&whole, false);
    let object = bench.remotes.object(&name).unwrap();
    bench.read(&name, 0, whole.len()).unwrap();
    bench.wait_kept(&name, 3);
    bench.remotes.remove(&name).unwrap();
    // Somebody who still had it open reads on, and keeps nothing.
    object.read(&mut [0; 10], 0).unwrap();
    bench.remotes.stop();
    assert!(!bench.directory.path().join("root/cache/blocks-1").join(name.as_str()).exists());
    assert_eq!(bench.remotes.object(&name).err().map(|e| e.code), Some(Code::NotFound));
    assert_eq!(bench.remotes.engine().unwrap().cache.usage().bytes, 0);
}
