//! The two descriptors of `ublk`: the one that makes block devices, and the one through which a device is served.
//!
//! Both take commands only through `io_uring`. What the numbers mean is the caller's affair; what is
//! here keeps every address that the kernel is given valid for as long as it may use it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use io_uring::squeue::{Entry, Entry128};
use io_uring::{IoUring, cqueue, opcode, types};

const FETCH: u32 = 0xc010_7520;
const COMMIT_AND_FETCH: u32 = 0xc010_7521;
/// One in the kernel's table of a queue's requests.
pub const DESCRIPTOR_BYTES: usize = 24;
const PAGE_BYTES: usize = 4096;
const PR_SET_IO_FLUSHER: libc::c_int = 57;
/// Beside the tags, which are 16 bits wide.
const WAKE: u64 = 1 << 32;

/// A command for [`Control::call`].
#[derive(Clone, Copy, Debug)]
pub struct Command {
    pub operation: u32,
    pub device: u32,
    pub data: u64,
}

/// `/dev/ublk-control`.
#[derive(Debug)]
pub struct Control(File);

impl Control {
    /// # Errors
    /// `ENOENT` when this kernel has no ublk or its module is not loaded.
    pub fn open() -> io::Result<Self> {
        File::options().read(true).write(true).open("/dev/ublk-control").map(Self)
    }

    /// Runs one command to its end; *buffer* goes in with it and comes back with what the kernel wrote.
    ///
    /// # Errors
    /// What the kernel says; `ENOSYS` or `EPERM` where `io_uring` is not to be had.
    pub fn call(&self, command: Command, buffer: &mut [u8]) -> io::Result<u32> {
        let length = u16::try_from(buffer.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut ring: IoUring<Entry128, cqueue::Entry> = IoUring::builder().build(1)?;
        let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr() as u64 };
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&command.device.to_ne_bytes());
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes()); // of no queue
        bytes[6..8].copy_from_slice(&length.to_ne_bytes());
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&command.data.to_ne_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.0.as_raw_fd()), command.operation).cmd(bytes).build();
        // SAFETY: the buffer is ours until the command has ended, which the loop below waits for
        // whatever happens; the descriptor is open as long as `self` is.
        unsafe { ring.submission().push(&entry) }.map_err(|_| io::ErrorKind::OutOfMemory)?;
        let result = loop {
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                // A signal; or it was not even taken, which shows below.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if !ring.submission().is_empty() {
                        return Err(error);
                    }
                }
            }
            if let Some(done) = ring.completion().next() {
                break done.result();
            }
        };
        u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    }
}

/// Wakes whoever waits in [`Queue::wait`].
#[derive(Clone, Debug)]
pub struct Waker(Arc<File>);

impl Waker {
    pub fn wake(&self) {
        // It fails only when 2^64 wakes have not been noticed.
        let _ = io::Write::write(&mut &*self.0, &1_u64.to_ne_bytes());
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Woken,
    /// With 0 there is a request in the descriptor of *tag*; anything else ends the tag.
    Tag {
        tag: u16,
        result: i32,
    },
}

/// The only queue of one device. Everything is done by the thread that opened it.
pub struct Queue {
    ring: IoUring<Entry, cqueue::Entry>,
    file: Arc<File>,
    waker: Waker,
    descriptors: Mapping,
    depth: u16,
}

/// Memory that the kernel writes and we read.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is the whole of a mapping that `mmap` made, and nothing borrows from it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Queue {
    /// Opens *path*, `/dev/ublkcN`, of a device whose queue holds *depth* requests.
    ///
    /// # Errors
    /// `EBUSY` while another process has it open; what `io_uring` and `mmap` say.
    pub fn open(path: &Path, depth: u16) -> io::Result<Self> {
        let file = Arc::new(File::options().read(true).write(true).open(path)?);
        let bytes = (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, file.as_raw_fd(), 0)
        };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        let descriptors = Mapping { start: start.ok_or_else(io::Error::last_os_error)?, bytes };
        // SAFETY: eventfd takes two numbers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and ours.
        let waker = Waker(Arc::new(File::from(unsafe { OwnedFd::from_raw_fd(event) })));
        // Room for a command of each tag and the wait for the waker: it is never full.
        let entries = u32::from(depth) + 1;
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries)?;
        let mut queue = Self { ring, file, waker, descriptors, depth };
        queue.watch_waker()?;
        Ok(queue)
    }

    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// The descriptor through which bytes of requests are read and written.
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// Makes *tag* ready to carry a request, for the first time.
    ///
    /// # Errors
    /// `EINVAL` for a tag that is none.
    pub fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.command(FETCH, tag, 0)
    }

    /// Answers the request of *tag* with a number of bytes or a negative error number, and makes the tag ready for the next.
    ///
    /// # Errors
    /// `EINVAL` for a tag that is none.
    pub fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.command(COMMIT_AND_FETCH, tag, result)
    }

    fn command(&mut self, operation: u32, tag: u16, result: i32) -> io::Result<()> {
        if tag >= self.depth {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = [0; 16]; // queue 0, and no address: bytes are copied through the file
        bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&result.to_ne_bytes());
        let command = opcode::UringCmd16::new(types::Fd(self.file.as_raw_fd()), operation).cmd(bytes);
        self.push(&command.build().user_data(u64::from(tag)))
    }

    fn watch_waker(&mut self) -> io::Result<()> {
        let readable = u32::try_from(libc::POLLIN).unwrap_or(1);
        let poll = opcode::PollAdd::new(types::Fd(self.waker.0.as_raw_fd()), readable);
        self.push(&poll.build().user_data(WAKE))
    }

    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: neither command has an address in it, and both descriptors are open as long as the ring is.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        self.ring.submit()?;
        // SAFETY: as above.
        unsafe { self.ring.submission().push(entry) }.map_err(|_| io::ErrorKind::OutOfMemory.into())
    }

    /// Hands over what was fetched and committed, and adds what has happened to *events*.
    ///
    /// # Errors
    /// What the kernel says; not for a signal.
    pub fn submit(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.enter(0, events)
    }

    /// The same, but waits for something to happen first.
    ///
    /// # Errors
    /// As [`Queue::submit`].
    pub fn wait(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.enter(1, events)
    }

    fn enter(&mut self, wanted: usize, events: &mut Vec<Event>) -> io::Result<()> {
        match self.ring.submit_and_wait(wanted) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        let mut woken = false;
        for done in self.ring.completion() {
            match u16::try_from(done.user_data()) {
                Ok(tag) => events.push(Event::Tag { tag, result: done.result() }),
                Err(_) => woken = true,
            }
        }
        if woken {
            let mut count = [0; 8];
            // Before anybody looks at what it was for, so that none is missed.
            let _ = io::Read::read(&mut &*self.waker.0, &mut count);
            self.watch_waker()?;
            events.push(Event::Woken);
        }
        Ok(())
    }

    /// What the kernel asks for with *tag*: only between its event and its commit does it stay the same.
    ///
    /// # Panics
    /// For a tag that is none.
    pub fn descriptor(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES] {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let place = usize::from(tag) * DESCRIPTOR_BYTES;
        // SAFETY: inside of the mapping, since the tag is below the depth, and aligned to eight bytes. The kernel may
        // write there at any time: it is read as plain memory that changes, and never referred to.
        let words: [u64; 3] = unsafe { self.descriptors.start.add(place).cast::<[u64; 3]>().as_ptr().read_volatile() };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (place, word) in words.into_iter().enumerate() {
            bytes[place * 8..place * 8 + 8].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// Lets the calling thread write to disk while the kernel waits for it to make room in memory.
///
/// # Errors
/// `EPERM` without `CAP_SYS_RESOURCE`.
pub fn be_part_of_writeback() -> io::Result<()> {
    // SAFETY: prctl with numbers only.
    let done = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
