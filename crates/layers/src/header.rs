//! The block at either end of a layer: what the file is, and in the trailer where its index lies.

use crate::error::{Corruption, Invalid, Result, Unsupported};
use crate::uuid::{FIELD, Uuid};
use crate::{BLOCK, BLOCK_LEN, SECTOR};

/// Bytes of the structure; the rest of its block is zero.
const SIZE: u32 = 390;
const MAGIC: [u8; 24] = [
    b'L', b'S', b'M', b'T', 0, 1, 2, 0, 0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f,
    0xcf, 0xae, 0x8a,
];
const VERSION: u8 = 1;
const SUB_VERSION: u8 = 1;
/// Bytes of the user tag.
pub(crate) const USER_TAG: usize = 256;
/// The largest virtual size: what fifty bits of sectors can address, less the padding entry.
const MAX_VIRTUAL_SIZE: u64 = ((1 << 50) - 1) * SECTOR;

/// What kind of block and file this is. Bits that are not known are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(pub u32);

impl Flags {
    /// At the front of a file, not at its end.
    pub const HEADER: Self = Self(1);
    /// Of a file with data, not of an index alone.
    pub const DATA: Self = Self(1 << 1);
    pub const SEALED: Self = Self(1 << 2);
    /// An upper whose data lies where it is mapped to.
    pub const SPARSE: Self = Self(1 << 4);
    /// An upper that overwrites in place what it has, and appends the rest.
    pub const HYBRID: Self = Self(1 << 5);

    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What a layer is, apart from its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Size in bytes of what the layer gives a view of: whole sectors, at least one.
    pub virtual_size: u64,
    pub uuid: Option<Uuid>,
    /// The layer below.
    pub parent: Option<Uuid>,
    /// At most 256 bytes, free for any use; NUL at its end is not kept.
    pub user_tag: Vec<u8>,
}

impl Identity {
    /// A layer with the nil uuid, as compaction leaves it unless told otherwise.
    pub fn new(virtual_size: u64) -> Self {
        Self { virtual_size, uuid: Some(Uuid::NIL), parent: None, user_tag: Vec::new() }
    }

    #[must_use]
    pub fn named(mut self, uuid: Uuid, parent: Option<Uuid>) -> Self {
        self.uuid = Some(uuid);
        self.parent = parent;
        self
    }

    pub(crate) fn check(&self) -> Result<(), Invalid> {
        if !is_virtual_size(self.virtual_size) {
            return Err(Invalid::VirtualSize(self.virtual_size));
        }
        if self.user_tag.len() > USER_TAG {
            return Err(Invalid::UserTag(self.user_tag.len()));
        }
        Ok(())
    }
}

fn is_virtual_size(bytes: u64) -> bool {
    bytes > 0 && bytes <= MAX_VIRTUAL_SIZE && bytes % SECTOR == 0
}

/// A header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub flags: Flags,
    /// Byte in the file where the index starts; 0 where it is not known.
    pub index_offset: u64,
    /// Entries in the index, padding included.
    pub index_count: u64,
    pub identity: Identity,
}

impl Header {
    /// The header of a log-structured upper's data file: not sealed, index elsewhere.
    pub fn of_upper(identity: Identity) -> Self {
        Self { flags: Flags::HEADER.with(Flags::DATA), index_offset: 0, index_count: 0, identity }
    }

    /// The header of a log-structured upper's index file: its entries follow it.
    pub fn of_log(identity: Identity) -> Self {
        Self { flags: Flags::HEADER, index_offset: BLOCK, index_count: 0, identity }
    }

    /// The header of a layer that is written once, from front to end.
    pub fn of_layer(identity: Identity) -> Self {
        let flags = Flags::HEADER.with(Flags::DATA).with(Flags::SEALED);
        Self { flags, index_offset: 0, index_count: 0, identity }
    }

    /// The block that ends a sealed layer.
    pub fn trailer(identity: Identity, index_offset: u64, index_count: u64) -> Self {
        Self { flags: Flags::DATA.with(Flags::SEALED), index_offset, index_count, identity }
    }

    /// Reads a block.
    ///
    /// # Errors
    /// A corruption if it is no header or trailer, unsupported for another version.
    pub fn decode(block: &[u8; BLOCK_LEN]) -> Result<Self> {
        if block[..24] != MAGIC {
            return Err(Corruption::Magic { what: "layer header" }.into());
        }
        let size = u32_at(block, 24);
        if size != SIZE {
            return Err(Corruption::HeaderSize { what: "layer header", size }.into());
        }
        if block[132] != VERSION {
            return Err(Unsupported::Version(block[132]).into());
        }
        let virtual_size = u64_at(block, 48);
        if !is_virtual_size(virtual_size) {
            return Err(Corruption::VirtualSize { bytes: virtual_size }.into());
        }
        let user_tag = &block[134..134 + USER_TAG];
        let used = user_tag.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Ok(Self {
            flags: Flags(u32_at(block, 28)),
            index_offset: u64_at(block, 32),
            index_count: u64_at(block, 40),
            identity: Identity {
                virtual_size,
                uuid: Uuid::decode(array_at(block, 56))?,
                parent: Uuid::decode(array_at(block, 56 + FIELD))?,
                user_tag: user_tag[..used].to_vec(),
            },
        })
    }

    /// The block to write.
    ///
    /// # Errors
    /// Invalid for an identity that no block can hold.
    pub fn encode(&self) -> Result<[u8; BLOCK_LEN]> {
        self.identity.check()?;
        let mut block = [0; BLOCK_LEN];
        block[..24].copy_from_slice(&MAGIC);
        block[24..28].copy_from_slice(&SIZE.to_le_bytes());
        block[28..32].copy_from_slice(&self.flags.0.to_le_bytes());
        block[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_count.to_le_bytes());
        block[48..56].copy_from_slice(&self.identity.virtual_size.to_le_bytes());
        block[56..56 + FIELD].copy_from_slice(&Uuid::encode(self.identity.uuid));
        block[56 + FIELD..56 + 2 * FIELD].copy_from_slice(&Uuid::encode(self.identity.parent));
        block[132] = VERSION;
        block[133] = SUB_VERSION;
        block[134..134 + self.identity.user_tag.len()].copy_from_slice(&self.identity.user_tag);
        Ok(block)
    }
}

/// *N* bytes of a block; the block is longer, by its type.
pub(crate) fn array_at<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("the block is long enough")
}

pub(crate) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*array_at(block, at))
}

pub(crate) fn u64_at(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*array_at(block, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let mut identity = Identity::new(1 << 30).named(Uuid::from_bytes([7; 16]), Some(Uuid::NIL));
        identity.user_tag = b"a tag".to_vec();
        Header::trailer(identity, 8192, 3)
    }

    #[test]
    fn a_block_is_read_as_it_was_written() {
        assert_eq!(Header::decode(&header().encode().unwrap()).unwrap(), header());
    }

    #[test]
    fn a_wrong_byte_in_a_fixed_field_is_an_error() {
        let good = header().encode().unwrap();
        for at in (0..28).chain([132]) {
            let mut bad = good;
            bad[at] ^= 0x10;
            assert!(Header::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn impossible_sizes_are_refused_in_both_directions() {
        for bytes in [0, 1, 511, u64::MAX, 1 << 63] {
            assert_eq!(Identity::new(bytes).check(), Err(Invalid::VirtualSize(bytes)));
            let mut block = header().encode().unwrap();
            block[48..56].copy_from_slice(&bytes.to_le_bytes());
            assert!(Header::decode(&block).is_err());
        }
    }
}
