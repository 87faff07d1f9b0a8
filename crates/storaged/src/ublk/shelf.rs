//! Buffers for the bytes of requests, shared by all devices: what is kept follows what goes on at once, not how many devices there are.

use std::sync::{Mutex, PoisonError};

use super::abi::MAX_REQUEST_BYTES;

const PAGE_BYTES: usize = 4096;
const KEPT: usize = 16;

/// Room for any request, beginning on a page: a device may do direct I/O right here.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    first: usize,
}

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; MAX_REQUEST_BYTES as usize + PAGE_BYTES];
        let first = bytes.as_ptr().align_offset(PAGE_BYTES);
        Self { bytes, first }
    }

    /// The first *length* bytes; what was there before may still be.
    pub(super) fn part(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.first..self.first + length]
    }
}

#[derive(Default)]
pub(super) struct Shelf(Mutex<Vec<Buffer>>);

impl Shelf {
    pub(super) fn take(&self) -> Buffer {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(Buffer::new)
    }

    pub(super) fn put(&self, buffer: Buffer) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_on_a_page_and_hold_the_longest_request() {
        let shelf = Shelf::default();
        let mut taken: Vec<Buffer> = (0..KEPT * 2).map(|_| shelf.take()).collect();
        for buffer in &mut taken {
            assert_eq!(buffer.part(MAX_REQUEST_BYTES as usize).as_ptr().align_offset(PAGE_BYTES), 0);
        }
        for buffer in taken {
            shelf.put(buffer);
        }
        assert_eq!(shelf.0.into_inner().map(|kept| kept.len()).ok(), Some(KEPT));
    }
}
