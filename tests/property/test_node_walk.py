"""Random lives of a node: verbs at once, failures, crashes and collections in any order.

After each round that comes to rest, the records, VMs, slots and files must say the same: everything
that something needs is there (no layer is ever collected too early), and nothing else
is (nothing leaks). And a paused or running sandbox still has the memory it had.
"""

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.model.errors import AgentEnvError, NoSpace, Unavailable
from agentenv.model.lifecycle import State
from agentenv.node.sweep import sweep
from agentenv.testing.audit import faults
from agentenv.testing.host import FakeHost, Trip, World
from agentenv.vmm.contract import VmPlan

MOST_SANDBOXES = 6
ERRORS = {"no_space": NoSpace("full"), "unavailable": Unavailable("gone")}

verbs = st.sampled_from(
    ["create", "create", "pause", "resume", "connect", "fork", "snapshot", "delete", "set_timeout", "from_snapshot",
     "delete_snapshot", "die", "collect"]
)  # fmt: skip
action = st.tuples(verbs, st.integers(0, MOST_SANDBOXES))
trouble = st.none() | st.tuples(st.integers(0, 60), st.sampled_from(sorted(ERRORS)))


@dataclass(frozen=True)
class Round:
    """Verbs that are started at once; a step of one of them may fail, and the server may die in the middle."""

    actions: list[tuple[str, int]]
    trouble: tuple[int, str] | None
    crash_at: int | None
    passes_s: float


rounds = st.builds(
    Round,
    actions=st.lists(action, min_size=1, max_size=5),
    trouble=trouble,
    crash_at=st.none() | st.integers(0, 60),
    passes_s=st.sampled_from([0.0, 0.0, 1.5, 40.0]),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rounds, min_size=1, max_size=8), st.sampled_from([0, 2]))
def test_a_node_at_rest_is_whole_whatever_happened(life: list[Round], spares: int) -> None:
    structlog.configure(processors=[_quiet])
    try:
        with tempfile.TemporaryDirectory() as root:
            asyncio.run(Life(Path(root), spares).live(life))
    finally:
        structlog.reset_defaults()


def _quiet(*_args: object) -> str:
    raise structlog.DropEvent


class Life:
    def __init__(self, root: Path, spares: int) -> None:
        self.world = World(root)
        self.spares = spares
        self.fake = FakeHost(self.world, spares=spares, max_sandboxes=MOST_SANDBOXES)
        self.marks: dict[str, bytes] = {}  # what each sandbox has written in its memory

    async def live(self, life: list[Round]) -> None:
        await self.fake.start()
        for each in life:
            await self.pass_round(each)
            await self.rest()
            assert await faults(self.fake) == [], each
            self.check_memory()
        await self.fake.stop()

    async def pass_round(self, each: Round) -> None:
        self.mark()
        with self.fake.taps.recorded():
            if each.trouble is not None:
                step, kind = each.trouble
                self.fake.taps.trip(step, Trip(error=ERRORS[kind]))
            death = None if each.crash_at is None else self.fake.taps.trip(each.crash_at, Trip())
            acting = asyncio.gather(*(self.act(*one) for one in each.actions), return_exceptions=True)
            if death is None:
                for outcome in await acting:
                    assert outcome is None or isinstance(outcome, AgentEnvError), repr(outcome)
            else:
                await self.die_at(death, acting)
        await self.world.clock.advance(each.passes_s)

    async def die_at(self, death: Trip, acting: "asyncio.Future[list[BaseException | None]]") -> None:
        reached: asyncio.Future[Any] = asyncio.ensure_future(death.reached.wait())
        waiting: list[asyncio.Future[Any]] = [reached, acting]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        following = await self.fake.crash()
        with suppress(BaseException):
            await acting
        self.fake = await following.start()

    async def act(self, verb: str, which: int) -> None:
        node = self.fake.node
        if verb == "create":
            await self.fake.create(timeout_s=600)
            return
        if verb == "collect":
            await self.fake.host.collector.collect()
            return
        if verb in ("from_snapshot", "delete_snapshot"):
            kept = [s for s in node.snapshots() if s.names != ("base",)]
            if kept:
                name = kept[which % len(kept)].id
                await (self.fake.create(template=name) if verb == "from_snapshot" else node.delete_snapshot(name))
            return
        known = sorted(s.id for s in self.fake.host.registry.all())
        if not known:
            return
        sandbox = known[which % len(known)]
        match verb:
            case "pause":
                await node.pause(sandbox)
            case "resume":
                await node.resume(sandbox, 600)
            case "connect":
                await node.connect(sandbox, 600)
            case "fork":
                await node.fork(sandbox, 1 + which % 3, 600)
            case "snapshot":
                await node.snapshot(sandbox, ["kept", None][which % 2])
            case "delete":
                await node.delete(sandbox)
            case "set_timeout":
                await node.set_timeout(sandbox, 600)
            case "die":
                for vm in self.world.hypervisor.alive:
                    if isinstance(vm.started_as, VmPlan) and vm.plan.sandbox_id == sandbox:
                        vm.end(-9)
                        self.world.storage.gone.add(vm.identity.pid)

    async def rest(self) -> None:
        """Until nothing is going on, and what the store could not take has been written."""
        for _ in range(3):
            await self.world.clock.advance(0)
            await self.fake.idle()
        await self.settle_lost()
        while self.fake.host.spares.statistics().waiting < self.spares:
            await self.world.clock.advance(0.1)
        await sweep(self.fake.host)
        for sandbox in self.fake.host.registry.all():
            await self.fake.host.registry.change(sandbox.id, metadata=sandbox.metadata)

    async def settle_lost(self) -> None:
        """A VM that has ended is noticed by a task of its own."""
        for sandbox in self.fake.host.registry.all():
            live = self.fake.host.live.get(sandbox.id)
            if live is not None and not self.world.hypervisor.processes[live.instance.process.pid].alive:
                await self.fake.became(sandbox.id, State.ERROR)

    def mark(self) -> None:
        for sandbox in self.fake.host.registry.all():
            live = self.fake.host.live.get(sandbox.id)
            if sandbox.id not in self.marks and live is not None:
                self.marks[sandbox.id] = sandbox.id.encode()
                self.world.storage.write_memory(live.instance.process.pid, 0, sandbox.id.encode())

    def check_memory(self) -> None:
        for sandbox in self.fake.host.registry.all():
            mark = self.marks.get(sandbox.id)
            if mark is None or sandbox.state is State.ERROR:
                continue
            if sandbox.capture is not None:
                image = self.world.storage.root / sandbox.capture.memory.layers[-1]
            elif sandbox.generation > 1:
                image = self.fake.host.live[sandbox.id].instance.plan.memory_path
            else:
                continue  # still only in the process
            assert image.read_bytes()[: len(mark)] == mark
