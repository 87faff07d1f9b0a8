//! Memory for one request at a time, with its bytes aligned to pages.

use std::os::fd::AsFd;

use rustix::io::Errno;

use super::answer;
use super::wire::WRITE_PREFIX_BYTES;

const PAGE_BYTES: usize = 4096;

/// Room for any request, or for any answer. The bytes of a write begin on a page, and so do those of a
/// read: a device may do direct I/O right here.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    /// Where the first whole page begins.
    data: usize,
}

impl Buffer {
    /// Every page is there from the beginning: when a dying daemon's read meets one that is not, the
    /// kernel fails the request instead of keeping it for the next daemon.
    pub(super) fn new(data_bytes: usize) -> Self {
        let mut bytes = vec![0; data_bytes + 2 * PAGE_BYTES];
        bytes.fill(0xff);
        let first = bytes.as_ptr().align_offset(PAGE_BYTES);
        let data = if first >= WRITE_PREFIX_BYTES { first } else { first + PAGE_BYTES };
        Self { bytes, data }
    }

    /// Waits for a request and gives its length in bytes.
    pub(super) fn receive(&mut self, channel: impl AsFd) -> Result<usize, Errno> {
        rustix::io::read(channel, &mut self.bytes[self.data - WRITE_PREFIX_BYTES..])
    }

    pub(super) fn received(&self, length: usize) -> &[u8] {
        let start = self.data - WRITE_PREFIX_BYTES;
        &self.bytes[start..start + length]
    }

    pub(super) fn data_bytes(&self) -> usize {
        self.bytes.len() - self.data
    }

    pub(super) fn data(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.data..self.data + length]
    }

    /// The whole good answer whose payload is the first *length* bytes of the data.
    pub(super) fn answer(&mut self, unique: u64, length: usize) -> &[u8] {
        let start = self.data - answer::HEADER_BYTES;
        self.bytes[start..self.data].copy_from_slice(&answer::header(unique, length));
        &self.bytes[start..self.data + length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_begins_on_a_page_with_room_for_what_precedes_it() {
        for size in [1, 4096, 1 << 20] {
            let mut buffer = Buffer::new(size);
            assert!(buffer.data >= WRITE_PREFIX_BYTES);
            assert!(buffer.data_bytes() >= size);
            assert_eq!(buffer.data(size).as_ptr().align_offset(PAGE_BYTES), 0);
            assert_eq!(buffer.answer(1, size).len(), size + answer::HEADER_BYTES);
        }
    }
}
