//! What we and the kernel agree on when a connection begins, once for its life.
//!
//! A daemon that takes a connection over cannot ask again, so the agreement is kept with it.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::wire::Init;

/// The largest request, in bytes: the kernel's own default limit.
pub(super) const MAX_REQUEST_BYTES: u32 = 1 << 20;
const MAX_PAGES: u16 = 256;

/// Requests in flight of which nobody waits for one in particular (read-ahead, asynchronous I/O).
/// Beyond them all images wait together, so that this must never be what a stalled image fills.
const MAX_BACKGROUND: u16 = 32_768;

/// The oldest protocol that has all we rely on (Linux 5.4).
const MINOR: u32 = 31;
/// What we speak when the kernel speaks newer.
const NEWEST_MINOR: u32 = 41;

mod flag {
    pub(super) const ASYNC_READ: u64 = 1;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const ASYNC_DIRECT: u64 = 1 << 15;
    pub(super) const PARALLEL_FOLDERS: u64 = 1 << 18;
    pub(super) const ABORT_ERROR: u64 = 1 << 21;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const EXPLICIT_INVALIDATION: u64 = 1 << 25;
    pub(super) const KILL_PRIVILEGES: u64 = 1 << 28;
    pub(super) const EXTENDED: u64 = 1 << 30;
    pub(super) const RESEND: u64 = 1 << 39;
}

/// Taken where the kernel offers it.
const WANTED: u64 = flag::ASYNC_READ
    | flag::BIG_WRITES
    | flag::ASYNC_DIRECT
    | flag::PARALLEL_FOLDERS
    | flag::ABORT_ERROR
    | flag::MAX_PAGES
    | flag::EXPLICIT_INVALIDATION
    | flag::KILL_PRIVILEGES
    | flag::EXTENDED
    | flag::RESEND;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Terms {
    pub(super) minor: u32,
    flags: u64,
    max_readahead: u32,
}

impl Terms {
    /// # Errors
    /// `EPROTO` for a kernel older than 5.4, or one of another protocol.
    pub(super) fn agree(offer: Init) -> Result<Self, Errno> {
        if offer.major != 7 || offer.minor < MINOR {
            return Err(Errno::PROTO);
        }
        let flags = offer.flags & WANTED;
        Ok(Self { minor: offer.minor.min(NEWEST_MINOR), flags, max_readahead: offer.max_readahead })
    }

    /// Whether the kernel sends again what a dead daemon has read and not answered.
    pub(super) fn resends(&self) -> bool {
        self.flags & flag::RESEND != 0
    }

    pub(super) fn answer(&self, out: &mut Vec<u8>) {
        let [low, high] = [self.flags & 0xffff_ffff, self.flags >> 32].map(|half| u32::try_from(half).unwrap_or(0));
        for word in [7, self.minor, self.max_readahead, low] {
            out.extend(word.to_ne_bytes());
        }
        out.extend(MAX_BACKGROUND.to_ne_bytes());
        out.extend((MAX_BACKGROUND / 4 * 3).to_ne_bytes());
        out.extend(MAX_REQUEST_BYTES.to_ne_bytes());
        out.extend(1_u32.to_ne_bytes()); // times in nanoseconds
        out.extend(MAX_PAGES.to_ne_bytes());
        out.extend(0_u16.to_ne_bytes());
        out.extend(high.to_ne_bytes());
        out.resize(64, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(minor: u32, flags: u64) -> Init {
        Init { major: 7, minor, max_readahead: 131_072, flags }
    }

    #[test]
    fn only_what_is_offered_is_taken() {
        let old = Terms::agree(offer(34, flag::ASYNC_READ | flag::BIG_WRITES | 1 << 3)).expect("new enough");
        assert_eq!(old.flags, flag::ASYNC_READ | flag::BIG_WRITES);
        assert!(!old.resends());
        assert!(Terms::agree(offer(45, u64::MAX)).expect("new enough").resends());
    }

    #[test]
    fn another_protocol_is_refused() {
        assert_eq!(Terms::agree(offer(30, u64::MAX)), Err(Errno::PROTO));
        assert_eq!(Terms::agree(Init { major: 8, ..offer(40, 0) }), Err(Errno::PROTO));
    }

    #[test]
    fn the_answer_has_its_length_and_both_halves_of_the_flags() {
        let mut out = Vec::new();
        Terms::agree(offer(45, u64::MAX)).expect("new enough").answer(&mut out);
        assert_eq!(out.len(), 64);
        assert_eq!(&out[32..36], &(1_u32 << 7).to_ne_bytes());
    }
}
