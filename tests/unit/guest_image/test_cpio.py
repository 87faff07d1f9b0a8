"""The initramfs archive, read back by Debian's cpio and by hand."""

import io
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.guest import cpio
from agentenv.model.errors import Invalid


def archive(*entries: cpio.Entry) -> bytes:
    out = io.BytesIO()
    cpio.write(entries, out)
    return out.getvalue()


def read_back(data: bytes) -> list[tuple[str, int, bytes]]:
    """A second reading of the format, from its description and not from our writer."""
    found: list[tuple[str, int, bytes]] = []
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        body = (at + 110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        found.append((name, mode, data[body : body + size]))
        at = (body + size + 3) // 4 * 4


@given(st.lists(st.binary(max_size=70), max_size=6))
def test_every_file_is_read_back_as_it_was(contents: list[bytes]) -> None:
    entries = [cpio.file(f"file-{'x' * place}", data) for place, data in enumerate(contents)]

    assert [data for _, _, data in read_back(archive(*entries))] == contents


@pytest.mark.needs("cpio", "root")
def test_debian_reads_what_we_write() -> None:
    data = archive(
        cpio.directory("dev"),
        cpio.character_device("dev/console", 5, 1),
        cpio.file("init", b"#!", 0o755),
        cpio.file("a/b", b"x"),
    )

    listed = subprocess.run(["cpio", "-itvn"], input=data, capture_output=True, check=True).stdout.decode()

    lines = [line.split() for line in listed.splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [
        ("drwxr-xr-x", "dev"), ("crw-------", "dev/console"), ("-rwxr-xr-x", "init"), ("-rw-r--r--", "a/b"),
    ]  # fmt: skip
    assert lines[1][4:6] == ["5,", "1"]


@pytest.mark.parametrize("path", ["", "/init", "a//b", "../x", "a/./b", "a/..", "x\0y", "TRAILER!!!"])
def test_an_unsafe_name_is_refused(path: str) -> None:
    with pytest.raises(Invalid):
        archive(cpio.file(path, b""))


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(Invalid):
        archive(cpio.file("init", b"a"), cpio.file("init", b"b"))
