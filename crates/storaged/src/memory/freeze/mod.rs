//! A frozen copy-on-write child of a stopped VMM: a picture of its memory that is read at leisure.
//!
//! The VMM runs on as soon as there is one. What keeps it safe is in `sys::copy_code`: its
//! thread is sent through code that brings it back by itself, so that a tracer which dies at
//! any instant leaves it neither stopped, nor traced, nor with a changed register. A copy that
//! was not recorded yet ends by itself.
//!
//! One instant is not covered, and only for a VMM under a system call filter that ends it: the VMM's
//! thread has just seen a gate open and is interrupted before the system call that is its next instruction
//! but nine, and the tracer, which opened the gate within the last 10 microseconds, is killed before that
//! thread has its processor back. The helper dies with such a tracer, and its zombie and an unfinished
//! `MADV_DOFORK` may remain until the VMM ends.

mod entry;
mod facts;
mod place;
mod tracer;

use std::path::Path;
use std::time::{Duration, Instant};
use std::{io, thread};

use sys::copy_code::NAME_BYTES;

use super::capture::count_private;
use super::failure::about_process;
use super::maps::{Area, Image};
use super::process::{Identity, Process};
use crate::error::{Code, Error};
pub use tracer::Step;

/// How often a thread that was at a bad place is looked at again.
const ATTEMPTS: u32 = 100;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(2);

/// What freezing may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Anonymous memory of the VMM: the most that copies can come to, if guest and child part in every page.
    pub most_anonymous_bytes: u64,
    /// For all of it. The VMM is let go of when it has passed.
    pub timeout: Duration,
}

#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub pid: i32,
    pub image: &'a Image,
    /// What the child is called, 15 bytes at most; [`find_named`] finds it by that.
    pub name: &'a str,
    pub limits: Limits,
}

/// A frozen child. It lives until [`Frozen::thaw`], whatever becomes of VMM and daemon.
pub struct Frozen {
    process: Process,
    image: Image,
    areas: Vec<Area>,
}

/// Makes a frozen child of the process, which goes on when this returns, if it does not before.
///
/// *record* is given the child's identity while it still ends by itself if we do; after that it
/// lives on, and only the record knows it.
///
/// # Errors
/// The process is as it was, and there is no child. `unsupported` where this cannot be done, `exhausted` above the
/// limit, `unavailable` if the process ended or could not be stopped in time: stop-and-copy is the way then.
/// `conflict` if somebody else traces it. An error of *record* is passed on.
pub fn freeze(
    request: &Request<'_>,
    record: impl FnOnce(Identity) -> Result<(), Error> + Send,
) -> Result<Frozen, Error> {
    freeze_observed(request, record, &|_| ())
}

/// As [`freeze`]; *reached* is told of each step of the tracer, so that a test can end it there.
///
/// # Errors
/// As [`freeze`].
pub fn freeze_observed(
    request: &Request<'_>,
    record: impl FnOnce(Identity) -> Result<(), Error> + Send,
    reached: &(dyn Fn(Step) + Sync),
) -> Result<Frozen, Error> {
    let deadline = Instant::now() + request.limits.timeout;
    let name = name_bytes(request.name)?;
    let process = Process::open(request.pid)?;
    let areas = process.areas(request.image)?;
    let status = facts::read_status(&process)?;
    if status.anonymous_bytes > request.limits.most_anonymous_bytes {
        return Err(Error::new(
            Code::Exhausted,
            format!(
                "a frozen copy may come to {} bytes of memory, and {} are allowed",
                status.anonymous_bytes, request.limits.most_anonymous_bytes
            ),
        ));
    }
    let unforked = facts::find_unforked(&process, &areas)?;
    let target =
        tracer::Target { process: &process, is_filtered: status.is_filtered, unforked, name, deadline, reached };
    // A tracer is a thread, and what it traces is let go of when it ends, in whatever way.
    let frozen = thread::scope(|scope| {
        let tracing = move || {
            let keep = |child: Process| {
                let frozen =
                    Frozen { areas: child.areas(request.image)?, image: request.image.clone(), process: child };
                // A mapping that takes no part in forks would be missing.
                if frozen.areas != areas {
                    return Err(Error::new(Code::Unsupported, "the process keeps guest memory out of its forks"));
                }
                record(frozen.identity())?;
                Ok(frozen)
            };
            let mut attempt = 1;
            loop {
                match tracer::attempt(&target) {
                    Ok(held) => return tracer::finish(&target, &held, keep),
                    Err(tracer::Failure::Again(_)) if attempt < ATTEMPTS && Instant::now() < deadline => {
                        attempt += 1;
                        thread::sleep(BETWEEN_ATTEMPTS);
                    }
                    Err(failure) => return Err(failure.into_error()),
                }
            }
        };
        let thread = thread::Builder::new().name("freeze".into()).spawn_scoped(scope, tracing);
        let thread = thread.map_err(|source| Error::new(Code::Exhausted, format!("no thread: {source}")))?;
        thread.join().unwrap_or_else(|_| Err(Error::new(Code::Bug, "the tracer panicked")))
    })?;
    Ok(frozen)
}

impl Frozen {
    /// Finds again a child that an earlier daemon recorded.
    ///
    /// # Errors
    /// `unavailable` if it is gone.
    pub fn adopt(identity: Identity, image: &Image) -> Result<Self, Error> {
        let process = Process::open_identity(identity)?;
        let areas = process.areas(image)?;
        Ok(Self { process, image: image.clone(), areas })
    }

    pub fn identity(&self) -> Identity {
        self.process.identity()
    }

    /// For a capture: the child maps the image as the VMM did.
    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn image(&self) -> &Image {
        &self.image
    }

    pub(super) fn areas(&self) -> &[Area] {
        &self.areas
    }

    /// What a capture will read.
    ///
    /// # Errors
    /// `unavailable` if the child is gone.
    pub fn dirty_bytes(&self) -> Result<u64, Error> {
        count_private(&self.process, &self.areas)
    }

    /// What the child costs by now: pages that nobody shares with it any more.
    ///
    /// # Errors
    /// `unavailable` if the child is gone.
    pub fn private_copies_bytes(&self) -> Result<u64, Error> {
        let rollup = self.process.read_proc("smaps_rollup")?;
        let rollup = String::from_utf8_lossy(&rollup);
        let kib = |name: &str| {
            let value = rollup.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        Ok((kib("Private_Dirty:") + kib("Private_Clean:")) * 1024)
    }

    /// Ends the child, and returns when its memory is gone or *timeout* has passed.
    ///
    /// # Errors
    /// `unavailable` if it has not ended in time; it will.
    pub fn thaw(self, timeout: Duration) -> Result<(), Error> {
        end(&self.process, timeout)
    }
}

/// Ends a recorded child that nobody needs, if it still exists.
///
/// # Errors
/// As [`Frozen::thaw`].
pub fn end_recorded(identity: Identity, timeout: Duration) -> Result<(), Error> {
    match Process::open_identity(identity) {
        Ok(process) => end(&process, timeout),
        Err(failure) if failure.code == Code::Unavailable => Ok(()),
        Err(failure) => Err(failure),
    }
}

fn end(process: &Process, timeout: Duration) -> Result<(), Error> {
    process.kill();
    if !process.wait_end(u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX))? {
        return Err(Error::new(Code::Unavailable, format!("frozen child {} does not end", process.pid())));
    }
    Ok(())
}

/// Frozen children of that name. One that no record knows is left from a daemon that was killed in between.
///
/// # Errors
/// When /proc cannot be read.
pub fn find_named(name: &str) -> Result<Vec<Identity>, Error> {
    let failed = |source: io::Error| about_process(0, source);
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").map_err(failed)? {
        let Some(pid) = entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let comm = std::fs::read(Path::new("/proc").join(pid.to_string()).join("comm")).unwrap_or_default();
        if comm.trim_ascii_end() == name.as_bytes() {
            // One that ends meanwhile is not there to be found.
            found.extend(Process::open(pid).map(|process| process.identity()));
        }
    }
    Ok(found)
}

fn name_bytes(name: &str) -> Result<[u8; NAME_BYTES], Error> {
    let mut bytes = [0; NAME_BYTES];
    if name.is_empty() || name.len() >= NAME_BYTES || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::new(Code::Invalid, format!("{name:?} cannot be the name of a process")));
    }
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Ok(bytes)
}
