"""What a database error means to the caller."""

from typing import Final

import sqlalchemy.exc as sa_exc

from agentenv.aio.failures import FULL
from agentenv.model.errors import AgentEnvError, Bug, NoSpace, Unavailable

_HINTS: Final = {
    "BUSY": "another process holds the database; stop the other server that uses this home directory",
    "LOCKED": "another process holds the database; stop the other server that uses this home directory",
    "CORRUPT": "the database file is damaged; move it away, or restore it from a backup, and start again",
    "NOTADB": "the file is not a database; move it away, or restore it from a backup, and start again",
    "READONLY": "the database file or its directory cannot be written; check owner, mode and mount",
    "CANTOPEN": "the database file cannot be opened; check that its directory exists, its owner and mode",
    "PERM": "the database file cannot be opened; check its owner and mode",
    "IOERR": "the disk under the database reported an error; see the kernel log",
    "PROTOCOL": "another process holds the database; stop the other server that uses this home directory",
}
_DISK_FULL_SQLSTATE: Final = "53100"
_FOR_WANT_OF_ROOM: Final = frozenset({"IOERR", "CANTOPEN"})


def translate(error: Exception, *, disk_full: bool = False) -> Exception:
    """Return the kind of *error* to raise to whoever asked; errors of ours stay as they are.

    SQLite says "full" only where it writes; what it allocates and opens fails as an
    I/O error, which is `NoSpace` where *disk_full*.
    """
    if isinstance(error, AgentEnvError):
        return error
    cause = error.orig if isinstance(error, sa_exc.DBAPIError) and error.orig is not None else error
    name = str(getattr(cause, "sqlite_errorname", ""))
    code = name.removeprefix("SQLITE_").partition("_")[0]
    if (
        code == "FULL"
        or getattr(cause, "sqlstate", None) == _DISK_FULL_SQLSTATE
        or (isinstance(cause, OSError) and cause.errno in FULL)
        or (disk_full and code in _FOR_WANT_OF_ROOM)
    ):
        return NoSpace(f"the state database has no room: {cause}", hint="free space on the disk that holds it")
    if isinstance(error, (sa_exc.OperationalError, sa_exc.DatabaseError, sa_exc.InterfaceError, OSError)):
        return Unavailable(f"the state database failed: {cause}", hint=_HINTS.get(code))
    return Bug(f"the state database was misused: {error}")
