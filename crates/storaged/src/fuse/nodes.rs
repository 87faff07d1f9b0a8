//! Numbers of nodes: two folders, and a node for each device that is the same whichever daemon serves it.

use std::num::NonZeroU64;

use crate::device::{DeviceId, Kind};

const ROOT: u64 = 1;
const DISKS: u64 = 2;
const MEMORY: u64 = 3;
/// Devices come after it; what is left in between is for folders to come.
const RESERVED: u64 = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Root,
    Folder(Kind),
    Device(DeviceId),
}

pub(super) const FOLDERS: [(Kind, &str); 2] = [(Kind::Disk, "disks"), (Kind::Memory, "memory")];

impl Node {
    pub(super) fn of(number: u64) -> Option<Self> {
        match number {
            ROOT => Some(Self::Root),
            DISKS => Some(Self::Folder(Kind::Disk)),
            MEMORY => Some(Self::Folder(Kind::Memory)),
            _ => number.checked_sub(RESERVED).and_then(NonZeroU64::new).map(|id| Self::Device(DeviceId(id))),
        }
    }

    pub(super) fn number(self) -> u64 {
        match self {
            Self::Root => ROOT,
            Self::Folder(Kind::Disk) => DISKS,
            Self::Folder(Kind::Memory) => MEMORY,
            Self::Device(DeviceId(id)) => id.get().saturating_add(RESERVED),
        }
    }
}

pub(super) fn folder_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Disk => FOLDERS[0].1,
        Kind::Memory => FOLDERS[1].1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_node() {
        for number in [1, 2, 3, 16, 17, 1 << 60] {
            assert_eq!(Node::of(number).map(Node::number), Some(number));
        }
        for number in [0, 4, 14, 15] {
            assert_eq!(Node::of(number), None);
        }
    }
}
