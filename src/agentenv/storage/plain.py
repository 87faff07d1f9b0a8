"""The plain back end: raw and qcow2 files for disks, flat files for memory, in one directory.

Needs nothing but a file system with holes. Nothing here outlives this process but the
files: VMMs open them directly.
"""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from agentenv.model.errors import NotFound, Unavailable, Unsupported
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.blobs import put_blob, usage_of
from agentenv.storage.compaction import Compaction
from agentenv.storage.contract import Collected, Frozen, SwitchDisk, Usage
from agentenv.storage.disks import Disks
from agentenv.storage.files import remove_files
from agentenv.storage.inventory import Inventory, Layer, inspect_layers
from agentenv.storage.layout import Layout, blob_names, new_blob_id, open_root
from agentenv.storage.memories import Memories
from agentenv.storage.owners import Owners
from agentenv.storage.records import OwnerRecord, broken_records, load_records, remove_record, save_record
from agentenv.storage.workers import Workers

_WORKERS: Final = 4
_BACKGROUND_WORKERS: Final = 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Open:
    """Everything that exists between start and close."""

    layout: Layout
    lock: int
    inventory: Inventory
    owners: Owners
    compaction: Compaction
    disks: Disks
    memories: Memories
    workers: Workers
    background: Workers
    unowned: frozenset[LayerId]
    """Uppers whose owners' records are damaged: kept until someone has looked at those."""


class PlainStorage:
    """`Storage` over the directory *root*, which it locks while it is started."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: _Open | None = None

    @property
    def balloon_safe(self) -> bool:
        """No: a balloon punches holes into the file that clones share."""
        return False

    async def start(self) -> None:
        """`Conflict` if another process has the directory, `Unsupported` if a newer release wrote it."""
        if self._opened is not None:
            return
        workers, background = Workers("storage", _WORKERS), Workers("storage-background", _BACKGROUND_WORKERS)
        try:
            layout, lock = await workers.run("open the data directory", lambda _: open_root(self._root))
        except BaseException:
            await workers.close()
            raise
        try:
            loaded = await workers.run("read the data directory", lambda _: _load(layout))
        except BaseException:
            os.close(lock)
            await workers.close()
            raise
        inventory, owners, unowned = loaded
        compaction = Compaction(layout, background, inventory)
        self._opened = _Open(
            layout=layout,
            lock=lock,
            inventory=inventory,
            owners=owners,
            compaction=compaction,
            disks=Disks(layout, inventory, owners, compaction, workers, background),
            memories=Memories(layout, inventory, owners, workers, background),
            workers=workers,
            background=background,
            unowned=unowned,
        )

    async def close(self) -> None:
        """Let go of the directory. Idempotent; what runs in the background is given up, and undone."""
        if (opened := self._opened) is None:
            return
        self._opened = None
        await opened.compaction.close()
        await opened.background.close()
        await opened.workers.close()
        os.close(opened.lock)

    # Disks

    async def create_disk(self, owner: str, stack: Stack) -> BlockTarget:
        return await self._open.disks.create(owner, stack)

    async def open_disk(self, owner: str) -> BlockTarget:
        return await self._open.disks.open(owner)

    async def seal_disk(self, owner: str, switch: SwitchDisk) -> Stack:
        return await self._open.disks.seal(owner, switch)

    async def recover_disk(self, owner: str, pid: int | None) -> None:
        await self._open.disks.recover(owner, pid)

    async def import_disk(self, source: Path, size_bytes: int) -> Stack:
        return await self._open.disks.import_raw(source, size_bytes)

    # Memory

    async def attach_memory(self, owner: str, source: Stack | Frozen) -> Path:
        if isinstance(source, Frozen):
            raise _cannot_freeze()
        return await self._open.memories.attach(owner, source)

    async def fill_memory(self, owner: str, pid: int) -> None:
        await self._open.memories.fill(owner, pid)

    async def capture_memory(self, owner: str, pid: int) -> Stack:
        return await self._open.memories.capture(owner, pid)

    async def freeze_memory(self, owner: str, pid: int) -> Frozen:
        """`Unsupported`: *owner*'s process *pid* is captured while it is paused."""
        del owner, pid
        raise _cannot_freeze()

    async def capture_frozen(self, frozen: Frozen) -> Stack:
        """`NotFound`: no memory was frozen here, *frozen* neither."""
        raise NotFound(f"no frozen memory {frozen.id}")

    async def thaw(self, frozen: Frozen) -> None:
        """Nothing to do: *frozen* is not from here."""

    async def flatten_memory(self, stack: Stack) -> Stack:
        return await self._open.memories.flatten(stack)

    # Both

    async def detach(self, owner: str) -> None:
        opened = self._open
        async with opened.owners.hold(owner):
            record = opened.owners.find(owner)
            if record.memory is None:
                return
            new = OwnerRecord(owner, record.disk)
            await opened.workers.run(
                f"detach the memory of {owner}",
                lambda _: save_record(opened.layout, new, over_durable=opened.owners.is_durable(owner)),
                landed=lambda _: opened.owners.put(new),
            )

    async def remove(self, owner: str) -> None:
        opened = self._open
        async with opened.owners.hold(owner):
            disk = opened.owners.find(owner).disk
            uppers = [upper for upper in (disk.upper, disk.next) if upper is not None] if disk is not None else []
            await opened.workers.run(
                f"remove {owner}",
                lambda _: _remove_owner(opened, owner, uppers),
                landed=lambda removed: _forget_owner(opened, owner, removed),
            )

    def owners(self) -> frozenset[str]:
        return self._open.owners.names()

    # Immutable parts

    async def put_blob(self, source: Path) -> BlobId:
        opened = self._open
        blob = new_blob_id()
        await opened.workers.run(
            f"keep {source.name}",
            lambda abort: put_blob(opened.layout, source, blob, abort),
            landed=lambda _: opened.inventory.add_blob(blob),
        )
        opened.inventory.pin((), [blob])
        return blob

    def blob_path(self, blob: BlobId) -> Path:
        """`NotFound` if there is none."""
        opened = self._open
        path = opened.layout.blob(blob)
        opened.inventory.require_blob(blob)
        return path

    def pin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        self._open.inventory.pin(layers, blobs)

    def unpin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        self._open.inventory.unpin(layers, blobs)

    async def collect(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> Collected:
        opened = self._open
        doomed_layers = _unneeded_layers(opened, layers)
        doomed_blobs = opened.inventory.blobs() - {*blobs, *opened.inventory.pinned_blobs}
        # From this step on nobody can ask for them, so nobody can be using one when it goes.
        for layer in doomed_layers:
            opened.inventory.discard(layer.id)
        for blob in doomed_blobs:
            opened.inventory.discard_blob(blob)
        opened.compaction.forget(layer.id for layer in doomed_layers)
        paths = [opened.layout.layer(layer.id) for layer in doomed_layers]
        paths += [opened.layout.blob(blob) for blob in doomed_blobs]
        removed = await opened.background.run("remove unneeded files", lambda _: remove_files(paths))
        return Collected(len(doomed_layers), len(doomed_blobs), removed)

    async def usage(self) -> Usage:
        opened = self._open
        return await opened.workers.run("look at the file system", lambda _: usage_of(opened.layout.root))

    async def settle(self) -> None:
        """Return when no background work is left. For tests and for a quiet shutdown."""
        await self._open.compaction.drain()

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise Unavailable("storage is not started")
        return self._opened


def _cannot_freeze() -> Unsupported:
    return Unsupported("the plain back end writes memory down while the VM is paused, and only then")


def _unneeded_layers(opened: _Open, roots: Iterable[LayerId]) -> list[Layer]:
    inventory = opened.inventory
    attached = inventory.reach([*opened.owners.uppers(), *opened.owners.memory_layers(), *opened.unowned])
    if faults := inventory.faults(attached):
        # What lies below a damaged header is unknown, and someone may still rescue it.
        _log.error("no layer is removed while %s, which an owner needs, is damaged", faults[0].id)
        return []
    marked = attached | inventory.reach([*roots, *inventory.pinned_layers])
    opened.compaction.keep(marked)
    return [layer for layer in inventory.layers() if layer.sealed and layer.id not in marked]


def _load(layout: Layout) -> tuple[Inventory, Owners, frozenset[LayerId]]:
    """Read what is there and remove the uppers that a crash left without an owner."""
    loaded = load_records(layout)
    owners = Owners(loaded.records)
    layers = inspect_layers(layout)
    owned = set(owners.uppers())
    # A crash between seal and record leaves a sealed file that is still an upper.
    strays = {layer.id for layer in layers if not layer.sealed and layer.id not in owned}
    if strays and not loaded.broken:
        remove_files(layout.layer(stray) for stray in strays)
        _log.info("removed %d files that a crash left behind", len(strays))
        layers = [layer for layer in layers if layer.id not in strays]
        strays = set()
    elif strays:
        _log.warning("kept %d disks without an owner because of damaged records: %s", len(strays), loaded.broken)
    known = {layer.id for layer in layers}
    for missing in owned - known:
        _log.error("the upper %s of an owner is gone", missing)
    return Inventory(layers, blob_names(layout)), owners, frozenset(strays)


def _remove_owner(opened: _Open, owner: str, uppers: Collection[LayerId]) -> frozenset[LayerId]:
    """Remove the record and *uppers* of *owner*, and with the last damaged record the disks that nobody knows."""
    remove_record(opened.layout, owner)
    removed = frozenset(uppers) if broken_records(opened.layout) else opened.unowned.union(uppers)
    remove_files(opened.layout.layer(upper) for upper in removed)
    return removed


def _forget_owner(opened: _Open, owner: str, removed: Iterable[LayerId]) -> None:
    opened.owners.put(OwnerRecord(owner))
    for upper in removed:
        opened.inventory.discard(upper)
