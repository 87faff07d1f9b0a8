"""Paths in every spelling, HEAD and OPTIONS, and what becomes of an answer that nobody waits for."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Message

from agentenv.api.edge import canonical_path, segment
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, NOBODY, refused


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/", "/"), (b"", "/"), (b"//", "/"), (b"/sandboxes/", "/sandboxes"), (b"//v2//sandboxes", "/v2/sandboxes"),
        (b"/templates/mysnap%3Adefault", "/templates/mysnap:default"),
        (b"/templates/team%2Fmysnap", "/templates/team%2Fmysnap"),
        (b"/templates/team%2fmysnap", "/templates/team%2Fmysnap"),
        (b"/templates/%2e%2e%2fetc", "/templates/..%2Fetc"), (b"/a/../b", "/a/../b"), (b"/%ff", "/\ufffd"),
        (b"/%73andboxes", "/sandboxes"),
    ],
)  # fmt: skip
def test_a_path_has_one_spelling(raw: bytes, path: str) -> None:
    assert canonical_path(raw) == path


def test_a_slash_within_a_segment_comes_back() -> None:
    assert segment("team%2Fmysnap") == "team/mysnap"


@pytest.mark.parametrize("path", ["//sandboxes", "/sandboxes/", "/v2//sandboxes//", "/%73andboxes"])
async def test_extra_slashes_and_escapes_reach_the_same_route(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(f"http://api.test{path}")

    assert answer.status_code == 200
    assert answer.history == []


async def test_head_is_get_without_a_body(api: httpx.AsyncClient, node: FakeNode) -> None:
    path = f"/sandboxes/{node.add_sandbox().id}"

    read, head = await api.get(path), await api.head(path)

    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == read.headers["content-length"]
    assert (await api.head(f"/sandboxes/{NOBODY}")).status_code == 404
    assert (await api.head("/health")).status_code == 204


async def test_head_of_a_route_that_only_writes_is_refused(api: httpx.AsyncClient) -> None:
    answer = await api.head(f"/sandboxes/{NOBODY}/pause")

    assert answer.status_code == 405
    assert answer.headers["allow"] == "OPTIONS, POST"


async def test_options_tells_the_methods_of_all_routes_of_a_path(api: httpx.AsyncClient) -> None:
    answer = await api.options("/templates/tags")

    assert answer.status_code == 204
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PATCH, POST"
    refused(await api.options("/nothing"), 404, "route_not_found")


def request_scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"x-api-key", KEY.encode())], "client": ("127.0.0.1", 1), "server": ("api.test", 80),
    }  # fmt: skip


async def test_a_client_that_leaves_while_it_sends_gets_no_answer_and_makes_nothing(
    app: FastAPI, node: FakeNode
) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"templateID":', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await app(request_scope("POST", "/sandboxes"), receive, send)

    assert sent == []
    assert node.asked == []


@pytest.mark.parametrize("error", [OSError("broken pipe"), RuntimeError("the handler is closed")])
async def test_a_client_that_has_left_by_the_time_of_the_answer_is_no_bug(
    app: FastAPI, node: FakeNode, error: Exception
) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"templateID":"base"}', "more_body": False}

    async def send(message: Message) -> None:
        raise error

    await app(request_scope("POST", "/sandboxes"), receive, send)

    assert len(node.sandboxes()) == 1


async def test_a_caller_that_is_cancelled_abandons_the_wait_and_not_the_work(app: FastAPI, node: FakeNode) -> None:
    hold = node.hold("create")

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"templateID":"base"}', "more_body": False}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    waiting = asyncio.create_task(app(request_scope("POST", "/sandboxes"), receive, send))
    await hold.reached.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert node.sandboxes() == []  # not shown before it is made
    await node.close()  # lets it go on, and waits for it

    assert [sandbox.state for sandbox in node.sandboxes()] == ["running"]


async def test_an_answer_that_breaks_off_is_not_passed_for_a_whole_one(app: FastAPI) -> None:
    async def half() -> Any:
        yield b"half"
        raise ValueError("no more")

    async def handler() -> StreamingResponse:
        return StreamingResponse(half())

    app.router.add_api_route("/half", handler, response_model=None)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(ValueError, match="no more"):
        await app(request_scope("GET", "/half"), receive, send)

    assert sent[0]["status"] == 200
    assert all(one.get("more_body", True) for one in sent)
