//! Figures for freeze and capture, beside their limit: `memory_bench PID IMAGE SIZE_BYTES OUT FREEZES CAPTURES`.
//!
//! PID maps IMAGE privately and has changed some of it. Prints how long freezing took, and how long writing what it has
//! changed to OUT took beside a plain copy of as many bytes to the same file system, both durable, alternating.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use storaged::memory::capture::{Extent, LayerSink, capture};
use storaged::memory::freeze::{self, Limits, Request};
use storaged::memory::maps::{Backing, Image};
use storaged::memory::process::Process;

/// Appends data to a file and forgets what it was.
struct Appended {
    file: File,
    at: u64,
    direct: bool,
}

impl Appended {
    fn create(path: &str, direct: bool) -> io::Result<Self> {
        let _ = std::fs::remove_file(path);
        let flags = if direct { rustix::fs::OFlags::DIRECT.bits() } else { 0 };
        let file =
            File::options().write(true).create_new(true).custom_flags(i32::try_from(flags).unwrap_or(0)).open(path)?;
        Ok(Self { file, at: 0, direct })
    }
}

impl LayerSink for Appended {
    fn reserve(&mut self, data_bytes: u64) -> io::Result<()> {
        if data_bytes > 0 {
            rustix::fs::fallocate(self.file.as_fd(), rustix::fs::FallocateFlags::KEEP_SIZE, 0, data_bytes)?;
        }
        Ok(())
    }

    fn append(&mut self, _: &[Extent], data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.at)?;
        let from = self.at;
        self.at += data.len() as u64;
        if !self.direct && !data.is_empty() {
            sys::writeback::start(self.file.as_fd(), from, data.len() as u64)?;
        }
        Ok(())
    }
}

fn show(what: &str, mut ms: Vec<f64>) {
    ms.sort_by(f64::total_cmp);
    let at = |part: usize| ms[(ms.len() * part / 100).min(ms.len() - 1)];
    println!("{what}: n={} p50={:.1} p95={:.1} p99={:.1} max={:.1} ms", ms.len(), at(50), at(95), at(99), at(100));
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// What `cp` does with a file in the page cache, and the wait until it is durable.
fn plain_copy(from: &str, to: &str) -> io::Result<()> {
    let _ = std::fs::remove_file(to);
    let mut target = File::create(to)?;
    io::copy(&mut File::open(from)?, &mut target)?;
    target.flush()?;
    target.sync_data()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [pid, path, size, out, freezes, captures] = arguments.as_slice() else {
        return Err("usage: memory_bench PID IMAGE SIZE_BYTES OUT FREEZES CAPTURES".into());
    };
    let (pid, captures) = (pid.parse::<i32>()?, captures.parse::<usize>()?);
    let image = Image { backing: Backing::Path(path.into()), size_bytes: size.parse()? };
    let limits = Limits { most_anonymous_bytes: u64::MAX, timeout: Duration::from_secs(30) };
    let mut times = Vec::new();
    for _ in 0..freezes.parse::<usize>()? {
        let since = Instant::now();
        let request = Request { pid, image: &image, name: "bench", limits };
        let frozen = freeze::freeze(&request, |_| Ok(()))?;
        times.push(ms(since));
        frozen.thaw(Duration::from_secs(30))?;
    }
    if !times.is_empty() {
        show("freeze, call to return", times);
    }
    let process = Process::open(pid)?;
    let (mut direct, mut buffered, mut plain, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let copy = format!("{out}.copy");
    for _ in 0..captures {
        for (is_direct, times) in [(false, &mut buffered), (true, &mut direct)] {
            let since = Instant::now();
            let mut sink = Appended::create(out, is_direct)?;
            bytes = capture(&process, &image, &mut sink, &AtomicBool::new(false))?.data_bytes;
            sink.file.set_len(sink.at)?;
            sink.file.sync_data()?;
            times.push(ms(since));
        }
        let _ = std::fs::read(out)?; // into the page cache
        let since = Instant::now();
        plain_copy(out, &copy)?;
        plain.push(ms(since));
    }
    if captures > 0 {
        println!("data: {} MiB", bytes >> 20);
        show("capture, through the page cache", buffered);
        show("capture, direct", direct);
        show("plain copy of a cached file", plain);
        std::fs::remove_file(out)?;
        std::fs::remove_file(copy)?;
    }
    Ok(())
}
