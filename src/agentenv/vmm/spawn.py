"""Start a program inside a network namespace, so that it outlives this server.

A program becomes the leader of a session of its own, holds no descriptor of ours
but the ones given to it, and is not waited for by whoever starts it.

A thread of ours steps into the namespace, spawns, and steps back: no `nsenter`
process in between, which would cost a second exec and swallow signals. The
libc is called directly because `os.posix_spawn` keeps the interpreter's lock until
the child has executed, which takes milliseconds on a busy machine, and the event
loop would stand still for that long.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from agentenv.aio.failures import USED_UP
from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NotFound, Unavailable, Unsupported
from agentenv.model.machine import ProcessIdentity
from agentenv.vmm.process import kill_all, read_start_time

FIRST_INHERITED: Final = 3
"""The descriptor number in the child of the first inherited one."""

_CLONE_NEWNET: Final = 0x4000_0000
_SETSID: Final = 0x80
_SETSIGDEF: Final = 0x04
_SETSIGMASK: Final = 0x08
_OPAQUE_BYTES: Final = 1024  # more than posix_spawnattr_t, file_actions_t or sigset_t take in any libc
_ABOVE: Final = 64  # descriptors are moved above the numbers they are copied to
_UNDO_TIMEOUT_S: Final = 10.0
_OUT_OF_RESOURCES: Final = USED_UP | {errno.EAGAIN}

_libc: Final = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A program that executes, and may have ended since. ``pidfd`` is the receiver's to close."""

    identity: ProcessIdentity
    pidfd: int


class Spawner:
    """Starts programs. Its threads change namespaces, so they run nothing else."""

    def __init__(self, *, threads: int = 2, oom_score_adj: int = 500) -> None:
        """*oom_score_adj*: what the kernel should kill before this server when memory runs out."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="vmm-spawn")
        self._oom_score_adj = oom_score_adj

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        netns: Path | None,
        output: int,
        inherit: Sequence[int] = (),
        interface: str | None = None,
    ) -> Started:
        """Start *argv*, its first element a path, in *netns* (None: ours), and return once it executes.

        *output* becomes its standard output and error; each of *inherit* in turn
        becomes descriptor `FIRST_INHERITED` and up. The caller keeps its own copies.
        Cancelled, the program is killed. Raises `NotFound` if there is no such namespace
        or no *interface* in it, `Unsupported` when the program is missing or not
        executable, `Exhausted` when the host has no process or descriptor left.
        """
        fds = _copies([output, *inherit])
        try:
            started = self._threads.submit(self._start, list(argv), netns, fds, interface)
        except RuntimeError as error:
            _close(fds)
            raise Unavailable("no more programs are started: the spawner is closed") from error
        waiting = asyncio.wrap_future(started)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            started.add_done_callback(_undo)
            waiting.add_done_callback(_ignore)
            raise

    def close(self) -> None:
        """Wait for what is being started. Programs live on."""
        self._threads.shutdown()

    def _start(self, argv: list[str], netns: Path | None, fds: list[int], interface: str | None) -> Started:
        try:
            with inside(netns):
                if interface is not None:
                    _require_interface(interface, netns)
                pid = _posix_spawn(argv, fds)
        finally:
            _close(fds)
        # A child that nobody has reaped keeps its pid: neither of these can meet another process.
        pidfd = os.pidfd_open(pid)
        stat = read_start_time(pid)
        assert stat is not None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(self._oom_score_adj))
            # A core of a VMM would hold guest memory, and fill the disk.
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        return Started(ProcessIdentity(pid, stat[0]), pidfd)


def _ignore(started: "asyncio.Future[Started]") -> None:
    """Look at the outcome, so that asyncio does not report an error that nobody waits for."""
    if not started.cancelled():
        started.exception()


def _undo(started: Future[Started]) -> None:
    """Nobody takes over what was started: end it. Runs in the spawner's thread."""
    if started.exception() is None:
        os.close(started.result().pidfd)
        kill_all([started.result().identity], timeout_s=_UNDO_TIMEOUT_S)


@contextmanager
def inside(netns: Path | None) -> Iterator[None]:
    """Let this thread, and what it starts, live in *netns* for the length of the block; None changes nothing.

    Raises `NotFound` if there is no such namespace. Not for the main thread.
    """
    if netns is None:
        yield
        return
    try:
        target = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"network namespace {netns}: {error.strerror}") from error
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)  # of the main thread, which never moves
    try:
        if _libc.setns(target, _CLONE_NEWNET) != 0:
            raise _failed(f"enter {netns}", ctypes.get_errno())
        try:
            yield
        finally:
            # A thread that cannot go back does no harm beyond holding the namespace: each start names its own.
            if _libc.setns(home, _CLONE_NEWNET) != 0:
                _log.error("a spawner thread is stuck in %s: %s", netns, os.strerror(ctypes.get_errno()))
    finally:
        os.close(target)
        os.close(home)


def _require_interface(name: str, netns: Path | None) -> None:
    """QEMU makes a tap that is not there, and the guest would be cut off without anyone noticing."""
    try:
        socket.if_nametoindex(name)
    except OSError as error:
        raise NotFound(f"there is no interface {name} in {netns}") from error


def _copies(fds: list[int]) -> list[int]:
    """Return descriptors of the same files: whoever is cancelled closes its own while a thread still works.

    They are above every number that one of them is to get in the child.
    """
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE))  # noqa: PERF401 - closed if one fails
    except OSError as error:
        _close(copies)
        raise _failed("copy a descriptor", error.errno or 0) from error
    return copies


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _posix_spawn(argv: list[str], fds: list[int]) -> int:
    """Start *argv* with the first of *fds* as output and error, and the rest from `FIRST_INHERITED` up."""
    attributes = ctypes.create_string_buffer(_OPAQUE_BYTES)
    actions = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _check(_libc.posix_spawnattr_init(attributes))
    _check(_libc.posix_spawn_file_actions_init(actions))
    try:
        _set_attributes(attributes)
        _check(_libc.posix_spawn_file_actions_addopen(actions, 0, b"/dev/null", os.O_RDWR, 0))
        for number, fd in enumerate([fds[0], *fds], start=1):
            _check(_libc.posix_spawn_file_actions_adddup2(actions, fd, number))
        if hasattr(_libc, "posix_spawn_file_actions_addclosefrom_np"):  # glibc 2.34
            # Ours close on exec anyway; this is for what some library has left open.
            _check(_libc.posix_spawn_file_actions_addclosefrom_np(actions, FIRST_INHERITED + len(fds) - 1))
        pid = ctypes.c_int()
        code = _libc.posix_spawn(
            ctypes.byref(pid), os.fsencode(argv[0]), actions, attributes, _strings(argv), _strings(_environment())
        )
        if code != 0:
            raise _failed(f"start {argv[0]}", code)
        return pid.value
    finally:
        _libc.posix_spawn_file_actions_destroy(actions)
        _libc.posix_spawnattr_destroy(attributes)


def _set_attributes(attributes: ctypes.Array[ctypes.c_char]) -> None:
    ignored = ctypes.create_string_buffer(_OPAQUE_BYTES)
    nothing = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _libc.sigemptyset(ignored)
    _libc.sigemptyset(nothing)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and inherited over exec
        _libc.sigaddset(ignored, int(number))
    _check(_libc.posix_spawnattr_setsigdefault(attributes, ignored))
    _check(_libc.posix_spawnattr_setsigmask(attributes, nothing))
    _check(_libc.posix_spawnattr_setflags(attributes, ctypes.c_short(_SETSID | _SETSIGDEF | _SETSIGMASK)))


def _environment() -> list[str]:
    """Nothing of ours: no secret of the server is to be found in a VMM's environment."""
    return ["LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]


def _strings(values: list[str]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * (len(values) + 1))(*map(os.fsencode, values), None)


def _check(code: int) -> None:
    if code != 0:
        raise _failed("prepare a new process", code)


def _failed(what: str, code: int) -> AgentEnvError:
    message = f"cannot {what}: {os.strerror(code)}"
    if code in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return Unsupported(message, hint="is the program installed, and executable?")
    if code in _OUT_OF_RESOURCES:
        return Exhausted(message)
    if code == errno.EPERM:
        return Unsupported(message, hint="the server has to run as root")
    return Bug(message)
