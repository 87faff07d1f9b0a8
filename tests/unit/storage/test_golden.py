"""Files of format 1 as they lie in stores (`spec/records`): later releases read them, this one writes them."""

import os
from collections.abc import Iterator

import pytest

from agentenv.model.ids import LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.pages import BLOCK_BYTES, Delta, DeltaWriter, read_delta, read_pages
from agentenv.storage.records import DiskRecord, OwnerRecord, decode, encode
from tests.capabilities import REPO

RECORDS = REPO / "spec/records"
PAGE_BYTES = 4096
BASE = "0" * 32 + ".memory"
MEMORY_BYTES = 1024 * PAGE_BYTES
OWNER = OwnerRecord(
    owner="11111111-1111-4111-8111-111111111111",
    disk=DiskRecord(4 << 30, LayerId("0" * 31 + "1.qcow2"), LayerId("0" * 31 + "2.qcow2")),
    memory=Stack((LayerId("0" * 31 + "3.memory"), LayerId("0" * 31 + "4.delta")), 512 << 20),
)


def content_of(page: int) -> bytes:
    return page.to_bytes(4, "little") * (PAGE_BYTES // 4)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.open(RECORDS / "delta-1.pages", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_changed_pages_are_read_as_specified(fd: int) -> None:
    delta = read_delta(fd)

    assert (delta.base, delta.memory_bytes) == (BASE, MEMORY_BYTES)
    assert delta.data == ((3, 4), (10, 12))
    assert delta.zeros == ((0, 1), (1000, 1024))
    assert content(fd, delta) == content_of(3) + content_of(10) + content_of(11)


def content(fd: int, delta: Delta) -> bytes:
    view = memoryview(bytearray(BLOCK_BYTES))
    blocks = read_pages(fd, delta, view, lambda: None)
    return b"".join(bytes(view[: sum(end - start for start, end in pages) * PAGE_BYTES]) for pages in blocks)


def test_changed_pages_are_written_byte_for_byte_as_specified() -> None:
    fd = os.memfd_create("pages")
    try:
        writer = DeltaWriter(fd, BASE, MEMORY_BYTES)
        writer.add_data([(3, 4)], [memoryview(content_of(3))])
        writer.add_data([(10, 12)], [memoryview(content_of(10)), memoryview(content_of(11))])
        writer.add_zeros([(1000, 1024)])
        writer.add_zeros([(0, 1)])
        writer.finish()
        written = os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)

    assert written == (RECORDS / "delta-1.pages").read_bytes()


def test_what_an_owner_has_is_read_and_written_as_specified() -> None:
    text = (RECORDS / "owner-1.json").read_text()

    assert decode(text) == OWNER
    assert encode(OWNER) == text
