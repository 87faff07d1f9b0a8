"""The layered back end: disks and memory as stacks of layers, served by the storage daemon.

Each call is asked of the daemon in the turn of its owner. When the daemon dies meanwhile, the next one is
asked what became of it: every call here can be made again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agentenv.aio.lock import KeyedLock
from agentenv.aio.tasks import Tasks
from agentenv.model.errors import AlreadyExists, Unavailable
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.blobs import put_blob, usage_of
from agentenv.storage.contract import Collected, Frozen, SwitchDisk, Usage
from agentenv.storage.layered import calls, wire
from agentenv.storage.layered.calls import DISK_UNIT_BYTES, PAGE_BYTES, Opened, check, outlasting, pinned
from agentenv.storage.layered.client import Client
from agentenv.storage.layered.known import Known
from agentenv.storage.layered.process import Places
from agentenv.storage.layered.wire import Fields
from agentenv.storage.layout import BackEnd, blob_names, check_owner, new_blob_id, open_root
from agentenv.storage.workers import Workers

T = TypeVar("T")

_WORKERS: Final = 4

_log = structlog.get_logger(__name__)


class LayeredStorage:
    """`Storage` over the directory *root*, which it locks while it is started.

    Args:
        root: the data directory.
        runtime: of the daemon's sockets and its mount: short, and the same at each start.
        program: of the daemon, a name or a path.
    """

    def __init__(self, root: Path, runtime: Path, program: str) -> None:
        self._root = root
        self._runtime = runtime
        self._program = program
        self._opened: Opened | None = None

    @property
    def balloon_safe(self) -> bool:
        """Yes: the daemon keeps the bytes of an image, whatever a VMM punches into it."""
        return True

    async def start(self) -> None:
        """Take up what is there, with the daemon that was there or a new one.

        `Conflict` if another server or daemon has the directory, `Unsupported` if a newer release or the
        other back end wrote it or the daemon cannot run here, `Unavailable` if it does not come up.
        """
        if self._opened is not None:
            return
        workers = Workers("storage", _WORKERS)
        try:
            layout, lock = await workers.run(
                "open the data directory", lambda _: open_root(self._root, BackEnd.LAYERED)
            )
        except BaseException:
            await workers.close()
            raise
        known = Known()
        client = Client(Places(layout.daemon, self._runtime.absolute()), self._program, partial(calls.learn, known))
        opened = Opened(layout, lock, client, known, KeyedLock(), workers, Tasks("storage"))
        try:
            known.blobs.update(await workers.run("read the data directory", lambda _: blob_names(layout)))
            await client.start()
        except BaseException:
            await opened.close()
            raise
        for frozen in known.frozen:
            opened.tasks.start(f"give up {frozen}", calls.give_up_frozen(opened, frozen))
        self._opened = opened

    async def close(self) -> None:
        """Let go of the directory; the daemon and its images live on. Idempotent."""
        if (opened := self._opened) is None:
            return
        self._opened = None
        await opened.close()

    # Disks

    async def create_disk(self, owner: str, stack: Stack) -> BlockTarget:
        opened = self._open
        check(opened.known, stack, DISK_UNIT_BYTES)

        async def create(again: bool) -> BlockTarget:
            owned = opened.known.owned(owner)
            if again and owned.disk == stack:
                return await calls.open_disk(opened, owner)
            if owned.disk is not None or owned.damaged:
                raise AlreadyExists(f"{owner} has a disk")
            fields = {"owner": owner, "stack": wire.to_fields(stack)}
            answer = await opened.client.call(
                "create_disk", fields, landed=lambda _: opened.known.has_disk(owner, stack)
            )
            return calls.target(answer)

        with pinned(opened.known, stack.layers):
            return await self._for(owner, f"create a disk for {owner}", create)

    async def open_disk(self, owner: str) -> BlockTarget:
        opened = self._open
        return await self._for(owner, f"open the disk of {owner}", lambda _: calls.open_disk(opened, owner))

    async def seal_disk(self, owner: str, switch: SwitchDisk) -> Stack:
        """See `Storage`; nothing is switched, since the path stays."""
        del switch
        opened = self._open

        async def seal(_: bool) -> Stack:
            # Again, if need be: an upper with nothing in it adds no layer.
            opened.known.disk(owner)
            return await calls.made(
                opened, "seal_disk", {"owner": owner}, lambda disk: opened.known.has_disk(owner, disk)
            )

        return await self._for(owner, f"seal the disk of {owner}", seal, unwanted=opened.known.unpin)

    async def recover_disk(self, owner: str, pid: int | None) -> None:
        """Nothing to do: the daemon settles its seals by itself, whatever *pid* has open."""
        del pid
        self._open.known.disk(owner)

    async def import_disk(self, source: Path, size_bytes: int) -> Stack:
        opened = self._open
        check(opened.known, Stack((), size_bytes), DISK_UNIT_BYTES)
        path = await asyncio.to_thread(source.absolute)

        async def take(again: bool) -> Stack:
            if again and not await asyncio.to_thread(path.exists):
                raise Unavailable(f"the storage daemon ended just when it had taken {source.name}")
            return await calls.made(opened, "import", {"source": str(path), "size_bytes": size_bytes})

        work = opened.client.settled(take)
        return await outlasting(f"import {source.name}", work, opened.known.unpin)

    # Memory

    async def attach_memory(self, owner: str, source: Stack | Frozen) -> Path:
        opened = self._open
        stack, call, fields = _attachment(source)
        check(opened.known, stack, PAGE_BYTES)

        async def attach(again: bool) -> Path:
            if again:  # nobody has been told a path yet, so nobody can use it
                await calls.detach(opened, owner)
            if opened.known.owned(owner).memory is not None:
                raise AlreadyExists(f"{owner} has memory attached")
            answer = await opened.client.call(
                call, {"owner": owner, **fields}, landed=lambda _: opened.known.has_memory(owner, stack)
            )
            return Path(wire.text_of(answer, "path"))

        with pinned(opened.known, stack.layers):
            return await self._for(owner, f"attach memory for {owner}", attach)

    async def fill_memory(self, owner: str, pid: int) -> None:
        """Nothing to do: the path shows the whole stack, whoever *pid* is."""
        del pid
        self._open.known.memory(owner)

    async def capture_memory(self, owner: str, pid: int) -> Stack:
        opened = self._open

        async def capture(_: bool) -> Stack:
            opened.known.memory(owner)
            return await calls.made(opened, "capture_memory", {"owner": owner, "pid": pid, "compression": "none"})

        return await self._for(owner, f"capture the memory of {owner}", capture, unwanted=opened.known.unpin)

    async def freeze_memory(self, owner: str, pid: int) -> Frozen:
        opened = self._open

        async def freeze(_: bool) -> Frozen:
            # One that a daemon made and did not live to tell of is given up when the next server starts.
            memory = opened.known.memory(owner)
            fields = await opened.client.call("freeze", {"owner": owner, "pid": pid})
            copied_s = wire.number_of(fields, "copy_ms") / 1000
            return Frozen(
                wire.text_of(fields, "frozen"), memory.size_bytes, copied_s, int(wire.number_of(fields, "dirty_bytes"))
            )

        def unwanted(frozen: Frozen) -> None:
            opened.tasks.start(f"thaw {frozen.id}", self.thaw(frozen))

        return await self._for(owner, f"freeze the memory of {owner}", freeze, unwanted=unwanted)

    async def capture_frozen(self, frozen: Frozen) -> Stack:
        opened = self._open
        work = opened.client.settled(lambda _: calls.capture_frozen(opened, frozen.id))
        return await outlasting("capture frozen memory", work, opened.known.unpin)

    async def thaw(self, frozen: Frozen) -> None:
        opened = self._open
        await outlasting("thaw memory", opened.client.settled(lambda _: calls.thaw(opened, frozen.id)))

    async def flatten_memory(self, stack: Stack) -> Stack:
        """The stack as it is: all guests of one stack share one image, however many layers it has."""
        opened = self._open
        check(opened.known, stack, PAGE_BYTES)
        opened.known.pins.add(stack.layers, ())
        return stack

    # Both

    async def detach(self, owner: str) -> None:
        opened = self._open
        await self._for(owner, f"detach {owner}", lambda _: calls.detach(opened, owner))

    async def remove(self, owner: str) -> None:
        opened = self._open

        async def remove(_: bool) -> None:
            if owner in opened.known.owners:
                await opened.client.call("remove", {"owner": owner}, landed=lambda _: opened.known.forget(owner))

        await self._for(owner, f"remove {owner}", remove)

    def owners(self) -> frozenset[str]:
        return frozenset(self._open.known.owners)

    # Immutable parts

    async def put_blob(self, source: Path) -> BlobId:
        opened = self._open
        blob = new_blob_id()
        await opened.workers.run(
            f"keep {source.name}",
            lambda abort: put_blob(opened.layout, source, blob, abort),
            landed=lambda _: opened.known.blobs.add(blob),
        )
        opened.known.pins.add((), [blob])
        return blob

    def blob_path(self, blob: BlobId) -> Path:
        """`NotFound` if there is none."""
        opened = self._open
        opened.known.require((), [blob])
        return opened.layout.blob(blob)

    def pin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        known = self._open.known
        known.require(layers, blobs)
        known.pins.add(layers, blobs)

    def unpin(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> None:
        self._open.known.pins.drop(layers, blobs)

    async def collect(self, layers: Collection[LayerId], blobs: Collection[BlobId]) -> Collected:
        opened = self._open
        known = opened.known
        doomed_layers = known.layers - {*layers, *known.pins.layers} - known.attached()
        if damaged := known.damaged():
            # What its disk lies on is unknown, and someone may still rescue it.
            _log.error("no layer is removed while the record of a disk is damaged", owner=damaged[0])
            doomed_layers = set()
        doomed_blobs = known.blobs - {*blobs, *known.pins.blobs}
        # From this step on nobody can ask for them, so nobody can be using one when it goes.
        known.layers -= doomed_layers
        known.blobs -= doomed_blobs
        return await outlasting("collect", calls.delete(opened, sorted(doomed_layers), doomed_blobs))

    async def usage(self) -> Usage:
        opened = self._open
        return await opened.workers.run("look at the file system", lambda _: usage_of(opened.layout.root))

    @property
    def lost_daemons(self) -> int:
        """How many daemons have died since the start."""
        return self._open.client.statistics.lost

    @property
    def _open(self) -> Opened:
        if self._opened is None:
            raise Unavailable("storage is not started")
        return self._opened

    async def _for(
        self,
        owner: str,
        doing: str,
        attempt: Callable[[bool], Awaitable[T]],
        unwanted: Callable[[T], None] | None = None,
    ) -> T:
        """Do *attempt* in the turn of *owner*; again, and told so, if the daemon dies meanwhile."""
        opened = self._open
        check_owner(owner)

        async def in_turn() -> T:
            async with opened.locks.hold(owner):
                return await opened.client.settled(attempt)

        return await outlasting(doing, in_turn(), unwanted)


def _attachment(source: Stack | Frozen) -> tuple[Stack, str, Fields]:
    """What is known of such a memory, and what is called to attach it."""
    if isinstance(source, Frozen):
        return Stack((), source.memory_bytes), "attach_frozen", {"frozen": source.id}
    return source, "attach_memory", {"stack": wire.to_fields(source)}
