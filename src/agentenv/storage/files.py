"""Files that are either there in full or not at all, also after a power failure.

A new file is written under a temporary name, made durable, and only then given the
name under which it counts; the directory is made durable after that. All calls
block: they are for worker threads.
"""

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

SEALED_MODE: Final = 0o444
UPPER_MODE: Final = 0o600
COPY_STEP_BYTES: Final = 16 << 20
"""How much is copied between two looks at whether the copy is still wanted."""

MOST_PARTS: Final = 1024
"""What the kernel takes in one write (IOV_MAX)."""

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_SYNC_FILE_RANGE_WRITE: Final = 2
_NOT_THERE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_NO_RANGE_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})

_log = structlog.get_logger(__name__)

Check = Callable[[], None]
"""Called between steps of long work; raises when the work is no longer wanted."""


def sync_directory(path: Path) -> None:
    """Make the names in *path* durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def open_sealed(path: Path) -> Iterator[int]:
    """Give a descriptor of *path*, open for reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Give a descriptor of the new file *path*, open for reading and writing; removed again if the block raises."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, UPPER_MODE)
    try:
        yield fd
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def publish(temporary: Path, target: Path) -> None:
    """Give the durable file *temporary* its final name, read-only, in place of whatever had that name."""
    temporary.chmod(SEALED_MODE)
    temporary.rename(target)
    sync_directory(target.parent)


def replace_text(target: Path, text: str, temporary: Path, *, sync: bool) -> None:
    """Make *text* the content of *target*, all or nothing.

    With *sync*, a power failure leaves the old content or the new one, and never less;
    which of them is certain once the directory has been synced.
    """
    with new_file(temporary) as fd:
        write_all(fd, [text.encode()], 0)
        if sync:
            os.fsync(fd)
        temporary.rename(target)


def take(source: Path, target: Path, temporary: Path, check: Check, *, size_bytes: int | None = None) -> None:
    """Make the file *source* the sealed, durable file *target*: moved, or copied where that is another file system.

    With *size_bytes* it grows to that by a hole. Whatever fails, *source* is still
    there, and *target* is not.
    """
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if source.stat().st_dev == target.parent.stat().st_dev and _move(source, reading, target, size_bytes):
            return
        with new_file(temporary) as writing:
            os.ftruncate(writing, size_bytes if size_bytes is not None else os.fstat(reading).st_size)
            for start, end in data_extents(reading):
                copy_range(reading, writing, start, start, end - start, check)
            os.fsync(writing)
            publish(temporary, target)
    finally:
        os.close(reading)
    try:
        source.unlink()
    except OSError as error:
        _log.warning("%s was copied, and cannot be removed: %s", source, error)


def _move(source: Path, reading: int, target: Path, size_bytes: int | None) -> bool:
    """Rename; tell whether that could be done."""
    mode = stat.S_IMODE(os.fstat(reading).st_mode)
    if size_bytes is not None:
        os.truncate(source, size_bytes)
    os.fsync(reading)
    os.fchmod(reading, SEALED_MODE)
    try:
        source.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        with suppress(OSError):
            target.rename(source)
        os.fchmod(reading, mode)
        if error.errno == errno.EXDEV:  # one file system mounted twice
            return False
        raise
    return True


def data_extents(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of *fd* that are not holes, as (start, end), lowest first."""
    size = os.fstat(fd).st_size
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


def copy_range(source: int, target: int, source_offset: int, target_offset: int, length: int, check: Check) -> None:
    """Copy *length* bytes between descriptors, inside the kernel where it can.

    Raises `EOFError` if *source* ends before that.
    """
    in_kernel = True
    while length:
        check()
        step = min(length, COPY_STEP_BYTES)
        if in_kernel:
            try:
                step = os.copy_file_range(source, target, step, source_offset, target_offset)
            except OSError as error:
                if error.errno not in _NO_RANGE_COPY:
                    raise
                in_kernel = False
                continue
        else:
            data = os.pread(source, min(step, 1 << 20), source_offset)
            write_all(target, [data], target_offset)
            step = len(data)
        if step == 0:
            raise EOFError(f"ends {length} bytes early")
        length -= step
        source_offset += step
        target_offset += step


def write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
    """Write *parts* one after the other from *offset* on, however often the kernel stops short; return the length."""
    start = offset
    left = list(parts)
    while left:
        batch = left[:MOST_PARTS]
        written = os.pwritev(fd, batch, offset)
        offset += written
        rest: list[bytes | memoryview] = []
        for part in batch:
            skipped = min(written, len(part))
            written -= skipped
            if skipped < len(part):
                rest.append(memoryview(part)[skipped:])
        left[: len(batch)] = rest
    return offset - start


def reserve(fd: int, length: int) -> None:
    """Make sure that *fd* can grow to *length* bytes, where the file system knows how; the size stays."""
    _fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, length)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk begin with these bytes, so that a later sync waits less. Errors show up in that sync."""
    _libc.sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def write_zeros(fd: int, offset: int, length: int) -> None:
    """Make *length* bytes at *offset* read as zero, as a hole where the file system can."""
    if _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length):
        return
    zeros = bytes(min(length, 1 << 20))
    for at in range(offset, offset + length, len(zeros)):
        write_all(fd, [memoryview(zeros)[: offset + length - at]], at)


def remove_files(paths: Iterable[Path]) -> int:
    """Remove *paths* as far as they are there; return the bytes that they took up.

    One that cannot be removed is reported and left: it is found again at the next start.
    """
    freed = 0
    for path in paths:
        try:
            taken = path.stat(follow_symlinks=False).st_blocks * 512
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.error("%s cannot be removed: %s", path, error)
        else:
            freed += taken
    return freed


def empty_directory(path: Path) -> int:
    """Remove everything in *path*; return how many entries there were."""
    entries = list(path.iterdir())
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return len(entries)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    if _libc.fallocate(fd, mode, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_THERE:
        return False
    raise OSError(number, os.strerror(number))


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate.restype = ctypes.c_int
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    libc.sync_file_range.restype = ctypes.c_int
    return libc


_libc: Final = _load_libc()
