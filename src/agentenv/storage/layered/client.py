"""The storage daemon as something to call: started when there is none, started again when it has died.

A call waits for a daemon that is coming, and is told when the one it asked has ended
(`Disconnected`): only the caller can find out then whether it was done.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agentenv.aio.clock import Clock, SystemClock
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AgentEnvError, Conflict, Unavailable
from agentenv.storage.layered.connection import Connection, Disconnected, Landed
from agentenv.storage.layered.process import Child, Places, find_program, runs, start
from agentenv.storage.layered.wire import Fields, Greeting
from agentenv.storage.workers import Workers

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0
"""For calls that move no data; also for a daemon to be there at all."""

RETRY_S: Final = (0.0, 0.2, 1.0, 5.0, 15.0)
"""Before each attempt to have a daemon again, the last one repeated: one that keeps dying must not keep us busy."""

STABLE_S: Final = 60.0
MOST_LONG_CALLS: Final = 32
"""Calls that move data and are in progress; the daemon takes 64 of all on one connection."""

_ATTEMPTS: Final = 3
_STOP_TIMEOUT_S: Final = 60.0

_log = structlog.get_logger(__name__)

Connected = Callable[[Connection, Greeting], Awaitable[None]]


@dataclass(slots=True)
class ClientStatistics:
    """Counts since the start, except ``pid``, which is 0 while there is no daemon."""

    pid: int = 0
    started: int = 0
    lost: int = 0
    repeated: int = 0


class Client:
    """The one connection of this server to its daemon, for as long as it is open.

    Args:
        places: where the daemon's things are.
        program: of the daemon, a name or a path.
        connected: called with each new connection before any call of others; when it raises, that is no connection.
    """

    def __init__(self, places: Places, program: str, connected: Connected, *, clock: Clock | None = None) -> None:
        self.places = places
        self.statistics = ClientStatistics()
        self._program_name = program
        self._connected = connected
        self._clock = clock or SystemClock()
        self._tasks = Tasks("storage")
        self._workers = Workers("storage-daemon", 1)
        self._long = asyncio.Semaphore(MOST_LONG_CALLS)
        self._connection: Connection | None = None
        self._waiting: asyncio.Future[Connection] | None = None
        self._child: Child | None = None
        self._last_failure: AgentEnvError | None = None
        self._closed = False

    async def start(self) -> None:
        """Return when a daemon answers, one that was there or a new one.

        Raises `Unsupported` without a program, `Conflict` if another daemon has the
        directory, `Unavailable` with its last words if it does not come up.
        """
        program = await self._workers.run("find the storage daemon", lambda _: find_program(self._program_name))
        for delay_s in (*RETRY_S[1:3], None):
            try:
                connection = await self._reach(program, renew=True)
                break
            except Conflict:  # one that is about to serve, or about to be gone
                if delay_s is None:
                    raise
                await self._clock.sleep(delay_s)
        self._tasks.start("watch the storage daemon", self._watch(connection, program))

    async def close(self) -> None:
        """Hang up; the daemon lives on. Idempotent."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Unavailable("storage is closed"))
            self._waiting.exception()
        await self._tasks.close()
        if self._child is not None:
            self._child.release()
        await self._workers.close()

    async def call(self, name: str, fields: Fields, *, landed: Landed | None = None, long: bool = False) -> Fields:
        """Return what the daemon answers; see `Connection.call`. *long* calls move data, and take what they take.

        Raises `Unavailable` if there is no daemon and none comes up.
        """
        connection = await self._ready()
        if not long:
            return await connection.call(name, fields, timeout_s=CALL_TIMEOUT_S, landed=landed)
        async with self._long:
            return await connection.call(name, fields, timeout_s=None, landed=landed)

    async def settled(self, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Return what *attempt* returns. If the daemon dies meanwhile it is called again, with True: ask what is."""
        for number in range(_ATTEMPTS):
            await self._ready()  # so that what is known is known from this daemon
            try:
                return await attempt(number > 0)
            except Disconnected:
                self.statistics.repeated += 1
        raise Unavailable(f"the storage daemon ended {_ATTEMPTS} times at this")

    async def _ready(self) -> Connection:
        if self._closed:
            raise Unavailable("storage is closed")
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await asyncio.shield(self._waiting)
        except TimeoutError:
            why = f": {self._last_failure}" if self._last_failure is not None else ""
            raise Unavailable(f"the storage daemon does not run{why}") from None

    async def _watch(self, connection: Connection, program: Path) -> None:
        """Have a daemon again whenever it has died."""
        failures = 0
        while True:
            since = self._clock.monotonic()
            await connection.wait_closed()
            self._connection = None
            self.statistics.pid = 0
            self.statistics.lost += 1
            if self._clock.monotonic() - since > STABLE_S:
                failures = 0
            while True:
                _log.warning("the storage daemon is gone", log=str(self.places.log))
                await self._clock.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
                try:
                    connection = await self._reach(program, renew=False)
                    break
                except AgentEnvError as error:
                    self._last_failure = error
                    _log.error("no storage daemon", error=str(error))

    async def _reach(self, program: Path, *, renew: bool) -> Connection:
        """A connection to the daemon that is there, or else to a new one; *renew*: not to one of another build."""
        found = await self._join()
        if found is not None and renew and not await self._runs(found[1].pid, program):
            _log.info("replacing the storage daemon by this release's", pid=found[1].pid, version=found[1].version)
            await self._end(found[0])
            found = None
        if found is None:
            self._child = await self._start(program)
            self.statistics.started += 1
            found = await self._join()
            if found is None:
                raise Unavailable("the storage daemon ended as soon as it served")
        connection, greeting = found
        try:
            await self._connected(connection, greeting)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self.statistics.pid = greeting.pid
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(connection)
        _log.info("storage daemon", pid=greeting.pid, version=greeting.version, front_ends=list(greeting.front_ends))
        return connection

    async def _runs(self, pid: int, program: Path) -> bool:
        return await self._workers.run("look at the storage daemon", lambda _: runs(pid, program))

    async def _join(self) -> tuple[Connection, Greeting] | None:
        self.places.check()
        try:
            return await Connection.open(self.places.socket, self._tasks)
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    async def _start(self, program: Path) -> Child:
        def ended(status: int) -> None:
            if not self._closed:
                _log.warning("the storage daemon ended", status=status)

        return await start(program, self.places, self._workers, ended)

    async def _end(self, connection: Connection) -> None:
        """Ask the daemon to end; live images wait for the next one."""
        try:
            await connection.call("shutdown", {}, timeout_s=_STOP_TIMEOUT_S)
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await connection.wait_closed()
        except Disconnected:
            pass
        except TimeoutError:
            raise Conflict("the storage daemon of another release does not end") from None
        finally:
            connection.close()
