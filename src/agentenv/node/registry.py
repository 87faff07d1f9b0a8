"""Every sandbox of this node as it stands now, in memory and in the store.

The store is written first and compares state and generation; the memory follows
with no await in between, so readers never see what a restart would not find.
One lock per sandbox orders its writers. Whoever must know of a change (routes,
deadlines, metrics) listens here: the only way up.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import structlog

from agentenv.aio.lock import KeyedLock
from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import AgentEnvError, NotFound
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State, next_state
from agentenv.model.sandbox import Sandbox
from agentenv.state.contract import Store

Listener: TypeAlias = Callable[[Sandbox | None, Sandbox | None], None]
"""Called with the value before and after; None before it exists and when it is gone. Must not block."""

log = structlog.get_logger(__name__)


class Registry:
    """The sandboxes of one node."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sandboxes: dict[SandboxId, Sandbox] = {}
        # Where each record stands: what the next write compares with. Behind the memory after `conclude` only.
        self._recorded: dict[SandboxId, tuple[State, int]] = {}
        self._locks: KeyedLock[SandboxId] = KeyedLock()
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        counts = {state.value: n for state in State if (n := sum(s.state is state for s in self.all()))}
        return f"<Registry {counts}>"

    def __len__(self) -> int:
        return len(self._sandboxes)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def load(self, sandbox: Sandbox) -> None:
        """Take in a record read from the store at start."""
        self._recorded[sandbox.id] = (sandbox.state, sandbox.generation)
        self._show(sandbox)

    def reserve(self, sandbox: Sandbox) -> None:
        """Make *sandbox* known, without a record yet: nothing of it may outlive this process until `change`."""
        self._show(sandbox)

    def get(self, sandbox_id: SandboxId) -> Sandbox:
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise NotFound("no such sandbox") from None

    def find(self, sandbox_id: SandboxId) -> Sandbox | None:
        return self._sandboxes.get(sandbox_id)

    def all(self) -> list[Sandbox]:
        return list(self._sandboxes.values())

    async def apply(self, sandbox_id: SandboxId, event: Event, **changes: Any) -> Sandbox:
        """Move a sandbox along the lifecycle table, durably; raise `Conflict` for a move it may not make."""
        return await self._move(sandbox_id, event, changes)

    async def conclude(self, sandbox_id: SandboxId, event: Event, **changes: Any) -> Sandbox:
        """`apply`, even if the store cannot write now: then the move is seen in memory only.

        For outcomes that a restart arrives at from the older record by itself, such as a
        rollback: a full disk must not leave a sandbox half-way. The next write catches up.
        """
        return await self._move(sandbox_id, event, changes, needed=False)

    async def change(self, sandbox_id: SandboxId, **changes: Any) -> Sandbox:
        """Change fields, durably, in whatever state the sandbox is."""
        async with self._locks.hold(sandbox_id):
            after = dataclasses.replace(self.get(sandbox_id), **changes)
            await self._write(after)
            return after

    async def forget(self, sandbox_id: SandboxId) -> None:
        """Delete the record; idempotent."""
        async with self._locks.hold(sandbox_id):
            if sandbox_id in self._recorded:
                await to_its_end(f"delete the record of {sandbox_id}", self._store.delete_sandbox(sandbox_id))
                self._recorded.pop(sandbox_id, None)
            before = self._sandboxes.pop(sandbox_id, None)
            if before is not None:
                self._tell(before, None)

    async def _move(
        self, sandbox_id: SandboxId, event: Event, changes: Mapping[str, Any], *, needed: bool = True
    ) -> Sandbox:
        async with self._locks.hold(sandbox_id):
            before = self.get(sandbox_id)
            after = dataclasses.replace(before, state=next_state(before.state, event), **changes)
            await self._write(after, needed=needed)
            return after

    async def _write(self, after: Sandbox, *, needed: bool = True) -> None:
        """Write, and return only when it is known whether that happened, cancelled or not.

        A caller cut short in the middle could not tell otherwise whether its move is
        recorded, and would undo a pause that a restart will find committed.
        """
        await to_its_end(f"record {after.id}", self._write_through(after, needed=needed))

    async def _write_through(self, after: Sandbox, *, needed: bool) -> None:
        try:
            if (recorded := self._recorded.get(after.id)) is not None:
                state, generation = recorded
                await self._store.update_sandbox(after, state=state, generation=generation)
            else:
                await self._store.insert_sandbox(after)
            self._recorded[after.id] = (after.state, after.generation)
        except AgentEnvError as error:
            if needed:
                raise
            log.warning("a move is not recorded yet", sandbox=after.id, state=after.state.value, error=str(error))
        self._show(after)

    def _show(self, sandbox: Sandbox) -> None:
        before = self._sandboxes.get(sandbox.id)
        self._sandboxes[sandbox.id] = sandbox
        self._tell(before, sandbox)

    def _tell(self, before: Sandbox | None, after: Sandbox | None) -> None:
        for listener in self._listeners:
            try:
                listener(before, after)
            except Exception:  # what happened has happened, whatever a listener makes of it
                log.exception("a listener of the registry failed")
