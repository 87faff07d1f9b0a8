//! The block at either end of a zfile.

use crate::error::{Corruption, Result, Unsupported};
use crate::header::{u32_at, u64_at};
use crate::zfile::codec::{Algorithm, digest};

/// Bytes of header and trailer in the file.
pub(super) const BLOCK: usize = 512;
/// Bytes of the structure in it.
const SIZE: u32 = 96;
const MAGIC: &[u8; 24] = b"ZFile\0\x01\0tuji.yyf@Alibaba";

pub(super) const IS_HEADER: u64 = 1;
pub(super) const IS_DATA: u64 = 1 << 1;
pub(super) const SEALED: u64 = 1 << 2;
/// The header has been written again with what the trailer says.
pub(super) const COMPLETE_HEADER: u64 = 1 << 3;
const HAS_DIGEST: u64 = 1 << 4;

/// How a zfile is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileOptions {
    pub algorithm: Algorithm,
    /// Bytes that are compressed together: a power of two from 512 to 1 MiB.
    pub block_size: u32,
    /// Each block carries a checksum of its compressed form.
    pub checksums: bool,
}

impl ZFileOptions {
    /// Blocks of 4 KiB with checksums.
    pub fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, block_size: 4096, checksums: true }
    }

    pub(super) fn check(self) -> Result<(), Unsupported> {
        if self.block_size.is_power_of_two() && (512..=1 << 20).contains(&self.block_size) {
            return Ok(());
        }
        Err(Unsupported::BlockSize(self.block_size))
    }
}

/// A header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ZHeader {
    pub(super) flags: u64,
    pub(super) index_offset: u64,
    pub(super) index_count: u64,
    pub(super) original_size: u64,
    pub(super) index_digest: u32,
    pub(super) options: ZFileOptions,
}

impl ZHeader {
    pub(super) fn header(options: ZFileOptions) -> Self {
        let flags = IS_HEADER | IS_DATA | HAS_DIGEST;
        Self { flags, index_offset: 0, index_count: 0, original_size: 0, index_digest: 0, options }
    }

    pub(super) fn trailer(options: ZFileOptions) -> Self {
        Self { flags: IS_DATA | SEALED | HAS_DIGEST, ..Self::header(options) }
    }

    pub(super) fn has_digest(&self) -> bool {
        self.flags & HAS_DIGEST != 0
    }

    pub(super) fn decode(block: &[u8; BLOCK], what: &'static str) -> Result<Self> {
        if !block.starts_with(MAGIC) {
            return Err(Corruption::Magic { what }.into());
        }
        let size = u32_at(block, 24);
        if size != SIZE {
            return Err(Corruption::HeaderSize { what, size }.into());
        }
        let flags = u64_at(block, 32);
        if flags & HAS_DIGEST != 0 && u32_at(block, 28) != digest_of(block) {
            return Err(Corruption::Digest { what }.into());
        }
        if block[78] != 0 || u32_at(block, 84) != 0 {
            return Err(Unsupported::Dictionary.into());
        }
        let algorithm = match block[76] {
            1 => Algorithm::Lz4,
            2 => Algorithm::Zstd,
            other => return Err(Unsupported::Algorithm(other).into()),
        };
        let options = ZFileOptions { algorithm, block_size: u32_at(block, 72), checksums: block[88] != 0 };
        options.check()?;
        Ok(Self {
            flags,
            index_offset: u64_at(block, 40),
            index_count: u64_at(block, 48),
            original_size: u64_at(block, 56),
            index_digest: u32_at(block, 64),
            options,
        })
    }

    pub(super) fn encode(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        block[..24].copy_from_slice(MAGIC);
        block[24..28].copy_from_slice(&SIZE.to_le_bytes());
        block[32..40].copy_from_slice(&self.flags.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        block[48..56].copy_from_slice(&self.index_count.to_le_bytes());
        block[56..64].copy_from_slice(&self.original_size.to_le_bytes());
        block[64..68].copy_from_slice(&self.index_digest.to_le_bytes());
        block[72..76].copy_from_slice(&self.options.block_size.to_le_bytes());
        block[76] = match self.options.algorithm {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        };
        block[88] = u8::from(self.options.checksums);
        let digest = digest_of(&block);
        block[28..32].copy_from_slice(&digest.to_le_bytes());
        block
    }
}

/// The digest of a block, whose own field counts as zero.
fn digest_of(block: &[u8; BLOCK]) -> u32 {
    let mut block = *block;
    block[28..32].fill(0);
    digest(&block)
}
