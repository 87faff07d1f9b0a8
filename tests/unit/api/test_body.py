"""Bodies: what is not exactly the JSON that was asked for is a 4xx that names the fault, and nothing is created."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from agentenv.api.app import create_app
from agentenv.api.body import MAX_DEPTH, parse_json
from agentenv.api.settings import ApiSettings
from agentenv.model.errors import Invalid
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect, refused


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (b"", "body"),
        (b" ", "JSON"),
        (b"{", "JSON"),
        (b"templateID=base", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"base"', "object"),
        (b'{"templateID":"base"} {}', "JSON"),
        (b'{"templateID":"base","templateID":"base"}', "duplicate key 'templateID'"),
        (b'{"templateID":"base","metadata":{"a":"1","a":"2"}}', "duplicate key 'a'"),
        (b'{"templateID":"base","timeout":NaN}', "NaN"),
        (b'{"templateID":"base","timeout":Infinity}', "Infinity"),
        (b'{"templateID":"base","timeout":-Infinity}', "Infinity"),
        (b'{"templateID":"base","timeout":1e999}', "1e999"),
        (b'{"templateID":"base","timeout":' + b"9" * 5000 + b"}", "JSON"),
        (b'{"templateID":"b\xff"}', "UTF-8"),
        ('{"templateID":"base"}'.encode("utf-16"), "UTF-8"),
        (b'\xef\xbb\xbf{"templateID":"base"}', "JSON"),
        (b'{"templateID":"\\ud800"}', "surrogate"),
        (b'{"\\ud800":1}', "surrogate"),
        (b'{"templateID":"base","mcp":{"a":["\\udfff"]}}', "surrogate"),
        (b'{"templateID":"base","mcp":' + b"[" * 100 + b"]" * 100 + b"}", "levels"),
        (b"[" * 100_000, "levels"),
        (b'{"a":' * 100_000, "levels"),
        (b"{}", "templateID is required"),
        (b'{"templateID":"base","nonsense":1}', "unknown field 'nonsense'"),
        (b'{"templateID":"base","network":{"nonsense":1}}', "unknown field 'network.nonsense'"),
        (b'{"templateID":"base","template_id":"base"}', "unknown field 'template_id'"),
    ],
)
async def test_a_body_that_is_not_right_creates_nothing(
    api: httpx.AsyncClient, node: FakeNode, raw: bytes, names: str
) -> None:
    answer = await api.post("/sandboxes", content=raw, headers={"content-type": "application/json"})

    assert names in refused(answer, 400, "invalid")
    assert node.asked == []


async def test_the_content_type_is_not_what_decides(api: httpx.AsyncClient) -> None:
    for content_type in ("application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded"):
        answer = await api.post("/sandboxes", content=b'{"templateID":"base"}', headers={"content-type": content_type})

        assert answer.status_code == 201


async def test_a_body_in_pieces_without_a_length_is_read(api: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in b'{"templateID":"base"}':
            yield bytes([byte])

    answer = await api.post("/sandboxes", content=pieces())

    assert answer.status_code == 201


async def test_a_compressed_body_is_refused(api: httpx.AsyncClient) -> None:
    answer = await api.post("/sandboxes", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    refused(answer, 415, "unsupported_encoding")


def chunks(total: int) -> Iterator[bytes]:
    while total > 0:
        yield b" " * min(total, 65536)
        total -= 65536


@pytest.mark.parametrize("over", [1, 1 << 20])
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_so(
    api: httpx.AsyncClient, node: FakeNode, over: int, is_declared: bool
) -> None:
    size = (1 << 20) + over

    async def pieces() -> AsyncIterator[bytes]:
        for piece in chunks(size):
            yield piece

    answer = await api.post("/sandboxes", content=b" " * size if is_declared else pieces())

    assert "1048576" in refused(answer, 413, "body_too_large")
    assert node.asked == []


async def test_a_body_at_the_limit_is_read(api: httpx.AsyncClient) -> None:
    body = b'{"templateID":"base"}'

    answer = await api.post("/sandboxes", content=body + b" " * ((1 << 20) - len(body)))

    assert answer.status_code == 201


async def test_a_body_far_over_the_limit_is_not_read_to_its_end(api: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b" " * (1 << 20)

    answer = await api.post("/sandboxes", content=endless())

    refused(answer, 413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert sent < 32 << 20

    answer = await api.post("/sandboxes", content=b"{}", headers={"content-length": str(1 << 40)})

    refused(answer, 413, "body_too_large")


async def test_a_body_that_never_ends_is_given_up(node: FakeNode) -> None:
    app = create_app(node, ApiSettings(api_key=KEY, body_timeout_s=0.01))

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with connect(app) as client:
        answer = await client.post("/sandboxes", content=stalled())

    refused(answer, 408, "body_timeout")
    assert answer.headers["connection"] == "close"


def test_nesting_is_allowed_up_to_the_limit() -> None:
    fits: object = 1
    for _ in range(MAX_DEPTH - 1):
        fits = [fits]

    assert parse_json(json.dumps(fits).encode()) == fits
    with pytest.raises(Invalid):
        parse_json(json.dumps([fits]).encode())


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
