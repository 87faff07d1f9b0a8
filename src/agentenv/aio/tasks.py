"""Every task has a name and an owner; this is the only module that starts one.

asyncio keeps a weak reference to a task, so one that nobody holds may be collected
in the middle of its work. Here each is held until it has ended.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

import structlog

from agentenv.model.errors import Unavailable

T = TypeVar("T")

_log = structlog.get_logger(__name__)
_held: Final[set[asyncio.Task[object]]] = set()


def spawn(name: str, coro: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start *coro* as a task called *name* and keep it alive until it ends.

    The caller awaits it, or hands it to someone who does. An exception that nobody
    retrieves is reported by the event loop, with the name, once the task is dropped;
    work that nobody awaits by design belongs to a `Tasks`, which reports at once.
    """
    task = asyncio.create_task(coro, name=name)
    _held.add(task)
    task.add_done_callback(_held.discard)
    return task


async def to_its_end(name: str, work: Coroutine[object, object, T]) -> T:
    """Return the result of *work*, run as a task called *name* that is never cut short.

    A caller that is cancelled meanwhile, once or many times, gets its `CancelledError`
    after the work has ended; an exception of the work is then logged, since the caller
    no longer looks at outcomes. For what must not be left half done; *work* is bounded
    in time by whoever gives it.
    """
    task = spawn(name, work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failed := task.exception()) is not None:
        _log.warning("%s failed after its caller was cancelled", name, exc_info=failed)
    raise cancelled


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """Counts since the owner was made, except ``running``."""

    running: int
    started: int
    failed: int


class Tasks:
    """Owns background tasks: as a context manager, leaving it cancels and awaits them all.

    A task that fails is logged the moment it does; the others go on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._running: set[asyncio.Task[object]] = set()
        self._started = 0
        self._failed = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tasks {self.name}: {len(self._running)} running, {self._failed} of {self._started} failed>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self, name: str, coro: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start *coro* as ``owner/name``. Raises `Unavailable` after `close`; *coro* is closed then."""
        if self._closed:
            coro.close()
            raise Unavailable(f"cannot start {name}: {self.name} is closed")
        task = spawn(f"{self.name}/{name}", coro)
        self._running.add(task)
        self._started += 1
        task.add_done_callback(self._ended)
        return task

    async def close(self, *, grace_s: float = 10.0) -> None:
        """Cancel every task and wait until all have ended, *grace_s* seconds at most. Idempotent.

        A task that outlasts the grace is logged and left to itself. A task that
        closes its own owner is not waited for and not cancelled.
        """
        self._closed = True
        ending = self._running - {asyncio.current_task()}
        if not ending:
            return
        for task in ending:
            task.cancel()
        _, stuck = await asyncio.wait(ending, timeout=grace_s)
        for task in stuck:
            _log.error("task %s did not end within %g s of being cancelled", task.get_name(), grace_s)

    def statistics(self) -> TaskStatistics:
        return TaskStatistics(running=len(self._running), started=self._started, failed=self._failed)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed += 1
            _log.error("task %s failed", task.get_name(), exc_info=error)
