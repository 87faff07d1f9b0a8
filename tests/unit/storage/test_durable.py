"""What a call of the storage has returned is on the disk: nothing of it was only in the host's page cache."""

import os
from pathlib import Path

import pytest

from agentenv.storage import capture as writers
from tests.unit.storage.test_crash import capture, flatten, make_world, seal

pytestmark = pytest.mark.slow


async def test_layers_blobs_and_their_names_were_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}  # inode to the size it had
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        status = os.fstat(fd)
        synced[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(writers, "fsync", fsync)
    world = await make_world(tmp_path)
    with world.guest:
        await capture(world)
        await flatten(world)
        await seal(world)

    sealed = [path for part in ("layers", "blobs") for path in (world.root / part).iterdir() if path.is_file()]
    uppers = {path for path in sealed if path.stat().st_mode & 0o200}
    assert len(sealed) - len(uppers) >= 6
    for path in set(sealed) - uppers:
        assert synced.get(path.stat().st_ino) == path.stat().st_size, path
        assert path.parent.stat().st_ino in synced, path.parent
    await world.storage.close()
