//! A process to be captured and frozen: `victim.c`, built here, which checks itself.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use storaged::memory::maps::{Backing, Image};

/// Where tests put what they need; it is theirs alone and goes with the build.
pub(crate) fn scratch() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// The program, linked statically or not; `None`, with a printed reason, where it cannot be built.
fn program(is_static: bool) -> Option<&'static Path> {
    static BUILT: [OnceLock<Option<PathBuf>>; 2] = [OnceLock::new(), OnceLock::new()];
    let build = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/victim/victim.c");
        // Built beside and renamed: the binaries of other tests may be doing the same.
        let made = scratch().join(format!("victim-{}-{is_static}", std::process::id()));
        let target = scratch().join(format!("victim-{is_static}"));
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-pthread"]).args(is_static.then_some("-static")).arg("-o").arg(&made).arg(&source);
        match cc.status() {
            Ok(status) if status.success() && std::fs::rename(&made, &target).is_ok() => Some(target),
            _ => {
                eprintln!("SKIPPED: no C compiler, so nothing to freeze");
                None
            }
        }
    };
    BUILT[usize::from(is_static)].get_or_init(build).as_deref()
}

pub(crate) struct Victim {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    path: PathBuf,
    pub(crate) image: Image,
    /// Where it has the image.
    pub(crate) address: u64,
}

pub(crate) const SIZE_MIB: u64 = 64;
pub(crate) const DIRTY_MIB: u64 = 16;

impl Victim {
    /// Starts one that does *what*. `None` where there is no compiler, or no such system call.
    pub(crate) fn start(what: &str, options: &[&str]) -> Option<Self> {
        Self::start_sized(SIZE_MIB, DIRTY_MIB, what, options)
    }

    pub(crate) fn start_sized(size_mib: u64, dirty_mib: u64, what: &str, options: &[&str]) -> Option<Self> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let program = program(options.contains(&"static"))?;
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = scratch().join(format!("image-{}-{number}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(size_mib << 20).unwrap();
        let mut command = Command::new(program);
        command.arg(&path).args([size_mib.to_string(), dirty_mib.to_string(), what.into()]).args(options);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let image = Image { backing: Backing::Path(path.clone()), size_bytes: size_mib << 20 };
        let address = line.strip_prefix("ready ").map(|rest| rest.split(' ').next().unwrap_or_default());
        let address = address.map(|address| u64::from_str_radix(address, 16).unwrap());
        let victim = Self { child, stdin, stdout, path, image, address: address.unwrap_or(0) };
        if line.starts_with("skip") {
            eprintln!("SKIPPED: {line}");
            return None;
        }
        assert!(line.starts_with("ready"), "{line}");
        Some(victim)
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// One line of its status file.
    pub(crate) fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_default().trim().to_owned()
    }

    /// Whether guest memory takes part in forks.
    pub(crate) fn is_unforked(&self) -> bool {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let name = self.path.to_str().unwrap();
        let of_image = smaps.split("VmFlags:").zip(smaps.split("VmFlags:").skip(1));
        of_image
            .filter(|(before, _)| before.contains(name))
            .all(|(_, after)| after.lines().next().unwrap().contains(" dc"))
    }

    pub(crate) fn is_child_free(&self) -> bool {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).unwrap();
        children.trim().is_empty()
    }

    pub(crate) fn kill(&mut self) {
        // A tracer that is a thread of its parent has collected it, if it ended while traced.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets it check itself and end. Panics with what it found wrong.
    pub(crate) fn finish(mut self) {
        drop(self.stdin.take());
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let status = self.child.wait().unwrap();
        assert!(line.starts_with("ok ") && status.success(), "{line:?}, {status}");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let mut words = String::new();
            let _ = std::io::Read::read_to_string(&mut self.stdout, &mut words);
            eprintln!("the victim said {words:?}");
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
