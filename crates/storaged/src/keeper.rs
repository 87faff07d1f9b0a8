//! The keeper: a process that does nothing but hold descriptors while the daemon is away.
//!
//! A FUSE connection lives as long as somebody has its descriptors open. The daemon gives them to
//! the keeper before it serves its first request, and the next daemon takes them. The keeper reads
//! nothing from them, is in a session of its own, and ends when it holds nothing and nobody is connected.
//!
//! One message is one packet of JSON with descriptors beside it. A request is `{"give": note}` with the
//! descriptors, `"take"`, or `"drop"`; an answer is `{"held": note}` with the descriptors, or `"nothing"`.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

/// Descriptors in one set.
pub const MAX_DESCRIPTORS: usize = 64;
const MAX_PACKET_BYTES: usize = 16 << 10;
const MAX_CONNECTIONS: usize = 8;
const FIRST_CONNECTION: Duration = Duration::from_secs(30);
/// How often it is looked at, while no daemon is there, whether what is held is still of use.
const LOOK: Duration = Duration::from_secs(2);
/// The keeper answers from memory: if it takes longer, it is stopped or gone.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Give(String),
    Take,
    Drop,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Held(String),
    Nothing,
}

/// What is kept: descriptors, and what the next daemon has to know about them.
#[derive(Debug)]
pub struct Kept {
    pub note: String,
    pub descriptors: Vec<OwnedFd>,
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    if bytes.len() > MAX_PACKET_BYTES || descriptors.len() > MAX_DESCRIPTORS {
        return Err(Errno::MSGSIZE.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::MSGSIZE.into());
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// One packet; nothing at the end of the connection.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags)?;
    let mut descriptors = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE.into());
    }
    bytes.truncate(got.bytes);
    Ok((got.bytes > 0).then_some((bytes, descriptors)))
}

/// The whole of the program `storaged keep`: nothing has been opened yet, and the listening socket is standard input.
///
/// # Errors
/// As [`keep`].
pub fn main() -> io::Result<()> {
    sys::inherit::close_all_but_standard();
    sys::signals::unblock_all();
    keep(&io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs a keeper whose listening socket is *listener*, until it holds nothing and nobody is connected.
///
/// # Errors
/// When the listener is not one. What a connection does wrong ends that connection.
fn keep(listener: &OwnedFd) -> io::Result<()> {
    // Already so where the caller has arranged it.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    // The kernel should take anything else first: with this process all guests lose their disks.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut kept: Option<Kept> = None;
    let mut connections: Vec<OwnedFd> = Vec::new();
    let mut began = false;
    loop {
        if began && kept.is_none() && connections.is_empty() {
            return Ok(());
        }
        let limit = match (began, connections.is_empty()) {
            (false, _) => Some(FIRST_CONNECTION),
            (true, true) => Some(LOOK),
            (true, false) => None,
        };
        let (ready, fresh) = wait(listener, &connections, limit)?;
        if !began && !fresh {
            return Ok(()); // the daemon that started us is gone
        }
        if connections.is_empty() && kept.as_ref().is_some_and(has_ended) {
            kept = None; // unmounted, with nobody there to tell us
        }
        // From the last one, so that removing one does not move those still to be looked at.
        for place in ready.into_iter().rev() {
            if serve(connections[place].as_fd(), &mut kept).is_err() {
                connections.remove(place);
            }
        }
        if fresh && let Ok(connection) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            began = true;
            if connections.len() == MAX_CONNECTIONS {
                connections.remove(0);
            }
            connections.push(connection);
        }
    }
}

/// Whether what is held leads nowhere any more. It is not waited for: the kernel wakes whoever waits at a FUSE
/// connection for each request.
fn has_ended(kept: &Kept) -> bool {
    let mut fds: Vec<PollFd<'_>> = kept.descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::empty())).collect();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds.iter().all(|fd| fd.revents().contains(PollFlags::ERR))
}

/// Waits for something to do: connections with something to read, and whether there is a new one.
fn wait(listener: &OwnedFd, connections: &[OwnedFd], limit: Option<Duration>) -> io::Result<(Vec<usize>, bool)> {
    let mut fds: Vec<PollFd<'_>> =
        connections.iter().chain([listener]).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = limit.map(|limit| Timespec { tv_sec: i64::try_from(limit.as_secs()).unwrap_or(1), tv_nsec: 0 });
    rustix::io::retry_on_intr(|| poll(&mut fds, limit.as_ref()))?;
    let fresh = !fds[connections.len()].revents().is_empty();
    let ready = (0..connections.len()).filter(|place| !fds[*place].revents().is_empty()).collect();
    Ok((ready, fresh))
}

/// Serves one request; an error ends the connection.
fn serve(connection: BorrowedFd<'_>, kept: &mut Option<Kept>) -> io::Result<()> {
    let (bytes, descriptors) = receive(connection)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    match serde_json::from_slice(&bytes)? {
        Request::Give(note) => *kept = Some(Kept { note, descriptors }),
        Request::Take => {}
        Request::Drop => *kept = None,
    }
    let (answer, descriptors) = match kept {
        Some(kept) => (Answer::Held(kept.note.clone()), kept.descriptors.iter().map(AsFd::as_fd).collect()),
        None => (Answer::Nothing, Vec::new()),
    };
    send(connection, &serde_json::to_vec(&answer)?, &descriptors, SendFlags::DONTWAIT)
}

/// A connection to a keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    /// When we started it, so that it does not stay as a zombie when it dies before us.
    child: Mutex<Option<Child>>,
}

/// How to start a keeper: a program, and what makes it call [`main`].
#[derive(Clone, Debug)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<String>,
}

impl Program {
    /// This very program with `keep`, also when its file was replaced by a newer one.
    pub fn this() -> Self {
        Self { path: "/proc/self/exe".into(), arguments: vec!["keep".into()] }
    }
}

impl Keeper {
    /// The keeper that listens at *path*, if there is one.
    ///
    /// # Errors
    /// When there may be one and it cannot be reached.
    pub fn connect(path: &Path) -> io::Result<Option<Self>> {
        let socket = new_socket()?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER))?;
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
        Ok(Some(Self { socket, child: Mutex::new(None) }))
    }

    /// Starts a keeper that listens at *path*. No other may listen there: the caller has seen to that.
    ///
    /// # Errors
    /// `ENAMETOOLONG` for a path that no socket can have; else what the system says.
    pub fn start(path: &Path, program: &Program) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = new_socket()?;
        rustix::net::bind(&listener, &address)?;
        // Before it listens, so that nobody else can have connected.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        rustix::net::listen(&listener, 8)?;
        let child = Command::new(&program.path)
            .args(&program.arguments)
            .stdin(Stdio::from(listener))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let connected = Self::connect(path)?.ok_or(Errno::CONNREFUSED)?;
        Ok(Self { child: Mutex::new(Some(child)), ..connected })
    }

    fn ask(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<Option<Kept>> {
        send(self.socket.as_fd(), &serde_json::to_vec(request)?, descriptors, SendFlags::empty())?;
        let (bytes, descriptors) = receive(self.socket.as_fd())?.ok_or(io::ErrorKind::ConnectionReset)?;
        Ok(match serde_json::from_slice(&bytes)? {
            Answer::Held(note) => Some(Kept { note, descriptors }),
            Answer::Nothing => None,
        })
    }

    /// Has *descriptors* held from now on, in place of any before.
    ///
    /// # Errors
    /// When the keeper does not say that it holds them.
    pub fn give(&self, note: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let held = self.ask(&Request::Give(note.into()), descriptors)?;
        let all = held.is_some_and(|kept| kept.note == note && kept.descriptors.len() == descriptors.len());
        if all { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// What is held, and stays held.
    ///
    /// # Errors
    /// When the keeper does not answer.
    pub fn take(&self) -> io::Result<Option<Kept>> {
        self.ask(&Request::Take, &[])
    }

    /// Has nothing held. The keeper ends when the connection to it does.
    ///
    /// # Errors
    /// When the keeper does not answer.
    pub fn drop_all(&self) -> io::Result<()> {
        self.ask(&Request::Drop, &[]).map(drop)
    }

    /// Ends the connection in both directions; whoever waits for it is woken.
    pub fn hang_up(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Returns when the keeper is gone, or after [`Keeper::hang_up`].
    pub fn wait_gone(&self) {
        // Not for packets: those are for whoever asked.
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        while !matches!(poll(&mut fds, None), Ok(1..)) {}
    }

    /// Waits for the end of the process, if it was started here.
    pub fn reap(&self) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = child {
            let _ = child.wait();
        }
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}
