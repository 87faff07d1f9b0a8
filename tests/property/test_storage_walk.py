"""Random walks through storage beside a model of plain dictionaries.

No byte that someone needs is ever lost or changed, and nothing that nobody needs
outlives a collection.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentenv.model.errors import Unavailable
from agentenv.model.ids import BlobId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage import compaction
from agentenv.storage.plain import PlainStorage
from tests.unit.storage.disk_guest import GuestDisk, chain_of
from tests.unit.storage.memory_guest import PAGE, MemoryGuest

pytestmark = pytest.mark.slow

BLOCK = 1 << 15
BLOCKS = 40
DISK = BLOCKS * BLOCK
PAGES = 64
MEMORY = PAGES * PAGE

Content = dict[int, bytes]  # by block or page; what is not there is zero


@dataclass
class Kept:
    """A stack that the records of the node list, and what it holds."""

    stack: Stack
    content: Content


@dataclass
class Owner:
    disk: GuestDisk | None = None
    blocks: Content = field(default_factory=dict)
    memory: Stack | None = None
    guest: MemoryGuest | None = None
    pages: Content = field(default_factory=dict)


class Walk:
    def __init__(self, root: Path, scratch: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.root, self.scratch = root, scratch
        self.storage = PlainStorage(root)
        self.owners: dict[str, Owner] = {}
        self.disks: list[Kept] = []
        self.memories: list[Kept] = []
        self.blobs: dict[BlobId, bytes] = {}
        self.made = 0

    async def run(self, steps: int) -> None:
        await self.storage.start()
        try:
            for _ in range(steps):
                await self.rng.choice(self.actions())()
            for owner in list(self.owners.values()):
                self.check_owner(owner)
            for kept in [*self.disks]:
                await self.check_disk(kept)
            for kept in [*self.memories]:
                await self.check_memory(kept)
            await self.collect()
            for name in list(self.owners):
                await self.remove(name)
            self.disks, self.memories, self.blobs = [], [], {}
            await self.storage.settle()
            await self.collect()
            assert self.files("layers") == self.files("blobs") == set()
        finally:
            for owner in self.owners.values():
                if owner.guest is not None:
                    owner.guest.kill()
            await self.storage.close()

    def actions(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self.write_disk, self.write_memory, self.seal, self.capture, self.collect] * 3
        return [
            *often, self.import_disk, self.create, self.create, self.attach, self.attach, self.detach,
            self.flatten, self.put_blob, self.forget, self.forget, self.remove_any, self.check_any, self.restart,
        ]  # fmt: skip

    # Disks

    async def import_disk(self) -> None:
        content = self.some_content(BLOCK, BLOCKS)
        data = b"".join(content.get(block, bytes(BLOCK)) for block in range(BLOCKS))
        (self.scratch / "import").write_bytes(data)
        stack = await self.storage.import_disk(self.scratch / "import", DISK)
        self.keep(self.disks, stack, content)

    async def create(self) -> None:
        kept = self.rng.choice([*self.disks, Kept(Stack((), DISK), {})])
        target = await self.storage.create_disk(name := self.new_name(), kept.stack)
        self.owners[name] = Owner(GuestDisk(target), dict(kept.content))

    async def write_disk(self) -> None:
        for owner in self.some_owners(lambda owner: owner.disk is not None):
            assert owner.disk is not None
            block, data = self.rng.randrange(BLOCKS), self.rng.randbytes(BLOCK)
            owner.disk.write(block * BLOCK, data)
            owner.blocks[block] = data

    async def seal(self) -> None:
        for name in self.some_names(lambda owner: owner.disk is not None):
            owner = self.owners[name]
            assert owner.disk is not None
            how = self.rng.choice(["well", "well", "well", "failed", "failed after all", "cancelled"])
            if how == "well":
                stack = await self.storage.seal_disk(name, owner.disk.switch)
                self.keep(self.disks, stack, dict(owner.blocks))
                continue
            try:
                await self.cut_short(name, owner.disk, how)
            except (Unavailable, asyncio.CancelledError):
                owner.disk = GuestDisk(await self.storage.open_disk(name))

    async def cut_short(self, name: str, disk: GuestDisk, how: str) -> None:
        async def fail(target: BlockTarget) -> None:
            if how == "failed after all":
                owner, data = self.owners[name], self.rng.randbytes(BLOCK)
                await disk.switch(target)
                disk.write(0, data)
                owner.blocks[0] = data
            if how == "cancelled":
                sealing.cancel()
                await asyncio.sleep(0)
            raise Unavailable(how)

        sealing = asyncio.create_task(self.storage.seal_disk(name, fail))
        await sealing

    # Memory

    async def attach(self) -> None:
        name = self.rng.choice([*self.some_names(lambda owner: owner.memory is None), self.new_name()])
        owner = self.owners.setdefault(name, Owner())
        kept = self.rng.choice([*self.memories, Kept(Stack((), MEMORY), {})])
        owner.memory, owner.pages = kept.stack, dict(kept.content)
        owner.guest = MemoryGuest(await self.storage.attach_memory(name, kept.stack))
        await self.storage.fill_memory(name, owner.guest.pid)

    async def write_memory(self) -> None:
        for owner in self.some_owners(lambda owner: owner.guest is not None):
            assert owner.guest is not None
            page = self.rng.randrange(PAGES)
            data = self.rng.choice([bytes(PAGE), self.rng.randbytes(PAGE)])
            owner.guest.write(page * PAGE, data)
            owner.pages[page] = data

    async def capture(self) -> None:
        for name in self.some_names(lambda owner: owner.guest is not None):
            owner = self.owners[name]
            assert owner.guest is not None
            stack = await self.storage.capture_memory(name, owner.guest.pid)
            self.keep(self.memories, stack, dict(owner.pages))

    async def flatten(self) -> None:
        if self.memories:
            kept = self.rng.choice(self.memories)
            self.keep(self.memories, await self.storage.flatten_memory(kept.stack), kept.content)

    async def detach(self) -> None:
        for name in self.some_names(lambda owner: owner.memory is not None):
            await self.let_go(name)
            if self.owners[name].disk is None:
                del self.owners[name]

    # Both

    async def put_blob(self) -> None:
        data = self.rng.randbytes(100)
        (self.scratch / "blob").write_bytes(data)
        blob = await self.storage.put_blob(self.scratch / "blob")
        self.storage.unpin((), [blob])
        self.blobs[blob] = data

    async def remove_any(self) -> None:
        for name in self.some_names(lambda _: True):
            await self.remove(name)

    async def remove(self, name: str) -> None:
        await self.let_go(name)
        await self.storage.remove(name)
        del self.owners[name]

    async def let_go(self, name: str) -> None:
        owner = self.owners[name]
        if owner.guest is not None:
            owner.guest.kill()
        owner.guest = owner.memory = None
        await self.storage.detach(name)

    async def forget(self) -> None:
        for listed in (self.disks, self.memories):
            if listed and len(listed) > self.rng.randrange(6):
                listed.pop(self.rng.randrange(len(listed)))
        if self.blobs:
            del self.blobs[self.rng.choice(list(self.blobs))]

    async def restart(self) -> None:
        await self.storage.close()
        self.storage = PlainStorage(self.root)
        await self.storage.start()
        assert self.storage.owners() == self.owners.keys()

    async def collect(self) -> None:
        listed = {layer for kept in (*self.disks, *self.memories) for layer in kept.stack.layers}
        await self.storage.settle()
        await self.storage.collect(listed, self.blobs.keys())
        needed: set[str] = set(listed)
        for owner in self.owners.values():
            if owner.disk is not None:
                needed.update(path.name for path in chain_of(owner.disk.target.path))
            if owner.memory is not None:
                needed.update(owner.memory.layers)
        helpful = set(needed)
        self.storage._open.compaction.keep(helpful)  # type: ignore[arg-type]
        assert needed <= self.files("layers") <= helpful
        assert self.files("blobs") == set(self.blobs)
        assert self.files("temporary") == set()
        for blob, data in self.blobs.items():
            assert self.storage.blob_path(blob).read_bytes() == data

    # Looking

    async def check_any(self) -> None:
        for owner in self.some_owners(lambda _: True):
            self.check_owner(owner)
        if self.disks:
            await self.check_disk(self.rng.choice(self.disks))
        if self.memories:
            await self.check_memory(self.rng.choice(self.memories))

    def check_owner(self, owner: Owner) -> None:
        if owner.disk is not None:
            for block in range(BLOCKS):
                assert owner.disk.read(block * BLOCK, BLOCK) == owner.blocks.get(block, bytes(BLOCK))
        if owner.guest is not None:
            self.check_pages(owner.guest, owner.pages)

    async def check_disk(self, kept: Kept) -> None:
        disk = GuestDisk(await self.storage.create_disk("checking", kept.stack))
        for block in range(BLOCKS):
            assert disk.read(block * BLOCK, BLOCK) == kept.content.get(block, bytes(BLOCK))
        await self.storage.remove("checking")

    async def check_memory(self, kept: Kept) -> None:
        with MemoryGuest(await self.storage.attach_memory("checking", kept.stack)) as guest:
            await self.storage.fill_memory("checking", guest.pid)
            self.check_pages(guest, kept.content)
        await self.storage.detach("checking")

    @staticmethod
    def check_pages(guest: MemoryGuest, pages: Content) -> None:
        memory = guest.read(0, MEMORY)
        for page in range(PAGES):
            assert memory[page * PAGE :][:PAGE] == pages.get(page, bytes(PAGE))

    def files(self, folder: str) -> set[str]:
        return {path.name for path in (self.root / folder).iterdir()}

    def keep(self, listed: list[Kept], stack: Stack, content: Content) -> None:
        listed.append(Kept(stack, content))
        self.storage.unpin(stack.layers, ())

    def some_content(self, unit: int, units: int) -> Content:
        return {self.rng.randrange(units): self.rng.randbytes(unit) for _ in range(self.rng.randrange(6))}

    def some_names(self, wanted: Callable[[Owner], bool]) -> list[str]:
        found = [name for name, owner in self.owners.items() if wanted(owner)]
        return self.rng.sample(found, min(len(found), self.rng.randrange(1, 3)))

    def some_owners(self, wanted: Callable[[Owner], bool]) -> list[Owner]:
        return [self.owners[name] for name in self.some_names(wanted)]

    def new_name(self) -> str:
        self.made += 1
        return f"owner{self.made}"


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_needed_is_lost_and_nothing_else_is_kept(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # merge early and often
        monkeypatch.setattr(compaction, "DEEP", seed // 2 % 2 + 1)
        monkeypatch.setattr(compaction, "_SHALLOW", 2 + seed // 4)
    await Walk(tmp_path / "storage", tmp_path, seed).run(150)
