"""Network namespaces, for one thread at a time: being in one, and keeping one under a name.

A namespace lives as long as something refers to it. Ours are kept by a bind mount
of the namespace file, so they outlive the server; removing the mount lets the
kernel take everything in it away once no process is left inside.
Everything here is about the calling *thread* and blocks for less than a millisecond.
"""

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x4000_0000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2
_NS_GET_NSTYPE: Final = 0xB703
_OWN: Final = "/proc/thread-self/ns/net"

_libc: Final = ctypes.CDLL(None, use_errno=True)


def own_namespace() -> int:
    """A descriptor of the namespace that the calling thread is in. The caller closes it."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int) -> None:
    """Move the calling thread into the namespace of a descriptor. Raises `OSError`."""
    _check(_libc.setns(namespace, _CLONE_NEWNET), "setns")


def unshare() -> None:
    """Move the calling thread into a new, empty namespace. Raises `OSError`."""
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")


@contextmanager
def inside(path: Path) -> Iterator[None]:
    """Be in the namespace kept at *path* for the length of the block. Raises `OSError` if there is none."""
    home, there = own_namespace(), -1
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        enter(there)
        try:
            yield
        finally:
            enter(home)
    finally:
        for descriptor in (home, there):
            if descriptor >= 0:
                os.close(descriptor)


def keep(path: Path) -> None:
    """Keep the calling thread's namespace under *path*, which must not exist. Raises `OSError` and leaves nothing."""
    path.touch(exist_ok=False, mode=0o600)
    try:
        mounted = _libc.mount(_OWN.encode(), os.fsencode(path), None, ctypes.c_ulong(_MS_BIND), None)
        _check(mounted, f"mount on {path}")
    except OSError:
        path.unlink()
        raise


def remove(path: Path) -> None:
    """Stop keeping the namespace at *path*, if there is one. Raises `OSError`."""
    # More than one mount may lie there if a server was interrupted and another came.
    while _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
        pass
    if (code := ctypes.get_errno()) not in {errno.EINVAL, errno.ENOENT}:
        raise OSError(code, os.strerror(code), str(path))
    # Where another mount namespace has a copy of the mount, the kernel drops it with the file.
    path.unlink(missing_ok=True)


def is_kept(path: Path) -> bool:
    """Whether there is a network namespace at *path*, and not a mere file left by a crash."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fcntl.ioctl(descriptor, _NS_GET_NSTYPE) == _CLONE_NEWNET
        finally:
            os.close(descriptor)
    return False


def _check(status: int, what: str) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
