"""A template from an uploaded root: what reaches the builder, what the client is told, and what is left behind."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from agentenv.api.app import create_app
from agentenv.api.builds import BuildRoutes
from agentenv.api.settings import ApiSettings
from agentenv.api.upload import Space, Uploads
from agentenv.model.errors import Conflict, Exhausted, Invalid, NoSpace, NotFound
from agentenv.model.machine import Machine
from agentenv.model.snapshot import Snapshot
from agentenv.proxy.inbound.serve import http_server
from agentenv.templates.contract import BuildEvent, BuildSpec, Progress
from agentenv.testing.clock import START
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect, refused
from tests.unit.api.test_edge import request_scope

RESERVE = 1 << 30
ARCHIVE = b"not really a tar" * 1000


class FakeBuilder:
    """Makes a template of anything, unless told to fail."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.refusal: Exception | None = None
        self.failure: Exception | None = None
        self.built: list[tuple[BuildSpec, bytes]] = []
        self.under_way: list[str] = []
        self.cancelled: list[str] = []
        self.started = asyncio.Event()
        self.receiving: asyncio.Queue[asyncio.Future[Path]] = asyncio.Queue()
        self.hold: asyncio.Event | None = None

    @contextmanager
    def begin(self, spec: BuildSpec) -> Iterator["FakeBuild"]:
        if self.refusal is not None:
            raise self.refusal
        self.under_way.append(spec.name)
        try:
            yield FakeBuild(self, spec)
        finally:
            self.under_way.remove(spec.name)

    async def cancel(self, name: str) -> bool:
        self.cancelled.append(name)
        return name in self.under_way


class FakeBuild:
    def __init__(self, builder: FakeBuilder, spec: BuildSpec) -> None:
        self.builder, self.spec = builder, spec

    async def receive(self, upload: Callable[[], Coroutine[Any, Any, Path]]) -> Path:
        receiving = asyncio.ensure_future(upload())
        self.builder.receiving.put_nowait(receiving)
        return await receiving

    async def run(self, archive: Path, progress: Progress) -> Snapshot:
        self.builder.built.append((self.spec, archive.read_bytes()))
        progress(BuildEvent(START, "unpack", "unpacking", 1, 2))
        if self.builder.hold is not None:
            self.builder.started.set()
            await self.builder.hold.wait()
        if self.builder.failure is not None:
            raise self.builder.failure
        return self.builder.node.add_template(self.spec.name, machine=self.spec.machine)


@pytest.fixture
def builder(node: FakeNode) -> FakeBuilder:
    return FakeBuilder(node)


@pytest.fixture
def space() -> Space:
    return Space(total=100 << 30, free=50 << 30)


@pytest.fixture
def app(node: FakeNode, settings: ApiSettings, builder: FakeBuilder, space: Space, tmp_path: Path) -> FastAPI:
    uploads = Uploads(tmp_path, reserve_bytes=RESERVE, silence_s=60.0, space=lambda _: space)
    return create_app(node, settings, builds=BuildRoutes(builder, uploads))


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_root_becomes_a_template(
    api: httpx.AsyncClient, node: FakeNode, builder: FakeBuilder, tmp_path: Path
) -> None:
    query: dict[str, str | int] = {
        "name": "mine",
        "cpuCount": 3,
        "memoryMB": 256,
        "diskSizeMB": 512,
        "defaultUser": "agent",
        "init": "/sbin/init",
    }

    event, outcome = lines(await api.post("/templates/rootfs", params=query, content=ARCHIVE))

    assert event["step"] == "unpack"
    assert (event["done"], event["total"]) == (1, 2)
    assert outcome["template"]["templateID"] == node.find_snapshot("mine").id
    spec = BuildSpec("mine", Machine(3, 256, 512), default_user="agent", init="/sbin/init")
    assert builder.built == [(spec, ARCHIVE)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [Invalid("no root filesystem"), NoSpace("full"), RuntimeError("secret")])
async def test_a_build_that_fails_ends_with_the_error(
    api: httpx.AsyncClient, node: FakeNode, builder: FakeBuilder, tmp_path: Path, failure: Exception
) -> None:
    builder.failure = failure

    *_, outcome = lines(await api.post("/templates/rootfs?name=mine", content=ARCHIVE))

    assert set(outcome["error"]) - {"hint"} == {"code", "message", "error_code"}
    assert "secret" not in str(outcome)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "", "name=", "name=" + "x" * 129, "name=x&cpuCount=0", "name=x&memoryMB=1", "name=x&diskSizeMB=x",
        "name=x&defaultUser=Root!", "name=x&nonsense=1", "name=x&name=y",
        "name=x&init=", "name=x&init=sbin/init", "name=x&init=/init%20rw", "name=x&init=/init%0A",
    ],
)  # fmt: skip
async def test_a_wrong_specification_is_refused(api: httpx.AsyncClient, builder: FakeBuilder, query: str) -> None:
    refused(await api.post(f"/templates/rootfs?{query}", content=ARCHIVE), 400, "invalid")

    assert builder.built == []


async def test_what_the_builder_refuses_is_never_received(
    api: httpx.AsyncClient, builder: FakeBuilder, tmp_path: Path
) -> None:
    builder.refusal = Invalid("'../x' is not a name")

    sent: list[bytes] = []

    async def upload() -> AsyncIterator[bytes]:
        sent.append(ARCHIVE)
        yield ARCHIVE

    refused(await api.post("/templates/rootfs?name=x", content=upload()), 400, "invalid")
    assert sent == []
    assert list(tmp_path.iterdir()) == []


async def test_an_upload_of_nothing_is_refused(api: httpx.AsyncClient, builder: FakeBuilder, tmp_path: Path) -> None:
    refused(await api.post("/templates/rootfs?name=mine"), 400, "invalid")

    assert builder.built == []
    assert list(tmp_path.iterdir()) == []


async def test_the_key_is_asked_for_before_the_upload(app: FastAPI, tmp_path: Path) -> None:
    async with connect(app, key=None) as client:
        refused(await client.post("/templates/rootfs?name=mine", content=ARCHIVE), 401, "unauthenticated")

    assert list(tmp_path.iterdir()) == []


async def test_an_upload_that_breaks_off_builds_nothing_and_leaves_nothing(
    app: FastAPI, builder: FakeBuilder, tmp_path: Path
) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": ARCHIVE, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    await app(request_scope("POST", "/templates/rootfs") | {"query_string": b"name=mine"}, receive, send)

    assert builder.built == []
    assert list(tmp_path.iterdir()) == []


async def test_the_upload_is_the_builds_to_end(app: FastAPI, builder: FakeBuilder, tmp_path: Path) -> None:
    """A client that sends a byte a minute is never silent: whoever calls the build off must reach its upload."""
    messages: list[Message] = [{"type": "http.request", "body": ARCHIVE, "more_body": True}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None: ...

    asking = asyncio.create_task(
        app(request_scope("POST", "/templates/rootfs") | {"query_string": b"name=mine"}, receive, send)
    )
    (await builder.receiving.get()).cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert builder.under_way == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(Conflict("under way"), 409, "conflict"), (Exhausted("too many"), 429, "exhausted")],
)
async def test_a_build_without_a_place_is_not_received(
    api: httpx.AsyncClient, builder: FakeBuilder, tmp_path: Path, refusal: Exception, status: int, code: str
) -> None:
    builder.refusal = refusal

    refused(await api.post("/templates/rootfs?name=x", content=ARCHIVE), status, code)

    assert list(tmp_path.iterdir()) == []


async def test_a_client_that_leaves_after_the_upload_calls_the_build_off(
    app: FastAPI, node: FakeNode, builder: FakeBuilder, tmp_path: Path
) -> None:
    builder.hold = asyncio.Event()
    gone = asyncio.Event()
    messages: list[Message] = [{"type": "http.request", "body": ARCHIVE, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    asking = asyncio.create_task(
        app(request_scope("POST", "/templates/rootfs") | {"query_string": b"name=mine"}, receive, send)
    )
    await builder.started.wait()
    (building,) = [task for task in asyncio.all_tasks() if task.get_name() == "build mine"]
    gone.set()
    await asking
    await asyncio.wait([building])

    assert building.cancelled()
    with pytest.raises(NotFound):
        node.find_snapshot("mine")
    assert list(tmp_path.iterdir()) == []


async def test_nothing_of_the_upload_is_left_when_the_outcome_is_told(
    app: FastAPI, builder: FakeBuilder, tmp_path: Path
) -> None:
    """A client that has it may leave at once, and then whatever else was to be done is cut short."""
    builder.failure = Invalid("no root filesystem")
    told: list[list[Path]] = []
    messages: list[Message] = [{"type": "http.request", "body": ARCHIVE, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        if b'"error"' in message.get("body", b""):
            told.append(list(tmp_path.iterdir()))

    await app(request_scope("POST", "/templates/rootfs") | {"query_string": b"name=mine"}, receive, send)

    assert told == [[]]
    assert list(tmp_path.iterdir()) == []


async def test_deleting_a_template_that_is_being_built_calls_that_off(
    api: httpx.AsyncClient, node: FakeNode, builder: FakeBuilder
) -> None:
    builder.under_way.append("first")
    assert (await api.delete("/templates/first")).status_code == 204

    old = node.add_template("again")
    builder.under_way.append("again")
    assert (await api.delete(f"/templates/{old.id}")).status_code == 204

    assert builder.cancelled == ["first", old.id, "again"]
    refused(await api.delete("/templates/nothing"), 404, "not_found")


async def test_a_client_in_the_middle_of_too_long_an_upload_reads_why(app: FastAPI, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = http_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = f"POST /templates/rootfs?name=x HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Length: {60 << 30}"
        writer.write(head.encode() + b"\r\n\r\n" + ARCHIVE)

        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 507 ")
        assert b'"error_code": "no_space"' in await reader.readuntil(b"}")
        writer.close()
        server.should_exit = True
        await serving
    assert list(tmp_path.iterdir()) == []
