"""The verbs of `Slots` over a pool and a workshop, and the two tasks that keep the pool full and the host clean.

Each verb decides in `SlotPool` without waiting, then has the workshop act. A slot
handed to a caller that has gone meanwhile goes back.
"""

import asyncio
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

import structlog

from agentenv.aio.clock import Clock
from agentenv.aio.failpoints import failpoint
from agentenv.aio.tasks import Tasks, to_its_end
from agentenv.model.errors import AgentEnvError, DeadlineExceeded, NotFound, Unavailable
from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import Slot
from agentenv.network.egress import compile_policy
from agentenv.network.plan import NetworkPlan
from agentenv.network.pool import Holding, PoolStatistics, SlotPool
from agentenv.network.workshop import Workshop

_WAIT_S: Final = 30.0
# One index may be spoiled by a stranger's link of that name; several in a row mean that the host cannot.
_FAILURES_FOR_ALL: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class SlotStatistics:
    """Counts since the start. ``hits`` were acquired from a warm slot, ``misses`` had to wait for one."""

    hits: int = 0
    misses: int = 0
    made: int = 0
    removed: int = 0
    failures: int = 0


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    policy: EgressPolicy
    holding: asyncio.Future[Holding] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PooledSlots:
    """`Slots` on any workshop. From `start` to `close`; slots that are held then stay on the host."""

    def __init__(self, plan: NetworkPlan, pool: SlotPool, workshop: Workshop, clock: Clock) -> None:
        self._plan = plan
        self._pool = pool
        self._workshop = workshop
        self._clock = clock
        self._tasks = Tasks("slots")
        self._waiters: deque[_Waiter] = deque()
        self._slot_wanted = asyncio.Event()
        self._slot_leaves = asyncio.Event()
        self._nothing_leaves = asyncio.Event()
        self._nothing_leaves.set()
        self._closed = False
        self._statistics = SlotStatistics()

    def __repr__(self) -> str:
        return f"<PooledSlots {self._plan.prefix}: {self._pool!r}, {len(self._waiters)} waiting>"

    async def start(self) -> None:
        """Find what an earlier process left, and make a first slot. Raises an error kind; nothing new is left then."""
        self._pool.found((await self._workshop.leftovers()).slots)
        # One slot before any is needed: what this host cannot do is said now, to whoever starts the server.
        if (index := self._pool.next_to_make(waiting=1)) is not None:
            try:
                await self._workshop.make(self._plan.slot(index))
            except BaseException:
                self._pool.not_made(index)
                raise
            self._made(index)
        self._tasks.start("fill", self._fill())
        self._tasks.start("remove", self._remove())
        self._slot_wanted.set()

    async def close(self) -> None:
        """Remove the slots that nobody holds. Callers that wait for one get `Unavailable`. Idempotent."""
        self._closed = True
        self._fail_waiters(Unavailable("the network is shutting down"))
        await self._tasks.close()
        self._pool.dismiss_free()
        if leaving := self._pool.leaving():
            try:
                await self._workshop.remove([self._plan.slot(index) for index in leaving])
            except AgentEnvError as error:
                _log.warning("network slots %s are left for the next start: %s", leaving, error)
            self._left(leaving)

    async def acquire(self, owner: str, policy: EgressPolicy) -> Slot:
        egress = compile_policy(policy)
        if self._closed:
            raise Unavailable("the network is shut down")
        holding = await self._take_warm(owner, policy)
        if holding is not None:
            self._statistics.hits += 1
        else:
            holding = await self._wait_for_slot(owner, policy)
        try:
            if egress != compile_policy(EgressPolicy()):
                await self._workshop.replace_policy(self._plan.slot(holding.index), policy)
            await failpoint("slots.acquired")
        except BaseException:
            self._give_back(holding)
            raise
        return self._slot(holding)

    async def hand_over(self, slot: Slot, owner: str, policy: EgressPolicy) -> Slot:
        egress = compile_policy(policy)
        before = self._pool.holding(slot.index, slot.owner)
        if before is None:
            raise NotFound(f"network slot {slot.index} is not held by {slot.owner or 'anyone'}")
        self._pool.check_can_hold(owner)
        if not await self._workshop.is_whole(self._plan.slot(slot.index)):
            raise NotFound(f"network slot {slot.index} is gone from the host")
        if egress != compile_policy(before.policy):
            # To its end: the rules and what we know of them stay the same.
            await to_its_end(f"policy-{slot.index}", self._replace_policy(before, policy))
        return self._slot(self._pool.hand_over(before, owner, policy))

    async def adopt(self, owner: str, index: int, policy: EgressPolicy) -> Slot:
        compile_policy(policy)
        holding = self._pool.adopt(index, owner, policy)
        try:
            await self._workshop.repair(self._plan.slot(index), policy)
        except NotFound:
            self._give_back(holding)  # half of it may still be there
            raise
        except BaseException:
            self._pool.adoption_failed(holding)
            raise
        return self._slot(holding)

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        compile_policy(policy)
        holding = self._pool.holding(slot.index, slot.owner)
        if holding is None:
            raise NotFound(f"network slot {slot.index} is not held by {slot.owner or 'anyone'}")
        # A caller that hangs up must not leave the rules and what we know of them different.
        await asyncio.shield(self._tasks.start(f"policy-{slot.index}", self._replace_policy(holding, policy)))

    async def release(self, slot: Slot) -> None:
        holding = self._pool.holding(slot.index, slot.owner)
        if holding is not None:
            self._give_back(holding)

    async def reconcile(self, keep: Collection[int]) -> int:
        ours_before = self._pool.own()
        leftovers = await self._workshop.leftovers()
        self._pool.found(leftovers.slots - ours_before)
        gone = self._pool.dismiss(keep)
        self._leave()
        removed = await self._workshop.remove_strangers(leftovers)
        await self.settled()
        return len(gone) + removed

    async def settled(self) -> None:
        await self._nothing_leaves.wait()

    def held(self) -> dict[str, int]:
        return self._pool.held()

    def resolves_names(self, address: IPv4Address) -> int | None:
        """The slot whose guest *address* stands for, if it is held and its policy lets it ask for names."""
        holding = self._pool.holding_at(address)
        return holding.index if holding is not None and holding.dns else None

    def statistics(self) -> tuple[PoolStatistics, SlotStatistics]:
        return self._pool.statistics(), self._statistics

    # Handing over

    async def _take_warm(self, owner: str, policy: EgressPolicy) -> Holding | None:
        """A slot that was made ahead and is still whole; those that are not leave."""
        while (holding := self._pool.take_warm(owner, policy)) is not None:
            self._slot_wanted.set()
            try:
                whole = await self._workshop.is_whole(self._plan.slot(holding.index))
            except BaseException:
                self._give_back(holding)
                raise
            if whole:
                return holding
            _log.warning("network slot %d was taken apart while it waited: another is used", holding.index)
            self._statistics.failures += 1
            self._give_back(holding)
        return None

    async def _wait_for_slot(self, owner: str, policy: EgressPolicy) -> Holding:
        self._pool.check_can_wait(len(self._waiters))
        self._statistics.misses += 1
        waiter = _Waiter(owner, policy)
        self._waiters.append(waiter)
        self._slot_wanted.set()
        try:
            async with asyncio.timeout(_WAIT_S):
                return await waiter.holding
        except BaseException as error:
            with suppress(ValueError):
                self._waiters.remove(waiter)
            # Handed over in the same moment in which the caller gave up.
            if waiter.holding.done() and not waiter.holding.cancelled() and waiter.holding.exception() is None:
                self._give_back(waiter.holding.result())
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no network slot could be made in {_WAIT_S:g} s") from None
            raise

    def _made(self, index: int) -> None:
        self._statistics.made += 1
        self._pool.made(index)
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.holding.done():
                try:
                    holding = self._pool.take_warm(waiter.owner, waiter.policy)
                except AgentEnvError as error:  # the owner has one by now
                    waiter.holding.set_exception(error)
                else:
                    if holding is None:
                        break
                    waiter.holding.set_result(holding)
            self._waiters.popleft()

    def _fail_waiters(self, error: AgentEnvError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.holding.done():
                waiter.holding.set_exception(type(error)(error.message, hint=error.hint))

    def _slot(self, holding: Holding) -> Slot:
        return self._plan.slot(holding.index).held_by(holding.owner)

    async def _replace_policy(self, holding: Holding, policy: EgressPolicy) -> None:
        await self._workshop.replace_policy(self._plan.slot(holding.index), policy)
        holding.set_policy(policy)

    # Leaving

    def _give_back(self, holding: Holding) -> None:
        if self._pool.give_back(holding):
            self._leave()

    def _leave(self) -> None:
        if self._pool.leaving():
            self._nothing_leaves.clear()
            self._slot_leaves.set()

    def _left(self, indexes: Collection[int]) -> None:
        self._statistics.removed += len(indexes)
        self._pool.left(indexes)
        if not self._pool.leaving():
            self._nothing_leaves.set()
        self._slot_wanted.set()

    # In the background

    async def _fill(self) -> None:
        failures = 0
        while True:
            await self._slot_wanted.wait()
            self._slot_wanted.clear()
            while (index := self._pool.next_to_make(len(self._waiters))) is not None:
                try:
                    await self._workshop.make(self._plan.slot(index))
                except Exception as error:  # noqa: BLE001 - if this task ended, no sandbox could be made any more
                    failures += 1
                    self._statistics.failures += 1
                    self._pool.not_made(index)
                    await self._after_failure(failures, error)
                else:
                    failures = 0
                    self._made(index)

    async def _after_failure(self, failures: int, error: Exception) -> None:
        _log.warning("network slot not made, %d in a row: %s", failures, error)
        if failures >= _FAILURES_FOR_ALL:
            known = error if isinstance(error, AgentEnvError) else Unavailable(f"no network slot can be made: {error}")
            self._fail_waiters(known)
            await self._clock.sleep(_pause_s(failures - _FAILURES_FOR_ALL))

    async def _remove(self) -> None:
        failures = 0
        while True:
            await self._slot_leaves.wait()
            self._slot_leaves.clear()
            while leaving := self._pool.leaving():
                try:
                    await self._workshop.remove([self._plan.slot(index) for index in leaving])
                except Exception as error:  # noqa: BLE001 - if this task ended, nothing would ever be removed any more
                    self._statistics.failures += 1
                    _log.warning("network slots %s not removed yet: %s", leaving, error)
                    await self._clock.sleep(_pause_s(failures))
                    failures += 1
                else:
                    failures = 0
                    self._left(leaving)


def _pause_s(failures: int) -> float:
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 16)))
