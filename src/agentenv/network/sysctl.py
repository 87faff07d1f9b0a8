"""Kernel settings of the network namespace that the calling thread is in."""

import errno
from pathlib import Path
from typing import Final

_NET: Final = Path("/proc/sys/net")  # shows the namespace of whoever opens it


def read(name: str) -> str | None:
    """The value of ``net.``\\ *name*, written with slashes; None where this kernel has no such setting."""
    try:
        return (_NET / name).read_text().strip()
    except FileNotFoundError:
        return None


def write(name: str, value: str) -> None:
    """Set it, unless it has that value. Raises `OSError`; `FileNotFoundError` where there is no such setting."""
    path = _NET / name
    if path.read_text().strip() != value:
        path.write_text(f"{value}\n")


def write_if_known(name: str, value: str) -> None:
    """The same, but without complaint where the kernel was built or started without the feature."""
    try:
        write(name, value)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise
