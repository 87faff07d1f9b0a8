"""Room that the database keeps beside itself, for the moment when the disk is full.

A full disk is repaired by deleting, and to delete a record takes a write; to open a
database that was not closed takes one as well. So a file of `RESERVE_BYTES` stands
beside the database. It is given up when a write finds no room, and made again when
there is room for twice its size. Until then the database takes nothing new: what the
file left is for deletes, and for the moves of what exists.

Other writers of the same disk may take that room first. All calls block, shortly.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import structlog

RESERVE_BYTES: Final = 8 << 20  # a log that grows to the size at which it is written back, and what that adds
FULL_BELOW_BYTES: Final = 1 << 20  # an I/O error of a disk with less than this is for want of room

log = structlog.get_logger(__name__)


class Room:
    """The reserve of the database in the file *database*; none where *reserve_bytes* is 0."""

    def __init__(self, database: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._path = database.with_name(f"{database.name}-reserve")
        self._bytes = reserve_bytes
        self._kept = reserve_bytes == 0

    @property
    def kept(self) -> bool:
        """Whether the reserve is there, as far as this process knows; true where there is to be none."""
        return self._kept

    def keep(self) -> bool:
        """Make the reserve, if it is not there and there is room. Returns whether it is there; never raises."""
        if not self._kept:
            self._kept = self._is_whole() or self._make()
        return self._kept

    def give_up(self) -> bool:
        """Give the room of the reserve back to the disk; false if there was none to give."""
        if self._bytes == 0:
            return False
        self._kept = False
        try:
            self._path.unlink()
        except OSError:
            return False
        log.warning("the disk is full; the state database gave up its reserve", bytes=self._bytes)
        return True

    def is_full(self) -> bool:
        """Whether the disk has next to no room, or no file can be added."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < FULL_BELOW_BYTES or (disk.f_files > 0 and disk.f_favail == 0)

    def _is_whole(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.lstat().st_blocks * 512 >= self._bytes
        return False

    def _make(self) -> bool:
        try:
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < 2 * self._bytes:
                return False
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.unlink()  # part of it is no reserve, and takes room
            log.warning("the state database has no reserve yet", error=str(error))
            return False
        return True
