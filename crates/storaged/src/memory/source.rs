//! A frozen child as the source of a memory image: it answers for the pages it has changed.

use std::io;

use super::PAGE_BYTES;
use super::freeze::Frozen;
use super::maps::Area;
use crate::error::{Code, Error};

/// Where the bytes of a range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub offset: u64,
    pub length: u64,
    pub holder: Holder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The child has changed them: they have been read.
    Child,
    /// Nobody has: zeros, already filled in.
    Zeros,
    /// The stack that the VMM's memory started from. The buffer's bytes there are untouched.
    Stack,
}

impl Frozen {
    /// Fills what the child has of the image's bytes from *offset* on into *into*, and says who has the rest:
    /// parts that follow one another and cover all of it. May wait for swapped pages.
    ///
    /// # Errors
    /// `EINVAL` outside of the image or off the page grid, `EIO` if the child is gone: never other bytes.
    pub fn read(&self, into: &mut [u8], offset: u64) -> io::Result<Vec<Part>> {
        let end = offset.checked_add(into.len() as u64).filter(|&end| end <= self.image().size_bytes);
        let end = end.filter(|end| (offset | end) % PAGE_BYTES == 0).ok_or(io::ErrorKind::InvalidInput)?;
        let mut parts = Parts { into, offset, done: Vec::new() };
        let first = self.areas().partition_point(|area| area.offset + area.length() <= offset);
        for area in self.areas()[first..].iter().take_while(|area| area.offset < end) {
            self.read_area(area, offset.max(area.offset), end.min(area.offset + area.length()), &mut parts)
                .map_err(|failure| to_io(&failure))?;
        }
        // Else the pages may be those of a later process with this pid.
        self.process().check_alive().map_err(|failure| to_io(&failure))?;
        Ok(parts.done)
    }

    fn read_area(&self, area: &Area, from: u64, to: u64, parts: &mut Parts<'_>) -> Result<(), Error> {
        let address = |offset: u64| offset - area.offset + area.start;
        let rest = if area.zeroed { Holder::Zeros } else { Holder::Stack };
        let mut at = from;
        let mut pieces = Vec::new();
        for range in self.process().private(address(from), address(to)) {
            let (start, end) = range?;
            let (low, high) = (area.to_offset(start), area.to_offset(end));
            parts.add(at, low, rest);
            parts.add(low, high, Holder::Child);
            pieces.push((start, end));
            at = high;
        }
        parts.add(at, to, rest);
        for (start, end) in pieces {
            let buffer = parts.buffer(area.to_offset(start), area.to_offset(end));
            self.process().read(&[(start, end)], buffer)?;
        }
        Ok(())
    }
}

struct Parts<'a> {
    into: &'a mut [u8],
    offset: u64,
    done: Vec<Part>,
}

impl Parts<'_> {
    fn add(&mut self, from: u64, to: u64, holder: Holder) {
        if from >= to {
            return;
        }
        if holder == Holder::Zeros {
            self.buffer(from, to).fill(0);
        }
        match self.done.last_mut() {
            Some(last) if last.holder == holder => last.length += to - from,
            _ => self.done.push(Part { offset: from, length: to - from, holder }),
        }
    }

    fn buffer(&mut self, from: u64, to: u64) -> &mut [u8] {
        let at = |offset: u64| usize::try_from(offset - self.offset).unwrap_or(usize::MAX);
        let (from, to) = (at(from), at(to));
        &mut self.into[from..to]
    }
}

fn to_io(error: &Error) -> io::Error {
    match error.code {
        Code::Exhausted => io::ErrorKind::OutOfMemory.into(),
        _ => rustix::io::Errno::IO.into(),
    }
}
