//! One process's output for any number of subscribers, in bounded memory.
//!
//! Frames are encoded once and shared. A frame stays until every subscriber has taken
//! it, so the process is slowed down to the pace of its slowest reader, as a pipe would
//! do. That holds only while the reader moves: one that takes nothing for
//! [`STALL_LIMIT`] while it keeps the process waiting is cut off and told so. Without
//! subscribers output is thrown away. So no reader can stop a process, none loses a
//! byte without knowing, and nothing grows.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long a subscriber may keep a process waiting without taking anything.
pub(super) const STALL_LIMIT: Duration = Duration::from_secs(5);
/// Bytes kept for one process while there is little to keep.
const GENEROUS_BYTES: usize = 1 << 20;
/// Bytes kept for one process while there is much.
const TIGHT_BYTES: usize = 64 << 10;
/// Bytes kept for all processes from which on each gets little.
const TOTAL_BYTES: usize = 4 << 20;

/// Bytes that all broadcasts hold together.
#[derive(Default)]
pub(super) struct Budget(Cell<usize>);

/// The frames of one process.
pub(super) struct Broadcast {
    inner: RefCell<Inner>,
    room: Notify,
    budget: Rc<Budget>,
}

#[derive(Default)]
struct Inner {
    frames: VecDeque<Bytes>,
    /// Number of the first frame in `frames`, counted from the start of the process.
    first: u64,
    held_bytes: usize,
    subscribers: Vec<Subscriber>,
    next_id: u64,
    finished: bool,
}

struct Subscriber {
    id: u64,
    /// Number of the frame it takes next.
    next: u64,
    waker: Option<Waker>,
    /// When it last took a frame, or had none to take.
    moved: Instant,
}

/// What a subscriber gets.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    Frame(Bytes),
    /// It kept the process waiting for too long; nothing follows.
    CutOff,
    /// All frames have been taken and the process has ended.
    Finished,
}

impl Broadcast {
    pub(super) fn new(budget: Rc<Budget>) -> Rc<Self> {
        Rc::new(Self { inner: RefCell::default(), room: Notify::new(), budget })
    }

    /// A reader that gets everything published from now on.
    pub(super) fn subscribe(self: &Rc<Self>) -> Subscription {
        let mut inner = self.inner.borrow_mut();
        let id = inner.next_id;
        inner.next_id += 1;
        let next = inner.end();
        inner.subscribers.push(Subscriber { id, next, waker: None, moved: Instant::now() });
        drop(inner);
        Subscription { broadcast: self.clone(), id }
    }

    /// Gives *frame* to all subscribers.
    pub(super) fn publish(&self, frame: Bytes) {
        let mut inner = self.inner.borrow_mut();
        if inner.subscribers.is_empty() {
            return;
        }
        let now = Instant::now();
        let end = inner.end();
        for subscriber in &mut inner.subscribers {
            if subscriber.next == end {
                subscriber.moved = now;
            }
        }
        self.budget.0.set(self.budget.0.get() + frame.len());
        inner.held_bytes += frame.len();
        inner.frames.push_back(frame);
        inner.wake_all();
    }

    /// Publishes the last frame.
    pub(super) fn finish(&self, frame: Bytes) {
        self.publish(frame);
        let mut inner = self.inner.borrow_mut();
        inner.finished = true;
        inner.wake_all();
    }

    /// Waits until there is room for more output, cutting off who keeps it full.
    pub(super) async fn room(&self) {
        loop {
            let Some(stalled_since) = self.oldest_in_the_way() else { return };
            let limit = stalled_since + STALL_LIMIT;
            if tokio::time::timeout_at(limit, self.room.notified()).await.is_err() {
                self.cut_off_stalled(limit);
            }
        }
    }

    /// When nothing more fits: since when the most patient of the slowest subscribers has not moved.
    fn oldest_in_the_way(&self) -> Option<Instant> {
        let inner = self.inner.borrow();
        let capacity = if self.budget.0.get() < TOTAL_BYTES { GENEROUS_BYTES } else { TIGHT_BYTES };
        if inner.held_bytes < capacity {
            return None;
        }
        let slowest = inner.subscribers.iter().filter(|s| s.next == inner.first).map(|s| s.moved);
        slowest.min()
    }

    /// Forgets who has stalled: that is how they learn of it.
    fn cut_off_stalled(&self, now: Instant) {
        let mut inner = self.inner.borrow_mut();
        let first = inner.first;
        inner.subscribers.retain_mut(|subscriber| {
            let stalled = subscriber.next == first && subscriber.moved + STALL_LIMIT <= now;
            if stalled && let Some(waker) = subscriber.waker.take() {
                waker.wake();
            }
            !stalled
        });
        self.trim(&mut inner);
    }

    /// Drops what nobody will take.
    fn trim(&self, inner: &mut Inner) {
        let needed = inner.subscribers.iter().map(|s| s.next).min().unwrap_or(u64::MAX);
        let mut freed = 0;
        while inner.first < needed {
            let Some(frame) = inner.frames.pop_front() else { break };
            inner.first += 1;
            freed += frame.len();
        }
        if freed > 0 {
            inner.held_bytes -= freed;
            self.budget.0.set(self.budget.0.get() - freed);
            self.room.notify_waiters();
        }
    }

    fn poll(&self, id: u64, cx: &mut Context<'_>) -> Poll<Item> {
        let mut inner = self.inner.borrow_mut();
        let (first, end, finished) = (inner.first, inner.end(), inner.finished);
        let Some(at) = inner.subscribers.iter().position(|s| s.id == id) else { return Poll::Ready(Item::CutOff) };
        let subscriber = &mut inner.subscribers[at];
        if subscriber.next == end {
            if finished {
                return Poll::Ready(Item::Finished);
            }
            subscriber.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let offset = usize::try_from(subscriber.next - first).unwrap_or(usize::MAX);
        subscriber.next += 1;
        subscriber.moved = Instant::now();
        let frame = inner.frames[offset].clone();
        self.trim(&mut inner);
        Poll::Ready(Item::Frame(frame))
    }

    fn unsubscribe(&self, id: u64) {
        let mut inner = self.inner.borrow_mut();
        inner.subscribers.retain(|s| s.id != id);
        self.trim(&mut inner);
        // With nobody left there is room even if nothing was freed.
        self.room.notify_waiters();
    }
}

impl Drop for Broadcast {
    fn drop(&mut self) {
        self.budget.0.set(self.budget.0.get() - self.inner.borrow().held_bytes);
    }
}

impl Inner {
    /// Number of the frame that is published next.
    fn end(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    fn wake_all(&mut self) {
        for subscriber in &mut self.subscribers {
            if let Some(waker) = subscriber.waker.take() {
                waker.wake();
            }
        }
    }
}

/// One reader; dropping it ends the subscription.
pub(super) struct Subscription {
    broadcast: Rc<Broadcast>,
    id: u64,
}

impl Subscription {
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Item> {
        self.broadcast.poll(self.id, cx)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.broadcast.unsubscribe(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    fn frame(byte: u8, length: usize) -> Bytes {
        Bytes::from(vec![byte; length])
    }

    async fn next(subscription: &mut Subscription) -> Item {
        poll_fn(|cx| subscription.poll_next(cx)).await
    }

    #[tokio::test(start_paused = true)]
    async fn each_subscriber_gets_all_from_its_start_and_the_end_once() {
        let broadcast = Broadcast::new(Rc::default());
        broadcast.publish(frame(0, 1));
        let mut early = broadcast.subscribe();
        broadcast.publish(frame(1, 1));
        let mut late = broadcast.subscribe();
        broadcast.finish(frame(2, 1));
        assert_eq!(next(&mut early).await, Item::Frame(frame(1, 1)));
        assert_eq!(next(&mut early).await, Item::Frame(frame(2, 1)));
        assert_eq!(next(&mut late).await, Item::Frame(frame(2, 1)));
        assert_eq!(next(&mut early).await, Item::Finished);
        assert_eq!(next(&mut late).await, Item::Finished);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_move_is_cut_off_and_the_others_lose_nothing() {
        let budget = Rc::new(Budget::default());
        let broadcast = Broadcast::new(budget.clone());
        let (mut asleep, mut awake) = (broadcast.subscribe(), broadcast.subscribe());
        let began = Instant::now();
        for byte in 0..64 {
            broadcast.room().await;
            broadcast.publish(frame(byte, 100_000));
            assert_eq!(next(&mut awake).await, Item::Frame(frame(byte, 100_000)));
        }
        assert!(began.elapsed() <= STALL_LIMIT + Duration::from_millis(5));
        assert_eq!(next(&mut asleep).await, Item::CutOff);
        assert_eq!(budget.0.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_that_moves_gets_every_byte() {
        let broadcast = Broadcast::new(Rc::default());
        let mut slow = broadcast.subscribe();
        let reader = async {
            let mut seen = 0;
            loop {
                tokio::time::sleep(STALL_LIMIT.mul_f32(0.99)).await;
                match next(&mut slow).await {
                    Item::Frame(frame) => seen += frame.len(),
                    Item::Finished => return seen,
                    Item::CutOff => return 0,
                }
            }
        };
        let writer = async {
            for _ in 0..40 {
                broadcast.room().await;
                broadcast.publish(frame(1, 100_000));
            }
            broadcast.finish(frame(2, 1));
        };
        let (seen, ()) = tokio::join!(reader, writer);
        assert_eq!(seen, 4_000_001);
    }

    #[tokio::test(start_paused = true)]
    async fn without_subscribers_nothing_is_kept() {
        let budget = Rc::new(Budget::default());
        let broadcast = Broadcast::new(budget.clone());
        let gone = broadcast.subscribe();
        broadcast.publish(frame(0, 2 << 20));
        drop(gone);
        broadcast.room().await;
        broadcast.publish(frame(0, 2 << 20));
        assert_eq!(budget.0.get(), 0);
    }
}
