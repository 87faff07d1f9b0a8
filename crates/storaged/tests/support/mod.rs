//! What the tests of the FUSE front end share: honest skips, devices that misbehave, a daemon that can be killed.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};

use storaged::device::{Answer, Device, DeviceId, Kind};
use storaged::directory::{Directory, Named};
use storaged::fuse::Options;
use storaged::keeper::{Keeper, Program};

/// Whether this machine lacks one of *capabilities*. Says so where output is not swallowed; a lack is a
/// failure where `AENV_REQUIRE` names it, as for the Python suites.
pub fn lacking(capabilities: &[&str]) -> bool {
    let required = std::env::var("AENV_REQUIRE").unwrap_or_default();
    let lacks: Vec<&str> = capabilities.iter().copied().filter(|capability| !has(capability)).collect();
    if let Some(lack) = lacks.iter().find(|lack| required.split(',').any(|name| name == **lack)) {
        panic!("AENV_REQUIRE names {lack}, and it is missing");
    }
    if !lacks.is_empty() {
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = writeln!(io::stderr(), "skipped: {test}: needs {}", lacks.join(", "));
    }
    !lacks.is_empty()
}

fn has(capability: &str) -> bool {
    match capability {
        "root" => rustix::process::geteuid().is_root(),
        "fuse" => fs::File::options().read(true).write(true).open("/dev/fuse").is_ok(),
        program => Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok(),
    }
}

/// A folder of the test's own, with whatever is mounted in it ended and its keeper let go when it goes.
pub struct Place(pub PathBuf);

impl Place {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("aenv-fuse-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("a folder");
        Self(path)
    }

    pub fn mount(&self) -> PathBuf {
        self.0.join("mnt")
    }

    pub fn keeper(&self) -> PathBuf {
        self.0.join("keeper")
    }

    pub fn options(&self) -> Options {
        let program = Program { path: program(), arguments: vec!["keep".into()] };
        Options { keeper_program: program, ..Options::new(self.mount(), self.keeper()) }
    }

    /// A file of *size* whose every byte depends on its place.
    pub fn file(&self, name: &str, size: usize) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, pattern(size)).expect("room");
        path
    }

    pub fn is_mounted(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("a table of mounts");
        let mount = self.mount();
        table.lines().any(|line| line.split(' ').nth(4) == mount.to_str())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        use rustix::mount::{UnmountFlags, unmount};
        let _ = unmount(self.mount(), UnmountFlags::FORCE);
        let _ = unmount(self.mount(), UnmountFlags::DETACH);
        if let Ok(Some(keeper)) = Keeper::connect(&self.keeper()) {
            let _ = keeper.drop_all();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|place| (place / 4096 * 31 + place % 251).to_le_bytes()[0]).collect()
}

/// The example that serves plain files. Cargo builds it for `cargo test`, and not for `cargo test --test NAME`.
pub fn program() -> PathBuf {
    let own = std::env::current_exe().expect("a path");
    let path = own.ancestors().nth(2).expect("target/debug").join("examples/fuse_plain");
    assert!(path.is_file(), "{} is not built: cargo build --examples", path.display());
    path
}

/// A daemon in a process of its own.
pub struct Daemon {
    pub child: Child,
    pub start: String,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    pub fn start(place: &Place, arguments: &[&str]) -> Self {
        let mut child = Command::new(program())
            .arg("serve")
            .args([place.mount(), place.keeper()])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a daemon");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut daemon = Self { child, start: String::new(), input, output };
        daemon.start = daemon.line();
        daemon
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").expect("a listener");
        self.line()
    }

    pub fn statistics(&mut self) -> serde_json::Value {
        serde_json::from_str(&self.ask("statistics")).expect("JSON")
    }

    pub fn kill(mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("its end");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A gate that opens once.
#[derive(Default)]
pub struct Gate(Mutex<bool>, Condvar);

impl Gate {
    pub fn open(&self) {
        *self.0.lock().expect("unpoisoned") = true;
        self.1.notify_all();
    }

    pub fn pass(&self) {
        let state = self.0.lock().expect("unpoisoned");
        drop(self.1.wait_while(state, |open| !*open).expect("unpoisoned"));
    }
}

/// Bytes in memory, and faults on demand.
pub struct Fake {
    pub kind: Kind,
    pub bytes: Mutex<Vec<u8>>,
    pub reads: AtomicU64,
    pub flushes: AtomicU64,
    pub durable: AtomicU64,
    /// Reads of it would wait, and do so at the gate.
    pub remote: Option<Arc<Gate>>,
    pub reached: Gate,
    /// What every call answers, if set.
    pub fault: Option<i32>,
}

impl Fake {
    pub fn new(kind: Kind, size: usize) -> Self {
        Self {
            kind,
            bytes: Mutex::new(pattern(size)),
            reads: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            remote: None,
            reached: Gate::default(),
            fault: None,
        }
    }

    fn fail(&self) -> io::Result<()> {
        self.fault.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
    }
}

impl Device for Fake {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn size_bytes(&self) -> u64 {
        self.bytes.lock().expect("unpoisoned").len() as u64
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.reached.open();
        if let Some(gate) = &self.remote {
            gate.pass();
        }
        self.fail()?;
        self.reads.fetch_add(1, Ordering::Relaxed);
        let start = usize::try_from(offset).expect("small");
        buf.copy_from_slice(&self.bytes.lock().expect("unpoisoned")[start..start + buf.len()]);
        Ok(())
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        if self.remote.is_some() { Ok(Answer::WouldWait) } else { self.read(buf, offset).map(|()| Answer::Done) }
    }

    fn write(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        self.fail()?;
        self.durable.fetch_add(u64::from(durable), Ordering::Relaxed);
        let start = usize::try_from(offset).expect("small");
        self.bytes.lock().expect("unpoisoned")[start..start + buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.fail()?;
        let range = usize::try_from(offset).expect("small")..usize::try_from(offset + length).expect("small");
        self.bytes.lock().expect("unpoisoned")[range].fill(0);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.fail()?;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A directory that tests change.
#[derive(Default)]
pub struct Table(RwLock<BTreeMap<DeviceId, (String, Arc<Fake>)>>);

pub fn id(number: u64) -> DeviceId {
    DeviceId(NonZeroU64::new(number).expect("not zero"))
}

impl Table {
    pub fn add(&self, number: u64, name: &str, device: Fake) -> Arc<Fake> {
        let device = Arc::new(device);
        self.0.write().expect("unpoisoned").insert(id(number), (name.into(), Arc::clone(&device)));
        device
    }

    pub fn remove(&self, number: u64) {
        self.0.write().expect("unpoisoned").remove(&id(number));
    }
}

impl Directory for Table {
    fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        let table = self.0.read().expect("unpoisoned");
        table.get(&id).map(|(_, device)| Arc::clone(device) as Arc<dyn Device>)
    }

    fn find(&self, kind: Kind, name: &str) -> Option<DeviceId> {
        let table = self.0.read().expect("unpoisoned");
        table.iter().find(|(_, (known, device))| known == name && device.kind == kind).map(|(id, _)| *id)
    }

    fn list(&self, kind: Kind, after: Option<DeviceId>, limit: usize) -> Vec<Named> {
        let table = self.0.read().expect("unpoisoned");
        let entries = table.iter().filter(|(id, (_, device))| Some(**id) > after && device.kind == kind);
        entries.take(limit).map(|(id, (name, _))| Named { id: *id, name: name.clone() }).collect()
    }
}

/// The number of the error that *result* is.
pub fn errno<T: Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("an error").raw_os_error().expect("of the system")
}

/// Numbers that are the same for the same *seed*.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

pub fn read_to_end(path: &Path) -> Vec<u8> {
    fs::read(path).expect("readable")
}
