//! The ublk front end on a kernel that has it: `make lab` runs these in the lab host.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged::device::{Device, DeviceId, Kind};
use storaged::directory::Directory;
use storaged::error::Code;
use storaged::ublk::{Front, Options, Start};

mod shown;
use shown::{Aligned, BLOCK, Bytes, Table, direct, id};

const MIB: usize = 1 << 20;
const KILLS: usize = 30;

/// One test at a time: they look at all devices there are.
static TURN: Mutex<()> = Mutex::new(());

struct Host {
    front: Front,
    table: Arc<Table>,
    directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn devices() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/class/ublk-char") else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn host() -> Host {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let table = Arc::new(Table::default());
    let (front, start) = Front::start(&options(directory.path()), Arc::clone(&table) as Arc<dyn Directory>).unwrap();
    assert_eq!(start, Start::default());
    Host { front, table, directory, _turn: turn }
}

fn options(directory: &Path) -> Options {
    Options::new(directory.join("tag"))
}

impl Host {
    fn show(&self, number: u64, kind: Kind, bytes: Vec<u8>) -> (DeviceId, PathBuf, Arc<Bytes>) {
        let device = Bytes::new(kind, bytes);
        let id = self.table.put(number, Arc::clone(&device) as Arc<dyn Device>);
        (id, self.front.attach(id).unwrap(), device)
    }

    fn ids(&self) -> Vec<DeviceId> {
        self.table.0.read().unwrap().keys().copied().collect()
    }

    fn disk(&self, number: u64) -> (DeviceId, PathBuf, Arc<Bytes>) {
        self.show(number, Kind::Disk, vec![0; 4 * MIB])
    }

    fn end(self) {
        for id in self.ids() {
            self.front.detach(id).unwrap();
        }
        assert!(devices().is_empty(), "{:?}", devices());
        assert_eq!(self.front.statistics().devices, 0);
    }
}

impl Drop for Host {
    /// A test that fails leaves nothing for the next.
    fn drop(&mut self) {
        for id in self.ids() {
            let _ = self.front.detach(id);
        }
    }
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_disk_is_the_bytes_that_were_written() {
    let host = host();
    let (_, path, device) = host.disk(1);
    for always_waits in [false, true] {
        device.always_waits.store(always_waits, SeqCst);
        shown::is_same_as_bytes_under_random_work(&path, &device, 300);
    }
    shown::nothing_is_beyond_the_end(&path, &device);
    let statistics = host.front.statistics();
    assert!(statistics.reads.requests > 0 && statistics.writes.bytes > 0 && statistics.discards.requests > 0);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn flush_and_durable_writes_reach_the_device() {
    let host = host();
    let (_, path, device) = host.disk(1);
    shown::flush_and_durable_writes_arrive(&path, &device);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn errors_reach_whoever_reads_and_writes() {
    let host = host();
    let (_, path, device) = host.disk(1);
    shown::errors_arrive_and_pass(&path, &device);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_device_that_hangs_holds_up_no_other() {
    let host = host();
    let (_, hung_path, hung) = host.disk(1);
    let (_, path, device) = host.disk(2);
    shown::a_hung_device_holds_up_no_other((&hung_path, &hung), (&path, &device));
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_device_that_hangs_can_be_detached() {
    let host = host();
    let (id, path, device) = host.disk(1);
    device.always_waits.store(true, SeqCst);
    device.hang.close();
    let reader = std::thread::spawn(move || {
        let mut bytes = Aligned::new(BLOCK, 0);
        direct(&path).read_exact_at(bytes.all(BLOCK), 0).unwrap_err()
    });
    device.hang.wait_held_up(1);

    host.front.detach(id).unwrap();

    assert_eq!(reader.join().unwrap().raw_os_error(), Some(5));
    device.hang.open();
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn memory_is_read_only() {
    let host = host();
    let bytes: Vec<u8> = (0..MIB).map(|place| u8::try_from(place / BLOCK % 251).unwrap()).collect();
    let (_, path, device) = host.show(1, Kind::Memory, bytes);
    shown::memory_is_never_changed(&path, &device);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn partitions_on_a_guests_disk_are_not_looked_for() {
    let host = host();
    let (first, path, device) = host.disk(1);
    let made = Command::new("sfdisk").arg(&path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut made = made.unwrap();
    made.stdin.take().unwrap().write_all(b"label: gpt\n,1M\n").unwrap();
    assert!(made.wait().unwrap().success());
    assert!(device.content.read().unwrap()[512..].starts_with(b"EFI PART"));
    host.front.detach(first).unwrap();

    let path = host.front.attach(first).unwrap();

    let name = path.file_name().unwrap().to_str().unwrap();
    let parts = fs::read_dir(Path::new("/sys/block").join(name)).unwrap();
    let parts = parts.filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with(name));
    assert_eq!(parts.count(), 0);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn attaching_twice_is_one_device_and_detaching_twice_is_none() {
    let host = host();
    let (id, path, _device) = host.disk(1);
    assert_eq!(host.front.attach(id).unwrap(), path);
    assert_eq!(devices().len(), 1);
    host.front.detach(id).unwrap();
    host.front.detach(id).unwrap();
    assert_eq!(host.front.attach(shown::id(99)).unwrap_err().code, Code::NotFound);
    host.front.resized(id).unwrap();
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn there_are_no_more_devices_than_may_be() {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let table = Arc::new(Table::default());
    let options = Options { max_devices: 2, ..options(directory.path()) };
    let (front, _) = Front::start(&options, Arc::clone(&table) as Arc<dyn Directory>).unwrap();
    let ids: Vec<DeviceId> =
        (1..=3).map(|number| table.put(number, Bytes::new(Kind::Disk, vec![0; MIB]) as Arc<dyn Device>)).collect();
    front.attach(ids[0]).unwrap();
    front.attach(ids[1]).unwrap();

    assert_eq!(front.attach(ids[2]).unwrap_err().code, Code::Exhausted);

    front.detach(ids[0]).unwrap();
    front.attach(ids[2]).unwrap();
    front.detach(ids[1]).unwrap();
    front.detach(ids[2]).unwrap();
    assert!(devices().is_empty());
    drop(turn);
}

#[test]
#[ignore = "needs ublk: make lab"]
fn storms_of_attach_and_detach_leave_nothing() {
    let host = host();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let host = &host;
            scope.spawn(move || {
                for round in 0..15 {
                    let (id, path, device) = host.show(1 + thread, Kind::Disk, vec![0; MIB]);
                    if round % 3 == 0 {
                        shown::is_same_as_bytes_under_random_work(&path, &device, 5);
                    }
                    host.front.detach(id).unwrap();
                    assert!(!path.exists());
                }
            });
        }
        // All want the same one: whoever detaches it ends it for all.
        let shared = host.table.put(50, Bytes::new(Kind::Disk, vec![0; MIB]) as Arc<dyn Device>);
        for _ in 0..3 {
            let host = &host;
            scope.spawn(move || {
                for _ in 0..10 {
                    host.front.attach(shared).unwrap();
                    host.front.detach(shared).unwrap();
                }
            });
        }
    });
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_disk_grows_where_the_kernel_can() {
    let host = host();
    let (id, path, device) = host.disk(1);
    device.content.write().unwrap().resize(8 * MIB, 7);
    let file = direct(&path);
    let mut bytes = Aligned::new(BLOCK, 0);
    match host.front.resized(id) {
        Ok(()) => {}
        Err(error) => {
            assert_eq!(error.code, Code::Unsupported, "{error}");
            assert_eq!(host.front.may_resize(id).unwrap_err().code, Code::Unsupported);
            drop(file);
            host.front.detach(id).unwrap();
            assert_eq!(host.front.attach(id).unwrap(), path);
        }
    }
    direct(&path).read_exact_at(bytes.all(BLOCK), 5 * MIB as u64).unwrap();
    assert_eq!(bytes.all(BLOCK), &[7; BLOCK]);
    host.end();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_daemon_that_stops_leaves_its_devices_to_the_next() {
    let host = host();
    let (id, path, device) = host.disk(1);
    let file = direct(&path);
    let mut bytes = Aligned::new(BLOCK, 4);
    file.write_all_at(bytes.all(BLOCK), 0).unwrap();
    assert!(host.front.stop(Duration::from_secs(30)));

    let table = Arc::clone(&host.table) as Arc<dyn Directory>;
    let (front, start) = Front::start(&options(host.directory.path()), table).unwrap();

    assert_eq!(start, Start { taken_over: vec![id], deleted: 0 });
    assert_eq!(front.attach(id).unwrap(), path);
    file.write_all_at(bytes.all(BLOCK), BLOCK as u64).unwrap();
    drop(file);
    shown::is_same_as_bytes_under_random_work(&path, &device, 50);
    front.detach(id).unwrap();
    assert!(devices().is_empty());
}

#[test]
#[ignore = "needs ublk: make lab"]
fn devices_that_stand_for_nothing_are_deleted_at_start_and_others_are_left() {
    let host = host();
    let (first, _, _device) = host.disk(1);
    host.disk(2);
    assert!(host.front.stop(Duration::from_secs(30)));
    let elsewhere = tempfile::tempdir().unwrap();
    let (_, start) = Front::start(&options(elsewhere.path()), Arc::new(Table::default())).unwrap();
    assert_eq!((start, devices().len()), (Start::default(), 2));
    host.table.0.write().unwrap().remove(&first);

    let table = Arc::clone(&host.table) as Arc<dyn Directory>;
    let (front, start) = Front::start(&options(host.directory.path()), table).unwrap();

    assert_eq!(start, Start { taken_over: vec![id(2)], deleted: 1 });
    front.detach(id(2)).unwrap();
    assert!(devices().is_empty());
}

/// A daemon that can be killed: this very program, with one device that is a file, number 1.
struct Daemon(Child, BufReader<std::process::ChildStdout>);

const DAEMON: &str = "AENV_TEST_UBLK_DAEMON";

impl Daemon {
    fn start(directory: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "is_a_daemon_when_asked", "--ignored", "--nocapture", "--quiet"])
            .env(DAEMON, directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self(child, out)
    }

    fn wait_ready(&mut self) -> PathBuf {
        for line in (&mut self.1).lines() {
            if let Some((_, path)) = line.unwrap().split_once("ready ") {
                return path.into();
            }
        }
        panic!("the daemon ended: {:?}", self.0.wait());
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

struct Slowly {
    file: File,
    hangs: bool,
}

impl Device for Slowly {
    fn kind(&self) -> Kind {
        Kind::Disk
    }

    fn size_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.hangs {
            loop {
                std::thread::park();
            }
        }
        self.file.read_exact_at(buf, offset)
    }

    fn read_now(&self, _: &mut [u8], _: u64) -> io::Result<storaged::device::Answer> {
        Ok(storaged::device::Answer::WouldWait)
    }

    fn write(&self, buf: &[u8], offset: u64, _: bool) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.write_all_at(&vec![0; usize::try_from(length).unwrap()], offset)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
#[ignore = "is the daemon of other tests"]
fn is_a_daemon_when_asked() {
    let Some(directory) = std::env::var_os(DAEMON).map(PathBuf::from) else { return };
    let file = File::options().read(true).write(true).open(directory.join("disk")).unwrap();
    let table = Table::default();
    table.put(1, Arc::new(Slowly { file, hangs: directory.join("hangs").exists() }));
    let options = Options { depth: 32, ..options(&directory) };
    let (front, _) = Front::start(&options, Arc::new(table)).unwrap();
    println!("ready {}", front.attach(id(1)).unwrap().display());
    let end = io::stdin().lines().next();
    if end.is_some() {
        front.detach(id(1)).unwrap();
    }
}

fn disk_file(directory: &Path) {
    File::create(directory.join("disk")).unwrap().set_len(64 << 20).unwrap();
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_daemon_that_is_killed_under_load_loses_no_write() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    disk_file(directory.path());
    let mut daemon = Daemon::start(directory.path());
    let path = daemon.wait_ready();
    let job = [
        "--name=verify",
        "--rw=randrw",
        "--bs=4k-64k",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=16",
        "--size=64m",
        "--io_size=192m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=256",
        "--minimal",
    ];
    let mut dice = shown::Dice(7);
    let mut kills = 0;
    while kills < KILLS {
        let mut fio = Command::new("fio");
        let mut fio =
            fio.arg(format!("--filename={}", path.display())).args(job).stdout(Stdio::null()).spawn().unwrap();
        while fio.try_wait().unwrap().is_none() {
            // Not a wait for anything: some load between two kills.
            std::thread::sleep(Duration::from_millis(200 + dice.below(800)));
            daemon.kill();
            kills += 1;
            daemon = Daemon::start(directory.path());
            assert_eq!(daemon.wait_ready(), path);
        }
        assert!(fio.wait().unwrap().success());
    }
    daemon.0.stdin.take().unwrap().write_all(b"end\n").unwrap();
    assert!(daemon.0.wait().unwrap().success());
    assert!(devices().is_empty());
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_daemon_that_is_killed_with_every_tag_in_use_is_followed_by_another() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    disk_file(directory.path());
    fs::write(directory.path().join("hangs"), "").unwrap();
    let mut daemon = Daemon::start(directory.path());
    let path = daemon.wait_ready();
    let in_use = || {
        let shown = fs::read_to_string(format!("/sys/block/{}/inflight", path.file_name().unwrap().to_str().unwrap()));
        shown.unwrap().split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..40_u64)
            .map(|place| {
                let path = &path;
                scope.spawn(move || {
                    let mut bytes = Aligned::new(BLOCK, 1);
                    direct(path).read_exact_at(bytes.all(BLOCK), place * MIB as u64).unwrap();
                    assert_eq!(bytes.all(BLOCK), &[0; BLOCK]);
                })
            })
            .collect();
        while in_use() < 32 {
            std::thread::yield_now();
        }
        daemon.kill();
        fs::remove_file(directory.path().join("hangs")).unwrap();
        daemon = Daemon::start(directory.path());
        assert_eq!(daemon.wait_ready(), path);
        for reader in readers {
            reader.join().unwrap();
        }
        daemon.0.stdin.take().unwrap().write_all(b"end\n").unwrap();
        assert!(daemon.0.wait().unwrap().success());
    });
    assert!(devices().is_empty());
}

#[test]
#[ignore = "needs ublk: make lab"]
fn a_file_system_on_it_survives() {
    let host = host();
    let (_, path, _) = host.show(1, Kind::Disk, vec![0; 32 * MIB]);
    let mounted = tempfile::tempdir().unwrap();
    let run = |program: &str, arguments: &[&str]| {
        assert!(Command::new(program).args(arguments).stdout(Stdio::null()).status().unwrap().success(), "{program}");
    };
    let (path, place) = (path.to_str().unwrap(), mounted.path().to_str().unwrap());
    run("mkfs.ext4", &["-q", path]);
    run("mount", &["-o", "discard", path, place]);
    fs::write(mounted.path().join("file"), vec![5; 3 * MIB]).unwrap();
    fs::remove_file(mounted.path().join("file")).unwrap();
    fs::write(mounted.path().join("other"), "kept").unwrap();
    run("umount", &[place]);
    run("fsck.ext4", &["-fn", path]);
    run("mount", &[path, place]);
    assert_eq!(fs::read_to_string(mounted.path().join("other")).unwrap(), "kept");
    run("umount", &[place]);
    host.end();
}
