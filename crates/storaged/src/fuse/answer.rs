//! Answers and notices of the FUSE kernel protocol: values in, bytes out.

use std::io;
use std::time::Duration;

use rustix::io::Errno;

pub(super) const HEADER_BYTES: usize = 16;

/// An error number that the kernel may be told.
///
/// `ENOSYS` tells it never to ask again (a failed flush would turn every later one into a lie),
/// and numbers from 512 are its own, which it refuses and waits on: neither comes from a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure(i32);

impl Failure {
    pub(super) const NEVER_ASK_AGAIN: Self = Self(Errno::NOSYS.raw_os_error());

    pub(super) fn of_device(error: &io::Error) -> Self {
        let number = match (error.raw_os_error(), error.kind()) {
            (Some(number), _) => number,
            (None, io::ErrorKind::InvalidInput) => Errno::INVAL.raw_os_error(),
            (None, _) => Errno::IO.raw_os_error(),
        };
        let tellable = (1..512).contains(&number)
            && ![Errno::NOSYS, Errno::INTR, Errno::AGAIN].iter().any(|never| never.raw_os_error() == number);
        Self(if tellable { number } else { Errno::IO.raw_os_error() })
    }
}

impl From<Errno> for Failure {
    fn from(number: Errno) -> Self {
        Self(number.raw_os_error())
    }
}

/// What precedes that many bytes of a good answer.
pub(super) fn header(unique: u64, payload_bytes: usize) -> [u8; HEADER_BYTES] {
    encode_header(HEADER_BYTES + payload_bytes, 0, unique)
}

/// The whole of a bad one.
pub(super) fn failure(unique: u64, failure: Failure) -> [u8; HEADER_BYTES] {
    encode_header(HEADER_BYTES, -failure.0, unique)
}

fn encode_header(length: usize, error: i32, unique: u64) -> [u8; HEADER_BYTES] {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// How long the kernel may believe what it was told.
pub(super) const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) node: u64,
    pub(super) size_bytes: u64,
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) valid: Duration,
}

impl Attributes {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.node.to_ne_bytes());
        out.extend(self.size_bytes.to_ne_bytes());
        out.extend(self.size_bytes.div_ceil(512).to_ne_bytes());
        out.extend([0; 24 + 12]); // times
        for word in [self.mode, self.links, self.uid, self.gid, 0, 4096, 0] {
            out.extend(word.to_ne_bytes());
        }
    }

    /// The answer to a question for attributes.
    pub(super) fn answer(&self, out: &mut Vec<u8>) {
        out.extend(self.valid.as_secs().to_ne_bytes());
        out.extend(self.valid.subsec_nanos().to_ne_bytes());
        out.extend([0; 4]);
        self.put(out);
    }

    /// The answer to a look-up. The name of a disk is looked up again each time: it comes and goes while a daemon
    /// is away. That of memory is never another's; the kernel keeps what it knows, and the pages with it.
    pub(super) fn entry(&self, out: &mut Vec<u8>) {
        out.extend(self.node.to_ne_bytes());
        out.extend(0_u64.to_ne_bytes()); // generation: numbers are never used again
        out.extend(self.valid.as_secs().to_ne_bytes());
        out.extend(self.valid.as_secs().to_ne_bytes());
        out.extend(self.valid.subsec_nanos().to_ne_bytes());
        out.extend(self.valid.subsec_nanos().to_ne_bytes());
        self.put(out);
    }
}

pub(super) mod open {
    /// Never through the page cache.
    pub(crate) const DIRECT: u32 = 1;
    /// Cached pages are good although the file was closed.
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    /// Closing needs no request.
    pub(crate) const NO_FLUSH: u32 = 1 << 5;
    /// Writes need not wait for each other.
    pub(crate) const PARALLEL_WRITES: u32 = 1 << 6;
}

pub(super) fn opened(flags: u32, out: &mut Vec<u8>) {
    out.extend(0_u64.to_ne_bytes()); // no handle: a file is its node, whichever daemon answers
    out.extend(flags.to_ne_bytes());
    out.extend([0; 4]);
}

pub(super) fn written(bytes: u32, out: &mut Vec<u8>) {
    out.extend(bytes.to_ne_bytes());
    out.extend([0; 4]);
}

pub(super) fn file_system(out: &mut Vec<u8>) {
    out.extend([0; 40]); // nothing is free, since nothing is made through here
    for word in [4096_u32, 255, 4096, 0] {
        out.extend(word.to_ne_bytes());
    }
    out.extend([0; 24]);
}

/// Adds one entry of a folder unless that makes *out* longer than *limit* bytes. Says whether it did.
pub(super) fn folder_entry(out: &mut Vec<u8>, limit: usize, node: u64, next: u64, kind: u32, name: &[u8]) -> bool {
    let Ok(length) = u32::try_from(name.len()) else { return false };
    if out.len() + (24 + name.len()).next_multiple_of(8) > limit {
        return false;
    }
    out.extend(node.to_ne_bytes());
    out.extend(next.to_ne_bytes());
    out.extend(length.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(name);
    out.resize(out.len().next_multiple_of(8), 0);
    true
}

/// Messages that answer no request.
pub(super) mod notice {
    use super::{HEADER_BYTES, encode_header};

    const INVALIDATE_NODE: i32 = 2;
    const INVALIDATE_ENTRY: i32 = 3;
    const RESEND: i32 = 7;

    fn message(code: i32, body: &[u8]) -> Vec<u8> {
        let mut bytes = encode_header(HEADER_BYTES + body.len(), code, 0).to_vec();
        bytes.extend(body);
        bytes
    }

    /// The kernel forgets attributes and cached pages of *node*.
    pub(crate) fn invalidate_node(node: u64) -> Vec<u8> {
        let mut body = node.to_ne_bytes().to_vec();
        body.extend([0; 16]); // from 0, to the end
        message(INVALIDATE_NODE, &body)
    }

    /// The kernel forgets the attributes of *node* and keeps its pages.
    pub(crate) fn invalidate_attributes(node: u64) -> Vec<u8> {
        let mut body = node.to_ne_bytes().to_vec();
        body.extend((-1_i64).to_ne_bytes());
        body.extend(0_i64.to_ne_bytes());
        message(INVALIDATE_NODE, &body)
    }

    /// The kernel forgets *name* in *folder*.
    pub(crate) fn invalidate_entry(folder: u64, name: &[u8]) -> Vec<u8> {
        let mut body = folder.to_ne_bytes().to_vec();
        body.extend(u32::try_from(name.len()).unwrap_or(0).to_ne_bytes());
        body.extend([0; 4]);
        body.extend(name);
        body.push(0);
        message(INVALIDATE_ENTRY, &body)
    }

    /// The kernel sends everything again that was read and not answered (Linux 6.9).
    pub(crate) fn resend() -> Vec<u8> {
        message(RESEND, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes() -> Attributes {
        Attributes { node: 9, size_bytes: 1000, mode: 0o100_600, links: 1, uid: 0, gid: 0, valid: FOR_EVER }
    }

    #[test]
    fn answers_have_the_length_that_the_kernel_expects() {
        let length = |put: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            put(&mut out);
            out.len()
        };
        assert_eq!(length(&|out| attributes().answer(out)), 104);
        assert_eq!(length(&|out| attributes().entry(out)), 128);
        assert_eq!(length(&|out| opened(0, out)), 16);
        assert_eq!(length(&|out| written(1, out)), 8);
        assert_eq!(length(&|out| file_system(out)), 80);
        assert_eq!(notice::invalidate_node(1).len(), 16 + 24);
        assert_eq!(notice::invalidate_entry(1, b"ab").len(), 16 + 16 + 3);
    }

    #[test]
    fn a_device_cannot_talk_the_kernel_out_of_asking() {
        let said = |number| Failure::of_device(&io::Error::from_raw_os_error(number)).0;
        assert_eq!(said(Errno::NOSPC.raw_os_error()), Errno::NOSPC.raw_os_error());
        for number in [Errno::NOSYS.raw_os_error(), Errno::INTR.raw_os_error(), 512, 0, -5] {
            assert_eq!(said(number), Errno::IO.raw_os_error());
        }
    }

    #[test]
    fn entries_of_a_folder_are_aligned_and_end_at_the_limit() {
        let mut out = Vec::new();
        assert!(folder_entry(&mut out, 64, 5, 1, 8, b"abc"));
        assert_eq!(out.len(), 32);
        assert!(folder_entry(&mut out, 64, 6, 2, 8, b"abcdefgh"));
        assert!(!folder_entry(&mut out, 64, 7, 3, 8, b"a"));
        assert_eq!(out.len(), 64);
    }
}
