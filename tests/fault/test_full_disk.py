"""A real server on a full disk: killed in the middle of a write, it comes back, shows and deletes all it had."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.running import running_on, running_server, small_disk
from tests.server import Server

pytestmark = [
    pytest.mark.fault,
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base", "mke2fs", "loop"),
]

MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server(prefix="aef", net=118):
        pass  # its home, which has the template, is copied
    with small_disk(tmp_path / "disk", "3G") as disk, running_on(disk, prefix="aef", net=118) as server:
        yield server


def test_a_server_killed_on_a_full_disk_comes_back_and_what_it_had_can_be_deleted(server: Server) -> None:
    running, paused, deleted = server.create(), server.create(), server.create()
    _marked(server, running)
    assert server.call("POST", f"/sandboxes/{paused}/pause", {})[0] == 204
    server.stop()
    server.start(AENV_FAILPOINTS="delete.storage_gone=kill")
    hog = _fill(server.home.parent)
    with suppress(OSError):  # the connection dies with the server
        server.call("DELETE", f"/sandboxes/{deleted}")
    server.wait_dead()
    (server.home / "state/aenv.db-shm").unlink()  # what recovery needs first, and somebody else takes its room
    _fill(server.home.parent)

    server.start()

    states = {one["sandboxID"]: one["state"] for one in server.call("GET", "/v2/sandboxes")[1]}
    assert (states.pop(running), states.pop(paused)) == ("running", "paused")
    assert states.keys() <= {deleted}
    assert _read(server, running) == "marker"
    status, body = server.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
    assert (status, body["error_code"]) == (507, "no_space"), body
    for each in (deleted, paused, running):
        assert server.call("DELETE", f"/sandboxes/{each}")[0] in (204, 404), server.tail()
    assert server.call("GET", "/v2/sandboxes")[1] == []
    hog.unlink()
    server.create()


def _fill(disk: Path) -> Path:
    """Take every block that is free; return what to remove to give them back."""
    hog = disk / "hog"
    before = hog.stat().st_size if hog.exists() else 0
    free = os.statvfs(disk)
    rough = free.f_bavail * free.f_frsize - 4 * MIB
    if rough > 0:
        subprocess.run(["fallocate", "-o", str(before), "-l", str(rough), str(hog)], check=True)
    with hog.open("ab", buffering=0) as file:
        for step in (MIB, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(step))
        os.fsync(file.fileno())
    return hog


def _marked(server: Server, sandbox: str) -> None:
    done = server.aenv("exec", "-u", "root", sandbox, "--", "/bin/sh", "-c", "printf marker >/dev/shm/marker")
    assert done.returncode == 0, done.stderr


def _read(server: Server, sandbox: str) -> str:
    done = server.aenv("exec", "-u", "root", sandbox, "--", "cat", "/dev/shm/marker")
    assert done.returncode == 0, (done.stderr, server.tail())
    return done.stdout.decode()
