"""What a VMM does to a disk, without a VMM: reads and writes raw files and chains of qcow2 files.

The qcow2 part is written from the format alone and shares no code with the product, so
that the two can be held against each other, and against QEMU's own tools.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from agentenv.model.machine import BlockTarget

CLUSTER = 1 << 16


class GuestDisk:
    """One disk as a guest sees it. `switch` is what a driver's ``switch_disk`` does."""

    def __init__(self, target: BlockTarget) -> None:
        self.target = target

    async def switch(self, target: BlockTarget) -> None:
        self.target = target

    def read(self, offset: int, length: int) -> bytes:
        if self.target.format == "raw":
            return _read_file(self.target.path, offset, length)
        found = bytearray()
        while len(found) < length:
            at = offset + len(found)
            step = min(length - len(found), CLUSTER - at % CLUSTER)
            found += _read_cluster(self.target.path, at // CLUSTER)[at % CLUSTER :][:step]
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        if self.target.format == "raw":
            fd = os.open(self.target.path, os.O_WRONLY)
            try:
                os.pwrite(fd, data, offset)
            finally:
                os.close(fd)
            return
        while data:
            step = min(len(data), CLUSTER - offset % CLUSTER)
            number = offset // CLUSTER
            cluster = bytearray(_read_cluster(self.target.path, number))
            cluster[offset % CLUSTER : offset % CLUSTER + step] = data[:step]
            _write_cluster(self.target.path, number, bytes(cluster))
            data, offset = data[step:], offset + step


@dataclass(frozen=True, slots=True)
class _Header:
    backing: str | None
    size: int
    l1_size: int
    l1_offset: int
    refcount_table: int


def chain_of(path: Path) -> list[Path]:
    """*path* and what lies below it, lowest first, as the files name each other."""
    found = [path]
    while found[0].suffix == ".qcow2" and (backing := _header(found[0]).backing) is not None:
        found.insert(0, found[0].parent / backing)
    return found


def _read_file(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length).ljust(length, b"\0")


def _header(path: Path) -> _Header:
    data = _read_file(path, 0, 4096)
    magic, _, name_at, name_length, bits, size, _, l1_size, l1_offset, refcount_table, _ = struct.unpack_from(
        ">4sIQIIQIIQQI", data
    )
    assert (magic, bits) == (b"QFI\xfb", 16)
    return _Header(data[name_at : name_at + name_length].decode() or None, size, l1_size, l1_offset, refcount_table)


def _entry(path: Path, offset: int) -> int:
    return int.from_bytes(_read_file(path, offset, 8), "big")


def _read_cluster(path: Path, number: int) -> bytes:
    if path.suffix != ".qcow2":
        return _read_file(path, number * CLUSTER, CLUSTER)
    header = _header(path)
    if number * CLUSTER >= header.size:
        return bytes(CLUSTER)
    l2 = _entry(path, header.l1_offset + number // 8192 * 8) & 0x00FFFFFFFFFFFE00
    entry = _entry(path, l2 + number % 8192 * 8) if l2 else 0
    if entry & 1:
        return bytes(CLUSTER)
    if entry & 0x00FFFFFFFFFFFE00:
        return _read_file(path, entry & 0x00FFFFFFFFFFFE00, CLUSTER)
    return _read_cluster(path.parent / header.backing, number) if header.backing else bytes(CLUSTER)


def _write_cluster(path: Path, number: int, data: bytes) -> None:
    header = _header(path)
    assert number * CLUSTER < header.size
    with path.open("r+b", buffering=0) as file:

        def put(offset: int, content: bytes) -> None:
            file.seek(offset)
            file.write(content)

        def allocate() -> int:
            at = -(-os.fstat(file.fileno()).st_size // CLUSTER) * CLUSTER
            file.truncate(at + CLUSTER)
            block = _entry(path, header.refcount_table)
            put(block + at // CLUSTER * 2, b"\0\1")
            return at

        l1_entry = header.l1_offset + number // 8192 * 8
        l2 = _entry(path, l1_entry) & 0x00FFFFFFFFFFFE00
        if not l2:
            l2 = allocate()
            put(l1_entry, (l2 | 1 << 63).to_bytes(8, "big"))
        at = _entry(path, l2 + number % 8192 * 8) & 0x00FFFFFFFFFFFE00
        if not at:
            at = allocate()
        put(at, data)
        put(l2 + number % 8192 * 8, (at | 1 << 63).to_bytes(8, "big"))


def write_zero_cluster(path: Path, number: int) -> None:
    """What a guest's discard does: the cluster reads as zeros, whatever lies below."""
    _write_cluster(path, number, bytes(CLUSTER))
    header = _header(path)
    l2 = _entry(path, header.l1_offset + number // 8192 * 8) & 0x00FFFFFFFFFFFE00
    with path.open("r+b", buffering=0) as file:
        file.seek(l2 + number % 8192 * 8)
        entry = _entry(path, l2 + number % 8192 * 8)
        file.write((entry | 1).to_bytes(8, "big"))
