"""Files of changed pages: what goes in comes out, and damage never goes unnoticed."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.model.errors import Bug
from agentenv.storage.pages import (
    BLOCK_BYTES,
    BLOCK_PAGES,
    Delta,
    DeltaWriter,
    Range,
    batches,
    read_delta,
    read_pages,
    read_summary,
)

PAGE = 4096
MEMORY_PAGES = 4096
BASE = "0" * 32 + ".memory"


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("pages")
    yield fd
    os.close(fd)


def content_of(page: int) -> bytes:
    return page.to_bytes(4, "little") * (PAGE // 4)


def write(fd: int, data: list[Range], zeros: list[Range], *, step: int = BLOCK_PAGES) -> None:
    writer = DeltaWriter(fd, BASE, MEMORY_PAGES * PAGE)
    for group in batches(data, step):
        segments = [memoryview(content_of(page)) for start, end in group for page in range(start, end)]
        writer.add_data(group, segments)
    writer.add_zeros(zeros)
    written = writer.finish()
    assert written.is_change == bool(data or zeros)
    assert written.data_bytes == sum(end - start for start, end in data) * PAGE


def read(fd: int, *, shares: int = 1) -> tuple[Delta, dict[int, bytes]]:
    delta = read_delta(fd)
    view = memoryview(bytearray(BLOCK_BYTES))
    found: dict[int, bytes] = {}
    for share in range(shares):
        for pages in read_pages(fd, delta, view, lambda: None, first=share, step=shares):
            at = 0
            for start, end in pages:
                for page in range(start, end):
                    assert page not in found
                    found[page] = bytes(view[at : at + PAGE])
                    at += PAGE
    return delta, found


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[Range], list[Range]]:
    edges = sorted(draw(st.sets(st.integers(0, MEMORY_PAGES), max_size=24)))
    data, zeros = [], []
    for start, end in pairwise(edges):
        match draw(st.sampled_from("dz-")):
            case "d":
                data.append((start, end))
            case "z":
                zeros.append((start, end))
    return data, zeros


@settings(deadline=None, max_examples=40)
@given(partitions(), st.integers(1, 600), st.integers(1, 4))
def test_what_goes_in_comes_out(ranges: tuple[list[Range], list[Range]], step: int, shares: int) -> None:
    data, zeros = ranges
    fd = os.memfd_create("pages")
    try:
        write(fd, data, zeros, step=step)
        delta, found = read(fd, shares=shares)
    finally:
        os.close(fd)
    assert found == {page: content_of(page) for start, end in data for page in range(start, end)}
    assert {page for start, end in delta.zeros for page in range(start, end)} == {
        page for start, end in zeros for page in range(start, end)
    }
    assert (delta.base, delta.memory_bytes) == (BASE, MEMORY_PAGES * PAGE)


def test_neighbours_become_one_range(file: int) -> None:
    write(file, [(1, 2), (2, 5), (7, 8)], [(10, 11), (9, 10), (11, 12)])
    delta, _ = read(file)
    assert delta.data == ((1, 5), (7, 8))
    assert delta.zeros == ((9, 12),)


def test_the_summary_needs_the_header_only(file: int) -> None:
    write(file, [(1, 4)], [(9, 10)])
    os.ftruncate(file, PAGE)
    summary = read_summary(file)
    assert (summary.base, summary.memory_bytes, summary.data_bytes) == (BASE, MEMORY_PAGES * PAGE, 3 * PAGE)


@settings(deadline=None)
@given(
    st.one_of(st.integers(0, 200), st.integers(PAGE, 5 * PAGE), st.integers(5 * PAGE, 5 * PAGE + 51)),
    st.integers(1, 255),
)
def test_a_damaged_file_is_a_bug_and_never_other_pages(at: int, change: int) -> None:
    fd = os.memfd_create("pages")
    try:
        write(fd, [(3, 5), (400, 402)], [(7, 9)])
        sound = os.pread(fd, 1 << 20, 0)
        assert len(sound) == 5 * PAGE + 52
        damaged = bytearray(sound)
        damaged[at] ^= change
        os.pwrite(fd, damaged, 0)
        try:
            _, found = read(fd)
        except Bug:
            return
        assert 120 <= at < PAGE, "only the padding of the header is not covered"
        assert found == {page: content_of(page) for page in (3, 4, 400, 401)}
    finally:
        os.close(fd)


@pytest.mark.parametrize("length", [0, 10, 4095, 4096, 4096 + PAGE, -1, -8])
def test_a_cut_file_is_a_bug(file: int, length: int) -> None:
    write(file, [(3, 5)], [(7, 9)])
    size = os.fstat(file).st_size
    os.ftruncate(file, length if length >= 0 else size + length)
    with pytest.raises(Bug):
        read(file)


def test_a_longer_file_is_a_bug(file: int) -> None:
    write(file, [(3, 5)], [])
    os.ftruncate(file, os.fstat(file).st_size + 1)
    with pytest.raises(Bug):
        read(file)


def test_a_file_that_shrinks_while_it_is_read_is_a_bug(file: int) -> None:
    write(file, [(0, 2 * BLOCK_PAGES)], [])
    delta = read_delta(file)
    os.ftruncate(file, PAGE + BLOCK_BYTES + 10)
    with pytest.raises(Bug, match="cut short"):
        list(read_pages(file, delta, memoryview(bytearray(BLOCK_BYTES)), lambda: None))


@pytest.mark.parametrize(
    ("data", "zeros"),
    [
        ([(5, 7), (3, 4)], []),
        ([(3, 6), (5, 7)], []),
        ([(3, 6)], [(5, 8)]),
        ([(MEMORY_PAGES - 1, MEMORY_PAGES + 1)], []),
    ],
)
def test_an_index_that_contradicts_itself_is_a_bug(file: int, data: list[Range], zeros: list[Range]) -> None:
    write(file, data, zeros)
    with pytest.raises(Bug, match="contradicts"):
        read_delta(file)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30))), st.integers(1, 20))
def test_batches_keep_order_and_fill_up(lengths: list[tuple[int, int]], capacity: int) -> None:
    ranges, at = [], 0
    for gap, length in lengths:
        at += gap
        ranges.append((at, at + length))
        at += length
    groups = list(batches(ranges, capacity))
    flat = [unit for group in groups for start, end in group for unit in range(start, end)]
    assert flat == [unit for start, end in ranges for unit in range(start, end)]
    sizes = [sum(end - start for start, end in group) for group in groups]
    assert all(size == capacity for size in sizes[:-1])
    assert all(0 < size <= capacity for size in sizes)
