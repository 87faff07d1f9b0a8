"""A node without machines: every verb of `agentenv.node.contract.Node`, in memory.

It keeps the promises of the contract (the lifecycle table, joins, which kind is raised
when), so that an edge tested on it meets the same answers as on a real node. A test
makes verbs fail with `failures`, and stops one half-way with `hold`.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from ipaddress import IPv4Address
from typing import Final
from uuid import uuid4

from agentenv.aio.clock import Clock, SystemClock
from agentenv.aio.operations import Operations
from agentenv.guest.contract import GuestMetrics
from agentenv.model.errors import AlreadyExists, Conflict, Invalid, NotFound
from agentenv.model.ids import BlobId, new_sandbox_id, new_snapshot_id, parse_name, parse_sandbox_id
from agentenv.model.lifecycle import Event, State, next_state
from agentenv.model.machine import Fingerprint, Machine
from agentenv.model.policy import EgressPolicy
from agentenv.model.sandbox import CreateSandbox, Forked, OnTimeout, Sandbox
from agentenv.model.snapshot import Capture, Snapshot, Source, Stack
from agentenv.node.contract import DiskUse, LogLine, NodeInfo, Route, SignatureCheck, Tokens

MACHINE: Final = Machine(vcpu_count=2, memory_mib=512, disk_mib=2048)
FINGERPRINT: Final = Fingerprint("fake", "1.0", "none", "none", "0" * 64)
ENVD_VERSION: Final = "0.6.1"
AUTO_RESUME_MIN_S: Final = 300
MAX_TIMEOUT_S: Final = 30 * 24 * 3600
FORK_MAX: Final = 100

_REFERENCE = re.compile(r"(?:[^/:]+/)?(?P<name>[^/:]+)(?::(?P<tag>[^/:]+))?")


@dataclass(slots=True)
class Hold:
    """Stops one verb in the middle: ``reached`` is set when it gets there, ``released`` lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class FakeNode:
    """One host that runs nothing, with the template ``base``.

    Attributes:
        failures: verb name to the exception it raises, until removed (``"create"``, ``"metrics"``, ...).
        fork_failures: index of a child to the error it gets.
        asked: every `CreateSandbox` that arrived, in order.
        console: lines per sandbox id; `logs` reads it.
        address: where `route` says that guests are.
        status: what `info` reports.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.failures: dict[str, Exception] = {}
        self.fork_failures: dict[int, Exception] = {}
        self.asked: list[CreateSandbox] = []
        self.console: dict[str, list[LogLine]] = {}
        self.address = IPv4Address("127.0.0.1")
        self.status = "ready"
        self._holds: dict[str, Hold] = {}
        self._operations = Operations()
        self._sandboxes: dict[str, Sandbox] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._last = self.clock.now()
        self._successes = 0
        self._fails = 0
        self.add_template("base")

    # What a test may do to it

    def hold(self, verb: str) -> Hold:
        """Make the next calls of *verb* stop in the middle until the hold is released."""
        return self._holds.setdefault(verb, Hold())

    def add_template(self, name: str | None, *, machine: Machine = MACHINE) -> Snapshot:
        return self._add_snapshot(name, source=Source.BUILD, machine=machine)

    def add_sandbox(self, **changes: object) -> Sandbox:
        """A running sandbox out of nowhere, with any field of `Sandbox` as given."""
        template = self.find_snapshot("base")
        now = self._instant()
        sandbox = Sandbox(
            id=new_sandbox_id(),
            template_id=template.id,
            template_name=template.name,
            state=State.RUNNING,
            generation=1,
            machine=template.machine,
            created_at=now,
            started_at=now,
            ends_at=now + timedelta(seconds=300),
            envd_version=ENVD_VERSION,
        )
        return self._put(replace(sandbox, **changes))  # type: ignore[arg-type]  # names are checked by replace

    def lose(self, sandbox_id: str, reason: str) -> Sandbox:
        """Its VM died by itself."""
        sandbox = self.get(sandbox_id)
        return self._put(replace(sandbox, state=next_state(sandbox.state, Event.LOST), reason=reason, ends_at=None))

    async def close(self) -> None:
        for hold in self._holds.values():
            hold.released.set()
        await self._operations.close()

    # Sandboxes

    async def create(self, request: CreateSandbox) -> Sandbox:
        sandbox_id = new_sandbox_id()
        _check(1 <= request.timeout_s <= MAX_TIMEOUT_S)
        return await self._operations.run(sandbox_id, "create", lambda: self._create(sandbox_id, request))

    async def pause(self, sandbox_id: str) -> Sandbox:
        return await self._operations.run(sandbox_id, "pause", lambda: self._pause(sandbox_id))

    async def resume(self, sandbox_id: str, timeout_s: int, *, on_timeout_pause: bool | None = None) -> Sandbox:
        _check(1 <= timeout_s <= MAX_TIMEOUT_S)
        return await self._operations.run(
            sandbox_id, "resume", lambda: self._resume(sandbox_id, timeout_s, on_timeout_pause)
        )

    async def connect(self, sandbox_id: str, timeout_s: int) -> tuple[Sandbox, bool]:
        await self._operations.settle(sandbox_id)
        if self.get(sandbox_id).state is State.RUNNING:
            return await self.extend(sandbox_id, timeout_s), False
        return await self.resume(sandbox_id, timeout_s), True

    async def wake(self, sandbox_id: str) -> Sandbox:
        sandbox = self.get(sandbox_id)
        if sandbox.state is State.PAUSED and not sandbox.auto_resume:
            raise Conflict("the sandbox is paused and does not resume by itself")
        return (await self.connect(sandbox_id, AUTO_RESUME_MIN_S))[0]

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> Sequence[Forked]:
        _check(1 <= timeout_s <= MAX_TIMEOUT_S and 1 <= count <= FORK_MAX)
        return await self._operations.run(
            sandbox_id, f"fork {uuid4()}", lambda: self._fork(sandbox_id, count, timeout_s)
        )

    async def snapshot(self, sandbox_id: str, name: str | None) -> Snapshot:
        return await self._operations.run(sandbox_id, f"snapshot {uuid4()}", lambda: self._snapshot(sandbox_id, name))

    async def delete(self, sandbox_id: str) -> None:
        known = parse_sandbox_id(sandbox_id)
        if known not in self._sandboxes:
            raise NotFound(f"no sandbox {sandbox_id}")
        await self._operations.cut(known, "delete", lambda: self._delete(known))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> Sandbox:
        sandbox = await self._running("set_timeout", sandbox_id)
        return self._put(replace(sandbox, ends_at=self._in(timeout_s)))

    async def extend(self, sandbox_id: str, duration_s: int) -> Sandbox:
        sandbox = await self._running("extend", sandbox_id)
        ends_at = self._in(duration_s)
        return self._put(replace(sandbox, ends_at=max(ends_at, sandbox.ends_at or ends_at)))

    async def set_egress(self, sandbox_id: str, policy: EgressPolicy) -> Sandbox:
        sandbox = await self._running("set_egress", sandbox_id)
        return self._put(replace(sandbox, egress=policy))

    def get(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(parse_sandbox_id(sandbox_id))
        if sandbox is None or sandbox.state is State.KILLING:
            raise NotFound(f"no sandbox {sandbox_id}")
        return sandbox

    def sandboxes(self) -> Sequence[Sandbox]:
        alive = [one for one in self._sandboxes.values() if one.state not in (State.KILLING, State.CREATING)]
        return sorted(sorted(alive, key=lambda one: one.id), key=lambda one: one.created_at, reverse=True)

    def tokens(self, sandbox: Sandbox) -> Tokens:
        return Tokens(
            envd=f"envd-{sandbox.id}" if sandbox.secure else None,
            traffic=None if sandbox.ingress.allow_public_traffic else f"traffic-{sandbox.id}",
        )

    def route(self, sandbox_id: str) -> Route:
        sandbox = self.get(sandbox_id)
        if not sandbox.state.has_guest or sandbox.state is State.RESUMING:
            raise Conflict(f"the sandbox is {sandbox.state}")
        tokens = self.tokens(sandbox)
        return Route(sandbox, self.address, tokens.envd, tokens.traffic)

    def find_by_signature(self, matches: SignatureCheck) -> Sandbox | None:
        for sandbox in self.sandboxes():
            token = self.tokens(sandbox).envd
            if sandbox.state is State.RUNNING and token is not None and matches(token):
                return sandbox
        return None

    async def metrics(self, sandbox_id: str) -> GuestMetrics:
        sandbox = await self._running("metrics", sandbox_id)
        return GuestMetrics(
            timestamp=int(self.clock.now().timestamp()),
            cpu_count=sandbox.machine.vcpu_count,
            cpu_used_pct=1.5,
            memory_total=sandbox.machine.memory_bytes,
            memory_used=64 << 20,
            memory_cache=16 << 20,
            disk_total=sandbox.machine.disk_mib << 20,
            disk_used=300 << 20,
        )

    async def logs(self, sandbox_id: str, *, limit: int) -> Sequence[LogLine]:
        await self._step("logs")
        lines = self.console.get(self.get(sandbox_id).id, [])
        return lines[max(0, len(lines) - limit) :]

    # Snapshots and templates

    def snapshots(self, source: Source | None = None) -> Sequence[Snapshot]:
        kept = [one for one in self._snapshots.values() if source is None or one.source is source]
        return sorted(sorted(kept, key=lambda one: one.id), key=lambda one: one.created_at, reverse=True)

    def find_snapshot(self, id_or_name: str) -> Snapshot:
        match = _REFERENCE.fullmatch(id_or_name)
        if match is not None and match["tag"] in (None, "default"):
            for snapshot in self._snapshots.values():
                if match["name"] == snapshot.id or match["name"] in snapshot.names:
                    return snapshot
        raise NotFound(f"no template or snapshot {id_or_name[:140]!r}")

    async def delete_snapshot(self, id_or_name: str) -> None:
        await self._step("delete_snapshot")
        del self._snapshots[self.find_snapshot(id_or_name).id]

    # The node

    def info(self) -> NodeInfo:
        alive = [one for one in self._sandboxes.values() if one.state is not State.KILLING]
        paused = [one for one in alive if one.state is State.PAUSED]
        held = [one for one in alive if one.state not in (State.PAUSED, State.ERROR)]
        return NodeInfo(
            id="fake-node", version="0.0.0", status=self.status, driver="fake", accelerator="none",
            cpu_architecture="x86_64", cpu_family="6", cpu_model="1", cpu_model_name="None",
            cpu_count=2, cpu_percent=12.5, memory_total_bytes=8 << 30, memory_used_bytes=1 << 30,
            disks=(DiskUse("/", "/dev/vda", "ext4", 1 << 30, 10 << 30),),
            running=sum(one.state is State.RUNNING for one in alive),
            starting=sum(one.state in (State.CREATING, State.RESUMING) for one in alive),
            paused=len(paused),
            errored=sum(one.state is State.ERROR for one in alive),
            create_successes=self._successes, create_fails=self._fails,
            allocated_cpu=sum(one.machine.vcpu_count for one in held),
            allocated_memory_bytes=sum(one.machine.memory_bytes for one in held),
            paused_allocated_cpu=sum(one.machine.vcpu_count for one in paused),
            paused_allocated_memory_bytes=sum(one.machine.memory_bytes for one in paused),
        )  # fmt: skip

    # How it works

    async def _step(self, verb: str) -> None:
        if (hold := self._holds.get(verb)) is not None:
            hold.reached.set()
            await hold.released.wait()
        if (error := self.failures.get(verb)) is not None:
            raise error

    async def _create(self, sandbox_id: str, request: CreateSandbox) -> Sandbox:
        self.asked.append(request)
        try:
            template = self.find_snapshot(request.template)
            now = self._instant()
            self.add_sandbox(
                id=sandbox_id, state=State.CREATING, template_id=template.id, template_name=template.name,
                machine=template.machine, created_at=now, started_at=now, ends_at=None, on_timeout=request.on_timeout,
                auto_resume=request.auto_resume, secure=request.secure, metadata=request.metadata, env=request.env,
                egress=request.egress, ingress=request.ingress,
            )  # fmt: skip
            await self._step("create")
        except BaseException:
            self._fails += 1
            self._sandboxes.pop(sandbox_id, None)
            raise
        self._successes += 1
        self._snapshots[template.id] = replace(template, spawn_count=template.spawn_count + 1, last_spawned_at=now)
        return self._apply(sandbox_id, Event.DONE, ends_at=self._in(request.timeout_s))

    async def _pause(self, sandbox_id: str) -> Sandbox:
        sandbox = self._apply(sandbox_id, Event.PAUSE)
        try:
            await self._step("pause")
        except BaseException:
            self._apply(sandbox_id, Event.ROLLED_BACK)
            raise
        return self._apply(sandbox_id, Event.DONE, ends_at=None, capture=_capture(sandbox))

    async def _resume(self, sandbox_id: str, timeout_s: int, on_timeout_pause: bool | None) -> Sandbox:
        sandbox = self._apply(sandbox_id, Event.RESUME)
        try:
            await self._step("resume")
        except BaseException:
            self._apply(sandbox_id, Event.ROLLED_BACK)
            raise
        on_timeout = sandbox.on_timeout
        if on_timeout_pause is not None:
            on_timeout = OnTimeout.PAUSE if on_timeout_pause else OnTimeout.KILL
        return self._apply(
            sandbox_id, Event.DONE, ends_at=self._in(timeout_s), on_timeout=on_timeout, capture=None,
            generation=sandbox.generation + 1,
        )  # fmt: skip

    async def _fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[Forked]:
        source = self._apply(sandbox_id, Event.FORK)
        try:
            await self._step("fork")
        except BaseException:
            self._apply(sandbox_id, Event.ROLLED_BACK)
            raise
        self._apply(sandbox_id, Event.DONE)
        children = []
        for index in range(count):
            if (error := self.fork_failures.get(index)) is not None:
                children.append(Forked(error=error))
                continue
            now = self._instant()
            child = replace(
                source, id=new_sandbox_id(), state=State.RUNNING, created_at=now, started_at=now, generation=1,
                ends_at=self._in(timeout_s),
            )  # fmt: skip
            children.append(Forked(sandbox=self._put(child)))
        return children

    async def _snapshot(self, sandbox_id: str, name: str | None) -> Snapshot:
        if name is not None and any(name in one.names for one in self.snapshots(Source.BUILD)):
            raise AlreadyExists(f"{parse_name(name)!r} is the name of a template")
        sandbox = self._apply(sandbox_id, Event.SNAPSHOT)
        try:
            await self._step("snapshot")
        except BaseException:
            self._apply(sandbox_id, Event.ROLLED_BACK)
            raise
        self._apply(sandbox_id, Event.DONE)
        return self._add_snapshot(name, source=Source.SANDBOX, machine=sandbox.machine, sandbox=sandbox)

    async def _delete(self, sandbox_id: str) -> None:
        if sandbox_id in self._sandboxes:  # a create that was cut short has taken it away already
            self._apply(sandbox_id, Event.KILL)
            await self._step("delete")
            del self._sandboxes[sandbox_id]

    async def _running(self, verb: str, sandbox_id: str) -> Sandbox:
        await self._operations.settle(sandbox_id)
        self.get(sandbox_id)
        await self._step(verb)
        sandbox = self.get(sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise Conflict(f"the sandbox is {sandbox.state}")
        return sandbox

    def _apply(self, sandbox_id: str, event: Event, **changes: object) -> Sandbox:
        sandbox = self._sandboxes.get(parse_sandbox_id(sandbox_id))
        if sandbox is None:
            raise NotFound(f"no sandbox {sandbox_id}")
        return self._put(replace(sandbox, state=next_state(sandbox.state, event), **changes))  # type: ignore[arg-type]  # names are checked by replace

    def _put(self, sandbox: Sandbox) -> Sandbox:
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    def _add_snapshot(
        self, name: str | None, *, source: Source, machine: Machine, sandbox: Sandbox | None = None
    ) -> Snapshot:
        now = self._instant()
        holder = next((one for one in self._snapshots.values() if name in one.names), None)
        if holder is not None:
            self._snapshots[holder.id] = replace(holder, names=tuple(one for one in holder.names if one != name))
        snapshot = Snapshot(
            id=new_snapshot_id(),
            names=(name,) if name is not None else (),
            source=source,
            sandbox_id=sandbox.id if sandbox is not None else None,
            machine=machine,
            fingerprint=FINGERPRINT,
            capture=_capture(sandbox),
            created_at=now,
            envd_version=ENVD_VERSION,
        )
        self._snapshots[snapshot.id] = snapshot
        return snapshot

    def _instant(self) -> datetime:
        """Now, but later than the last time: the order of what a test makes is never in doubt."""
        self._last = max(self.clock.now(), self._last + timedelta(microseconds=1))
        return self._last

    def _in(self, seconds: int) -> datetime:
        return self.clock.now() + timedelta(seconds=seconds)


def _check(in_bounds: bool) -> None:
    if not in_bounds:
        raise Invalid("a time or a count is out of its bounds")


def _capture(sandbox: Sandbox | None) -> Capture:
    owner = sandbox.id if sandbox is not None else new_sandbox_id()
    return Capture(device_state=BlobId("none"), memory=Stack((), MACHINE.memory_bytes), disk=None, control_of=owner)
