"""What every storage back end promises, and its fake.

A back end passes by giving `StorageSuite` a `Lab`: storage, and a way to be the guest.
Nothing here knows how bytes are kept.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from agentenv.model.errors import AlreadyExists, Bug, Conflict, Invalid, NotFound, Unavailable, Unsupported
from agentenv.model.ids import BlobId, LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage.contract import Storage
from agentenv.storage.layered.storage import LayeredStorage
from agentenv.storage.plain import PlainStorage
from agentenv.testing.storage import FakeStorage
from tests.capabilities import find_storaged
from tests.daemon import end_daemon, short_directory
from tests.unit.storage.disk_guest import GuestDisk
from tests.unit.storage.memory_guest import MemoryGuest

KIB = 1 << 10
MIB = 1 << 20
PAGE = 4096
DISK = 8 * MIB
MEMORY = 4 * MIB


class Memory(Protocol):
    """A process that has mapped a memory."""

    pid: int

    def read(self, offset: int, length: int) -> bytes: ...

    def write(self, offset: int, data: bytes) -> None: ...

    def kill(self) -> None: ...


class Lab(Protocol):
    """A back end under test and its guests."""

    storage: Storage

    async def restart(self) -> None:
        """Replace ``storage`` by what a new server finds."""
        ...

    def map(self, path: Path) -> Memory:
        """Start a process that maps *path* privately."""
        ...

    def stranger(self) -> int:
        """The pid of a process that maps nothing of ours."""
        ...

    async def close(self) -> None: ...


class RealLab:
    """What maps memory is a process; *opened* makes the back end anew over the same data."""

    def __init__(self, opened: Callable[[], Storage]) -> None:
        self._opened = opened
        self._guests: list[MemoryGuest] = []
        self.storage = opened()

    async def restart(self) -> None:
        await self.storage.close()
        self.storage = self._opened()
        await self.storage.start()

    def map(self, path: Path) -> Memory:
        self._guests.append(MemoryGuest(path))
        return self._guests[-1]

    def stranger(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        for guest in self._guests:
            guest.kill()
        await self.storage.close()


class PlainLab(RealLab):
    def __init__(self, root: Path) -> None:
        super().__init__(lambda: PlainStorage(root))


class LayeredLab(RealLab):
    """The daemon is one of its own, and ends with the lab."""

    def __init__(self, root: Path, runtime: Path) -> None:
        super().__init__(lambda: LayeredStorage(root, runtime, str(find_storaged())))
        self._runtime = runtime

    async def close(self) -> None:
        await super().close()
        end_daemon(self._runtime)


class FakeMemory:
    def __init__(self, storage: FakeStorage, path: Path, pid: int) -> None:
        self.pid = pid
        self._storage = storage
        self._bytes = bytearray(path.read_bytes())

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._bytes[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = data
        self._storage.write_memory(self.pid, offset, data)

    def kill(self) -> None:
        self._storage.gone.add(self.pid)


class FakeLab:
    def __init__(self, root: Path) -> None:
        self._fake = FakeStorage(root)
        self._fake.gone.add(1)
        self._pid = 1
        self.storage: Storage = self._fake

    async def restart(self) -> None:
        await self.storage.close()
        await self.storage.start()

    def map(self, path: Path) -> Memory:
        self._pid += 1
        return FakeMemory(self._fake, path, self._pid)

    def stranger(self) -> int:
        return 1

    async def close(self) -> None:
        await self.storage.close()


async def no_switch(target: BlockTarget) -> None:
    """For disks that no VMM has open."""


class StorageSuite:
    """Inherit, and give a fixture ``lab``: started, empty, closed afterwards."""

    # What the tests say

    async def base(self, lab: Lab, tmp_path: Path, content: bytes = b"base", size: int = DISK) -> Stack:
        source = tmp_path / "base.img"
        source.write_bytes(content)
        return await lab.storage.import_disk(source, size)

    async def resumed(self, lab: Lab, owner: str, stack: Stack) -> Memory:
        guest = lab.map(await lab.storage.attach_memory(owner, stack))
        await lab.storage.fill_memory(owner, guest.pid)
        return guest

    async def paused(self, lab: Lab, owner: str, guest: Memory) -> Stack:
        stack = await lab.storage.capture_memory(owner, guest.pid)
        guest.kill()
        await lab.storage.detach(owner)
        return stack

    async def captured(self, lab: Lab, content: dict[int, bytes]) -> Stack:
        """A memory with *content* at those offsets, zero elsewhere, that nobody has attached."""
        guest = await self.resumed(lab, "source", Stack((), MEMORY))
        for offset, data in content.items():
            guest.write(offset, data)
        return await self.paused(lab, "source", guest)

    # Disks

    async def test_a_new_disk_starts_out_as_its_stack(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path, b"x" * 100_000)
        disk = GuestDisk(await lab.storage.create_disk("one", stack))
        assert disk.read(0, 100_001) == b"x" * 100_000 + b"\0"
        assert disk.read(DISK - 512, 512) == bytes(512)

    async def test_disks_of_one_stack_do_not_see_each_other(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path)
        one, two = [GuestDisk(await lab.storage.create_disk(owner, stack)) for owner in ("one", "two")]
        one.write(2, b"one")
        two.write(3 * MIB, b"two")
        assert one.read(0, 6) == b"baone\0"
        assert one.read(3 * MIB, 3) == bytes(3)
        assert two.read(0, 6) == b"base\0\0"
        assert two.read(3 * MIB, 3) == b"two"

    async def test_a_disk_over_nothing_is_zero(self, lab: Lab) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", Stack((), DISK)))
        assert disk.read(0, DISK) == bytes(DISK)
        disk.write(5, b"five")
        assert (await lab.storage.seal_disk("one", disk.switch)).size_bytes == DISK
        assert disk.read(5, 4) == b"five"

    async def test_a_disk_larger_than_its_stack_ends_in_zeros(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path, b"b" * MIB, MIB)
        disk = GuestDisk(await lab.storage.create_disk("one", Stack(stack.layers, 2 * MIB)))
        assert disk.read(MIB - 1, 2) == b"b\0"
        disk.write(2 * MIB - 512, b"end")
        assert disk.read(2 * MIB - 512, 3) == b"end"

    async def test_a_sealed_stack_holds_what_was_written_and_never_changes(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        disk.write(MIB, b"before")
        sealed = await lab.storage.seal_disk("one", disk.switch)
        assert disk.read(0, 4) + disk.read(MIB, 6) == b"basebefore"
        disk.write(MIB, b"after!")
        assert disk.read(MIB, 6) == b"after!"
        clone = GuestDisk(await lab.storage.create_disk("two", sealed))
        assert clone.read(0, 4) + clone.read(MIB, 6) == b"basebefore"

    async def test_a_clone_of_a_clone_has_everything(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path)
        for generation in range(5):
            disk = GuestDisk(await lab.storage.create_disk(f"g{generation}", stack))
            disk.write(generation * 100 * KIB + 7, f"generation {generation}".encode())
            stack = await lab.storage.seal_disk(f"g{generation}", disk.switch)
        disk = GuestDisk(await lab.storage.create_disk("last", stack))
        for generation in range(5):
            assert disk.read(generation * 100 * KIB + 7, 12) == f"generation {generation}".encode()

    async def test_forty_seals_lose_nothing(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        for number in range(40):
            disk.write((number % 7) * 300 * KIB, f"{number:04}".encode())
            stack = await lab.storage.seal_disk("one", disk.switch)
            lab.storage.unpin(stack.layers, ())
        clone = GuestDisk(await lab.storage.create_disk("two", stack))
        for last in range(33, 40):
            expected = f"{last:04}".encode()
            assert disk.read((last % 7) * 300 * KIB, 4) == clone.read((last % 7) * 300 * KIB, 4) == expected

    async def test_recovering_a_disk_with_nothing_to_recover_leaves_it_alone(self, lab: Lab, tmp_path: Path) -> None:
        target = await lab.storage.create_disk("one", await self.base(lab, tmp_path))
        await lab.storage.recover_disk("one", None)
        await lab.storage.recover_disk("one", lab.stranger())
        assert await lab.storage.open_disk("one") == target

    async def test_one_owner_has_one_disk(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path)
        await lab.storage.create_disk("one", stack)
        with pytest.raises(AlreadyExists):
            await lab.storage.create_disk("one", stack)

    async def test_two_at_once_make_one_disk(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path)
        done = await asyncio.gather(*(lab.storage.create_disk("one", stack) for _ in range(5)), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in done) == ["AlreadyExists"] * 4 + ["BlockTarget"]

    async def test_importing_takes_the_file(self, lab: Lab, tmp_path: Path) -> None:
        stack = await self.base(lab, tmp_path)
        assert len(stack.layers) == 1
        assert stack.size_bytes == DISK
        assert not (tmp_path / "base.img").exists()

    @pytest.mark.parametrize("size", [0, -512, 100, 1000, 1 << 62])
    async def test_a_disk_of_an_impossible_size_is_refused(self, lab: Lab, tmp_path: Path, size: int) -> None:
        source = tmp_path / "base.img"
        source.write_bytes(b"")
        with pytest.raises(Invalid):
            await lab.storage.import_disk(source, size)
        assert source.exists()
        with pytest.raises(Invalid):
            await lab.storage.create_disk("one", Stack((), size))
        assert lab.storage.owners() == frozenset()

    async def test_what_cannot_be_imported_stays(self, lab: Lab, tmp_path: Path) -> None:
        large = tmp_path / "large"
        large.write_bytes(bytes(DISK + 512))
        link = tmp_path / "link"
        link.symlink_to(large)
        for source in (large, link, tmp_path):
            with pytest.raises(Invalid):
                await lab.storage.import_disk(source, DISK)
        with pytest.raises(NotFound):
            await lab.storage.import_disk(tmp_path / "missing", DISK)
        assert large.stat().st_size == DISK + 512
        assert link.is_symlink()

    # Memory

    async def test_memory_over_nothing_is_zero(self, lab: Lab) -> None:
        guest = await self.resumed(lab, "one", Stack((), MEMORY))
        assert guest.read(0, MEMORY) == bytes(MEMORY)

    async def test_a_capture_shows_what_the_guest_saw(self, lab: Lab) -> None:
        content = {0: b"first", 5 * PAGE + 17: b"x" * 3 * PAGE, MEMORY - 4: b"last"}
        stack = await self.captured(lab, content)
        guest = await self.resumed(lab, "two", stack)
        for offset, data in content.items():
            assert guest.read(offset, len(data)) == data
        assert guest.read(100 * PAGE, PAGE) == bytes(PAGE)
        assert stack.size_bytes == MEMORY

    async def test_a_capture_leaves_the_guest_alone(self, lab: Lab) -> None:
        guest = await self.resumed(lab, "one", Stack((), MEMORY))
        guest.write(PAGE, b"one")
        first = await lab.storage.capture_memory("one", guest.pid)
        guest.write(PAGE, b"two")
        guest.write(9 * PAGE, b"nine")
        second = await lab.storage.capture_memory("one", guest.pid)
        assert guest.read(PAGE, 3) + guest.read(9 * PAGE, 4) == b"twonine"
        old, new = await self.resumed(lab, "old", first), await self.resumed(lab, "new", second)
        assert old.read(PAGE, 3) + old.read(9 * PAGE, 4) == b"one\0\0\0\0"
        assert new.read(PAGE, 3) + new.read(9 * PAGE, 4) == b"twonine"

    async def test_twelve_pauses_keep_everything(self, lab: Lab) -> None:
        stack = Stack((), MEMORY)
        for cycle in range(12):
            guest = await self.resumed(lab, "one", stack)
            for earlier in range(cycle):
                assert guest.read(earlier * 3 * PAGE, 8) == f"cycle {earlier:02}".encode()
            assert guest.read(1000 * PAGE, 5) == (f"at {cycle - 1:02}".encode() if cycle else bytes(5))
            guest.write(cycle * 3 * PAGE, f"cycle {cycle:02}".encode())
            guest.write(1000 * PAGE, f"at {cycle:02}".encode())
            old, stack = stack, await self.paused(lab, "one", guest)
            lab.storage.unpin(stack.layers, ())
            await lab.storage.collect(stack.layers, ())
            assert len(stack.layers) <= len(old.layers) + 1

    async def test_a_page_that_became_zero_is_zero(self, lab: Lab) -> None:
        stack = await self.captured(lab, {page * PAGE: b"x" * PAGE for page in range(8)})
        guest = await self.resumed(lab, "two", stack)
        guest.write(3 * PAGE, bytes(2 * PAGE))
        stack = await self.paused(lab, "two", guest)
        guest = await self.resumed(lab, "three", stack)
        assert guest.read(0, 8 * PAGE) == b"x" * 3 * PAGE + bytes(2 * PAGE) + b"x" * 3 * PAGE

    async def test_guests_of_one_memory_do_not_see_each_other(self, lab: Lab) -> None:
        base = await self.captured(lab, {0: b"shared"})
        guest = await self.resumed(lab, "more", base)
        guest.write(PAGE, b"more")
        stack = await self.paused(lab, "more", guest)
        one, two = [await self.resumed(lab, owner, stack) for owner in ("one", "two")]
        one.write(0, b"one")
        assert two.read(0, 6) + two.read(PAGE, 4) == b"sharedmore"
        assert one.read(0, 6) + one.read(PAGE, 4) == b"oneredmore"

    async def test_an_unchanged_memory_can_be_captured(self, lab: Lab) -> None:
        stack = await self.captured(lab, {0: b"same"})
        guest = await self.resumed(lab, "two", stack)
        again = await self.paused(lab, "two", guest)
        assert (await self.resumed(lab, "three", again)).read(0, 5) == b"same\0"

    async def test_a_flat_memory_is_the_same_memory(self, lab: Lab) -> None:
        stack = await self.captured(lab, {page * PAGE: b"x" * PAGE for page in range(8)})
        guest = await self.resumed(lab, "two", stack)
        guest.write(2 * PAGE, bytes(PAGE))
        guest.write(20 * PAGE + 5, b"new")
        stack = await self.paused(lab, "two", guest)
        flat = await lab.storage.flatten_memory(stack)
        assert flat.size_bytes == MEMORY
        lab.storage.unpin(stack.layers, ())
        await lab.storage.collect(flat.layers, ())
        guest = await self.resumed(lab, "three", flat)
        assert guest.read(0, 8 * PAGE) == b"x" * 2 * PAGE + bytes(PAGE) + b"x" * 5 * PAGE
        assert guest.read(20 * PAGE, 8) == b"\0\0\0\0\0new"

    async def test_a_process_that_is_gone_cannot_be_captured(self, lab: Lab) -> None:
        stack = await self.captured(lab, {0: b"x"})
        guest = await self.resumed(lab, "two", stack)
        guest.write(PAGE, b"never seen again")
        guest.kill()
        with pytest.raises(Unavailable):
            await lab.storage.capture_memory("two", guest.pid)
        lab.storage.unpin(stack.layers, ())
        await lab.storage.detach("two")
        assert (await lab.storage.collect((), ())).layers == len(stack.layers)

    async def test_a_process_that_maps_something_else_is_refused(self, lab: Lab) -> None:
        stack = await self.captured(lab, {0: b"x"})
        await self.resumed(lab, "two", stack)
        with pytest.raises(Unavailable):
            await lab.storage.capture_memory("two", lab.stranger())

    async def test_memory_is_attached_once_at_a_time(self, lab: Lab) -> None:
        stack = Stack((), MEMORY)
        await lab.storage.attach_memory("one", stack)
        with pytest.raises(AlreadyExists):
            await lab.storage.attach_memory("one", stack)
        await lab.storage.detach("one")
        await lab.storage.attach_memory("one", stack)

    async def test_only_attached_memory_is_filled_or_captured(self, lab: Lab) -> None:
        await lab.storage.create_disk("one", Stack((), DISK))
        for owner in ("one", "nobody"):
            with pytest.raises(NotFound):
                await lab.storage.fill_memory(owner, lab.stranger())
            with pytest.raises(NotFound):
                await lab.storage.capture_memory(owner, lab.stranger())

    @pytest.mark.parametrize("size", [0, -PAGE, 100, PAGE + 1, 1 << 62])
    async def test_memory_of_an_impossible_size_is_refused(self, lab: Lab, size: int) -> None:
        with pytest.raises(Invalid):
            await lab.storage.attach_memory("one", Stack((), size))
        assert lab.storage.owners() == frozenset()

    async def test_memory_cannot_be_seen_at_another_size(self, lab: Lab) -> None:
        stack = await self.captured(lab, {0: b"x"})
        for size in (MEMORY - PAGE, MEMORY + PAGE):
            with pytest.raises(Invalid):
                await lab.storage.attach_memory("one", Stack(stack.layers, size))

    async def test_a_frozen_memory_is_what_the_guest_had_then(self, lab: Lab) -> None:
        guest = await self.resumed(lab, "one", await self.captured(lab, {0: b"base", PAGE: b"page"}))
        guest.write(0, b"then")
        try:
            frozen = await lab.storage.freeze_memory("one", guest.pid)
        except Unsupported:
            return  # the caller captures while the guest is paused
        assert frozen.memory_bytes == MEMORY
        guest.write(0, b"now!")
        child = lab.map(await lab.storage.attach_memory("child", frozen))
        assert child.read(0, 4) + child.read(PAGE, 4) == b"thenpage"
        child.write(2 * PAGE, b"child")
        stack = await lab.storage.capture_frozen(frozen)
        await lab.storage.thaw(frozen)
        await lab.storage.thaw(frozen)
        with pytest.raises(NotFound):
            await lab.storage.capture_frozen(frozen)
        assert guest.read(0, 4) == b"now!"
        assert child.read(0, 4) + child.read(2 * PAGE, 5) == b"thenchild"
        other = await self.resumed(lab, "other", stack)
        assert other.read(0, 4) + other.read(PAGE, 4) + other.read(2 * PAGE, 5) == b"thenpage" + bytes(5)
        lab.storage.unpin(stack.layers, ())
        after = await self.paused(lab, "child", child)
        again = await self.resumed(lab, "again", after)
        assert again.read(0, 4) + again.read(2 * PAGE, 5) == b"thenchild"

    async def test_what_cannot_be_frozen_is_left_alone(self, lab: Lab) -> None:
        guest = await self.resumed(lab, "one", Stack((), MEMORY))
        with pytest.raises((NotFound, Unsupported)):
            await lab.storage.freeze_memory("nobody", guest.pid)
        with pytest.raises((Unavailable, Unsupported)):
            await lab.storage.freeze_memory("one", lab.stranger())
        guest.write(0, b"alive")
        assert guest.read(0, 5) == b"alive"

    # Owners

    async def test_owners_are_who_has_a_disk_or_a_memory(self, lab: Lab) -> None:
        await lab.storage.create_disk("disk", Stack((), DISK))
        await lab.storage.attach_memory("memory", Stack((), MEMORY))
        await lab.storage.create_disk("both", Stack((), DISK))
        await lab.storage.attach_memory("both", Stack((), MEMORY))
        assert lab.storage.owners() == {"disk", "memory", "both"}
        for owner in ("disk", "memory", "both", "nobody"):
            await lab.storage.detach(owner)
            await lab.storage.detach(owner)
        assert lab.storage.owners() == {"disk", "both"}
        for owner in ("disk", "both", "nobody"):
            await lab.storage.remove(owner)
            await lab.storage.remove(owner)
        assert lab.storage.owners() == frozenset()

    async def test_detaching_keeps_the_disk(self, lab: Lab) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", Stack((), DISK)))
        disk.write(0, b"kept")
        await lab.storage.attach_memory("one", Stack((), MEMORY))
        await lab.storage.detach("one")
        assert GuestDisk(await lab.storage.open_disk("one")).read(0, 4) == b"kept"

    async def test_a_removed_owner_can_come_again(self, lab: Lab) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", Stack((), DISK)))
        disk.write(0, b"old")
        await lab.storage.remove("one")
        with pytest.raises(NotFound):
            await lab.storage.open_disk("one")
        assert GuestDisk(await lab.storage.create_disk("one", Stack((), DISK))).read(0, 3) == bytes(3)

    async def test_without_a_disk_there_is_nothing_to_open_seal_or_recover(self, lab: Lab) -> None:
        await lab.storage.attach_memory("one", Stack((), MEMORY))
        for owner in ("one", "nobody"):
            with pytest.raises(NotFound):
                await lab.storage.open_disk(owner)
            with pytest.raises(NotFound):
                await lab.storage.seal_disk(owner, no_switch)
            with pytest.raises(NotFound):
                await lab.storage.recover_disk(owner, None)

    @pytest.mark.parametrize("owner", ["", ".", "..", "../x", "a/b", "x\n", "\0", "-x", "x" * 129, "ä"])
    async def test_an_owner_cannot_be_any_text(self, lab: Lab, owner: str) -> None:
        with pytest.raises(Invalid):
            await lab.storage.create_disk(owner, Stack((), DISK))
        with pytest.raises(Invalid):
            await lab.storage.attach_memory(owner, Stack((), MEMORY))
        with pytest.raises(Invalid):
            await lab.storage.remove(owner)

    @pytest.mark.parametrize("layer", ["", "missing", "../../etc/passwd", "0" * 32 + ".raw", "0" * 32 + ".delta"])
    async def test_a_missing_layer_is_not_found(self, lab: Lab, layer: str) -> None:
        stack = Stack((LayerId(layer),), MEMORY)
        with pytest.raises(NotFound):
            await lab.storage.create_disk("one", stack)
        with pytest.raises(NotFound):
            await lab.storage.attach_memory("one", stack)
        with pytest.raises(NotFound):
            await lab.storage.flatten_memory(stack)
        assert lab.storage.owners() == frozenset()

    async def test_a_restarted_server_finds_everything(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        disk.write(MIB, b"disk")
        sealed = await lab.storage.seal_disk("one", disk.switch)
        disk.write(2 * MIB, b"upper")
        memory = await self.captured(lab, {0: b"memory"})
        guest = await self.resumed(lab, "one", memory)
        guest.write(PAGE, b"changed")
        source = tmp_path / "blob"
        source.write_bytes(b"blob")
        blob = await lab.storage.put_blob(source)

        await lab.restart()

        assert lab.storage.owners() == {"one"}
        disk = GuestDisk(await lab.storage.open_disk("one"))
        assert disk.read(MIB, 4) + disk.read(2 * MIB, 5) == b"diskupper"
        stack = await self.paused(lab, "one", guest)
        guest = await self.resumed(lab, "one", stack)
        assert guest.read(0, 6) + guest.read(PAGE, 7) == b"memorychanged"
        assert GuestDisk(await lab.storage.create_disk("two", sealed)).read(MIB, 4) == b"disk"
        assert lab.storage.blob_path(blob).read_bytes() == b"blob"

    async def test_nothing_works_before_start_and_after_close(self, lab: Lab) -> None:
        await lab.storage.close()
        with pytest.raises(Unavailable):
            await lab.storage.create_disk("one", Stack((), DISK))
        with pytest.raises(Unavailable):
            await lab.storage.usage()
        await lab.storage.close()
        await lab.restart()
        await lab.storage.create_disk("one", Stack((), DISK))

    # Blobs

    async def test_a_blob_is_taken_and_kept(self, lab: Lab, tmp_path: Path) -> None:
        source = tmp_path / "state"
        source.write_bytes(b"device state")
        blob = await lab.storage.put_blob(source)
        assert not source.exists()
        assert lab.storage.blob_path(blob).read_bytes() == b"device state"
        source.write_bytes(b"device state")
        assert await lab.storage.put_blob(source) != blob

    async def test_what_is_no_file_is_no_blob(self, lab: Lab, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            await lab.storage.put_blob(tmp_path / "missing")
        with pytest.raises(Invalid):
            await lab.storage.put_blob(tmp_path)
        assert tmp_path.is_dir()

    @pytest.mark.parametrize("blob", ["", "missing", "../VERSION", "0" * 32 + ".blob"])
    async def test_a_missing_blob_is_not_found(self, lab: Lab, blob: str) -> None:
        with pytest.raises(NotFound):
            lab.storage.blob_path(BlobId(blob))

    # What is kept

    async def test_what_a_call_returns_is_kept_until_unpinned(self, lab: Lab, tmp_path: Path) -> None:
        source = tmp_path / "blob"
        source.write_bytes(b"x")
        blob = await lab.storage.put_blob(source)
        base = await self.base(lab, tmp_path)
        memory = await self.captured(lab, {0: b"x"})
        flat = await lab.storage.flatten_memory(memory)
        disk = GuestDisk(await lab.storage.create_disk("one", base))
        sealed = await lab.storage.seal_disk("one", disk.switch)
        await lab.storage.remove("one")

        collected = await lab.storage.collect((), ())
        assert (collected.layers, collected.blobs) == (0, 0)

        for stack in (base, memory, flat, sealed):
            lab.storage.unpin(stack.layers, ())
        lab.storage.unpin((), [blob])
        collected = await lab.storage.collect((), ())
        assert collected.layers == len({*base.layers, *memory.layers, *flat.layers, *sealed.layers})
        assert collected.blobs == 1
        assert collected.bytes > 0
        with pytest.raises(NotFound):
            lab.storage.blob_path(blob)
        with pytest.raises(NotFound):
            await lab.storage.create_disk("two", sealed)

    async def test_what_is_listed_is_kept(self, lab: Lab, tmp_path: Path) -> None:
        source = tmp_path / "blob"
        source.write_bytes(b"x")
        blob = await lab.storage.put_blob(source)
        base = await self.base(lab, tmp_path)
        lab.storage.unpin(base.layers, [blob])
        collected = await lab.storage.collect(base.layers, [blob])
        assert (collected.layers, collected.blobs) == (0, 0)
        await lab.storage.create_disk("one", base)
        assert lab.storage.blob_path(blob).exists()

    async def test_what_an_owner_has_is_kept(self, lab: Lab, tmp_path: Path) -> None:
        base = await self.base(lab, tmp_path)
        disk = GuestDisk(await lab.storage.create_disk("one", base))
        disk.write(MIB, b"sealed")
        sealed = await lab.storage.seal_disk("one", disk.switch)
        first = await self.captured(lab, {0: b"first"})
        guest = await self.resumed(lab, "one", first)
        guest.write(PAGE, b"second")
        second = await self.paused(lab, "one", guest)
        guest = await self.resumed(lab, "one", second)
        for stack in (base, sealed, first, second):
            lab.storage.unpin(stack.layers, ())

        await lab.storage.collect((), ())

        assert disk.read(0, 4) + disk.read(MIB, 6) == b"basesealed"
        third = await self.paused(lab, "one", guest)
        guest = await self.resumed(lab, "one", third)
        assert guest.read(0, 5) + guest.read(PAGE, 6) == b"firstsecond"

    async def test_pins_count(self, lab: Lab, tmp_path: Path) -> None:
        base = await self.base(lab, tmp_path)
        lab.storage.pin(base.layers, ())
        lab.storage.unpin(base.layers, ())
        assert (await lab.storage.collect((), ())).layers == 0
        lab.storage.unpin(base.layers, ())
        with pytest.raises(Bug):
            lab.storage.unpin(base.layers, ())
        assert (await lab.storage.collect((), ())).layers == 1
        with pytest.raises(NotFound):
            lab.storage.pin(base.layers, ())

    async def test_a_pin_is_all_or_nothing(self, lab: Lab, tmp_path: Path) -> None:
        base = await self.base(lab, tmp_path)
        lab.storage.unpin(base.layers, ())
        with pytest.raises(NotFound):
            lab.storage.pin((*base.layers, LayerId("missing")), ())
        with pytest.raises(NotFound):
            lab.storage.pin(base.layers, [BlobId("missing")])
        assert (await lab.storage.collect((), ())).layers == 1

    async def test_pins_end_with_the_server(self, lab: Lab, tmp_path: Path) -> None:
        await self.base(lab, tmp_path)
        await lab.restart()
        assert (await lab.storage.collect((), ())).layers == 1

    async def test_what_is_made_during_a_collection_is_left_alone(self, lab: Lab, tmp_path: Path) -> None:
        for number in range(20):
            (tmp_path / f"old{number}").write_bytes(b"x")
            lab.storage.unpin((), [await lab.storage.put_blob(tmp_path / f"old{number}")])
        source = tmp_path / "new"
        source.write_bytes(b"new")

        async def unpinned() -> BlobId:
            blob = await lab.storage.put_blob(source)
            lab.storage.unpin((), [blob])
            return blob

        collected, blob = await asyncio.gather(lab.storage.collect((), ()), unpinned())
        assert collected.blobs == 20
        assert lab.storage.blob_path(blob).read_bytes() == b"new"

    async def test_a_disk_and_a_collection_at_once_are_one_after_the_other(self, lab: Lab, tmp_path: Path) -> None:
        for _ in range(10):
            base = await self.base(lab, tmp_path)
            lab.storage.unpin(base.layers, ())
            created, collected = await asyncio.gather(
                lab.storage.create_disk("one", base), lab.storage.collect((), ()), return_exceptions=True
            )
            if isinstance(created, NotFound):
                assert not isinstance(collected, BaseException)
                assert collected.layers == 1
            else:
                assert isinstance(created, BlockTarget)
                assert GuestDisk(created).read(0, 4) == b"base"
                await lab.storage.remove("one")
                await lab.storage.collect((), ())

    async def test_a_cancelled_call_leaves_nothing_that_cannot_be_undone(self, lab: Lab, tmp_path: Path) -> None:
        base = await self.base(lab, tmp_path)
        memory = await self.captured(lab, {0: b"x" * MIB})
        guest = await self.resumed(lab, "guest", memory)
        guest.write(2 * MIB, b"y" * MIB)
        for steps in range(12):
            source = tmp_path / "blob"
            source.write_bytes(b"blob")
            calls = [
                asyncio.create_task(call)
                for call in (
                    lab.storage.create_disk("one", base),
                    lab.storage.attach_memory("one", memory),
                    lab.storage.capture_memory("guest", guest.pid),
                    lab.storage.flatten_memory(memory),
                    lab.storage.put_blob(source),
                )
            ]
            for _ in range(steps):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            for outcome in done:
                if isinstance(outcome, Stack):
                    lab.storage.unpin(outcome.layers, ())
                elif isinstance(outcome, str):
                    lab.storage.unpin((), [BlobId(outcome)])
                else:
                    assert isinstance(outcome, asyncio.CancelledError | BlockTarget | Path)
            await lab.storage.remove("one")
        await lab.storage.detach("guest")
        await lab.storage.collect((), ())
        await lab.restart()
        assert lab.storage.owners() == frozenset()
        collected = await lab.storage.collect((), ())
        assert collected.layers == len({*base.layers, *memory.layers})
        assert collected.blobs == 0

    # The file system

    async def test_usage_adds_up(self, lab: Lab) -> None:
        usage = await lab.storage.usage()
        assert usage.free_bytes > 0
        assert usage.used_bytes >= 0
        assert usage.total_bytes == usage.used_bytes + usage.free_bytes


class FileSuite(StorageSuite):
    """Of back ends whose layers are files that VMMs open, and that name each other: they switch, and know what fits."""

    async def test_a_failed_switch_changes_nothing(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        disk.write(9, b"kept")
        before = await lab.storage.open_disk("one")

        async def fail(target: BlockTarget) -> None:
            raise Unavailable("the VMM does not answer")

        with pytest.raises(Unavailable, match="the VMM does not answer"):
            await lab.storage.seal_disk("one", fail)

        assert await lab.storage.open_disk("one") == before
        disk.write(13, b"going on")
        assert disk.read(9, 12) == b"keptgoing on"
        await lab.storage.seal_disk("one", disk.switch)
        assert disk.read(9, 12) == b"keptgoing on"

    async def test_a_seal_cancelled_in_the_switch_loses_nothing(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        disk.write(9, b"kept")
        reached = asyncio.Event()

        async def hang(target: BlockTarget) -> None:
            reached.set()
            await asyncio.Event().wait()

        sealing = asyncio.create_task(lab.storage.seal_disk("one", hang))
        await reached.wait()
        sealing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sealing

        disk = GuestDisk(await lab.storage.open_disk("one"))
        assert disk.read(9, 4) == b"kept"
        await lab.storage.seal_disk("one", disk.switch)
        assert disk.read(9, 4) == b"kept"

    async def test_layers_of_two_stacks_do_not_make_one(self, lab: Lab, tmp_path: Path) -> None:
        one, two = await self.base(lab, tmp_path), await self.base(lab, tmp_path)
        with pytest.raises(Invalid):
            await lab.storage.create_disk("one", Stack(one.layers + two.layers, DISK))

    async def test_a_stack_keeps_what_lies_below_it(self, lab: Lab, tmp_path: Path) -> None:
        disk = GuestDisk(await lab.storage.create_disk("one", await self.base(lab, tmp_path)))
        sealed = await lab.storage.seal_disk("one", disk.switch)
        await lab.storage.remove("one")
        await lab.restart()  # no pins any more
        await lab.storage.collect(sealed.layers[-1:], ())
        assert GuestDisk(await lab.storage.create_disk("two", sealed)).read(0, 4) == b"base"


class TestPlainStorage(FileSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[Lab]:
        lab = PlainLab(tmp_path / "storage")
        await lab.storage.start()
        yield lab
        await lab.close()

    async def test_one_process_has_the_directory(self, lab: Lab, tmp_path: Path) -> None:
        with pytest.raises(Conflict):
            await PlainStorage(tmp_path / "storage").start()


@pytest.mark.needs("root", "fuse", "storaged")
class TestLayeredStorage(StorageSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[Lab]:
        with short_directory() as runtime:
            lab = LayeredLab(tmp_path / "storage", runtime)
            await lab.storage.start()
            yield lab
            await lab.close()

    async def test_one_process_has_the_directory(self, lab: Lab, tmp_path: Path) -> None:
        with pytest.raises(Conflict):
            await LayeredStorage(tmp_path / "storage", tmp_path / "elsewhere", str(find_storaged())).start()


class TestFakeStorage(FileSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[Lab]:
        lab = FakeLab(tmp_path / "storage")
        await lab.storage.start()
        yield lab
        await lab.close()
