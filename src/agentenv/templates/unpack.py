"""Unpack a root file system from a tar that nobody vouches for.

Run as a process of its own (``python -m agentenv.templates.unpack``), as root: it
locks itself into the target folder with chroot before it looks at a byte of the
archive, so a path or a symbolic link cannot lead outside, and it is killed whole
when the caller gives up. What exists is removed, never opened, before it is
written: an archive may hold a device node and then a file of the same name.

Protocol: the archive on standard input; on standard output lines of JSON, first
progress, at last ``{"done": ...}`` or ``{"error": kind, "message": ...}``. After
``done`` it stays until nobody reads its output any more, since the caller finds the
result under ``/proc/PID/root``; it does not outlive the caller. With ``memory`` that is
a file system in memory, in a mount namespace of its own: it is gone with the process,
however that ends.
"""

import ctypes
import errno
import gzip
import json
import lzma
import os
import resource
import select
import shutil
import signal
import stat
import sys
import tarfile
import zlib
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

from agentenv.aio.failures import FULL
from agentenv.model.errors import AgentEnvError, Invalid, NoSpace, Unsupported
from agentenv.templates.tree import Tree

CHUNK_BYTES: Final = 1 << 20
BLOCK_BYTES: Final = 4096
MAX_PATH_BYTES: Final = 4095  # PATH_MAX less the closing zero
MAX_DEPTH: Final = 512
ADDRESS_SPACE_BYTES: Final = 2 << 30  # an extended header is read whole; one of gigabytes must not take the host down
TRAILING_BYTES: Final = 1 << 20
REPORT_EVERY_BYTES: Final = 32 << 20
REPORT_EVERY_ENTRIES: Final = 1000
KEPT_ATTRIBUTES: Final = ("security.capability", "user.")
_ATTRIBUTE_PREFIX: Final = "SCHILY.xattr."
_END_MARK: Final = bytes(512)
_CLONE_NEWNS: Final = 0x0002_0000
_PR_SET_PDEATHSIG: Final = 1
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x4_0000


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _Tail:
    """Passes a stream on and remembers how it ended: tarfile takes a cut-off archive for a whole one."""

    def __init__(self, stream: _Readable) -> None:
        self._stream = stream
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._last = (self._last + data)[-len(_END_MARK) :]
        return data

    def drain(self) -> None:
        rest = 0
        while data := self.read(CHUNK_BYTES):
            rest += len(data)
            if rest > TRAILING_BYTES:
                raise Invalid("the archive goes on after its end mark")
        if self._last != _END_MARK:
            raise Invalid("the archive is cut off: it has no end mark")


@dataclass(slots=True)
class Unpacking:
    """One archive being unpacked into the current root directory."""

    max_bytes: int
    max_entries: int
    entries: int = 0
    content_bytes: int = 0
    _reported: tuple[int, int] = (0, 0)
    _directories: Tree[tarfile.TarInfo] = field(default_factory=Tree)

    def run(self, archive: BinaryIO) -> None:
        """Unpack everything. Raises `Invalid` for what is no sound archive or is too big, `NoSpace`."""
        tail = _Tail(_decompressed(archive))
        try:
            # tarfile wants no more of the stream than read().
            with tarfile.open(fileobj=tail, mode="r|", errorlevel=2) as tar:  # type: ignore[call-overload]
                for member in tar:
                    self._take(tar, member)
                    tar.members = []  # else it keeps every header
            tail.drain()
            # Last, since making what is inside a directory changes its times.
            for path, member in self._directories.innermost_first():
                _set_metadata(path, member)
        except (tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise Invalid(f"the archive is damaged or is no tar: {error}") from error
        except (UnicodeError, ValueError, OverflowError) as error:
            raise Invalid(f"the archive holds a header that makes no sense: {error}") from error
        except MemoryError as error:
            raise Invalid("the archive holds a header that is too big") from error

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.entries += 1
        if self.entries > self.max_entries:
            raise Invalid(f"the archive holds more than {self.max_entries} entries")
        path = _inside(member.name)
        try:
            self._make(tar, member, path)
        except OSError as error:
            if error.errno in FULL:
                raise NoSpace(f"the disk is full while unpacking {path}") from error
            if error.errno == errno.EOPNOTSUPP:
                raise Unsupported(f"the file system here cannot hold what {path} has: {error.strerror}") from error
            raise Invalid(f"cannot unpack {path}: {error.strerror}") from error
        self._report()

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            self._make_directory(path)
            self._directories.put(path, member)
            return
        if path == "/":
            raise Invalid("the archive's root is not a directory")
        self._make_directory(os.path.dirname(path))
        self._remove(path)
        if member.isreg():
            self._write(tar, member, path)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(_inside(member.linkname), path, follow_symlinks=False)
            return  # its metadata is that of the file it names
        elif member.ischr() or member.isblk():
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        elif member.isfifo():
            os.mknod(path, stat.S_IFIFO | 0o600)
        else:
            raise Invalid(f"{path} is of a kind ({member.type!r}) that a root file system cannot hold")
        _set_metadata(path, member)

    def _make_directory(self, path: str) -> None:
        """Make *path* with its parents. Links on the way are followed: they end inside our root."""
        while True:
            try:
                os.makedirs(path, mode=0o755, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                # A later entry wins over an earlier one that neither is a directory nor leads to one.
                at = str(error.filename)
                self._remove(at if os.path.lexists(at) else os.path.dirname(at))
            else:
                return

    def _remove(self, path: str) -> None:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
                self._directories.drop(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self.content_bytes += member.size
        if self.content_bytes > self.max_bytes:
            raise Invalid(f"the archive holds more than {self.max_bytes >> 20} MiB")
        source = tar.extractfile(member)
        assert source is not None, "a regular file has content"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as out:
            left = member.size
            while left > 0:
                data = source.read(min(left, CHUNK_BYTES))
                if not data:
                    raise Invalid(f"the archive is cut off inside {path}")
                _write_sparse(out, data)
                left -= len(data)
            out.truncate(member.size)  # a hole at the end is not written

    def _report(self) -> None:
        before = self._reported
        if self.entries - before[0] >= REPORT_EVERY_ENTRIES or self.content_bytes - before[1] >= REPORT_EVERY_BYTES:
            self._reported = (self.entries, self.content_bytes)
            _say(entries=self.entries, bytes=self.content_bytes)


def _decompressed(archive: BinaryIO) -> _Readable:
    """Zstandard is undone by the caller; the rest is told by the first bytes."""
    start = archive.peek(6)[:6] if hasattr(archive, "peek") else b""
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=archive)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(archive)
    return archive


def _inside(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Invalid(f"the archive holds a path that climbs: {name!r}")
    if len(os.fsencode(name)) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH:
        raise Invalid(f"the archive holds a path that no system call takes: {name[:80]!r}...")
    return "/" + "/".join(parts)


def _write_sparse(out: BinaryIO, data: bytes) -> None:
    """Write *data*, leaving a hole for each run of whole zero blocks."""
    view, at = memoryview(data), 0
    zero = bytes(BLOCK_BYTES)
    while at < len(view):
        end = at
        if data[at : at + BLOCK_BYTES] == zero:
            while data[end : end + BLOCK_BYTES] == zero:
                end += BLOCK_BYTES
            out.seek(end - at, os.SEEK_CUR)
        else:
            while end < len(view) and data[end : end + BLOCK_BYTES] != zero:
                end += BLOCK_BYTES
            end = min(end, len(view))
            written = at
            while written < end:
                written += out.write(view[written:end])
        at = end


def _set_metadata(path: str, member: tarfile.TarInfo) -> None:
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(path, stat.S_IMODE(member.mode))  # after chown, which clears the set-uid bit
        for name, value in member.pax_headers.items():
            attribute = name.removeprefix(_ATTRIBUTE_PREFIX)
            if attribute != name and attribute.startswith(KEPT_ATTRIBUTES):
                os.setxattr(path, attribute, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
    when_ns = max(0, int(member.mtime * 1_000_000_000))
    os.utime(path, ns=(when_ns, when_ns), follow_symlinks=False)


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _mount_memory(root: str, size_bytes: int) -> None:
    """Mount a file system in memory on *root*, seen by this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = f"mode=755,size={size_bytes},nr_inodes={size_bytes // BLOCK_BYTES}"
    if libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:  # noqa: SIM102
        if libc.mount(b"tmpfs", root.encode(), b"tmpfs", 0, size.encode()) == 0:
            return
    raise Unsupported(f"no file system in memory: {os.strerror(ctypes.get_errno())}")


def _end_with_parent() -> None:
    """Else what a server that was killed had begun would be written on into a folder that the next one removes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _lock_in(root: str) -> None:
    os.chroot(root)
    os.chdir("/")
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


def _wait_until_unread() -> None:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # an error is reported whether asked for or not
    poll.poll()


def main() -> int:
    """Unpack standard input into ``argv[1]``: at most ``argv[2]`` bytes in ``argv[3]`` entries.

    ``argv[4]`` is the size in bytes of the file system in memory to put there first, 0 for none.
    """
    root, (max_bytes, max_entries, memory_bytes) = sys.argv[1], map(int, sys.argv[2:5])
    "".encode("idna")  # codecs are imported on first use, and there will be nothing to import from
    unpacking = Unpacking(max_bytes, max_entries)
    _end_with_parent()
    try:
        if memory_bytes:
            _mount_memory(root, memory_bytes)
        _lock_in(root)
        unpacking.run(sys.stdin.buffer)
    except AgentEnvError as error:
        _say(error=error.kind, message=error.message)
        return 1
    _say(done=True, entries=unpacking.entries, bytes=unpacking.content_bytes)
    _wait_until_unread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
