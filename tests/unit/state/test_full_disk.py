"""A disk that is full: the database opens, tells what there is and lets it be deleted; nothing new; nothing is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.model.errors import NoSpace
from agentenv.model.ids import SandboxId
from agentenv.model.sandbox import Sandbox
from agentenv.state.engine import sqlite_url
from agentenv.state.room import RESERVE_BYTES, Room
from agentenv.state.sql import SqlStore
from tests.capabilities import REPO
from tests.unit.state.test_sql import _sandbox

pytestmark = [pytest.mark.needs("root", "mount"), pytest.mark.fault]

MIB = 1 << 20
SIZE = 40 * MIB
RESERVE = "aenv.db-reserve"
LAST_RESERVE = "aenv.db-reserve-last"


@pytest.fixture(params=[pytest.param("tmpfs"), pytest.param("ext4", marks=pytest.mark.needs("mke2fs", "loop"))])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if request.param == "tmpfs":
        mount = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs"]
    else:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, SIZE)
        subprocess.run(["mke2fs", "-q", "-F", "-m", "0", "-t", "ext4", image], check=True)
        mount = ["-o", "loop", str(image)]
    subprocess.run(["mount", *mount, mounted], check=True)
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def fill(disk: Path) -> Path:
    """Take every block that is free; return what to remove to give them back."""
    hog = disk / "hog"
    with hog.open("ab", buffering=0) as file:
        for step in (MIB, 4096, 512):
            with suppress(OSError):
                while True:
                    file.write(bytes(step))
        os.fsync(file.fileno())
    return hog


async def opened(disk: Path) -> SqlStore:
    store = SqlStore(sqlite_url(disk / "aenv.db"))
    await store.start()
    return store


def fill_again(disk: Path) -> None:
    """As another writer of the disk would: what a closed file gave back is gone at once."""
    fill(disk)
    assert os.statvfs(disk).f_bavail == 0


async def add_until_full(store: SqlStore) -> list[Sandbox]:
    """Insert until there is no room; return what was acknowledged."""
    added: list[Sandbox] = []
    for n in range(SIZE // MIB):
        sandbox = replace(_sandbox(n), metadata={"large": "x" * (MIB // 2)})
        try:
            await store.insert_sandbox(sandbox)
        except NoSpace:
            return added
        added.append(sandbox)
    raise AssertionError("the disk never filled up")


async def test_what_is_new_is_refused_and_what_is_there_can_be_deleted(disk: Path) -> None:
    store = await opened(disk)
    kept, gone = _sandbox(1), _sandbox(2)
    await store.insert_sandbox(kept)
    await store.insert_sandbox(gone)
    hog = fill(disk)
    added = await add_until_full(store)
    fill_again(disk)

    await store.delete_sandbox(gone.id)

    assert not (disk / RESERVE).exists()
    with pytest.raises(NoSpace):  # whatever the reserve left is not for this
        await store.insert_sandbox(_sandbox())
    assert {one.id for one in await store.sandboxes()} == {kept.id, *(one.id for one in added)}
    hog.unlink()
    await store.insert_sandbox(_sandbox())
    assert (disk / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
    await store.close()


_FILL_AND_DIE = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from agentenv.aio.failpoints import REGISTRY
from agentenv.logs import only_problems
from tests.unit.state import test_full_disk as suite
async def main():
    only_problems()  # to standard error: what it prints are the identifiers
    disk = Path(sys.argv[1])
    store = await suite.opened(disk)
    first = suite._sandbox()
    await store.insert_sandbox(first)
    suite.fill(disk)
    added = await suite.add_until_full(store)
    print(*(one.id for one in [first, *added]), flush=True)
    REGISTRY.arm_text("store.committing=kill")
    await store.delete_sandbox(first.id)
asyncio.run(main())
"""


async def test_a_server_killed_in_a_write_on_a_full_disk_comes_back_and_can_delete(disk: Path) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _FILL_AND_DIE, str(disk), str(REPO)], capture_output=True, text=True, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    acknowledged = set(died.stdout.split())
    (disk / "aenv.db-shm").unlink()  # what recovery needs first, and somebody else takes its room
    fill_again(disk)

    store = await opened(disk)

    assert {one.id for one in await store.sandboxes()} == acknowledged
    with pytest.raises(NoSpace):
        await store.insert_sandbox(_sandbox())
    for sandbox_id in acknowledged:
        await store.delete_sandbox(SandboxId(sandbox_id))
    assert await store.sandboxes() == []
    await store.close()


async def test_a_reserve_that_a_delete_used_up_leaves_one_for_opening(disk: Path) -> None:
    died = subprocess.run([sys.executable, "-c", _FILL_AND_DIE, str(disk), str(REPO)], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL
    for name in (RESERVE, "aenv.db-shm"):
        (disk / name).unlink(missing_ok=True)
    fill_again(disk)

    store = await opened(disk)

    for one in await store.sandboxes():
        await store.delete_sandbox(one.id)
    assert await store.sandboxes() == []
    await store.close()


async def test_a_full_disk_without_any_reserve_is_a_clear_error(disk: Path) -> None:
    died = subprocess.run([sys.executable, "-c", _FILL_AND_DIE, str(disk), str(REPO)], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL
    for name in (RESERVE, LAST_RESERVE, "aenv.db-shm"):
        (disk / name).unlink(missing_ok=True)
    fill_again(disk)

    with pytest.raises(NoSpace):
        await opened(disk)


def test_a_reserve_is_made_only_where_there_is_room_for_twice_its_size(disk: Path) -> None:
    room = Room(disk / "aenv.db")
    hog = fill(disk)
    os.truncate(hog, hog.stat().st_size - RESERVE_BYTES - MIB)

    assert not room.keep()
    assert not (disk / RESERVE).exists()
    hog.unlink()
    assert room.keep()
    assert room.give_up()
    assert not room.kept
