"""At most one operation at a time on each key: start it, join it, wait it out, or cut it short.

An operation is a task of its own. Whoever asked for it only waits: a caller that is
cancelled (a client that hung up) abandons the wait and never the work. Looking at
what is in progress and starting something else happen in one step, with no await
between them, so two callers can never both start.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, cast

import structlog

from agentenv.aio.tasks import spawn
from agentenv.model.errors import Bug, Conflict, Unavailable

T = TypeVar("T")
Factory: TypeAlias = Callable[[], Coroutine[object, object, T]]

GRACE_S: Final = 10.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Operation:
    key: str
    name: str
    cuts: tuple[asyncio.Task[object], ...]  # must have unwound before this one works
    task: asyncio.Task[object] = field(init=False)
    waiters: int = 0  # for its outcome
    cut_by: str | None = None


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """``in_progress``, ``waiters`` and ``stuck`` are now; the rest counts since the start.

    ``stuck`` operations were cancelled, did not unwind in their grace, and are no longer waited for.
    """

    in_progress: int
    waiters: int
    stuck: int
    started: int
    joined: int
    cut: int


class Operations:
    """The operations of one node, keyed by what they change.

    Args:
        grace_s: how long `cut` waits for what it cancelled to unwind, in seconds.
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._current: dict[str, _Operation] = {}
        self._stuck: set[asyncio.Task[object]] = set()
        self._closed = False
        self._started = 0
        self._joined = 0
        self._cut = 0

    def __repr__(self) -> str:
        running = ", ".join(f"{op.name} {key} ({op.waiters} waiting)" for key, op in sorted(self._current.items()))
        return f"<Operations: {running or 'none'}>"

    async def run(self, key: str, name: str, factory: Factory[T]) -> T:
        """Return the result of operation *name* on *key*, started here or joined.

        Another operation on the same key is waited out first, whatever its outcome;
        *factory* is called after that, so it sees the state it left. An exception of
        the operation is raised to every waiter. Raises `Conflict` if it was cut
        short, `Unavailable` if this object is or was closed.
        """
        while (running := self._current.get(key)) is not None and running.name != name:
            await self._wait_end(running)
        if running is None:
            running = self._start(key, name, factory)
        else:
            self._joined += 1
        return cast("T", await self._result(running))

    async def cut(self, key: str, name: str, factory: Factory[T]) -> T:
        """Like `run`, but what is in progress is cancelled instead of waited out.

        The new operation takes its place at once; its *factory* is called when the old
        one has unwound, or has failed to within the grace. The same name joins.
        """
        running = self._current.get(key)
        if running is not None and running.name == name:
            self._joined += 1
        else:
            running = self._start(key, name, factory, cutting=running)
        return cast("T", await self._result(running))

    def current(self, key: str) -> str | None:
        """The name of the operation in progress on *key*, if any."""
        running = self._current.get(key)
        return running.name if running is not None else None

    async def settle(self, key: str) -> None:
        """Return when nothing is in progress on *key*. Outcomes are ignored."""
        while (running := self._current.get(key)) is not None:
            await self._wait_end(running)

    async def close(self, *, grace_s: float = GRACE_S) -> None:
        """Start nothing more, let what runs end for *grace_s* seconds, then cancel it. Idempotent.

        Cancelled operations get the same time again to unwind; those that do not are logged and left.
        """
        self._closed = True
        if not self._current:
            return
        await asyncio.wait([op.task for op in self._current.values()], timeout=grace_s)
        ending = list(self._current.values())
        if not ending:
            return
        for op in ending:
            op.task.cancel()
        await asyncio.wait([op.task for op in ending], timeout=grace_s)
        for op in ending:
            if not op.task.done():
                self._give_up(op.task)

    def statistics(self) -> OperationStatistics:
        return OperationStatistics(
            in_progress=len(self._current),
            waiters=sum(op.waiters for op in self._current.values()),
            stuck=len(self._stuck),
            started=self._started,
            joined=self._joined,
            cut=self._cut,
        )

    def _start(self, key: str, name: str, factory: Factory[T], *, cutting: _Operation | None = None) -> _Operation:
        if self._closed:
            raise Unavailable(f"cannot {name} {key}: the server is stopping")
        cuts: tuple[asyncio.Task[object], ...] = ()
        if cutting is not None:
            self._refuse_own(cutting)
            cutting.cut_by = name
            # What the old one had itself cut may still be unwinding.
            cuts = (cutting.task, *(task for task in cutting.cuts if not task.done()))
        operation = _Operation(key, name, cuts)
        operation.task = spawn(f"{name} {key}", self._work(operation, factory))
        operation.task.add_done_callback(lambda _: self._ended(operation))
        self._current[key] = operation
        self._started += 1
        if cutting is not None:
            self._cut += 1
            cutting.task.cancel()
        return operation

    async def _work(self, operation: _Operation, factory: Factory[T]) -> object:
        try:
            if operation.cuts:
                _, stuck = await asyncio.wait(operation.cuts, timeout=self._grace_s)
                for task in stuck:
                    self._give_up(task)
                operation.cuts = ()
            return await factory()
        finally:
            # In the same step as its end: whoever looks next must not join what is over.
            self._forget(operation)

    async def _result(self, operation: _Operation) -> object:
        task = operation.task
        operation.waiters += 1
        try:
            await self._wait_end(operation)
        finally:
            operation.waiters -= 1
        if not task.cancelled():
            return task.result()
        if operation.cut_by is not None:
            raise Conflict(f"{operation.name} of {operation.key} was cut short by {operation.cut_by}")
        raise Unavailable(f"{operation.name} of {operation.key} was cancelled")

    async def _wait_end(self, operation: _Operation) -> None:
        self._refuse_own(operation)
        await asyncio.wait([operation.task])  # unlike awaiting it, leaves it alone when cancelled

    def _refuse_own(self, operation: _Operation) -> None:
        if asyncio.current_task() is operation.task:
            raise Bug(f"{operation.name} of {operation.key} waits for itself")

    def _ended(self, operation: _Operation) -> None:
        self._forget(operation)  # one that was cancelled before its first step never reached its own
        if operation.task.cancelled():
            return
        error = operation.task.exception()  # marks it as retrieved
        if error is not None and operation.waiters == 0:
            _log.warning("%s failed with nobody waiting", operation.task.get_name(), exc_info=error)

    def _forget(self, operation: _Operation) -> None:
        if self._current.get(operation.key) is operation:
            del self._current[operation.key]

    def _give_up(self, task: asyncio.Task[object]) -> None:
        _log.error("%s was cancelled and has not unwound; going on without it", task.get_name())
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)
