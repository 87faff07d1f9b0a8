"""Clients that ask and do not read: what they may take of the server's memory, and for how long."""

import asyncio
from collections.abc import Iterable, MutableSet
from typing import Any

import pytest

from agentenv.proxy.asgi import Receive, Scope, Send
from agentenv.proxy.inbound.connection import ClientConnection
from agentenv.proxy.inbound.limits import ServerLimits

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b"x" * 1000


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": ANSWER})


class Unread(asyncio.Transport):
    """A transport whose client takes only what a test says. One answer fills its buffer."""

    def __init__(self, limits: ServerLimits) -> None:
        super().__init__()
        self.connections: MutableSet[Any] = set()  # from here on what `Server` has
        self.tasks: MutableSet[Any] = set()
        self.total_requests = 0
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.waiting = 0
        self.ended = asyncio.Event()
        self.closing = False
        self.connection = ClientConnection(app, self, {}, limits)
        self.connection.connection_made(self)

    def take(self, size: int | None = None) -> None:
        self.waiting -= self.waiting if size is None else size
        if not self.waiting:
            self.connection.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.waiting += sum(len(part) for part in list_of_data)
        if self.waiting >= len(ANSWER):
            self.connection.pause_writing()

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True
        self.connection.connection_lost(None)
        self.ended.set()


async def settled(client: Unread) -> None:
    """Return when nothing goes on without the client."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_no_request_is_looked_at_while_the_answers_before_it_are_unread() -> None:
    client = Unread(ServerLimits())
    for _ in range(10):
        client.connection.data_received(REQUEST)
        await settled(client)
    assert client.total_requests == 1
    assert client.waiting < 2 * len(ANSWER)

    for answered in range(2, 11):
        client.take()
        await settled(client)
        assert client.total_requests == answered
    client.take()
    await settled(client)
    assert not client.tasks
    client.abort()


@pytest.mark.parametrize("requests", [1, 2, 3])
async def test_a_client_that_takes_nothing_is_cut_off(requests: int) -> None:
    """Be it in the middle of its requests, or after the last when it would have been closed as idle."""
    client = Unread(ServerLimits(drain_s=0.01, keep_alive_s=0.01))
    client.connection.data_received(REQUEST * requests)
    await client.ended.wait()
    await settled(client)
    assert client.total_requests == 1
    assert not client.connections
    assert not client.tasks


async def test_a_client_that_takes_a_little_is_not_cut_off() -> None:
    client = Unread(ServerLimits(drain_s=0.01))
    client.connection.data_received(REQUEST * 2)
    await settled(client)
    for _ in range(5):
        client.take(1)
        looked = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, looked.set)  # after the look, which was set before it
        await looked.wait()
        assert not client.ended.is_set()
    client.abort()
