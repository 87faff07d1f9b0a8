//! What a stopped process changed in its mapping of a memory image, handed to a layer that is being written.
//!
//! Cost grows with changed pages. One thread reads and looks for zero pages while another
//! writes; a few buffers go round between them, so memory is bounded whatever the guest's size.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::{io, thread};

use sys::buffer::Buffer;
use sys::remote::MOST_PIECES;

use super::PAGE_BYTES;
use super::failure::about_output;
use super::maps::{Area, Image};
use super::process::Process;
use crate::error::{Code, Error};

const BUFFER_BYTES: usize = 2 << 20;
const BUFFERS: usize = 3;
/// Zero ranges take no room in a buffer, so something else has to bound them.
const MOST_EXTENTS: usize = 2 * MOST_PIECES;
const PAGE: usize = 4096;

/// A range of the image, in bytes: new data, or zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub length: u64,
    pub zero: bool,
}

/// Takes changed pages in order of offset. A layer's streaming writer is one.
pub trait LayerSink: Send {
    /// At most that much data will come: a full disk is best found out before any work is done.
    ///
    /// # Errors
    /// `ENOSPC`, and whatever else the file system says.
    fn reserve(&mut self, data_bytes: u64) -> io::Result<()>;

    /// Appends *extents*, which come after all before; *data* is the content of those that are not
    /// zero, one after the other, and starts at a page in memory.
    ///
    /// # Errors
    /// Whatever the file system says. Nothing more is appended after one.
    fn append(&mut self, extents: &[Extent], data: &[u8]) -> io::Result<()>;
}

/// How much went into a layer. Zero pages are a change without data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    pub data_bytes: u64,
    pub zero_bytes: u64,
}

/// How many bytes of *image* the process holds privately: what a capture reads.
///
/// # Errors
/// As [`capture`].
pub fn dirty_bytes(process: &Process, image: &Image) -> Result<u64, Error> {
    count_private(process, &process.areas(image)?)
}

pub(super) fn count_private(process: &Process, areas: &[Area]) -> Result<u64, Error> {
    let mut bytes = 0;
    for area in areas {
        for range in process.private(area.start, area.end) {
            let (start, end) = range?;
            bytes += end - start;
        }
    }
    Ok(bytes)
}

/// Hands to *sink* in what pages the process differs from *image*. The process must not run meanwhile.
///
/// Stops soon after *cancel* becomes true. What the sink has by then, or after any error,
/// is worthless: the caller throws it away.
///
/// # Errors
/// `unavailable` if the process ends meanwhile, does not map the image, or the call is cancelled; `conflict` for
/// a mapping that is not private; `no_space` for a full disk.
pub fn capture(
    process: &Process,
    image: &Image,
    sink: &mut dyn LayerSink,
    cancel: &AtomicBool,
) -> Result<Captured, Error> {
    let areas = process.areas(image)?;
    sink.reserve(count_private(process, &areas)?).map_err(about_output)?;
    let (full, filled) = sync_channel::<Batch>(BUFFERS);
    let (back, empty) = sync_channel::<Batch>(BUFFERS);
    for _ in 0..BUFFERS {
        let batch = Batch::new().map_err(|source| Error::new(Code::Exhausted, format!("no memory: {source}")))?;
        back.send(batch).map_err(|_| Error::new(Code::Bug, "a channel without a reader"))?;
    }
    let captured = thread::scope(|scope| {
        let reader = thread::Builder::new()
            .name("capture".into())
            .spawn_scoped(scope, || read_all(process, &areas, Batches { empty, full, current: None }, cancel))
            .map_err(|source| Error::new(Code::Exhausted, format!("no thread: {source}")))?;
        let mut captured = Captured::default();
        let mut written = Ok(());
        for batch in filled {
            written = sink.append(&batch.extents, &batch.buffer[..batch.length]);
            if written.is_err() {
                break; // the reader finds the channel closed, and ends
            }
            for extent in &batch.extents {
                *(if extent.zero { &mut captured.zero_bytes } else { &mut captured.data_bytes }) += extent.length;
            }
            // Fails when the reader has ended and needs no more.
            let _ = back.send(batch.emptied());
        }
        drop(back);
        let read = reader.join().unwrap_or_else(|_| Err(Error::new(Code::Bug, "the reader of a capture panicked")));
        written.map_err(about_output)?;
        read.map(|()| captured)
    })?;
    process.check_alive()?;
    Ok(captured)
}

/// One buffer on its way, with what is in it.
struct Batch {
    buffer: Buffer,
    length: usize,
    extents: Vec<Extent>,
}

impl Batch {
    fn new() -> io::Result<Self> {
        Ok(Self { buffer: Buffer::new(BUFFER_BYTES)?, length: 0, extents: Vec::with_capacity(MOST_EXTENTS) })
    }

    fn emptied(mut self) -> Self {
        self.length = 0;
        self.extents.clear();
        self
    }

    fn push(&mut self, extent: Extent) {
        match self.extents.last_mut() {
            Some(last) if last.zero == extent.zero && last.offset + last.length == extent.offset => {
                last.length += extent.length;
            }
            _ => self.extents.push(extent),
        }
    }
}

/// The reader's end of the round of buffers. A closed channel means that the writer has given up.
struct Batches {
    empty: Receiver<Batch>,
    full: SyncSender<Batch>,
    current: Option<Batch>,
}

impl Batches {
    /// A buffer with room for *bytes* more, and for their extents.
    fn with_room(&mut self, bytes: usize) -> Result<&mut Batch, Error> {
        let full = |batch: &Batch| {
            batch.length + bytes > BUFFER_BYTES || batch.extents.len() + 1 + bytes / PAGE > batch.extents.capacity()
        };
        if self.current.as_ref().is_some_and(full) {
            self.send()?;
        }
        match &mut self.current {
            Some(batch) => Ok(batch),
            none => Ok(none.insert(self.empty.recv().map_err(|_| given_up())?)),
        }
    }

    fn send(&mut self) -> Result<(), Error> {
        match self.current.take() {
            Some(batch) if !batch.extents.is_empty() => self.full.send(batch).map_err(|_| given_up()),
            other => {
                self.current = other;
                Ok(())
            }
        }
    }
}

fn given_up() -> Error {
    Error::new(Code::Unavailable, "the capture was given up")
}

fn read_all(process: &Process, areas: &[Area], mut batches: Batches, cancel: &AtomicBool) -> Result<(), Error> {
    for area in areas {
        let mut pieces = Pieces { area: *area, addresses: Vec::with_capacity(MOST_PIECES), bytes: 0 };
        let mut at = area.start;
        for range in process.private(area.start, area.end) {
            let (mut start, end) = range?;
            if area.zeroed && at < start {
                pieces.read(process, &mut batches, cancel)?;
                batches.with_room(0)?.push(Extent { offset: area.to_offset(at), length: start - at, zero: true });
            }
            at = end;
            while start < end {
                start = pieces.add(start, end);
                if pieces.is_full() {
                    pieces.read(process, &mut batches, cancel)?;
                }
            }
        }
        pieces.read(process, &mut batches, cancel)?;
        if area.zeroed && at < area.end {
            batches.with_room(0)?.push(Extent { offset: area.to_offset(at), length: area.end - at, zero: true });
        }
    }
    batches.send()
}

/// Address ranges that are read in one go: as many as fit into a buffer and a system call.
struct Pieces {
    area: Area,
    addresses: Vec<(u64, u64)>,
    bytes: usize,
}

impl Pieces {
    /// Adds what fits of [start, end), and returns where that ends.
    fn add(&mut self, start: u64, end: u64) -> u64 {
        let room = (BUFFER_BYTES - self.bytes) as u64;
        let length = room.min(end - start);
        self.addresses.push((start, start + length));
        self.bytes += usize::try_from(length).unwrap_or(BUFFER_BYTES);
        start + length
    }

    fn is_full(&self) -> bool {
        self.bytes >= BUFFER_BYTES || self.addresses.len() >= MOST_PIECES
    }

    fn read(&mut self, process: &Process, batches: &mut Batches, cancel: &AtomicBool) -> Result<(), Error> {
        if cancel.load(Ordering::Relaxed) {
            return Err(given_up());
        }
        if self.addresses.is_empty() {
            return Ok(());
        }
        let batch = batches.with_room(self.bytes)?;
        let mut from = batch.length;
        process.read(&self.addresses, &mut batch.buffer[from..from + self.bytes])?;
        for &(start, end) in &self.addresses {
            let mut offset = self.area.to_offset(start);
            let until = offset + (end - start);
            while offset < until {
                let zero = is_zero(&batch.buffer[from..from + PAGE]);
                if !zero {
                    if batch.length != from {
                        batch.buffer.copy_within(from..from + PAGE, batch.length);
                    }
                    batch.length += PAGE;
                }
                batch.push(Extent { offset, length: PAGE_BYTES, zero });
                from += PAGE;
                offset += PAGE_BYTES;
            }
        }
        self.addresses.clear();
        self.bytes = 0;
        Ok(())
    }
}

/// Looks at a whole page only where its ends and its middle are zero.
fn is_zero(page: &[u8]) -> bool {
    let words = |at: usize| page[at..at + 8] == [0; 8];
    words(0)
        && words(PAGE / 2)
        && words(PAGE - 8)
        && page.chunks_exact(64).all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}
