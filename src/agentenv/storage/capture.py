"""What a stopped process changed in its mapping of a memory image, written down; and put into a process again.

Cost grows with changed pages. Data moves in blocks through one buffer that stays in
the processor's cache: read, look for zero pages, checksum, write. All calls block.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fstat, fsync, ftruncate
from pathlib import Path
from typing import Final, Protocol

from agentenv.model.errors import Bug
from agentenv.storage.files import Check, write_all, write_zeros
from agentenv.storage.mapping import PAGE_BYTES, Area
from agentenv.storage.pages import BLOCK_BYTES, BLOCK_PAGES, Delta, DeltaWriter, Range, Written, batches, read_pages
from agentenv.storage.transfer import Buffer, Process

_WORDS_PER_PAGE: Final = PAGE_BYTES // 8
_ZERO_PAGE: Final = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Image:
    """A memory image that a process maps."""

    path: Path
    memory_bytes: int


class Sink(Protocol):
    """Takes changed pages in order of address. `DeltaWriter` is one, `FlatWriter` another."""

    def expect(self, data_bytes: int) -> None:
        """At most that much data will come."""
        ...

    def add_data(self, pages: Sequence[Range], segments: Sequence[memoryview]) -> None: ...

    def add_zeros(self, pages: Sequence[Range]) -> None: ...


class FlatWriter:
    """Writes changed pages of zeroed memory as a plain image; zero pages stay holes."""

    def __init__(self, fd: int, memory_bytes: int) -> None:
        self._fd = fd
        ftruncate(fd, memory_bytes)

    def expect(self, data_bytes: int) -> None:
        """Nothing to do: room cannot be reserved in a file with holes."""

    def add_data(self, pages: Sequence[Range], segments: Sequence[memoryview]) -> None:
        left = list(segments)
        for start, end in pages:
            offset = start * PAGE_BYTES
            while offset < end * PAGE_BYTES:
                part = left[0][: end * PAGE_BYTES - offset]
                offset += write_all(self._fd, [part], offset)
                left[0] = left[0][len(part) :]
                if not left[0]:
                    del left[0]

    def add_zeros(self, pages: Sequence[Range]) -> None:
        """Nothing to do: what is not written is a hole."""


def capture_flat(pid: int, image: Image, fd: int, check: Check) -> None:
    """Write to the empty file *fd* the memory that *pid* has, where *image* is all zero. Durable on return."""
    _capture(pid, image, FlatWriter(fd, image.memory_bytes), check)
    fsync(fd)


def capture_delta(pid: int, image: Image, base: str, fd: int, check: Check) -> Written:
    """Write to the empty file *fd* in what pages *pid* differs from *image*, called *base*; return how much that is.

    Durable on return. Raises `Unavailable` if the process ends meanwhile or does not map the image.
    """
    writer = DeltaWriter(fd, base, image.memory_bytes)
    _capture(pid, image, writer, check)
    written = writer.finish()
    fsync(fd)
    return written


def fill(pid: int, image: Image, fd: int, delta: Delta, check: Check, *, worker: int = 0, workers: int = 1) -> None:
    """Write the pages of *delta*, from its file *fd*, into the mapping of *image* that *pid* has.

    With several *workers*, each call does the share of one: a first write to a page costs
    the kernel most of the time, and it can do that for several callers at once. Raises
    `Bug` if the file is damaged, `Unavailable` if the process ends: in both cases the
    memory of the process is worthless.
    """
    if delta.memory_bytes != image.memory_bytes:
        raise Bug(f"changed pages of {delta.memory_bytes} bytes of memory do not fit one of {image.memory_bytes}")
    buffer = Buffer(BLOCK_BYTES)
    with Process(pid) as process:
        areas = process.areas(image.path, image.memory_bytes)
        for pages in read_pages(fd, delta, buffer.view, check, first=worker, step=workers):
            process.write(_addresses(areas, pages), buffer)
        if delta.zeros and worker == 0:
            buffer.view[:] = bytes(BLOCK_BYTES)
            for pages in batches(delta.zeros, BLOCK_PAGES):
                check()
                process.write(_addresses(areas, pages), buffer)
        process.check_alive()


def apply_delta(fd: int, delta: Delta, target: int, check: Check) -> None:
    """Write the data pages of *delta*, from its file *fd*, over the flat image *target*; zero pages become holes."""
    buffer = Buffer(BLOCK_BYTES)
    if fstat(target).st_size != delta.memory_bytes:
        raise Bug(f"changed pages of {delta.memory_bytes} bytes of memory do not fit the image")
    for pages in read_pages(fd, delta, buffer.view, check):
        at = 0
        for start, end in pages:
            length = (end - start) * PAGE_BYTES
            at += write_all(target, [buffer.view[at : at + length]], start * PAGE_BYTES)
    for start, end in delta.zeros:
        write_zeros(target, start * PAGE_BYTES, (end - start) * PAGE_BYTES)


def _capture(pid: int, image: Image, sink: Sink, check: Check) -> None:
    buffer = Buffer(BLOCK_BYTES)
    with Process(pid) as process:
        changed = [(area, process.private_ranges(area)) for area in process.areas(image.path, image.memory_bytes)]
        sink.expect(sum(end - start for _, ranges in changed for start, end in ranges))
        for area, ranges in changed:
            if area.zeroed:
                sink.add_zeros(_pages(area, _between(ranges, area.start, area.end)))
            for pieces in batches(ranges, BLOCK_BYTES):
                check()
                length = process.read(pieces, buffer)
                _pass_on(_pages(area, pieces), buffer.view[:length], sink)
        process.check_alive()


def _pass_on(pages: list[Range], content: memoryview, sink: Sink) -> None:
    """Give *sink* what was read, zero pages apart."""
    zeros = zero_pages(content)
    if not zeros:
        sink.add_data(pages, [content])
        return
    data_ranges: list[Range] = []
    zero_ranges: list[Range] = []
    segments: list[memoryview] = []
    at = 0  # page in the buffer at which the range starts
    for start, end in pages:
        shift = start - at
        first, last = bisect_left(zeros, at), bisect_left(zeros, at + end - start)
        begin = at
        for zero in (*zeros[first:last], at + end - start):
            if begin < zero:
                data_ranges.append((begin + shift, zero + shift))
                segments.append(content[begin * PAGE_BYTES : zero * PAGE_BYTES])
            begin = zero + 1
        zero_ranges += [(zero + shift, zero + shift + 1) for zero in zeros[first:last]]
        at += end - start
    sink.add_data(data_ranges, segments)
    sink.add_zeros(zero_ranges)


def zero_pages(content: memoryview) -> list[int]:
    """Return which pages of *content* are all zero. Looks at whole pages only where three words of them are zero."""
    words = content.cast("Q")
    first, middle, last = (words[at::_WORDS_PER_PAGE].tolist() for at in (0, _WORDS_PER_PAGE // 2, _WORDS_PER_PAGE - 1))
    return [
        page
        for page, word in enumerate(first)
        if not (word or middle[page] or last[page])
        and content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes() == _ZERO_PAGE
    ]


def _pages(area: Area, ranges: Sequence[Range]) -> list[Range]:
    shift = area.start - area.offset
    return [((start - shift) // PAGE_BYTES, (end - shift) // PAGE_BYTES) for start, end in ranges]


def _between(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """What of [start, end) is in none of *ranges*."""
    left = []
    for low, high in ranges:
        if start < low:
            left.append((start, low))
        start = high
    if start < end:
        left.append((start, end))
    return left


def _addresses(areas: Sequence[Area], pages: Sequence[Range]) -> list[Range]:
    """The address ranges of *pages*, in the same order, cut where an area ends."""
    found: list[Range] = []
    for first, last in pages:
        start, end = first * PAGE_BYTES, last * PAGE_BYTES
        for area in _overlapping(areas, start, end):
            low, high = max(start, area.offset), min(end, area.offset + area.length)
            found.append((area.start + low - area.offset, area.start + high - area.offset))
    return found


def _overlapping(areas: Sequence[Area], start: int, end: int) -> Iterator[Area]:
    if len(areas) == 1:  # as good as always
        yield areas[0]
        return
    at = bisect_left(areas, start, key=lambda area: area.offset + area.length - 1)
    while at < len(areas) and areas[at].offset < end:
        yield areas[at]
        at += 1
