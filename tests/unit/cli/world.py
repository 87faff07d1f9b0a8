"""A whole server in a thread, and `aenv` run against it, in this process or in one of its own."""

import asyncio
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import pytest

from agentenv.api.app import create_app
from agentenv.api.settings import ApiSettings
from agentenv.cli import main
from agentenv.guest.contract import AGENT_PORT
from agentenv.model.ids import parse_sandbox_id
from agentenv.proxy import Proxy, ProxySettings, http_server
from agentenv.testing.node import FakeNode
from tests.unit.cli.guest import FakeAgent

KEY: Final = "e2b_0123456789abcdef0123456789abcdef01234567"
NOBODY: Final = "6e0e5a52-0000-4000-8000-000000000000"
WAIT_S: Final = 60.0
ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Run:
    """How one run of `aenv` ended."""

    code: int
    out: str
    err: str


class World:
    """The API and the proxy over a fake node, whose sandboxes share one fake agent."""

    def __init__(self) -> None:
        self.node = FakeNode()
        # An address for each process that tests: the agent's port is the same everywhere.
        self.node.address = IPv4Address((127 << 24) | (1 << 23) | (os.getpid() & 0x7FFFFF))
        self.agent = FakeAgent()
        self.url = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def open(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def close(self) -> None:
        assert self._loop is not None
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    @property
    def ids(self) -> set[str]:
        return {one.id for one in self.node.sandboxes()}

    def state(self, sandbox_id: str) -> str:
        return str(self.node.get(parse_sandbox_id(sandbox_id)).state)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        guest = await asyncio.start_server(self.agent.serve, str(self.node.address), AGENT_PORT)
        api = create_app(self.node, ApiSettings(api_key=KEY, domain="sandbox.test"))
        proxy = Proxy(self.node, api, ProxySettings(api_key=KEY))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = http_server(proxy)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self._ready.set()
            await self._stopping.wait()
            server.should_exit = True
            await serving
        await proxy.close()
        await self.node.close()
        guest.close()


class Terminal:
    """`aenv` with the environment of somebody who uses *world*."""

    def __init__(self, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.environment = dict(environment)
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Run:
        """Run it in this process, with its output piped."""
        self._monkeypatch.setattr(sys, "argv", ["aenv", *arguments])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.app()
        written = self._capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Run(ended.value.code, written.out, written.err)

    def process(self, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None) -> Run:
        """Run it as a process, with everything piped."""
        done = subprocess.run(
            self.command(*arguments), input=stdin, capture_output=True, env=self.environment | dict(environment or {}),
            timeout=WAIT_S, check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout.decode(), done.stderr.decode())

    def on_pty(self, *arguments: str, columns: int = 200) -> Run:
        """Run it on a terminal; ``out`` is what was seen there, without colours."""
        ours, theirs = pty.openpty()
        environment = self.environment | {"COLUMNS": str(columns), "TERM": "xterm-256color"}
        with subprocess.Popen(
            self.command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as child:
            os.close(theirs)
            seen = b""
            while data := _read(ours):
                seen += data
            code = child.wait(WAIT_S)
        os.close(ours)
        return Run(code, ESCAPE.sub("", seen.decode()).replace("\r\n", "\n"), "")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "agentenv.cli", *arguments]


def environment(url: str, home: Path) -> dict[str, str]:
    """What `aenv` is told: a server, a key, and nothing of the person who runs the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return {**kept, "HOME": str(home), "AENV_API_URL": url, "AENV_API_KEY": KEY}


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: nobody has the other end any more
        return b""


@contextmanager
def started(command: list[str], **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """The process *command*, which a test that failed does not wait for."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.kill()
