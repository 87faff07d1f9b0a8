"""The device state of a paused QEMU, written into a file.

QEMU writes into memory and this process into the file: QEMU says no more than
"I/O error" when a disk is full.
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from agentenv.aio.failures import FULL, USED_UP
from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NoSpace
from agentenv.vmm.qmp import Monitor

_FD_SET: Final = 1


async def save_device_state(monitor: Monitor, path: Path) -> None:
    """Write it to *path*; failed, *path* is not there. `NoSpace` when there is no room, `Exhausted` over a quota."""
    memory = os.memfd_create("aenv-device-state", os.MFD_CLOEXEC)
    try:
        await _save(monitor, memory)
        # Not cut short: the thread works on a descriptor that is closed here.
        await to_its_end("write device state", asyncio.to_thread(_write_out, memory, path))
    finally:
        os.close(memory)


async def _save(monitor: Monitor, memory: int) -> None:
    # Reopened: QEMU picks a descriptor of the set by its access mode.
    write_only = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        await monitor.execute("add-fd", {"fdset-id": _FD_SET}, fds=(write_only,))
    finally:
        os.close(write_only)
    try:
        # Not "live": that would hand the disk over to another VMM, and a later switch of it would fail.
        await monitor.execute("xen-save-devices-state", {"filename": f"/dev/fdset/{_FD_SET}", "live": False})
    finally:
        with contextlib.suppress(AgentEnvError):
            await monitor.execute("remove-fd", {"fdset-id": _FD_SET})
    if os.fstat(memory).st_size == 0:
        raise Bug("QEMU saved a device state of no bytes")


def _write_out(memory: int, path: Path) -> None:
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            size, at = os.fstat(memory).st_size, 0
            while at < size:
                at += os.sendfile(target, memory, at, size - at)
        finally:
            os.close(target)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _file_error(path, error) from error


def _file_error(path: Path, error: OSError) -> AgentEnvError:
    message = f"cannot write {path}: {error.strerror}"
    if error.errno in FULL:
        return NoSpace(message)
    if error.errno in USED_UP:
        return Exhausted(message)
    return Bug(message)
