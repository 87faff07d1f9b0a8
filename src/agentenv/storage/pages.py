"""The pages in which one memory image differs from another, as a file of our own format.

    0       header: magic, version, sizes, counts, checksums, the name of the base image
    4096    the data of all changed pages that are not zero, in order of address
    then    index: ranges of those pages, ranges of pages that are zero, and a
            checksum for each block of `BLOCK_PAGES` pages of data

A range is two 64-bit numbers, first page and page after the last; a checksum is the
CRC-32 of zlib. Integers are little-endian. Everything is checked before it is used: a
damaged file is a `Bug`, never a page of zeros. All calls block.
"""

import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from agentenv.model.errors import Bug
from agentenv.storage.files import Check, reserve, start_writeback, write_all
from agentenv.storage.mapping import PAGE_BYTES

Range: TypeAlias = tuple[int, int]
"""First and one past the last: pages, or addresses."""

BLOCK_PAGES: Final = 64
BLOCK_BYTES: Final = BLOCK_PAGES * PAGE_BYTES

_MAGIC: Final = b"AENVPAGE"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQQQI64s")
_CHECKSUM: Final = struct.Struct("<I")
_DATA_OFFSET: Final = PAGE_BYTES
_RANGE_BYTES: Final = 16
_WRITEBACK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Delta:
    """What a file of changed pages says about itself. Ranges are in pages."""

    base: str
    memory_bytes: int
    data: tuple[Range, ...]
    zeros: tuple[Range, ...]
    checksums: tuple[int, ...]  # of each block

    @property
    def data_pages(self) -> int:
        return sum(end - start for start, end in self.data)


@dataclass(frozen=True, slots=True)
class Written:
    """What went into a file of changed pages. Zero pages are a change without data."""

    is_change: bool
    data_bytes: int


class DeltaWriter:
    """Writes a file of changed pages front to back.

    Args:
        fd: an empty file, open for writing.
        base: name of the image that the pages differ from, 64 bytes at most.
        memory_bytes: size of both images.
    """

    def __init__(self, fd: int, base: str, memory_bytes: int) -> None:
        self._fd = fd
        self._base = base
        self._memory_bytes = memory_bytes
        self._end = _DATA_OFFSET
        self._writeback_from = 0
        self._checksums: list[int] = []
        self._room = 0  # bytes that the last block can still take
        self._data: list[Range] = []
        self._zeros: list[Range] = []

    def expect(self, data_bytes: int) -> None:
        """Reserve room for that much data, so that a full disk is found out before any work is done."""
        reserve(self._fd, data_bytes + _DATA_OFFSET)

    def add_data(self, pages: Iterable[Range], segments: Sequence[memoryview]) -> None:
        """Append *pages*, which come after all data before, with their content in *segments*."""
        self._data += pages
        for segment in segments:
            self._add_to_checksums(segment)
        self._end += write_all(self._fd, segments, self._end)
        if self._end - self._writeback_from >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._writeback_from, self._end - self._writeback_from)
            self._writeback_from = self._end

    def add_zeros(self, pages: Iterable[Range]) -> None:
        """Note that *pages* are zero; in any order."""
        self._zeros += pages

    def finish(self) -> Written:
        """Write index and header. The caller makes the file durable."""
        data, zeros = _joined(self._data), _joined(sorted(self._zeros))
        index = _encode_ranges(data) + _encode_ranges(zeros) + array("I", self._checksums).tobytes()
        write_all(self._fd, [index], self._end)
        os.ftruncate(self._fd, self._end + len(index))
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            PAGE_BYTES,
            self._memory_bytes,
            (self._end - _DATA_OFFSET) // PAGE_BYTES,
            len(data),
            len(zeros),
            zlib.crc32(index),
            self._base.encode(),
        )
        write_all(self._fd, [(header + _CHECKSUM.pack(zlib.crc32(header))).ljust(_DATA_OFFSET, b"\0")], 0)
        return Written(is_change=bool(data or zeros), data_bytes=self._end - _DATA_OFFSET)

    def _add_to_checksums(self, segment: memoryview) -> None:
        while segment:
            if not self._room:
                self._checksums.append(0)
                self._room = BLOCK_BYTES
            part = segment[: self._room]
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self._room -= len(part)
            segment = segment[len(part) :]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the header of a file of changed pages says."""

    base: str
    memory_bytes: int
    data_bytes: int


def read_summary(fd: int) -> Summary:
    """Return what the checked header of *fd* says, without a look at anything else."""
    header = _read_header(fd)
    return Summary(header.base, header.memory_bytes, header.data_pages * PAGE_BYTES)


def read_delta(fd: int) -> Delta:
    """Return what *fd* holds, all of it checked but the page data, which `read_pages` checks."""
    header = _read_header(fd)
    blocks = -(-header.data_pages // BLOCK_PAGES)
    index_offset = _DATA_OFFSET + header.data_pages * PAGE_BYTES
    ranges_bytes = (header.data_ranges + header.zero_ranges) * _RANGE_BYTES
    index_bytes = ranges_bytes + blocks * _CHECKSUM.size
    if os.fstat(fd).st_size != index_offset + index_bytes:
        raise Bug("a file of changed pages has the wrong length")
    index = os.pread(fd, index_bytes, index_offset)
    if len(index) != index_bytes or zlib.crc32(index) != header.index_checksum:
        raise Bug("the index of a file of changed pages is damaged")
    numbers = array("Q", index[:ranges_bytes])
    ranges = list(zip(numbers[0::2], numbers[1::2], strict=True))
    delta = Delta(
        base=header.base,
        memory_bytes=header.memory_bytes,
        data=tuple(ranges[: header.data_ranges]),
        zeros=tuple(ranges[header.data_ranges :]),
        checksums=tuple(array("I", index[ranges_bytes:])),
    )
    if delta.data_pages != header.data_pages or not _is_sound(delta):
        raise Bug("the index of a file of changed pages contradicts itself")
    return delta


def read_pages(
    fd: int, delta: Delta, view: memoryview, check: Check, *, first: int = 0, step: int = 1
) -> Iterator[list[Range]]:
    """Read the data of *delta* through *view*, block by block: yield the pages whose content *view* now begins with.

    *view* has `BLOCK_BYTES`. Of all blocks, the *first* and every *step*-th after it are
    read. Raises `Bug` instead of yielding data that is not what was written.
    """
    for number, pages in enumerate(batches(delta.data, BLOCK_PAGES)):
        if number % step != first:
            continue
        check()
        length = sum(end - start for start, end in pages) * PAGE_BYTES
        filled = 0
        while filled < length:
            got = os.preadv(fd, [view[filled:length]], _DATA_OFFSET + number * BLOCK_BYTES + filled)
            if got == 0:
                raise Bug("a file of changed pages is cut short")
            filled += got
        if zlib.crc32(view[:length]) != delta.checksums[number]:
            raise Bug("the data of a file of changed pages is damaged")
        yield pages


def batches(ranges: Iterable[Range], capacity: int) -> Iterator[list[Range]]:
    """Yield *ranges* in groups of at most *capacity* units in all, cutting them where they do not fit."""
    group: list[Range] = []
    room = capacity
    for start, end in ranges:
        while end - start >= room:
            group.append((start, start + room))
            yield group
            start += room  # noqa: PLW2901 - the rest of this range
            group, room = [], capacity
        if start < end:
            group.append((start, end))
            room -= end - start
    if group:
        yield group


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """*ranges*, in order, with neighbours made one."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _encode_ranges(ranges: Iterable[Range]) -> bytes:
    return array("Q", [number for pair in ranges for number in pair]).tobytes()


def _is_sound(delta: Delta) -> bool:
    """Whether data and zero ranges are each in order, none is empty, none overlap and all lie inside the memory."""
    in_order = all(before[1] <= after[0] for part in (delta.data, delta.zeros) for before, after in pairwise(part))
    ranges = sorted(delta.data + delta.zeros)
    return (
        in_order
        and all(start < end for start, end in ranges)
        and all(before[1] <= after[0] for before, after in pairwise(ranges))
        and (not ranges or ranges[-1][1] <= delta.memory_bytes // PAGE_BYTES)
    )


@dataclass(frozen=True, slots=True)
class _Header:
    memory_bytes: int
    data_pages: int
    data_ranges: int
    zero_ranges: int
    index_checksum: int
    base: str


def _read_header(fd: int) -> _Header:
    data = os.pread(fd, _HEADER.size + _CHECKSUM.size, 0)
    encoded, checksum = data[: _HEADER.size], data[_HEADER.size :]
    if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(encoded):
        raise Bug("the header of a file of changed pages is damaged")
    magic, version, page_bytes, memory_bytes, data_pages, data_ranges, zero_ranges, index_checksum, base = (
        _HEADER.unpack(encoded)
    )
    if (magic, version, page_bytes) != (_MAGIC, _VERSION, PAGE_BYTES):
        raise Bug(
            f"a file of changed pages has version {version} and pages of {page_bytes} bytes, which we cannot read"
        )
    if memory_bytes % PAGE_BYTES or max(data_pages, data_ranges, zero_ranges) > memory_bytes // PAGE_BYTES:
        raise Bug("the header of a file of changed pages contradicts itself")
    name = base.rstrip(b"\0").decode("ascii", "replace")
    return _Header(memory_bytes, data_pages, data_ranges, zero_ranges, index_checksum, name)
