"""The storage daemon killed, replaced and refused, with the back end as its caller: nothing is lost, nothing hangs."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.model.errors import AgentEnvError, Conflict, Invalid, Unavailable, Unsupported
from agentenv.model.snapshot import Stack
from agentenv.storage.layered.storage import LayeredStorage
from tests.capabilities import find_storaged
from tests.daemon import daemon_pid, end_daemon, kill_daemon, mounted, short_directory
from tests.unit.storage.disk_guest import GuestDisk
from tests.unit.storage.memory_guest import MemoryGuest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.needs("root", "fuse", "storaged")]

MIB = 1 << 20
DISK = 8 * MIB
MEMORY = 4 * MIB


@pytest.fixture
def runtime() -> Iterator[Path]:
    with short_directory() as path:
        yield path
        end_daemon(path)


@pytest.fixture
async def storage(tmp_path: Path, runtime: Path) -> AsyncIterator[LayeredStorage]:
    storage = a_server(tmp_path, runtime)
    await storage.start()
    yield storage
    await storage.close()


def a_server(tmp_path: Path, runtime: Path, program: Path | None = None) -> LayeredStorage:
    return LayeredStorage(tmp_path / "storage", runtime, str(program or find_storaged()))


async def no_switch(_: object) -> None:
    """The path of a disk stays."""


async def test_a_killed_daemon_is_replaced_and_guests_go_on(storage: LayeredStorage, runtime: Path) -> None:
    disk = GuestDisk(await storage.create_disk("one", Stack((), DISK)))
    disk.write(0, b"before")
    with MemoryGuest(await storage.attach_memory("one", Stack((), MEMORY))) as guest:
        guest.write(0, b"memory")
        for round_ in range(3):
            first = daemon_pid(runtime)
            kill_daemon(runtime)
            # Guests wait in the kernel for the next daemon, which this loop starts.
            assert await asyncio.to_thread(disk.read, 0, 6) == b"before"
            await asyncio.to_thread(disk.write, 4096 * (round_ + 1), b"after")
            assert await asyncio.to_thread(guest.read, 100 * 4096, 4096) == bytes(4096)
            stack = await storage.capture_memory("one", guest.pid)
            assert daemon_pid(runtime) != first
    await storage.detach("one")
    with MemoryGuest(await storage.attach_memory("two", stack)) as guest:
        assert guest.read(0, 6) == b"memory"
    sealed = await storage.seal_disk("one", no_switch)
    clone = GuestDisk(await storage.create_disk("clone", sealed))
    assert clone.read(0, 6) + clone.read(3 * 4096, 5) == b"beforeafter"


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_in_flight_when_it_is_killed_is_done_once(
    storage: LayeredStorage, runtime: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    source = tmp_path / "base"
    source.write_bytes(rng.randbytes(MIB))
    content = source.read_bytes()
    base = await storage.import_disk(source, DISK)

    async def life(owner: str) -> Stack:
        disk = GuestDisk(await storage.create_disk(owner, base))
        await asyncio.to_thread(disk.write, MIB, owner.encode())
        path = await storage.attach_memory(owner, Stack((), MEMORY))
        guest = await asyncio.to_thread(MemoryGuest, path)
        try:
            await asyncio.to_thread(guest.write, 4096, owner.encode())
            memory = await storage.capture_memory(owner, guest.pid)
        finally:
            await asyncio.to_thread(guest.kill)
        sealed = await storage.seal_disk(owner, no_switch)
        await storage.detach(owner)
        with await asyncio.to_thread(MemoryGuest, await storage.attach_memory(owner, memory)) as again:
            assert await asyncio.to_thread(again.read, 4096, len(owner)) == owner.encode()
        await storage.detach(owner)
        storage.unpin(memory.layers, ())
        return sealed

    async def killer() -> None:
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0, 0.15))
            await asyncio.to_thread(kill_daemon, runtime)

    owners = [f"owner-{number}" for number in range(6)]
    killing = asyncio.create_task(killer())
    sealed = await asyncio.gather(*(life(owner) for owner in owners))
    await killing

    assert storage.owners() == frozenset(owners)
    for owner, stack in zip(owners, sealed, strict=True):
        assert stack.layers[:1] == base.layers
        clone = GuestDisk(await storage.create_disk(f"{owner}-clone", stack))
        assert await asyncio.to_thread(clone.read, 0, MIB) == content
        assert await asyncio.to_thread(clone.read, MIB, len(owner)) == owner.encode()
        storage.unpin(stack.layers, ())
        for each in (owner, f"{owner}-clone"):
            await storage.remove(each)
    storage.unpin(base.layers, ())
    await storage.collect((), ())
    assert list((tmp_path / "storage/daemon/layers").iterdir()) == []
    assert list((tmp_path / "storage/daemon/uppers").iterdir()) == []


async def test_a_server_that_comes_later_uses_the_same_daemon(
    storage: LayeredStorage, runtime: Path, tmp_path: Path
) -> None:
    disk = GuestDisk(await storage.create_disk("one", Stack((), DISK)))
    pid = daemon_pid(runtime)
    await storage.close()
    disk.write(0, b"while no server is there")
    later = a_server(tmp_path, runtime)
    await later.start()
    assert daemon_pid(runtime) == pid
    assert GuestDisk(await later.open_disk("one")).read(0, 24) == b"while no server is there"
    await later.close()


async def test_a_daemon_of_another_build_is_replaced_under_its_images(
    storage: LayeredStorage, runtime: Path, tmp_path: Path
) -> None:
    path = await storage.attach_memory("one", Stack((), MEMORY))
    disk = GuestDisk(await storage.create_disk("one", Stack((), DISK)))
    disk.write(0, b"kept")
    pid = daemon_pid(runtime)
    with MemoryGuest(path) as guest:
        await storage.close()
        newer = tmp_path / "storaged"
        shutil.copy(str(find_storaged()), newer)
        later = a_server(tmp_path, runtime, newer)
        await later.start()
        assert daemon_pid(runtime) != pid
        assert guest.read(0, 4096) == bytes(4096)
        assert disk.read(0, 4) == b"kept"
        await later.capture_memory("one", guest.pid)
        await later.close()


async def test_the_mount_goes_with_the_last_image(storage: LayeredStorage, runtime: Path) -> None:
    await storage.attach_memory("one", Stack((), MEMORY))
    assert mounted(runtime)
    await storage.detach("one")
    await storage.close()
    end_daemon(runtime)
    assert not mounted(runtime)
    assert not (runtime / "keeper.sock").exists()


async def test_one_that_cannot_start_says_why(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(Unsupported, match="no program"):
        await a_server(tmp_path, runtime, tmp_path / "nowhere").start()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is a pity >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(Unavailable, match="status 3: it is a pity"):
        await a_server(tmp_path, runtime, broken).start()
    with pytest.raises(Invalid, match="socket"):
        await a_server(tmp_path, runtime / ("x" * 100)).start()


async def test_a_directory_that_another_daemon_has_is_a_conflict(
    storage: LayeredStorage, runtime: Path, tmp_path: Path
) -> None:
    await storage.close()
    with short_directory() as elsewhere, pytest.raises(Conflict, match="another storage daemon"):
        await a_server(tmp_path, elsewhere).start()


async def test_a_daemon_that_dies_at_each_call_is_given_up(tmp_path: Path, runtime: Path) -> None:
    real = find_storaged()
    flag = tmp_path / "flag"
    once = tmp_path / "once"
    once.write_text(f'#!/bin/sh\nif [ -e {flag} ]; then exit 4; fi\ntouch {flag}\nexec {real} "$@"\n')
    once.chmod(0o755)
    storage = a_server(tmp_path, runtime, once)
    await storage.start()
    kill_daemon(runtime)
    waiting = asyncio.create_task(storage.create_disk("one", Stack((), DISK)))
    while storage.lost_daemons == 0:
        await asyncio.sleep(0.01)
    assert not waiting.done()  # one may still come
    await storage.close()
    with pytest.raises(AgentEnvError):
        await waiting
