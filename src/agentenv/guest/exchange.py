"""One request to the agent of a guest and its answer, with nothing believed that comes back.

Whoever is root in a guest may replace the agent. So each part of an answer is bounded:
what comes before it, its head, its body. It is never unpacked, never followed to another
address and never remembered: the node would be made to speak to its own network, with
the control secret at hand. How long it may take is the caller's deadline.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from agentenv.guest.answer import GuestGarbage
from agentenv.guest.connection import GuestConnection, GuestGone
from agentenv.model.errors import Unavailable

TURN_HEADER: Final = "X-Agentenv-Turn"
CONTROL_HEADER: Final = "X-Agentenv-Control"
TOKEN_HEADER: Final = "X-Access-Token"  # noqa: S105 - the name of a header
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_STREAM_BYTES: Final = 256 << 20
_MAX_MESSAGE_BYTES: Final = 2000
_CONNECTIONS: Final = 8


class NotConnected(Exception):
    """The exchange broke off; asking again may work. ``delivered``: the agent may have done what was asked."""

    def __init__(self, why: str, *, delivered: bool) -> None:
        super().__init__(why)
        self.delivered = delivered


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; `Unavailable` if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Unavailable("the guest agent gave no proper answer: it is not JSON") from error

    @property
    def message(self) -> str:
        return self.body[:_MAX_MESSAGE_BYTES].decode(errors="replace") or f"status {self.status}"


class Streaming:
    """An answer whose head has come, and whose body is still to be read."""

    def __init__(self, connection: GuestConnection, status: int) -> None:
        self.status = status
        self._connection = connection

    async def read(self, *, limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body; `Unavailable` for one that goes on and on."""
        return b"".join([part async for part in self.parts(limit_bytes=limit_bytes)])

    async def parts(self, *, limit_bytes: int = MAX_STREAM_BYTES) -> AsyncIterator[bytes]:
        """The body as it comes; `Unavailable` beyond *limit_bytes*."""
        total = 0
        while part := await self._connection.read_body():
            total += len(part)
            if total > limit_bytes:
                raise Unavailable(f"the guest agent sent more than {limit_bytes} bytes")
            yield part


class Exchange:
    """The connections to one agent. After `close` there is no other: its address is given to another guest."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._connections: set[GuestConnection] = set()
        self._idle: list[GuestConnection] = []
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        *,
        secret: str | None = None,
        access_token: str | None = None,
        turn: int | None = None,
        body: dict[str, Any] | None = None,
        connect_timeout_s: float,
    ) -> Answer:
        """Return the answer, whatever its status. `NotConnected` or `Unavailable` if there is none."""
        headers = {}
        if secret is not None:
            headers[CONTROL_HEADER] = secret
        if access_token is not None:
            headers[TOKEN_HEADER] = access_token
        if turn is not None:
            headers[TURN_HEADER] = str(turn)
        content = b""
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, separators=(",", ":")).encode()
        async with self.stream(method, path, headers, content, connect_timeout_s=connect_timeout_s) as answer:
            return Answer(answer.status, await answer.read())

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes, *, connect_timeout_s: float
    ) -> AsyncIterator[Streaming]:
        """Send a request and give its answer, to be read inside. Raises as `ask` does, inside too."""
        async with self._places:
            connection = await self._acquire(connect_timeout_s)
            try:
                connection.begin(head_only=False)
                connection.write(self._head(method, path, headers, len(content)), content)
                yield Streaming(connection, (await connection.read_head()).status)
            except GuestGone as error:
                if self._closed:
                    raise Unavailable("the connection to this guest is closed") from error
                raise NotConnected(error.message, delivered=True) from error
            except GuestGarbage as error:
                raise Unavailable(f"the guest agent gave no proper answer to {path}: {error.message}") from error
            finally:
                self._release(connection)

    async def close(self) -> None:
        """Cut every connection. Idempotent; an exchange that is going on breaks off."""
        self._closed = True
        for connection in list(self._connections):
            connection.abort()

    def _head(self, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
        all_headers = {
            "Host": f"{self._host}:{self._port}",
            "Accept-Encoding": "identity",
            **headers,
            "Content-Length": str(length),
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")

    async def _acquire(self, timeout_s: float) -> GuestConnection:
        self._refuse_closed()
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, made = await loop.create_connection(lambda: GuestConnection(self._lost), self._host, self._port)
        except OSError as error:  # a time-out is one
            raise NotConnected(str(error) or f"no connection in {timeout_s:g} s", delivered=False) from error
        if self._closed:
            made.abort()
            self._refuse_closed()
        self._connections.add(made)
        return made

    def _release(self, connection: GuestConnection) -> None:
        if connection.is_reusable and not self._closed:
            connection.retire()  # from here on whatever the guest says ends the connection
            self._idle.append(connection)
        else:
            connection.abort()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable("the connection to this guest is closed")

    def _lost(self, connection: GuestConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
