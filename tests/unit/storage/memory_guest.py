"""Processes that hold memory the way a VMM does: a private mapping of an image, written page by page."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

PAGE = 4096

_PROGRAM = """
import ctypes, mmap, os, sys
def say(text): os.write(1, (text + "\\n").encode())
def need(n):
    data = bytearray()
    while len(data) < n: data += os.read(0, n - len(data)) or os._exit(0)
    return bytes(data)
def line():
    data = b""
    while not data.endswith(b"\\n"): data += os.read(0, 1) or os._exit(0)
    return data.decode().rstrip("\\n")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
path, flags, pieces = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")]
fd = os.open(path, os.O_RDONLY if flags & 2 else os.O_RDWR)
size = os.fstat(fd).st_size
starts, offset = [], 0
for length in pieces or [size]:
    length = length or size - offset
    # A page of nothing after each piece, so that two are never one mapping.
    room = libc.mmap(None, length + 4096, 0, 0x22, -1, 0)
    at = libc.mmap(room, length, 3, flags | 0x10, fd, offset)
    assert at == room, ctypes.get_errno()
    starts.append((offset, at, length))
    offset += length
def address(offset):
    return next(at + offset - first for first, at, length in starts if first <= offset < first + length)
def parts(offset, length):
    while length:
        step = next(min(length, first + size - offset) for first, at, size in starts if first <= offset < first + size)
        yield address(offset), step
        offset, length = offset + step, length - step
say("ready")
while True:
    verb, *numbers = line().split()
    numbers = [int(n) for n in numbers]
    if verb == "read":
        say("ok")
        for at, length in parts(*numbers):
            data = ctypes.string_at(at, length)
            while data: data = data[os.write(1, data):]
    elif verb == "write":
        data = need(numbers[1])
        for at, length in parts(*numbers):
            ctypes.memmove(at, data[:length], length)
            data = data[length:]
        say("ok")
    elif verb == "touch":
        for i in range(numbers[0], numbers[1], 4096): ctypes.string_at(address(i), 1)
        say("ok")
    elif verb == "spread":
        start, count, step, seed = numbers
        for i in range(count):
            ctypes.memmove(address(start + i * step * 4096), bytes([(seed + i) % 255 + 1]) * 4096, 4096)
        say("ok")
    elif verb == "drop":
        at = libc.mmap(address(numbers[0]), numbers[1], 3, 0x32, -1, 0)
        say("ok" if at == address(numbers[0]) else "failed")
    elif verb == "advise":
        say("ok" if libc.madvise(address(numbers[0]), numbers[1], numbers[2]) == 0 else "failed")
"""

MAP_SHARED, MAP_PRIVATE = 1, 2


class MemoryGuest:
    """A child that maps *path* and does what it is told.

    Args:
        path: the image.
        pieces: lengths in bytes of the mappings to make of it; 0 is what is left.
    """

    def __init__(self, path: Path, *, pieces: tuple[int, ...] = (0,), flags: int = MAP_PRIVATE) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _PROGRAM, str(path), str(flags), ",".join(map(str, pieces))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._child.pid
        assert self._line() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def read(self, offset: int, length: int) -> bytes:
        self._say(f"read {offset} {length}")
        assert self._child.stdout is not None
        data = bytearray()
        while len(data) < length:
            got = self._child.stdout.read(min(length - len(data), 1 << 20))
            assert got, "the child died"
            data += got
        return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        assert self._child.stdin is not None
        left = memoryview(f"write {offset} {len(data)}\n".encode() + data)
        while left:
            left = left[self._child.stdin.write(left) :]
        assert self._line() == "ok"

    def touch(self, start: int, end: int) -> None:
        """Read from every page, so that it is there without being changed."""
        self._say(f"touch {start} {end}")

    def spread(self, start: int, count: int, step: int, seed: int) -> None:
        """Write *count* pages, each *step* pages after the one before."""
        self._say(f"spread {start} {count} {step} {seed}")

    def drop(self, offset: int, length: int) -> None:
        """Put anonymous memory over the image, as a balloon does."""
        self._say(f"drop {offset} {length}")

    def advise(self, offset: int, length: int, advice: int) -> None:
        self._say(f"advise {offset} {length} {advice}")

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()

    def _say(self, text: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{text}\n".encode())
        assert self._line() == "ok"

    def _line(self) -> str:
        assert self._child.stdout is not None
        data = b""
        while not data.endswith(b"\n"):
            got = self._child.stdout.read(1)
            assert got, "the child died"
            data += got
        return data.decode().rstrip()
