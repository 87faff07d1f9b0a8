//! One watched directory: a task that turns kernel events into a bounded queue of changes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use sys::credentials::Credentials;
use sys::ready::{AsyncFd, Interest, watch};
use tokio::task::AbortHandle;
use wire::filesystem::{Event, EventType, WatchRequest};
use wire::{Code, RpcError};

use super::tree::{Raw, Step, Tree};
use super::watch::{Place, Watchers};
use super::{entry, failed};
use crate::accounts::Names;
use crate::blocking::as_user;

/// Changes kept for a client that does not fetch them.
const MAX_QUEUED: usize = 4096;
/// Directories of one recursive watch.
const MAX_DIRECTORIES: usize = 16_384;
/// Events handled before others get their turn.
const BATCH: usize = 512;

/// File systems whose changes are made elsewhere and never seen here.
const NETWORK: [(u32, &str); 7] = [
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x517b, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9P"),
    (0x00c3_6400, "Ceph"),
];

/// Dropping it ends the watch.
pub(super) struct Watcher {
    queue: Rc<RefCell<Queue>>,
    task: AbortHandle,
    _place: Place,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<Event>,
    lost: bool,
    waker: Option<Waker>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watcher {
    /// # Errors
    /// `not_found`, `invalid_argument` for what is no directory or on a network, `resource_exhausted`
    /// when there is no watch left.
    pub(super) async fn start(
        watchers: &Watchers,
        who: Credentials,
        path: String,
        request: &WatchRequest,
    ) -> Result<Rc<Self>, RpcError> {
        let place = watchers.place()?;
        let fd =
            inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|e| failed("inotify", &e.into()))?;
        let inotify = watch(fd, Interest::READABLE).map_err(|e| failed("inotify", &e))?;
        let mut job = Job {
            inotify,
            who,
            root: path,
            recursive: request.recursive,
            include_entry: request.include_entry,
            tree: Tree::new(request.recursive),
            directories: 0,
            queue: Rc::default(),
        };
        let (root, on_network) = (job.root.clone(), request.allow_network_mounts);
        let checked = as_user(&job.who, move || check(&root, on_network)).await;
        checked.unwrap_or_else(|e| Err(RpcError::internal(e.to_string())))?;
        job.enter(String::new(), false).await?;
        let queue = job.queue.clone();
        let task = tokio::task::spawn_local(job.run()).abort_handle();
        Ok(Rc::new(Self { queue, task, _place: place }))
    }

    /// Everything since the last call.
    ///
    /// # Errors
    /// `resource_exhausted`, once, when changes were lost in between.
    pub(super) fn take_all(&self) -> Result<Vec<Event>, RpcError> {
        let mut queue = self.queue.borrow_mut();
        if std::mem::take(&mut queue.lost) {
            return Err(lost());
        }
        Ok(queue.events.drain(..).collect())
    }

    /// The next change, or that some were lost.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Result<Event, RpcError>> {
        let mut queue = self.queue.borrow_mut();
        if let Some(event) = queue.events.pop_front() {
            return Poll::Ready(Ok(event));
        }
        if std::mem::take(&mut queue.lost) {
            return Poll::Ready(Err(lost()));
        }
        queue.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

fn lost() -> RpcError {
    RpcError::new(Code::ResourceExhausted, "changes were lost: there were more than could be kept")
}

fn check(path: &str, network_is_fine: bool) -> Result<(), RpcError> {
    let kind = fs::metadata(path).map_err(|e| failed(path, &e))?;
    if !kind.is_dir() {
        return Err(RpcError::invalid(format!("{path} is not a directory")));
    }
    let system = rustix::fs::statfs(path).map_err(|e| failed(path, &e.into()))?;
    let number = u32::try_from(system.f_type & 0xffff_ffff).unwrap_or(0);
    match NETWORK.iter().find(|(magic, _)| *magic == number) {
        Some((_, name)) if !network_is_fine => {
            Err(RpcError::invalid(format!("{path} is on a {name} mount, whose changes may not be seen here")))
        }
        _ => Ok(()),
    }
}

/// The state of the task.
struct Job {
    inotify: AsyncFd<OwnedFd>,
    who: Credentials,
    root: String,
    recursive: bool,
    include_entry: bool,
    tree: Tree,
    directories: usize,
    queue: Rc<RefCell<Queue>>,
}

impl Job {
    async fn run(mut self) {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else { return };
            let (batch, drained) = read_batch(self.inotify.get_ref());
            if drained {
                ready.clear_ready();
            }
            drop(ready);
            let mut told = Vec::new();
            for step in batch.iter().flat_map(|raw| self.tree.steps(raw)).collect::<Vec<_>>() {
                self.take(step, &mut told).await;
            }
            self.tell(told).await;
            if drained {
                self.tree.settle();
            }
        }
    }

    async fn take(&mut self, step: Step, told: &mut Vec<Event>) {
        match step {
            Step::Tell { name, change } => told.push(Event { name, event_type: change, entry: None }),
            Step::Lost => self.lose(),
            Step::Leave { name } => {
                for number in self.tree.leave(&name) {
                    self.directories -= 1;
                    let _ = inotify::remove_watch(self.inotify.get_ref(), number);
                }
            }
            Step::Enter { name, announce } => match self.enter(name, announce).await {
                Ok(found) => {
                    for Found { name, has_content } in found {
                        self.tree.announce(name.clone());
                        told.push(Event { name: name.clone(), event_type: EventType::Create, entry: None });
                        if has_content {
                            told.push(Event { name, event_type: EventType::Write, entry: None });
                        }
                    }
                }
                // It is gone again, or may not be read by this user.
                Err(error) if error.code != Code::ResourceExhausted => {}
                Err(_) => self.lose(),
            },
        }
    }

    /// Watches the directory *name* and, if asked to, all below it; with *announce* gives what is in them.
    async fn enter(&mut self, name: String, announce: bool) -> Result<Vec<Found>, RpcError> {
        let fd = self.inotify.get_ref().try_clone().map_err(|e| failed("inotify", &e))?;
        let (root, recursive, left) =
            (self.root.clone(), self.recursive, MAX_DIRECTORIES.saturating_sub(self.directories));
        let entered = as_user(&self.who, move || {
            let mut walk = Walk { fd, root, recursive, announce, left, watched: Vec::new(), found: Vec::new() };
            walk.enter(&name).map(|()| (walk.watched, walk.found))
        });
        let (watched, found) = entered.await.unwrap_or_else(|e| Err(RpcError::internal(e.to_string())))?;
        self.directories += watched.len();
        for (number, name) in watched {
            self.tree.enter(number, name);
        }
        Ok(found)
    }

    async fn tell(&self, mut told: Vec<Event>) {
        if told.is_empty() {
            return;
        }
        if self.include_entry {
            let root = self.root.clone();
            let described = as_user(&self.who, move || {
                let names = Names::load();
                for event in &mut told {
                    if !matches!(event.event_type, EventType::Remove | EventType::Rename) {
                        event.entry = entry::describe(&absolute(&root, &event.name), &names).ok();
                    }
                }
                told
            });
            told = described.await.unwrap_or_default();
        }
        let mut queue = self.queue.borrow_mut();
        for event in told {
            queue.push(event);
        }
        queue.wake();
    }

    fn lose(&self) {
        let mut queue = self.queue.borrow_mut();
        queue.lost = true;
        queue.wake();
    }
}

impl Queue {
    fn push(&mut self, event: Event) {
        // Writing a large file is one change, not thousands.
        if let Some(last) = self.events.back_mut()
            && last.event_type == EventType::Write
            && event.event_type == EventType::Write
            && last.name == event.name
        {
            *last = event;
        } else if self.events.len() < MAX_QUEUED {
            self.events.push_back(event);
        } else {
            self.lost = true;
        }
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Up to a batch of events, and whether those were all.
fn read_batch(fd: &OwnedFd) -> (Vec<Raw>, bool) {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    let mut batch = Vec::new();
    // What has been read must be taken, or it is lost with the buffer.
    while batch.len() < BATCH || !reader.is_buffer_empty() {
        match reader.next() {
            Ok(event) => batch.push(Raw {
                directory: event.wd(),
                flags: event.events(),
                name: event.file_name().map(|name| name.to_string_lossy().into_owned()),
            }),
            Err(_) => return (batch, true),
        }
    }
    (batch, false)
}

/// Adds watches, on a worker thread and as the user: one may watch what one may read.
struct Walk {
    fd: OwnedFd,
    root: String,
    recursive: bool,
    announce: bool,
    /// Directories that may still be added.
    left: usize,
    watched: Vec<(i32, String)>,
    found: Vec<Found>,
}

/// An entry that was in a new directory before anybody looked.
struct Found {
    name: String,
    /// It was written to before it could be watched, so nobody else will tell.
    has_content: bool,
}

impl Walk {
    fn enter(&mut self, name: &str) -> Result<(), RpcError> {
        let path = absolute(&self.root, name);
        if self.left == 0 {
            let text = format!("{path}: a watch covers at most {MAX_DIRECTORIES} directories");
            return Err(RpcError::new(Code::ResourceExhausted, text));
        }
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let number = inotify::add_watch(self.fd.as_fd(), &path, flags).map_err(|error| match error {
            Errno::NOSPC => RpcError::new(Code::ResourceExhausted, "the kernel has no watch left"),
            other => failed(&path, &other.into()),
        })?;
        self.left -= 1;
        self.watched.push((number, name.to_owned()));
        if self.recursive || self.announce {
            self.enter_children(&path, name)?;
        }
        Ok(())
    }

    /// The watch is there already, so what is made from now on is told by the kernel.
    fn enter_children(&mut self, path: &str, name: &str) -> Result<(), RpcError> {
        let children = fs::read_dir(path).map_err(|e| failed(path, &e))?;
        for child in children.filter_map(io::Result::ok) {
            let child_name = child.file_name().to_string_lossy().into_owned();
            let below = if name.is_empty() { child_name } else { format!("{name}/{child_name}") };
            let kind = child.file_type();
            if self.announce {
                let is_file = kind.as_ref().is_ok_and(fs::FileType::is_file);
                let has_content = is_file && child.metadata().is_ok_and(|metadata| metadata.len() > 0);
                self.found.push(Found { name: below.clone(), has_content });
            }
            if self.recursive && kind.is_ok_and(|kind| kind.is_dir()) {
                match self.enter(&below) {
                    // Gone again, or not this user's to see.
                    Err(error) if matches!(error.code, Code::NotFound | Code::PermissionDenied) => {}
                    other => other?,
                }
            }
        }
        Ok(())
    }
}

fn absolute(root: &str, name: &str) -> String {
    match name {
        "" | "." => root.to_owned(),
        name => format!("{}/{name}", root.trim_end_matches('/')),
    }
}
