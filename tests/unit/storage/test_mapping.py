"""Where an image lies in a process, from the text of maps files."""

from pathlib import Path

import pytest

from agentenv.model.errors import Bug, Unavailable
from agentenv.storage.mapping import Area, find_areas, parse_maps

IMAGE = Path("/data/a b.memory")


def maps(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def file_line(start: int, end: int, offset: int, flags: str = "rw-p", name: str = str(IMAGE)) -> str:
    return f"{start:x}-{end:x} {flags} {offset:08x} fe:00 1234                       {name}"


def anonymous(start: int, end: int, name: str = "") -> str:
    return f"{start:x}-{end:x} rw-p 00000000 00:00 0 {name}"


def find(*lines: str, size: int = 0x10000) -> tuple[Area, ...]:
    return find_areas(parse_maps(maps(*lines)), IMAGE, size)


def test_one_mapping_is_one_area() -> None:
    found = find(
        anonymous(0x1000, 0x2000, "[heap]"),
        file_line(0x70000, 0x80000, 0),
        anonymous(0x80000, 0x90000),
        "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]",
    )
    assert found == (Area(0x70000, 0x80000, 0, zeroed=False),)


def test_a_mapping_in_pieces_is_put_together() -> None:
    # As for a guest whose memory has a hole in its addresses: the upper part lies lower in the process.
    found = find(file_line(0x30000, 0x34000, 0xC000), file_line(0x70000, 0x7C000, 0))
    assert found == (Area(0x70000, 0x7C000, 0, zeroed=False), Area(0x30000, 0x34000, 0xC000, zeroed=False))


def test_a_mapping_longer_than_the_memory_is_cut() -> None:
    assert find(file_line(0x70000, 0x90000, 0)) == (Area(0x70000, 0x80000, 0, zeroed=False),)


@pytest.mark.parametrize(
    ("low", "high"), [(0x70000, 0x71000), (0x73000, 0x76000), (0x7F000, 0x80000)], ids=["start", "middle", "end"]
)
@pytest.mark.parametrize("name", ["", "[anon:guest]"])
def test_anonymous_memory_over_the_image_is_zeroed(low: int, high: int, name: str) -> None:
    lines = []
    if low > 0x70000:
        lines.append(file_line(0x70000, low, 0))
    lines.append(anonymous(low, high, name))
    if high < 0x80000:
        lines.append(file_line(high, 0x80000, high - 0x70000))
    found = find(*lines)
    assert Area(low, high, low - 0x70000, zeroed=True) in found
    assert sum(area.length for area in found) == 0x10000
    assert [area.offset for area in found] == sorted(area.offset for area in found)


def test_anonymous_memory_that_merged_with_its_neighbour_is_cut() -> None:
    found = find(file_line(0x70000, 0x7C000, 0), anonymous(0x7C000, 0xA0000))
    assert found[1] == Area(0x7C000, 0x80000, 0xC000, zeroed=True)


def test_a_gap_between_two_pieces_may_belong_to_both() -> None:
    found = find(
        anonymous(0x2E000, 0x30000),
        file_line(0x30000, 0x34000, 0xC000),
        file_line(0x70000, 0x78000, 0),
        anonymous(0x78000, 0x7A000),
    )
    assert [(area.start, area.offset, area.zeroed) for area in found] == [
        (0x70000, 0, False),
        (0x78000, 0x8000, True),
        (0x2E000, 0xA000, True),
        (0x30000, 0xC000, False),
    ]


def test_thousands_of_holes_are_put_in_order() -> None:
    count = 30_000  # next to what a process may have; a pass over all for each would take minutes
    lines = []
    for number in range(0, 2 * count, 2):
        start = 0x7000_0000 + number * 0x1000
        lines += [file_line(start, start + 0x1000, number * 0x1000), anonymous(start + 0x1000, start + 0x2000)]
    found = find(*lines, size=2 * count * 0x1000)
    assert len(found) == 2 * count
    assert [area.zeroed for area in found] == [False, True] * count


def test_a_deleted_file_is_found() -> None:
    assert find(file_line(0x70000, 0x80000, 0, name=f"{IMAGE} (deleted)"))


def test_a_name_with_a_new_line_is_found() -> None:
    text = maps(file_line(0x70000, 0x80000, 0, name="/data/a\\012b"))
    assert find_areas(parse_maps(text), Path("/data/a\nb"), 0x10000)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (anonymous(0x70000, 0x80000),),
        (file_line(0x70000, 0x80000, 0, name="/data/a b.memory2"),),
        (file_line(0x70000, 0x7F000, 0),),
        (file_line(0x70000, 0x78000, 0), file_line(0x79000, 0x80000, 0x9000)),
        (file_line(0x71000, 0x80000, 0x1000),),
        (file_line(0x70000, 0x7F000, 0), "7f000-80000 r--p 00000000 fe:00 99 /lib/other"),
    ],
)
def test_a_memory_that_is_not_mapped_in_full_is_unavailable(lines: tuple[str, ...]) -> None:
    with pytest.raises(Unavailable):
        find(*lines)


def test_a_shared_mapping_is_a_bug() -> None:
    with pytest.raises(Bug, match="shared"):
        find(file_line(0x70000, 0x80000, 0, flags="rw-s"))


def test_two_mappings_are_a_bug() -> None:
    with pytest.raises(Bug, match="twice"):
        find(file_line(0x70000, 0x80000, 0), file_line(0x90000, 0xA0000, 0))


@pytest.mark.parametrize("line", ["nonsense", "70000-80000 rw-p", "70000 rw-p 0 00:00 0"])
def test_nonsense_is_a_bug(line: str) -> None:
    with pytest.raises(Bug):
        parse_maps(line)
