"""What a VMM and the guest's console say, within fixed bounds and without a file on the host.

A guest decides how much is written to its console, and through device errors even
to the standard error of its VMM. So neither goes to a file, which would grow while
no server is there to trim it: the console ends in rings inside the VMM, and the
VMM's own output in a memory file that cannot grow (the kernel refuses the write,
the VMM goes on).
"""

import base64
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from agentenv.model.errors import AgentEnvError
from agentenv.vmm.qmp import Monitor

EARLY_RING: Final = "early"
CONSOLE_RING: Final = "console"
EARLY_RING_BYTES: Final = 16 << 10
CONSOLE_RING_BYTES: Final = 64 << 10
LOG_BYTES: Final = 64 << 10
TAIL_BYTES: Final = 4 << 10
"""How much of each is kept as a process's last words."""

_READ_TIMEOUT_S: Final = 1.0
_NAME: Final = "aenv-vmm-log"


class OutputLog:
    """Standard output and error of a VMM: the first `LOG_BYTES` of them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls) -> "OutputLog":
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, LOG_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd)

    @classmethod
    def of(cls, pid: int) -> "OutputLog | None":
        """Return the log that a running process writes to, if it is one of ours."""
        link = f"/proc/{pid}/fd/2"
        with contextlib.suppress(OSError):
            if str(Path(link).readlink()).startswith(f"/memfd:{_NAME}"):
                return cls(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
        return None

    def fileno(self) -> int:
        return self._fd

    def text(self) -> str:
        """Return all that was said; never blocks, it is memory. Empty once closed."""
        if self._fd < 0:
            return ""
        return os.pread(self._fd, LOG_BYTES, 0).rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Console:
    """The last words of a guest: what is in the rings of its VMM, and what has been taken out of them."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._taken = bytearray()

    def __repr__(self) -> str:
        return f"<Console: {len(self._taken)} bytes kept>"

    async def drain(self) -> None:
        """Take over what the rings hold; what cannot be had is left out. Never raises."""
        for ring, size in ((EARLY_RING, EARLY_RING_BYTES), (CONSOLE_RING, CONSOLE_RING_BYTES)):
            with contextlib.suppress(AgentEnvError, ValueError, TypeError):
                answer = await self._monitor.execute(
                    "ringbuf-read", {"device": ring, "size": size, "format": "base64"}, timeout_s=_READ_TIMEOUT_S
                )
                self._taken += base64.b64decode(answer)
        del self._taken[:-CONSOLE_RING_BYTES]

    def text(self) -> str:
        return self._taken.decode(errors="replace")


def tail(text: str, limit: int = TAIL_BYTES) -> str:
    """Return the end of *text*, cut at a line if there is one to cut at."""
    if len(text) <= limit:
        return text
    end = text[-limit:]
    _, newline, rest = end.partition("\n")
    return rest if newline and rest else end
