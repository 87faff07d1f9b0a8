"""What there is, as far as this side has heard from the daemon. Lives on the event loop.

Changed in the step in which an answer comes, whether its caller still waits or not, and
read anew from each daemon that is met. A layer that a call has made is pinned in that same step, so
that no collection comes between.
"""

from collections.abc import Iterable
from dataclasses import replace

from agentenv.model.errors import NotFound
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.snapshot import Stack
from agentenv.storage.layered.wire import Fields, Owned, stack_of
from agentenv.storage.pins import Pins

NOTHING = Owned()


class Known:
    """Layers, blobs and owners; and the pins on the first two."""

    def __init__(self) -> None:
        self.layers: set[LayerId] = set()
        self.blobs: set[BlobId] = set()
        self.owners: dict[str, Owned] = {}
        self.frozen: frozenset[str] = frozenset()  # that were there when the last daemon was met
        self.pins = Pins()

    def owned(self, owner: str) -> Owned:
        return self.owners.get(owner, NOTHING)

    def disk(self, owner: str) -> Stack:
        """`NotFound` if it has none."""
        if (disk := self.owned(owner).disk) is None:
            raise NotFound(f"{owner} has no disk")
        return disk

    def memory(self, owner: str) -> Stack:
        """`NotFound` if none is attached."""
        if (memory := self.owned(owner).memory) is None:
            raise NotFound(f"{owner} has no memory attached")
        return memory

    def require(self, layers: Iterable[LayerId], blobs: Iterable[BlobId]) -> None:
        """`NotFound` for the first that is not there."""
        for layer in layers:
            if layer not in self.layers:
                raise NotFound(f"no layer {layer[:80]!r}")
        for blob in blobs:
            if blob not in self.blobs:
                raise NotFound(f"no blob {blob[:80]!r}")

    def attached(self) -> set[LayerId]:
        """All layers below what somebody has."""
        return {
            layer
            for owned in self.owners.values()
            for stack in (owned.disk, owned.memory)
            if stack is not None
            for layer in stack.layers
        }

    def damaged(self) -> list[str]:
        return sorted(owner for owner, owned in self.owners.items() if owned.damaged)

    def unpin(self, stack: Stack) -> None:
        self.pins.drop(stack.layers, ())

    # What an answer says

    def made(self, fields: Fields) -> Stack:
        """The stack that a call has made, known and pinned from this step on."""
        stack = stack_of(fields.get("stack"))
        self.layers.update(stack.layers)
        self.pins.add(stack.layers, ())
        return stack

    def has_disk(self, owner: str, disk: Stack) -> None:
        self.owners[owner] = replace(self.owned(owner), disk=disk)

    def has_memory(self, owner: str, memory: Stack | None) -> None:
        owned = replace(self.owned(owner), memory=memory)
        if owned.is_empty:
            self.owners.pop(owner, None)
        else:
            self.owners[owner] = owned

    def forget(self, owner: str) -> None:
        self.owners.pop(owner, None)
