//! One immutable layer file: where its bytes are read, compressed or not.

use std::io;
use std::sync::Arc;

use layers::{BLOCK, Index, Layer, ReadAt, SECTOR, ZFile};

use crate::device::Answer;
use crate::error::{Code, Context, Error, Result};
use crate::files::{Handle, Shared};
use crate::names::{Format, LayerName};

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
    Plain(Shared),
    Compressed(Box<ZFile<Shared>>),
}

impl LayerFile {
    /// Opens *name*, and gives its index: whoever joins it with others keeps only what comes of that.
    ///
    /// # Errors
    /// `corrupt` for anything that a sealed layer cannot be, `exhausted` for an index beyond all bounds.
    pub fn open(name: LayerName, handle: Arc<Handle>) -> Result<(Arc<Self>, Index)> {
        let source = Source::open(&name, handle)?;
        let layer = Layer::open(source).map_err(|error| worded(format_args!("layer {name}"), error))?;
        let (source, identity, index) = layer.into_parts();
        let whole = |number: u64| number % PAGE_SECTORS == 0;
        let paged = index.segments().iter().all(|segment| whole(segment.offset()) && whole(segment.length()));
        Ok((Arc::new(Self { name, source, size_bytes: identity.virtual_size, paged }), index))
    }

    /// How many entries the index of *name* has, without loading it.
    ///
    /// # Errors
    /// As for [`LayerFile::open`].
    pub fn count(name: &LayerName, handle: Arc<Handle>) -> Result<u64> {
        let source = Source::open(name, handle)?;
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
        self.source.read_exact_at(buf, offset)
    }

    /// The same if it takes no wait for a disk.
    ///
    /// # Errors
    /// As [`LayerFile::read`].
    pub fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        match &self.source {
            Source::Plain(file) => file.0.read_now(buf, offset),
            // What it takes is known only when the compressed bytes are there.
            Source::Compressed(_) => Ok(Answer::WouldWait),
        }
    }

    /// Says that *length* bytes at *offset* will be read soon.
    pub fn expect(&self, offset: u64, length: u64) {
        if let Source::Plain(file) = &self.source {
            file.0.expect(offset, length);
        }
    }
}

impl Source {
    fn open(name: &LayerName, handle: Arc<Handle>) -> Result<Self> {
        let file = Shared(handle);
        match name.format() {
            Format::Lsmt => Ok(Self::Plain(file)),
            Format::Zfile => {
                let zfile = ZFile::open(file).map_err(|error| worded(format_args!("layer {name}"), error))?;
                Ok(Self::Compressed(Box::new(zfile)))
            }
        }
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
