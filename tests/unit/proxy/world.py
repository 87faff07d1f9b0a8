"""A proxy on a real socket, guests that are real servers on addresses of their own, and a node that knows them.

A guest is a function of a reader and a writer, so that a test decides on every byte.
Leaving the world checks that nothing of it is left.
"""

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableSet
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any, Final, ParamSpec, Self, TypeAlias

import uvloop

from agentenv.model.lifecycle import State
from agentenv.model.policy import IngressPolicy
from agentenv.model.sandbox import Sandbox
from agentenv.node.contract import Route
from agentenv.proxy import Proxy, ProxySettings, ServerLimits
from agentenv.proxy.asgi import ASGIApp, Receive, Scope, Send
from agentenv.proxy.inbound.connection import ClientConnection
from agentenv.testing.node import FakeNode

Handler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

WAIT_S: Final = 20.0  # for what must happen; a test that gets there has failed
API_KEY: Final = "e2b_" + "0" * 40

_addresses = itertools.cycle(f"127.0.{high}.{low}" for high in range(1, 200) for low in range(1, 250))


P = ParamSpec("P")


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on the loop that the proxy is served on."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


class LabNode(FakeNode):
    """A fake node whose sandboxes have an address each."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: dict[str, str] = {}

    def route(self, sandbox_id: str) -> Route:
        way = super().route(sandbox_id)
        return Route(way.sandbox, IPv4Address(self.addresses[sandbox_id]), way.envd_token, way.traffic_token)

    def change(self, sandbox_id: str, **changes: object) -> Sandbox:
        """Put a sandbox into another state as if an operation had."""
        sandbox = self.get(sandbox_id)
        return self.add_sandbox(**{name: getattr(sandbox, name) for name in Sandbox.__dataclass_fields__} | changes)


@dataclass
class Guest:
    """One server in one sandbox. ``connections`` counts what it has accepted, ``open`` what is still open."""

    sandbox: Sandbox
    address: str
    port: int
    connections: int = 0
    open: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # a connection of its has ended

    @property
    def headers(self) -> bytes:
        """What routes a request here, as header lines."""
        return b"E2b-Sandbox-Id: %b\r\nE2b-Sandbox-Port: %d\r\n" % (self.sandbox.id.encode(), self.port)

    def header(self, name: str, index: int = -1) -> list[str]:
        """The values of one header of a request that arrived."""
        lines = self.heads[index].decode("latin-1").split("\r\n")[1:]
        pairs = [line.split(": ", 1) for line in lines if line]
        return [value for key, value in pairs if key.lower() == name.lower()]

    @property
    def target(self) -> str:
        return self.heads[-1].decode("latin-1").split(" ")[1]


class World:
    """``async with World() as world``: everything runs inside."""

    def __init__(
        self, settings: ProxySettings | None = None, limits: ServerLimits | None = None, control: ASGIApp | None = None
    ) -> None:
        self.node = LabNode()
        self.settings = settings or ProxySettings(api_key=API_KEY)
        self.seen: list[tuple[Any, str, int | None]] = []
        self.proxy = Proxy(self.node, control or control_app, self.settings, observe=self._observe)
        self.limits = limits or ServerLimits()
        self.connections: MutableSet[Any] = set()  # of clients; see `Server`
        self.tasks: MutableSet[Any] = set()
        self.total_requests = 0
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.port = 0
        self._stack = contextlib.AsyncExitStack()
        self._tasks_before: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._tasks_before = asyncio.all_tasks()
        server = await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(self.proxy, self, {}, self.limits), "127.0.0.1", 0, backlog=2048
        )
        self.port = server.sockets[0].getsockname()[1]
        self._stack.callback(server.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await self.node.close()
        await self.proxy.close()
        for connection in list(self.connections):
            connection.cut()
        await until(lambda: not self.connections and not self.tasks, "the server holds on to connections")
        await until(lambda: self.proxy.statistics().busy == 0, "the pool holds on to connections")
        await until(lambda: asyncio.all_tasks() <= self._tasks_before, "tasks are left")

    async def guest(self, handler: Handler | None = None, *, port: int = 0, **changes: object) -> Guest:
        """A running sandbox with one server in it. Port 0: a free one."""
        address = next(_addresses)
        sandbox = self.node.add_sandbox(**changes)
        self.node.addresses[sandbox.id] = address
        guest = Guest(sandbox, address, port)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            guest.connections += 1
            guest.open += 1
            guest.closed.clear()
            try:
                await (handler or echo(guest))(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                guest.open -= 1
                guest.closed.set()
                writer.close()

        server = await asyncio.start_server(serve, address, port, backlog=2048)
        guest.port = server.sockets[0].getsockname()[1]
        self._stack.callback(server.close)
        return guest

    async def ask(self, guest: Guest, target: str = "/", **more: Any) -> "Answer":
        """One request to *guest* on a connection of its own."""
        async with self.client() as client:
            return await client.ask(target, headers=guest.headers + more.pop("headers", b""), **more)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
            try:
                yield Client(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    def _observe(self, via: Any, method: str, status: int | None, duration_s: float) -> None:
        assert duration_s >= 0
        self.seen.append((via, method, status))


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class Client:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(
        self, target: str = "/", *, method: str = "GET", headers: bytes = b"", body: bytes | None = None
    ) -> Answer:
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        host = b"" if b"host:" in headers.lower() else b"Host: api.example\r\n"
        self.send(b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode(), target.encode(), host, headers, length))
        self.send(body or b"")
        return await self.answer(head_only=method == "HEAD")

    async def answer(self, *, head_only: bool = False) -> Answer:
        """Read one answer whole. `IncompleteReadError` or `ConnectionError` if it is cut short."""
        head = await self.head()
        chunked = head.header("transfer-encoding") == ["chunked"]
        if head_only or head.status in (101, 204, 304):
            return head
        if chunked:
            head.body = b"".join([chunk async for chunk in self.chunks()])
        elif head.header("content-length"):
            head.body = await self.reader.readexactly(int(head.header("content-length")[0]))
        else:
            head.body = await self.reader.read()
        return head

    async def head(self) -> Answer:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = [(line.split(": ", 1)[0], line.split(": ", 1)[1]) for line in lines]
        return Answer(int(first.split(" ")[1]), headers, b"", raw)

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
            chunk = await self.reader.readexactly(size + 2)
            yield chunk[:-2]
        await self.reader.readexactly(2)

    async def ended(self) -> bytes:
        """What comes until the server closes; `ConnectionError` if it cuts the connection."""
        return await self.reader.read()


async def read_request(reader: asyncio.StreamReader, guest: Guest | None = None) -> tuple[bytes, bytes]:
    """Read one whole request as a server in a guest would."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    body = b""
    if b"\r\ntransfer-encoding: chunked\r\n" in lower:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif b"\r\ncontent-length:" in lower:
        length = lower.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]
        body = await reader.readexactly(int(length))
    if guest is not None:
        guest.heads.append(head)
        guest.bodies.append(body)
    return head, body


def echo(guest: Guest) -> Handler:
    """Answer every request on a connection with its body, and keep what arrived in *guest*."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            _, body = await read_request(reader, guest)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

    return handle


def answering(answer: bytes, *, then_close: bool = True) -> Handler:
    """Read a request, send these bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()
        if not then_close:
            await reader.read()

    return handle


async def control_app(scope: Scope, receive: Receive, send: Send) -> None:
    """A control API that says it was reached, with the body that it was sent."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    answer = json.dumps({"control": scope["path"], "body": body.decode()}).encode()
    headers = [(b"content-length", b"%d" % len(answer)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def until(holds: Callable[[], bool], complaint: str) -> None:
    """Return when *holds* does."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, complaint
        await asyncio.sleep(0.001)


PRIVATE: Final = IngressPolicy(allow_public_traffic=False)
PAUSED: Final[dict[str, Any]] = {"state": State.PAUSED, "ends_at": None}
