//! Where disks are seen: as files of the FUSE file system, or as block devices where the node was told so.
//!
//! Memory is always seen as files: QEMU's balloon punches holes into it, which a file accepts and ignores and a
//! read-only block device refuses.

use std::path::PathBuf;

use super::Node;
use crate::device::Kind;
use crate::error::Result;
use crate::image::disk::Disk;
use crate::ublk;

impl Node {
    /// From now on disks are block devices of *blocks*, which asks this node for them.
    pub fn show_disks_through(&self, blocks: ublk::Front) {
        // There is one: the first stays.
        let _ = self.blocks.set(blocks);
    }

    pub fn blocks(&self) -> Option<&ublk::Front> {
        self.blocks.get()
    }

    /// # Errors
    /// As [`ublk::Front::attach`].
    pub(super) fn show_disk(&self, disk: &Disk) -> Result<PathBuf> {
        match self.blocks() {
            Some(blocks) => blocks.attach(disk.device()),
            None => Ok(self.path(Kind::Disk, disk.owner().as_str())),
        }
    }

    /// A file stays where it is; a block device takes up a place that others need.
    ///
    /// # Errors
    /// As [`ublk::Front::detach`].
    pub(super) fn hide_disk(&self, disk: &Disk) -> Result<()> {
        self.blocks().map_or(Ok(()), |blocks| blocks.detach(disk.device()))
    }

    /// # Errors
    /// `unsupported` when whoever uses the disk could not learn of it.
    pub(super) fn may_grow(&self, disk: &Disk) -> Result<()> {
        self.blocks().map_or(Ok(()), |blocks| blocks.may_resize(disk.device()))
    }

    /// Tells whoever uses the disk that it has grown.
    ///
    /// # Errors
    /// As [`ublk::Front::resized`].
    pub(super) fn has_grown(&self, disk: &Disk) -> Result<()> {
        if let Some(front) = self.front() {
            front.resized(disk.device());
        }
        self.blocks().map_or(Ok(()), |blocks| blocks.resized(disk.device()))
    }
}
