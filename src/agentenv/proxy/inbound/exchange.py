"""One request of one client as an ASGI application sees it: `receive`, `send`, and how the answer is framed.

An application that stops before its answer is complete cuts the connection: the client
must never take a part for the whole.
"""

import asyncio
import http
import json
from typing import Final, Protocol
from urllib.parse import unquote

import structlog

from agentenv.model.errors import Bug, Unavailable
from agentenv.proxy.asgi import UPGRADE, ASGIApp, Message, Scope
from agentenv.proxy.inbound.reader import Head

BUFFER_BYTES: Final = 256 * 1024  # of a request's body; beyond it the client waits

_log = structlog.get_logger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus
}


class Wire(Protocol):
    """What an exchange needs of its connection."""

    def write(self, *parts: bytes) -> None: ...

    async def drain(self) -> None:
        """Return when the client has taken enough to be given more, or is gone."""
        ...

    def may_read(self) -> None:
        """The body is being taken: go on reading if that was stopped."""
        ...

    def take_over(self, head: bytes, end: asyncio.Protocol) -> bytes: ...

    def over(self, exchange: "Exchange") -> None:
        """The answer is complete."""
        ...

    def cut(self) -> None: ...

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer has, unless the application gives its own."""
        ...


class Exchange:
    """
    Attributes:
        is_ended: the whole request has come.
        is_over: the whole answer was sent, or the connection was taken over.
        keep_alive: the connection may serve another request afterwards.
    """

    def __init__(self, wire: Wire, head: Head) -> None:
        self.head = head
        self.is_ended = False
        self.is_over = False
        self.is_started = False
        self.keep_alive = head.keep_alive
        self._buffered_bytes = 0
        self._wire = wire
        self._is_gone = False
        self._is_end_told = False
        self._owes_continue = head.body.has_body and any(
            name == b"expect" and value.strip().lower() == b"100-continue" for name, value in head.headers
        )
        self._body: list[bytes] = []
        self._event = asyncio.Event()
        self._has_body = False  # the answer
        self._chunked = False
        self._left_bytes: int | None = None  # of an answer of known length

    # The connection says

    @property
    def is_full(self) -> bool:
        """Whether what has come of the body should be taken before more is read."""
        return self._buffered_bytes >= BUFFER_BYTES

    def feed(self, content: bytes) -> None:
        if self.is_over:
            return  # too late to matter
        self._body.append(content)
        self._buffered_bytes += len(content)
        self._event.set()

    def end(self) -> None:
        self.is_ended = True
        self._event.set()

    def leave(self) -> None:
        """The client is gone."""
        self._is_gone = True
        self._event.set()

    # The application

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Never raises, unless cancelled: what the application does wrong is logged, and the client told or cut off."""
        if self.head.may_upgrade:
            scope["extensions"][UPGRADE] = self._take_over
        try:
            await self._answer(app, scope)
        finally:
            if not self.is_over and not self._is_gone:
                self._wire.cut()

    async def _answer(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:  # noqa: BLE001  (whatever it is, it is the application's, and the server goes on)
            if not self._is_gone:
                _log.exception("the answer to %s %r failed", self.head.method, self.head.path)
        if not self.is_started:
            await self._send_bug()

    async def receive(self) -> Message:
        if self._owes_continue and not self.is_started and not self._is_gone:
            self._owes_continue = False
            self._wire.write(_CONTINUE)
        while True:
            if self._is_gone or self.is_over:
                return {"type": "http.disconnect"}
            if self._body or (self.is_ended and not self._is_end_told):
                return self._next_body()
            self._event.clear()
            await self._event.wait()

    async def send(self, message: Message) -> None:
        if self._is_gone:
            return
        match message["type"]:
            case "http.response.start":
                self._start(message["status"], list(message.get("headers", [])))
            case "http.response.body":
                self._pass(message.get("body", b""), more=message.get("more_body", False))
                await self._wire.drain()
            case other:
                raise Bug(f"an application sent {other!r}")

    def _next_body(self) -> Message:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._buffered_bytes = 0
        self._is_end_told = self.is_ended
        self._wire.may_read()
        return {"type": "http.request", "body": body, "more_body": not self.is_ended}

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.is_started:
            raise Bug("an application started its answer twice")
        given = {name.lower() for name, _ in headers}
        headers += [pair for pair in self._wire.default_headers() if pair[0] not in given]
        lines = [
            b"%b: %b\r\n" % pair for pair in headers if pair[0].lower() not in (b"connection", b"transfer-encoding")
        ]
        if self._owes_continue or (b"connection", b"close") in headers:
            # A client that was not told to go on may or may not send the body; nobody could tell what comes next.
            self.keep_alive = False
        self._has_body = self.head.method != "HEAD" and status not in (204, 304)
        if b"content-length" in given:
            self._left_bytes = next(int(value) for name, value in headers if name.lower() == b"content-length")
        elif self._has_body and self.head.http_version == "1.1":
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        elif self._has_body:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        block = b"".join(lines)
        if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
            raise Bug("an application's header has a line break in it")
        self.is_started = True
        self._wire.write(_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, block, b"\r\n")

    def _pass(self, body: bytes, *, more: bool) -> None:
        if not self.is_started or self.is_over:
            raise Bug("an application sent a body outside its answer")
        if not self._has_body:
            pass
        elif self._chunked:
            if body:
                self._wire.write(b"%x\r\n" % len(body), body, b"\r\n" if more else b"\r\n0\r\n\r\n")
            elif not more:
                self._wire.write(b"0\r\n\r\n")
        else:
            if self._left_bytes is not None:
                self._left_bytes -= len(body)
                if self._left_bytes < 0 or (self._left_bytes and not more):
                    raise Bug("an answer is not as long as its application said")
            if body:
                self._wire.write(body)
        if not more:
            self.is_over = True
            self._body.clear()
            self._buffered_bytes = 0
            self._event.set()
            self._wire.over(self)

    def _take_over(self, head: bytes, end: asyncio.Protocol) -> bytes:
        if self._is_gone:
            raise Unavailable("the client has left")
        if self.is_started:
            raise Bug("an answer was begun before the connection was taken over")
        self.is_started = self.is_over = True
        return self._wire.take_over(head, end)

    async def _send_bug(self) -> None:
        body = json.dumps({"code": 500, "message": "the server failed", "error_code": "bug"}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def scope_of(
    head: Head, client: tuple[str, int] | None, server: tuple[str, int] | None, state: dict[str, object]
) -> Scope:
    """The ASGI scope of a request."""
    path = head.path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.http_version,
        "method": head.method,
        "scheme": "http",
        "path": unquote(path) if "%" in path else path,
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": client,
        "server": server,
        "state": state.copy(),
        "extensions": {},
    }
