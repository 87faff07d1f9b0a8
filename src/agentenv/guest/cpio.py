"""A cpio archive in the kernel's ``newc`` form, the same bytes for the same input.

The kernel's parser needs neither links nor times, so all inode numbers are
sequential, every file is owned by root and every time is zero.
"""

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Final

from agentenv.model.errors import Invalid

_MAX_FILE_BYTES: Final = 0xFFFF_FFFF
_TRAILER: Final = "TRAILER!!!"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the archive: ``path`` is relative, ``mode`` includes the file type."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)  # major and minor, of a device node


def directory(path: str, permissions: int = 0o755) -> Entry:
    return Entry(path, stat.S_IFDIR | permissions)


def file(path: str, data: bytes, permissions: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | permissions, data)


def character_device(path: str, major: int, minor: int, permissions: int = 0o600) -> Entry:
    return Entry(path, stat.S_IFCHR | permissions, device=(major, minor))


def write(entries: Iterable[Entry], out: BinaryIO) -> None:
    """Write *entries* in the order given; a directory comes before what is in it.

    Raises `Invalid` for a path that is absolute, empty, repeated or has an unsafe part,
    and for a file that the format cannot hold.
    """
    seen: set[str] = set()
    for inode, entry in enumerate(entries, start=1):
        if entry.path in seen or not _is_plain(entry.path):
            raise Invalid(f"cannot put {entry.path!r} into an initramfs: repeated, absolute or unsafe")
        if len(entry.data) > _MAX_FILE_BYTES:
            raise Invalid(f"{entry.path} has {len(entry.data)} bytes, more than a newc archive can hold")
        seen.add(entry.path)
        _record(out, inode, entry)
    _record(out, 0, Entry(_TRAILER, 0))


def _is_plain(path: str) -> bool:
    return "\0" not in path and path != _TRAILER and all(part not in ("", ".", "..") for part in path.split("/"))


def _record(out: BinaryIO, inode: int, entry: Entry) -> None:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    out.write(header + name + _padding(len(header) + len(name)))
    out.write(entry.data)
    out.write(_padding(len(entry.data)))


def _padding(length: int) -> bytes:
    return b"\0" * (-length % 4)
