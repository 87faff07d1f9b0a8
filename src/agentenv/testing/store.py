"""A store in memory, under the same contract suite as the real one, that fails when told to."""

from dataclasses import replace

from agentenv.model.errors import AlreadyExists, Conflict, NotFound, Unavailable
from agentenv.model.ids import SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Snapshot
from agentenv.state.contract import Quarantined


class MemoryStore:
    """A `Store` that outlives `close`: start it again and it is what a restarted server finds.

    ``failures`` maps the name of a call to the exception that its next use raises
    instead of changing anything. ``broken`` is what `quarantined` tells.
    """

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.broken: list[Quarantined] = []
        self._sandboxes: dict[SandboxId, Sandbox] = {}
        self._snapshots: dict[SnapshotId, Snapshot] = {}
        self._open = False

    async def start(self) -> None:
        self._fail_if_told("start")
        self._open = True

    async def close(self) -> None:
        self._open = False

    async def insert_sandbox(self, sandbox: Sandbox) -> None:
        self._enter("insert_sandbox")
        if sandbox.id in self._sandboxes:
            raise AlreadyExists(f"sandbox {sandbox.id} exists")
        self._sandboxes[sandbox.id] = sandbox

    async def update_sandbox(self, sandbox: Sandbox, *, state: State, generation: int) -> None:
        self._enter("update_sandbox")
        found = self._sandboxes.get(sandbox.id)
        if found is None:
            raise NotFound(f"no record of sandbox {sandbox.id}")
        if (found.state, found.generation) != (state, generation):
            raise Conflict(
                f"sandbox {sandbox.id} is {found.state} at generation {found.generation}, not {state} at {generation}"
            )
        self._sandboxes[sandbox.id] = sandbox

    async def delete_sandbox(self, sandbox_id: SandboxId) -> None:
        self._enter("delete_sandbox")
        self._sandboxes.pop(sandbox_id, None)
        self._mend("sandbox", sandbox_id)

    async def sandboxes(self) -> list[Sandbox]:
        self._enter("sandboxes")
        return sorted(self._sandboxes.values(), key=lambda sandbox: (sandbox.created_at, sandbox.id))

    async def insert_snapshot(self, snapshot: Snapshot, *, replace_names: bool = False) -> None:
        self._enter("insert_snapshot")
        names = set(snapshot.names)
        taken = {name for other in self._snapshots.values() for name in other.names}
        repeated = len(names) != len(snapshot.names)
        if snapshot.id in self._snapshots or repeated or (names & taken and not replace_names):
            raise AlreadyExists(f"snapshot {snapshot.id} exists, or one of its names is taken")
        for other in self._snapshots.values():
            kept = tuple(name for name in other.names if name not in names)
            self._snapshots[other.id] = replace(other, names=kept)
        self._snapshots[snapshot.id] = snapshot

    async def delete_snapshot(self, snapshot_id: SnapshotId) -> None:
        self._enter("delete_snapshot")
        self._snapshots.pop(snapshot_id, None)
        self._mend("snapshot", snapshot_id)

    async def snapshots(self) -> list[Snapshot]:
        self._enter("snapshots")
        return sorted(self._snapshots.values(), key=lambda snapshot: (snapshot.created_at, snapshot.id))

    async def count_spawn(self, snapshot: Snapshot) -> None:
        self._enter("count_spawn")
        found = self._snapshots.get(snapshot.id)
        if found is not None:
            self._snapshots[snapshot.id] = replace(
                found, spawn_count=snapshot.spawn_count, last_spawned_at=snapshot.last_spawned_at
            )

    async def quarantined(self) -> list[Quarantined]:
        self._enter("quarantined")
        return list(self.broken)

    def _enter(self, call: str) -> None:
        if not self._open:
            raise Unavailable("the state database is closed")
        self._fail_if_told(call)

    def _fail_if_told(self, call: str) -> None:
        error = self.failures.pop(call, None)
        if error is not None:
            raise error

    def _mend(self, kind: str, record_id: str) -> None:
        self.broken = [row for row in self.broken if (row.kind, row.id) != (kind, record_id)]
