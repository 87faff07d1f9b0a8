"""The two ways to find changed pages give one answer, and it is right."""

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agentenv.storage import scan
from agentenv.storage.mapping import Area
from agentenv.storage.scan import private_ranges, read_ranges, scanned_ranges
from agentenv.storage.transfer import Process
from tests.unit.storage.memory_guest import PAGE, MemoryGuest

MIB = 1 << 20
MADV_HUGEPAGE, MADV_PAGEOUT = 14, 21


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(b"\x55" * 4 * MIB)
    os.truncate(path, 16 * MIB)
    return path


def pages_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [page for start, end in ranges for page in range(start, end, PAGE)]


def both(guest: MemoryGuest, image: Path) -> list[int]:
    """Changed pages as byte offsets in the image, which both ways must agree on."""
    found: list[int] = []
    with Process(guest.pid) as process:
        for area in process.areas(image, image.stat().st_size):
            answers = [ask(guest.pid, area) for ask in (_by_ioctl, _by_table, _by_default)]
            assert answers[0] == answers[1] == answers[2]
            found += (page - area.start + area.offset for page in answers[0])
    return found


def _by_ioctl(pid: int, area: Area) -> list[int]:
    return _ask(pid, lambda pagemap: scanned_ranges(pagemap, area.start, area.end))


def _by_table(pid: int, area: Area) -> list[int]:
    return _ask(pid, lambda pagemap: read_ranges(pagemap, area.start, area.end))


def _by_default(pid: int, area: Area) -> list[int]:
    return _ask(pid, lambda pagemap: private_ranges(pagemap, area.start, area.end))


def _ask(pid: int, ask: Callable[[int], Iterable[tuple[int, int]]]) -> list[int]:
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        return pages_of(ask(pagemap))
    finally:
        os.close(pagemap)


@pytest.mark.needs("pagemap-scan")
def test_pages_that_were_only_read_are_not_changed(image: Path) -> None:
    with MemoryGuest(image) as guest:
        guest.touch(0, 16 * MIB)
        assert both(guest, image) == []
        guest.write(7 * PAGE + 100, b"x")
        assert both(guest, image) == [7 * PAGE]


@pytest.mark.needs("pagemap-scan")
@pytest.mark.parametrize("seed", range(6))
def test_both_ways_agree_on_any_pattern(image: Path, seed: int) -> None:
    rng = random.Random(seed)
    written: set[int] = set()
    with MemoryGuest(image) as guest:
        for _ in range(40):
            start, count = rng.randrange(4000), rng.randrange(1, 30)
            end = min(start + count, 4096)
            guest.write(start * PAGE, b"w" * ((end - start) * PAGE))
            written.update(range(start, end))
        assert both(guest, image) == [page * PAGE for page in sorted(written)]


@pytest.mark.needs("pagemap-scan")
def test_more_ranges_than_the_kernel_takes_in_one_round(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryGuest(image) as guest:
        guest.spread(0, 2000, 2, 1)
        expected = [2 * page * PAGE for page in range(2000)]
        assert both(guest, image) == expected
        for count in (1, 7, 512, 513, 1999, 2000, 2001):
            monkeypatch.setattr(scan, "_REGIONS_PER_CALL", count)
            assert both(guest, image) == expected


@pytest.mark.needs("pagemap-scan")
def test_anonymous_memory_over_the_image_is_scanned_too(image: Path) -> None:
    with MemoryGuest(image) as guest:
        guest.write(MIB, b"gone" * 4096)
        guest.drop(MIB, 2 * MIB)
        guest.write(2 * MIB, b"x")
        guest.touch(MIB, MIB + 4 * PAGE)
        changed = both(guest, image)
        assert 2 * MIB in changed
        # What was only read there is the kernel's own zero page; either answer is right.
        assert set(changed) <= {2 * MIB, *range(MIB, MIB + 4 * PAGE, PAGE)}


@pytest.mark.needs("pagemap-scan")
def test_huge_pages_are_all_their_small_ones(image: Path) -> None:
    with MemoryGuest(image) as guest:
        guest.drop(0, 15 * MIB)
        guest.advise(0, 15 * MIB, MADV_HUGEPAGE)
        guest.write(5 * MIB, b"x")
        changed = both(guest, image)
        assert 5 * MIB in changed
        assert len(changed) in (1, 512), "neither one small page nor one huge one"


@pytest.mark.needs("pagemap-scan")
def test_pages_that_were_swapped_out_are_changed(image: Path) -> None:
    with MemoryGuest(image) as guest:
        guest.spread(0, 64, 3, 1)
        guest.advise(0, 16 * MIB, MADV_PAGEOUT)  # without swap space they just stay
        assert both(guest, image) == [3 * page * PAGE for page in range(64)]


def test_a_table_of_several_reads_is_one_answer(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PAGES_PER_READ", 5)
    with MemoryGuest(image) as guest, Process(guest.pid) as process:
        guest.write(3 * PAGE, b"w" * 4 * PAGE)
        (area,) = process.areas(image, 16 * MIB)
        assert _by_table(guest.pid, area) == [area.start + page * PAGE for page in range(3, 7)]


def test_a_kernel_without_the_ioctl_is_read_by_table(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PAGEMAP_SCAN", 0xC060_66FF)
    with MemoryGuest(image) as guest, Process(guest.pid) as process:
        guest.write(3 * PAGE, b"w")
        (area,) = process.areas(image, 16 * MIB)
        assert process.private_ranges(area) == [(area.start + 3 * PAGE, area.start + 4 * PAGE)]
