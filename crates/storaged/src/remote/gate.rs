//! Who may ask now: what a guest waits for goes first, and what is fetched ahead of need gives way.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    Foreground,
    /// A guest that is starting is about to ask for it.
    Replay,
    /// Nobody does yet.
    Ahead,
}

/// Runs that are fetched ahead at once while nobody waits for anything.
const MAX_AHEAD: usize = 4;
/// Runs of replays at once: as many as fill a link, and few beside guests that wait for many things.
const MAX_REPLAY: usize = 8;
const MAX_REPLAY_BESIDE: usize = 2;
const BUSY: usize = 4;

#[derive(Default)]
pub struct Gate {
    running: Mutex<Running>,
    changed: Condvar,
}

#[derive(Default)]
struct Running {
    foreground: usize,
    replay: usize,
    ahead: usize,
    stopping: bool,
}

/// Something that is being fetched, for as long as this value lives.
pub struct Pass {
    gate: Arc<Gate>,
    priority: Priority,
}

impl Gate {
    /// Goes through at once, and is counted.
    pub fn enter(self: &Arc<Self>, priority: Priority) -> Pass {
        *self.running().count(priority) += 1;
        Pass { gate: Arc::clone(self), priority }
    }

    /// Waits until nobody else needs the network; one is let through in any case, so that it ends some day.
    /// Nothing when the daemon is ending, or when the caller's question says that there is no need any more.
    pub fn wait_ahead(self: &Arc<Self>, given_up: impl Fn() -> bool) -> Option<Pass> {
        let mut running = self.running();
        loop {
            if running.stopping || given_up() {
                return None;
            }
            if running.ahead == 0 || (running.foreground + running.replay == 0 && running.ahead < MAX_AHEAD) {
                running.ahead += 1;
                return Some(Pass { gate: Arc::clone(self), priority: Priority::Ahead });
            }
            running = self.changed.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for a turn among replays. False when there is no need any more; this is asked again
    /// whenever anything has been fetched.
    pub fn wait_replay(&self, given_up: impl Fn() -> bool) -> bool {
        let mut running = self.running();
        loop {
            if running.stopping || given_up() {
                return false;
            }
            let limit = if running.foreground >= BUSY { MAX_REPLAY_BESIDE } else { MAX_REPLAY };
            if running.replay < limit {
                return true;
            }
            running = self.changed.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nobody waits here any more.
    pub fn stop(&self) {
        self.running().stopping = true;
        self.changed.notify_all();
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    fn count(&mut self, priority: Priority) -> &mut usize {
        match priority {
            Priority::Foreground => &mut self.foreground,
            Priority::Replay => &mut self.replay,
            Priority::Ahead => &mut self.ahead,
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        *self.gate.running().count(self.priority) -= 1;
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_goes_on_beside_what_a_guest_waits_for_and_no_more() {
        let gate = Arc::new(Gate::default());
        let guest = gate.enter(Priority::Foreground);
        let first = gate.wait_ahead(|| false);
        assert!(first.is_some());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| gate.wait_ahead(|| false).is_some());
            drop(guest);
            assert!(second.join().is_ok_and(|passed| passed));
        });
    }

    #[test]
    fn whoever_waits_at_the_end_is_sent_away() {
        let gate = Arc::new(Gate::default());
        let _first = gate.wait_ahead(|| false);
        let _guest = gate.enter(Priority::Foreground);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.wait_ahead(|| false).is_none());
            gate.stop();
            assert!(waiting.join().is_ok_and(|sent_away| sent_away));
        });
    }
}
