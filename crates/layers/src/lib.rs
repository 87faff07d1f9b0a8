//! Layered images: blocks of a disk or of memory in immutable files that lie on one another.
//!
//! The formats are those of overlaybd: LSMT layers and zfile compression, byte for byte. This
//! crate knows bytes and nothing else: it opens no file, starts no thread, waits for nothing and
//! retries nothing. It reads through [`ReadAt`] and writes to [`std::io::Write`]; where bytes live,
//! how long to wait for them and what to do when they are wrong is for the caller.
//!
//! Three things stay true whatever a file holds:
//! - wrong bytes are a typed [`Error`], never a panic, and never zeros in the place of data;
//! - memory is bounded by [`Limits`] and by what a file really holds, not by what it claims;
//! - a new mapping hides an old one, and a zeroed mapping hides what is below it.
//!
//! Offsets and lengths of mappings are in sectors of [`SECTOR`] bytes, those of files in bytes.
//!
//! | to | use |
//! | --- | --- |
//! | read a sealed layer, a stack of them | [`Layer`], [`Stack`] |
//! | read compressed bytes | [`ZFile`], itself a [`ReadAt`] and so the source of a [`Layer`] |
//! | know what an upper maps, and reopen it | [`Map`], [`log`] |
//! | read through an upper | [`Overlay`] |
//! | write a layer | [`LayerWriter`], [`seal`], [`compact`], [`compact_layer`] |
//! | compress | [`ZFileWriter`] |
//! | look at a file that somebody gave us | [`Format::of`], [`verify`] |

mod compact;
mod error;
mod format;
mod header;
mod index;
mod layer;
pub mod log;
mod map;
mod merge;
mod overlay;
mod pieces;
mod seal;
mod segment;
mod source;
mod stack;
mod uuid;
mod verify;
mod writer;
mod zfile;

pub use compact::{Zeroed, compact, compact_layer};
pub use error::{Corruption, Error, Invalid, Kind, MappingFault, Result, Unsupported};
pub use format::Format;
pub use header::{Flags, Header, Identity};
pub use index::{Index, Limits};
pub use layer::Layer;
pub use map::Map;
pub use merge::merge;
pub use overlay::{Origin, Overlay};
pub use pieces::{Piece, Pieces, Place};
pub use seal::seal;
pub use segment::Segment;
pub use source::ReadAt;
pub use stack::Stack;
pub use uuid::Uuid;
pub use verify::{Report, verify};
pub use writer::{LayerWriter, Written};
pub use zfile::{Algorithm, ZFile, ZFileOptions, ZFileWriter};

/// The unit of mappings, in bytes.
pub const SECTOR: u64 = 512;
/// What headers, trailers and sealed files are aligned to, in bytes.
pub const BLOCK: u64 = 4096;
/// The same, as lengths in memory.
const SECTOR_LEN: usize = 512;
const BLOCK_LEN: usize = 4096;
/// Layers in one stack; a tag has eight bits, and the highest one is left for an upper.
pub const MAX_LAYERS: usize = 255;
