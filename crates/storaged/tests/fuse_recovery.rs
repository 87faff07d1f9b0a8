//! The daemon, its keeper or both are killed: no byte that was acknowledged is lost, and nothing hangs.

mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use storaged::device::Kind;
use storaged::directory::Directory;
use storaged::fuse::{Front, Start};
use storaged::keeper::Keeper;

use support::{Daemon, Fake, Place, Random, Table, errno, lacking, pattern, read_to_end};

const ROUNDS: u64 = 30;

/// The keepers that *daemon* has started and that live.
fn keepers_of(daemon: &Daemon) -> Vec<Pid> {
    let parent = daemon.child.id().to_string();
    let processes = std::fs::read_dir("/proc").expect("processes");
    let is_keeper = |number: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        // After the name, which may contain anything: the state and the parent.
        let fields: Vec<&str> = status.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.get(1) == Some(&parent.as_str()) && fields[0] != "Z"
    };
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.filter(is_keeper).filter_map(Pid::from_raw).collect()
}

/// What files of a connection that has ended answer.
fn assert_dead(number: i32) {
    assert!([Errno::NOTCONN, Errno::CONNABORTED].iter().any(|errno| errno.raw_os_error() == number), "{number}");
}

fn fio(file: &Path, arguments: &[&str]) -> Child {
    Command::new("fio")
        .args(["--name=x", "--verify_fatal=1", "--allow_file_create=0", "--output-format=terse"])
        .arg(format!("--filename={}", file.display()))
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .current_dir("/tmp")
        .spawn()
        .expect("fio")
}

#[test]
fn a_daemon_killed_under_load_loses_nothing() {
    if lacking(&["root", "fuse", "fio"]) {
        return;
    }
    let place = Place::new();
    let disk = format!("disk:a={}", place.file("disk", 16 << 20).display());
    let memory_file = place.0.join("memory");
    File::create(&memory_file).and_then(|file| file.set_len(16 << 20)).expect("room");
    let numbered = ["--size=16M", "--bs=4k", "--verify=pattern", "--verify_pattern=%o"];
    let filled = fio(&memory_file, &[&numbered[..], &["--rw=write", "--do_verify=0"]].concat()).wait();
    assert!(filled.expect("fio").success());
    let memory = format!("memory:m={}", memory_file.display());
    let arguments = [disk.as_str(), memory.as_str()];
    let mut daemon = Daemon::start(&place, &arguments);
    let (mut kills, mut resent) = (0, 0);

    for round in 0..ROUNDS {
        let mut random = Random(round);
        let seed = format!("--randseed={round}");
        let load = [
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--size=16M",
            "--ioengine=libaio",
            "--direct=1",
            "--iodepth=16",
            "--verify=crc32c",
            "--verify_backlog=64",
            "--fsync=100",
            &seed,
        ];
        let mut writer = fio(&place.mount().join("disks/a"), &load);
        let faults = [&numbered[..], &["--rw=randread", "--ioengine=mmap", &seed]].concat();
        let mut reader = fio(&place.mount().join("memory/m"), &faults);

        // Kills at amounts of work that the seed chooses, until both are done.
        let mut target = random.below(300);
        let (wrote, read) = loop {
            if let (Some(wrote), Some(read)) =
                (writer.try_wait().expect("a process"), reader.try_wait().expect("a process"))
            {
                break (wrote, read);
            }
            let work = daemon.statistics();
            let done = ["reads", "writes"].iter().filter_map(|kind| work[*kind]["requests"].as_u64()).sum::<u64>();
            if done >= target {
                resent += work["resent"].as_u64().expect("a number");
                daemon.kill();
                daemon = Daemon::start(&place, &arguments);
                assert_eq!(daemon.start, "ready TakenOver");
                kills += 1;
                target = 50 + random.below(1000);
            }
        };

        assert!(wrote.success(), "round {round}: written bytes were lost");
        assert!(read.success(), "round {round}: mapped bytes were wrong");
        assert_eq!(read_to_end(&place.mount().join("disks/a")), read_to_end(&place.0.join("disk")), "round {round}");
        // Pages of the image leave the cache, so that the next round faults again.
        let mapped = File::open(place.mount().join("memory/m")).expect("a file");
        rustix::fs::fadvise(&mapped, 0, None, rustix::fs::Advice::DontNeed).expect("advised");
    }

    resent += daemon.statistics()["resent"].as_u64().expect("a number");
    assert!(kills >= ROUNDS, "only {kills} kills: the load is over too soon");
    assert!(resent > 0, "nothing was in flight in {kills} kills");
    assert_eq!(daemon.ask("unmount"), "unmounted");
    assert!(!place.is_mounted());
}

#[test]
fn a_keeper_that_is_killed_is_replaced() {
    if lacking(&["root", "fuse"]) {
        return;
    }
    let place = Place::new();
    let disk = format!("disk:a={}", place.file("disk", 1 << 20).display());
    let mut daemon = Daemon::start(&place, &[&disk]);
    let file = File::open(place.mount().join("disks/a")).expect("a file");
    for round in 1..=5 {
        let [keeper] = keepers_of(&daemon)[..] else { panic!("not one keeper") };
        kill_process(keeper, Signal::KILL).expect("a process");
        while daemon.statistics()["keepers_lost"] != round || !holds(&place) {
            std::thread::yield_now();
        }
    }

    daemon.kill();
    let daemon = Daemon::start(&place, &[&disk]);

    assert_eq!(daemon.start, "ready TakenOver");
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 0).expect("readable");
    assert_eq!(bytes, pattern(1 << 20));
}

fn holds(place: &Place) -> bool {
    matches!(Keeper::connect(&place.keeper()), Ok(Some(keeper)) if matches!(keeper.take(), Ok(Some(_))))
}

#[test]
fn without_daemon_and_keeper_the_mount_is_made_anew_and_old_files_fail() {
    if lacking(&["root", "fuse"]) {
        return;
    }
    let place = Place::new();
    let disk = format!("disk:a={}", place.file("disk", 1 << 20).display());
    let daemon = Daemon::start(&place, &[&disk]);
    let file = File::open(place.mount().join("disks/a")).expect("a file");
    let [keeper] = keepers_of(&daemon)[..] else { panic!("not one keeper") };
    // Stopped first, so that it cannot make a new keeper.
    kill_process(Pid::from_child(&daemon.child), Signal::STOP).expect("a process");
    kill_process(keeper, Signal::KILL).expect("a process");
    daemon.kill();

    assert_dead(errno(file.read_at(&mut [0; 512], 0)));
    let mut daemon = Daemon::start(&place, &[&disk]);

    assert_eq!(daemon.start, "ready Replaced");
    assert_dead(errno(file.read_at(&mut [0; 512], 0)));
    assert_eq!(read_to_end(&place.mount().join("disks/a")), pattern(1 << 20));
    assert_eq!(daemon.ask("unmount"), "unmounted");
    assert!(!place.is_mounted());
}

#[test]
fn where_nothing_is_sent_again_requests_in_flight_fail_and_do_not_hang() {
    if lacking(&["root", "fuse"]) {
        return;
    }
    let place = Place::new();
    let table = Arc::new(Table::default());
    let gate = Arc::new(support::Gate::default());
    let stalled = Fake { remote: Some(Arc::clone(&gate)), ..Fake::new(Kind::Disk, 1 << 20) };
    let stalled = table.add(1, "a", stalled);
    let directory = || Arc::clone(&table) as Arc<dyn Directory>;
    let (first, _) = Front::start(&place.options(), directory()).expect("a front end");
    let path = first.path(Kind::Disk, "a");
    let waiting = std::thread::spawn(move || File::open(path).and_then(|file| file.read_at(&mut [0; 512], 0)));
    stalled.reached.pass();
    assert!(!first.stop(std::time::Duration::ZERO));
    forget_that_requests_are_sent_again(&place);

    let (_second, start) = Front::start(&place.options(), directory()).expect("a front end");

    assert_eq!(start, Start::Replaced);
    assert_dead(errno(waiting.join().expect("no panic")));
    gate.open();
}

/// Has the keeper tell the next daemon what it would have been told on a kernel before 6.9.
fn forget_that_requests_are_sent_again(place: &Place) {
    let keeper = Keeper::connect(&place.keeper()).expect("a socket").expect("a keeper");
    let kept = keeper.take().expect("an answer").expect("descriptors");
    let mut note: serde_json::Value = serde_json::from_str(&kept.note).expect("JSON");
    let flags = note["terms"]["flags"].as_u64().expect("a number");
    note["terms"]["flags"] = (flags & !(1 << 39)).into();
    let descriptors: Vec<_> = kept.descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
    keeper.give(&note.to_string(), &descriptors).expect("held");
}

#[test]
fn a_keeper_that_holds_nothing_ends_with_its_last_connection() {
    let place = Place::new();
    let keeper = Keeper::start(&place.keeper(), &place.options().keeper_program).expect("a keeper");
    assert!(keeper.take().expect("an answer").is_none());

    keeper.hang_up();
    keeper.reap();

    assert!(Keeper::connect(&place.keeper()).expect("an answer").is_none());
}

#[test]
fn a_keeper_of_a_connection_that_was_ended_behind_its_back_ends() {
    if lacking(&["root", "fuse"]) {
        return;
    }
    let place = Place::new();
    let daemon = Daemon::start(&place, &[]);
    daemon.kill();

    rustix::mount::unmount(place.mount(), rustix::mount::UnmountFlags::DETACH).expect("unmounted");

    while Keeper::connect(&place.keeper()).expect("an answer").is_some() {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

#[test]
fn what_a_keeper_is_given_outlives_the_giver() {
    let place = Place::new();
    let path = place.file("kept", 100);
    let keeper = Keeper::start(&place.keeper(), &place.options().keeper_program).expect("a keeper");
    let file = File::open(&path).expect("a file");
    keeper.give("a note", &[std::os::fd::AsFd::as_fd(&file)]).expect("held");
    std::fs::remove_file(&path).expect("removed");
    drop((file, keeper));

    let keeper = Keeper::connect(&place.keeper()).expect("a socket").expect("a keeper");
    let mut kept = keeper.take().expect("an answer").expect("descriptors");

    assert_eq!(kept.note, "a note");
    let file = File::from(kept.descriptors.pop().expect("a descriptor"));
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, 0).expect("readable");
    assert_eq!(bytes[..], pattern(100));
    keeper.drop_all().expect("an answer");
}
