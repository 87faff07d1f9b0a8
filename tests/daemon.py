"""A storage daemon under test: where it may listen, and how nothing of it is left."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory in which a socket's path is not too long."""
    path = Path(tempfile.mkdtemp(prefix="aenv-d", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def end_daemon(runtime: Path) -> None:
    """End the daemon of *runtime*, if there is one, and make sure that its mount is gone."""
    with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(runtime / "daemon.sock"))
        pid = _ask(caller, "hello", protocol=1)["pid"]
        pidfd = os.pidfd_open(pid)
        try:
            _ask(caller, "shutdown")
            _wait(pidfd)
        finally:
            os.close(pidfd)
    with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as k:
        k.connect(str(runtime / "keeper.sock"))  # of a daemon that was killed
        k.send(b'"drop"')
        k.recv(1 << 14)
    if mounted(runtime):
        subprocess.run(["umount", "-l", str(runtime / "mount")], check=True)


def kill_daemon(runtime: Path) -> None:
    """What the OOM killer would do."""
    try:
        pidfd = os.pidfd_open(daemon_pid(runtime))
    except (OSError, ValueError):
        return  # it is dead already
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait(pidfd)
    finally:
        os.close(pidfd)


def daemon_pid(runtime: Path) -> int:
    """Waits for nothing: there is a daemon, or an error."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(runtime / "daemon.sock"))
        return _ask(caller, "hello", protocol=1)["pid"]


def mounted(runtime: Path) -> bool:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split()[1] == str(runtime / "mount") for line in lines)


def _ask(caller: socket.socket, call: str, **fields: object) -> dict[str, int]:
    body = json.dumps({"id": 1, "call": call, **fields}).encode()
    caller.sendall(len(body).to_bytes(4) + body)
    length = int.from_bytes(caller.recv(4, socket.MSG_WAITALL))
    answer: dict[str, dict[str, int]] = json.loads(caller.recv(length, socket.MSG_WAITALL))
    return answer["ok"]


def _wait(pidfd: int) -> None:
    """Return when the process has ended, reaped or not."""
    assert select.select([pidfd], [], [], 60)[0], "the storage daemon does not end"
