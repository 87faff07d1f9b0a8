"""Bytes between our memory and that of another process, many pieces in one system call."""

import ctypes
import errno
import os
import select
from array import array
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agentenv.model.errors import AgentEnvError, Unavailable, Unsupported
from agentenv.storage.mapping import Area, find_areas, parse_maps
from agentenv.storage.scan import private_ranges

MOST_PIECES: Final = 1024
"""What the kernel takes in one call (IOV_MAX)."""


_PIDS: Final = 1 << 22  # the kernel's own limit


class Buffer:
    """Page-aligned memory of ours that the kernel may copy to and from."""

    def __init__(self, length: int) -> None:
        self._memory = mmap(-1, length)
        self._anchor = (ctypes.c_char * length).from_buffer(self._memory)
        self.address: Final = ctypes.addressof(self._anchor)
        self.view: Final = memoryview(self._memory)
        self.length: Final = length


class Process:
    """One process by pid, told apart from a later one of the same number while this is open."""

    def __init__(self, pid: int) -> None:
        if not 0 < pid < _PIDS:
            raise Unavailable(f"there is no process {pid}")
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise _failure(error, pid) from error
        try:
            self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._pidfd)
            raise _failure(error, pid) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pagemap)
        os.close(self._pidfd)

    def areas(self, image: Path, size_bytes: int) -> tuple[Area, ...]:
        """See `mapping.find_areas`."""
        try:
            text = Path(f"/proc/{self.pid}/maps").read_bytes()
        except OSError as error:
            raise _failure(error, self.pid) from error
        return find_areas(parse_maps(os.fsdecode(text)), image, size_bytes)

    def private_ranges(self, area: Area) -> list[tuple[int, int]]:
        """See `scan.private_ranges`."""
        try:
            return list(private_ranges(self._pagemap, area.start, area.end))
        except OSError as error:
            raise _failure(error, self.pid) from error

    def read(self, pieces: Sequence[tuple[int, int]], buffer: Buffer) -> int:
        """Copy the address ranges *pieces*, one after the other, to the start of *buffer*; return how many bytes."""
        return self._move(_libc.process_vm_readv, pieces, buffer)

    def write(self, pieces: Sequence[tuple[int, int]], buffer: Buffer) -> int:
        """Copy from the start of *buffer* to the address ranges *pieces*; return how many bytes."""
        return self._move(_libc.process_vm_writev, pieces, buffer)

    def check_alive(self) -> None:
        """Raise `Unavailable` if the process has ended since this was opened."""
        if select.select([self._pidfd], [], [], 0)[0]:
            raise Unavailable(f"process {self.pid} has ended")

    def _move(self, call: "ctypes._NamedFuncPointer", pieces: Sequence[tuple[int, int]], buffer: Buffer) -> int:
        done = 0
        left = list(pieces)
        while left:
            batch = left[:MOST_PIECES]
            remote = array("Q", [word for start, end in batch for word in (start, end - start)])
            wanted = sum(remote[1::2])
            if done + wanted > buffer.length:
                raise ValueError("the pieces are larger than the buffer")
            local = array("Q", [buffer.address + done, wanted])
            moved = call(self.pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(batch), 0)
            if moved <= 0:
                number = ctypes.get_errno() if moved < 0 else errno.EFAULT
                raise _failure(OSError(number, os.strerror(number)), self.pid)
            done += moved
            left[: len(batch)] = _rest(batch, moved)
        return done


def _rest(pieces: Sequence[tuple[int, int]], moved: int) -> list[tuple[int, int]]:
    """What of *pieces* is left when their first *moved* bytes are done: normally nothing."""
    left = []
    for start, end in pieces:
        skipped = min(moved, end - start)
        moved -= skipped
        if start + skipped < end:
            left.append((start + skipped, end))
    return left


def _failure(error: OSError, pid: int) -> AgentEnvError:
    match error.errno:
        case errno.ESRCH | errno.ENOENT:
            return Unavailable(f"there is no process {pid}")
        case errno.EPERM | errno.EACCES:
            return Unsupported(
                f"the memory of process {pid} is closed to us",
                hint="run as root, or with CAP_SYS_PTRACE, as the user that the VMM runs as",
            )
        case _:
            return Unavailable(f"memory of process {pid}: {error.strerror}")


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (libc.process_vm_readv, libc.process_vm_writev):
        call.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
        call.restype = ctypes.c_ssize_t
    return libc


_libc: Final = _load_libc()
