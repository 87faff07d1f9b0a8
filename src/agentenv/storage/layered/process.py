"""The storage daemon as a process: started in a session of its own, watched, and outlived by nothing of ours.

It belongs to the data directory and not to a server: the next server finds it by its socket.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.aio.failures import translated
from agentenv.aio.tasks import to_its_end
from agentenv.model.errors import Conflict, Invalid, Unavailable, Unsupported
from agentenv.storage.workers import Workers

PROGRAM: Final = "storaged"
START_TIMEOUT_S: Final = 60.0
MAX_SOCKET_PATH_BYTES: Final = 107  # the kernel's limit is 108 with the closing zero
MAX_LOG_BYTES: Final = 1 << 20
SERVING: Final = b"serving\n"

_ANOTHER: Final = 75
"""The exit status of a daemon that finds another one in its directory."""


@dataclass(frozen=True, slots=True)
class Places:
    """Of one daemon. *root* survives a boot; *runtime*, which is short, need not."""

    root: Path
    runtime: Path

    @property
    def socket(self) -> Path:
        return self.runtime / "daemon.sock"

    @property
    def keeper(self) -> Path:
        return self.runtime / "keeper.sock"

    @property
    def mount(self) -> Path:
        return self.runtime / "mount"

    @property
    def log(self) -> Path:
        return self.runtime / "daemon.log"

    def check(self) -> None:
        """Raise `Invalid` for a directory in which no socket can be."""
        longest = max(len(os.fsencode(path)) for path in (self.socket, self.keeper))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise Invalid(
                f"the path of the storage daemon's socket has {longest} bytes, and may have {MAX_SOCKET_PATH_BYTES}",
                hint="choose a shorter runtime directory",
            )


def find_program(name: str) -> Path:
    """Return the daemon's program: a path, a name on the PATH, or beside this interpreter. `Unsupported` if missing."""
    beside = Path(sys.executable).parent
    found = shutil.which(name) or shutil.which(name, path=str(beside))
    if found is None:
        raise Unsupported(f"there is no program {name}", hint="make setup builds it; or set storage.daemon_binary")
    return Path(found).absolute()


def runs(pid: int, program: Path) -> bool:
    """Whether process *pid* runs the file that *program* is now, and not one that was replaced. Blocks."""
    try:
        running, there = Path(f"/proc/{pid}/exe").stat(), program.stat()
    except OSError:
        return False
    return (running.st_dev, running.st_ino) == (there.st_dev, there.st_ino)


class Child:
    """A daemon that this process has started. Watched until it has ended, or until `release`."""

    def __init__(self, pid: int, on_exit: Callable[[int], None]) -> None:
        self._pid = pid
        self._on_exit = on_exit
        self._status: int | None = None
        self._pidfd: int | None = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def release(self) -> None:
        """Watch it no longer. Idempotent."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._ended.set()

    async def wait(self) -> int | None:
        """Return its status, negative for a signal, when it has ended; None after `release`."""
        await self._ended.wait()
        return self._status

    def _reap(self) -> None:
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED)
        assert ended is not None
        self._status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.release()
        self._on_exit(self._status)


async def start(program: Path, places: Places, workers: Workers, on_exit: Callable[[int], None]) -> Child:
    """Start a daemon and return it when it serves; *on_exit* is called on the loop with its status when it has ended.

    *workers* are threads that never look at an image: others may all be waiting for this daemon.

    Cancelled or too slow, it lives on. Raises `Conflict` if another one has the directory,
    `Unavailable` with its last words if it does not come up, `Unsupported` if it cannot be executed.
    """
    places.check()
    pid, output = await to_its_end(
        "start the storage daemon", workers.run(f"start {program}", lambda _: _spawn(program, places))
    )
    child = Child(pid, on_exit)
    try:
        if await _first_line(output) == SERVING:
            return child
        status = await child.wait()
    except BaseException:
        child.release()
        raise
    if status == _ANOTHER:
        raise Conflict(f"another storage daemon has {places.root}")
    said = await workers.run("read what the storage daemon said", lambda _: tail(places.log))
    raise Unavailable(f"the storage daemon ended with status {status}: {said}")


def tail(log: Path) -> str:
    """What the daemon said last. Blocks."""
    try:
        return log.read_text(errors="replace")[-500:].strip() or "it said nothing"
    except OSError:
        return "it said nothing"


def _spawn(program: Path, places: Places) -> tuple[int, int]:
    """Return the pid, and what is read to know that it serves."""
    command = [str(program), "serve", "--root", str(places.root), "--socket", str(places.socket)]
    command += ["--mount", str(places.mount), "--keeper", str(places.keeper)]
    with translated(f"start {program}"):
        places.runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        if places.log.exists() and places.log.stat().st_size > MAX_LOG_BYTES:
            places.log.replace(places.log.with_suffix(".log.1"))
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawn(
                program,
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writing, 1),
                    (os.POSIX_SPAWN_OPEN, 2, places.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                ],
                setsid=True,  # no signal of a terminal, and none of a service manager's for our group
            )
        except PermissionError as error:
            os.close(reading)
            raise Unsupported(f"{program} cannot be executed: {error.strerror}") from error
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return pid, reading


async def _first_line(output: int) -> bytes:
    """What it says once it serves, or nothing if it ended before. *output* is closed in the end."""
    loop = asyncio.get_running_loop()
    said, whole = bytearray(), asyncio.Event()

    def read() -> None:
        part = os.read(output, len(SERVING))
        said.extend(part)
        if not part or said.endswith(b"\n"):
            loop.remove_reader(output)
            whole.set()

    loop.add_reader(output, read)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await whole.wait()
            return bytes(said)
    except TimeoutError:
        raise Unavailable(f"the storage daemon does not serve after {START_TIMEOUT_S:g} s") from None
    finally:
        loop.remove_reader(output)
        os.close(output)
