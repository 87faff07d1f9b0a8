"""QEMU's machine protocol over a Unix socket: one command at a time, events as they come.

`parse` is the protocol without a socket; `Monitor` is the socket. A command that is
not answered in time leaves the connection usable: its late answer is recognised by
its id and dropped.
"""

import array
import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from agentenv.model.errors import AgentEnvError, Bug, Exhausted, NoSpace, Unavailable, Unsupported

Json: TypeAlias = Any  # what QEMU sends is checked where it is used

MAX_MESSAGE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 64 << 10
_RECONNECT_S: Final = 0.02

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message on a connection."""


@dataclass(frozen=True, slots=True)
class Answer:
    id: int | None
    value: Json


@dataclass(frozen=True, slots=True)
class Refusal:
    id: int | None
    error_class: str
    text: str


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: Mapping[str, Json]


Message: TypeAlias = Greeting | Answer | Refusal | Event


def parse(line: bytes) -> Message:
    """Return what one line says. Raises ValueError if that is not QMP."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match value:
        case {"QMP": {}}:
            return Greeting()
        case {"event": str(name), **rest}:
            data = rest.get("data")
            return Event(name, data if isinstance(data, dict) else {})
        case {"error": {"class": str(error_class), "desc": str(text)}, **rest}:
            return Refusal(_id(rest), error_class, text)
        case {"return": result, **rest}:
            return Answer(_id(rest), result)
        case _:
            raise ValueError(f"not a QMP message: {line[:100]!r}")


def _id(rest: Mapping[Any, Json]) -> int | None:
    found = rest.get("id")
    return found if isinstance(found, int) else None


class Lines:
    """Cuts a stream of bytes into lines, none longer than `MAX_MESSAGE_BYTES`."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that *data* completes. Raises ValueError for one that is too long."""
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            self._partial += part
            lines.append(bytes(self._partial))
            self._partial.clear()
        self._partial += rest
        if len(self._partial) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        return [line for line in lines if line.strip()]


def refusal(command: str, refused: Refusal) -> AgentEnvError:
    """Return the error for a command that QEMU refused; its own words are kept."""
    message = f"QEMU refused {command}: {refused.text}"
    if refused.error_class == "CommandNotFound":
        return Unsupported(message, hint="use the QEMU of a current distribution")
    return by_text(message)


def by_text(message: str, *, otherwise: type[AgentEnvError] = Bug) -> AgentEnvError:
    """Return an error of the kind that QEMU's words point to; it gives the cause in no other way."""
    if "No space left on device" in message or "Disk quota exceeded" in message:
        return NoSpace(message)
    if "Cannot allocate memory" in message or "Too many open files" in message:
        return Exhausted(message)
    return otherwise(message)


class _Pending:
    __slots__ = ("future", "id")

    def __init__(self, command_id: int) -> None:
        self.id = command_id
        self.future: asyncio.Future[Answer | Refusal] = asyncio.get_running_loop().create_future()


class Monitor:
    """One connection. Made by `connect` or `over`; usable until `close`, or until QEMU is gone."""

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._lines = Lines()
        self._ids = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()
        self._pending: _Pending | None = None
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._waiters: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        self._listeners: list[Callable[[Event], None]] = []
        self._lost: str | None = None
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    @classmethod
    async def connect(cls, path: Path, *, timeout_s: float) -> "Monitor":
        """Connect to the socket *path* and take the greeting; each step and command may take *timeout_s*.

        A monitor serves one client: another one's connection must end first, and is
        waited for. Raises `Unavailable` when nobody answers in time.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(timeout_s):
                # The kernel does not tell when a queue of connections has room again.
                while not _try_connect(connection, path):  # noqa: ASYNC110
                    await asyncio.sleep(_RECONNECT_S)
        except TimeoutError:
            connection.close()
            raise Unavailable(f"the monitor {path} takes no connection") from None
        except BaseException:
            connection.close()
            raise
        return await cls.over(connection, timeout_s=timeout_s)

    @classmethod
    async def over(cls, connection: socket.socket, *, timeout_s: float) -> "Monitor":
        """Greet over an open *connection*, which becomes the monitor's to close, also when this raises."""
        monitor = cls(connection, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await monitor._greeted
            await monitor.execute("qmp_capabilities")
        except TimeoutError:
            monitor.close()
            raise Unavailable(
                f"QEMU's monitor did not greet within {timeout_s:g} s",
                hint="another client may hold the connection, or QEMU hangs",
            ) from None
        except BaseException:
            monitor.close()
            raise
        return monitor

    def __repr__(self) -> str:
        return f"<Monitor {self._lost or 'connected'}, {len(self._waiters)} waiting for events>"

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        fds: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Json:
        """Carry out one command and return its result; *fds* travel with it, and stay the caller's.

        Raises `Unavailable` when QEMU is gone or does not answer in time, and the
        kind that QEMU's words point to (`refusal`) when it says no.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s), self._one_at_a_time:
                answer = await self._exchange(command, dict(arguments or {}), fds)
        except TimeoutError:
            raise Unavailable(f"QEMU did not answer {command} within {limit_s:g} s") from None
        if isinstance(answer, Refusal):
            raise refusal(command, answer)
        return answer.value

    def expect(self, matches: Callable[[Event], bool]) -> "asyncio.Future[Event]":
        """Return a future of the next event that *matches*. Asked for before the command that causes it.

        It fails with `Unavailable` when the connection is lost; whoever gives up waiting cancels it.
        """
        future: asyncio.Future[Event] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(Unavailable(self._lost))
        else:
            self._waiters.append((matches, future))
            future.add_done_callback(self._forget_waiter)
        return future

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call *listener* for every event from now on, from the loop."""
        self._listeners.append(listener)

    def close(self) -> None:
        """End the connection; the VM is not touched. Idempotent."""
        self._lose("the monitor connection is closed")

    async def _exchange(self, command: str, arguments: dict[str, Json], fds: Sequence[int]) -> Answer | Refusal:
        pending = self._pending = _Pending(next(self._ids))
        try:
            message = {"execute": command, "id": pending.id}
            self._send(message | {"arguments": arguments} if arguments else message, fds)
            return await pending.future
        finally:
            self._pending = None
            _settle(pending.future)

    def _send(self, message: Mapping[str, Json], fds: Sequence[int]) -> None:
        if self._lost is not None:
            raise Unavailable(self._lost)
        # QEMU reads its monitor a byte at a time, several system calls for each: 200 blanks are a millisecond.
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self._socket.sendmsg([data], rights)
        except BlockingIOError:
            raise Unavailable("QEMU does not read its monitor") from None
        except OSError as error:
            self._lose(f"the monitor connection broke: {error.strerror}")
            raise Unavailable(f"the monitor connection broke: {error.strerror}") from error
        if sent != len(data):
            # Half a command cannot be taken back.
            self._lose("QEMU does not read its monitor")
            raise Unavailable("QEMU does not read its monitor")

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the monitor connection broke: {error.strerror}")
            return
        if not data:
            self._lose("QEMU closed the monitor connection")
            return
        try:
            for line in self._lines.feed(data):
                self._take(parse(line))
        except ValueError as error:
            self._lose(f"QEMU's monitor does not speak QMP: {error}")

    def _take(self, message: Message) -> None:
        match message:
            case Greeting():
                if not self._greeted.done():
                    self._greeted.set_result(None)
            case Event():
                for matches, future in list(self._waiters):
                    if not future.done() and matches(message):
                        future.set_result(message)
                for listener in self._listeners:
                    listener(message)
            case Answer() | Refusal():
                pending = self._pending
                if pending is not None and message.id == pending.id and not pending.future.done():
                    pending.future.set_result(message)
                else:
                    _log.debug("an answer came too late: %s", message)

    def _forget_waiter(self, future: "asyncio.Future[Event]") -> None:
        self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]
        _settle(future)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._waiters]
        if self._pending is not None:
            waiting.append(self._pending.future)
        if not self._greeted.done():
            waiting.append(self._greeted)
        for future in waiting:
            if not future.done():
                future.set_exception(Unavailable(reason))


def _settle(future: "asyncio.Future[Any]") -> None:
    """Nobody will look at *future* again; asyncio is not to report an error in it as forgotten."""
    if not future.cancel() and not future.cancelled():
        future.exception()


def _try_connect(connection: socket.socket, path: Path) -> bool:
    """False if the queue of connections is full."""
    try:
        connection.connect(str(path))
    except BlockingIOError:
        return False
    except OSError as error:
        raise Unavailable(f"the monitor {path}: {error.strerror or error}") from error
    return True
