"""A real server under test: started as a user would, on ports, ranges and directories of its own.

Also the leak checker: what an AgentENV server may leave on a host, listed. After a
test that deleted its sandboxes the list must be what it was before.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.capabilities import GUEST_DIR, QEMU, REPO, find_storaged
from tests.daemon import end_daemon

READY_S = 120.0
MOST_WARM_SLOTS = 30  # network.warm_high, those being made or with a spare VMM in them, and the resolver's link
# Off the default ranges, so that a server of the person at this machine goes on undisturbed.
NETWORK = 'name_prefix = "{prefix}"\naddress_cidr = "10.{net}.0.0/16"\nveth_cidr = "10.{veth_net}.0.0/16"\n'


@contextmanager
def alone_at(runtime: Path) -> Iterator[None]:
    """Hold what a server with this runtime directory uses of the host: addresses, links, tables.

    Two runs of a suite, of whatever checkouts, are one after the other: the second waits in here.
    """
    with runtime.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run that uses {runtime}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass
class Server:
    """One server process. ``start`` and ``stop`` as often as a test likes; `kill` is kill -9."""

    home: Path
    runtime: Path
    prefix: str = "aet"
    net: int = 111  # second number of the range of its addresses; that of its links is the next
    port: int = 0
    extra: str = ""  # more TOML, whole sections
    environ: dict[str, str] = field(default_factory=dict)
    api_key: str = field(default_factory=lambda: "e2b_" + secrets.token_hex(20))
    process: subprocess.Popen[bytes] | None = None
    files: Path | None = None  # for its log and configuration, if not in its home

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return (self.files or self.home) / "server.log"

    def start(self, **environ: str) -> "Server":
        self.home.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        config = (self.files or self.home) / "server.toml"
        config.write_text(
            f'[server]\nlisten_host = "127.0.0.1"\nlisten_port = {self.port}\ndomains = ["sbx.localhost"]\n'
            f'[paths]\nhome = "{self.home}"\nruntime = "{self.runtime}"\n'
            f'[guest]\nimage_dir = "{GUEST_DIR}"\nca_bundle = "{_ca_bundle()}"\n'
            f'[vmm]\nqemu_binary = "{QEMU}"\n'
            f'[storage]\ndaemon_binary = "{find_storaged() or "storaged"}"\n'
            f"[network]\n{NETWORK.format(prefix=self.prefix, net=self.net, veth_net=self.net + 1)}{self.extra}"
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentenv.cli", "server", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "AENV_API_KEY": self.api_key, **self.environ, **environ},
                cwd=REPO,
            )
        self.wait_until(self._answers, "the server to answer")
        return self

    def stop(self) -> None:
        """As `systemctl stop` would: VMs live on."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
            self.process = None

    def leave(self) -> None:
        """Stop for good: the storage daemon, which outlives servers, ends too."""
        self.stop()
        end_daemon(self.runtime / "storage")

    def clear(self) -> None:
        """Remove the runtime directory, also where a run that was ended by force left something mounted in it."""
        end_daemon(self.runtime / "storage")
        shutil.rmtree(self.runtime, ignore_errors=True)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def wait_dead(self) -> int:
        """Wait for a server that a failpoint kills."""
        assert self.process is not None
        code = self.process.wait(READY_S)
        self.process = None
        return code

    def call(self, method: str, path: str, body: object = None, *, timeout_s: float = 120.0) -> tuple[int, Any]:
        """One API call: status and JSON body, whatever the status."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-API-Key": self.api_key, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        return status, json.loads(content) if content else None

    def metric(self, name: str) -> float:
        """The value of the metric that has no labels and is called *name*."""
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/metrics", headers={"X-API-Key": self.api_key}), timeout=10
        ) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def create(self, template: str = "base", **more: object) -> str:
        status, body = self.call("POST", "/v2/sandboxes", {"templateID": template, "timeout": 600, **more})
        assert status == 201, body
        return str(body["sandboxID"])

    def delete_all(self) -> None:
        _, sandboxes = self.call("GET", "/v2/sandboxes")
        for sandbox in sandboxes:
            self.call("DELETE", f"/sandboxes/{sandbox['sandboxID']}")

    def aenv(self, *arguments: str, stdin: bytes = b"", timeout_s: float = 600.0) -> subprocess.CompletedProcess[bytes]:
        """The command line, pointed at this server."""
        return subprocess.run(
            [sys.executable, "-m", "agentenv.cli", *arguments],
            input=stdin,
            capture_output=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, "AENV_API_URL": self.url, "AENV_API_KEY": self.api_key},
            cwd=REPO,
        )

    @contextmanager
    def sdk(self) -> Iterator[None]:
        """Point the E2B SDK of this process here, as its users do: by environment."""
        names = {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.api_key}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s in vain for {what}:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 204)
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ca_bundle() -> str:
    """The host's bundle: where TLS is intercepted, guests must trust what the host trusts."""
    for path in (os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"):
        if path and Path(path).is_file():
            return path
    return ""


@dataclass(frozen=True, slots=True)
class Leaks:
    """Everything of one server that is on the host now."""

    processes: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    mounts: frozenset[str]
    loops: frozenset[str]
    tables: frozenset[str]
    sockets: frozenset[str]
    files: frozenset[str]

    def minus(self, other: "Leaks") -> dict[str, list[str]]:
        """What is here and was not there."""
        found = {name: sorted(getattr(self, name) - getattr(other, name)) for name in Leaks.__slots__}
        return {name: items for name, items in found.items() if items}


def leaks(server: Server) -> Leaks:
    """List what *server* has on the host.

    VMMs that wait for a sandbox are its own for as long as it runs, and are left out then.
    """
    while True:
        waiting = _spare_dirs(server)
        found = _leaks(server, waiting)
        if _spare_dirs(server) <= waiting:  # else one was started meanwhile, and is half in the list
            return found


def _leaks(server: Server, waiting: frozenset[str]) -> Leaks:
    runtime, home = str(server.runtime), server.home
    links = {line.split(":")[1].strip().split("@")[0] for line in _lines("ip", "-o", "link")}
    return Leaks(
        processes=frozenset(_processes(runtime, waiting)),
        namespaces=frozenset(str(p) for p in (server.runtime / "netns").glob("*")),
        links=frozenset(name for name in links if name.startswith(server.prefix)),
        mounts=frozenset(_mounts(runtime)),
        loops=frozenset(line for line in _lines("losetup", "-a") if str(home) in line),
        tables=frozenset(line for line in _lines("nft", "list", "tables") if server.prefix in line),
        sockets=frozenset(
            line.split()[-1]
            for line in Path("/proc/net/unix").read_text().splitlines()
            if any(f"{runtime}/{part}/" in line for part in ("vm", "storage"))
            and not any(f"{directory}/" in line for directory in waiting)
        ),
        files=frozenset(path for path in _files(server) if str(Path(path).parent) not in waiting),
    )


def left_after(server: Server, before: Leaks) -> dict[str, list[str]]:
    """What is here now and was not *before*, except warm slots: those are the pool's, as long as they are few.

    A slot is one namespace (a bind mount), one link and no table of the host's own.
    """
    now = leaks(server)
    left = now.minus(before)
    for pooled in ("namespaces", "links"):
        if len(getattr(now, pooled)) <= MOST_WARM_SLOTS:
            left.pop(pooled, None)
    if server.process is not None and (nobodys := _slots_of_nobody(server)):
        left["slots"] = nobodys
    return left


def _slots_of_nobody(server: Server) -> list[str]:
    """Slots that count as held, or are there, though no VMM has them and the pool does not know them.

    The pool is at work meanwhile, and its numbers are not of one moment: they are to add up once.
    """
    found: list[str] = []

    def add_up() -> bool:
        states = ("warm", "making", "held", "leaving", "foreign")
        slots = {state: int(server.metric(f'agentenv_network_slots{{state="{state}"}}')) for state in states}
        now = leaks(server)
        of_nobody = slots["held"] - int(server.metric("agentenv_spare_vmms")) - len(now.processes)
        unknown = len(now.namespaces) - sum(slots.values())
        found[:] = [f"{n} {kind}" for kind, n in (("held by nobody", of_nobody), ("unknown", unknown)) if n > 0]
        return not found

    with suppress(AssertionError):  # what is found is said
        server.wait_until(add_up, "every slot to have a holder", timeout_s=10)
    return found


def _mounts(runtime: str) -> Iterator[str]:
    """Mounts below *runtime*, except those of namespaces, which are listed as such."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount_point = line.split()[1]
        if runtime in line and not mount_point.startswith(f"{runtime}/netns/"):
            yield mount_point


def _spare_dirs(server: Server) -> frozenset[str]:
    """Directories of VMMs that wait. One that was taken keeps this path in its arguments, and no directory there."""
    if server.process is None:
        return frozenset()
    return frozenset(str(path) for path in (server.runtime / "vm").glob("spare-*"))


def _processes(runtime: str, waiting: frozenset[str]) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{runtime}/storage/" in command:
            yield f"{path.parent.name} {command[:60]} ..."
        _, runs_in, which = command.partition(f"{runtime}/vm/")
        waits = any(f"{directory}/" in command for directory in waiting)
        if runs_in and not waits:  # however long what precedes it is, its sandbox is told
            yield f"{path.parent.name} {command[:40]} ... {runs_in}{which[:60]}"


def _files(server: Server) -> Iterator[str]:
    for root in (server.runtime / "vm", server.home / "storage", server.home / "work"):
        for path in root.rglob("*") if root.is_dir() else ():
            if path.is_file() or path.is_socket():
                yield str(path)


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [re.sub(r"\s+", " ", line) for line in done.stdout.splitlines()]
