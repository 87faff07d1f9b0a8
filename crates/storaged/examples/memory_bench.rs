//! Figures for freeze and capture, beside their limit: `memory_bench PID IMAGE SIZE_BYTES OUT FREEZES CAPTURES`.
//!
//! PID maps IMAGE privately and has changed some of it. Prints how long freezing took, and how long writing what it has
//! changed to OUT took beside a plain copy of as many bytes to the same file system, both durable, alternating.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use storaged::memory::freeze::{self, Limits, Request, Step};
use storaged::memory::layer::capture_layer;
use storaged::memory::maps::{Backing, Image};
use storaged::memory::process::Process;

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
    let (mut all, mut seized, mut freed) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..freezes.parse::<usize>()? {
        let (since, at) = (Instant::now(), Mutex::new((0.0, 0.0)));
        let request = Request { pid, image: &image, name: "bench", limits };
        let reached = |step: Step| {
            let mut at = at.lock().unwrap_or_else(PoisonError::into_inner);
            match step {
                Step::Seized => at.0 = ms(since),
                Step::ThreadFree => at.1 = ms(since),
                _ => {}
            }
        };
        let frozen = freeze::freeze_observed(&request, |_| Ok(()), &reached)?;
        all.push(ms(since));
        let (begun, ended) = at.into_inner().unwrap_or_else(PoisonError::into_inner);
        seized.push(begun);
        freed.push(ended);
        frozen.thaw(Duration::from_secs(30))?;
    }
    if !all.is_empty() {
        show("freeze, call to return", all);
        show("  until a thread is seized", seized);
        show("  until it is free again", freed);
    }
    let process = Process::open(pid)?;
    let (mut layer, mut plain, mut bytes) = (Vec::new(), Vec::new(), 0);
    let copy = format!("{out}.copy");
    for _ in 0..captures {
        let _ = std::fs::remove_file(out);
        let since = Instant::now();
        let file = File::options().read(true).write(true).create_new(true).open(out)?;
        let identity = layers::Identity::new(image.size_bytes);
        bytes = capture_layer(&process, &image, &file, identity, &AtomicBool::new(false))?.data_bytes;
        layer.push(ms(since));
        let _ = std::fs::read(out)?; // into the page cache
        let since = Instant::now();
        plain_copy(out, &copy)?;
        plain.push(ms(since));
    }
    if captures > 0 {
        println!("data: {} MiB", bytes >> 20);
        show("capture to a layer", layer);
        show("plain copy of a cached file", plain);
        std::fs::remove_file(out)?;
        std::fs::remove_file(copy)?;
    }
    Ok(())
}
