//! What can go wrong, by cause: the bytes, the source, the sink, or the caller.

use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything this crate reports. [`Error::kind`] says what a caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source failed. It is said where, since a source may be remote and worth another try.
    #[error("cannot read {length} bytes at {offset}: {source}")]
    Read { offset: u64, length: u64, source: io::Error },
    /// The sink failed. What was written so far is of no use.
    #[error("cannot write: {0}")]
    Write(#[source] io::Error),
    /// The bytes are not what the format allows.
    #[error("corrupt: {0}")]
    Corrupt(Corruption),
    /// The bytes may be right, but this version does not read them.
    #[error("not supported: {0}")]
    Unsupported(Unsupported),
    /// The caller asked for what cannot be.
    #[error("invalid: {0}")]
    Invalid(Invalid),
    /// More than [`crate::Limits`] allow.
    #[error("{count} {what} are more than the limit of {limit}")]
    Exhausted { what: &'static str, count: u64, limit: u64 },
}

/// What a caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The source or the sink failed; the same call may succeed later.
    Io,
    /// The content is wrong; it has to be fetched or made again.
    Corrupt,
    /// The call is wrong, or the content is of a newer kind.
    Invalid,
    /// A limit is in the way.
    Exhausted,
}

impl Error {
    /// The kind of this error. A source that ends too early is a truncated file, hence corrupt.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof => Kind::Corrupt,
            Self::Read { .. } | Self::Write(_) => Kind::Io,
            Self::Corrupt(_) => Kind::Corrupt,
            Self::Unsupported(_) | Self::Invalid(_) => Kind::Invalid,
            Self::Exhausted { .. } => Kind::Exhausted,
        }
    }

    /// Wraps what a source reported; an error of ours that came through it comes out as it was.
    pub(crate) fn read(offset: u64, length: usize, source: io::Error) -> Self {
        match source.downcast::<Self>() {
            Ok(ours) => ours,
            Err(source) => Self::Read { offset, length: length as u64, source },
        }
    }
}

/// So that a reader of ours can be the source of another: see [`crate::ReadAt`].
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Read { source, .. } | Error::Write(source) => source,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

impl From<Corruption> for Error {
    fn from(cause: Corruption) -> Self {
        Self::Corrupt(cause)
    }
}

impl From<Unsupported> for Error {
    fn from(cause: Unsupported) -> Self {
        Self::Unsupported(cause)
    }
}

impl From<Invalid> for Error {
    fn from(cause: Invalid) -> Self {
        Self::Invalid(cause)
    }
}

/// How bytes differ from what the format allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    #[error("{bytes} bytes are too few for {what}")]
    TooShort { what: &'static str, bytes: u64 },
    #[error("no {what}: its magic is missing")]
    Magic { what: &'static str },
    #[error("{what} of {size} bytes")]
    HeaderSize { what: &'static str, size: u32 },
    #[error("flags {flags:#x} of the {what} do not fit")]
    Flags { what: &'static str, flags: u64 },
    #[error("a uuid is not one")]
    Uuid,
    #[error("a virtual size of {bytes} bytes")]
    VirtualSize { bytes: u64 },
    #[error("the layer was never sealed")]
    NotSealed,
    #[error("header and trailer speak of different files")]
    HeaderAndTrailerDiffer,
    #[error("an index of {count} entries at {offset} does not fit into the file")]
    IndexPlace { offset: u64, count: u64 },
    #[error("entry {entry} of the index {fault}")]
    Mapping { entry: u64, fault: MappingFault },
    #[error("the digest of the {what} does not match")]
    Digest { what: &'static str },
    #[error("block {block} at byte {offset} {fault}")]
    Block { block: u64, offset: u64, fault: &'static str },
    #[error("the blocks take {found} bytes, the index is {expected} bytes behind the first")]
    BlockLengths { found: u64, expected: u64 },
    #[error("{what}: unexpected bytes between the parts of the file")]
    Padding { what: &'static str },
}

/// What is wrong with one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MappingFault {
    #[error("maps nothing")]
    Empty,
    #[error("lies before or over the one before it")]
    Unsorted,
    #[error("lies beyond the virtual size")]
    BeyondVirtualSize,
    #[error("points outside the data")]
    OutsideData,
}

/// What this version does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    #[error("layer format version {0}")]
    Version(u8),
    #[error("compression algorithm {0}")]
    Algorithm(u8),
    #[error("compression with a dictionary")]
    Dictionary,
    #[error("compressed blocks of {0} bytes")]
    BlockSize(u32),
}

/// What a caller must not ask for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    #[error("a virtual size of {0} bytes")]
    VirtualSize(u64),
    #[error("a mapping of {length} sectors at {offset} to {moffset} cannot be written down")]
    Segment { offset: u64, length: u64, moffset: u64 },
    #[error("{0} bytes are not whole sectors")]
    Unaligned(u64),
    #[error("sector {offset} after sector {end}: a layer is written in order")]
    OutOfOrder { offset: u64, end: u64 },
    #[error("sector {end} is beyond a layer of {virtual_sectors} sectors")]
    BeyondVirtualSize { end: u64, virtual_sectors: u64 },
    #[error("a write failed before; what was written is of no use")]
    Poisoned,
    #[error("{0} layers are none or too many for one stack")]
    Layers(usize),
    #[error("a user tag of {0} bytes")]
    UserTag(usize),
    #[error("{0} is not a uuid")]
    Uuid(String),
}
