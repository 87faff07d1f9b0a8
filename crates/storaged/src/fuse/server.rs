//! From a request to what is done about it: the way of every request, whichever thread has read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::answer::{self, Attributes, Failure, open};
use super::buffer::Buffer;
use super::connection::Connection;
use super::counters::{Counter, Counters};
use super::nodes::{self, Node};
use super::slow::{Job, Perform, Slow, Work};
use super::wire::{self, Header, Operation};
use crate::device::{Answer, Device, DeviceId, Kind};
use crate::directory::Directory;

/// `O_DSYNC`, which `O_SYNC` contains.
const OPEN_DURABLE: u32 = 0o10_000;
/// `FATTR_SIZE`, and those that name an owner or a mode.
const SET_SIZE: u32 = 1 << 3;
const SET_OWNER_OR_MODE: u32 = 0b111;
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 0x10;
const FOLDER_MODE: u32 = 0o040_555;
const FILE_MODE: u32 = 0o100_600;
const ENTRIES_AT_ONCE: usize = 128;

pub(super) struct Server {
    pub(super) directory: Arc<dyn Directory>,
    pub(super) connection: Connection,
    pub(super) slow: Arc<Slow>,
    pub(super) counters: Counters,
    pub(super) stopping: AtomicBool,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// What one reading thread has of its own.
pub(super) struct Desk {
    pub(super) channel: usize,
    pub(super) buffer: Buffer,
    pub(super) scratch: Vec<u8>,
    pub(super) perform: Perform,
}

impl Server {
    /// Serves the request in the first *length* bytes of the desk's buffer.
    pub(super) fn serve(&self, desk: &mut Desk, length: usize) {
        let since = Instant::now();
        let Desk { channel, buffer, scratch, perform } = desk;
        let received = buffer.received(length);
        let Ok((header, body)) = wire::header(received) else {
            // Not even a number to answer; the kernel does not do this.
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        if header.unique & wire::RESENT != 0 && header.opcode != wire::opcode::INTERRUPT {
            self.counters.resent.fetch_add(1, Ordering::Relaxed);
        }
        let Ok(operation) = wire::operation(header.opcode, body) else {
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            self.connection.answer(*channel, header.unique, Err(Errno::INVAL.into()));
            return;
        };
        scratch.clear();
        let done = match operation {
            Operation::Read { offset, size } => {
                self.read(header, *channel, buffer, offset, size, since, perform);
                return;
            }
            Operation::Write { offset, flags, data } => {
                let done = self.write(header, offset, data, flags & OPEN_DURABLE != 0);
                self.counters.writes.add(data.len(), done.is_err(), since.elapsed());
                done.map(|written| answer::written(written, scratch))
            }
            Operation::Sync => match self.file(header.node) {
                Ok((id, device)) if device.kind() == Kind::Disk => {
                    let job = Job { device: id, channel: *channel, unique: header.unique, work: Work::Flush, since };
                    self.submit(job, perform);
                    return;
                }
                other => other.map(drop),
            },
            Operation::Allocate { mode, offset, length } => match self.discard(header, mode, offset, length) {
                Ok(Some((device, length))) => {
                    let work = Work::Discard { offset, length };
                    self.submit(Job { device, channel: *channel, unique: header.unique, work, since }, perform);
                    return;
                }
                other => other.map(drop),
            },
            Operation::Interrupt { unique } => {
                if let Some(job) = self.slow.interrupt(unique) {
                    self.counters.interrupted.fetch_add(1, Ordering::Relaxed);
                    self.connection.answer(job.channel, job.unique, Err(Errno::INTR.into()));
                }
                return;
            }
            Operation::Forget | Operation::NotifyReply => return,
            other => self.look(header, &other, scratch),
        };
        self.connection.answer(*channel, header.unique, done.map(|()| scratch.as_slice()));
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one desk, of which each is lent on its own")]
    fn read(
        &self,
        header: Header,
        channel: usize,
        buffer: &mut Buffer,
        offset: u64,
        size: u32,
        since: Instant,
        perform: &Perform,
    ) {
        let failed = |failure| {
            self.counters.reads.add(0, true, since.elapsed());
            self.connection.answer(channel, header.unique, Err(failure));
        };
        let (id, device) = match self.file(header.node) {
            Ok(found) => found,
            Err(failure) => return failed(failure),
        };
        let length = clip(device.as_ref(), offset, size).min(buffer.data_bytes());
        match device.read_now(buffer.data(length), offset) {
            Ok(Answer::Done) => {
                self.connection.answer_whole(channel, header.unique, buffer.answer(header.unique, length));
                self.counters.reads.add(length, false, since.elapsed());
            }
            Ok(Answer::WouldWait) => {
                let work = Work::Read { offset, length };
                self.submit(Job { device: id, channel, unique: header.unique, work, since }, perform);
            }
            Err(error) => failed(Failure::of_device(&error)),
        }
    }

    fn submit(&self, job: Job, perform: &Perform) {
        self.counters.slow.fetch_add(1, Ordering::Relaxed);
        if let Err(job) = self.slow.submit(job, perform) {
            self.counter(job).add(0, true, job.since.elapsed());
            self.connection.answer(job.channel, job.unique, Err(Errno::IO.into()));
        }
    }

    /// Does what a reading thread had no time for.
    pub(super) fn perform(&self, slow: &Slow, job: Job, buffer: &mut Buffer) {
        let done = self.file(Node::Device(job.device).number()).and_then(|(_, device)| {
            let done = match job.work {
                Work::Read { offset, length } => device.read(buffer.data(length), offset).map(|()| length),
                Work::Flush => device.flush().map(|()| 0),
                Work::Discard { offset, length } => {
                    device.discard(offset, length).map(|()| usize::try_from(length).unwrap_or(usize::MAX))
                }
            };
            done.map_err(|error| Failure::of_device(&error))
        });
        if !slow.claim(job) {
            return;
        }
        match (&done, job.work) {
            (Ok(length), Work::Read { .. }) => {
                self.connection.answer_whole(job.channel, job.unique, buffer.answer(job.unique, *length));
            }
            (Ok(_), _) => self.connection.answer(job.channel, job.unique, Ok(&[])),
            (Err(failure), _) => self.connection.answer(job.channel, job.unique, Err(*failure)),
        }
        self.counter(job).add(done.unwrap_or(0), done.is_err(), job.since.elapsed());
    }

    fn counter(&self, job: Job) -> &Counter {
        match job.work {
            Work::Read { .. } => &self.counters.reads,
            Work::Flush => &self.counters.flushes,
            Work::Discard { .. } => &self.counters.discards,
        }
    }

    fn write(&self, header: Header, offset: u64, data: &[u8], durable: bool) -> Result<u32, Failure> {
        let (_, device) = self.file(header.node)?;
        if device.kind() == Kind::Memory {
            return Err(Errno::ROFS.into());
        }
        let length = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        if clip(device.as_ref(), offset, length) < data.len() {
            return Err(Errno::NOSPC.into()); // as a block device says it
        }
        device.write(data, offset, durable).map_err(|error| Failure::of_device(&error))?;
        Ok(length)
    }

    /// What is to be discarded, and of which device; nothing, for memory: what the balloon of one
    /// guest drops is precious to its siblings.
    fn discard(&self, header: Header, mode: u32, offset: u64, length: u64) -> Result<Option<(DeviceId, u64)>, Failure> {
        let (id, device) = self.file(header.node)?;
        let keeps_size = mode & KEEP_SIZE != 0;
        match (device.kind(), mode & !KEEP_SIZE) {
            (_, PUNCH_HOLE) if keeps_size => {}
            (Kind::Disk, ZERO_RANGE) => {}
            (Kind::Memory, ZERO_RANGE) => return Err(Errno::ROFS.into()),
            _ => return Err(Errno::OPNOTSUPP.into()),
        }
        let end = offset.checked_add(length).ok_or(Errno::INVAL)?;
        if end > device.size_bytes() && !keeps_size {
            return Err(Errno::FBIG.into());
        }
        let length = end.min(device.size_bytes()).saturating_sub(offset);
        Ok((device.kind() == Kind::Disk && length > 0).then_some((id, length)))
    }

    /// What needs no bytes of any device.
    fn look(&self, header: Header, operation: &Operation<'_>, out: &mut Vec<u8>) -> Result<(), Failure> {
        match *operation {
            Operation::Lookup { name } => self.attributes(self.find(header.node, name)?, Errno::NOENT)?.entry(out),
            Operation::GetAttributes => self.attributes(node(header.node)?, Errno::STALE)?.answer(out),
            Operation::SetAttributes { valid, size } => {
                let attributes = self.attributes(node(header.node)?, Errno::STALE)?;
                // Times may be set, to no effect; a size only to what it is.
                if valid & SET_OWNER_OR_MODE != 0 || (valid & SET_SIZE != 0 && size != attributes.size_bytes) {
                    return Err(Errno::PERM.into());
                }
                attributes.answer(out);
            }
            Operation::Open => {
                let (_, device) = self.file(header.node).map_err(|_| Errno::STALE)?;
                let flags = match device.kind() {
                    Kind::Disk => open::DIRECT | open::PARALLEL_WRITES,
                    Kind::Memory => open::KEEP_CACHE,
                };
                answer::opened(flags | open::NO_FLUSH, out);
            }
            Operation::OpenFolder => answer::opened(0, out),
            Operation::ReadFolder { offset, size } => self.list(node(header.node)?, offset, size, out)?,
            Operation::StatFs => answer::file_system(out),
            Operation::Release | Operation::Destroy => {}
            Operation::Control => return Err(Errno::NOTTY.into()),
            Operation::ChangeOfTree => return Err(Errno::ROFS.into()),
            _ => return Err(Failure::NEVER_ASK_AGAIN),
        }
        Ok(())
    }

    /// The device of a file that is open. One that was removed meanwhile reads as broken.
    fn file(&self, node: u64) -> Result<(DeviceId, Arc<dyn Device>), Failure> {
        let Some(Node::Device(id)) = Node::of(node) else { return Err(Errno::ISDIR.into()) };
        let device = self.directory.device(id).ok_or(Errno::IO)?;
        Ok((id, device))
    }

    fn find(&self, folder: u64, name: &[u8]) -> Result<Node, Failure> {
        let name = std::str::from_utf8(name).map_err(|_| Errno::NOENT)?;
        let found = match node(folder)? {
            Node::Root => nodes::FOLDERS.iter().find(|(_, known)| *known == name).map(|(kind, _)| Node::Folder(*kind)),
            Node::Folder(kind) => self.directory.find(kind, name).map(Node::Device),
            Node::Device(_) => return Err(Errno::NOTDIR.into()),
        };
        found.ok_or_else(|| Errno::NOENT.into())
    }

    fn attributes(&self, node: Node, missing: Errno) -> Result<Attributes, Failure> {
        let (size_bytes, mode, links, valid) = match node {
            Node::Root | Node::Folder(_) => (0, FOLDER_MODE, 2, answer::FOR_EVER),
            Node::Device(id) => {
                let device = self.directory.device(id).ok_or(missing)?;
                // A disk may grow at any time.
                let valid = if device.kind() == Kind::Memory { answer::FOR_EVER } else { Duration::ZERO };
                (device.size_bytes(), FILE_MODE, 1, valid)
            }
        };
        Ok(Attributes { node: node.number(), size_bytes, mode, links, uid: self.uid, gid: self.gid, valid })
    }

    /// Entries of a folder after *offset*, which is the number of the node that was named last.
    fn list(&self, node: Node, offset: u64, size: u32, out: &mut Vec<u8>) -> Result<(), Failure> {
        let limit = size as usize;
        let mut put = |node: Node, kind, name: &str| {
            let number = node.number();
            answer::folder_entry(out, limit, number, number, kind, name.as_bytes())
        };
        match node {
            Node::Root => {
                for (kind, name) in nodes::FOLDERS {
                    let node = Node::Folder(kind);
                    if node.number() > offset && !put(node, entry_type::FOLDER, name) {
                        break;
                    }
                }
            }
            Node::Folder(kind) => {
                let mut after = match Node::of(offset) {
                    Some(Node::Device(id)) => Some(id),
                    _ => None,
                };
                loop {
                    let named = self.directory.list(kind, after, ENTRIES_AT_ONCE);
                    for entry in &named {
                        if !put(Node::Device(entry.id), entry_type::FILE, &entry.name) {
                            return Ok(());
                        }
                    }
                    after = named.last().map(|entry| entry.id);
                    if after.is_none() {
                        break;
                    }
                }
            }
            Node::Device(_) => return Err(Errno::NOTDIR.into()),
        }
        Ok(())
    }
}

fn node(number: u64) -> Result<Node, Failure> {
    Node::of(number).ok_or_else(|| Errno::STALE.into())
}

/// Types of entries, as `readdir` has them.
mod entry_type {
    pub(super) const FOLDER: u32 = 4;
    pub(super) const FILE: u32 = 8;
}

/// How many of *size* bytes from *offset* there are.
fn clip(device: &dyn Device, offset: u64, size: u32) -> usize {
    let there = device.size_bytes().saturating_sub(offset);
    usize::try_from(there).unwrap_or(usize::MAX).min(size as usize)
}
