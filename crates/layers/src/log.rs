//! The index file of a log-structured upper: a header, then one entry for each write and discard.
//!
//! The order on disk that makes it safe is the caller's: data first, then its entry, then a flush
//! of both. A crash can then only lose the end of the log, and only what no flush had covered.

use crate::error::{Corruption, MappingFault, Result};
use crate::header::{Flags, Identity};
use crate::index::{Bounds, Limits, for_each_entry};
use crate::layer::read_header;
use crate::map::Map;
use crate::segment::Segment;
use crate::source::{ReadAt, size};
use crate::{BLOCK, SECTOR};

/// A log, read back.
#[derive(Debug, Clone)]
pub struct Replay {
    pub identity: Identity,
    pub map: Map,
    /// Entries that were applied.
    pub entries: u64,
    /// Sector behind the last data that an entry ever named: where to append.
    pub data_end: u64,
    /// What was left out at the end; none after an orderly stop.
    pub dropped: Option<Dropped>,
}

impl Replay {
    /// Byte of the log where the next entry belongs; what lies behind was dropped.
    pub fn log_end(&self) -> u64 {
        BLOCK + self.entries * Segment::SIZE as u64
    }
}

/// The end of a log that could not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Bytes from the first bad entry to the end of the file.
    pub bytes: u64,
    /// What is wrong with the first one; none if the file only ends within an entry.
    pub fault: Option<MappingFault>,
    /// Entries behind the first bad one that look right. A crash of the host can leave some, if
    /// none was flushed; otherwise the log was damaged, and flushed writes are among them.
    pub plausible: u64,
}

/// Opens the log of an upper whose data file has `data_bytes` bytes. *map* is empty, and says how
/// the mappings are kept: see [`Map::new`] and [`Map::unjoined`].
///
/// # Errors
/// Corrupt if its header is not that of an upper's log; exhausted beyond *limits*. A bad end is
/// no error but is said, since only the caller knows how far it had flushed.
pub fn replay<S: ReadAt + ?Sized>(log: &S, data_bytes: u64, mut map: Map, limits: Limits) -> Result<Replay> {
    let bytes = size(log)?;
    if bytes < BLOCK {
        return Err(Corruption::TooShort { what: "the log of an upper", bytes }.into());
    }
    let header = read_header(log, 0)?;
    let flags = header.flags;
    if !flags.contains(Flags::HEADER) || flags.contains(Flags::DATA) || flags.contains(Flags::SEALED) {
        return Err(Corruption::Flags { what: "log", flags: flags.0.into() }.into());
    }
    let identity = header.identity;
    let count = (bytes - BLOCK) / Segment::SIZE as u64;
    let torn = (bytes - BLOCK) % Segment::SIZE as u64;
    limits.check_mappings(count)?;

    let data_start = BLOCK / SECTOR;
    let bounds = Bounds { data: data_start..data_bytes / SECTOR, virtual_sectors: identity.virtual_size / SECTOR };
    let mut data_end = data_start;
    let mut entries = 0;
    let mut dropped = (torn > 0).then_some(Dropped { bytes: torn, fault: None, plausible: 0 });
    let mut bad = false;
    for_each_entry(log, BLOCK, count, |entry, segment| {
        match bounds.check(segment) {
            Ok(()) if bad => {
                if let Some(dropped) = &mut dropped {
                    dropped.plausible += 1;
                }
            }
            Ok(()) => {
                if !segment.is_zeroed() {
                    data_end = data_end.max(segment.moffset() + segment.length());
                }
                map.insert(segment, |_| ());
                entries = entry + 1;
            }
            Err(_) if bad => (),
            Err(fault) => {
                bad = true;
                let bytes = bytes - BLOCK - entry * Segment::SIZE as u64;
                dropped = Some(Dropped { bytes, fault: Some(fault), plausible: 0 });
            }
        }
        Ok(())
    })?;
    Ok(Replay { identity, map, entries, data_end, dropped })
}
