"""A small real HTTP server on loopback that answers as a test says, down to the bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Respond = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


@dataclass(slots=True)
class GuestServer:
    """What arrived, and how many connections there were. *respond* may be changed at any time."""

    respond: Respond
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                await self.respond(request, writer)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self.open_connections -= 1
            writer.close()


@asynccontextmanager
async def guest_server(respond: Respond, *, port: int = 0) -> AsyncIterator[GuestServer]:
    guest = GuestServer(respond)
    server = await asyncio.start_server(guest.serve, "127.0.0.1", port)
    guest.port = server.sockets[0].getsockname()[1]
    try:
        yield guest
    finally:
        server.close()
        await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body)


def answering(status: int, body: bytes = b"", *, headers: str = "") -> Respond:
    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        del request
        send(writer, status, body, headers=headers)
        await writer.drain()

    return respond


def in_order(*responds: Respond) -> Respond:
    """The first request gets the first answer, and so on; the last one stays."""
    left = list(responds)

    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return respond


async def hang_up(request: Request, writer: asyncio.StreamWriter) -> None:
    """End the connection without an answer."""
    del request
    writer.transport.abort()


async def silence(request: Request, writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    del request, writer
    await asyncio.Event().wait()


def send(writer: asyncio.StreamWriter, status: int, body: bytes, *, headers: str = "") -> None:
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    writer.write(head.encode() + body)
