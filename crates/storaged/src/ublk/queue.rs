//! The thread that serves one device's queue.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use sys::ublk::{Event, Queue};

use super::control::queue_path;
use super::line::{Common, Line};
use crate::device::DeviceId;

const STACK_BYTES: usize = 256 << 10;

/// Starts to serve the queue of device *number*. When this returns, the driver may start the device.
///
/// # Errors
/// What stands in the way; then nothing is left of the attempt.
pub(super) fn serve(
    common: &Arc<Common>,
    id: DeviceId,
    number: u32,
    depth: u16,
) -> io::Result<(Arc<Line>, JoinHandle<()>)> {
    let (ready, begun) = channel();
    let common = Arc::clone(common);
    let builder = std::thread::Builder::new().name(format!("ublk-{number}")).stack_size(STACK_BYTES);
    let thread = builder.spawn(move || run(&common, id, number, depth, &ready))?;
    match begun.recv() {
        Ok(Ok(line)) => Ok((line, thread)),
        Ok(Err(error)) => {
            let _ = thread.join();
            Err(error)
        }
        Err(_) => Err(io::Error::other("the thread of a queue ended at once")),
    }
}

fn run(common: &Arc<Common>, id: DeviceId, number: u32, depth: u16, ready: &Sender<io::Result<Arc<Line>>>) {
    settle();
    let mut queue = match prepare(number, depth) {
        Ok(queue) => queue,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let line = Arc::new(Line::new(common, id, number, queue.waker(), queue.file()));
    let _ = ready.send(Ok(Arc::clone(&line)));
    if let Err(error) = turn(&mut queue, &line, depth) {
        eprintln!("storaged: queue of ublk device {number}: {error}");
    }
    // Everything that was answered has been handed over. What was not goes to the next daemon.
    drop(queue);
    line.end();
}

/// What a thread needs that the kernel waits for when it is short of memory, and what it should not have.
fn settle() {
    // Only less safe without.
    let _ = sys::ublk::be_part_of_writeback();
    // The kernel looks for partitions on a new device only if whoever serves it may do everything. What is on a
    // guest's disk is not for this host to make sense of.
    if let Ok(mut sets) = capabilities(None) {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        sets.permitted.remove(CapabilitySet::SYS_ADMIN);
        let _ = set_capabilities(None, sets);
    }
}

fn prepare(number: u32, depth: u16) -> io::Result<Queue> {
    let mut queue = Queue::open(&queue_path(number), depth)?;
    for tag in 0..depth {
        queue.fetch(tag)?;
    }
    let mut events = Vec::new();
    queue.submit(&mut events)?;
    match events.first() {
        None => Ok(queue),
        Some(Event::Tag { result, .. }) => Err(io::Error::from_raw_os_error(-result)),
        Some(Event::Woken) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Serves until the kernel takes all tags back, or until it is time to leave.
fn turn(queue: &mut Queue, line: &Arc<Line>, depth: u16) -> io::Result<()> {
    let mut open = usize::from(depth);
    let mut events = Vec::with_capacity(open + 1);
    loop {
        queue.wait(&mut events)?;
        let mut answered = 0;
        for event in events.drain(..) {
            match event {
                Event::Tag { tag, result: 0 } => {
                    if let Some(result) = line.begin(tag, &queue.descriptor(tag)) {
                        queue.commit(tag, result)?;
                        answered += 1;
                    }
                }
                Event::Tag { .. } => open -= 1,
                Event::Woken => {}
            }
        }
        for (tag, result) in line.take_done() {
            queue.commit(tag, result)?;
            answered += 1;
        }
        // They are handed over by the next wait, at once.
        line.answered(answered);
        if open == 0 || line.may_leave() {
            return queue.submit(&mut events);
        }
    }
}
