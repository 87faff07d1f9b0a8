//! The FUSE front end under the same tests as the ublk front end. Needs root and `/dev/fuse`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use storaged::device::{Device, Kind};
use storaged::directory::Directory;
use storaged::fuse::{Front, Options};
use storaged::keeper::Program;

mod shown;
use shown::{BLOCK, Bytes, Table};

const MIB: usize = 1 << 20;

struct Host {
    front: Option<Front>,
    table: Arc<Table>,
    _directory: tempfile::TempDir,
}

impl Host {
    /// Nothing, and a word about it, where this cannot be tested.
    fn start() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !PathBuf::from("/dev/fuse").exists() {
            eprintln!("skipped: needs root and /dev/fuse");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut options = Options::new(directory.path().join("mount"), directory.path().join("keeper"));
        options.keeper_program =
            Program { path: env!("CARGO_BIN_EXE_storaged").into(), arguments: vec!["keep".into()] };
        let table = Arc::new(Table::default());
        let (front, _) = Front::start(&options, Arc::clone(&table) as Arc<dyn Directory>).unwrap();
        Some(Self { front: Some(front), table, _directory: directory })
    }

    fn show(&self, number: u64, kind: Kind, bytes: Vec<u8>) -> (PathBuf, Arc<Bytes>) {
        let device = Bytes::new(kind, bytes);
        self.table.put(number, Arc::clone(&device) as Arc<dyn Device>);
        (self.front.as_ref().unwrap().path(kind, &number.to_string()), device)
    }

    fn disk(&self, number: u64) -> (PathBuf, Arc<Bytes>) {
        self.show(number, Kind::Disk, vec![0; 4 * MIB])
    }

    fn end(mut self) {
        self.front.take().unwrap().unmount().unwrap();
    }
}

impl Drop for Host {
    /// A test that fails leaves no mount that nobody serves.
    fn drop(&mut self) {
        if let Some(front) = self.front.take() {
            let _ = rustix::mount::unmount(front.mount_point(), rustix::mount::UnmountFlags::DETACH);
            front.stop(Duration::from_secs(1));
        }
    }
}

#[test]
fn a_disk_is_the_bytes_that_were_written() {
    let Some(host) = Host::start() else { return };
    let (path, device) = host.disk(2);
    for always_waits in [false, true] {
        device.always_waits.store(always_waits, SeqCst);
        shown::is_same_as_bytes_under_random_work(&path, &device, 300);
    }
    shown::nothing_is_beyond_the_end(&path, &device);
    host.end();
}

#[test]
fn flush_and_durable_writes_reach_the_device() {
    let Some(host) = Host::start() else { return };
    let (path, device) = host.disk(2);
    shown::flush_and_durable_writes_arrive(&path, &device);
    host.end();
}

#[test]
fn errors_reach_whoever_reads_and_writes() {
    let Some(host) = Host::start() else { return };
    let (path, device) = host.disk(2);
    shown::errors_arrive_and_pass(&path, &device);
    host.end();
}

#[test]
fn a_device_that_hangs_holds_up_no_other() {
    let Some(host) = Host::start() else { return };
    let (hung_path, hung) = host.disk(2);
    let (path, device) = host.disk(3);
    shown::a_hung_device_holds_up_no_other((&hung_path, &hung), (&path, &device));
    host.end();
}

#[test]
fn memory_is_never_changed() {
    let Some(host) = Host::start() else { return };
    let bytes: Vec<u8> = (0..MIB).map(|place| u8::try_from(place / BLOCK % 251).unwrap()).collect();
    let (path, device) = host.show(2, Kind::Memory, bytes);
    shown::memory_is_never_changed(&path, &device);
    host.end();
}
