"""One envelope for every error, and the headers that tell a client whether to try again."""

import json
import logging

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.errors import STATUS, error_response, fault, is_replayable
from agentenv.model import errors
from agentenv.model.errors import AgentEnvError
from agentenv.testing.node import FakeNode
from tests.unit.api.client import NOBODY, connect, refused


def all_kinds() -> set[type[AgentEnvError]]:
    return {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, AgentEnvError)}


def test_every_kind_has_a_status() -> None:
    assert {one.kind for one in all_kinds()} == set(STATUS)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.NotFound, 404), (errors.AlreadyExists, 409), (errors.Conflict, 409), (errors.Invalid, 400),
        (errors.Unauthenticated, 401), (errors.Exhausted, 429), (errors.NoSpace, 507), (errors.Unavailable, 503),
        (errors.DeadlineExceeded, 504), (errors.Unsupported, 501), (errors.Bug, 500),
    ],
)  # fmt: skip
async def test_a_kind_that_the_node_raises_becomes_its_status(
    api: httpx.AsyncClient, node: FakeNode, error: type[AgentEnvError], status: int
) -> None:
    node.failures["create"] = error("no")

    answer = await api.post("/sandboxes", json={"templateID": "base"})

    refused(answer, status, error.kind)


async def test_a_hint_is_beside_the_message(api: httpx.AsyncClient, node: FakeNode) -> None:
    node.failures["create"] = errors.NotFound("no template 'x'", hint="build it first")

    answer = await api.post("/sandboxes", json={"templateID": "base"})

    assert refused(answer, 404, "not_found") == "no template 'x'"
    assert answer.json()["hint"] == "build it first"


def test_without_a_hint_there_is_no_such_field() -> None:
    assert "hint" not in fault(errors.NotFound("no template 'x'")).body()


@pytest.mark.parametrize("error", [RuntimeError("secret path /root"), errors.Bug("secret path /root")])
async def test_a_bug_is_told_as_an_id_and_logged_under_it(
    api: httpx.AsyncClient, node: FakeNode, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    node.failures["create"] = error

    with caplog.at_level(logging.ERROR):
        answer = await api.post("/sandboxes", json={"templateID": "base"})

    message = refused(answer, 500, "bug")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    error_id = message.split()[2].rstrip(";")
    assert any(error_id in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("status", [503, 504])
@pytest.mark.parametrize(
    ("method", "path", "is_marked"),
    [
        ("POST", "/sandboxes", True),
        ("POST", "/v2/sandboxes", True),
        ("POST", "/sandboxes/x/fork", True),
        ("POST", "/sandboxes/x/snapshots", True),
        ("POST", "/sandboxes/x/resume", True),
        ("PATCH", "/sandboxes/x/custom-extension-params", True),
        ("POST", "/sandboxes/x/pause", False),
        ("POST", "/v2/sandboxes/x/connect", False),
        ("POST", "/sandboxes/x/timeout", False),
        ("PUT", "/sandboxes/x/network", False),
        ("DELETE", "/sandboxes/x", False),
        ("GET", "/sandboxes/x", False),
    ],
)
def test_what_may_have_been_done_already_is_not_to_be_sent_again(
    method: str, path: str, is_marked: bool, status: int
) -> None:
    kind = errors.Unavailable if status == 503 else errors.DeadlineExceeded

    answer = error_response(kind("silent"), method=method, path=path)

    assert answer.status_code == status
    assert answer.headers.get("should-retry") == ("false" if is_marked else None)
    assert is_replayable(method, path) is not is_marked


def test_a_client_that_found_nothing_left_is_told_when_to_come_back() -> None:
    answer = error_response(errors.Exhausted("no slot"), method="POST", path="/sandboxes")

    assert answer.headers["retry-after"].isdecimal()
    assert "should-retry" not in answer.headers


def test_a_message_that_cannot_be_encoded_does_not_break_the_envelope() -> None:
    answer = error_response(errors.Invalid("\ud800 \x00 \u2028"), method="GET", path="/")

    assert json.loads(bytes(answer.body))["message"] == "\ud800 \x00 \u2028"


async def test_an_unknown_route_has_the_envelope_and_needs_no_key(app: FastAPI) -> None:
    async with connect(app, key=None) as client:
        answer = await client.get("/nothing/here")

    assert refused(answer, 404, "route_not_found") == "route not found"


@pytest.mark.parametrize("method", ["PATCH", "PUT", "TRACE", "PROPFIND"])
async def test_a_wrong_method_is_told_the_right_ones(api: httpx.AsyncClient, method: str) -> None:
    answer = await api.request(method, f"/sandboxes/{NOBODY}")

    refused(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"
