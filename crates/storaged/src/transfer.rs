//! Making one layer of many, or of a raw file: in one pass, in constant memory.
//!
//! Blocks of zeros become holes. Nothing is below what is made here, so that a hole reads as zeros.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use layers::{Identity, LayerWriter, ReadAt, SECTOR};
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::Errno;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{Context, Error, Result};
use crate::image::Parts;
use crate::layer::worded;
use crate::library::Held;
use crate::names::{Format, Id, LayerName};
use crate::protocol::Stack;
use crate::remote::{self, Digest, Sums};
use crate::stack;

const BUFFER: usize = 1 << 20;
/// What is looked at for zeros at a time.
const BLOCK: usize = 4096;
/// How much of an image is asked for its data at a time: bounds the list of what there is.
const WINDOW_BYTES: u64 = 1 << 30;

/// One layer with the bytes of *stack*; a stack that is one already stays as it is.
///
/// # Errors
/// As for opening the stack; `no_space` without room.
pub fn flatten(parts: &Arc<Parts>, stack: &Stack) -> Result<(Stack, Held)> {
    stack::check(stack)?;
    let held = parts.library.hold(&stack.layers)?;
    let view = parts.stacks.open(stack)?;
    if let [only] = stack.layers.as_slice() {
        if only.format() == Format::Lsmt {
            return Ok((stack.clone(), held));
        }
    }
    let (name, held) = write_layer(parts, stack.size_bytes, |out| {
        let mut buf = vec![0; BUFFER];
        for start in (0..stack.size_bytes).step_by(usize::try_from(WINDOW_BYTES).unwrap_or(usize::MAX)) {
            let end = (start + WINDOW_BYTES).min(stack.size_bytes);
            for run in view.data(start / SECTOR..end / SECTOR) {
                let read = |part: &mut [u8], at: u64| view.read(part, at);
                copy(out, &mut buf, run.start * SECTOR, run.end * SECTOR, read)?;
            }
        }
        Ok(())
    })?;
    Ok((Stack { layers: vec![name], size_bytes: stack.size_bytes }, held))
}

/// A raw image file as a layer of that size. The file is removed once the layer is durable.
///
/// # Errors
/// `invalid` for what is no regular file or too large, `not_found`, `no_space` without room.
pub fn import(parts: &Arc<Parts>, source: &Path, size_bytes: u64) -> Result<(Stack, Held)> {
    stack::check(&Stack { layers: Vec::new(), size_bytes })?;
    if !source.is_absolute() {
        return Err(Error::invalid("the source is no absolute path"));
    }
    // A link could lead anywhere by the time it is removed, and a pipe could be waited for for ever.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open(source, flags, Mode::empty()).map_err(|e| match e {
        Errno::LOOP => Error::invalid("the source is a link"),
        other => Error::io(format_args!("cannot open {}", source.display()), other.into()),
    })?);
    let metadata = file.metadata().during("cannot look at the source")?;
    if !metadata.is_file() || metadata.len() > size_bytes {
        return Err(Error::invalid(format!("the source is no regular file of at most {size_bytes} bytes")));
    }
    let length = metadata.len();
    let (name, held) = write_layer(parts, size_bytes, |out| {
        let mut buf = vec![0; BUFFER];
        let mut at = 0;
        while let Some((start, end)) = next_data(&file, at)? {
            // The last sector is filled up with zeros.
            let (start, end) = (start / SECTOR * SECTOR, end.min(length));
            copy(out, &mut buf, start, end.next_multiple_of(SECTOR), |part, at| {
                let there = usize::try_from(length.saturating_sub(at)).unwrap_or(usize::MAX).min(part.len());
                part[there..].fill(0);
                ReadAt::read_exact_at(&file, &mut part[..there], at)
            })?;
            at = end;
        }
        Ok(())
    })?;
    if let Err(error) = fs::remove_file(source) {
        eprintln!("storaged: {} stays: {error}", source.display());
    }
    Ok((Stack { layers: vec![name], size_bytes }, held))
}

/// What others need to know of a layer to read it from elsewhere: its size, digest, and the sums of its blocks.
///
/// # Errors
/// `not_found`; what reading it says.
pub fn describe(parts: &Arc<Parts>, layer: &LayerName) -> Result<Value> {
    let _held = parts.library.hold(std::slice::from_ref(layer))?;
    let content = parts.library.content(layer)?;
    let what = format_args!("layer {layer}").to_string();
    let size_bytes = content.size().during(&what)?;
    let (mut whole, mut sums, mut buf) = (Sha256::new(), Vec::new(), Vec::new());
    for at in (0..size_bytes).step_by(usize::try_from(remote::BLOCK_BYTES).unwrap_or(usize::MAX)) {
        buf.resize(usize::try_from(remote::BLOCK_BYTES.min(size_bytes - at)).unwrap_or(0), 0);
        content.read_exact_at(&mut buf, at).during(&what)?;
        whole.update(&buf);
        sums.extend_from_slice(&Sha256::digest(&buf));
    }
    let digest = Digest(whole.finalize().into());
    Ok(json!({ "size_bytes": size_bytes, "digest": digest, "block_sums": Sums::new(sums) }))
}

/// The first run at or behind *at* that is no hole.
fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    Ok(Some((start, seek(file, SeekFrom::Hole(start))?)))
}

type Out<'a> = LayerWriter<&'a File>;

fn write_layer(
    parts: &Arc<Parts>,
    size_bytes: u64,
    content: impl FnOnce(&mut Out<'_>) -> io::Result<()>,
) -> Result<(LayerName, Held)> {
    let new = parts.library.create(Id::random().during("no random bytes")?)?;
    let mut out = LayerWriter::new(&new.file, Identity::new(size_bytes)).map_err(|e| worded("a new layer", e))?;
    content(&mut out).during("cannot copy into a new layer")?;
    let (mut file, _) = out.finish().map_err(|e| worded("a new layer", e))?;
    file.flush().during("cannot write a new layer")?;
    new.finish(Format::Lsmt)
}

/// Copies the bytes *start..end*, whole sectors, without blocks that are zero.
fn copy(
    out: &mut Out<'_>,
    buf: &mut [u8],
    start: u64,
    end: u64,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = start;
    while at < end {
        // Up to a multiple of the buffer, so that blocks are those of the image.
        let stop = ((at / BUFFER as u64 + 1) * BUFFER as u64).min(end);
        let part = &mut buf[..usize::try_from(stop - at).map_err(|_| io::ErrorKind::InvalidInput)?];
        read(part, at)?;
        let mut rest = &*part;
        while !rest.is_empty() {
            let zeros = blocks(rest, at, is_zero);
            at += zeros as u64;
            rest = &rest[zeros..];
            let data = blocks(rest, at, |block| !is_zero(block));
            out.data(at / SECTOR, &rest[..data])?;
            at += data as u64;
            rest = &rest[data..];
        }
    }
    Ok(())
}

/// How many bytes at the front of *buf*, which is at *at*, are blocks of which *which* is true.
fn blocks(buf: &[u8], at: u64, which: impl Fn(&[u8]) -> bool) -> usize {
    let mut done = 0;
    while done < buf.len() {
        let place = usize::try_from(at % BLOCK as u64).unwrap_or_default() + done;
        let length = (BLOCK - place % BLOCK).min(buf.len() - done);
        if !which(&buf[done..done + length]) {
            break;
        }
        done += length;
    }
    done
}

fn is_zero(block: &[u8]) -> bool {
    // Sixteen at a time, which the compiler makes one comparison of; the first difference ends it.
    let mut parts = block.chunks_exact(16);
    parts.all(|part| part == [0; 16]) && parts.remainder().iter().all(|byte| *byte == 0)
}
