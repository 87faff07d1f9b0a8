//! Images as files of a FUSE file system: `disks/NAME` for one VMM each, `memory/NAME` for many.
//!
//! The kernel protocol is spoken here and not by a library, since a connection must be taken over in the middle
//! of its life: its descriptors are with the [`keeper`](crate::keeper), and nothing that the kernel
//! refers to (node numbers; there are no handles) is known to one daemon only. After a crash the kernel sends again what was not
//! answered (Linux 6.9), so that guests see a pause and nothing else.

mod answer;
mod buffer;
mod connection;
mod counters;
mod guard;
mod mount;
mod nodes;
mod server;
mod slow;
mod terms;
mod wire;

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::answer::notice;
use self::buffer::Buffer;
use self::connection::Connection;
pub use self::counters::{Statistics, Work};
use self::guard::Guard;
use self::mount::Mounted;
use self::nodes::Node;
use self::server::{Desk, Server};
use self::slow::{Perform, Slow};
use self::terms::{MAX_REQUEST_BYTES, Terms};
use self::wire::Operation;
use crate::device::{DeviceId, Kind};
use crate::directory::Directory;
use crate::error::{Code, Context, Error};
use crate::keeper::{Keeper, Kept, Program};

#[derive(Clone, Debug)]
pub struct Options {
    /// Made if it is not there. Its parent is.
    pub mount: PathBuf,
    pub keeper_socket: PathBuf,
    pub keeper_program: Program,
    /// Threads that wait for requests.
    pub readers: usize,
    /// Descriptors that they share.
    pub channels: usize,
    /// How far the kernel reads ahead in memory images.
    pub read_ahead_kib: u32,
}

impl Options {
    pub fn new(mount: PathBuf, keeper_socket: PathBuf) -> Self {
        Self { mount, keeper_socket, keeper_program: Program::this(), readers: 4, channels: 1, read_ahead_kib: 512 }
    }
}

const SIGNAL_AGAIN: Duration = Duration::from_millis(1);

/// What was found when the front end started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Nothing was mounted.
    Fresh,
    /// The connection of an earlier daemon goes on, and no request was lost.
    TakenOver,
    /// The mount of an earlier daemon could not go on and was ended: whatever has a file of it open gets
    /// errors from it for ever. All devices that were attached are affected.
    Replaced,
}

/// What the keeper is told to tell the next daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    device: String,
    terms: Terms,
}

/// A mounted file system and the threads that serve it.
pub struct Front {
    server: Arc<Server>,
    guard: Guard,
    readers: Mutex<Vec<JoinHandle<()>>>,
    place: PathBuf,
}

impl Front {
    /// Mounts the file system, or takes over the one that is there, and serves it.
    ///
    /// The caller makes sure that no other daemon serves the same place: with two of them, requests
    /// that one has not answered yet would be done by both.
    ///
    /// # Errors
    /// `unsupported` where this kernel has no FUSE or a too old one; `conflict` when something else is
    /// mounted there; `unavailable` when a keeper can neither be reached nor be started.
    pub fn start(options: &Options, directory: Arc<dyn Directory>) -> Result<(Self, Start), Error> {
        let place = mount::prepare(&options.mount).during(options.mount.display())?;
        let mut keeper = Keeper::connect(&options.keeper_socket).during("keeper")?;
        let kept = keeper.as_ref().map(Keeper::take).transpose().during("keeper")?.flatten();
        if let Some((connection, note)) = kept.and_then(|kept| adopt(kept, &place)) {
            let front = Self::serve(place, connection, &note, keeper, options, directory)?;
            if note.terms.resends() {
                front.server.connection.notify(&notice::resend()).during("requests in flight")?;
            }
            return Ok((front, Start::TakenOver));
        }
        if let Some(old) = &mut keeper {
            old.drop_all().during("keeper")?;
        }
        let replaced = mount::end(&place).map_err(|error| in_the_way(&place, error))?;
        let (connection, note) = fresh(&place, options)?;
        let front = Self::serve(place.clone(), connection, &note, keeper, options, directory)
            .inspect_err(|_| drop(mount::end(&place)))?;
        Ok((front, if replaced { Start::Replaced } else { Start::Fresh }))
    }

    fn serve(
        place: PathBuf,
        connection: Connection,
        note: &Note,
        keeper: Option<Keeper>,
        options: &Options,
        directory: Arc<dyn Directory>,
    ) -> Result<Self, Error> {
        let started = || Keeper::start(&options.keeper_socket, &options.keeper_program);
        let keeper = keeper.map_or_else(started, Ok).during("keeper")?;
        let server = Arc::new(Server {
            directory,
            connection,
            slow: Arc::new(Slow::new()),
            counters: counters::Counters::default(),
            stopping: AtomicBool::new(false),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        });
        let text = serde_json::to_string(note).map_err(io::Error::from).during("note for the keeper")?;
        // Before the first request is read: from then on it matters that the descriptors outlive us.
        let guard = Guard::start(keeper, text, Arc::clone(&server), options).during("keeper")?;
        let front = Self { server, guard, readers: Mutex::default(), place };
        sys::interrupt::allow().during("signals")?;
        front.start_readers(options.readers.max(1)).during("reading threads")?;
        Ok(front)
    }

    fn start_readers(&self, count: usize) -> io::Result<()> {
        let server = Arc::clone(&self.server);
        let perform: Perform = Arc::new(move |slow, job, buffer| server.perform(slow, job, buffer));
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        for channel in 0..count {
            let server = Arc::clone(&self.server);
            let perform = Arc::clone(&perform);
            let thread = std::thread::Builder::new().name(format!("fuse-{channel}"));
            readers.push(thread.spawn(move || {
                let buffer = Buffer::new(MAX_REQUEST_BYTES as usize);
                read(&server, Desk { channel, buffer, scratch: Vec::new(), perform });
            })?);
        }
        Ok(())
    }

    /// Where the device called *name* is seen.
    pub fn path(&self, kind: Kind, name: &str) -> PathBuf {
        self.place.join(nodes::folder_name(kind)).join(name)
    }

    pub fn mount_point(&self) -> &Path {
        &self.place
    }

    /// Makes the kernel forget a device that the directory has no more: its cached pages go, and whoever still
    /// has it open gets errors. Waits for requests on it that are in progress.
    pub fn removed(&self, kind: Kind, name: &str, id: DeviceId) {
        // What the kernel does not know it need not forget.
        let folder = Node::Folder(kind).number();
        let _ = self.server.connection.notify(&notice::invalidate_entry(folder, name.as_bytes()));
        let _ = self.server.connection.notify(&notice::invalidate_node(Node::Device(id).number()));
    }

    /// Makes the kernel ask for the size of a device again.
    pub fn resized(&self, id: DeviceId) {
        let _ = self.server.connection.notify(&notice::invalidate_attributes(Node::Device(id).number()));
    }

    pub fn statistics(&self) -> Statistics {
        let (queued, threads) = self.server.slow.load();
        self.server.counters.read(queued, threads, self.guard.lost())
    }

    /// Stops serving and leaves the mount to the next daemon. Requests wait for it in the kernel.
    ///
    /// Returns whether every request that was begun has been answered within *limit*; if not, the next
    /// daemon begins it again where the kernel can do so, and this process should end now.
    pub fn stop(&self, limit: Duration) -> bool {
        self.server.stopping.store(true, Ordering::SeqCst);
        let readers: Vec<_> = self.readers.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect();
        // A signal between the look at the flag and the wait for a request is lost; so it is sent again.
        for reader in readers {
            while !reader.is_finished() {
                sys::interrupt::interrupt(&reader);
                std::thread::sleep(SIGNAL_AGAIN);
            }
            let _ = reader.join();
        }
        let finished = self.server.slow.stop(limit);
        self.guard.stop();
        finished
    }

    /// Ends the file system, and the keeper with it.
    ///
    /// # Errors
    /// `conflict` while something has a file of it open; it is served as before.
    pub fn unmount(&self) -> Result<(), Error> {
        mount::unmount(&self.place).map_err(|error| in_the_way(&self.place, error))?;
        self.guard.release();
        self.stop(Duration::ZERO);
        Ok(())
    }
}

fn in_the_way(place: &Path, error: io::Error) -> Error {
    let error = Error::io(place.display(), error);
    let busy = error.source.as_ref().is_some_and(|source| source.raw_os_error() == Some(Errno::BUSY.raw_os_error()));
    if busy { Error { code: Code::Conflict, ..error } } else { error }
}

/// The connection of an earlier daemon, if it is the one that is mounted and no request of it was lost.
fn adopt(kept: Kept, place: &Path) -> Option<(Connection, Note)> {
    let note: Note = serde_json::from_str(&kept.note).ok()?;
    let connection = Connection::of(kept.descriptors)?;
    let mounted = mount::at(place).ok()??;
    let same = mounted.is_fuse && mounted.device == note.device && connection.alive();
    // Where nothing is sent again, what was in flight would wait for ever.
    let whole = note.terms.resends() || mount::waiting(&mounted) == Some(0);
    (same && whole).then_some((connection, note))
}

fn fresh(place: &Path, options: &Options) -> Result<(Connection, Note), Error> {
    let session = connection::open_device().map_err(|error| match error {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Error::new(Code::Unsupported, "this kernel has no FUSE"),
        other => Error::io("/dev/fuse", other.into()),
    })?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mounted = mount::mount(session.as_fd(), place, uid, gid).map_err(|error| in_the_way(place, error))?;
    begin(session, mounted, options).inspect_err(|_| drop(mount::end(place)))
}

/// Agrees with the kernel on how to talk. Its first message is there as soon as it is mounted.
fn begin(session: std::os::fd::OwnedFd, mounted: Mounted, options: &Options) -> Result<(Connection, Note), Error> {
    let mut buffer = Buffer::new(MAX_REQUEST_BYTES as usize);
    let length = buffer.receive(&session).during("the first message of the kernel")?;
    let received = wire::header(buffer.received(length));
    let Ok((header, Operation::Init(offer))) =
        received.and_then(|(header, body)| Ok((header, wire::operation(header.opcode, body)?)))
    else {
        return Err(Error::new(Code::Unsupported, "the kernel does not begin as FUSE does"));
    };
    let terms = Terms::agree(offer)
        .map_err(|_| Error::new(Code::Unsupported, format!("FUSE {}.{} is too old", offer.major, offer.minor)))?;
    let mut answer = Vec::new();
    terms.answer(&mut answer);
    let connection = Connection::new(session);
    connection.answer(0, header.unique, Ok(&answer));
    let connection = connection.wider(options.channels.clamp(1, crate::keeper::MAX_DESCRIPTORS)).during("/dev/fuse")?;
    // Only slower without.
    let _ = mount::set_read_ahead(&mounted, options.read_ahead_kib);
    Ok((connection, Note { device: mounted.device, terms }))
}

/// Reads and serves until the kernel or [`Front::stop`] ends it.
fn read(server: &Server, mut desk: Desk) {
    while !server.stopping.load(Ordering::SeqCst) {
        let received = desk.buffer.receive(server.connection.channel(desk.channel));
        match received {
            Ok(length) => server.serve(&mut desk, length),
            // The request was taken back before it was read; or a signal.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
            // Unmounted, or aborted.
            Err(_) => return,
        }
    }
}
