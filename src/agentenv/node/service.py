"""A node at work: each verb in a task of its own, one at a time on each sandbox.

This is where `agentenv.node.contract.Node` meets the verbs. It decides who joins,
who waits and who is cut short; what a verb does is in the verb's own module.
"""

import uuid
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

import structlog

from agentenv.guest.contract import GuestMetrics
from agentenv.model.errors import Conflict, Invalid, NotFound
from agentenv.model.ids import SandboxId, new_sandbox_id, parse_sandbox_id
from agentenv.model.lifecycle import State
from agentenv.model.machine import Machine
from agentenv.model.policy import EgressPolicy
from agentenv.model.sandbox import CreateSandbox, Forked, OnTimeout, Sandbox
from agentenv.model.snapshot import Snapshot, Source
from agentenv.node import console, create, destroy, egress, figures, fork, give_up, pause, resume, snapshot
from agentenv.node.contract import LogLine, NodeInfo, Route, SignatureCheck, Tokens
from agentenv.node.expire import Expiry
from agentenv.node.host import Host
from agentenv.node.reconcile import Repaired, reconcile
from agentenv.node.still import KILL, live_of
from agentenv.node.sweep import sweep_for_ever

T = TypeVar("T")
log = structlog.get_logger(__name__)
METRICS_TIMEOUT_S = 5.0


class NodeService:
    """See `agentenv.node.contract.Node`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._counts = figures.Counts()
        self._gauge = figures.Gauge()
        self._stopping = False
        self._expiry = Expiry(
            host.clock,
            host.registry,
            host.operations,
            host.tasks,
            kill=self.delete,
            pause=self.pause,
            give_up=self._give_up,
        )

    async def start(self) -> Repaired:
        """Repair what an earlier server left, then keep deadlines and collect garbage."""
        for sandbox in await self._host.store.sandboxes():
            self._host.registry.load(sandbox)
        await self._host.catalogue.load()
        self._host.quarantined = tuple(await self._host.store.quarantined())
        repaired = await reconcile(self._host)
        self._host.tasks.start("expiry", self._expiry.run())
        self._host.tasks.start("sweeper", sweep_for_ever(self._host))
        if self._host.quarantined:
            log.error(
                "records cannot be read; nothing is collected until they are repaired",
                ids=[record.id for record in self._host.quarantined],
            )
        else:
            self._host.tasks.start("collector", self._host.collector.run())
        self._host.spares.start(self._likely())
        self._host.tasks.start("machine gauge", self._gauge.run(self._host.clock))
        return repaired

    async def stop(self) -> None:
        """Let operations end; leave VMs running, for the next server to take over."""
        self._stopping = True
        await self._host.operations.close()
        await self._host.tasks.close()
        for held in list(self._host.held.values()):
            await held.agent.close()
        await self._host.spares.close()

    # Sandboxes

    async def create(self, request: CreateSandbox) -> Sandbox:
        self._host.catalogue.find(request.template)
        sandbox_id = new_sandbox_id()
        return await self._run(sandbox_id, "create", lambda: self._create(sandbox_id, request))

    async def _create(self, sandbox_id: SandboxId, request: CreateSandbox) -> Sandbox:
        """Counted here, not where the caller waits: one that hung up may have made a sandbox all the same."""
        self._counts.starting += 1
        try:
            created = await create.create(self._host, sandbox_id, request)
        except BaseException:
            self._counts.create_fails += 1
            raise
        finally:
            self._counts.starting -= 1
        self._counts.create_successes += 1
        return created

    async def pause(self, sandbox_id: str) -> Sandbox:
        known = self._known(sandbox_id)
        return await self._run(known, "pause", lambda: pause.pause(self._host, known))

    async def resume(self, sandbox_id: str, timeout_s: int, *, on_timeout_pause: bool | None = None) -> Sandbox:
        known = self._known(sandbox_id)
        on_timeout = None if on_timeout_pause is None else (OnTimeout.PAUSE if on_timeout_pause else OnTimeout.KILL)
        return await self._run(known, "resume", lambda: resume.resume(self._host, known, timeout_s, on_timeout))

    async def connect(self, sandbox_id: str, timeout_s: int) -> tuple[Sandbox, bool]:
        create.check_timeout(self._host, timeout_s)
        known = self._known(sandbox_id)
        # From now, not from when it runs again: then whoever joins a resume finds nothing left to extend.
        wanted = self._host.clock.now() + timedelta(seconds=timeout_s)
        with self._expiry.put_off(known):
            await self._host.operations.settle(known)
            resumed = self.get(known).state is State.PAUSED
            if resumed:
                # Somebody else may resume it first: then their result is ours, and so is the longer life.
                await self._run(known, "resume", lambda: resume.resume(self._host, known, timeout_s, None))
            return await self._extend(known, wanted), resumed

    async def wake(self, sandbox_id: str) -> Sandbox:
        known = self._known(sandbox_id)
        await self._host.operations.settle(known)
        sandbox = self.get(known)
        if sandbox.state is State.PAUSED and not sandbox.auto_resume:
            raise Conflict("the sandbox is paused and does not resume by itself")
        sandbox, _ = await self.connect(known, self._host.settings.auto_resume_timeout_s)
        return sandbox

    async def fork(self, sandbox_id: str, count: int, timeout_s: int) -> Sequence[Forked]:
        known = self._known(sandbox_id)
        return await self._by_itself(f"fork {known}", lambda: fork.fork(self._host, known, count, timeout_s))

    async def snapshot(self, sandbox_id: str, name: str | None) -> Snapshot:
        known = self._known(sandbox_id)
        return await self._by_itself(f"snapshot {known}", lambda: snapshot.snapshot(self._host, known, name))

    async def delete(self, sandbox_id: str) -> None:
        known = self._host.registry.get(parse_sandbox_id(sandbox_id)).id
        await self._host.operations.cut(known, KILL, lambda: destroy.delete(self._host, known))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> Sandbox:
        create.check_timeout(self._host, timeout_s)
        known = self._known(sandbox_id)

        async def move() -> Sandbox:
            live_of(self._host, known)
            ends_at = self._host.clock.now() + timedelta(seconds=timeout_s)
            return await self._host.registry.change(known, ends_at=ends_at)

        with self._expiry.put_off(known):
            return await self._in_turn(known, "set timeout", move)

    async def extend(self, sandbox_id: str, duration_s: int) -> Sandbox:
        if not 0 <= duration_s <= self._host.settings.max_timeout_s:
            raise Invalid(f"duration must be 0 to {self._host.settings.max_timeout_s} seconds, not {duration_s}")
        known = self._known(sandbox_id)
        with self._expiry.put_off(known):
            return await self._extend(known, self._host.clock.now() + timedelta(seconds=duration_s))

    async def _extend(self, known: SandboxId, wanted: datetime) -> Sandbox:
        async def move() -> Sandbox:
            live_of(self._host, known)
            sandbox = self.get(known)
            if sandbox.ends_at is None or sandbox.ends_at >= wanted:
                return sandbox
            return await self._host.registry.change(known, ends_at=wanted)

        await self._host.operations.settle(known)
        sandbox = self.get(known)
        if sandbox.state is State.RUNNING and (sandbox.ends_at is None or sandbox.ends_at >= wanted):
            return sandbox
        return await self._in_turn(known, "extend", move)

    async def set_egress(self, sandbox_id: str, policy: EgressPolicy) -> Sandbox:
        known = self._known(sandbox_id)
        return await self._in_turn(known, "set egress", lambda: egress.set_egress(self._host, known, policy))

    def get(self, sandbox_id: str) -> Sandbox:
        return self._host.registry.get(self._known(sandbox_id))

    def sandboxes(self) -> Sequence[Sandbox]:
        visible = [s for s in self._host.registry.all() if s.state not in (State.KILLING, State.CREATING)]
        return sorted(visible, key=lambda s: (-s.created_at.timestamp(), s.id))

    def tokens(self, sandbox: Sandbox) -> Tokens:
        credentials = self._host.credentials
        return Tokens(
            envd=credentials.envd_token(sandbox.id) if sandbox.secure else None,
            traffic=None if sandbox.ingress.allow_public_traffic else credentials.traffic_token(sandbox.id),
        )

    def route(self, sandbox_id: str) -> Route:
        sandbox = self.get(sandbox_id)
        live = self._host.live.get(sandbox.id)
        if live is None or not sandbox.state.has_guest or sandbox.state is State.RESUMING:
            raise Conflict(f"the sandbox is {sandbox.state}" + (f": {sandbox.reason}" if sandbox.reason else ""))
        tokens = self.tokens(sandbox)
        return Route(sandbox, live.slot.address, tokens.envd, tokens.traffic)

    def find_by_signature(self, matches: SignatureCheck) -> Sandbox | None:
        for sandbox in self._host.registry.all():
            serves = sandbox.secure and sandbox.state is State.RUNNING
            if serves and matches(self._host.credentials.envd_token(sandbox.id)):
                return sandbox
        return None

    async def metrics(self, sandbox_id: str) -> GuestMetrics:
        known = self._known(sandbox_id)
        agent = live_of(self._host, known).agent
        token = self.tokens(self.get(known)).envd
        return await agent.metrics(access_token=token, timeout_s=METRICS_TIMEOUT_S)

    async def logs(self, sandbox_id: str, *, limit: int) -> Sequence[LogLine]:
        sandbox = self.get(sandbox_id)
        live = self._host.live.get(sandbox.id)
        said = await live.instance.console() if live is not None else sandbox.reason or ""
        return console.log_lines(said, self._host.clock.now(), limit)

    # Snapshots and templates

    def snapshots(self, source: Source | None = None) -> Sequence[Snapshot]:
        return self._host.catalogue.all(source)

    def find_snapshot(self, id_or_name: str) -> Snapshot:
        return self._host.catalogue.find(id_or_name)

    async def delete_snapshot(self, id_or_name: str) -> None:
        snapshot = self._host.catalogue.find(id_or_name)
        await self._run(snapshot.id, "delete", lambda: self._delete_snapshot(snapshot))

    async def _delete_snapshot(self, snapshot: Snapshot) -> None:
        await self._host.catalogue.remove(snapshot)
        self._host.collector.nudge()

    # The node

    def info(self) -> NodeInfo:
        return figures.info(self._host, self._counts, self._gauge, stopping=self._stopping)

    # Inside

    def _likely(self) -> list[Machine]:
        """What will be started first, as far as the last starts tell: the machine of what was started last."""
        known = self._host.catalogue.all()
        return [max(known, key=lambda s: s.last_spawned_at or s.created_at).machine] if known else []

    def _known(self, sandbox_id: str) -> SandboxId:
        """The id of a sandbox that is there and not being deleted; `NotFound` otherwise."""
        known = self._host.registry.get(parse_sandbox_id(sandbox_id))
        if known.state is State.KILLING or self._host.operations.current(known.id) == KILL:
            raise NotFound("no such sandbox")
        return known.id

    async def _run(self, key: str, name: str, verb: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._host.operations.run(key, name, verb)

    async def _in_turn(self, known: SandboxId, name: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run *change* as an operation that nothing else joins: the sandbox stays in its state meanwhile."""
        return await self._run(known, f"{name} {uuid.uuid4()}", change)

    async def _by_itself(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run *work* as an operation that holds no sandbox's turn and that nothing joins: it takes turns inside."""
        return await self._run(f"{name} {uuid.uuid4()}", name, work)

    async def _give_up(self, sandbox_id: SandboxId, ends_at: datetime, why: str) -> None:
        await self._run(sandbox_id, "give up", lambda: give_up.give_up(self._host, sandbox_id, ends_at, why))
