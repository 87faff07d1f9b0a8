"""A full disk: the caller is told so, nothing has changed, nothing is left over, and it works again with room."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.model.errors import NoSpace
from agentenv.model.snapshot import Stack
from agentenv.storage.plain import PlainStorage
from tests.unit.storage.disk_guest import GuestDisk
from tests.unit.storage.memory_guest import PAGE, MemoryGuest

pytestmark = [pytest.mark.needs("root"), pytest.mark.fault]

MIB = 1 << 20
DISK = 4 * MIB
MEMORY = 16 * MIB
ROOM = 48 * MIB


@pytest.fixture(params=[pytest.param("tmpfs"), pytest.param("ext4", marks=pytest.mark.needs("mke2fs", "loop"))])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if request.param == "tmpfs":
        mount = ["-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs"]
    else:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, ROOM)
        subprocess.run(["mke2fs", "-q", "-F", "-m", "0", "-t", "ext4", "-O", "^has_journal", image], check=True)
        mount = ["-o", "loop", str(image)]
    subprocess.run(["mount", *mount, mounted], check=True)
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


@pytest.fixture
async def storage(small: Path) -> AsyncIterator[PlainStorage]:
    storage = PlainStorage(small / "storage")
    await storage.start()
    yield storage
    await storage.close()


def leave(small: Path, free_bytes: int) -> Path:
    """Take all room but about *free_bytes*; return what to remove to give it back."""
    ballast = small / "ballast"
    with ballast.open("wb", buffering=0) as file:
        taken = 0
        for step in (MIB, 4096):
            with suppress(OSError):
                while True:
                    taken += os.pwrite(file.fileno(), bytes(step), taken)
        file.truncate(max(0, taken - free_bytes))
        os.fsync(file.fileno())
    return ballast


def everything(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()[:65536] for path in sorted(root.rglob("*")) if path.is_file()
    }


async def test_a_capture_that_does_not_fit_changes_nothing(storage: PlainStorage, small: Path) -> None:
    with MemoryGuest(await storage.attach_memory("one", Stack((), MEMORY))) as guest:
        guest.write(0, b"base" * PAGE)
        base = await storage.capture_memory("one", guest.pid)
    await storage.detach("one")
    with MemoryGuest(await storage.attach_memory("one", base)) as guest:
        guest.spread(0, 1500, 2, 1)
        ballast = leave(small, 2 * MIB)
        before = everything(small / "storage")
        for _ in range(3):
            with pytest.raises(NoSpace):
                await storage.capture_memory("one", guest.pid)
            assert everything(small / "storage") == before
        ballast.unlink()
        stack = await storage.capture_memory("one", guest.pid)
        expected = guest.read(0, MEMORY)
    await storage.detach("one")
    with MemoryGuest(await storage.attach_memory("one", stack)) as guest:
        await storage.fill_memory("one", guest.pid)
        assert guest.read(0, MEMORY) == expected


async def test_a_first_capture_that_does_not_fit_changes_nothing(storage: PlainStorage, small: Path) -> None:
    with MemoryGuest(await storage.attach_memory("one", Stack((), MEMORY))) as guest:
        guest.spread(0, 1500, 2, 1)
        ballast = leave(small, 2 * MIB)
        before = everything(small / "storage")
        with pytest.raises(NoSpace):
            await storage.capture_memory("one", guest.pid)
        assert everything(small / "storage") == before
        ballast.unlink()
        assert (await storage.capture_memory("one", guest.pid)).layers


async def test_a_memory_that_cannot_be_flattened_stays_as_it_is(storage: PlainStorage, small: Path) -> None:
    stack = Stack((), MEMORY)
    for number in range(2):
        with MemoryGuest(await storage.attach_memory("one", stack)) as guest:
            await storage.fill_memory("one", guest.pid)
            guest.spread(number, 700, 2, 1)
            stack = await storage.capture_memory("one", guest.pid)
        await storage.detach("one")
    leave(small, 2 * MIB)
    before = everything(small / "storage")
    with pytest.raises(NoSpace):
        await storage.flatten_memory(stack)
    assert everything(small / "storage") == before


@pytest.mark.parametrize("free", [0, 8 << 10, 16 << 10, 24 << 10], ids=lambda free: f"{free >> 10}KiB")
async def test_disks_are_made_and_sealed_in_full_or_not_at_all(storage: PlainStorage, small: Path, free: int) -> None:
    disk = GuestDisk(await storage.create_disk("one", Stack((), DISK)))
    disk.write(0, b"kept")
    ballast = leave(small, free)
    before = everything(small / "storage")
    failed = 0
    for _ in range(20):
        now = everything(small / "storage")
        target = disk.target
        try:
            await storage.seal_disk("one", disk.switch)
        except NoSpace:
            failed += 1
            assert disk.read(0, 4) == b"kept"
            if disk.target == target:
                assert everything(small / "storage") == now
                assert (await storage.open_disk("one")) == target
                break
    assert failed
    if free == 0:
        assert everything(small / "storage") == before
    with pytest.raises(NoSpace):
        await storage.create_disk("two", Stack((), DISK))
    assert storage.owners() == {"one"}
    ballast.unlink()
    await storage.create_disk("two", Stack((), DISK))
    await storage.seal_disk("one", disk.switch)
    assert disk.read(0, 4) == b"kept"
    assert GuestDisk(await storage.open_disk("one")).read(0, 4) == b"kept"


async def test_a_file_that_does_not_fit_stays_with_the_caller(
    storage: PlainStorage, small: Path, tmp_path: Path
) -> None:
    source = tmp_path / "large"
    source.write_bytes(bytes(range(256)) * (2 * ROOM // 256))
    with pytest.raises(NoSpace):
        await storage.import_disk(source, 2 * ROOM)
    with pytest.raises(NoSpace):
        await storage.put_blob(source)
    assert source.stat().st_size == 2 * ROOM
    collected = await storage.collect((), ())
    assert (collected.layers, collected.blobs) == (0, 0)
    for folder in ("layers", "blobs", "temporary"):
        assert list((small / "storage" / folder).iterdir()) == []


async def test_a_full_disk_can_be_emptied(storage: PlainStorage, small: Path) -> None:
    for _ in range(3):
        (small / "blob").write_bytes(bytes(3 * MIB))
        storage.unpin((), [await storage.put_blob(small / "blob")])
    await storage.create_disk("one", Stack((), DISK))
    leave(small, 0)
    await storage.remove("one")
    collected = await storage.collect((), ())
    assert collected.blobs == 3
    assert collected.bytes >= 9 * MIB
    assert (await storage.usage()).free_bytes >= 9 * MIB


async def test_usage_is_what_the_file_system_says(storage: PlainStorage, small: Path) -> None:
    usage = await storage.usage()
    assert usage.total_bytes == usage.used_bytes + usage.free_bytes <= ROOM
    leave(small, MIB)
    full = await storage.usage()
    assert full.total_bytes == usage.total_bytes
    assert 0 < full.free_bytes < 2 * MIB
