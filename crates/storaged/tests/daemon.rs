//! The real binary, over its socket and through its mount, and what is left when it is killed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use serde_json::{Value, json};

const SIZE: u64 = 64 << 20;

/// Says what is missing, in a line that is counted, if these tests cannot run here.
fn cannot_run() -> bool {
    let root = rustix::process::geteuid().is_root();
    let fuse = Path::new("/dev/fuse").exists();
    if !root || !fuse {
        println!("SKIPPED: {}", if root { "no /dev/fuse" } else { "not root" });
    }
    !root || !fuse
}

struct Daemon {
    child: Child,
    place: PathBuf,
}

impl Daemon {
    fn start(place: &Path) -> Self {
        Self { child: spawn(place), place: place.to_owned() }
    }

    /// Kills it at this moment, and starts the next one.
    fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(&self.place);
    }

    fn client(&self) -> Client {
        let mut client = Client { stream: UnixStream::connect(self.place.join("socket")).unwrap(), next: 0 };
        assert!(client.fine("hello", json!({ "protocol": 1 }))["pid"].is_u64());
        client
    }

    /// Ends it as an operator would; nothing stays mounted, and nobody keeps a connection.
    fn end(mut self) {
        self.client().fine("shutdown", json!({}));
        assert!(self.child.wait().unwrap().success());
        assert!(!self.is_mounted());
        let keeper = UnixStream::connect(self.place.join("root/keeper.sock"));
        assert!(keeper.is_err());
    }

    fn is_mounted(&self) -> bool {
        let mount = self.place.join("root/mount");
        fs::read_to_string("/proc/mounts").unwrap().contains(&*mount.to_string_lossy())
    }
}

/// A test that failed leaves nothing mounted, and nobody who waits for a mount.
impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.is_mounted() {
            let _ = Command::new("umount").arg("--lazy").arg(self.place.join("root/mount")).status();
        }
    }
}

/// Waits until so many writes were acknowledged; a writer that failed ends all waiting.
fn wait_for(written: &AtomicU64, count: u64, failed: &AtomicBool) {
    while written.load(Ordering::Relaxed) < count && !failed.load(Ordering::Relaxed) {
        thread::yield_now();
    }
}

struct SaysIfItFails<'a>(&'a AtomicBool);

impl Drop for SaysIfItFails<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn spawn(place: &Path) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_storaged"))
        .args(["serve", "--root"])
        .arg(place.join("root"))
        .arg("--socket")
        .arg(place.join("socket"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It says so when it listens.
    let mut said = Vec::new();
    let stderr = child.stderr.as_mut().unwrap();
    let mut byte = [0];
    while !said.ends_with(b"\n") && stderr.read(&mut byte).unwrap() == 1 {
        said.push(byte[0]);
    }
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("serving"), "{said}");
    child
}

struct Client {
    stream: UnixStream,
    next: u64,
}

impl Client {
    fn call(&mut self, call: &str, arguments: Value) -> Value {
        self.next += 1;
        let mut frame = arguments;
        frame["id"] = json!(self.next);
        frame["call"] = json!(call);
        let bytes = frame.to_string().into_bytes();
        self.stream.write_all(&u32::try_from(bytes.len()).unwrap().to_be_bytes()).unwrap();
        self.stream.write_all(&bytes).unwrap();
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        self.stream.read_exact(&mut answer).unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["id"], json!(self.next));
        answer
    }

    fn fine(&mut self, call: &str, arguments: Value) -> Value {
        let mut answer = self.call(call, arguments);
        assert!(answer.get("ok").is_some(), "{call}: {answer}");
        answer["ok"].take()
    }

    fn path(&mut self, call: &str, arguments: Value) -> PathBuf {
        self.fine(call, arguments)["path"].as_str().unwrap().into()
    }
}

fn empty(size_bytes: u64) -> Value {
    json!({ "layers": [], "size_bytes": size_bytes })
}

fn run(program: &str, arguments: &[&str], path: &Path) {
    let output = Command::new(program).args(arguments).arg(path).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A number that looks random and is the same in every run.
fn mixed(seed: u64) -> u64 {
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
}

#[test]
fn a_file_system_lives_on_a_disk_through_seals_and_crashes() {
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(place.path());
    let mut client = daemon.client();
    let disk = client.path("create_disk", json!({ "owner": "box", "stack": empty(SIZE) }));
    run("mkfs.ext4", &["-q", "-F"], &disk);
    for _ in 0..3 {
        let sealed = client.fine("seal_disk", json!({ "owner": "box" }))["stack"].take();
        let clone = client.path("create_disk", json!({ "owner": "clone", "stack": sealed }));
        run("e2fsck", &["-f", "-n"], &clone);
        client.fine("remove", json!({ "owner": "clone" }));
        assert!(!clone.exists());
        daemon.restart();
        client = daemon.client();
        assert_eq!(client.path("open_disk", json!({ "owner": "box" })), disk);
        run("e2fsck", &["-f", "-n"], &disk);
        File::options().write(true).open(&disk).unwrap().write_all_at(&[0; 1024], 0).unwrap();
    }
    let memory = client.path("attach_memory", json!({ "owner": "box", "stack": empty(8192) }));
    assert_eq!(fs::read(memory).unwrap(), [0; 8192]);
    client.fine("remove", json!({ "owner": "box" }));
    daemon.end();
}

#[test]
fn what_was_acknowledged_survives_a_daemon_killed_while_it_writes() {
    const BLOCKS: u64 = 512;
    const WRITERS: u64 = 3;
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(place.path());
    let mut client = daemon.client();
    let path = client.path("create_disk", json!({ "owner": "box", "stack": empty(SIZE) }));
    // Of each block, the last version that was acknowledged. Blocks belong to one writer each.
    let versions: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    for round in 0..30_u64 {
        let stop = AtomicBool::new(false);
        let written = AtomicU64::new(0);
        thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (path, versions, stop, written) = (&path, &versions, &stop, &written);
                scope.spawn(move || {
                    let _failed = SaysIfItFails(stop);
                    let file = File::options().read(true).write(true).open(path).unwrap();
                    let mut seed = round << 32 | writer;
                    while !stop.load(Ordering::Relaxed) {
                        seed += WRITERS;
                        let block = mixed(seed) % (BLOCKS / WRITERS) * WRITERS + writer;
                        let version = versions[usize::try_from(block).unwrap()].load(Ordering::Relaxed) + 1;
                        let content = [version.to_le_bytes(), block.to_le_bytes()].concat().repeat(256);
                        // Far apart, so that most make a mapping of their own.
                        file.write_all_at(&content, block * 65536).unwrap();
                        if version % 8 == 0 {
                            file.sync_data().unwrap();
                        }
                        versions[usize::try_from(block).unwrap()].store(version, Ordering::Relaxed);
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let enough = 50 + mixed(round) % 300;
            wait_for(&written, enough, &stop);
            let sealing = round % 3 == 2;
            if sealing {
                // In the middle of a seal, or between two: whatever the moment is.
                let mut client = daemon.client();
                scope.spawn(move || {
                    let bytes = json!({ "id": 99, "call": "seal_disk", "owner": "box" }).to_string();
                    let frame = [&u32::try_from(bytes.len()).unwrap().to_be_bytes(), bytes.as_bytes()].concat();
                    let _ = client.stream.write_all(&frame);
                    let _ = client.stream.read(&mut [0; 4]);
                });
                wait_for(&written, written.load(Ordering::Relaxed) + mixed(round + 7) % 20, &stop);
            }
            daemon.restart();
            // Requests that were under way are done by the new one: the writers notice nothing.
            wait_for(&written, written.load(Ordering::Relaxed) + 20, &stop);
            stop.store(true, Ordering::Relaxed);
        });
        let file = File::open(&path).unwrap();
        for (block, version) in versions.iter().enumerate() {
            let mut content = vec![0xee; 4096];
            file.read_exact_at(&mut content, block as u64 * 65536).unwrap();
            let version = version.load(Ordering::Relaxed);
            let block = if version == 0 { 0 } else { block as u64 };
            let expected = [version.to_le_bytes(), block.to_le_bytes()].concat().repeat(256);
            assert!(content == expected, "round {round}, block {block}, version {version}: {:?}", &content[..16]);
        }
    }
    daemon.client().fine("remove", json!({ "owner": "box" }));
    daemon.end();
}

#[test]
fn a_second_daemon_is_refused_and_the_first_serves_on() {
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(place.path());
    let second = Command::new(env!("CARGO_BIN_EXE_storaged"))
        .args(["serve", "--root"])
        .arg(place.path().join("root"))
        .arg("--socket")
        .arg(place.path().join("socket"))
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(75));
    assert!(daemon.client().fine("owners", json!({}))["owners"].is_array());
    daemon.end();
}

#[test]
fn a_caller_that_misbehaves_loses_its_connection_and_nobody_else_does() {
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(place.path());
    let mut good = daemon.client();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0, 0, 2, b'{', b'}'], &[0, 0, 0, 1, 0xff], &[0xff; 64]] {
        let mut stream = UnixStream::connect(place.path().join("socket")).unwrap();
        stream.write_all(bytes).unwrap();
        // Closed, also by a reset where something was left unread.
        assert!(matches!(stream.read(&mut [0; 16]), Ok(0) | Err(_)), "{bytes:?}");
    }
    let mut hasty = Client { stream: UnixStream::connect(place.path().join("socket")).unwrap(), next: 0 };
    assert_eq!(hasty.call("owners", json!({}))["error"]["code"], json!("invalid"));
    assert_eq!(hasty.call("hello", json!({ "protocol": 2 }))["error"]["code"], json!("unsupported"));
    assert_eq!(good.call("open_disk", json!({ "owner": "x" }))["error"]["code"], json!("not_found"));
    assert_eq!(good.call("open_disk", json!({ "owner": "../x" }))["error"]["code"], json!("invalid"));
    let other = daemon.client();
    drop(other);
    assert!(good.fine("statistics", json!({}))["calls"]["open_disk"]["errors"].is_u64());
    daemon.end();
}

#[test]
fn wrong_arguments_are_told_from_failures() {
    let program = env!("CARGO_BIN_EXE_storaged");
    for arguments in [&["serve"][..], &["serve", "--root"], &["serve", "--what", "x"], &["dance"], &[]] {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

/// A process that maps a memory image privately, as a VMM does, and changes some of it.
struct Victim(Child);

const VICTIM: &str = "
import mmap, os, sys
size = os.stat(sys.argv[1]).st_size
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
for line in sys.stdin:
    page, value = map(int, line.split())
    memory[page * 4096:(page + 1) * 4096] = bytes([value]) * 4096
    print('done', flush=True)
";

impl Victim {
    fn start(image: &Path) -> Self {
        let mut python = Command::new("python3");
        python.args(["-c", VICTIM]).arg(image).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(python.spawn().unwrap())
    }

    fn write(&mut self, page: usize, value: u8) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{page} {value}").unwrap();
        let mut said = [0; 5];
        self.0.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        assert_eq!(&said, b"done\n");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn set(memory: &mut [u8], page: usize, value: u8) {
    memory[page * 4096..(page + 1) * 4096].fill(value);
}

#[test]
fn what_a_process_changed_becomes_a_layer_that_others_map() {
    const PAGES: usize = 64;
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(place.path());
    let mut client = daemon.client();
    let mut expected = vec![9; PAGES * 4096];
    let source = place.path().join("source");
    fs::write(&source, &expected).unwrap();
    let imported = client.fine("import", json!({ "source": source, "size_bytes": expected.len() }))["stack"].take();
    let mut stack = imported;
    for (round, compression) in ["none", "lz4", "zstd", "none"].into_iter().enumerate() {
        let image = client.path("attach_memory", json!({ "owner": "source", "stack": stack }));
        let mut victim = Victim::start(&image);
        for (page, value) in [(round, 1), (10 + round, 0), (20, u8::try_from(round).unwrap() + 40)] {
            victim.write(page, value);
            set(&mut expected, page, value);
        }
        let pid = victim.0.id();
        let arguments = json!({ "owner": "source", "pid": pid, "compression": compression });
        let captured = client.fine("capture_memory", arguments);
        assert_eq!(captured["captured_bytes"], json!(3 * 4096));
        drop(victim);
        client.fine("detach", json!({ "owner": "source" }));
        stack = captured["stack"].clone();
        let clone = client.path("attach_memory", json!({ "owner": "clone", "stack": stack }));
        assert!(fs::read(&clone).unwrap() == expected, "{compression}");
        client.fine("detach", json!({ "owner": "clone" }));
        assert!(File::open(&clone).is_err());
    }
    let flat = client.fine("flatten", json!({ "kind": "memory", "stack": stack }))["stack"].take();
    let image = client.path("attach_memory", json!({ "owner": "source", "stack": flat }));
    assert!(fs::read(&image).unwrap() == expected);
    let stranger = Victim::start(&place.path().join("root/VERSION"));
    let gone = json!({ "owner": "source", "pid": stranger.0.id(), "compression": "none" });
    assert_eq!(client.call("capture_memory", gone)["error"]["code"], json!("unavailable"));
    drop(stranger);
    client.fine("remove", json!({ "owner": "source" }));
    daemon.end();
}

#[test]
fn a_frozen_child_is_written_down_as_it_was_also_by_the_next_daemon() {
    const PAGES: usize = 64;
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(place.path());
    let mut client = daemon.client();
    let image = client.path("attach_memory", json!({ "owner": "source", "stack": empty((PAGES * 4096) as u64) }));
    let mut expected = vec![0; PAGES * 4096];
    let mut victim = Victim::start(&image);
    victim.write(3, 7);
    set(&mut expected, 3, 7);
    let froze = client.fine("freeze", json!({ "owner": "source", "pid": victim.0.id() }));
    assert_eq!(froze["dirty_bytes"], json!(4096));
    // The source goes on: what it writes now is not in the picture.
    victim.write(3, 8);
    victim.write(4, 9);
    daemon.restart();
    client = daemon.client();
    // A fork starts from the child before anything is written, and it may fork again.
    let frozen = froze["frozen"].clone();
    let fork = client.path("attach_frozen", json!({ "owner": "fork", "frozen": frozen }));
    assert_eq!(client.path("attach_frozen", json!({ "owner": "twin", "frozen": frozen })), fork);
    assert!(fs::read(&fork).unwrap() == expected);
    client.fine("thaw", json!({ "frozen": frozen }));
    daemon.restart();
    client = daemon.client();
    client.fine("detach", json!({ "owner": "twin" }));
    let mut forked = Victim::start(&fork);
    forked.write(9, 5);
    let arguments = json!({ "owner": "fork", "pid": forked.0.id(), "compression": "lz4" });
    let deeper = client.fine("capture_memory", arguments)["stack"].take();
    assert_eq!(deeper["layers"].as_array().unwrap().len(), 2);
    assert_eq!(client.fine("statistics", json!({}))["frozen"], json!(0), "it was thawed when it had gone over");
    assert!(fs::read(&fork).unwrap() == expected);
    let image = client.path("attach_memory", json!({ "owner": "deeper", "stack": deeper }));
    let mut with_fork = expected.clone();
    set(&mut with_fork, 9, 5);
    assert!(fs::read(image).unwrap() == with_fork);
    daemon.restart();
    client = daemon.client();
    assert!(fs::read(&fork).unwrap() == expected);
    drop(forked);
    for owner in ["fork", "deeper"] {
        client.fine("remove", json!({ "owner": owner }));
    }
    assert!(File::open(&fork).is_err());

    set(&mut expected, 3, 8);
    set(&mut expected, 4, 9);
    let froze = client.fine("freeze", json!({ "owner": "source", "pid": victim.0.id() }));
    let capture = json!({ "frozen": froze["frozen"], "compression": "none" });
    let captured = client.fine("capture_frozen", capture.clone());
    assert_eq!(client.fine("capture_frozen", capture.clone()), captured);
    let clone = client.path("attach_memory", json!({ "owner": "clone", "stack": captured["stack"] }));
    assert!(fs::read(&clone).unwrap() == expected);
    victim.write(5, 1);
    let thaw = json!({ "frozen": froze["frozen"] });
    client.fine("thaw", thaw.clone());
    assert_eq!(client.call("thaw", thaw)["error"]["code"], json!("not_found"));
    assert_eq!(client.call("capture_frozen", capture)["error"]["code"], json!("not_found"));
    assert_eq!(client.fine("statistics", json!({}))["frozen"], json!(0));
    // Whose process it was is removed, and with it what was frozen and that nothing needs.
    client.fine("freeze", json!({ "owner": "source", "pid": victim.0.id() }));
    assert_eq!(client.fine("statistics", json!({}))["frozen"], json!(1));
    drop(victim);
    for owner in ["source", "clone"] {
        client.fine("remove", json!({ "owner": owner }));
    }
    assert_eq!(client.fine("statistics", json!({}))["frozen"], json!(0));
    daemon.end();
}

/// How many pages of each file are in the page cache.
const CACHED: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    everything, found = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    if libc.syscall(451, file, ctypes.byref(everything), ctypes.byref(found), 0) != 0:
        sys.exit('no cachestat')
    print(found[0])
";

fn cached_pages(paths: &[&Path]) -> Option<Vec<u64>> {
    let output = Command::new("python3").args(["-c", CACHED]).args(paths).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| said.lines().map(|line| line.parse().unwrap()).collect())
}

#[test]
fn the_pages_of_an_image_are_in_the_page_cache_once_however_many_map_it() {
    const IMAGE: usize = 32 << 20;
    if cannot_run() {
        return;
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let daemon = Daemon::start(place.path());
    let mut client = daemon.client();
    let content: Vec<u8> = (0..IMAGE as u64 / 8).flat_map(|word| (mixed(word) | 1).to_le_bytes()).collect();
    let source = place.path().join("source");
    fs::write(&source, &content).unwrap();
    let stack = client.fine("import", json!({ "source": source, "size_bytes": IMAGE }))["stack"].take();
    let layer = place.path().join("root/layers").join(stack["layers"][0].as_str().unwrap());
    rustix::fs::fadvise(File::open(&layer).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut held = Vec::new();
    for clones in [1, 20] {
        let image = (0..clones)
            .map(|clone| {
                let owner = format!("clone-{clones}-{clone}");
                let image = client.path("attach_memory", json!({ "owner": owner, "stack": stack }));
                assert!(fs::read(&image).unwrap() == content);
                image
            })
            .last()
            .unwrap();
        let Some(pages) = cached_pages(&[&image, &layer]) else {
            println!("SKIPPED: no cachestat, Linux 6.5");
            return;
        };
        println!("{clones} clones: {} pages of the image, {} of the layer", pages[0], pages[1]);
        held.push(pages.iter().sum::<u64>());
    }
    assert!(held.iter().all(|pages| *pages <= IMAGE as u64 / 4096 * 11 / 10), "{held:?}");
    for clone in 0..20 {
        client.fine("remove", json!({ "owner": format!("clone-20-{clone}") }));
    }
    client.fine("remove", json!({ "owner": "clone-1-0" }));
    // Nobody has it, and the next one finds it as it was.
    let image = client.path("attach_memory", json!({ "owner": "late", "stack": stack }));
    let pages = cached_pages(&[&image]).unwrap();
    assert!(pages[0] >= IMAGE as u64 / 4096 * 9 / 10, "{pages:?}");
    client.fine("remove", json!({ "owner": "late" }));
    daemon.end();
}
