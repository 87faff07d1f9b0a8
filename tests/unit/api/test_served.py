"""The app behind a real server on loopback: what only bytes on a connection can show."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, NOBODY

pytestmark = pytest.mark.slow

BODY = b'{"templateID":"base"}'


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One HTTP/1.1 connection, kept alive, spoken by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str, key: str = KEY) -> Answer:
        lines = [f"{method} {path} HTTP/1.1", "Host: api.test", f"X-API-Key: {key}", *headers]
        if body and not any(one.lower().startswith("transfer-encoding") for one in headers):
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.writer.drain()
        return await self.answer(has_body=method != "HEAD")

    async def answer(self, *, has_body: bool = True) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in head[1:] if one)}
        assert "transfer-encoding" not in headers
        length = int(headers.get("content-length", 0))
        return Answer(status, headers, await self.reader.readexactly(length) if has_body else b"")


@pytest.fixture
async def connection(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield Connection(reader, writer)
    writer.close()


CREATE = ("POST", "/v2/sandboxes", BODY)


async def hang_up_during(port: int, node: FakeNode, verb: str, *request: Any) -> None:
    """Send *request*, hang up while *verb* is at work, and let that end."""
    hold = node.hold(verb)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asking = asyncio.create_task(Connection(reader, writer).ask(*request))
    await hold.reached.wait()
    asking.cancel()
    writer.close()
    await writer.wait_closed()
    # Answered by the same loop, in order of arrival: by then the server knows.
    other, closing = await asyncio.open_connection("127.0.0.1", port)
    await Connection(other, closing).ask("GET", "/v2/sandboxes")
    closing.close()
    hold.released.set()


async def gone(node: FakeNode, count: int) -> None:
    """Return when *node* has made *count* sandboxes and they are deleted."""
    hold = node.hold("delete")
    await hold.reached.wait()
    hold.released.set()
    while len(node.sandboxes()) > count:
        await asyncio.sleep(0)


async def test_a_sandbox_whose_client_hung_up_before_it_was_ready_is_deleted(port: int, node: FakeNode) -> None:
    await hang_up_during(port, node, "create", *CREATE)

    await gone(node, 0)

    assert len(node.asked) == 1


async def test_children_whose_client_hung_up_are_deleted_and_their_source_runs_on(port: int, node: FakeNode) -> None:
    source = node.add_sandbox()

    await hang_up_during(port, node, "fork", "POST", f"/sandboxes/{source.id}/fork", b'{"count":3}')
    await gone(node, 1)

    assert node.sandboxes() == [source]


async def test_a_sandbox_with_an_idempotency_key_waits_for_the_client_to_ask_again(
    port: int, node: FakeNode, connection: Connection
) -> None:
    await hang_up_during(port, node, "create", *CREATE, "Idempotency-Key: mine")

    answer = await connection.ask(*CREATE, "Idempotency-Key: mine")

    (sandbox,) = node.sandboxes()
    assert json.loads(answer.body)["sandboxID"] == sandbox.id
    assert len(node.asked) == 1


async def test_one_connection_carries_every_kind_of_answer(connection: Connection) -> None:
    created = await connection.ask("POST", "/v2/sandboxes", BODY)
    path = f"/sandboxes/{json.loads(created.body)['sandboxID']}"
    asked: list[tuple[str, str, int]] = [
        ("GET", path, 200), ("HEAD", path, 200), ("POST", f"{path}/pause", 204), ("OPTIONS", path, 204),
        ("GET", "/nothing", 404), ("TRACE", path, 405), ("POST", f"{path}/pause", 409), ("POST", "/v3/templates", 501),
        ("DELETE", path, 204), ("HEAD", path, 404), ("GET", "/health", 204),
    ]  # fmt: skip
    for method, target, status in asked:
        answer = await connection.ask(method, target)

        assert answer.status == status, f"{method} {target}"
        if status == 204:
            assert "content-length" not in answer.headers
        elif status >= 400 and method != "HEAD":
            assert json.loads(answer.body)["code"] == status


async def test_a_chunked_body_without_a_length_is_read(connection: Connection) -> None:
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"

    answer = await connection.ask("POST", "/sandboxes", chunked, "Transfer-Encoding: chunked")

    assert answer.status == 201


async def test_a_body_over_the_limit_is_refused_on_a_connection_that_lives_on(connection: Connection) -> None:
    answer = await connection.ask("POST", "/sandboxes", b" " * (2 << 20))

    assert answer.status == 413
    assert json.loads(answer.body)["error_code"] == "body_too_large"
    assert (await connection.ask("POST", "/sandboxes", BODY)).status == 201


async def test_a_body_far_over_the_limit_is_refused_before_it_is_sent(connection: Connection) -> None:
    answer = await connection.ask("POST", "/sandboxes", b"", f"Content-Length: {1 << 40}")

    assert answer.status == 413
    assert await connection.reader.read() == b""  # closed


async def test_a_client_may_ask_before_it_sends(connection: Connection) -> None:
    head = ("POST /sandboxes HTTP/1.1", "Host: a", f"X-API-Key: {KEY}", f"Content-Length: {len(BODY)}")
    connection.writer.write("\r\n".join([*head, "Expect: 100-continue", "", ""]).encode())
    assert (await connection.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    connection.writer.write(BODY)

    assert (await connection.answer()).status == 201


async def test_two_keys_are_refused(connection: Connection) -> None:
    assert (await connection.ask("GET", "/v2/sandboxes", b"", f"X-API-Key: {KEY}")).status == 401


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("create", "/sandboxes", BODY), ("pause", "/sandboxes/{id}/pause", b""),
        ("fork", "/sandboxes/{id}/fork", b'{"count":2}'), ("snapshot", "/sandboxes/{id}/snapshots", b""),
    ],
)  # fmt: skip
async def test_a_client_that_hangs_up_in_the_middle_leaves_nothing_half_done(
    port: int, node: FakeNode, caplog: pytest.LogCaptureFixture, verb: str, path: str, body: bytes
) -> None:
    sandbox = node.add_sandbox()
    hold = node.hold(verb)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asking = asyncio.create_task(Connection(reader, writer).ask("POST", path.format(id=sandbox.id), body))
    await hold.reached.wait()
    asking.cancel()
    writer.transport.abort()

    hold.released.set()
    await settled(node)

    assert all(one.state.is_settled for one in node.sandboxes())
    expected = {"create": 2, "fork": 3}.get(verb, 1)
    assert len(node.sandboxes()) == expected
    if verb == "pause":
        assert node.get(sandbox.id).state == "paused"
    other = Connection(*await asyncio.open_connection("127.0.0.1", port))
    assert (await other.ask("GET", f"/sandboxes/{NOBODY}")).status == 404
    other.writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def settled(node: FakeNode) -> None:
    for sandbox in node.sandboxes():
        await node._operations.settle(sandbox.id)
    await asyncio.sleep(0)


async def test_a_hundred_clients_at_once_get_a_hundred_sandboxes(port: int, node: FakeNode) -> None:
    async def one() -> dict[str, Any]:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        answer = await connection.ask("POST", "/v2/sandboxes", BODY)
        connection.writer.close()
        document: dict[str, Any] = json.loads(answer.body)
        return document

    documents = await asyncio.gather(*(one() for _ in range(100)))

    assert len({one["sandboxID"] for one in documents}) == len(node.sandboxes()) == 100
