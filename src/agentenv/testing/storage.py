"""Storage with whole copies instead of layers, for tests of verbs: simple enough to be obviously right.

Every layer is a plain file with all the bytes that the stack up to it shows. Guests are
made up: what process *pid* wrote is told with `write_memory`, and a pid in ``gone`` has
ended. It passes the same contract suite as the real back ends.
"""

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from agentenv.model.errors import AgentEnvError, AlreadyExists, Bug, Invalid, NotFound, Unavailable
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.contract import Collected, Frozen, SwitchDisk, Usage
from agentenv.storage.files import copy_range, data_extents, new_file, open_sealed
from agentenv.storage.layout import check_owner

_WITHOUT_OWNER: Final = frozenset({"import_disk", "flatten_memory", "put_blob", "capture_frozen", "thaw"})


@dataclass(frozen=True, slots=True)
class _Disk:
    upper: LayerId
    below: Stack


@dataclass(slots=True)
class FakeStorage:
    """See `agentenv.storage.contract.Storage`. *root* is an empty directory.

    Tests set ``fail`` to make a call raise and ``stall`` to make it hang until ``go`` is
    set; ``reached`` tells that it hangs. Both are by name of the call, take effect
    before it changes anything, and last until taken back. Records outlive `close`:
    `start` again for what a restarted server finds; pins are gone then.
    """

    root: Path
    balloon_safe: bool = True
    fail: dict[str, AgentEnvError] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[str, str]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    free_bytes: int = 1 << 40
    _open: bool = False
    _disks: dict[str, _Disk] = field(default_factory=dict)
    _attached: dict[str, Stack] = field(default_factory=dict)
    _stacks: dict[LayerId, Stack] = field(default_factory=dict)  # what each layer is the top of
    _blobs: set[BlobId] = field(default_factory=set)
    _layer_pins: Counter[LayerId] = field(default_factory=Counter)
    _blob_pins: Counter[BlobId] = field(default_factory=Counter)
    _written: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    _frozen: dict[str, Stack] = field(default_factory=dict)  # as a capture at that moment, not pinned

    def write_memory(self, pid: int, offset: int, data: bytes) -> None:
        """Let process *pid* have written *data* at byte *offset* of its memory."""
        self._written.setdefault(pid, []).append((offset, data))

    @property
    def layers(self) -> frozenset[LayerId]:
        return frozenset(self._stacks)

    @property
    def blobs(self) -> frozenset[BlobId]:
        return frozenset(self._blobs)

    @property
    def pins(self) -> int:
        """How many pins are held, each counted."""
        return self._layer_pins.total() + self._blob_pins.total()

    async def start(self) -> None:
        await self._step("start")
        _make(self.root)
        self._open = True

    async def close(self) -> None:
        self._open = False
        self._layer_pins.clear()
        self._blob_pins.clear()
        self._frozen.clear()

    # Disks

    async def create_disk(self, owner: str, stack: Stack) -> BlockTarget:
        await self._enter("create_disk", owner)
        if owner in self._disks:
            raise AlreadyExists(f"{owner} has a disk")
        self._check(stack, unit=512)
        upper = self._new_layer()
        _copy(self._top(stack), self.root / upper, stack.size_bytes)
        self._disks[owner] = _Disk(upper, stack)
        return self._target(upper)

    async def open_disk(self, owner: str) -> BlockTarget:
        await self._enter("open_disk", owner)
        return self._target(self._disk(owner).upper)

    async def seal_disk(self, owner: str, switch: SwitchDisk) -> Stack:
        await self._enter("seal_disk", owner)
        disk = self._disk(owner)
        following = self._new_layer()
        _copy(self.root / disk.upper, self.root / following, disk.below.size_bytes)
        try:
            await switch(self._target(following))
        except BaseException:
            (self.root / following).unlink()
            raise
        sealed = Stack((*disk.below.layers, disk.upper), disk.below.size_bytes)
        self._disks[owner] = _Disk(following, sealed)
        return self._add(sealed)

    async def recover_disk(self, owner: str, pid: int | None) -> None:
        """Nothing to do: a seal is never cut short here, whatever *pid* has open."""
        del pid
        await self._enter("recover_disk", owner)
        self._disk(owner)

    async def import_disk(self, source: Path, size_bytes: int) -> Stack:
        await self._enter("import_disk", source.name)
        _check_size(size_bytes, unit=512)
        if _size_of(source) > size_bytes:
            raise Invalid(f"{source.name} does not fit a disk of {size_bytes} bytes")
        layer = self._new_layer()
        _move(source, self.root / layer, size_bytes)
        return self._add(Stack((layer,), size_bytes))

    # Memory

    async def attach_memory(self, owner: str, source: Stack | Frozen) -> Path:
        await self._enter("attach_memory", owner)
        if owner in self._attached:
            raise AlreadyExists(f"{owner} has memory attached")
        stack = self._picture(source) if isinstance(source, Frozen) else source
        self._check(stack, unit=4096)
        self._attached[owner] = stack
        path = self._top(stack)
        if path is None:
            path = self.root / f"zero-{stack.size_bytes}"
            _copy(None, path, stack.size_bytes)
        return path

    async def fill_memory(self, owner: str, pid: int) -> None:
        await self._enter("fill_memory", owner)
        self._memory(owner)
        self._require_process(pid)

    async def capture_memory(self, owner: str, pid: int) -> Stack:
        await self._enter("capture_memory", owner)
        stack = self._write_down(owner, pid)
        self.pin(stack.layers, ())
        return stack

    async def freeze_memory(self, owner: str, pid: int) -> Frozen:
        await self._enter("freeze_memory", owner)
        frozen = uuid.uuid4().hex
        self._frozen[frozen] = stack = self._write_down(owner, pid)
        return Frozen(frozen, stack.size_bytes, 0.0, sum(len(data) for _, data in self._written.get(pid, ())))

    async def capture_frozen(self, frozen: Frozen) -> Stack:
        await self._enter("capture_frozen", "")
        stack = self._picture(frozen)
        self.pin(stack.layers, ())
        return stack

    async def thaw(self, frozen: Frozen) -> None:
        await self._enter("thaw", "")
        self._frozen.pop(frozen.id, None)

    async def flatten_memory(self, stack: Stack) -> Stack:
        await self._enter("flatten_memory", "")
        self._check(stack, unit=4096)
        if len(stack.layers) < 2:
            self.pin(stack.layers, ())
            return stack
        flat = self._new_layer()
        _copy(self._top(stack), self.root / flat, stack.size_bytes)
        return self._add(Stack((flat,), stack.size_bytes))

    # Both

    async def detach(self, owner: str) -> None:
        await self._enter("detach", owner)
        self._attached.pop(owner, None)

    async def remove(self, owner: str) -> None:
        await self._enter("remove", owner)
        self._attached.pop(owner, None)
        if (disk := self._disks.pop(owner, None)) is not None:
            (self.root / disk.upper).unlink()

    def owners(self) -> frozenset[str]:
        return frozenset(self._disks.keys() | self._attached.keys())

    # Immutable parts

    async def put_blob(self, source: Path) -> BlobId:
        await self._enter("put_blob", source.name)
        blob = BlobId(uuid.uuid4().hex)
        _move(source, self.root / blob, _size_of(source))
        self._blobs.add(blob)
        self.pin((), [blob])
        return blob

    def blob_path(self, blob: BlobId) -> Path:
        if blob not in self._blobs:
            raise NotFound(f"no blob {blob}")
        return self.root / blob

    def pin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        if missing := [*(set(layers) - self._stacks.keys()), *(set(blobs) - self._blobs)]:
            raise NotFound(f"no {missing[0]}")
        self._layer_pins.update(layers)
        self._blob_pins.update(blobs)

    def unpin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        if not (Counter(layers) <= self._layer_pins and Counter(blobs) <= self._blob_pins):
            raise Bug("unpinned what is not pinned")
        self._layer_pins -= Counter(layers)
        self._blob_pins -= Counter(blobs)

    async def collect(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> Collected:
        kept = {*layers, *self._layer_pins}
        held = (disk.below for disk in self._disks.values()), self._attached.values(), self._frozen.values()
        for stack in chain(*held):
            kept.update(stack.layers)
        kept.update(*(self._stacks[layer].layers for layer in kept if layer in self._stacks))
        doomed_layers = self._stacks.keys() - kept
        doomed_blobs = self._blobs - {*blobs, *self._blob_pins}
        await self._step("collect")
        for layer in doomed_layers:
            del self._stacks[layer]
        self._blobs -= doomed_blobs
        freed = _remove(self.root / name for name in (*doomed_layers, *doomed_blobs))
        return Collected(len(doomed_layers), len(doomed_blobs), freed)

    async def usage(self) -> Usage:
        await self._step("usage")
        used = sum(self._blocks(path) for path in self.root.iterdir())
        return Usage(used, self.free_bytes, used + self.free_bytes)

    async def _enter(self, name: str, subject: str) -> None:
        if name not in _WITHOUT_OWNER:
            check_owner(subject)
        self.calls.append((name, subject))
        await self._step(name)

    async def _step(self, name: str) -> None:
        if not self._open and name != "start":
            raise Unavailable("storage is not started")
        if name in self.stall:
            self.reached.set()
            await self.go.wait()
        if (error := self.fail.get(name)) is not None:
            raise error

    def _write_down(self, owner: str, pid: int) -> Stack:
        """What *pid* has now as a stack, not pinned."""
        stack = self._memory(owner)
        self._require_process(pid)
        layer = self._new_layer()
        _copy(self._top(stack), self.root / layer, stack.size_bytes)
        _overwrite(self.root / layer, self._written.get(pid, ()))
        captured = Stack((*stack.layers, layer), stack.size_bytes)
        self._stacks[layer] = captured
        return captured

    def _picture(self, frozen: Frozen) -> Stack:
        if (stack := self._frozen.get(frozen.id)) is None:
            raise NotFound(f"no frozen memory {frozen.id}")
        return stack

    def _add(self, stack: Stack) -> Stack:
        """Make the top of *stack* a layer, and return the stack pinned."""
        self._stacks[stack.layers[-1]] = stack
        self.pin(stack.layers, ())
        return stack

    def _check(self, stack: Stack, *, unit: int) -> None:
        _check_size(stack.size_bytes, unit=unit)
        for layer in stack.layers:
            if layer not in self._stacks:
                raise NotFound(f"no layer {layer}")
        if stack.layers:
            known = self._stacks[stack.layers[-1]]
            fits = known.size_bytes == stack.size_bytes or (unit == 512 and known.size_bytes < stack.size_bytes)
            if known.layers != stack.layers or not fits:
                raise Invalid("these layers do not make this stack")

    def _disk(self, owner: str) -> _Disk:
        if (disk := self._disks.get(owner)) is None:
            raise NotFound(f"{owner} has no disk")
        return disk

    def _memory(self, owner: str) -> Stack:
        if (stack := self._attached.get(owner)) is None:
            raise NotFound(f"{owner} has no memory attached")
        return stack

    def _require_process(self, pid: int) -> None:
        if pid in self.gone:
            raise Unavailable(f"process {pid} has ended")

    def _top(self, stack: Stack) -> Path | None:
        return self.root / stack.layers[-1] if stack.layers else None

    def _target(self, upper: LayerId) -> BlockTarget:
        return BlockTarget(self.root / upper, "raw")

    @staticmethod
    def _new_layer() -> LayerId:
        return LayerId(uuid.uuid4().hex)

    @staticmethod
    def _blocks(path: Path) -> int:
        return path.stat().st_blocks * 512


def _make(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)


def _check_size(size_bytes: int, *, unit: int) -> None:
    if not 0 < size_bytes <= 1 << 50 or size_bytes % unit:
        raise Invalid(f"{size_bytes} bytes cannot be")


def _size_of(source: Path) -> int:
    if source.is_symlink() or source.is_dir():
        raise Invalid(f"{source.name} is not a file")
    if not source.exists():
        raise NotFound(f"no file {source.name}")
    return source.stat().st_size


def _copy(source: Path | None, target: Path, size_bytes: int) -> None:
    target.unlink(missing_ok=True)
    with new_file(target) as writing:
        os.ftruncate(writing, size_bytes)
        if source is None:
            return
        with open_sealed(source) as reading:
            for start, end in data_extents(reading):
                copy_range(reading, writing, start, start, end - start, _never)


def _never() -> None:
    """The copy is always wanted."""


def _move(source: Path, target: Path, size_bytes: int) -> None:
    _copy(source, target, size_bytes)
    source.unlink()


def _overwrite(target: Path, writes: Iterable[tuple[int, bytes]]) -> None:
    with target.open("r+b", buffering=0) as file:
        for offset, data in writes:
            file.seek(offset)
            file.write(data)


def _remove(paths: Iterable[Path]) -> int:
    freed = 0
    for path in paths:
        freed += path.stat().st_blocks * 512
        path.unlink()
    return freed
