"""The server is killed between any two system calls that change a file: what the next one finds is whole.

Every call that changes a file is followed by a copy of the directory, which is what a
kill at that point leaves. Each copy is then opened like any other directory. (A power
failure may also lose what was not synced: `test_durable`.)
"""

import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentenv.model.errors import Unavailable
from agentenv.model.ids import BlobId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.plain import PlainStorage
from tests.unit.storage.disk_guest import GuestDisk
from tests.unit.storage.memory_guest import PAGE, MemoryGuest

pytestmark = [pytest.mark.fault, pytest.mark.slow]

MIB = 1 << 20
DISK = MIB
MEMORY = MIB
CHANGING = (
    "fsync",
    "fdatasync",
    "ftruncate",
    "truncate",
    "pwrite",
    "pwritev",
    "chmod",
    "fchmod",
    "rename",
    "unlink",
    "mkdir",
)


@dataclass
class World:
    """One sandbox with a disk of two layers and a memory of two, and files to take in."""

    storage: PlainStorage
    root: Path
    base: Stack
    sealed: Stack
    memory: Stack
    blob: BlobId
    disk: GuestDisk
    guest: MemoryGuest
    files: Path


@contextmanager
def copied_at_every_step(root: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    found: list[Path] = []

    real_calls = {name: getattr(os, name) for name in CHANGING}

    def snapshot(name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            result = real_calls[name](*arguments, **named)
            copy = copies / f"{len(found):03}-{name}"
            with monkeypatch.context() as unpatched:
                for other, real in real_calls.items():
                    unpatched.setattr(os, other, real)
                shutil.copytree(root, copy)
            found.append(copy)
            return result

        return call

    with monkeypatch.context() as patched:
        for name in CHANGING:
            patched.setattr(os, name, snapshot(name))
        yield found


async def make_world(tmp_path: Path) -> World:
    root = tmp_path / "storage"
    files = tmp_path / "files"
    files.mkdir()
    storage = PlainStorage(root)
    await storage.start()
    (files / "base").write_bytes(b"base")
    base = await storage.import_disk(files / "base", DISK)
    disk = GuestDisk(await storage.create_disk("one", base))
    disk.write(65536, b"layer")
    sealed = await storage.seal_disk("one", disk.switch)
    disk.write(2 * 65536, b"upper")
    memory = Stack((), MEMORY)
    for number in range(2):
        with MemoryGuest(await storage.attach_memory("maker", memory)) as guest:
            await storage.fill_memory("maker", guest.pid)
            guest.write(number * PAGE, b"memory%d" % number)
            memory = await storage.capture_memory("maker", guest.pid)
        await storage.detach("maker")
    guest = MemoryGuest(await storage.attach_memory("one", memory))
    await storage.fill_memory("one", guest.pid)
    guest.write(5 * PAGE, b"changed")
    (files / "state").write_bytes(b"state")
    blob = await storage.put_blob(files / "state")
    (files / "state").write_bytes(b"newer")
    (files / "base").write_bytes(b"other")
    return World(storage, root, base, sealed, memory, blob, disk, guest, files)


async def create(world: World) -> None:
    await world.storage.create_disk("two", world.sealed)


async def attach(world: World) -> None:
    await world.storage.attach_memory("two", world.memory)


async def attach_new_size(world: World) -> None:
    await world.storage.attach_memory("two", Stack((), 7 * MIB))


async def seal(world: World) -> None:
    await world.storage.seal_disk("one", world.disk.switch)


async def seal_and_write(world: World) -> None:
    async def switch(target: BlockTarget) -> None:
        await world.disk.switch(target)
        world.disk.write(3 * 65536, b"after")

    await world.storage.seal_disk("one", switch)


async def fail_to_seal(world: World) -> None:
    async def fail(target: BlockTarget) -> None:
        raise Unavailable("no")

    with pytest.raises(Unavailable):
        await world.storage.seal_disk("one", fail)


async def capture(world: World) -> None:
    await world.storage.capture_memory("one", world.guest.pid)


async def flatten(world: World) -> None:
    await world.storage.flatten_memory(world.memory)


async def import_disk(world: World) -> None:
    await world.storage.import_disk(world.files / "base", 2 * DISK)


async def put(world: World) -> None:
    await world.storage.put_blob(world.files / "state")


async def detach(world: World) -> None:
    await world.storage.detach("one")


async def collect(world: World) -> None:
    garbage = await world.storage.import_disk(world.files / "base", DISK)
    world.storage.unpin([*garbage.layers, *world.base.layers, *world.sealed.layers], ())
    collected = await world.storage.collect([*world.sealed.layers, *world.memory.layers], [world.blob])
    assert collected.layers == 1


OPERATIONS = [
    create, attach, attach_new_size, seal, seal_and_write, fail_to_seal,
    capture, flatten, import_disk, put, detach, collect,
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_a_kill_at_any_step_leaves_everything_whole(
    operation: Callable[[World], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(tmp_path)
    (tmp_path / "copies").mkdir()
    with copied_at_every_step(world.root, tmp_path / "copies", monkeypatch) as copies:
        await operation(world)
    await world.storage.close()
    world.guest.kill()
    assert copies, "nothing was changed"
    for copy in copies:
        await check(copy, world, written_after=operation is seal_and_write)


async def check(copy: Path, world: World, *, written_after: bool) -> None:
    storage = PlainStorage(copy)
    await storage.start()
    assert storage.owners() - {"two"} == {"one"}
    await storage.recover_disk("one", None)
    disk = GuestDisk(await storage.open_disk("one"))
    assert disk.read(0, 4) + disk.read(65536, 5) + disk.read(2 * 65536, 5) == b"baselayerupper"
    if written_after:
        assert disk.read(3 * 65536, 5) in (b"after", bytes(5))

    # What the records of the node list is there and is what it was.
    clone = GuestDisk(await storage.create_disk("clone", world.sealed))
    assert clone.read(0, 4) + clone.read(65536, 5) + clone.read(2 * 65536, 5) == b"baselayer" + bytes(5)
    with MemoryGuest(await storage.attach_memory("clone", world.memory)) as guest:
        await storage.fill_memory("clone", guest.pid)
        assert guest.read(0, 7) + guest.read(PAGE, 7) == b"memory0memory1"
    assert storage.blob_path(world.blob).read_bytes() == b"state"

    # It can go on, and nothing of what was cut short is left once it is not wanted.
    sealed = await storage.seal_disk("one", disk.switch)
    assert GuestDisk(await storage.create_disk("again", sealed)).read(2 * 65536, 5) == b"upper"
    storage.unpin(sealed.layers, ())
    for owner in ("one", "two", "clone", "again"):
        await storage.remove(owner)
    await storage.collect((), ())
    for folder in ("layers", "blobs", "owners", "temporary"):
        assert list((copy / folder).iterdir()) == [], folder
    await storage.close()


async def test_what_was_written_after_the_switch_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await make_world(tmp_path)
    (tmp_path / "copies").mkdir()
    switched_at = 0

    with copied_at_every_step(world.root, tmp_path / "copies", monkeypatch) as copies:

        async def switch(target: BlockTarget) -> None:
            nonlocal switched_at
            await world.disk.switch(target)
            world.disk.write(3 * 65536, b"after")
            switched_at = len(copies)

        await world.storage.seal_disk("one", switch)
    await world.storage.close()
    world.guest.kill()
    assert 0 < switched_at < len(copies)
    for copy in copies[switched_at:]:
        storage = PlainStorage(copy)
        await storage.start()
        await storage.recover_disk("one", None)
        assert GuestDisk(await storage.open_disk("one")).read(3 * 65536, 5) == b"after"
        await storage.close()


async def test_a_remove_cut_short_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await make_world(tmp_path)
    (tmp_path / "copies").mkdir()
    with copied_at_every_step(world.root, tmp_path / "copies", monkeypatch) as copies:
        await world.storage.remove("one")
    await world.storage.close()
    world.guest.kill()
    for copy in copies:
        storage = PlainStorage(copy)
        await storage.start()
        await storage.remove("one")
        await storage.collect((), ())
        assert list((copy / "layers").iterdir()) == []
        await storage.close()
