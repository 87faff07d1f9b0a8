//! Captured memory as one sealed layer, written past the page cache where the file system can do that.
//!
//! A gigabyte through the page cache is copied once more and then waited for; directly, the disk's
//! speed is all there is to it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

use layers::{Identity, LayerWriter, SECTOR};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use sys::buffer::Buffer;

use super::capture::{Captured, Extent, LayerSink, capture};
use super::failure::about_output;
use super::maps::Image;
use super::process::Process;
use crate::error::{Code, Error};

const BUFFER_BYTES: usize = 1 << 20;
/// What direct I/O wants of addresses, offsets and lengths, whatever the disk.
const ALIGNMENT: usize = 4096;

/// Writes to the empty *file* in what pages the process differs from *image*: a whole layer, durable on return.
///
/// # Errors
/// As [`capture`]. The file is worthless then, and the caller removes it.
pub fn capture_layer(
    process: &Process,
    image: &Image,
    file: &File,
    identity: Identity,
    cancel: &AtomicBool,
) -> Result<Captured, Error> {
    let output = Output::new(file).map_err(about_output)?;
    let mut sink = Sink { file, writer: LayerWriter::new(output, identity).map_err(worded)? };
    let captured = capture(process, image, &mut sink, cancel)?;
    let (_, written) = sink.writer.finish().map_err(worded)?;
    // Room that was reserved for what turned out to be zeros is given back.
    file.set_len(written.file_bytes).map_err(about_output)?;
    file.sync_data().map_err(about_output)?;
    Ok(captured)
}

struct Sink<'a> {
    file: &'a File,
    writer: LayerWriter<Output<'a>>,
}

impl LayerSink for Sink<'_> {
    fn append(&mut self, extents: &[Extent], mut data: &[u8]) -> io::Result<()> {
        for extent in extents {
            if extent.zero {
                self.writer.zeroed(extent.offset / SECTOR, extent.length / SECTOR).map_err(to_io)?;
            } else {
                let (now, later) = data.split_at(usize::try_from(extent.length).unwrap_or(usize::MAX));
                self.writer.data(extent.offset / SECTOR, now).map_err(to_io)?;
                data = later;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, data_bytes: u64) -> io::Result<()> {
        if data_bytes == 0 {
            return Ok(());
        }
        match fallocate(self.file, FallocateFlags::KEEP_SIZE, 0, data_bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn to_io(error: layers::Error) -> io::Error {
    match error {
        layers::Error::Write(source) => source,
        other => io::Error::other(other),
    }
}

fn worded(error: layers::Error) -> Error {
    match error {
        layers::Error::Write(source) => about_output(source),
        other => Error::new(Code::Bug, format!("a captured layer: {other}")),
    }
}

/// Bytes in order to a file, directly from aligned memory as long as they come in whole blocks.
struct Output<'a> {
    file: &'a File,
    buffer: Buffer,
    filled: usize,
    at: u64,
    is_direct: bool,
}

impl<'a> Output<'a> {
    fn new(file: &'a File) -> io::Result<Self> {
        let is_direct = set_direct(file, true).is_ok();
        Ok(Self { file, buffer: Buffer::new(BUFFER_BYTES)?, filled: 0, at: 0, is_direct })
    }

    fn write_out(&mut self) -> io::Result<()> {
        let whole = if self.is_direct { self.filled / ALIGNMENT * ALIGNMENT } else { self.filled };
        self.file.write_all_at(&self.buffer[..whole], self.at)?;
        self.at += whole as u64;
        self.buffer.copy_within(whole..self.filled, 0);
        self.filled -= whole;
        Ok(())
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let whole = bytes.len() / ALIGNMENT * ALIGNMENT;
        if whole >= BUFFER_BYTES / 4 && bytes.as_ptr().addr() % ALIGNMENT == 0 && self.filled % ALIGNMENT == 0 {
            self.write_out()?;
            self.file.write_all_at(&bytes[..whole], self.at)?;
            self.at += whole as u64;
            return Ok(whole);
        }
        let length = bytes.len().min(BUFFER_BYTES - self.filled);
        self.buffer[self.filled..self.filled + length].copy_from_slice(&bytes[..length]);
        self.filled += length;
        if self.filled == BUFFER_BYTES {
            self.write_out()?;
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_out()?;
        if self.filled > 0 {
            // The end of a file need not be a whole block.
            set_direct(self.file, false)?;
            self.is_direct = false;
            self.write_out()?;
        }
        Ok(())
    }
}

/// A file that stays open is read through the page cache, as all others.
impl Drop for Output<'_> {
    fn drop(&mut self) {
        if self.is_direct {
            let _ = set_direct(self.file, false);
        }
    }
}

fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(fcntl_setfl(file, flags)?)
}
