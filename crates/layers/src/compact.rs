//! One layer of several, or one without the bytes that nothing maps any more.

use std::io::{self, Write};

use crate::SECTOR;
use crate::error::{Error, Result};
use crate::header::Identity;
use crate::index::Index;
use crate::layer::Layer;
use crate::source::ReadAt;
use crate::stack::Stack;
use crate::writer::{LayerWriter, Written};

/// Data is copied through one buffer of this many bytes.
const BUFFER: usize = 1 << 20;

/// What becomes of zeroed mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroed {
    /// They stay: the result goes on hiding what is below it. Right for any part of a stack.
    Keep,
    /// They become holes. Right only if nothing will ever be below the result.
    Drop,
}

/// Writes what the layers of *stack* show together as one layer: data in the order of the view,
/// each byte once. To merge part of a stack, make a stack of that part.
///
/// # Errors
/// Invalid for an identity smaller than the stack's content; whatever a source or *out* reports.
pub fn compact<S: ReadAt, W: Write>(
    stack: &Stack<S>,
    identity: Identity,
    zeroed: Zeroed,
    out: W,
) -> Result<(W, Written)> {
    copy(stack.index(), |tag, buf, at| stack.read_data(tag, buf, at), identity, zeroed, out)
}

/// The same for a single layer, as a commit does it.
///
/// # Errors
/// As for [`compact`].
pub fn compact_layer<S: ReadAt, W: Write>(
    layer: &Layer<S>,
    identity: Identity,
    zeroed: Zeroed,
    out: W,
) -> Result<(W, Written)> {
    copy(layer.index(), |_, buf, at| layer.source().read_exact_at(buf, at), identity, zeroed, out)
}

fn copy<W: Write>(
    index: &Index,
    read: impl Fn(u8, &mut [u8], u64) -> io::Result<()>,
    identity: Identity,
    zeroed: Zeroed,
    out: W,
) -> Result<(W, Written)> {
    let mut writer = LayerWriter::new(out, identity)?;
    let mut buf = vec![0; BUFFER];
    for segment in index.segments() {
        if segment.is_zeroed() {
            if zeroed == Zeroed::Keep {
                writer.tagged_zeroed(segment.tag(), segment.offset(), segment.length())?;
            }
            continue;
        }
        let mut done = 0;
        while done < segment.length() {
            let length = (segment.length() - done).min(BUFFER as u64 / SECTOR);
            let part = &mut buf[..usize::try_from(length * SECTOR).expect("at most the buffer")];
            let at = (segment.moffset() + done) * SECTOR;
            read(segment.tag(), part, at).map_err(|error| Error::read(at, part.len(), error))?;
            writer.tagged_data(segment.tag(), segment.offset() + done, part)?;
            done += length;
        }
    }
    writer.finish()
}
