//! Compressing and expanding one block, and its checksums.

use std::io;

use crate::error::Result;
use crate::zfile::header::ZFileOptions;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Fast in both directions.
    Lz4,
    /// Smaller.
    Zstd,
}

/// The level the format's writers use; it is not written down.
const ZSTD_LEVEL: i32 = 3;
/// What block checksums start from.
const SALT: u32 = 100_007;
/// Bytes of a block's checksum, behind its compressed content.
pub(super) const CHECKSUM: usize = 4;

impl Algorithm {
    /// The most bytes that a block of *length* can take compressed.
    pub(super) fn bound(self, length: usize) -> usize {
        match self {
            Self::Lz4 => length + length / 255 + 16,
            Self::Zstd => zstd::zstd_safe::compress_bound(length),
        }
    }
}

/// The checksum of a compressed block: crc32c from a salt on, without the usual inversions.
pub(super) fn block_checksum(bytes: &[u8]) -> u32 {
    bare_crc32c(SALT, bytes)
}

/// The checksum of header, trailer and index: the same, from zero on.
pub(super) fn digest(bytes: &[u8]) -> u32 {
    extend_digest(0, bytes)
}

/// The digest of what `so_far` is the digest of, and *bytes* behind it.
pub(super) fn extend_digest(so_far: u32, bytes: &[u8]) -> u32 {
    bare_crc32c(so_far, bytes)
}

/// The library inverts before and after; this takes both back.
fn bare_crc32c(start: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!start, bytes)
}

/// What compressing needs between blocks.
pub(super) struct Compressor {
    algorithm: Algorithm,
    zstd: Option<zstd::bulk::Compressor<'static>>,
    buf: Vec<u8>,
}

impl Compressor {
    pub(super) fn new(options: ZFileOptions) -> io::Result<Self> {
        let zstd = match options.algorithm {
            Algorithm::Lz4 => None,
            Algorithm::Zstd => Some(zstd::bulk::Compressor::new(ZSTD_LEVEL)?),
        };
        let buf = vec![0; options.algorithm.bound(options.block_size as usize)];
        Ok(Self { algorithm: options.algorithm, zstd, buf })
    }

    /// The compressed form of *block*, which is at most as long as the options say.
    pub(super) fn compress(&mut self, block: &[u8]) -> io::Result<&[u8]> {
        let length = match (self.algorithm, &mut self.zstd) {
            (Algorithm::Zstd, Some(zstd)) => zstd.compress_to_buffer(block, self.buf.as_mut_slice())?,
            _ => lz4::block::compress_to_buffer(block, None, false, &mut self.buf)?,
        };
        Ok(&self.buf[..length])
    }
}

/// What expanding needs between blocks.
#[derive(Default)]
pub(super) struct Expander {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Expander {
    /// Fills *block* from its compressed form; true if that gave exactly as many bytes.
    pub(super) fn expand(&mut self, algorithm: Algorithm, compressed: &[u8], block: &mut [u8]) -> Result<bool> {
        let length = match algorithm {
            Algorithm::Lz4 => {
                let size = i32::try_from(block.len()).ok();
                lz4::block::decompress_to_buffer(compressed, size, block)
            }
            Algorithm::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(zstd::bulk::Decompressor::new().map_err(|e| crate::Error::read(0, 0, e))?),
                };
                zstd.decompress_to_buffer(compressed, block)
            }
        };
        Ok(length.is_ok_and(|length| length == block.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_crc32c_without_its_inversions() {
        // The check value of crc32c, taken apart: 0xe3069283 for these nine bytes.
        assert_eq!(!bare_crc32c(u32::MAX, b"123456789"), 0xe306_9283);
        assert_eq!(digest(&[0; 100]), 0);
        assert_ne!(block_checksum(&[0; 100]), 0);
    }
}
