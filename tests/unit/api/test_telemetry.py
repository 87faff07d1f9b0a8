"""Metrics and logs of sandboxes."""

import json
from datetime import timedelta

import httpx
import pytest

from agentenv.model.errors import Unavailable
from agentenv.model.lifecycle import State
from agentenv.node.contract import LogLine
from agentenv.testing.clock import START, JumpingClock
from agentenv.testing.node import FakeNode
from tests.unit.api.client import NOBODY, refused


async def test_metrics_are_one_sample_of_now(api: httpx.AsyncClient, node: FakeNode, clock: JumpingClock) -> None:
    sandbox = node.add_sandbox()
    now = int(clock.now().timestamp())
    path = f"/sandboxes/{sandbox.id}/metrics"

    (sample,) = (await api.get(path)).json()

    assert sample["timestampUnix"] == now
    assert len((await api.get(path, params={"start": now, "end": now})).json()) == 1
    assert (await api.get(path, params={"start": now + 1})).json() == []
    assert (await api.get(path, params={"end": now - 1})).json() == []


async def test_a_sandbox_that_does_not_run_has_no_metrics(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox(state=State.PAUSED)

    assert (await api.get(f"/sandboxes/{sandbox.id}/metrics")).json() == []


async def test_a_guest_that_does_not_answer_is_unavailable(api: httpx.AsyncClient, node: FakeNode) -> None:
    node.failures["metrics"] = Unavailable("silent")

    refused(await api.get(f"/sandboxes/{node.add_sandbox().id}/metrics"), 503, "unavailable")


async def test_the_metrics_of_many_leave_out_those_that_have_none(api: httpx.AsyncClient, node: FakeNode) -> None:
    running, paused = node.add_sandbox(), node.add_sandbox(state=State.PAUSED)

    answer = await api.get("/sandboxes/metrics", params={"sandbox_ids": f"{running.id},{paused.id},{NOBODY},x,,"})

    assert list(answer.json()["sandboxes"]) == [running.id]


@pytest.mark.parametrize("query", ["", "sandbox_ids=" + ",".join(map(str, range(101)))])
async def test_the_metrics_of_many_are_those_of_some(api: httpx.AsyncClient, query: str) -> None:
    refused(await api.get(f"/sandboxes/metrics?{query}"), 400, "invalid")


@pytest.fixture
def logged(node: FakeNode) -> str:
    sandbox = node.add_sandbox()
    levels = ("debug", "info", "warn", "error", "info")
    node.console[sandbox.id] = [
        LogLine(START + timedelta(seconds=index), level, f"line {index}") for index, level in enumerate(levels)
    ]
    return sandbox.id


def ms(seconds: float) -> int:
    return int(START.timestamp() * 1000 + seconds * 1000)


async def test_logs_come_oldest_first_in_both_forms(api: httpx.AsyncClient, logged: str) -> None:
    document = (await api.get(f"/sandboxes/{logged}/logs")).json()

    assert [one["message"] for one in document["logEntries"]] == [f"line {index}" for index in range(5)]
    assert [json.loads(one["line"])["message"] for one in document["logs"]] == [f"line {index}" for index in range(5)]


async def test_logs_are_the_last_lines_or_the_first_since_an_instant(api: httpx.AsyncClient, logged: str) -> None:
    async def messages(**query: int) -> list[str]:
        document = (await api.get(f"/sandboxes/{logged}/logs", params=query)).json()
        return [one["message"] for one in document["logEntries"]]

    assert await messages(limit=2) == ["line 3", "line 4"]
    assert await messages(limit=0) == []
    assert await messages(start=ms(2)) == ["line 2", "line 3", "line 4"]
    assert await messages(start=ms(1), limit=2) == ["line 1", "line 2"]
    assert await messages(start=2**53) == []


async def test_logs_are_chosen_by_direction_level_and_text(api: httpx.AsyncClient, logged: str) -> None:
    async def messages(**query: str | int) -> list[str]:
        document = (await api.get(f"/v2/sandboxes/{logged}/logs", params=query)).json()
        return [one["message"] for one in document["logs"]]

    assert await messages() == [f"line {index}" for index in range(5)]
    assert await messages(direction="backward", limit=2) == ["line 4", "line 3"]
    assert await messages(direction="backward", cursor=ms(1)) == ["line 1", "line 0"]
    assert await messages(cursor=ms(3)) == ["line 3", "line 4"]
    assert await messages(level="warn") == ["line 2", "line 3"]
    assert await messages(search="ne 4") == ["line 4"]


@pytest.mark.parametrize(
    "query", ["limit=1001", "limit=-1", "start=-1", "start=x", "start=" + "9" * 30, "cursor=1", "nonsense="]
)
async def test_a_wrong_log_query_is_refused(api: httpx.AsyncClient, logged: str, query: str) -> None:
    refused(await api.get(f"/sandboxes/{logged}/logs?{query}"), 400, "invalid")


async def test_logs_of_nobody_are_not_found(api: httpx.AsyncClient) -> None:
    refused(await api.get(f"/sandboxes/{NOBODY}/logs?limit=0"), 404, "not_found")
    refused(await api.get(f"/v2/sandboxes/{NOBODY}/logs"), 404, "not_found")
