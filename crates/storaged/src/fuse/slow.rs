//! Threads for what has to wait: for a network, for a disk to write, for a lock.
//!
//! A device gets a few of them at most, and devices take turns, so that one whose source stalls
//! holds up no other. What waits here is small (no bytes of requests), bounded, and taken back when
//! whoever asked is gone.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::buffer::Buffer;
use crate::device::DeviceId;

/// Threads that wait on one device: what a guest's disk has in flight. Fewer would leave a local disk idle.
const THREADS_PER_DEVICE: usize = 32;
/// Bytes that are being read from one device. One request may always be.
const BYTES_PER_DEVICE: usize = 8 << 20;
const MAX_THREADS: usize = 512;
/// Kept when there is nothing to do.
const MIN_THREADS: usize = 2;
const IDLE: Duration = Duration::from_secs(20);
/// What a thread without work keeps.
const SMALL_BYTES: usize = 16 << 10;
const STACK_BYTES: usize = 256 << 10;
/// Far more than there can be: each is an asynchronous request (the kernel bounds them) or a thread of a VMM.
const MAX_QUEUED: usize = 1 << 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Read { offset: u64, length: usize },
    Flush,
    Discard { offset: u64, length: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) device: DeviceId,
    pub(super) channel: usize,
    pub(super) unique: u64,
    pub(super) work: Work,
    pub(super) since: Instant,
}

impl Job {
    fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }

    fn buffer_bytes(&self) -> usize {
        match self.work {
            Work::Read { length, .. } => length,
            Work::Flush | Work::Discard { .. } => 0,
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: usize,
    running_bytes: usize,
}

impl Queue {
    /// Whether its next job may begin.
    fn may_run(&self) -> bool {
        let Some(next) = self.jobs.front() else { return false };
        self.running == 0
            || (self.running < THREADS_PER_DEVICE && self.running_bytes + next.buffer_bytes() <= BYTES_PER_DEVICE)
    }
}

#[derive(Default)]
struct State {
    /// Of devices with something queued or running.
    queues: HashMap<DeviceId, Queue>,
    /// Devices with something queued, next one first.
    turns: VecDeque<DeviceId>,
    /// What runs and is still to be answered.
    running: HashMap<u64, Job>,
    queued: usize,
    threads: usize,
    idle: usize,
    stopping: bool,
}

impl State {
    fn next_in_turn(&mut self) -> Option<Job> {
        let place = self.turns.iter().position(|device| self.queues[device].may_run())?;
        let device = self.turns.remove(place)?;
        let queue = self.queues.get_mut(&device)?;
        let job = queue.jobs.pop_front()?;
        queue.running += 1;
        queue.running_bytes += job.buffer_bytes();
        if !queue.jobs.is_empty() {
            self.turns.push_back(device);
        }
        self.queued -= 1;
        self.running.insert(job.unique, job);
        Some(job)
    }

    /// How many of the queued jobs wait for a thread and for nothing else.
    fn runnable(&self) -> usize {
        let of = |queue: &Queue| queue.jobs.len().min(THREADS_PER_DEVICE.saturating_sub(queue.running));
        self.turns.iter().map(|device| of(&self.queues[device])).sum()
    }
}

pub(super) struct Slow {
    state: Mutex<State>,
    changed: Condvar,
}

/// Does a job; calls back to learn whether the answer is still wanted.
pub(super) type Perform = Arc<dyn Fn(&Slow, Job, &mut Buffer) + Send + Sync>;

impl Slow {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues *job*, or gives it back when there is no room or no thread for it.
    pub(super) fn submit(self: &Arc<Self>, job: Job, perform: &Perform) -> Result<(), Job> {
        let mut state = self.lock();
        if state.stopping || state.queued >= MAX_QUEUED {
            return Err(job);
        }
        let at_once =
            state.queues.get(&job.device).is_none_or(|queue| queue.running + queue.jobs.len() < THREADS_PER_DEVICE);
        if state.threads < MAX_THREADS && (state.threads == 0 || (at_once && state.idle <= state.runnable())) {
            if self.start_thread(perform) {
                state.threads += 1;
            } else if state.threads == 0 {
                return Err(job);
            }
        }
        let queue = state.queues.entry(job.device).or_default();
        let first = queue.jobs.is_empty();
        queue.jobs.push_back(job);
        state.queued += 1;
        if first {
            state.turns.push_back(job.device);
        }
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    fn start_thread(self: &Arc<Self>, perform: &Perform) -> bool {
        let (slow, perform) = (Arc::clone(self), Arc::clone(perform));
        let thread = std::thread::Builder::new().name("fuse-slow".into()).stack_size(STACK_BYTES);
        thread.spawn(move || slow.run(&perform)).is_ok()
    }

    fn run(&self, perform: &Perform) {
        let mut buffer = Buffer::new(SMALL_BYTES);
        while let Some(job) = self.next(&mut buffer) {
            if job.buffer_bytes() > buffer.data_bytes() {
                buffer = Buffer::new(job.buffer_bytes());
            }
            perform(self, job, &mut buffer);
            let mut state = self.lock();
            state.running.remove(&job.unique);
            let freed = match state.queues.get_mut(&job.device) {
                Some(queue) => {
                    queue.running -= 1;
                    queue.running_bytes -= job.buffer_bytes();
                    let waiting = !queue.jobs.is_empty();
                    if !waiting && queue.running == 0 {
                        state.queues.remove(&job.device);
                    }
                    waiting
                }
                None => false,
            };
            drop(state);
            if freed {
                self.changed.notify_one();
            }
        }
        self.lock().threads -= 1;
        self.changed.notify_all();
    }

    fn next(&self, buffer: &mut Buffer) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.next_in_turn() {
                return Some(job);
            }
            if state.stopping && state.queued == 0 {
                return None;
            }
            if buffer.data_bytes() > 2 * SMALL_BYTES {
                *buffer = Buffer::new(SMALL_BYTES);
            }
            state.idle += 1;
            let (woken, waited) = self.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.queued == 0 && state.threads > MIN_THREADS {
                return None;
            }
        }
    }

    /// Says whether *job* is still to be answered, and by the caller, who does so once.
    pub(super) fn claim(&self, job: Job) -> bool {
        self.lock().running.remove(&job.unique).is_some()
    }

    /// Takes back a read that was asked as *unique*; the caller answers it. Other kinds change
    /// something, and whoever asked may believe that they are over when they are answered: they go on.
    pub(super) fn interrupt(&self, unique: u64) -> Option<Job> {
        let mut state = self.lock();
        if state.running.get(&unique).is_some_and(Job::is_read) {
            return state.running.remove(&unique);
        }
        let State { queues, queued, turns, .. } = &mut *state;
        let (device, queue, place) = queues.iter_mut().find_map(|(device, queue)| {
            let place = queue.jobs.iter().position(|job| job.unique == unique && job.is_read())?;
            Some((*device, queue, place))
        })?;
        *queued -= 1;
        let job = queue.jobs.remove(place);
        if queue.jobs.is_empty() {
            turns.retain(|turn| *turn != device);
            if queue.running == 0 {
                queues.remove(&device);
            }
        }
        job
    }

    pub(super) fn load(&self) -> (usize, usize) {
        let state = self.lock();
        (state.queued, state.threads - state.idle)
    }

    /// Returns whether everything that was queued is done. What takes longer than *limit* goes on.
    pub(super) fn stop(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        state.stopping = true;
        self.changed.notify_all();
        let stopped = self.changed.wait_timeout_while(state, limit, |state| state.threads > 0);
        let (state, waited) = stopped.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        !waited.timed_out()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;
    use std::sync::mpsc::{Receiver, Sender, channel};

    fn job(device: u64, unique: u64, work: Work) -> Job {
        let device = DeviceId(NonZeroU64::new(device).unwrap());
        Job { device, channel: 0, unique, work, since: Instant::now() }
    }

    fn read(device: u64, unique: u64) -> Job {
        job(device, unique, Work::Read { offset: 0, length: 1 })
    }

    /// Jobs of device 1 wait until told; all others are done at once. What is claimed is told.
    fn pool() -> (Arc<Slow>, Perform, Sender<()>, Receiver<u64>, Receiver<u64>) {
        let (open, gate) = channel::<()>();
        let (begun, begins) = channel();
        let (done, ends) = channel();
        let (gate, begun, done) = (Mutex::new(gate), Mutex::new(begun), Mutex::new(done));
        let perform: Perform = Arc::new(move |slow, job, _| {
            begun.lock().unwrap().send(job.unique).unwrap();
            if job.device.0.get() == 1 {
                let _ = gate.lock().unwrap().recv();
            }
            if slow.claim(job) {
                done.lock().unwrap().send(job.unique).unwrap();
            }
        });
        (Arc::new(Slow::new()), perform, open, begins, ends)
    }

    #[test]
    fn a_device_that_stalls_holds_up_no_other() {
        let (slow, perform, open, _begins, ends) = pool();
        for unique in 0..1000 {
            slow.submit(read(1, unique), &perform).unwrap();
        }

        slow.submit(read(2, 5000), &perform).unwrap();

        assert_eq!(ends.recv(), Ok(5000));
        assert!(slow.load().1 <= THREADS_PER_DEVICE + 1);
        drop(open);
        let mut rest: Vec<u64> = (0..1000).map(|_| ends.recv().unwrap()).collect();
        rest.sort_unstable();
        assert_eq!(rest, (0..1000).collect::<Vec<_>>());
        assert!(slow.stop(Duration::from_secs(60)));
    }

    #[test]
    fn a_read_that_nobody_waits_for_is_claimed_once() {
        let (slow, perform, open, begins, ends) = pool();
        slow.submit(read(1, 7), &perform).unwrap();
        assert_eq!(begins.recv(), Ok(7));

        assert_eq!(slow.interrupt(7).map(|job| job.unique), Some(7));
        assert_eq!(slow.interrupt(7), None);

        drop(open);
        assert!(slow.stop(Duration::from_secs(60)));
        assert!(ends.try_recv().is_err());
    }

    #[test]
    fn a_queued_read_can_be_taken_back_and_a_flush_cannot() {
        let (slow, perform, open, begins, ends) = pool();
        for unique in 0..THREADS_PER_DEVICE as u64 {
            slow.submit(read(1, unique), &perform).unwrap();
        }
        assert_eq!(begins.iter().take(THREADS_PER_DEVICE).count(), THREADS_PER_DEVICE);
        slow.submit(read(1, 100), &perform).unwrap();
        slow.submit(job(1, 101, Work::Flush), &perform).unwrap();

        assert!(slow.interrupt(100).is_some());
        assert!(slow.interrupt(101).is_none());

        drop(open);
        assert!(slow.stop(Duration::from_secs(60)));
        let done: Vec<u64> = ends.try_iter().collect();
        assert!(done.contains(&101) && !done.contains(&100));
    }
}
