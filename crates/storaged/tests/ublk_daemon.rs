//! The real daemon with disks as block devices: `make lab` runs this in the lab host.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

const MIB: usize = 1 << 20;

struct Daemon {
    child: Child,
    socket: UnixStream,
}

/// Beside this program in the lab host, else where cargo has put it.
fn program() -> PathBuf {
    let beside = std::env::current_exe().unwrap().with_file_name("storaged");
    if beside.exists() { beside } else { env!("CARGO_BIN_EXE_storaged").into() }
}

impl Daemon {
    fn start(root: &Path) -> Self {
        let socket = root.join("socket");
        let mut child = Command::new(program())
            .args(["serve", "--disks", "ublk", "--root"])
            .arg(root)
            .arg("--socket")
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "serving\n");
        let mut daemon = Self { child, socket: UnixStream::connect(socket).unwrap() };
        let greeting = daemon.ask(json!({"call": "hello", "protocol": 1}));
        assert_eq!(greeting["ok"]["front_ends"], json!(["fuse", "ublk"]));
        daemon
    }

    fn ask(&mut self, mut call: Value) -> Value {
        call["id"] = json!(1);
        let bytes = serde_json::to_vec(&call).unwrap();
        self.socket.write_all(&u32::try_from(bytes.len()).unwrap().to_be_bytes()).unwrap();
        self.socket.write_all(&bytes).unwrap();
        let mut length = [0; 4];
        self.socket.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        self.socket.read_exact(&mut bytes).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    fn path(&mut self, call: Value) -> PathBuf {
        let answer = self.ask(call);
        answer["ok"]["path"].as_str().unwrap_or_else(|| panic!("{answer}")).into()
    }
}

fn devices() -> usize {
    fs::read_dir("/sys/class/ublk-char").map_or(0, Iterator::count)
}

fn write(path: &Path, value: u8, place: usize) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    file.write_all_at(&vec![value; MIB], (place * MIB) as u64).unwrap();
    file.sync_all().unwrap();
}

fn check(path: &Path, values: &[u8]) {
    let file = fs::File::open(path).unwrap();
    for (place, value) in values.iter().enumerate() {
        let mut bytes = vec![1; MIB];
        file.read_exact_at(&mut bytes, (place * MIB) as u64).unwrap();
        assert!(bytes == vec![*value; MIB], "{value}");
    }
}

#[test]
#[ignore = "needs ublk: make lab"]
fn disks_are_block_devices_that_survive_seals_kills_and_detaching() {
    let root = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(root.path());
    let stack = json!({"layers": [], "size_bytes": 64 * MIB});
    let path = daemon.path(json!({"call": "create_disk", "owner": "a", "stack": stack}));
    assert!(path.starts_with("/dev"), "{}", path.display());
    write(&path, 3, 0);
    let sealed = daemon.ask(json!({"call": "seal_disk", "owner": "a"}));
    assert_eq!(sealed["ok"]["stack"]["layers"].as_array().unwrap().len(), 1);
    write(&path, 4, 1);
    let held_open = fs::File::open(&path).unwrap();

    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    let mut daemon = Daemon::start(root.path());

    check(&path, &[3, 4, 0]);
    let mut bytes = vec![0; MIB];
    held_open.read_exact_at(&mut bytes, MIB as u64).unwrap();
    assert!(bytes == vec![4; MIB]);
    drop(held_open);
    assert_eq!(daemon.path(json!({"call": "open_disk", "owner": "a"})), path);
    assert_eq!(daemon.ask(json!({"call": "detach", "owner": "a"}))["ok"], json!({}));
    assert_eq!(devices(), 0);
    assert_eq!(daemon.path(json!({"call": "resize_disk", "owner": "a", "size_bytes": 65 * MIB})), path);
    check(&path, &[3, 4, 0]);
    assert_eq!(fs::File::open(&path).unwrap().metadata().map(|_| devices()).unwrap(), 1);
    assert_eq!(daemon.ask(json!({"call": "statistics"}))["ok"]["ublk"]["devices"], json!(1));
    assert_eq!(daemon.ask(json!({"call": "remove", "owner": "a"}))["ok"], json!({}));
    assert_eq!(devices(), 0);
    assert_eq!(daemon.ask(json!({"call": "shutdown"}))["ok"], json!({}));
    assert!(daemon.child.wait().unwrap().success());
}
