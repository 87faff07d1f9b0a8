"""Where a process has mapped a memory image, read from its /proc/PID/maps. Pure but for one read.

A VMM may map an image in several pieces, and a balloon may have put anonymous memory
over parts of it: those parts read as zeros where nothing was written since, and no
longer as the image.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.model.errors import Bug, Unavailable

PAGE_BYTES: Final = 4096

_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+) *(.*)")
_DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class Vma:
    """One mapping of a process: address range [start, end), and what is behind it."""

    start: int
    end: int
    flags: str  # such as rw-p
    offset: int  # in the file
    inode: int  # 0: anonymous
    path: str

    @property
    def is_anonymous(self) -> bool:
        return self.inode == 0 and (not self.path or self.path.startswith("[anon"))


@dataclass(frozen=True, slots=True)
class Area:
    """A part of an image in the address space of a process.

    Addresses [start, end) hold the image from byte ``offset`` on. ``zeroed``: anonymous
    memory lies over it, so pages that are not there are zeros.
    """

    start: int
    end: int
    offset: int
    zeroed: bool

    @property
    def length(self) -> int:
        return self.end - self.start


def parse_maps(text: str) -> list[Vma]:
    """Return the mappings that *text*, the content of a maps file, lists; in order of address."""
    found = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise Bug(f"a line of a maps file makes no sense: {line[:200]!r}")
        start, end, flags, offset, inode, path = match.groups()
        found.append(Vma(int(start, 16), int(end, 16), flags, int(offset, 16), int(inode), path))
    return found


def find_areas(vmas: Sequence[Vma], image: Path, size_bytes: int) -> tuple[Area, ...]:
    """Return the areas that together hold bytes [0, *size_bytes*) of *image*, lowest first.

    Raises `Unavailable` if the image is not mapped in full, `Bug` if it is mapped
    shared (guests would write into what others start from) or twice.
    """
    name = str(image).replace("\n", "\\012")  # the one character that the kernel escapes
    names = {name, name + _DELETED}
    mapped = sorted((vma for vma in vmas if vma.path in names and vma.offset < size_bytes), key=lambda vma: vma.offset)
    if not mapped:
        raise Unavailable("the process does not map this memory")
    if any("s" in vma.flags for vma in mapped):
        raise Bug("the memory image is mapped shared")
    anonymous = [vma for vma in vmas if vma.is_anonymous]
    areas: list[Area] = []
    at = 0
    for vma in mapped:
        if vma.offset < at:
            raise Bug("the memory image is mapped twice")
        before = areas[-1].start - areas[-1].offset if areas else None
        areas += _fill_gap(at, vma.offset, before, vma.start - vma.offset, anonymous)
        length = min(vma.end - vma.start, size_bytes - vma.offset)
        areas.append(Area(vma.start, vma.start + length, vma.offset, zeroed=False))
        at = vma.offset + length
    areas += _fill_gap(at, size_bytes, areas[-1].start - areas[-1].offset, None, anonymous)
    return tuple(areas)


def _fill_gap(
    start: int, end: int, base_before: int | None, base_after: int | None, anonymous: Sequence[Vma]
) -> Iterator[Area]:
    """Cover the image bytes [start, end) with anonymous memory next to the piece before or after.

    A base is the address that byte 0 of the image would have if it continued that piece.
    """
    for base in (base_before, base_after):
        if base is None:
            continue
        # A balloon may leave thousands of gaps, so each looks only at what lies in it.
        for at in range(bisect_right(anonymous, base + start, key=lambda vma: vma.end), len(anonymous)):
            low, high = max(anonymous[at].start, base + start), min(anonymous[at].end, base + end)
            if low != base + start or low >= high:
                break
            yield Area(low, high, start, zeroed=True)
            start = high - base
    if start < end:
        raise Unavailable(f"bytes {start} to {end} of the memory are not mapped")
