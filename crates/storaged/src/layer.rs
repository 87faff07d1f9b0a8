//! One immutable layer file: where its bytes are read, compressed or not.

use std::io;
use std::sync::Arc;

use layers::{BLOCK, Index, Layer, ReadAt, SECTOR, ZFile};

use crate::content::Content;
use crate::device::Answer;
use crate::error::{Code, Context, Error, Result};
use crate::names::{Format, LayerName};
use crate::remote::Failure;

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

    /// Fills *buf* with data from byte *offset* of the layer's file.
    ///
    /// # Errors
    /// Whatever the file system says; `InvalidData` for wrong bytes, `UnexpectedEof` for missing ones.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.source.read_exact_at(buf, offset) {
            Err(error) if self.source.distrust(&error, offset, buf.len()) => self.source.read_exact_at(buf, offset),
            other => other,
        }
    }

    /// The same if it takes no wait for a disk.
    ///
    /// # Errors
    /// As [`LayerFile::read`].
    pub fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        match &self.source {
            Source::Plain(file) => file.read_now(buf, offset),
            // What it takes is known only when the compressed bytes are there.
            Source::Compressed(_) => Ok(Answer::WouldWait),
        }
    }

    /// Says that *length* bytes at *offset* will be read soon.
    pub fn expect(&self, offset: u64, length: u64) {
        match &self.source {
            Source::Plain(file) => file.expect(offset, length),
            Source::Compressed(zfile) => {
                let range = zfile.compressed_range(offset..offset.saturating_add(length));
                zfile.source().expect(range.start, range.end - range.start);
            }
        }
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
