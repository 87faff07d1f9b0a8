"""Writable disks: a qcow2 upper per owner above a stack of sealed layers.

A seal adds an empty upper on top and lets the VMM switch to it. The intent is in the
owner's record first. Going on with the new upper is right whether the VMM had switched
or not, since its content is that of the old one; going back is right only while
nobody can have written to it. `_settle` knows no other rule.
"""

import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from agentenv.aio.failpoints import failpoint, failpoint_nowait
from agentenv.model.errors import AgentEnvError, AlreadyExists, Exhausted, Invalid
from agentenv.model.ids import LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.compaction import HOPELESS, TOO_DEEP, Compaction
from agentenv.storage.contract import SwitchDisk
from agentenv.storage.files import SEALED_MODE, UPPER_MODE, new_file, remove_files, sync_directory, take
from agentenv.storage.inventory import Inventory, Layer
from agentenv.storage.layout import LayerKind, Layout, layer_kind, new_layer_id
from agentenv.storage.owners import Owners
from agentenv.storage.qcow2 import LARGEST_BYTES, SECTOR_BYTES, Backing, holds_data, rename_backing, write_empty
from agentenv.storage.records import DiskRecord, OwnerRecord, save_record
from agentenv.storage.workers import Abort, Workers

_PROC: Final = Path("/proc")

_log = structlog.get_logger(__name__)


class Disks:
    """The disks of one data directory."""

    def __init__(
        self,
        layout: Layout,
        inventory: Inventory,
        owners: Owners,
        compaction: Compaction,
        workers: Workers,
        background: Workers,
    ) -> None:
        self._layout = layout
        self._inventory = inventory
        self._owners = owners
        self._compaction = compaction
        self._workers = workers
        self._background = background

    async def create(self, owner: str, stack: Stack) -> BlockTarget:
        """See `Storage.create_disk`."""
        async with self._owners.hold(owner):
            record = self._owners.find(owner)
            if record.disk is not None:
                raise AlreadyExists(f"{owner} has a disk")
            _check_size(stack.size_bytes)
            self._inventory.check_stack(stack, disk=True)
            parent = self._compaction.best(stack.layers[-1]) if stack.layers else None
            upper = Layer(new_layer_id(LayerKind.QCOW2), stack.size_bytes, parent, sealed=False)
            new = replace(record, disk=DiskRecord(stack.size_bytes, upper.id))
            with self._inventory.pinned([parent] if parent else []):
                await self._workers.run(
                    f"create a disk for {owner}",
                    lambda _: self._write_upper(upper, new, over_durable=self._owners.is_durable(owner)),
                    landed=lambda _: self._note(new, upper),
                )
        if stack.layers:
            self._compaction.request(stack.layers[-1])
        return self._target(upper.id)

    async def open(self, owner: str) -> BlockTarget:
        """See `Storage.open_disk`."""
        async with self._owners.hold(owner):
            if self._owners.disk(owner).next is not None:
                await self._settle(owner, None)
            upper = self._owners.disk(owner).upper
            self._inventory.chain(upper)  # all there and sound
            return self._target(upper)

    async def seal(self, owner: str, switch: SwitchDisk) -> Stack:
        """See `Storage.seal_disk`."""
        async with self._owners.hold(owner):
            if self._owners.disk(owner).next is not None:
                await self._settle(owner, None)
            disk = self._owners.disk(owner)
            upper = self._inventory.layer(disk.upper)
            await self._bound_depth(upper)
            following = Layer(new_layer_id(LayerKind.QCOW2), disk.size_bytes, upper.id, sealed=False)
            intent = replace(self._owners.find(owner), disk=replace(disk, next=following.id))
            await self._workers.run(
                f"prepare to seal the disk of {owner}",
                lambda _: self._write_upper(following, intent, over_durable=self._owners.is_durable(owner)),
                landed=lambda _: self._note(intent, following),
            )
            try:
                await failpoint("seal.prepared")
                await switch(self._target(following.id))
                await failpoint("seal.switched")
            except BaseException:
                try:
                    await self._settle(owner, None)
                except AgentEnvError as error:
                    _log.warning("the disk of %s stays unsettled for now: %s", owner, error)
                raise
            await self._finish(owner)
            chain = self._inventory.chain(upper.id)
            self._inventory.pin(chain, ())
        self._compaction.request(upper.id)
        return Stack(chain, disk.size_bytes)

    async def recover(self, owner: str, pid: int | None) -> None:
        """See `Storage.recover_disk`."""
        async with self._owners.hold(owner):
            if self._owners.disk(owner).next is not None:
                await self._settle(owner, pid)

    async def import_raw(self, source: Path, size_bytes: int) -> Stack:
        """See `Storage.import_disk`."""
        _check_size(size_bytes)
        layer = Layer(new_layer_id(LayerKind.RAW), size_bytes)
        await self._background.run(
            f"import {source.name} as a disk",
            lambda abort: self._import(source, layer, abort),
            landed=lambda _: self._inventory.add(layer),
        )
        self._inventory.pin([layer.id], ())
        return Stack((layer.id,), size_bytes)

    # On the loop

    async def _bound_depth(self, upper: Layer) -> None:
        """Wait for a compaction that has fallen behind; `Exhausted` where there will be none."""
        depth = len(self._inventory.chain(upper.id))
        if depth <= TOO_DEEP or upper.parent is None:
            return
        await self._compaction.settle(upper.parent)
        if depth > HOPELESS and self._compaction.best(upper.parent) == upper.parent:
            raise Exhausted(f"a disk of {depth} layers that cannot be merged takes no more")

    async def _settle(self, owner: str, pid: int | None) -> None:
        """End a seal that stopped half-way: forward if anyone may use the new upper, back if nobody can."""
        record = self._owners.find(owner)
        disk = self._owners.disk(owner)
        assert disk.next is not None
        following = disk.next
        if await self._workers.run(f"settle the disk of {owner}", lambda _: self._is_used(following, pid)):
            # Its VMM may have opened the new upper and still write to the old one.
            self._compaction.refuse(disk.upper)
            await self._finish(owner)
            _log.info("seal of the disk of %s was cut short; it goes on with its new upper", owner)
            return
        back = replace(record, disk=DiskRecord(disk.size_bytes, disk.upper))
        await self._workers.run(
            f"settle the disk of {owner}",
            lambda _: self._go_back(back, following, over_durable=self._owners.is_durable(owner)),
            landed=lambda _: self._note_back(back, disk.upper, following),
        )

    async def _finish(self, owner: str) -> None:
        """Seal the old upper of a record that has two, and forget it."""
        disk = self._owners.disk(owner)
        assert disk.next is not None
        done = replace(self._owners.find(owner), disk=DiskRecord(disk.size_bytes, disk.next))
        parent = self._inventory.layer(disk.upper).parent
        best = self._compaction.best(parent) if parent else None
        with self._inventory.pinned([best] if best else []):
            await self._workers.run(
                f"seal the disk of {owner}",
                lambda _: self._seal_file(disk.upper, parent, best, done),
                landed=lambda parent: self._note_sealed(done, disk.upper, parent),
            )

    def _target(self, upper: LayerId) -> BlockTarget:
        return BlockTarget(self._layout.layer(upper), "qcow2")

    def _note(self, record: OwnerRecord, upper: Layer) -> None:
        self._inventory.add(upper)
        self._owners.put(record)

    def _note_back(self, record: OwnerRecord, upper: LayerId, dropped: LayerId) -> None:
        self._inventory.discard(dropped)
        self._inventory.mark(upper, sealed=False, parent=self._inventory.layer(upper).parent)
        self._owners.put(record)

    def _note_sealed(self, record: OwnerRecord, sealed: LayerId, parent: LayerId | None) -> None:
        self._inventory.mark(sealed, sealed=True, parent=parent)
        self._owners.put(record)
        self._owners.put_durable(record.owner)

    # In threads

    def _write_upper(self, upper: Layer, record: OwnerRecord, *, over_durable: bool) -> None:
        with new_file(self._layout.layer(upper.id)) as fd:
            write_empty(fd, upper.size_bytes, _backing(upper.parent))
            save_record(self._layout, record, over_durable=over_durable)
        failpoint_nowait("disk.recorded")

    def _is_used(self, upper: LayerId, pid: int | None) -> bool:
        path = self._layout.layer(upper)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if holds_data(fd):
                return True
        finally:
            os.close(fd)
        return is_open(path, pid)

    def _seal_file(
        self, upper: LayerId, parent: LayerId | None, best: LayerId | None, record: OwnerRecord
    ) -> LayerId | None:
        """Make *upper* immutable and durable, and *record* durable.

        Return what *upper* lies on now: *parent*, or its equal *best*.

        What the caller records next refers to *upper* as it is now: a power failure must not
        bring back a record in which it is still written to.
        """
        fd = os.open(self._layout.layer(upper), os.O_RDWR | os.O_CLOEXEC)
        try:
            # A VMM that still reads this file read its header when it opened it.
            same_format = parent is not None and best is not None and layer_kind(parent) is layer_kind(best)
            if best != parent and best is not None and same_format and rename_backing(fd, best):
                parent = best
            os.fsync(fd)
            os.fchmod(fd, SEALED_MODE)
        finally:
            os.close(fd)
        sync_directory(self._layout.layers)
        failpoint_nowait("seal.sealed")
        save_record(self._layout, record, over_durable=True)
        sync_directory(self._layout.owners)
        return parent

    def _go_back(self, record: OwnerRecord, dropped: LayerId, *, over_durable: bool) -> None:
        assert record.disk is not None
        self._layout.layer(record.disk.upper).chmod(UPPER_MODE)  # the crash may have come after it was sealed
        save_record(self._layout, record, over_durable=over_durable)
        remove_files([self._layout.layer(dropped)])

    def _import(self, source: Path, layer: Layer, abort: Abort) -> None:
        status = source.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > layer.size_bytes:
            raise Invalid(f"{source.name} is not a file that fits a disk of {layer.size_bytes} bytes")
        target = self._layout.layer(layer.id)
        take(source, target, self._layout.new_temporary(), abort, size_bytes=layer.size_bytes)


def is_open(path: Path, pid: int | None) -> bool:
    """Whether process *pid*, or any process at all for None, has the file *path* open. Blocks.

    Goes by names and never touches what is behind a descriptor: that may hang.
    """
    name = str(path)
    for process in [_PROC / str(pid)] if pid is not None else [p for p in _PROC.iterdir() if p.name.isdigit()]:
        try:
            descriptors = list((process / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            if pid is not None:
                return True  # it cannot be told, and going forward is always right
            continue
        for descriptor in descriptors:
            with suppress(OSError):
                if str(descriptor.readlink()) == name:
                    return True
    return False


def _backing(parent: LayerId | None) -> Backing | None:
    if parent is None:
        return None
    return Backing(parent, "raw" if layer_kind(parent) is LayerKind.RAW else "qcow2")


def _check_size(size_bytes: int) -> None:
    if not 0 < size_bytes <= LARGEST_BYTES or size_bytes % SECTOR_BYTES:
        raise Invalid(f"a disk cannot have {size_bytes} bytes", hint="use a multiple of 512, at most 64 TiB")
