"""Builds on a real server that end early: by Ctrl-C, by a delete, by kill -9 of the server. Nothing of them stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.capabilities import BASE_ROOTFS, REPO
from tests.server import Leaks, Server, alone_at, leaks, left_after

pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.needs("root", "qemu", "netns", "nft", "tun", "guest", "base"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On a home of its own, since it counts every file there; it needs no template."""
    home = tmp_path_factory.mktemp("builds") / "home"
    server = Server(home=home, runtime=Path("/run/aenv-test-aeu"), prefix="aeu", net=127)
    with alone_at(server.runtime):
        server.clear()
        try:
            yield server.start()
        finally:
            server.leave()
            left = leaks(server)
            server.clear()
    assert not any((left.processes, left.namespaces, left.links, left.tables, left.mounts)), left


def interrupt(_server: Server, client: "subprocess.Popen[bytes]") -> None:
    client.send_signal(signal.SIGINT)


def delete(server: Server, _client: object) -> None:
    assert server.call("DELETE", "/templates/early")[0] == 204


def kill_the_server(server: Server, _client: object) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("end", [interrupt, delete, kill_the_server])
@pytest.mark.parametrize("step", [b"making a disk", b"booting for the first time"])
def test_a_build_that_ends_early_leaves_nothing(
    server: Server, step: bytes, end: Callable[[Server, "subprocess.Popen[bytes]"], None]
) -> None:
    before = leaks(server)
    client = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "template", "build", "early", "--rootfs", str(BASE_ROOTFS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "AENV_API_URL": server.url, "AENV_API_KEY": server.api_key},
        cwd=REPO,
    )
    assert client.stdout is not None
    said = b""
    while step not in said:
        line = client.stdout.readline()
        assert line, (said, server.tail())
        said += line

    end(server, client)

    said += client.stdout.read()
    assert client.wait(60) != 0, said
    client.stdout.close()
    assert server.call("GET", "/templates/aliases/early")[0] == 404
    with suppress(AssertionError):  # said below, with what is left
        server.wait_until(lambda: not _left(server, before), "what the build made to be gone", timeout_s=20)
    assert _left(server, before) == {}
    assert list((server.home / "work").iterdir()) == []


def _left(server: Server, before: Leaks) -> dict[str, list[str]]:
    """What is here and was not, but for what all first boots share: zeroed memory, or the daemon's count of devices."""
    left = left_after(server, before)
    files = [path for path in left.pop("files", []) if "/storage/zero/" not in path]
    files = [path for path in files if not path.endswith("/storage/daemon/devices")]
    return left | ({"files": files} if files else {})
