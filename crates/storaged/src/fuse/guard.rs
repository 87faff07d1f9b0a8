//! Watches over the keeper: when it dies, a new one is made and given everything again.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Options;
use super::server::Server;
use crate::keeper::{Keeper, Program};

/// Between attempts to start a keeper, when the host has no process or no descriptor to give.
const RETRY: Duration = Duration::from_millis(200);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    lost: AtomicU64,
    note: String,
    server: Arc<Server>,
    socket: PathBuf,
    program: Program,
}

struct State {
    keeper: Option<Arc<Keeper>>,
    stopping: bool,
}

pub(super) struct Guard {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Guard {
    /// Gives the descriptors of *server*'s connection to *keeper*, and sees to it that one has them from now on.
    pub(super) fn start(keeper: Keeper, note: String, server: Arc<Server>, options: &Options) -> io::Result<Self> {
        keeper.give(&note, &server.connection.descriptors())?;
        let state = Mutex::new(State { keeper: None, stopping: false });
        let (socket, program) = (options.keeper_socket.clone(), options.keeper_program.clone());
        let shared =
            Arc::new(Shared { state, changed: Condvar::new(), lost: AtomicU64::new(0), note, server, socket, program });
        let watcher = Arc::clone(&shared);
        let first = Arc::new(keeper);
        shared.lock().keeper = Some(Arc::clone(&first));
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(move || watcher.watch(first))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    pub(super) fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// The keeper holds nothing any more, and ends.
    pub(super) fn release(&self) {
        let keeper = self.shared.lock().keeper.clone();
        if let Some(keeper) = keeper {
            let _ = keeper.drop_all();
        }
        let _ = std::fs::remove_file(&self.shared.socket);
    }

    /// Stops watching. The keeper stays.
    pub(super) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        if let Some(keeper) = state.keeper.take() {
            keeper.hang_up();
        }
        drop(state);
        self.shared.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, mut keeper: Arc<Keeper>) {
        loop {
            keeper.wait_gone();
            if self.lock().stopping {
                return;
            }
            self.lost.fetch_add(1, Ordering::Relaxed);
            self.lock().keeper = None;
            keeper.reap();
            let Some(next) = self.replace() else { return };
            keeper = next;
        }
    }

    /// Tries until there is a keeper, or it is over.
    fn replace(&self) -> Option<Arc<Keeper>> {
        loop {
            let made = Keeper::start(&self.socket, &self.program).and_then(|keeper| {
                keeper.give(&self.note, &self.server.connection.descriptors())?;
                Ok(Arc::new(keeper))
            });
            let mut state = self.lock();
            if state.stopping {
                return None;
            }
            if let Ok(keeper) = made {
                state.keeper = Some(Arc::clone(&keeper));
                return Some(keeper);
            }
            let waited = self.changed.wait_timeout_while(state, RETRY, |state| !state.stopping);
            if waited.unwrap_or_else(PoisonError::into_inner).0.stopping {
                return None;
            }
        }
    }
}
