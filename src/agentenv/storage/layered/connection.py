"""One conversation with the storage daemon: any number of calls at a time, answered in any order."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from agentenv.aio.failures import kind_of
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AgentEnvError, Bug, Unavailable
from agentenv.storage.layered.wire import (
    LENGTH_BYTES,
    PROTOCOL,
    Answer,
    Fields,
    Greeting,
    decode,
    encode,
    greeting_of,
    length_of,
)

GREETING_TIMEOUT_S: Final = 30.0

Landed: TypeAlias = Callable[[Fields], None]

_log = structlog.get_logger(__name__)


class Disconnected(Unavailable):
    """The daemon ended before it answered: what was asked may have been done, or not."""


class Connection:
    """Made by `open`. Ends by itself when the daemon does: `wait_closed` returns then."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tasks: Tasks) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[asyncio.Future[Fields], Landed | None]] = {}
        self._closed = False
        self._reading = tasks.start("answers of the storage daemon", self._read())

    @classmethod
    async def open(cls, socket: Path, tasks: Tasks) -> tuple["Connection", Greeting]:
        """Connect and exchange greetings.

        Raises `FileNotFoundError` or `ConnectionRefusedError` if nobody listens, `Unavailable` if whoever
        listens does not answer, `Unsupported` if it speaks another protocol.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(socket)
        except (FileNotFoundError, ConnectionRefusedError):
            raise
        except OSError as error:
            raise kind_of(error, "connect to the storage daemon") from error
        connection = cls(reader, writer, tasks)
        try:
            fields = await connection.call("hello", {"protocol": PROTOCOL}, timeout_s=GREETING_TIMEOUT_S)
            return connection, greeting_of(fields)
        except BaseException:
            connection.close()
            raise

    async def call(self, name: str, fields: Fields, *, timeout_s: float | None, landed: Landed | None = None) -> Fields:
        """Return the answer to *name*; *landed* is given it in the step in which it comes, wanted or not.

        Raises what the daemon says, `Disconnected` if it ends first, `Unavailable` after
        *timeout_s*: the call goes on then.
        """
        if self._closed:
            raise Disconnected("the storage daemon is gone")
        request_id = next(self._ids)
        answer: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = (answer, landed)
        try:
            self._writer.write(encode(request_id, name, fields))
        except BaseException:
            del self._asked[request_id]
            raise
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise Unavailable(f"the storage daemon has not answered {name} in {timeout_s:g} s") from None
        finally:
            if not answer.done():
                answer.add_done_callback(_look_at)

    @property
    def is_open(self) -> bool:
        return not self._closed

    async def wait_closed(self) -> None:
        await asyncio.wait([self._reading])

    def close(self) -> None:
        """Hang up. What was asked and not answered is `Disconnected`."""
        self._end()
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                length = length_of(await self._reader.readexactly(LENGTH_BYTES))
                self._take(decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it ended, or was ended
        except Bug:
            _log.exception("the storage daemon makes no sense; hanging up")
        finally:
            self._end()

    def _take(self, answer: Answer) -> None:
        waiting, landed = self._asked.pop(answer.id, (None, None))
        if waiting is None:
            raise Bug("the storage daemon answers what was not asked")
        if isinstance(answer.result, AgentEnvError):
            waiting.set_exception(answer.result)
            return
        try:
            if landed is not None:
                landed(answer.result)
        except AgentEnvError as error:
            waiting.set_exception(error)
        else:
            waiting.set_result(answer.result)

    def _end(self) -> None:
        self._closed = True
        self._writer.close()
        asked, self._asked = self._asked, {}
        for waiting, _ in asked.values():
            waiting.set_exception(Disconnected("the storage daemon ended before it answered"))


def _look_at(answer: asyncio.Future[Fields]) -> None:
    """Look at the outcome of what nobody waits for any more, so that asyncio does not report it."""
    if not answer.cancelled():
        answer.exception()
