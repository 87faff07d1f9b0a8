"""Time to live: when a sandbox's end has come, kill or pause it, as it was asked."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final, TypeAlias

import structlog

from agentenv.aio.clock import Clock
from agentenv.aio.operations import Operations
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import NotFound
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import OnTimeout, Sandbox
from agentenv.node.alive import GuestUnresponsive
from agentenv.node.registry import Registry

RETRY_S: Final = 30.0
# Of a guest that does not stand still: time enough for one that is only busy, and an end to it.
PAUSE_AGAIN_AFTER_S: Final = (30.0, 60.0, 120.0, 240.0, 480.0)
LONGEST_NAP_S: Final = 3600.0
log = structlog.get_logger(__name__)

Verb: TypeAlias = Callable[[SandboxId], Awaitable[object]]
GiveUp: TypeAlias = Callable[[SandboxId, datetime, str], Awaitable[object]]


class Expiry:
    """Watches the deadlines of one node's sandboxes.

    A pause that fails is tried again later: the sandbox runs on rather than lose
    its data. What the host lacks (disk, database) may take as long as it takes; a guest
    that does not stand still gets a few more tries, and is given up then. The deadline
    is looked at again when its turn comes, since it may have been moved while the
    sandbox was busy with something else.
    """

    def __init__(
        self,
        clock: Clock,
        registry: Registry,
        operations: Operations,
        tasks: Tasks,
        *,
        kill: Verb,
        pause: Verb,
        give_up: GiveUp,
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._operations = operations
        self._tasks = tasks
        self._kill = kill
        self._pause = pause
        self._give_up = give_up
        self._changed = asyncio.Event()
        self._under_way: set[SandboxId] = set()
        self._not_before: dict[SandboxId, datetime] = {}
        self._unresponsive: Counter[SandboxId] = Counter()  # failed tries to pause it at its present end
        self._moving: Counter[SandboxId] = Counter()
        registry.listen(self._on_change)

    def _on_change(self, before: Sandbox | None, after: Sandbox | None) -> None:
        if after is None and before is not None:
            self._start_anew(before.id)
        elif after is not None and (before is None or (before.ends_at, before.state) != (after.ends_at, after.state)):
            if before is not None and before.ends_at != after.ends_at:
                self._start_anew(after.id)
            self._changed.set()

    def _start_anew(self, sandbox_id: SandboxId) -> None:
        self._not_before.pop(sandbox_id, None)
        self._unresponsive.pop(sandbox_id, None)

    @contextmanager
    def put_off(self, sandbox_id: SandboxId) -> Iterator[None]:
        """The end does not come inside: someone waits for the sandbox's turn to move it."""
        self._moving[sandbox_id] += 1
        try:
            yield
        finally:
            self._moving[sandbox_id] -= 1
            if not self._moving[sandbox_id]:
                del self._moving[sandbox_id]
                self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            now = self._clock.now()
            upcoming = now + timedelta(seconds=LONGEST_NAP_S)
            for sandbox in self._registry.all():
                if sandbox.id in self._under_way or (due := self._due(sandbox)) is None:
                    continue
                if due > now:
                    upcoming = min(upcoming, due)
                    continue
                self._under_way.add(sandbox.id)
                self._tasks.start(f"expire {sandbox.id}", self._expire(sandbox.id))
            await self._nap_until(upcoming)

    async def _nap_until(self, instant: datetime) -> None:
        """Return at *instant*, by the wall clock even if that is set meanwhile, or when a deadline has moved."""
        nap = self._tasks.start("nap until the next deadline", self._clock.sleep_until(instant))
        change = self._tasks.start("wait for a moved deadline", self._changed.wait())
        try:
            await asyncio.wait((nap, change), return_when=asyncio.FIRST_COMPLETED)
        finally:
            nap.cancel()
            change.cancel()

    def _due(self, sandbox: Sandbox) -> datetime | None:
        if sandbox.ends_at is None or sandbox.id in self._moving:
            return None
        # One in error holds a disk and counts against limits: it goes when it would have gone anyway.
        errored = sandbox.state is State.ERROR and sandbox.on_timeout is OnTimeout.KILL
        if sandbox.state is not State.RUNNING and not errored:
            return None
        return max(sandbox.ends_at, self._not_before.get(sandbox.id, sandbox.ends_at))

    async def _expire(self, sandbox_id: SandboxId) -> None:
        try:
            await self._operations.settle(sandbox_id)
            sandbox = self._registry.get(sandbox_id)
            if sandbox.ends_at is None or (due := self._due(sandbox)) is None or due > self._clock.now():
                return
            log.info("sandbox expired", sandbox=sandbox_id, on_timeout=sandbox.on_timeout.value)
            # No await since it was found to be due, and the verb begins before it waits for anything.
            if sandbox.on_timeout is OnTimeout.KILL:
                await self._kill(sandbox_id)
            else:
                await self._pause_at_last(sandbox_id, sandbox.ends_at)
        except NotFound:
            return
        except Exception as error:  # whatever it was, it must not be met again at once
            self._put_off_for(sandbox_id, RETRY_S)
            log.warning("expiry failed and will be tried again", sandbox=sandbox_id, error=str(error), exc_info=True)
        finally:
            self._under_way.discard(sandbox_id)
            self._changed.set()

    async def _pause_at_last(self, sandbox_id: SandboxId, ends_at: datetime) -> None:
        try:
            await self._pause(sandbox_id)
        except GuestUnresponsive as error:
            tries = self._unresponsive[sandbox_id] = self._unresponsive[sandbox_id] + 1
            log.warning("a guest does not stand still at its end", sandbox=sandbox_id, tries=tries, error=str(error))
            if tries <= len(PAUSE_AGAIN_AFTER_S):
                self._put_off_for(sandbox_id, PAUSE_AGAIN_AFTER_S[tries - 1])
                return
            await self._give_up(sandbox_id, ends_at, f"{error}, {tries} times")

    def _put_off_for(self, sandbox_id: SandboxId, seconds: float) -> None:
        self._not_before[sandbox_id] = self._clock.now() + timedelta(seconds=seconds)
