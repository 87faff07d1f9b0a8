//! One device's requests, from the moment the kernel hands them over until they are answered.
//!
//! The thread that serves the queue answers what takes no time. What may wait goes to a few
//! threads of this device alone, so that a device that stalls holds up no other. Whoever *claims* a
//! request answers it, once: the kernel uses its tag again afterwards, so bytes are copied out only by the
//! claimant, and copied in only by the serving thread before it passes the request on.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::ublk::Waker;

use super::abi::{self, Request};
use super::counters::{Counter, Counters};
use super::shelf::{Buffer, Shelf};
use crate::device::{Answer, Device, DeviceId, Kind};
use crate::directory::Directory;

/// Threads that wait on one device. More would only wait for the same thing.
const THREADS: usize = 16;
const IDLE: Duration = Duration::from_secs(20);
const STACK_BYTES: usize = 256 << 10;

/// What all devices share.
pub(super) struct Common {
    pub(super) directory: Arc<dyn Directory>,
    pub(super) counters: Counters,
    pub(super) shelf: Shelf,
}

struct Job {
    tag: u16,
    request: Request,
    /// Of a write: its bytes.
    buffer: Option<Buffer>,
    since: Instant,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// What threads are at and nobody has claimed.
    running: HashSet<u16>,
    /// Answers for the serving thread to hand over.
    done: Vec<(u16, i32)>,
    /// Requests that the kernel has handed over and has no answer to.
    held: usize,
    threads: usize,
    idle: usize,
    /// Every new request fails.
    failing: bool,
    /// New requests are left to the next daemon.
    leaving: bool,
    /// Nobody serves the queue any more.
    ended: bool,
}

pub(super) struct Line {
    pub(super) id: DeviceId,
    pub(super) number: u32,
    common: Arc<Common>,
    waker: Waker,
    /// Taken away at the end: a thread that hangs must not keep the kernel's side of the device.
    file: Mutex<Option<Arc<File>>>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Line {
    pub(super) fn new(common: &Arc<Common>, id: DeviceId, number: u32, waker: Waker, file: Arc<File>) -> Self {
        let (state, file) = (Mutex::default(), Mutex::new(Some(file)));
        Self { id, number, common: Arc::clone(common), waker, file, state, changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request on. Returns the answer if there is one already, and nothing if it comes later.
    pub(super) fn begin(self: &Arc<Self>, tag: u16, descriptor: &[u8; sys::ublk::DESCRIPTOR_BYTES]) -> Option<i32> {
        let since = Instant::now();
        {
            let mut state = self.lock();
            if state.leaving {
                return None;
            }
            state.held += 1;
            if state.failing {
                return Some(refusal(Errno::IO));
            }
        }
        let request = match Request::read(descriptor) {
            Ok(request) => request,
            Err(error) => return Some(refusal(error)),
        };
        let Some(device) = self.common.directory.device(self.id) else {
            return Some(self.count(request, since, Err(Errno::IO)));
        };
        match self.at_once(tag, request, device.as_ref(), since) {
            Ok(done) => Some(self.count(request, since, done)),
            Err(job) => self.pass_on(job),
        }
    }

    /// Does what takes no time, or gives back what has to be passed on.
    fn at_once(
        &self,
        tag: u16,
        request: Request,
        device: &dyn Device,
        since: Instant,
    ) -> Result<Result<usize, Errno>, Job> {
        let later = |buffer| Job { tag, request, buffer, since };
        let buffers = &self.common.shelf;
        match request {
            Request::Read { offset, length } => {
                let mut buffer = buffers.take();
                let done = match device.read_now(buffer.part(length), offset) {
                    Ok(Answer::WouldWait) => {
                        buffers.put(buffer);
                        return Err(later(None));
                    }
                    Ok(Answer::Done) => self.copy_out(tag, buffer.part(length)),
                    Err(error) => Err(errno(&error)),
                };
                buffers.put(buffer);
                Ok(done)
            }
            Request::Write { .. } | Request::Discard { .. } if device.kind() == Kind::Memory => Ok(Err(Errno::ROFS)),
            Request::Write { offset, length, durable } => {
                let mut buffer = buffers.take();
                let copied = self.copy_in(tag, buffer.part(length));
                if copied.is_ok() && durable {
                    return Err(later(Some(buffer)));
                }
                let done = copied
                    .and_then(|()| device.write(buffer.part(length), offset, false).map_err(|error| errno(&error)));
                buffers.put(buffer);
                Ok(done.map(|()| length))
            }
            Request::Flush if device.kind() == Kind::Memory => Ok(Ok(0)),
            Request::Flush | Request::Discard { .. } => Err(later(None)),
        }
    }

    fn pass_on(self: &Arc<Self>, job: Job) -> Option<i32> {
        let mut state = self.lock();
        if state.idle <= state.waiting.len() && state.threads < THREADS {
            let line = Arc::clone(self);
            let thread = std::thread::Builder::new().name(format!("ublk-{}-slow", self.number)).stack_size(STACK_BYTES);
            if thread.spawn(move || line.work()).is_ok() {
                state.threads += 1;
            } else if state.threads == 0 {
                drop(state);
                return Some(self.count(job.request, job.since, Err(Errno::IO)));
            }
        }
        state.waiting.push_back(job);
        drop(state);
        self.common.counters.slow();
        self.changed.notify_all();
        None
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                state.running.insert(job.tag);
                drop(state);
                self.perform(job);
                state = self.lock();
                continue;
            }
            if state.ended {
                break;
            }
            state.idle += 1;
            let waited = self.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            state.idle -= 1;
            if waited.1.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    fn perform(&self, job: Job) {
        let Job { tag, request, buffer, since } = job;
        let buffers = &self.common.shelf;
        let mut buffer = buffer.unwrap_or_else(|| buffers.take());
        let device = self.common.directory.device(self.id).ok_or(Errno::IO);
        let done = device.and_then(|device| {
            let done = match request {
                Request::Read { offset, length } => device.read(buffer.part(length), offset).map(|()| length),
                Request::Write { offset, length, durable } => {
                    device.write(buffer.part(length), offset, durable).map(|()| length)
                }
                Request::Flush => device.flush().map(|()| 0),
                Request::Discard { offset, length } => device.discard(offset, length).map(|()| 0),
            };
            done.map_err(|error| errno(&error))
        });
        if self.lock().running.remove(&tag) {
            let done = match (done, request) {
                (Ok(_), Request::Read { length, .. }) => self.copy_out(tag, buffer.part(length)),
                (done, _) => done,
            };
            let answer = self.count(request, since, done);
            self.lock().done.push((tag, answer));
            self.waker.wake();
        }
        buffers.put(buffer);
    }

    fn copy_out(&self, tag: u16, bytes: &[u8]) -> Result<usize, Errno> {
        let file = self.file().ok_or(Errno::IO)?;
        file.write_all_at(bytes, abi::bytes_of(tag)).map_err(|_| Errno::IO)?;
        Ok(bytes.len())
    }

    fn copy_in(&self, tag: u16, bytes: &mut [u8]) -> Result<(), Errno> {
        self.file().ok_or(Errno::IO)?.read_exact_at(bytes, abi::bytes_of(tag)).map_err(|_| Errno::IO)
    }

    fn file(&self) -> Option<Arc<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the kernel is told.
    fn count(&self, request: Request, since: Instant, done: Result<usize, Errno>) -> i32 {
        let bytes = match request {
            Request::Discard { length, .. } if done.is_ok() => usize::try_from(length).unwrap_or(usize::MAX),
            _ => done.unwrap_or(0),
        };
        self.counter(request).add(bytes, done.is_err(), since.elapsed());
        done.map_or_else(refusal, |length| i32::try_from(length).unwrap_or(i32::MAX))
    }

    fn counter(&self, request: Request) -> &Counter {
        let counters = &self.common.counters;
        match request {
            Request::Read { .. } => &counters.reads,
            Request::Write { .. } => &counters.writes,
            Request::Flush => &counters.flushes,
            Request::Discard { .. } => &counters.discards,
        }
    }

    /// Takes what has been answered, to be handed over to the kernel.
    pub(super) fn take_done(&self) -> Vec<(u16, i32)> {
        std::mem::take(&mut self.lock().done)
    }

    /// Answers have been handed over.
    pub(super) fn answered(&self, count: usize) {
        let mut state = self.lock();
        state.held -= count;
        if state.held == 0 {
            self.changed.notify_all();
        }
    }

    /// Whether the serving thread should go, leaving the device as it is.
    pub(super) fn may_leave(&self) -> bool {
        let state = self.lock();
        state.leaving && state.held == 0
    }

    /// The serving thread is gone, and its side of the device with it.
    pub(super) fn end(&self) {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.lock();
        state.ended = true;
        self.changed.notify_all();
    }

    /// From now on new requests fail. Those under way get *limit* to end by themselves; then they fail, too.
    ///
    /// Returns whether all are answered: if not, the serving thread itself waits for the device.
    pub(super) fn fail(&self, limit: Duration) -> bool {
        self.lock().failing = true;
        if self.wait(limit, |state| state.held == 0) {
            return true;
        }
        let mut state = self.lock();
        let abandoned: Vec<u16> = state.running.drain().collect();
        state.done.extend(abandoned.into_iter().map(|tag| (tag, refusal(Errno::IO))));
        while let Some(job) = state.waiting.pop_front() {
            state.done.push((job.tag, refusal(Errno::IO)));
        }
        drop(state);
        self.waker.wake();
        self.wait(limit, |state| state.held == 0)
    }

    /// Requests are served again.
    pub(super) fn go_on(&self) {
        self.lock().failing = false;
    }

    /// No new request is begun; the serving thread ends when those that were have their answers.
    pub(super) fn leave(&self) {
        self.lock().leaving = true;
        self.waker.wake();
    }

    /// Waits for the serving thread to end.
    pub(super) fn wait_ended(&self, limit: Duration) -> bool {
        self.wait(limit, |state| state.ended)
    }

    fn wait(&self, limit: Duration, condition: impl Fn(&State) -> bool) -> bool {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, limit, |state| !condition(state));
        let (_state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }
}

fn refusal(error: Errno) -> i32 {
    -error.raw_os_error()
}

fn errno(error: &io::Error) -> Errno {
    match Errno::from_io_error(error) {
        Some(errno) => errno,
        None if error.kind() == io::ErrorKind::InvalidInput => Errno::INVAL,
        None => Errno::IO,
    }
}
