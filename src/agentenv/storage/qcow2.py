"""The part of the qcow2 format, version 3, that we write and read without QEMU: headers and mapping tables.

Clusters of 64 KiB, 16-bit reference counts, no snapshots, no compression, no
encryption. A backing file is named relative to the directory of the file that
names it, with its format, so a chain is found from any working directory and the
data directory can be moved. Integers are big-endian. All calls block.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from agentenv.model.errors import Bug, Invalid
from agentenv.storage.files import write_all

CLUSTER_BITS: Final = 16
CLUSTER_BYTES: Final = 1 << CLUSTER_BITS
ENTRIES_PER_TABLE: Final = CLUSTER_BYTES // 8
BYTES_PER_L2: Final = CLUSTER_BYTES * ENTRIES_PER_TABLE
"""Guest bytes behind one entry of the first-level table: 512 MiB."""
SECTOR_BYTES: Final = 512
LARGEST_BYTES: Final = 64 << 40

COPIED: Final = 1 << 63
"""In a table entry: the cluster has exactly one reference, so it may be written in place."""
COMPRESSED: Final = 1 << 62
ZERO: Final = 1
"""In a second-level entry: the cluster reads as zeros, whatever lies below."""
OFFSET_MASK: Final = 0x00FF_FFFF_FFFF_FE00

_MAGIC: Final = b"QFI\xfb"
_VERSION: Final = 3
_REFCOUNT_ORDER: Final = 4  # 16 bits
_REFCOUNTS_PER_BLOCK: Final = CLUSTER_BYTES // 2
_HEADER: Final = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_EXTENSION: Final = struct.Struct(">II")
_BACKING_FORMAT: Final = 0xE279_2ACA
_LONGEST_NAME: Final = 1023
# Refcounts may lag after a crash (bit 0); data is sound. Every other incompatible feature is one we cannot read.
_TOLERATED_INCOMPATIBLE: Final = 1

Format = Literal["raw", "qcow2"]


@dataclass(frozen=True, slots=True)
class Backing:
    """The file below: its name in the same directory, and how to read it."""

    name: str
    format: Format


@dataclass(frozen=True, slots=True)
class Header:
    """What we need to know of a qcow2 file. Offsets are in bytes."""

    size_bytes: int
    backing: Backing | None
    backing_name_offset: int
    l1_offset: int
    l1_entries: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in a file that we write: header, first-level table, *body* clusters, reference counts."""

    l1_clusters: int
    body_clusters: int
    refcount_blocks: int
    refcount_table_clusters: int

    @property
    def l1_offset(self) -> int:
        return CLUSTER_BYTES

    @property
    def body_offset(self) -> int:
        return (1 + self.l1_clusters) * CLUSTER_BYTES

    @property
    def refcount_blocks_offset(self) -> int:
        return self.body_offset + self.body_clusters * CLUSTER_BYTES

    @property
    def refcount_table_offset(self) -> int:
        return self.refcount_blocks_offset + self.refcount_blocks * CLUSTER_BYTES

    @property
    def clusters(self) -> int:
        return 1 + self.l1_clusters + self.body_clusters + self.refcount_blocks + self.refcount_table_clusters


def plan_layout(size_bytes: int, body_clusters: int) -> Layout:
    """Return the layout of a disk of *size_bytes* whose mapping tables and data take *body_clusters*.

    Raises `Invalid` for a size that is not a positive multiple of 512 or is above 64 TiB.
    """
    if not 0 < size_bytes <= LARGEST_BYTES or size_bytes % SECTOR_BYTES:
        raise Invalid(f"a disk cannot have {size_bytes} bytes", hint="use a multiple of 512, at most 64 TiB")
    l1_clusters = _divide_up(l1_entries(size_bytes) * 8, CLUSTER_BYTES)
    blocks = table = 0
    while True:  # the counts count themselves, so grow them until they fit
        clusters = 1 + l1_clusters + body_clusters + blocks + table
        needed_blocks = _divide_up(clusters, _REFCOUNTS_PER_BLOCK)
        needed_table = _divide_up(needed_blocks, ENTRIES_PER_TABLE)
        if (needed_blocks, needed_table) == (blocks, table):
            return Layout(l1_clusters, body_clusters, blocks, table)
        blocks, table = needed_blocks, needed_table


def l1_entries(size_bytes: int) -> int:
    """Return how many first-level entries a disk of *size_bytes* has."""
    return _divide_up(size_bytes, BYTES_PER_L2)


def write_frame(fd: int, size_bytes: int, backing: Backing | None, layout: Layout) -> None:
    """Write everything of a new file but its first-level table and its body, which stay holes."""
    os.ftruncate(fd, layout.clusters * CLUSTER_BYTES)
    write_all(fd, [_encode_header(size_bytes, backing, layout)], 0)
    counts = array("H", [1]) * layout.clusters
    counts.byteswap()
    write_all(fd, [counts.tobytes()], layout.refcount_blocks_offset)
    first = layout.refcount_blocks_offset
    blocks = range(first, first + layout.refcount_blocks * CLUSTER_BYTES, CLUSTER_BYTES)
    write_all(fd, [encode_table(blocks)], layout.refcount_table_offset)


def write_empty(fd: int, size_bytes: int, backing: Backing | None) -> None:
    """Make the empty file *fd* a disk of *size_bytes* that reads as *backing*, or as zeros without one."""
    write_frame(fd, size_bytes, backing, plan_layout(size_bytes, 0))


def read_header(fd: int) -> Header:
    """Return the header of *fd*, or raise `Bug` if this is not a file that we or QEMU made from one of ours."""
    data = os.pread(fd, CLUSTER_BYTES, 0)
    if len(data) < _HEADER.size:
        raise Bug("a qcow2 file is shorter than its header")
    (magic, version, name_offset, name_length, cluster_bits, size, crypt, l1_count, l1_offset, _, _, snapshots, _) = (
        _HEADER.unpack_from(data)[:13]
    )
    incompatible, _, _, order, length = _HEADER.unpack_from(data)[13:]
    sound = (
        (magic, version, cluster_bits, crypt, snapshots, order)
        == (_MAGIC, _VERSION, CLUSTER_BITS, 0, 0, _REFCOUNT_ORDER)
        and not incompatible & ~_TOLERATED_INCOMPATIBLE
        and _HEADER.size <= length <= len(data)
        and l1_entries(size) <= l1_count <= l1_entries(LARGEST_BYTES)
        and l1_offset % CLUSTER_BYTES == 0
        and l1_offset <= OFFSET_MASK  # beyond, no file has a byte, and the kernel takes no such offset
        and name_length <= _LONGEST_NAME
        and name_offset + name_length <= len(data)
    )
    if not sound:
        raise Bug("a qcow2 header is damaged, or uses what we never write")
    backing = None
    if name_offset:
        name = data[name_offset : name_offset + name_length].decode("utf-8", "replace")
        backing = Backing(name, _backing_format(data, length))
    return Header(size, backing, name_offset, l1_offset, l1_count)


def rename_backing(fd: int, name: str) -> bool:
    """Let *fd* name another backing file of the same content and format; tell whether that could be done.

    It can where the new name fits the place of the old one inside one sector: then a
    power failure leaves one of the two names, and never a mixture.
    """
    header = read_header(fd)
    encoded = name.encode()
    if header.backing is None or len(header.backing.name.encode()) != len(encoded):
        return False
    first, last = header.backing_name_offset, header.backing_name_offset + len(encoded) - 1
    if first // SECTOR_BYTES != last // SECTOR_BYTES:
        return False
    write_all(fd, [encoded], first)
    return True


def holds_data(fd: int) -> bool:
    """Whether anything was ever written to this disk."""
    header = read_header(fd)
    return any(read_table(fd, header.l1_offset, header.l1_entries))


def read_table(fd: int, offset: int, entries: int) -> "array[int]":
    """Return a table of 64-bit entries, or raise `Bug` if the file ends before it does."""
    data = os.pread(fd, entries * 8, offset)
    if len(data) != entries * 8:
        raise Bug("a qcow2 file ends in the middle of a table")
    table = array("Q", data)
    table.byteswap()
    return table


def encode_table(entries: Sequence[int]) -> bytes:
    table = array("Q", entries)
    table.byteswap()
    return table.tobytes()


def _encode_header(size_bytes: int, backing: Backing | None, layout: Layout) -> bytes:
    extensions, name, name_offset = b"", b"", 0
    if backing is not None:
        kind, name = backing.format.encode(), backing.name.encode()
        if not 0 < len(name) <= _LONGEST_NAME or "/" in backing.name or ":" in backing.name:
            raise Bug(f"{backing.name!r} cannot name a backing file")
        extensions += _EXTENSION.pack(_BACKING_FORMAT, len(kind)) + kind.ljust(_divide_up(len(kind), 8) * 8, b"\0")
    extensions += _EXTENSION.pack(0, 0)
    if name:
        # At a sector boundary, so that renaming it is one atomic write.
        name_offset = _divide_up(_HEADER.size + len(extensions), SECTOR_BYTES) * SECTOR_BYTES
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        name_offset,
        len(name),
        CLUSTER_BITS,
        size_bytes,
        0,  # not encrypted
        l1_entries(size_bytes),
        layout.l1_offset,
        layout.refcount_table_offset,
        layout.refcount_table_clusters,
        0,  # snapshots
        0,
        0,  # incompatible, compatible (no lazy refcounts) and autoclear features
        0,
        0,
        _REFCOUNT_ORDER,
        _HEADER.size,
    )
    return (header + extensions).ljust(name_offset, b"\0") + name


def _backing_format(data: bytes, at: int) -> Format:
    while at + _EXTENSION.size <= len(data):
        kind, length = _EXTENSION.unpack_from(data, at)
        if kind == 0:
            break
        at += _EXTENSION.size
        if kind == _BACKING_FORMAT:
            match data[at : at + length]:
                case b"raw":
                    return "raw"
                case b"qcow2":
                    return "qcow2"
        at += _divide_up(length, 8) * 8
    raise Bug("a qcow2 file does not say what format its backing has")


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)
