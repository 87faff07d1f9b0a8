"""How a database is opened: durable at commit, and private to its owner."""

import os
from contextlib import closing
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from agentenv.aio.failures import FULL
from agentenv.model.errors import Invalid, NoSpace, Unavailable, Unsupported

BUSY_TIMEOUT_MS: Final = 5000

_PRAGMAS: Final = (
    "journal_mode=WAL",
    "synchronous=FULL",  # NORMAL loses the last commits of a WAL at a power cut
    f"busy_timeout={BUSY_TIMEOUT_MS}",
    "foreign_keys=ON",
    "journal_size_limit=16777216",  # a WAL that once grew is cut back to this
    "trusted_schema=OFF",
)


def sqlite_url(path: Path) -> str:
    """The URL of the database in the file *path*."""
    return sa.URL.create("sqlite+aiosqlite", database=str(path)).render_as_string(hide_password=False)


def open_engine(url: str) -> AsyncEngine:
    """Return an engine for *url*, not yet connected.

    Raises `Invalid` for something that is not a URL of a database, `Unsupported` for a kind of
    database that this release does not speak.
    """
    try:
        parsed = sa.make_url(url)
    except ArgumentError as error:
        raise Invalid("the state database has no valid URL", hint="sqlite+aiosqlite:///PATH") from error
    if parsed.drivername != "sqlite+aiosqlite" or not parsed.database or parsed.database == ":memory:":
        raise Unsupported(f"no state database of kind {parsed.drivername}", hint="use sqlite+aiosqlite:///PATH")
    engine = create_async_engine(parsed, pool_size=1, max_overflow=1)
    sa.event.listen(engine.sync_engine, "connect", _on_connect)
    sa.event.listen(engine.sync_engine, "begin", _on_begin)
    return engine


def file_of(url: str) -> Path:
    """The file of the SQLite database at *url*, which `open_engine` takes."""
    return Path(str(sa.make_url(url).database))


def create_file(url: str) -> None:
    """Make the file of an SQLite database and its directory, readable only by us; blocking.

    Records hold environment variables of sandboxes, and those hold secrets.
    """
    path = file_of(url)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        if error.errno in FULL:
            raise NoSpace(f"no room for {path}", hint="free space on the disk that holds it") from error
        raise Unavailable(
            f"cannot open {path}: {error.strerror}", hint="check owner and mode of the home directory"
        ) from error


def _on_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # The driver would begin transactions by itself, and only before some statements.
    connection.isolation_level = None
    try:
        with closing(connection.cursor()) as cursor:
            for pragma in _PRAGMAS:
                cursor.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()  # the pool has not taken it yet, and would leave it to the garbage collector
        raise


def _on_begin(connection: sa.Connection) -> None:
    # A read that turns into a write could find that another process wrote in between, and fail.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
