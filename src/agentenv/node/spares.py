"""VMMs kept waiting, each in a network slot of its own, so that a start finds its process started.

A spare fits any snapshot whose machine has its vCPUs and memory: create, resume and
fork take from one pool, which keeps the shapes that were wanted last. What it has is
found by name like everything else of a node (directory, process, slot), belongs to no
record, and is gone after a crash as soon as the next server has looked.

The pool is filled while nothing starts: a start is not to wait for the process that
the next one will use, and under a steady load starting ahead saves nothing.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from agentenv.aio.clock import Clock
from agentenv.aio.failpoints import failpoint
from agentenv.aio.tasks import Tasks, to_its_end
from agentenv.model.errors import AgentEnvError, Exhausted
from agentenv.model.machine import Machine
from agentenv.model.policy import EgressPolicy
from agentenv.network.contract import Slot, Slots
from agentenv.vmm.contract import Instance, Spare, SparePlan, Vmm

OWNER: Final = "spare-"
"""How the slots and directories of spares begin; no sandbox has such an id."""

_REMEMBERED: Final = 16  # starts that say which shapes are wanted
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0

Shape: TypeAlias = tuple[int, int]
"""vCPUs and MiB of memory."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpareSettings:
    """*low*: with fewer waiting VMMs the pool is filled; *high*: how far. 0 is no pool."""

    low: int = 0
    high: int = 0


@dataclass(slots=True)
class SpareStatistics:
    """``waiting`` is now, the others since the start.

    ``hits`` took a waiting VMM, ``misses`` found none of their shape, ``broken`` were given one that had to
    be replaced; ``made``, ``died`` (by themselves) and ``failures`` (could not be made) are of the pool.
    """

    waiting: int = 0
    hits: int = 0
    misses: int = 0
    broken: int = 0
    made: int = 0
    died: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A VMM that waits, and the slot that it waits in. Whoever takes it owes both a `stop` and a release."""

    vmm: Spare
    slot: Slot


class Spares:
    """The pool of one node. From `start` to `close`."""

    def __init__(
        self, vmm: Vmm, slots: Slots, clock: Clock, root: Path, settings: SpareSettings, *, balloon: bool
    ) -> None:
        """*root*: where run directories are."""
        self._vmm = vmm
        self._slots = slots
        self._clock = clock
        self._root = root
        self._low, self._high = min(settings.low, settings.high), settings.high
        self._balloon = balloon
        self._tasks = Tasks("spares")
        self._waiting: list[Waiting] = []
        self._recent: deque[Machine] = deque(maxlen=_REMEMBERED)
        self._filling = True
        self._starting = 0
        self._nothing_starts = asyncio.Event()
        self._nothing_starts.set()
        self._look = asyncio.Event()
        self._statistics = SpareStatistics()

    def __repr__(self) -> str:
        return f"<Spares: {len(self._waiting)} of {self._high} waiting>"

    def start(self, likely: Iterable[Machine] = ()) -> None:
        """Begin to fill the pool; *likely*: machines to begin with, while nothing has been started."""
        if self._high:
            self._recent.extend(likely)
            self._look.set()
            self._tasks.start("fill", self._fill())

    async def close(self) -> None:
        """End every VMM that waits, and give back its slot. Idempotent."""
        await self._tasks.close()
        gone, self._waiting = self._waiting, []
        await asyncio.gather(*(self._end(spare) for spare in gone))

    def waiting(self) -> list[Waiting]:
        return list(self._waiting)

    def statistics(self) -> SpareStatistics:
        return replace(self._statistics, waiting=len(self._waiting))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Something starts inside the block, and the pool is not filled meanwhile."""
        self._starting += 1
        self._nothing_starts.clear()
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting:
                self._nothing_starts.set()

    def take(self, machine: Machine) -> Waiting | None:
        """The VMM of that shape which has waited longest, if there is one; it is the caller's."""
        if not self._high:
            return None
        self._recent.append(machine)
        self._look.set()
        for spare in self._waiting:
            if _shape(spare.vmm.plan.machine) == _shape(machine) and spare.vmm.is_alive:
                self._waiting.remove(spare)
                self._statistics.hits += 1
                return spare
        self._statistics.misses += 1
        return None

    def used(self, spare: Waiting, instance: Instance) -> None:
        """Say what became of one that was taken."""
        if instance.process != spare.vmm.process:
            self._statistics.broken += 1

    async def give_way(self) -> bool:
        """Give up one that waits, since its slot is needed; False if there is none."""
        if not self._waiting:
            return False
        await self._end(self._waiting.pop(0))
        return True

    def _next(self) -> Machine | None:
        """The machine to make a spare for now, if one is wanted."""
        here = Counter(_shape(spare.vmm.plan.machine) for spare in self._waiting)
        wanted = self._wanted()
        fitting = sum(min(count, here[_shape(machine)]) for machine, count in wanted)
        if fitting < self._low:
            self._filling = True
        if fitting >= sum(count for _, count in wanted):
            self._filling = False
        if not self._filling:
            return None
        return next((machine for machine, count in wanted if here[_shape(machine)] < count), None)

    def _wanted(self) -> list[tuple[Machine, int]]:
        """How many of each shape, most wanted first: in proportion to the latest starts, none forgotten."""
        starts = Counter(_shape(machine) for machine in self._recent)
        example = {_shape(machine): machine for machine in self._recent}
        left, wanted = self._high, []
        for shape, count in starts.most_common():
            share = min(left, max(1, round(self._high * count / len(self._recent))))
            if share:
                wanted.append((example[shape], share))
                left -= share
        if wanted and left:
            wanted[0] = (wanted[0][0], wanted[0][1] + left)
        return wanted

    def _surplus(self) -> Waiting | None:
        """One to give up for another shape, if the pool is full."""
        if len(self._waiting) < self._high:
            return None
        left = Counter({_shape(machine): count for machine, count in self._wanted()})
        for spare in reversed(self._waiting):  # of a shape, the one that came last goes first
            shape = _shape(spare.vmm.plan.machine)
            if left[shape] <= 0:
                return spare
            left[shape] -= 1
        return None

    async def _fill(self) -> None:
        failures = 0
        while True:
            await self._look.wait()
            self._look.clear()
            while (machine := self._next()) is not None:
                await self._nothing_starts.wait()
                if (surplus := self._surplus()) is not None:
                    self._waiting.remove(surplus)
                    await self._end(surplus)
                try:
                    await self._add(machine)
                except Exception as error:  # noqa: BLE001 - if this task ended, no start would ever be quick again
                    if not isinstance(error, Exhausted):  # every slot is in use, which is no failure
                        self._statistics.failures += 1
                        log.warning("no VMM could be started ahead of need", error=str(error))
                    await self._clock.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10)))
                    failures += 1
                else:
                    failures = 0

    async def _add(self, machine: Machine) -> None:
        name = OWNER + secrets.token_hex(8)
        slot = await self._slots.acquire(name, EgressPolicy())
        try:
            plan = SparePlan(name, machine, slot.netns, slot.tap, self._root / name, self._balloon)
            vmm = await self._vmm.start_spare(plan)
        except BaseException:
            await to_its_end(f"release slot of {name}", self._slots.release(slot))
            raise
        spare = Waiting(vmm, slot)
        self._waiting.append(spare)
        self._statistics.made += 1
        self._tasks.start(f"watch {name}", self._watch(spare))
        await failpoint("spares.made")

    async def _watch(self, spare: Waiting) -> None:
        """One that ends while it waits, as by the OOM killer, makes room for another."""
        await spare.vmm.wait_exit()
        if spare in self._waiting:
            self._waiting.remove(spare)
            self._statistics.died += 1
            log.warning("a VMM that was started ahead of need has ended", pid=spare.vmm.process.pid)
            await self._end(spare)
            self._look.set()

    async def _end(self, spare: Waiting) -> None:
        await to_its_end(f"end {spare.slot.owner}", end(self._slots, spare))


async def end(slots: Slots, spare: Waiting) -> None:
    """End a VMM that nobody needs any more and give back its slot, unless another holds that by now."""
    with suppress(AgentEnvError):  # one that does not end is reaped at the next start
        await spare.vmm.stop()
    await slots.release(spare.slot)


def _shape(machine: Machine) -> Shape:
    return machine.vcpu_count, machine.memory_mib
