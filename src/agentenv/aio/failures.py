"""What a failed system call means to a caller: the one place that sorts errno by what can be done about it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NoSpace, NotFound, Unavailable

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk has no room, or the quota of its user is used up."""

USED_UP: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""This process or its host has no more of something that may come back: descriptors, memory, buffers."""

DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""We may not: the owner, the mode, the mount or a capability stands in the way."""


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise an `OSError` of the block as a kind whose message says that *doing* failed; an early end is a `Bug`."""
    try:
        yield
    except OSError as error:
        raise kind_of(error, doing) from error
    except EOFError as error:
        raise Bug(f"{doing}: a file {error}") from error


def kind_of(error: OSError, doing: str) -> AgentEnvError:
    """Return what *error* is to a caller. An I/O error is `Unavailable`: the disk did not answer."""
    what = f"{doing}: {error.strerror or error}"
    if error.errno in FULL:
        return NoSpace(what, hint="free space in the data directory, or delete snapshots and paused sandboxes")
    if error.errno in USED_UP:
        return Exhausted(what)
    if error.errno == errno.ENOENT:
        return NotFound(what)
    if error.errno in DENIED:
        return Unavailable(what, hint="check who owns the data directory and how it is mounted")
    return Unavailable(what)
