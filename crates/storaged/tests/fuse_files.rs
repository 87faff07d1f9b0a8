//! The FUSE front end in this process: what files look like, how errors arrive, what stalls and what does not.

mod support;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use storaged::device::Kind;
use storaged::directory::Directory;
use storaged::error::Code;
use storaged::fuse::{Front, Start};

use support::{Fake, Gate, Place, Table, errno, id, lacking, pattern};

const NEEDS: &[&str] = &["root", "fuse"];
const O_DSYNC: i32 = 0o10_000;
const LIMIT: Duration = Duration::from_secs(60);

fn start(place: &Place, table: &Arc<Table>) -> (Front, Start) {
    Front::start(&place.options(), Arc::clone(table) as Arc<dyn Directory>).expect("a front end")
}

fn open(path: impl AsRef<std::path::Path>) -> File {
    File::options().read(true).write(true).open(path).expect("a file")
}

#[test]
fn a_disk_is_read_and_written_in_place() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let disk = table.add(1, "a", Fake::new(Kind::Disk, 3 << 20));
    let (front, start) = start(&place, &table);
    assert_eq!(start, Start::Fresh);
    let file = open(front.path(Kind::Disk, "a"));

    file.write_all_at(&vec![7; 2 << 20], 1000).expect("written");
    file.sync_all().expect("flushed");

    let mut expected = pattern(3 << 20);
    expected[1000..1000 + (2 << 20)].fill(7);
    assert_eq!(support::read_to_end(&front.path(Kind::Disk, "a")), expected);
    assert_eq!(*disk.bytes.lock().expect("unpoisoned"), expected);
    assert_eq!(disk.flushes.load(Ordering::Relaxed), 1);
    assert_eq!(file.read_at(&mut [0; 10], 3 << 20).expect("the end"), 0);
    assert_eq!(errno(file.write_all_at(&[1; 2], (3 << 20) - 1)), Errno::NOSPC.raw_os_error());
    drop(file);
    front.unmount().expect("unmounted");
    assert!(!place.is_mounted());
    assert!(!place.keeper().exists());
}

#[test]
fn a_write_through_a_synchronous_descriptor_is_durable() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let disk = table.add(1, "a", Fake::new(Kind::Disk, 1 << 20));
    let (front, _) = start(&place, &table);
    let file = File::options().write(true).custom_flags(O_DSYNC).open(front.path(Kind::Disk, "a")).expect("a file");

    file.write_all_at(&[1; 512], 0).expect("written");

    assert_eq!(disk.durable.load(Ordering::Relaxed), 1);
}

#[test]
fn a_hole_in_a_disk_is_a_discard_and_in_memory_is_nothing() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    table.add(1, "a", Fake::new(Kind::Disk, 1 << 20));
    table.add(2, "m", Fake::new(Kind::Memory, 1 << 20));
    let (front, _) = start(&place, &table);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (disk, memory) = (open(front.path(Kind::Disk, "a")), open(front.path(Kind::Memory, "m")));

    for file in [&disk, &memory] {
        fallocate(file.as_fd(), punch, 4096, 8192).expect("punched");
    }
    fallocate(disk.as_fd(), FallocateFlags::ZERO_RANGE, 0, 100).expect("zeroed");

    let mut expected = pattern(1 << 20);
    assert_eq!(support::read_to_end(&front.path(Kind::Memory, "m")), expected);
    expected[..100].fill(0);
    expected[4096..4096 + 8192].fill(0);
    assert_eq!(support::read_to_end(&front.path(Kind::Disk, "a")), expected);
    let beyond = fallocate(disk.as_fd(), FallocateFlags::ZERO_RANGE, 1 << 20, 1);
    assert_eq!(beyond, Err(Errno::FBIG));
    assert_eq!(fallocate(disk.as_fd(), FallocateFlags::empty(), 0, 1), Err(Errno::OPNOTSUPP));
}

#[test]
fn memory_is_cached_and_not_written() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let memory = table.add(1, "m", Fake::new(Kind::Memory, 1 << 20));
    let (front, _) = start(&place, &table);
    let path = front.path(Kind::Memory, "m");
    assert_eq!(support::read_to_end(&path), pattern(1 << 20));
    let before = memory.reads.load(Ordering::Relaxed);

    assert_eq!(support::read_to_end(&path), pattern(1 << 20));

    assert_eq!(memory.reads.load(Ordering::Relaxed), before);
    assert_eq!(errno(open(&path).write_at(b"x", 0)), Errno::ROFS.raw_os_error());
}

#[test]
fn the_tree_is_what_the_directory_says_and_nothing_else() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    for number in 1..=1000 {
        table.add(number, &format!("disk-{number}"), Fake::new(Kind::Disk, 4096));
    }
    let (front, _) = start(&place, &table);
    let disks = place.mount().join("disks");

    let mut names: Vec<String> = fs::read_dir(&disks)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut expected: Vec<String> = (1..=1000).map(|number| format!("disk-{number}")).collect();
    expected.sort();

    assert_eq!(names, expected);
    assert_eq!(fs::read_dir(place.mount().join("memory")).expect("a folder").count(), 0);
    assert_eq!(errno(File::create(disks.join("new"))), Errno::ROFS.raw_os_error());
    assert_eq!(errno(fs::remove_file(disks.join("disk-1"))), Errno::ROFS.raw_os_error());
    assert_eq!(errno(fs::create_dir(disks.join("sub"))), Errno::ROFS.raw_os_error());
    assert_eq!(
        errno(File::options().write(true).truncate(true).open(disks.join("disk-1"))),
        Errno::PERM.raw_os_error()
    );
    assert_eq!(errno(File::open(disks.join("disk-0"))), Errno::NOENT.raw_os_error());
    let meta = fs::metadata(front.path(Kind::Disk, "disk-7")).expect("a file");
    assert_eq!((meta.len(), meta.mode() & 0o7777), (4096, 0o600));
}

#[test]
fn an_error_of_a_device_arrives_and_none_of_them_is_believed_for_ever() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let good = table.add(1, "good", Fake::new(Kind::Disk, 4096));
    table.add(2, "full", Fake { fault: Some(Errno::NOSPC.raw_os_error()), ..Fake::new(Kind::Disk, 4096) });
    table.add(3, "odd", Fake { fault: Some(Errno::NOSYS.raw_os_error()), ..Fake::new(Kind::Disk, 4096) });
    let (front, _) = start(&place, &table);
    let [good_file, full, odd] = ["good", "full", "odd"].map(|name| open(front.path(Kind::Disk, name)));

    assert_eq!(errno(full.write_at(b"x", 0)), Errno::NOSPC.raw_os_error());
    assert_eq!(errno(odd.sync_all()), Errno::IO.raw_os_error());
    assert_eq!(errno(odd.read_at(&mut [0], 0)), Errno::IO.raw_os_error());

    good_file.sync_all().expect("flushed");
    assert_eq!(good.flushes.load(Ordering::Relaxed), 1);
    assert_eq!(front.statistics().writes.errors, 1);
}

#[test]
fn a_source_that_stalls_holds_up_no_other_image() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let gate = Arc::new(Gate::default());
    let stalled = Fake { remote: Some(Arc::clone(&gate)), ..Fake::new(Kind::Disk, 1 << 20) };
    let stalled = table.add(1, "stalled", stalled);
    table.add(2, "local", Fake::new(Kind::Disk, 1 << 20));
    let other = Fake { remote: Some(Arc::new(Gate::default())), ..Fake::new(Kind::Memory, 1 << 20) };
    let other = table.add(3, "other", other);
    let (front, _) = start(&place, &table);
    let path = front.path(Kind::Disk, "stalled");
    let readers: Vec<_> = (0..100)
        .map(|number: u64| {
            let path = path.clone();
            std::thread::spawn(move || {
                let mut bytes = [0; 100];
                open(path).read_exact_at(&mut bytes, number * 100).map(|()| bytes)
            })
        })
        .collect();
    stalled.reached.pass();

    assert_eq!(support::read_to_end(&front.path(Kind::Disk, "local")), pattern(1 << 20));
    let memory = front.path(Kind::Memory, "other");
    let waiting = std::thread::spawn(move || support::read_to_end(&memory));
    other.reached.pass();
    other.remote.as_ref().expect("a gate").open();
    assert_eq!(waiting.join().expect("no panic"), pattern(1 << 20));

    gate.open();
    for (number, reader) in readers.into_iter().enumerate() {
        let bytes = reader.join().expect("no panic").expect("readable");
        assert_eq!(bytes[..], pattern(1 << 20)[number * 100..][..100]);
    }
}

#[test]
fn whoever_waits_for_a_stalled_source_can_be_killed() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let gate = Arc::new(Gate::default());
    let stalled = Fake { remote: Some(Arc::clone(&gate)), ..Fake::new(Kind::Disk, 1 << 20) };
    let stalled = table.add(1, "a", stalled);
    let (front, _) = start(&place, &table);
    let mut reader =
        Command::new("cat").arg(front.path(Kind::Disk, "a")).stdout(Stdio::null()).spawn().expect("a process");
    stalled.reached.pass();

    reader.kill().expect("a process");
    reader.wait().expect("its end");

    assert_eq!(front.statistics().interrupted, 1);
    gate.open();
    assert!(front.stop(LIMIT));
}

#[test]
fn a_device_that_is_removed_is_gone_for_those_that_have_it_open() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    table.add(1, "a", Fake::new(Kind::Disk, 4096));
    table.add(2, "m", Fake::new(Kind::Memory, 4096));
    let (front, _) = start(&place, &table);
    let files = [(Kind::Disk, "a", 1), (Kind::Memory, "m", 2)];
    let opened = files.map(|(kind, name, _)| open(front.path(kind, name)));
    for file in &opened {
        file.read_exact_at(&mut [0; 512], 0).expect("readable");
    }

    for (kind, name, number) in files {
        table.remove(number);
        front.removed(kind, name, id(number));
    }

    for (file, (kind, name, _)) in opened.iter().zip(files) {
        assert_eq!(errno(file.read_exact_at(&mut [0; 512], 0)), Errno::IO.raw_os_error());
        assert_eq!(errno(File::open(front.path(kind, name))), Errno::NOENT.raw_os_error());
    }
    table.add(3, "a", Fake::new(Kind::Disk, 8192));
    assert_eq!(fs::metadata(front.path(Kind::Disk, "a")).expect("a new one").len(), 8192);
}

#[test]
fn a_disk_that_grows_is_seen_to() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    let disk = table.add(1, "a", Fake::new(Kind::Disk, 4096));
    let (front, _) = start(&place, &table);
    let file = open(front.path(Kind::Disk, "a"));
    assert_eq!(file.metadata().expect("attributes").len(), 4096);

    disk.bytes.lock().expect("unpoisoned").resize(8192, 0);
    front.resized(id(1));

    assert_eq!(file.metadata().expect("attributes").len(), 8192);
    file.write_all_at(b"x", 8191).expect("room");
}

#[test]
fn what_is_stopped_waits_for_the_next() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    table.add(1, "a", Fake::new(Kind::Disk, 1 << 20));
    let (first, _) = start(&place, &table);
    let file = open(first.path(Kind::Disk, "a"));
    assert!(first.stop(LIMIT));
    drop(first);
    let waiting = std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 20];
        file.read_exact_at(&mut bytes, 0).map(|()| bytes)
    });

    let (second, start) = start(&place, &table);

    assert_eq!(start, Start::TakenOver);
    assert_eq!(waiting.join().expect("no panic").expect("readable"), pattern(1 << 20));
    second.unmount().expect("unmounted");
    assert!(!place.is_mounted());
}

#[test]
fn a_mount_in_use_is_not_ended() {
    if lacking(NEEDS) {
        return;
    }
    let (place, table) = (Place::new(), Arc::new(Table::default()));
    table.add(1, "a", Fake::new(Kind::Disk, 4096));
    let (front, _) = start(&place, &table);
    let file = open(front.path(Kind::Disk, "a"));

    let refused = front.unmount().expect_err("in use");

    assert_eq!(refused.code, Code::Conflict);
    file.read_exact_at(&mut [0; 512], 0).expect("served as before");
}

#[test]
fn another_file_system_in_the_place_is_left_alone() {
    if lacking(NEEDS) {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.mount()).expect("a folder");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("none", place.mount(), "tmpfs", flags, None).expect("a mount");

    let refused = Front::start(&place.options(), Arc::new(Table::default()) as Arc<dyn Directory>);

    assert_eq!(refused.err().map(|error| error.code), Some(Code::Conflict));
    assert!(place.is_mounted());
    assert!(!place.keeper().exists());
}

#[test]
fn no_keeper_no_mount() {
    if lacking(NEEDS) {
        return;
    }
    let place = Place::new();
    let mut options = place.options();
    options.keeper_program.path = "/nonexistent".into();

    let refused = Front::start(&options, Arc::new(Table::default()) as Arc<dyn Directory>);

    assert!(refused.is_err());
    assert!(!place.is_mounted());
}

#[test]
fn a_file_where_the_mount_should_be_is_an_error() -> io::Result<()> {
    let place = Place::new();
    fs::write(place.mount(), b"")?;

    let refused = Front::start(&place.options(), Arc::new(Table::default()) as Arc<dyn Directory>);

    assert_eq!(refused.err().and_then(|error| error.source).and_then(|source| source.raw_os_error()), Some(20));
    Ok(())
}
