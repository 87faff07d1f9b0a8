//! What a disk shows at one moment: the upper, the one that is becoming a layer, and the stack below.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use layers::{Place, SECTOR, Segment};

use crate::device::Answer;
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

    pub(super) fn read(&self, buf: &mut [u8], offset: u64, now: bool) -> io::Result<Answer> {
        self.read_through(&self.uppers(), buf, offset, now)
    }

    fn read_through(&self, uppers: &[Option<&Upper>], buf: &mut [u8], offset: u64, now: bool) -> io::Result<Answer> {
        let Some((upper, lower)) = uppers.split_first() else {
            return if now {
                self.below.read_now(buf, offset)
            } else {
                self.below.read(buf, offset).map(|()| Answer::Done)
            };
        };
        let Some(upper) = upper else { return self.read_through(lower, buf, offset, now) };
        let end = offset + buf.len() as u64;
        let mut rest = buf;
        for piece in upper.pieces(offset / SECTOR..end.div_ceil(SECTOR)) {
            let start = offset.max(piece.offset * SECTOR);
            let stop = end.min((piece.offset + piece.length) * SECTOR);
            let length = usize::try_from(stop - start).map_err(|_| io::ErrorKind::InvalidInput)?;
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(length);
            rest = behind;
            let answer = match piece.place {
                Place::Zeroed => {
                    part.fill(0);
                    Answer::Done
                }
                Place::Hole => self.read_through(lower, part, start, now)?,
                Place::Data { moffset, .. } => {
                    let at = moffset * SECTOR + (start - piece.offset * SECTOR);
                    if now {
                        upper.read_data_now(part, at)?
                    } else {
                        upper.read_data(part, at)?;
                        Answer::Done
                    }
                }
            };
            if answer == Answer::WouldWait {
                return Ok(answer);
            }
        }
        Ok(Answer::Done)
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
        self.read(&mut whole, first * SECTOR, false)?;
        whole[head..head + buf.len()].copy_from_slice(buf);
        self.upper.write(&whole, first, durable)
    }
}
