//! The daemon's socket: connections, each with a thread that reads and one for each call in progress.
//!
//! Calls wait for disks and for each other, so each has a thread; how many there are at once is bounded,
//! and a caller that sends more than that is not read from until one is done.

mod connection;
mod frame;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::error::{Context, Result};
use crate::node::Service;
use crate::root::remove_if_there;

const MAX_CONNECTIONS: usize = 64;
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// A socket at *path* that only its owner may open. Nobody else listens there: whoever has the
/// directory's lock has seen to that.
///
/// # Errors
/// What the file system says; `invalid` for a path that is too long.
pub fn listen(path: &Path) -> Result<UnixListener> {
    remove_if_there(path).during("cannot remove an old socket")?;
    let listener = UnixListener::bind(path).during(format_args!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .during("cannot close the socket to others")?;
    Ok(listener)
}

/// Serves *listener* until a caller has shut the daemon down; says so through *ended*.
///
/// # Errors
/// When no thread can be started.
pub fn serve(listener: UnixListener, service: Arc<Service>, ended: mpsc::Sender<()>) -> io::Result<()> {
    let connections = Arc::new(AtomicUsize::new(0));
    thread::Builder::new().name("accept".into()).spawn(move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => accept(stream, &service, &ended, &connections),
                // Out of descriptors, or the caller is gone: the next one may fare better.
                Err(_) => thread::sleep(ACCEPT_AGAIN),
            }
        }
    })?;
    Ok(())
}

fn accept(stream: UnixStream, service: &Arc<Service>, ended: &mpsc::Sender<()>, connections: &Arc<AtomicUsize>) {
    let guard = Counted::new(connections);
    if guard.number > MAX_CONNECTIONS {
        return; // closed: there is no request to answer yet
    }
    let (service, ended) = (Arc::clone(service), ended.clone());
    let thread = thread::Builder::new().name("connection".into());
    // Without a thread the connection is closed, too.
    let _ = thread.spawn(move || {
        connection::serve(stream, &service, &ended);
        drop(guard);
    });
}

struct Counted {
    of: Arc<AtomicUsize>,
    number: usize,
}

impl Counted {
    fn new(of: &Arc<AtomicUsize>) -> Self {
        Self { number: of.fetch_add(1, Ordering::SeqCst) + 1, of: Arc::clone(of) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.of.fetch_sub(1, Ordering::SeqCst);
    }
}
