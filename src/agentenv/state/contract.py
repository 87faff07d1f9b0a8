"""What the node may ask of its durable state: the journal that a restart reads.

Every change of a sandbox is a compare-and-set on (state, generation), so that two
writers cannot both win, and is durable when the call returns.
"""

from dataclasses import dataclass
from typing import Protocol

from agentenv.model.ids import SandboxId, SnapshotId
from agentenv.model.lifecycle import State
from agentenv.model.sandbox import Sandbox
from agentenv.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that this release cannot read. It stays in the store until it is deleted.

    Whoever removes orphans keeps what belongs to ``id`` and what ``record`` (the stored
    text) names: a record that a newer release wrote must be whole when it comes back.
    """

    kind: str  # "sandbox" | "snapshot"
    id: str
    reason: str
    record: str


class Store(Protocol):
    """One node's records. All calls raise `Unavailable` when the database is, `NoSpace` when its disk is full."""

    async def start(self) -> None:
        """Open the database and bring its schema to this release. `Unsupported` if it is from a newer one."""
        ...

    async def close(self) -> None: ...

    # Sandboxes

    async def insert_sandbox(self, sandbox: Sandbox) -> None:
        """`AlreadyExists` if the id is there."""
        ...

    async def update_sandbox(self, sandbox: Sandbox, *, state: State, generation: int) -> None:
        """Replace the record, if it still stands at (*state*, *generation*); else `Conflict` (or `NotFound`)."""
        ...

    async def delete_sandbox(self, sandbox_id: SandboxId) -> None:
        """Idempotent."""
        ...

    async def sandboxes(self) -> list[Sandbox]:
        """Every record that can be read, oldest first; `quarantined` has the others. For the start."""
        ...

    # Snapshots and templates

    async def insert_snapshot(self, snapshot: Snapshot, *, replace_names: bool = False) -> None:
        """Add a record with its names, all or nothing. `AlreadyExists` if a name is taken.

        With *replace_names* a taken name moves here from its present holder, in the same transaction.
        """
        ...

    async def delete_snapshot(self, snapshot_id: SnapshotId) -> None:
        """Idempotent; its names become free."""
        ...

    async def snapshots(self) -> list[Snapshot]:
        """Every record that can be read, oldest first. For the start."""
        ...

    async def count_spawn(self, snapshot: Snapshot) -> None:
        """Store the spawn count and time of *snapshot*; need not be durable at once."""
        ...

    # Both

    async def quarantined(self) -> list[Quarantined]:
        """Every record that cannot be read. For the start."""
        ...
