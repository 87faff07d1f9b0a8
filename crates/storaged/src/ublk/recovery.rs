//! What an earlier daemon left: devices to go on with, and devices that stand for nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::abi::{Description, State};
use super::control::Control;
use super::slots::Serving;
use super::{Inner, Start, queue, settle};
use crate::device::DeviceId;
use crate::error::{Code, Context, Error, Result};

/// The kernel may need its clock for requests (30 s, if nobody has set another) to see that a daemon is gone.
const LIMIT: Duration = Duration::from_secs(90);
/// There is nothing to wait on for that.
const AGAIN: Duration = Duration::from_millis(10);

/// Looks at every device there is, deletes what stands for nothing, and begins to take over the rest.
pub(super) fn begin(inner: &Arc<Inner>) -> Result<Start> {
    let mut start = Start::default();
    for number in Control::numbers()? {
        // It may be somebody else's, and gone by now.
        let Ok(description) = inner.control.describe(number) else { continue };
        match inner.tag.owner(description.ours) {
            None => {}
            Some(Ok(id)) if is_wanted(inner, id, &description) => {
                take_over(inner, id, description)?;
                start.taken_over.push(id);
            }
            Some(_) => {
                delete(inner, number)?;
                start.deleted += 1;
            }
        }
    }
    Ok(start)
}

fn is_wanted(inner: &Inner, id: DeviceId, description: &Description) -> bool {
    let was_started = description.state != State::Dead && description.recovers();
    was_started && inner.common.directory.device(id).is_some() && inner.slots.number(id).is_none()
}

fn delete(inner: &Inner, number: u32) -> Result<()> {
    inner.control.stop(number)?;
    inner.control.delete(number)
}

/// Goes on with a device, in the background: the daemon may begin its work meanwhile, and who wants this device waits for it.
fn take_over(inner: &Arc<Inner>, id: DeviceId, description: Description) -> Result<()> {
    let number = description.number;
    let inner = Arc::clone(inner);
    let (reserved, done) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name(format!("ublk-{number}-take"));
    let started = thread.spawn(move || {
        let Some(place) = inner.slots.adopt(id) else { return };
        let _ = reserved.send(());
        match recover(&inner, id, description) {
            Ok(Some(serving)) => {
                if let Some(device) = inner.common.directory.device(id) {
                    settle(number, device.kind());
                    let _ = resize(&inner, number, device.size_bytes());
                }
                let line = Arc::clone(&serving.line);
                place.fill(serving);
                if inner.stopping.load(Ordering::SeqCst) {
                    line.leave();
                }
            }
            Ok(None) => {}
            Err(error) => {
                eprintln!("storaged: ublk device {number} is lost: {error}");
                inner.lost.fetch_add(1, Ordering::Relaxed);
                // Whoever has it open gets errors instead of waiting for ever.
                if let Err(error) = delete(&inner, number) {
                    eprintln!("storaged: ublk device {number} is left over: {error}");
                }
            }
        }
    });
    started.during("ublk: thread")?;
    // Nobody may find the place empty.
    let _ = done.recv();
    Ok(())
}

/// Nothing, when this daemon is asked to end first.
fn recover(inner: &Inner, id: DeviceId, description: Description) -> Result<Option<Serving>> {
    let Description { number, depth, .. } = description;
    let deadline = Instant::now() + LIMIT;
    while !inner.control.start_recovery(number)? {
        if inner.stopping.load(Ordering::SeqCst) {
            return Ok(None);
        }
        if Instant::now() > deadline {
            return Err(Error::new(Code::Unavailable, "the kernel does not give it up"));
        }
        std::thread::sleep(AGAIN);
    }
    let served = queue::serve(&inner.common, id, number, depth);
    let (line, thread) = served.during("ublk: queue of a device that is taken over")?;
    if let Err(error) = inner.control.end_recovery(number) {
        line.leave();
        let _ = thread.join();
        return Err(error);
    }
    Ok(Some(Serving { line, thread }))
}

/// The device may have grown after the kernel was last told.
fn resize(inner: &Inner, number: u32, size_bytes: u64) -> Result<()> {
    if inner.control.size_bytes(number)? == size_bytes { Ok(()) } else { inner.control.resize(number, size_bytes) }
}
