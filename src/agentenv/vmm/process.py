"""One process of the host: told apart from any later one with its pid, watched, killed, reaped.

A process is held by a pidfd, so that a signal can never reach a stranger. It need
not be our child: one that an earlier server started is watched in the same way,
only its exit status is not ours to read.
"""

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentenv.model.errors import NotFound, Unavailable
from agentenv.model.machine import ProcessIdentity

_PROC: Final = Path("/proc")


def read_start_time(pid: int) -> tuple[int, bool] | None:
    """Return when the process with *pid* started and whether it still runs; None if there is none.

    False is a zombie: it has ended, and keeps its pid until it is reaped.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold blanks and parentheses: fields are counted from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]), fields[0] not in (b"Z", b"X")


def read_identity(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has *pid* now; None if there is none or only its zombie is left."""
    match read_start_time(pid):
        case (start_time, True):
            return ProcessIdentity(pid, start_time)
        case _:
            return None


def is_alive(identity: ProcessIdentity) -> bool:
    return read_identity(identity.pid) == identity


def open_pidfd(identity: ProcessIdentity) -> int:
    """Return a pidfd of that very process. Raises `NotFound` if it is gone."""
    gone = NotFound(f"process {identity.pid} is gone")
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        raise gone from None
    # Looked at while the pidfd is open: the process it holds is the one that has this pid.
    if not is_alive(identity):
        os.close(pidfd)
        raise gone
    return pidfd


def reap(pidfd: int) -> int | None:
    """Collect the exit status of a process that has ended.

    Returns the status, negative for a signal; None if the process is not our
    child or somebody else has collected it.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_all(identities: list[ProcessIdentity], *, timeout_s: float) -> list[ProcessIdentity]:
    """Kill processes and wait until they are gone; return those that are still there after *timeout_s*. Blocks."""
    held: dict[int, ProcessIdentity] = {}
    try:
        for identity in identities:
            with contextlib.suppress(NotFound):
                held[open_pidfd(identity)] = identity
        poll = select.poll()
        for pidfd in held:
            poll.register(pidfd, select.POLLIN)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        left = set(held)
        deadline = time.monotonic() + timeout_s
        while left and (remaining_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(remaining_s * 1000):
                poll.unregister(pidfd)
                reap(pidfd)
                left.discard(pidfd)
        return [held[pidfd] for pidfd in left]
    finally:
        for pidfd in held:
            os.close(pidfd)


class Process:
    """A process watched by the running event loop, until it has ended or `close` is called."""

    def __init__(self, identity: ProcessIdentity, *, pidfd: int | None = None) -> None:
        """*pidfd* of that process becomes ours to close. Without it, raises `NotFound` if the process is gone."""
        self.identity = identity
        self.code: int | None = None
        self._loop = asyncio.get_running_loop()
        self.has_ended = False
        self._settled = asyncio.Event()  # ended, or no longer watched
        self._callbacks: list[Callable[[], None]] = []
        self._pidfd = open_pidfd(identity) if pidfd is None else pidfd
        self._loop.add_reader(self._pidfd, self._on_end)

    def __repr__(self) -> str:
        state = f"ended with {self.code}" if self.has_ended else "alive"
        return f"<Process {self.identity.pid} {state}>"

    @property
    def is_watched(self) -> bool:
        return self._pidfd >= 0

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call *callback* from the loop when the process ends; at once if it has."""
        if self.has_ended:
            callback()
        else:
            self._callbacks.append(callback)

    def kill(self) -> None:
        """Send SIGKILL. Stopped processes die of it too; one that has ended is left alone."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int | None:
        """Return the exit status when the process has ended: negative for a signal, None if it is not our child.

        Raises `Unavailable` if it is no longer watched.
        """
        await self._settled.wait()
        if not self.has_ended:
            raise Unavailable(f"process {self.identity.pid} is no longer watched")
        return self.code

    def close(self) -> None:
        """Stop watching; the process lives on. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._settled.set()

    def _on_end(self) -> None:
        self.code = reap(self._pidfd)
        self.has_ended = True
        self.close()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
