"""Several sealed qcow2 layers as one: for each cluster the topmost layer that has it wins.

What is merged lies directly on top of each other and has one size. The new file names
the same content below, so it can stand for the whole run in any stack made from now
on. Blocks; for a background thread.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fstat
from typing import Final

from agentenv.model.errors import Bug, Unsupported
from agentenv.storage.files import Check, copy_range, write_all
from agentenv.storage.qcow2 import (
    CLUSTER_BYTES,
    COMPRESSED,
    COPIED,
    ENTRIES_PER_TABLE,
    OFFSET_MASK,
    ZERO,
    Backing,
    encode_table,
    l1_entries,
    plan_layout,
    read_header,
    read_table,
    write_frame,
)

_ABSENT: Final = -1
_ZERO: Final = -2


@dataclass(frozen=True, slots=True)
class _Run:
    """Clusters that follow each other both in a source and on the disk."""

    source: int  # index among the sources
    offset: int  # in the source, in bytes
    clusters: int


@dataclass(frozen=True, slots=True)
class _Table:
    """One second-level table: for each cluster its source (or absent, or zero) and its offset there."""

    sources: "array[int]"
    offsets: "array[int]"

    def data_clusters(self) -> int:
        return sum(source >= 0 for source in self.sources)


def merge(sources: Sequence[int], target: int, backing: Backing | None, check: Check) -> int:
    """Write to the empty file *target* what the layers *sources* (descriptors, lowest first) add to *backing*.

    Returns the size of the disk in bytes. Raises `Unsupported` if they differ in size or
    hold compressed clusters, `Bug` if one is damaged. The caller makes *target* durable.
    """
    headers = [read_header(fd) for fd in sources]
    size_bytes = headers[-1].size_bytes
    if any(header.size_bytes != size_bytes for header in headers):
        raise Unsupported("layers of different sizes are not merged")
    first_level = [
        read_table(fd, header.l1_offset, header.l1_entries) for fd, header in zip(sources, headers, strict=True)
    ]
    tables: dict[int, _Table] = {}
    for index in range(l1_entries(size_bytes)):
        check()
        if (table := _combine(sources, first_level, index)) is not None:
            tables[index] = table
    data_clusters = sum(table.data_clusters() for table in tables.values())
    layout = plan_layout(size_bytes, len(tables) + data_clusters)
    write_frame(target, size_bytes, backing, layout)
    table_at = layout.body_offset
    data_at = table_at + len(tables) * CLUSTER_BYTES
    l1 = array("Q", bytes(l1_entries(size_bytes) * 8))
    for index, table in tables.items():
        l1[index] = table_at | COPIED
        write_all(target, [encode_table(_entries(table, data_at))], table_at)
        table_at += CLUSTER_BYTES
        for run in _runs(table):
            _copy(sources[run.source], run, target, data_at, check)
            data_at += run.clusters * CLUSTER_BYTES
    write_all(target, [encode_table(l1)], layout.l1_offset)
    return size_bytes


def _combine(sources: Sequence[int], first_level: Sequence["array[int]"], index: int) -> _Table | None:
    """The second-level table at *index*, or None where no source has one."""
    table = None
    for number, (fd, l1) in enumerate(zip(sources, first_level, strict=True)):
        offset = l1[index] & OFFSET_MASK
        if not offset:
            continue
        if table is None:
            table = _Table(array("i", [_ABSENT]) * ENTRIES_PER_TABLE, array("Q", bytes(ENTRIES_PER_TABLE * 8)))
        for position, entry in enumerate(read_table(fd, offset, ENTRIES_PER_TABLE)):
            if not entry:
                continue
            if entry & COMPRESSED:
                raise Unsupported("compressed clusters are not merged")
            if entry & ZERO:
                table.sources[position] = _ZERO
            elif entry & OFFSET_MASK:
                table.sources[position] = number
                table.offsets[position] = entry & OFFSET_MASK
    return table


def _entries(table: _Table, data_at: int) -> "array[int]":
    entries = array("Q", bytes(ENTRIES_PER_TABLE * 8))
    for position, source in enumerate(table.sources):
        if source == _ZERO:
            entries[position] = ZERO
        elif source != _ABSENT:
            entries[position] = data_at | COPIED
            data_at += CLUSTER_BYTES
    return entries


def _runs(table: _Table) -> Iterator[_Run]:
    run = None
    for source, offset in zip(table.sources, table.offsets, strict=True):
        if source < 0:
            continue
        if run is not None and run.source == source and offset == run.offset + run.clusters * CLUSTER_BYTES:
            run = _Run(source, run.offset, run.clusters + 1)
            continue
        if run is not None:
            yield run
        run = _Run(source, offset, 1)
    if run is not None:
        yield run


def _copy(source: int, run: _Run, target: int, target_offset: int, check: Check) -> None:
    # A file may end inside its last cluster; what is missing reads as zeros, as the hole in the target does.
    there = min(run.clusters * CLUSTER_BYTES, fstat(source).st_size - run.offset)
    if there <= (run.clusters - 1) * CLUSTER_BYTES:
        raise Bug("a qcow2 table points behind the end of its file")
    copy_range(source, target, run.offset, target_offset, there, check)
