"""A node's parts joined from fakes, where every step of every verb can be made to go wrong.

Between the verbs and the fakes sit `Taps`: they number the calls, and a test makes the
n-th one fail or hang. So a test can run a verb once, see its steps, and then break it
at each of them. `FakeHost.crash` ends a server without any of its clean-up reaching the
host, and gives the next server on what is left.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import structlog
from prometheus_client import CollectorRegistry

from agentenv.aio.operations import Operations
from agentenv.aio.tasks import Tasks
from agentenv.guest.contract import Agents
from agentenv.model.ids import SandboxId, new_sandbox_id, new_snapshot_id
from agentenv.model.lifecycle import State
from agentenv.model.machine import Machine
from agentenv.model.sandbox import CreateSandbox, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.network.contract import Slots
from agentenv.node.catalogue import Catalogue, parts_of
from agentenv.node.collect import Collector
from agentenv.node.host import Host, NodeSettings
from agentenv.node.registry import Registry
from agentenv.node.service import NodeService
from agentenv.node.spares import Spares, SpareSettings
from agentenv.node.timings import Timings
from agentenv.state.contract import Store
from agentenv.storage.contract import Storage
from agentenv.testing.clock import JumpingClock
from agentenv.testing.guest import FakeGuests
from agentenv.testing.slots import FakeSlots
from agentenv.testing.storage import FakeStorage
from agentenv.testing.store import MemoryStore
from agentenv.testing.vmm import FINGERPRINT, FakeHypervisor, FakeVmm
from agentenv.vmm.contract import Vmm

MACHINE: Final = Machine(vcpu_count=1, memory_mib=1, disk_mib=1)
TEMPLATE: Final = "base"
_UNTAPPED: Final = frozenset({"wait_exit", "close", "start"})


class Crashed(BaseException):
    """The server that makes this call does not exist any more."""


@dataclass(eq=False, slots=True)
class Trip:
    """What goes wrong at one step: it raises *error*, or hangs until *go* is set.

    With *after* the call has done its work by then.
    """

    error: Exception | None = None
    after: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def happen(self) -> None:
        self.reached.set()
        if self.error is not None:
            raise self.error
        await self.go.wait()


@dataclass(slots=True)
class Taps:
    """Every call from the verbs to the parts, in order; ``store.update_sandbox``, ``instance.pause``, ..."""

    calls: list[str] = field(default_factory=list)
    severed: bool = False
    _hanging: list[Trip] = field(default_factory=list)
    _trips: dict[int, Trip] = field(default_factory=dict)
    _by_name: dict[str, Trip] = field(default_factory=dict)
    _recording_from: int = 0

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """Inside, calls are numbered from 0; afterwards the list has their names."""
        begun = self._recording_from = len(self.calls)
        names: list[str] = []
        try:
            yield names
        finally:
            names += self.calls[begun:]
            self._trips.clear()

    def trip(self, number: int, trip: Trip) -> Trip:
        """Let *trip* happen once, at call *number* of the present recording."""
        self._trips[self._recording_from + number] = trip
        return trip

    @contextmanager
    def always(self, name: str, trip: Trip) -> Iterator[Trip]:
        """Let *trip* happen at every call of *name* inside the block."""
        self._by_name[name] = trip
        try:
            yield trip
        finally:
            del self._by_name[name]

    async def call(self, name: str, work: Callable[[], Any]) -> Any:
        self.check()
        number = len(self.calls)
        self.calls.append(name)
        await asyncio.sleep(0)  # a real call always lets others run
        self.check()
        trip = self._trips.pop(number, None) or self._by_name.get(name)
        if trip is not None and not trip.after:
            await self._happen(trip)
        result = await work()
        self.check()
        if trip is not None and trip.after:
            await self._happen(trip)
        return result

    async def _happen(self, trip: Trip) -> None:
        self._hanging.append(trip)
        try:
            await trip.happen()
        finally:
            self._hanging.remove(trip)
        self.check()

    def sever(self) -> None:
        """From now on every call, also one that hangs, ends in `Crashed`."""
        self.severed = True
        for trip in self._hanging:
            trip.go.set()

    def check(self) -> None:
        if self.severed:
            raise Crashed


class Tapped:
    """Stands for *part*; its coroutine methods go through *taps*, and so do those of the VMs and agents it makes."""

    def __init__(self, part: object, name: str, taps: Taps) -> None:
        self._part = part
        self._name = name
        self._taps = taps

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._part, attribute)
        if attribute in _UNTAPPED or not callable(value):
            return value
        if not inspect.iscoroutinefunction(value):
            return self._checked(value)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(await self._taps.call(f"{self._name}.{attribute}", lambda: value(*args, **kwargs)))

        return call

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._taps.check()
            return self._wrapped(method(*args, **kwargs))

        return call

    def _wrapped(self, result: Any) -> Any:
        kinds = {"FakeInstance": "instance", "FakeAgent": "guest"}
        name = kinds.get(type(result).__name__)
        return result if name is None else Tapped(result, name, self._taps)


class FakeCredentials:
    """Secrets that say what they are."""

    def envd_token(self, sandbox_id: str) -> str:
        return f"envd-{sandbox_id}"

    def traffic_token(self, sandbox_id: str) -> str:
        return f"traffic-{sandbox_id}"

    def control_secret(self, sandbox_id: str) -> str:
        return f"control-{sandbox_id}"


@dataclass(slots=True)
class World:
    """What outlives a server: the host, its files, and the guests."""

    root: Path
    clock: JumpingClock = field(default_factory=JumpingClock)
    store: MemoryStore = field(default_factory=MemoryStore)
    hypervisor: FakeHypervisor = field(default_factory=FakeHypervisor)
    guests: FakeGuests = field(default_factory=FakeGuests)
    slots: FakeSlots = field(default_factory=FakeSlots)

    def __post_init__(self) -> None:
        self.storage = FakeStorage(self.root / "storage")

    storage: FakeStorage = field(init=False)


class FakeHost:
    """One server of *world*. Use `start`, then ``node``; ``host`` is what verbs are given."""

    def __init__(self, world: World, *, spares: int = 0, **settings: Any) -> None:
        """*spares*: how many VMMs it keeps waiting; *settings* replace those of a node."""
        self.world = world
        self._ahead = SpareSettings(spares, spares)
        self.taps = Taps()
        self.vmm = FakeVmm(world.hypervisor)
        self.metrics = CollectorRegistry()
        self._settings = settings
        store = cast("Store", Tapped(world.store, "store", self.taps))
        storage = cast("Storage", Tapped(world.storage, "storage", self.taps))
        slots = cast("Slots", Tapped(world.slots, "slots", self.taps))
        vmm = cast("Vmm", Tapped(self.vmm, "vmm", self.taps))
        registry = Registry(store)
        catalogue = Catalogue(store, storage)
        root = world.root
        places = NodeSettings(root / "run", root / "work", root / "kernel", root / "initramfs", min_free_disk_mib=1)
        self.host = Host(
            settings=replace(places, **settings),
            clock=world.clock,
            store=store,
            registry=registry,
            catalogue=catalogue,
            storage=storage,
            slots=slots,
            vmm=vmm,
            fingerprint=FINGERPRINT,
            agents=cast("Agents", Tapped(world.guests, "guests", self.taps)),
            credentials=FakeCredentials(),
            operations=Operations(),
            tasks=Tasks("node"),
            timings=Timings(self.metrics),
            collector=Collector(world.clock, registry, catalogue, storage),
            spares=Spares(vmm, slots, world.clock, root / "run/vm", self._ahead, balloon=storage.balloon_safe),
        )
        self.node = NodeService(self.host)

    async def start(self) -> "FakeHost":
        """Start it on what its world has; the first one of a world makes the template ``base``."""
        await self.world.store.start()
        await self.world.storage.start()
        if not await self.world.store.snapshots():
            await self.world.store.insert_snapshot(await self._template())
        await self.node.start()
        return self

    async def stop(self) -> None:
        """Stop as told to: VMs live on."""
        await self.node.stop()
        await self.world.storage.close()
        await self.world.store.close()

    async def crash(self) -> "FakeHost":
        """End it as SIGKILL does, and return the next server of its world, not started yet."""
        self.taps.sever()
        await self.host.operations.close()
        await self.host.tasks.close()
        await self.host.spares._tasks.close()  # noqa: SLF001 - its VMMs stay, as after a kill
        world = self.world
        await world.storage.close()
        await world.store.close()
        world.slots = world.slots.restarted()
        world.guests.open_agents = 0
        return FakeHost(world, spares=self._ahead.high, **self._settings)

    async def create(self, **request: Any) -> Sandbox:
        return await self.node.create(CreateSandbox(**{"template": TEMPLATE, "timeout_s": 300, **request}))

    def state(self, sandbox_id: str) -> State:
        found = self.host.registry.find(SandboxId(sandbox_id))
        return State.GONE if found is None else found.state

    async def became(self, sandbox_id: str, state: State) -> None:
        """Return when a sandbox is in *state*, and the operation that brought it there has ended."""
        changed = asyncio.Event()
        self.host.registry.listen(lambda _before, _after: changed.set())
        while self.state(sandbox_id) is not state:
            changed.clear()
            await changed.wait()
        await self.host.operations.settle(sandbox_id)

    async def idle(self) -> None:
        """Return when no operation is in progress on any sandbox."""
        for sandbox in self.host.registry.all():
            await self.host.operations.settle(sandbox.id)

    async def _template(self) -> Snapshot:
        storage, root = self.world.storage, self.world.root
        maker = new_sandbox_id()
        raw, state = root / "template.raw", root / "template.state"
        await asyncio.to_thread(_write_template, raw, state)
        disk = await storage.import_disk(raw, MACHINE.disk_mib << 20)
        await storage.attach_memory(maker, Stack((), MACHINE.memory_bytes))
        memory = await storage.capture_memory(maker, pid=1)
        await storage.remove(maker)
        capture = Capture(await storage.put_blob(state), memory, disk, control_of=maker)
        storage.unpin(*parts_of(capture))
        return Snapshot(
            id=new_snapshot_id(),
            names=(TEMPLATE,),
            source=Source.BUILD,
            sandbox_id=None,
            machine=MACHINE,
            fingerprint=FINGERPRINT,
            capture=capture,
            created_at=self.world.clock.now(),
            envd_version="0.0.0",
        )


def log_briefly() -> None:
    """Tracebacks of one line a frame: by default every local is printed, which is slow where much fails on purpose."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])


def _write_template(raw: Path, state: Path) -> None:
    raw.write_bytes(b"root of the template")
    state.write_text(json.dumps({"fake": "device state"}))
