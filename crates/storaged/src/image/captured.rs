//! A layer that takes the changed pages of a process, compressed or not.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use layers::{Algorithm, Identity, LayerWriter, SECTOR, ZFileOptions, ZFileWriter};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::Parts;
use crate::error::{Context, Error, Result};
use crate::layer::worded;
use crate::library::Held;
use crate::memory::capture::{Captured, Extent, LayerSink, capture};
use crate::memory::maps::Image;
use crate::memory::process::Process;
use crate::names::{Format, Id, LayerName};
use crate::protocol::{Compression, Stack};

/// What is captured, from whom, and onto what.
pub struct Source<'a> {
    pub process: &'a Process,
    pub image: &'a Image,
    /// What the process had mapped; held by the caller.
    pub stack: &'a Stack,
}

/// Writes down in what pages the process differs from its image, as one layer on the image's stack. Durable.
/// A process that changed nothing adds no layer.
///
/// # Errors
/// As [`capture`]; no layer is left then.
pub fn write(parts: &Arc<Parts>, source: &Source<'_>, compression: Compression) -> Result<(Stack, Held, Captured)> {
    let id = Id::random().during("no random bytes")?;
    let new = parts.library.create(id)?;
    let uuid = id.uuid().parse().map_err(|e: layers::Invalid| Error::invalid(e.to_string()))?;
    let identity = Identity::new(source.stack.size_bytes).named(uuid, None);
    let file = new.file.try_clone().during("cannot write a capture")?;
    let never = AtomicBool::new(false);
    let run = |sink: &mut dyn LayerSink| capture(source.process, source.image, sink, &never);
    let (captured, format) = if let Some(algorithm) = algorithm(compression) {
        let out = ZFileWriter::new(file, ZFileOptions::new(algorithm)).map_err(|e| worded("a capture", e))?;
        let mut sink = Sink { layer: LayerWriter::new(out, identity).map_err(|e| worded("a capture", e))?, file: None };
        let captured = run(&mut sink)?;
        let (out, _) = sink.layer.finish().map_err(|e| worded("a capture", e))?;
        out.finish().map_err(|e| worded("a capture", e))?;
        (captured, Format::Zfile)
    } else {
        let reserved = Some(file.try_clone().during("cannot write a capture")?);
        let layer = LayerWriter::new(file, identity).map_err(|e| worded("a capture", e))?;
        let mut sink = Sink { layer, file: reserved };
        let captured = run(&mut sink)?;
        let (file, written) = sink.layer.finish().map_err(|e| worded("a capture", e))?;
        // Gives back what was reserved for pages that turned out to be zeros.
        file.set_len(written.file_bytes).during("cannot end a capture")?;
        (captured, Format::Lsmt)
    };
    let mut stack = source.stack.clone();
    if captured == Captured::default() {
        let held = parts.library.hold(&stack.layers)?;
        return Ok((stack, held, captured));
    }
    let (name, held): (LayerName, Held) = new.finish(format)?;
    stack.layers.push(name);
    Ok((stack, held, captured))
}

fn algorithm(compression: Compression) -> Option<Algorithm> {
    match compression {
        Compression::None => None,
        Compression::Lz4 => Some(Algorithm::Lz4),
        Compression::Zstd => Some(Algorithm::Zstd),
    }
}

struct Sink<W: Write> {
    layer: LayerWriter<W>,
    /// In which the data takes as much room as in memory.
    file: Option<File>,
}

impl<W: Write + Send> LayerSink for Sink<W> {
    fn reserve(&mut self, data_bytes: u64) -> io::Result<()> {
        let Some(file) = self.file.as_ref().filter(|_| data_bytes > 0) else { return Ok(()) };
        match fallocate(file, FallocateFlags::KEEP_SIZE, 0, layers::BLOCK + data_bytes) {
            // Then it shows when it is written.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => Ok(other?),
        }
    }

    fn append(&mut self, extents: &[Extent], data: &[u8]) -> io::Result<()> {
        let mut rest = data;
        for extent in extents {
            if extent.zero {
                self.layer.zeroed(extent.offset / SECTOR, extent.length / SECTOR)?;
                continue;
            }
            let length = usize::try_from(extent.length).map_err(|_| io::ErrorKind::InvalidInput)?;
            let (part, behind) = rest.split_at_checked(length).ok_or(io::ErrorKind::InvalidInput)?;
            self.layer.data(extent.offset / SECTOR, part)?;
            rest = behind;
        }
        Ok(())
    }
}
