//! What is known of a cached file between two daemons: which blocks are there, and what they add up to.
//!
//! Written only after the blocks that it names are durable, and without those that are about to go. A block
//! that is not what its sum says counts as absent, so the worst that a damaged or old file costs is fetching again.

use super::BLOCK_BYTES;
use super::source::{Digest, SUM_BYTES};

const MAGIC: &[u8; 8] = b"AENVBLK1";
/// Magic, size of a block, size of the file, digest, time of last use, blocks there, length of the validator.
const HEAD_BYTES: usize = 8 + 8 + 8 + SUM_BYTES + 8 + 8 + 8;
const MAX_VALIDATOR_BYTES: usize = 1024;
const CHECK_BYTES: usize = 4;

/// What it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub size_bytes: u64,
    pub digest: Digest,
}

impl Identity {
    pub fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Meta {
    pub identity: Identity,
    pub used_unix_s: u64,
    pub validator: Option<String>,
    /// CRC-32C of each block that is there.
    pub sums: Vec<Option<u32>>,
}

impl Meta {
    pub(super) fn encode(&self) -> Vec<u8> {
        let validator = self.validator.as_deref().unwrap_or_default().as_bytes();
        let there = self.sums.iter().flatten().count();
        let mut bytes = MAGIC.to_vec();
        let words = [self.identity.size_bytes, self.used_unix_s, there as u64, validator.len() as u64];
        bytes.extend(BLOCK_BYTES.to_le_bytes());
        bytes.extend(words[0].to_le_bytes());
        bytes.extend(self.identity.digest.0);
        for word in &words[1..] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(validator);
        for eight in self.sums.chunks(8) {
            let bits = eight.iter().enumerate().map(|(at, sum)| u8::from(sum.is_some()) << at);
            bytes.push(bits.fold(0, |byte, bit| byte | bit));
        }
        for sum in self.sums.iter().flatten() {
            bytes.extend(sum.to_le_bytes());
        }
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        bytes
    }

    /// `None` for anything that [`Meta::encode`] did not write for *identity*.
    pub(super) fn decode(bytes: &[u8], identity: Identity) -> Option<Self> {
        let (content, check) = bytes.split_at_checked(bytes.len().checked_sub(CHECK_BYTES)?)?;
        if crc32c::crc32c(content).to_le_bytes() != *check {
            return None;
        }
        let head = Head::decode(content)?;
        if head.identity != identity {
            return None;
        }
        let rest = &content[HEAD_BYTES..];
        let (validator, rest) = rest.split_at_checked(head.validator_bytes)?;
        let blocks = usize::try_from(identity.blocks()).ok()?;
        let (bits, mut rest) = rest.split_at_checked(blocks.div_ceil(8))?;
        let mut sums = Vec::with_capacity(blocks);
        for block in 0..blocks {
            sums.push(if bits[block / 8] >> (block % 8) & 1 == 1 {
                let (sum, behind) = rest.split_first_chunk()?;
                rest = behind;
                Some(u32::from_le_bytes(*sum))
            } else {
                None
            });
        }
        let validator = (!validator.is_empty()).then(|| String::from_utf8(validator.to_vec())).transpose().ok()?;
        rest.is_empty().then_some(Self { identity, used_unix_s: head.used_unix_s, validator, sums })
    }
}

/// What can be told without reading all of it, and is checked only when all of it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub identity: Identity,
    pub used_unix_s: u64,
    pub blocks_there: u64,
    validator_bytes: usize,
}

impl Head {
    pub(super) const BYTES: usize = HEAD_BYTES;

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..HEAD_BYTES)?;
        let word = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        if bytes[..8] != *MAGIC || word(8)? != BLOCK_BYTES {
            return None;
        }
        let identity = Identity { size_bytes: word(16)?, digest: Digest(bytes[24..56].try_into().ok()?) };
        let (used_unix_s, blocks_there) = (word(56)?, word(64)?);
        let validator_bytes = usize::try_from(word(72)?).ok().filter(|length| *length <= MAX_VALIDATOR_BYTES)?;
        (blocks_there <= identity.blocks()).then_some(Self { identity, used_unix_s, blocks_there, validator_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(blocks: usize) -> Meta {
        let identity = Identity { size_bytes: blocks as u64 * BLOCK_BYTES - 7, digest: Digest([3; 32]) };
        let sums = (0..blocks).map(|block| (block % 3 != 1).then_some(u32::try_from(block).unwrap_or(0) * 7)).collect();
        Meta { identity, used_unix_s: 99, validator: Some("\"tag\"".into()), sums }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        for blocks in [1, 7, 8, 9, 100] {
            let meta = meta(blocks);
            let bytes = meta.encode();
            assert_eq!(Meta::decode(&bytes, meta.identity), Some(meta.clone()));
            assert_eq!(Head::decode(&bytes).map(|h| h.blocks_there), Some(meta.sums.iter().flatten().count() as u64));
        }
    }

    #[test]
    fn a_changed_bit_a_missing_byte_and_another_file_are_noticed() {
        let meta = meta(9);
        let bytes = meta.encode();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(Meta::decode(&changed, meta.identity), None, "{at}");
            assert_eq!(Meta::decode(&bytes[..at], meta.identity), None, "{at}");
        }
        let other = Identity { digest: Digest([4; 32]), ..meta.identity };
        assert_eq!(Meta::decode(&bytes, other), None);
    }
}
