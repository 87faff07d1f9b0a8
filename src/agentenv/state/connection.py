"""The one connection to the database. Jobs that wait together share one commit.

A job is a function of the connection, run inside a transaction. Whoever asked waits
until that is durable. One that is cancelled abandons the wait: its job then happens
whole or, if it had not begun, not at all. On a full disk a job that adds nothing is
tried once more with the room of the reserve.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

import sqlalchemy.exc as sa_exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from agentenv.aio.failpoints import failpoint
from agentenv.aio.tasks import spawn
from agentenv.model.errors import AgentEnvError, NoSpace, Unavailable
from agentenv.state.faults import translate
from agentenv.state.room import Room

T = TypeVar("T")
Job: TypeAlias = Callable[[AsyncConnection], Awaitable[T]]

MAX_BATCH: Final = 64
_HINT: Final = "delete sandboxes or templates, or free space on the disk that holds the database"


@dataclass(frozen=True, slots=True)
class _Asked:
    job: Job[object]
    adds: bool
    outcome: asyncio.Future[object]


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """``waiting`` is now; the rest counts since the start."""

    waiting: int
    jobs: int
    commits: int
    failures: int


class SoleConnection:
    """Runs jobs one at a time, in order, each durable when its result is given."""

    def __init__(self, engine: AsyncEngine, room: Room) -> None:
        self._engine = engine
        self._room = room
        self._connection: AsyncConnection | None = None
        self._asked: asyncio.Queue[_Asked | None] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._in_doubt = False  # whether a commit was tried, and may have happened though it failed
        self._jobs = 0
        self._commits = 0
        self._failures = 0

    async def start(self) -> None:
        try:
            self._connection = await self._engine.connect()
        except (sa_exc.SQLAlchemyError, OSError) as error:
            raise await self._explained(error) from error
        self._worker = spawn("state database", self._work())

    async def close(self) -> None:
        """Finish every job that was asked for, and close. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._asked.put_nowait(None)
            await worker
        await self._disconnect()

    async def run(self, job: Job[T], *, adds: bool = False) -> T:
        """Return the result of *job*, durable. Raises what it raised, `NoSpace` or `Unavailable`.

        A job that *adds* something never uses the reserve, and is refused while that is not there.
        """
        return await self.submit(job, adds=adds)

    def submit(self, job: Job[T], *, adds: bool = False) -> asyncio.Future[T]:
        """Ask for *job* and return at once. Raises `Unavailable` when closed."""
        if self._worker is None or self._worker.done():
            raise Unavailable("the state database is closed")
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(_Asked(cast("Job[object]", job), adds, cast("asyncio.Future[object]", outcome)))
        return outcome

    def statistics(self) -> ConnectionStatistics:
        return ConnectionStatistics(self._asked.qsize(), self._jobs, self._commits, self._failures)

    async def _work(self) -> None:
        closing = False
        while not closing:
            batch: list[_Asked] = []
            asked = await self._asked.get()
            while asked is not None:
                if not asked.outcome.done():
                    batch.append(asked)
                if len(batch) == MAX_BATCH or self._asked.empty():
                    break
                asked = self._asked.get_nowait()
            closing = asked is None
            await self._commit(batch)

    async def _commit(self, batch: list[_Asked]) -> None:
        batch = await self._admitted(batch)
        if not batch:
            return
        try:
            results = await self._transaction(batch)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the asker's
            await self._failed(batch, error)
            return
        self._commits += 1
        self._jobs += len(batch)
        for asked, result in zip(batch, results, strict=True):
            _settle(asked.outcome, result=result)

    async def _admitted(self, batch: list[_Asked]) -> list[_Asked]:
        """What of *batch* may be done now: without a reserve, nothing is added."""
        if self._room.kept or await asyncio.to_thread(self._room.keep):
            return batch
        for asked in batch:
            if asked.adds:
                self._failures += 1
                _settle(asked.outcome, error=NoSpace("the disk of the state database is full", hint=_HINT))
        return [asked for asked in batch if not asked.adds]

    async def _failed(self, batch: list[_Asked], error: Exception) -> None:
        fault = await self._explained(error)
        full = isinstance(fault, NoSpace)
        # What found no room was not written, whether its commit was tried or not.
        if len(batch) > 1 and (full or not self._in_doubt):
            for asked in batch:  # one must not fail for another
                await self._commit([asked])
            return
        if full and not batch[0].adds and await asyncio.to_thread(self._room.give_up):
            await self._commit(batch)
            return
        self._failures += len(batch)
        for asked in batch:
            _settle(asked.outcome, error=fault, cause=error)

    async def _explained(self, error: Exception) -> Exception:
        return translate(error, disk_full=await asyncio.to_thread(self._room.is_full))

    async def _transaction(self, batch: list[_Asked]) -> list[object]:
        self._in_doubt = False
        if self._connection is None:
            self._connection = await self._engine.connect()
        try:
            async with self._connection.begin():
                results = [await asked.job(self._connection) for asked in batch]
                await failpoint("store.committing")
                self._in_doubt = True
        except (AgentEnvError, sa_exc.IntegrityError):
            raise  # a refusal: the connection is as good as before
        except BaseException:
            await self._disconnect()  # its state is unknown; the next batch opens another
            raise
        await failpoint("store.committed")
        return results

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sa_exc.SQLAlchemyError, OSError):
                await connection.invalidate()
            with contextlib.suppress(sa_exc.SQLAlchemyError, OSError):
                await connection.close()


def _settle(
    outcome: asyncio.Future[object],
    *,
    result: object = None,
    error: Exception | None = None,
    cause: Exception | None = None,
) -> None:
    if outcome.done():  # cancelled by its asker
        return
    if error is None:
        outcome.set_result(result)
        return
    if error is not cause:
        error.__cause__ = cause
    outcome.set_exception(error)
