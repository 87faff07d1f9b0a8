"""What a verb may ask of storage: writable disks, memory images, and captures of both.

The caller names everything by *owner* (a sandbox id) and never learns how bytes
are kept. Attachments outlive this process, and `owners` lists them, so that a
restarted server can pick up or remove what an earlier one left.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack

SwitchDisk: TypeAlias = Callable[[BlockTarget], Awaitable[None]]
"""Points the guest at a new block target; given by the verb, called only by back ends that need it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes on the file system that holds the data: as it reports them, reserve excluded."""

    used_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed."""

    layers: int
    blobs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A picture of a process's memory that stays as it is while the process runs on.

    ``copied_s``: how long the process stood still for it. ``changed_bytes``: what a capture
    of it will write at most, and what keeping it may cost the host in memory.
    """

    id: str
    memory_bytes: int
    copied_s: float
    changed_bytes: int


class Storage(Protocol):
    """One back end. Raises `NotFound` for a missing layer or owner, `NoSpace` when the
    disk is full (and then nothing has changed), `Bug` for a layer whose bytes are wrong,
    `Invalid` for a size, a stack or an owner's name that cannot be. A back end may refuse
    layers that were not made on top of each other (`Invalid`).

    What `import_disk`, `seal_disk`, `capture_memory`, `capture_frozen`, `flatten_memory` and `put_blob` return
    comes pinned, each part once: the caller unpins it when its records list it, or when
    it is not wanted after all. A call that is cancelled ends once nothing is being
    written for it any more; what it did by then stands, unpinned, and `detach`, `remove`
    and `collect` undo it.
    """

    @property
    def balloon_safe(self) -> bool:
        """Whether memory paths survive the hole punches of a balloon."""
        ...

    async def start(self) -> None:
        """Open the back end; finish or undo what a crash left half done."""
        ...

    async def close(self) -> None: ...

    # Disks

    async def create_disk(self, owner: str, stack: Stack) -> BlockTarget:
        """Give *owner* a writable disk that starts out as *stack*. `AlreadyExists` if it has one."""
        ...

    async def open_disk(self, owner: str) -> BlockTarget:
        """Return the disk that *owner* has, ready for a VMM."""
        ...

    async def seal_disk(self, owner: str, switch: SwitchDisk) -> Stack:
        """Make what *owner* has written so far immutable and durable, and return it all as a stack.

        The owner goes on with an empty upper above it. The guest is paused. When this
        raises, the disk is as it was before. Crash-safe at every point: `recover_disk` settles it.
        """
        ...

    async def recover_disk(self, owner: str, pid: int | None) -> None:
        """Settle a seal that a crash cut short; *pid* is the VMM that has the disk open, if any."""
        ...

    async def import_disk(self, source: Path, size_bytes: int) -> Stack:
        """Take a raw image file (moved, not copied, where possible) as the base of a stack."""
        ...

    # Memory

    async def attach_memory(self, owner: str, source: Stack | Frozen) -> Path:
        """Return a path to map privately for *owner*. An empty stack is zeroed memory.

        `AlreadyExists` if it has memory attached: `detach` comes first. From a frozen memory
        it starts before anything is written down; a `capture_frozen` must follow.
        """
        ...

    async def fill_memory(self, owner: str, pid: int) -> None:
        """Finish the memory that process *pid* has just mapped from *owner*'s path.

        A back end whose path already shows the whole stack does nothing here; one
        that keeps changed pages apart writes them into the process. Called once,
        before any device state is loaded. After it raised, the process is of no use.
        """
        ...

    async def capture_memory(self, owner: str, pid: int) -> Stack:
        """Write down what process *pid* changed in its mapping since *owner* was attached.

        The VM is paused and stays untouched. Returns the attached stack with the
        changes on top, durable. Cost grows with changed pages, not with memory. `Unavailable`
        if the process ends meanwhile or is not the one that maps the memory.
        """
        ...

    async def freeze_memory(self, owner: str, pid: int) -> Frozen:
        """Take a picture of the memory that process *pid* has mapped from *owner*'s path.

        The VM is paused, and may run on as soon as this returns; `capture_frozen` writes the picture
        down meanwhile, and `thaw` gives it up. Raises `Unsupported` where only a paused VM can be
        captured, `Exhausted` if the host has no memory for it, `Unavailable` as `capture_memory`; the VM is as it was.
        """
        ...

    async def capture_frozen(self, frozen: Frozen) -> Stack:
        """The same as `capture_memory` when the picture was taken. `NotFound` once it is thawed."""
        ...

    async def thaw(self, frozen: Frozen) -> None:
        """Give the picture up. Idempotent. Who has attached it keeps what it needs."""
        ...

    async def flatten_memory(self, stack: Stack) -> Stack:
        """A stack with the same bytes that many guests can share best; may be the same one.

        For snapshots that will be started often. Not on anybody's hot path.
        """
        ...

    # Both

    async def detach(self, owner: str) -> None:
        """No process uses *owner*'s memory or disk any more; the disk is kept. Idempotent."""
        ...

    async def remove(self, owner: str) -> None:
        """Forget *owner*, its writable disk included. Idempotent."""
        ...

    def owners(self) -> frozenset[str]:
        """Every owner that has a disk or an attached memory."""
        ...

    # Immutable parts

    async def put_blob(self, source: Path) -> BlobId:
        """Take *source* (moved) as an immutable blob, durable."""
        ...

    def blob_path(self, blob: BlobId) -> Path:
        """`NotFound` if there is none."""
        ...

    def pin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        """Keep these from the collector until `unpin`; counted, in this process only. `NotFound`: none is pinned."""
        ...

    def unpin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None: ...

    async def collect(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> Collected:
        """Remove every layer and blob that is neither given here, nor pinned, nor part of an attachment.

        The caller passes everything that its records refer to: all layers of a stack. Parts made after the
        call began are left alone.
        """
        ...

    async def usage(self) -> Usage: ...
