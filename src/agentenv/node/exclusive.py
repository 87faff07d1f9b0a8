"""One server for one runtime directory: whatever is in it that a server does not know, it removes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.model.errors import Conflict


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold *directory* for this process, until it ends however it ends; blocking, but only for a moment.

    Raises `Conflict` if another process holds it.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                f"another server runs in {directory}",
                hint="stop it, or give this one another paths.runtime (and another home, prefix and ranges)",
            ) from error
        yield
    finally:
        os.close(descriptor)
