"""Which pages of a private mapping belong to the process alone: the ones it has changed.

The PAGEMAP_SCAN ioctl (Linux 6.7) finds them without a pass over every page in
Python; older kernels are read through /proc/PID/pagemap. Both give the same answer.
"""

import errno
import fcntl
import os
import re
import struct
from array import array
from collections.abc import Iterator
from typing import Final

from agentenv.model.errors import Bug
from agentenv.storage.mapping import PAGE_BYTES

_PAGEMAP_SCAN: Final = 0xC060_6610
_FILE: Final = 1 << 2
_PRESENT: Final = 1 << 3
_SWAPPED: Final = 1 << 4
_ARGUMENT: Final = struct.Struct("=12Q")
_REGIONS_PER_CALL: Final = 16384
_WORDS_PER_REGION: Final = 3
_NO_IOCTL: Final = frozenset({errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP})

_ENTRY_BYTES: Final = 8
_PAGES_PER_READ: Final = 1 << 18
# The top byte of a pagemap entry: present 0x80, swapped 0x40, file page 0x20.
_PRIVATE: Final = bytes(bool(top & 0xC0) and not top & 0x20 for top in range(256))
_RUN: Final = re.compile(b"\x01+")


def private_ranges(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the address ranges inside [start, end) whose pages are private to the process, lowest first.

    *pagemap* is an open /proc/PID/pagemap. Raises `OSError` as the kernel does.
    """
    try:
        yield from scanned_ranges(pagemap, start, end)
    except OSError as error:
        if error.errno not in _NO_IOCTL:
            raise
    else:
        return
    yield from read_ranges(pagemap, start, end)


def scanned_ranges(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """`private_ranges` through the ioctl. Raises `OSError` before the first range where it is missing."""
    regions = array("Q", bytes(8 * _WORDS_PER_REGION * _REGIONS_PER_CALL))
    address, _ = regions.buffer_info()
    while start < end:
        argument = bytearray(
            _ARGUMENT.pack(
                _ARGUMENT.size,
                0,  # flags
                start,
                end,
                0,  # where the walk ended, filled in
                address,
                _REGIONS_PER_CALL,
                0,  # no limit on pages
                _FILE,  # wanted clear
                _FILE,  # all of these
                _PRESENT | _SWAPPED,  # any of these
                _FILE,  # reported: always clear, so neighbours come as one region
            )
        )
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
        words = _WORDS_PER_REGION * count
        yield from zip(regions[0:words:3], regions[1:words:3], strict=True)
        if count < _REGIONS_PER_CALL:
            return
        # After more than one round inside the kernel (512 regions each) its own note of where the walk
        # ended is the one of an earlier round (seen on 6.18), and going by it would report pages twice.
        walked = max(_ARGUMENT.unpack(argument)[4], regions[words - 2])
        if not start < walked <= end:
            raise Bug("the kernel's page scan makes no progress")
        start = walked


def read_ranges(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """`private_ranges` from the table of all pages."""
    while start < end:
        pages = min((end - start) // PAGE_BYTES, _PAGES_PER_READ)
        table = os.pread(pagemap, pages * _ENTRY_BYTES, start // PAGE_BYTES * _ENTRY_BYTES)
        if len(table) != pages * _ENTRY_BYTES:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        for run in _RUN.finditer(table[7::8].translate(_PRIVATE)):
            yield start + run.start() * PAGE_BYTES, start + run.end() * PAGE_BYTES
        start += pages * PAGE_BYTES
