"""Room that the database keeps beside itself, for the moment when the disk is full.

A full disk is repaired by deleting, and to delete a record takes a write; to open a
database that was not closed takes one as well. So two files stand beside the database:
a reserve that is given up when a write finds no room, and a small one, the last, that
only an opening gives up. Both are made again when there is room for twice their size.
Until then the database takes nothing new: what they left is for deletes, and for the
moves of what exists.

Other writers of the same disk may take that room first. All calls block, shortly.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

RESERVE_BYTES: Final = 8 << 20  # a log that grows to the size at which it is written back, and what that adds
LAST_BYTES: Final = 1 << 20  # the index of such a log, and a few deletes
FULL_BELOW_BYTES: Final = 1 << 20  # an I/O error of a disk with less than this is for want of room

log = structlog.get_logger(__name__)


class Room:
    """The reserve of the database in the file *database*; none where *reserve_bytes* is 0."""

    def __init__(self, database: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._directory = database.parent
        self._reserve = database.with_name(f"{database.name}-reserve")
        self._last = database.with_name(f"{database.name}-reserve-last")
        self._sizes = {self._reserve: reserve_bytes, self._last: LAST_BYTES} if reserve_bytes else {}
        self._kept = not self._sizes

    @property
    def kept(self) -> bool:
        """Whether the reserve is there, as far as this process knows; true where there is to be none."""
        return self._kept

    def keep(self) -> bool:
        """Make the reserve, if it is not there and there is room. Returns whether it is there; never raises."""
        if not self._kept:
            missing = {path: size for path, size in self._sizes.items() if not _is_whole(path, size)}
            self._kept = not missing or self._make(missing)
        return self._kept

    def give_up(self, *, opening: bool = False) -> bool:
        """Give the room of the reserve back to the disk; false if there was none to give.

        Where *opening*, the last reserve is given up if there is no other.
        """
        if not self._sizes:
            return False
        self._kept = False
        for path in (self._reserve, self._last) if opening else (self._reserve,):
            with contextlib.suppress(OSError):
                path.unlink()
                log.warning("the disk is full; the state database gave up a reserve", bytes=self._sizes[path])
                return True
        return False

    def is_full(self) -> bool:
        """Whether the disk has next to no room, or no file can be added."""
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < FULL_BELOW_BYTES or (disk.f_files > 0 and disk.f_favail == 0)

    def _make(self, missing: Mapping[Path, int]) -> bool:
        try:
            disk = os.statvfs(self._directory)
            if disk.f_bavail * disk.f_frsize < 2 * sum(missing.values()):
                return False
            for path, size in missing.items():
                _allocate(path, size)
        except OSError as error:
            log.warning("the state database has no reserve yet", error=str(error))
            return False
        return True


def _is_whole(path: Path, size: int) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512 >= size
    return False


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        path.unlink()  # part of it is no reserve, and takes room
        raise
    finally:
        os.close(descriptor)
