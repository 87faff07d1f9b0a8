"""Every sandbox of this node as it stands now, in memory and in the store.

The store is written first and compares state and generation; the memory follows
with no await in between, so readers never see what a restart would not find.
One lock per sandbox orders its writers. Whoever must know of a change (routes,
deadlines, metrics) listens here: the only way up.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from agentenv.aio.tasks import spawn
from agentenv.model.errors import NotFound
from agentenv.model.ids import SandboxId
from agentenv.model.lifecycle import Event, State, next_state
from agentenv.model.sandbox import Sandbox
from agentenv.state.contract import Store

Listener: TypeAlias = Callable[[Sandbox | None, Sandbox | None], None]
"""Called with the value before and after; None before it exists and when it is gone. Must not block."""


class Registry:
    """The sandboxes of one node."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sandboxes: dict[SandboxId, Sandbox] = {}
        self._recorded: set[SandboxId] = set()
        self._locks: dict[SandboxId, asyncio.Lock] = {}
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        counts = {state.value: n for state in State if (n := sum(s.state is state for s in self.all()))}
        return f"<Registry {counts}>"

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def load(self, sandbox: Sandbox) -> None:
        """Take in a record read from the store at start."""
        self._recorded.add(sandbox.id)
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
        async with self._lock(sandbox_id):
            before = self.get(sandbox_id)
            after = dataclasses.replace(before, state=next_state(before.state, event), **changes)
            await self._write(before, after)
            return after

    async def change(self, sandbox_id: SandboxId, **changes: Any) -> Sandbox:
        """Change fields, durably, in whatever state the sandbox is."""
        async with self._lock(sandbox_id):
            before = self.get(sandbox_id)
            after = dataclasses.replace(before, **changes)
            await self._write(before, after)
            return after

    async def forget(self, sandbox_id: SandboxId) -> None:
        """Delete the record; idempotent."""
        async with self._lock(sandbox_id):
            if sandbox_id in self._recorded:
                await self._store.delete_sandbox(sandbox_id)
                self._recorded.discard(sandbox_id)
            before = self._sandboxes.pop(sandbox_id, None)
            self._locks.pop(sandbox_id, None)
            if before is not None:
                self._tell(before, None)

    async def _write(self, before: Sandbox, after: Sandbox) -> None:
        """Write, and return only when it is known whether that happened, cancelled or not.

        A caller cut short in the middle could not tell otherwise whether its move is
        recorded, and would undo a pause that a restart will find committed.
        """
        writing = spawn(f"record {after.id}", self._write_through(before, after))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            writing.result()
            raise

    async def _write_through(self, before: Sandbox, after: Sandbox) -> None:
        if after.id in self._recorded:
            await self._store.update_sandbox(after, state=before.state, generation=before.generation)
        else:
            await self._store.insert_sandbox(after)
            self._recorded.add(after.id)
        if after.id in self._sandboxes:
            self._show(after)

    def _show(self, sandbox: Sandbox) -> None:
        before = self._sandboxes.get(sandbox.id)
        self._sandboxes[sandbox.id] = sandbox
        self._tell(before, sandbox)

    def _tell(self, before: Sandbox | None, after: Sandbox | None) -> None:
        for listener in self._listeners:
            listener(before, after)

    def _lock(self, sandbox_id: SandboxId) -> asyncio.Lock:
        return self._locks.setdefault(sandbox_id, asyncio.Lock())
