//! One immutable layer file: where its bytes are read, compressed or not.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use layers::{BLOCK, Index, Layer, ReadAt, SECTOR, ZFile};

use crate::content::Content;
use crate::device::Answer;
use crate::error::{Code, Context, Error, Result};
use crate::names::{Format, LayerName};
use crate::reading::{Caching, Store};
use crate::remote::{Failure, SharedObject};

/// Memory is mapped by pages; a layer that maps less cannot be one of memory.
const PAGE_SECTORS: u64 = 8;
/// What a header or trailer takes.
pub(crate) const BLOCK_BYTES: usize = 4096;
const _: () = assert!(BLOCK_BYTES as u64 == BLOCK);

pub struct LayerFile {
    name: LayerName,
    source: Source,
    pub size_bytes: u64,
    /// Whether it maps whole pages only.
    pub paged: bool,
}

enum Source {
    Plain(Content),
    Compressed(Box<ZFile<Content>>),
}

impl LayerFile {
    /// Opens *name*, and gives its index: whoever joins it with others keeps only what comes of that.
    ///
    /// # Errors
    /// `corrupt` for anything that a sealed layer cannot be, `exhausted` for an index beyond all bounds.
    pub fn open(name: LayerName, content: &Content) -> Result<(Arc<Self>, Index)> {
        let open = || {
            let source = Source::open(&name, content.clone())?;
            Layer::open(source).map_err(|error| worded(format_args!("layer {name}"), error))
        };
        let layer = match open() {
            // What is kept of a remote layer may be what is wrong, rather than the layer.
            Err(error) if error.code == Code::Corrupt && content.distrust(0..content.size().unwrap_or(0)) => open()?,
            other => other?,
        };
        let (source, identity, index) = layer.into_parts();
        let whole = |number: u64| number % PAGE_SECTORS == 0;
        let paged = index.segments().iter().all(|segment| whole(segment.offset()) && whole(segment.length()));
        Ok((Arc::new(Self { name, source, size_bytes: identity.virtual_size, paged }), index))
    }

    /// How many entries the index of *name* has, without loading it.
    ///
    /// # Errors
    /// As for [`LayerFile::open`].
    pub fn count(name: &LayerName, content: Content) -> Result<u64> {
        let source = Source::open(name, content)?;
        let counted = (|| {
            let start = source.size()?.checked_sub(BLOCK).ok_or(io::ErrorKind::UnexpectedEof)?;
            let mut block = [0; BLOCK_BYTES];
            source.read_exact_at(&mut block, start)?;
            io::Result::Ok(layers::Header::decode(&block)?.index_count)
        })();
        counted.during(format_args!("layer {name}"))
    }

    pub fn name(&self) -> &LayerName {
        &self.name
    }

    /// One more memory image is made of it, or one less.
    pub fn count_image(&self, more: bool) {
        if let Source::Plain(Content::Local(file)) = &self.source {
            file.0.count_image(more);
        }
    }

    /// How a memory image reads it. If it alone does, what it has read is in its own pages; others
    /// profit from what is kept.
    pub fn caching(&self) -> Caching {
        match &self.source {
            Source::Plain(Content::Local(file)) if file.0.has_one_image() => Caching::Pass,
            // What is kept of a compressed one is no copy, and what is kept of a remote one need not be fetched again.
            _ => Caching::Keep,
        }
    }
}

impl LayerFile {
    /// Whether it lies elsewhere.
    pub fn is_remote(&self) -> bool {
        self.source.content().remote().is_some()
    }

    /// Where *length* bytes at *offset* come from, if that is elsewhere: the file, and its blocks.
    pub fn remote_blocks(&self, offset: u64, length: u64) -> Option<(SharedObject, Range<u64>)> {
        let object = self.source.content().remote()?;
        let bytes = offset..offset.saturating_add(length);
        let bytes = match &self.source {
            Source::Plain(_) => bytes,
            Source::Compressed(zfile) => zfile.compressed_range(bytes),
        };
        Some((object.clone(), object.blocks(&bytes)))
    }
}

impl Store for LayerFile {
    fn read(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<()> {
        if let (Source::Plain(Content::Local(file)), Caching::Pass) = (&self.source, caching) {
            return file.0.read_past_cache(buf, at);
        }
        match self.source.read_exact_at(buf, at) {
            Err(error) if self.source.distrust(&error, at, buf.len()) => self.source.read_exact_at(buf, at),
            other => other,
        }
    }

    fn read_now(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<Answer> {
        match &self.source {
            Source::Plain(file) => file.read_now(buf, at, caching),
            // What it takes is known only when the compressed bytes are there.
            Source::Compressed(_) => Ok(Answer::WouldWait),
        }
    }

    fn begin(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<Answer> {
        let answer = self.read_now(buf, at, caching)?;
        if answer == Answer::WouldWait {
            let range = at..at.saturating_add(buf.len() as u64);
            match &self.source {
                // The kernel fetches by itself what it did not have.
                Source::Plain(Content::Local(_)) => (),
                Source::Plain(file) => file.expect(range.start, range.end - range.start),
                Source::Compressed(zfile) => {
                    let there = zfile.compressed_range(range);
                    zfile.source().expect(there.start, there.end - there.start);
                }
            }
        }
        Ok(answer)
    }
}

impl Source {
    fn open(name: &LayerName, file: Content) -> Result<Self> {
        match name.format() {
            Format::Lsmt => Ok(Self::Plain(file)),
            Format::Zfile => {
                let zfile = ZFile::open(file).map_err(|error| worded(format_args!("layer {name}"), error))?;
                Ok(Self::Compressed(Box::new(zfile)))
            }
        }
    }
}

impl Source {
    fn content(&self) -> &Content {
        match self {
            Self::Plain(content) => content,
            Self::Compressed(zfile) => zfile.source(),
        }
    }

    /// Whether bytes that failed with *error* came over a network, and are worth fetching again.
    fn distrust(&self, error: &io::Error, offset: u64, length: usize) -> bool {
        let Self::Compressed(zfile) = self else { return false };
        // What failed on the way was tried again already.
        let on_the_way = error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<Failure>);
        let wrong = error.kind() == io::ErrorKind::InvalidData && !on_the_way;
        wrong && zfile.source().distrust(zfile.compressed_range(offset..offset + length as u64))
    }
}

impl ReadAt for Source {
    fn size(&self) -> io::Result<u64> {
        match self {
            Self::Plain(file) => file.size(),
            Self::Compressed(zfile) => zfile.size(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.read_exact_at(buf, offset),
            Self::Compressed(zfile) => zfile.read_exact_at(buf, offset),
        }
    }
}

/// An error of the format, by what a caller of the daemon can do.
pub fn worded(what: impl std::fmt::Display, error: layers::Error) -> Error {
    let code = match error.kind() {
        layers::Kind::Corrupt => Code::Corrupt,
        layers::Kind::Exhausted => Code::Exhausted,
        layers::Kind::Invalid => match error {
            layers::Error::Unsupported(_) => Code::Unsupported,
            _ => Code::Invalid,
        },
        layers::Kind::Io => return Error::io(what, error.into()),
    };
    Error::new(code, format!("{what}: {error}"))
}

/// What is left of a limit of the format that a caller may meet.
pub const MAX_SIZE_BYTES: u64 = 1 << 50;
const _: () = assert!(MAX_SIZE_BYTES / SECTOR < 1 << 50);
