//! What a disk shows at one moment: the upper, the one that is becoming a layer, and the stack below.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use layers::{Place, SECTOR, Segment};

use crate::device::Answer;
use crate::reading::{self, Caching, Part, split};
use crate::stack::View;
use crate::upper::Upper;

#[derive(Clone)]
pub(super) struct Top {
    pub(super) upper: Arc<Upper>,
    /// The last upper, which is on its way to be a layer, and is not written to any more.
    pub(super) sealing: Option<Arc<Upper>>,
    pub(super) below: Arc<View>,
}

impl Top {
    fn uppers(&self) -> [Option<&Upper>; 2] {
        [Some(&self.upper), self.sealing.as_deref()]
    }

    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut found = Vec::new();
        self.parts(&self.uppers(), buf, offset, &mut found)?;
        reading::read(found)
    }

    pub(super) fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        let mut found = Vec::new();
        self.parts(&self.uppers(), buf, offset, &mut found)?;
        reading::read_now(found)
    }

    /// What an upper does not map, the next one may, and then the stack.
    fn parts<'a, 'b>(
        &'a self,
        uppers: &[Option<&'a Upper>],
        buf: &'b mut [u8],
        offset: u64,
        found: &mut Vec<Part<'a, 'b>>,
    ) -> io::Result<()> {
        let Some((upper, lower)) = uppers.split_first() else { return self.below.parts(buf, offset, found) };
        let Some(upper) = *upper else { return self.parts(lower, buf, offset, found) };
        let end = offset + buf.len() as u64;
        let mut rest = buf;
        for piece in upper.pieces(offset / SECTOR..end.div_ceil(SECTOR)) {
            let start = offset.max(piece.offset * SECTOR);
            let stop = end.min((piece.offset + piece.length) * SECTOR);
            let (buf, behind) = split(rest, stop - start)?;
            rest = behind;
            match piece.place {
                Place::Zeroed => buf.fill(0),
                Place::Hole => self.parts(lower, buf, start, found)?,
                Place::Data { moffset, .. } => {
                    let at = moffset * SECTOR + (start - piece.offset * SECTOR);
                    found.push(Part { store: upper, buf, at, caching: Caching::Keep });
                }
            }
        }
        Ok(())
    }

    /// The parts of *range*, in sectors, that do not read as zeros for certain.
    pub(super) fn occupied(&self, range: Range<u64>) -> Vec<Range<u64>> {
        fn collect(uppers: &[Option<&Upper>], below: &View, range: Range<u64>, found: &mut Vec<Range<u64>>) {
            let Some((upper, lower)) = uppers.split_first() else {
                found.extend(below.data(range));
                return;
            };
            let Some(upper) = upper else { return collect(lower, below, range, found) };
            for piece in upper.pieces(range) {
                match piece.place {
                    Place::Zeroed => (),
                    Place::Hole => collect(lower, below, piece.range(), found),
                    Place::Data { .. } => found.push(piece.range()),
                }
            }
        }
        let mut found = Vec::new();
        collect(&self.uppers(), &self.below, range.clone(), &mut found);
        // Few long mappings are better than many short ones.
        let at_most = (range.end - range.start).div_ceil(Segment::MAX_LENGTH);
        if found.len() as u64 > at_most { vec![range] } else { found }
    }

    /// Writes any bytes: sectors that are written in part are read first. Nobody else writes meanwhile.
    pub(super) fn write_bytes(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<bool> {
        let first = offset / SECTOR;
        let last = (offset + buf.len() as u64).div_ceil(SECTOR);
        let mut whole = vec![0; usize::try_from((last - first) * SECTOR).map_err(|_| io::ErrorKind::InvalidInput)?];
        let head = usize::try_from(offset % SECTOR).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.read(&mut whole, first * SECTOR)?;
        whole[head..head + buf.len()].copy_from_slice(buf);
        self.upper.write(&whole, first, durable)
    }
}
