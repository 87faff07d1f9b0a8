//! Images as block devices, `/dev/ublkbN`, through the kernel's ublk driver.
//!
//! The kernel keeps a device while nobody serves it, and its requests wait: a new daemon takes over what an
//! earlier one left, whatever ended that one, and serves again what was not answered. Which device is which
//! is written in the driver itself, so that nothing here can disagree with it; a device of this daemon's that stands
//! for nothing any more is deleted at start.
//!
//! A number is used again only after a million others: a path that somebody remembers does not soon mean another guest's disk.

mod abi;
mod control;
mod counters;
mod kernel;
mod line;
mod queue;
mod recovery;
mod shelf;
mod slots;
mod tag;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use self::control::{Control, block_path, tune};
pub use self::counters::Statistics;
use self::line::{Common, Line};
use self::slots::{Found, Serving, Slots};
use self::tag::Tag;
use crate::device::{Device, DeviceId, Kind};
use crate::directory::Directory;
use crate::error::{Code, Context, Error, Result};

/// How long requests under way may take when their device is detached, before they fail.
const DRAIN: Duration = Duration::from_secs(10);
/// How long somebody waits for another's attach or detach, or for a device to be taken over.
const TURN: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct Options {
    /// A file that tells this daemon's devices from others'. Made if it is not there; it has to be there again for a
    /// daemon that is to take over.
    pub tag: PathBuf,
    /// Devices at one time. Each takes a thread, three descriptors and about 100 KiB.
    pub max_devices: usize,
    /// Requests that a device has under way at one time.
    pub depth: u16,
}

impl Options {
    pub fn new(tag: PathBuf) -> Self {
        Self { tag, max_devices: 4096, depth: 128 }
    }
}

/// What was found when the front end started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Devices of an earlier daemon that go on. Each does so when the kernel is done with that daemon; until then
    /// its requests wait.
    pub taken_over: Vec<DeviceId>,
    /// Devices of an earlier daemon that stood for nothing, and were deleted.
    pub deleted: usize,
}

/// The devices, and the threads that serve them.
pub struct Front {
    inner: Arc<Inner>,
}

struct Inner {
    control: Control,
    common: Arc<Common>,
    tag: Tag,
    depth: u16,
    slots: Slots,
    stopping: AtomicBool,
    lost: AtomicU64,
}

/// Whether this kernel has a ublk that can be used.
///
/// # Errors
/// `unsupported`, with the reason.
pub fn probe() -> Result<()> {
    Control::open().map(drop)
}

impl Front {
    /// Takes over the devices of an earlier daemon, and is ready for new ones.
    ///
    /// The caller makes sure that no other daemon has the same tag.
    ///
    /// # Errors
    /// `unsupported`, with the reason, where this kernel's ublk cannot be used; `corrupt` for a damaged tag.
    pub fn start(options: &Options, directory: Arc<dyn Directory>) -> Result<(Self, Start)> {
        let control = Control::open()?;
        let tag = Tag::open(&options.tag)?;
        let common = Common { directory, counters: counters::Counters::default(), shelf: shelf::Shelf::default() };
        let inner = Arc::new(Inner {
            control,
            common: Arc::new(common),
            tag,
            depth: options.depth.clamp(1, 4096),
            slots: Slots::new(options.max_devices),
            stopping: AtomicBool::new(false),
            lost: AtomicU64::new(0),
        });
        let start = recovery::begin(&inner)?;
        Ok((Self { inner }, start))
    }

    /// Makes the device appear and gives its path; the same path if it is there already.
    ///
    /// # Errors
    /// `not_found` when the directory has no such device; `exhausted` when there are as many as there may be;
    /// `unavailable` when another's call for the same device does not end.
    pub fn attach(&self, id: DeviceId) -> Result<PathBuf> {
        let inner = &self.inner;
        match inner.slots.enter(id, Instant::now() + TURN)? {
            Found::There(number) => Ok(block_path(number)),
            Found::Ours(place) => {
                let device = inner.common.directory.device(id);
                let device = device.ok_or_else(|| Error::new(Code::NotFound, "there is no such device"))?;
                let serving = inner.make(id, device.as_ref())?;
                let path = block_path(serving.line.number);
                place.fill(serving);
                Ok(path)
            }
        }
    }

    /// Takes the device away. Whoever has it open gets errors from now on; what was being done is done, or fails if it takes long.
    ///
    /// # Errors
    /// `unavailable` when what is behind the device does not answer at all: it stays, and this can be tried again.
    pub fn detach(&self, id: DeviceId) -> Result<()> {
        let Some((place, serving)) = self.inner.slots.leave(id, Instant::now() + TURN)? else { return Ok(()) };
        match self.inner.end(&serving.line) {
            Ok(()) => {
                let _ = serving.thread.join();
                self.inner.control.delete(serving.line.number)
            }
            Err(error) => {
                serving.line.go_on();
                place.fill(serving);
                Err(error)
            }
        }
    }

    /// Whether the device may change its size as things are.
    ///
    /// # Errors
    /// `unsupported` when it is attached and the kernel cannot (before Linux 6.16): it has to be detached first.
    pub fn may_resize(&self, id: DeviceId) -> Result<()> {
        self.inner.slots.number(id).map_or(Ok(()), |_| self.inner.control.may_resize())
    }

    /// Lets whoever has the device open see its new size. Nothing is done for one that is not attached.
    ///
    /// # Errors
    /// As [`Front::may_resize`].
    pub fn resized(&self, id: DeviceId) -> Result<()> {
        let device = self.inner.common.directory.device(id);
        match (device, self.inner.slots.number(id)) {
            (Some(device), Some(number)) => self.inner.control.resize(number, device.size_bytes()),
            _ => Ok(()),
        }
    }

    pub fn statistics(&self) -> Statistics {
        let inner = &self.inner;
        let (devices, max_devices) = inner.slots.load();
        inner.common.counters.read(devices, max_devices, inner.lost.load(Ordering::Relaxed))
    }

    /// Stops serving and leaves the devices to the next daemon. Requests wait for it in the kernel.
    ///
    /// Returns whether every request that was begun has been answered within *limit*; if not, the next
    /// daemon begins it again, and this process should end now.
    pub fn stop(&self, limit: Duration) -> bool {
        self.inner.stopping.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + limit;
        let lines = self.inner.slots.lines();
        for line in &lines {
            line.leave();
        }
        lines.iter().all(|line| line.wait_ended(deadline.saturating_duration_since(Instant::now())))
    }
}

impl Inner {
    fn make(&self, id: DeviceId, device: &dyn Device) -> Result<Serving> {
        let wanted = u32::try_from(id.0.get() % u64::from(abi::NUMBERS)).unwrap_or(0);
        let number = self.control.add(wanted, self.depth, self.tag.of(id)?)?;
        let started = self.control.set_parameters(number, device.kind(), device.size_bytes()).and_then(|()| {
            let served = queue::serve(&self.common, id, number, self.depth);
            let (line, thread) = served.during("ublk: queue of a new device")?;
            if let Err(error) = self.control.start(number) {
                line.leave();
                let _ = thread.join();
                return Err(error);
            }
            Ok(Serving { line, thread })
        });
        match started {
            Ok(serving) => {
                settle(number, device.kind());
                Ok(serving)
            }
            Err(error) => {
                if let Err(second) = self.control.delete(number) {
                    eprintln!("storaged: ublk device {number} is left over: {second}");
                }
                Err(error)
            }
        }
    }

    /// Fails what is under way, and takes the block device away.
    fn end(&self, line: &Line) -> Result<()> {
        // The kernel's stop waits for every request, for ever and with its locks held: not before all have an answer.
        if !line.fail(DRAIN) {
            return Err(Error::new(Code::Unavailable, "what is behind the device does not answer"));
        }
        self.control.stop(line.number)
    }
}

/// What a started device is better with.
fn settle(number: u32, kind: Kind) {
    // When a daemon dies with a request in every tag, the kernel notices only by this clock.
    tune(number, "io_timeout", "1000");
    tune(number, "scheduler", "none");
    if kind == Kind::Memory {
        tune(number, "read_ahead_kb", "512");
    }
}
