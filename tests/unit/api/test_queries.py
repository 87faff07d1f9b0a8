"""Filters: what E2B's clients put into a query string, and what is refused rather than ignored."""

import urllib.parse
from datetime import timedelta

import httpx
import pytest

from agentenv.api.queries import bare_name, decode_metadata, parse_states
from agentenv.model.errors import Invalid
from agentenv.model.lifecycle import State
from agentenv.testing.node import FakeNode
from tests.unit.api.client import refused


def as_e2b_does(metadata: dict[str, str]) -> str:
    return urllib.parse.urlencode({urllib.parse.quote(k): urllib.parse.quote(v) for k, v in metadata.items()})


@pytest.mark.parametrize(
    "metadata",
    [{"odd": "a b&c"}, {"a": "1", "b": "2"}, {"k=1": "v=2"}, {"é": "☃"}, {"a": "100%"}, {"a": "%41"}, {"a": "x+y"}, {}],
)
def test_metadata_escaped_twice_is_read_back(metadata: dict[str, str]) -> None:
    assert decode_metadata(as_e2b_does(metadata)) == metadata


def test_metadata_escaped_once_is_read_back() -> None:
    assert decode_metadata("team=alpha&env=a%20b") == {"team": "alpha", "env": "a b"}


def test_a_pair_without_a_value_asks_for_an_empty_one() -> None:
    assert decode_metadata("team&&") == {"team": ""}


@pytest.mark.parametrize("text", ["a=1&a=2", "&".join(f"k{n}=v" for n in range(129))])
def test_metadata_that_nothing_can_match_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        decode_metadata(text)


async def test_all_pairs_of_metadata_must_match(api: httpx.AsyncClient, node: FakeNode) -> None:
    both = node.add_sandbox(metadata={"odd": "a b&c", "team": "alpha"})
    node.add_sandbox(metadata={"odd": "a b&c"})
    node.add_sandbox(metadata={"team": "alpha", "odd": "other"})

    for path in ("/sandboxes", "/v2/sandboxes"):
        query = urllib.parse.urlencode({"metadata": as_e2b_does({"odd": "a b&c", "team": "alpha"})})
        answer = await api.get(f"{path}?{query}")

        assert [one["sandboxID"] for one in answer.json()] == [both.id]


@pytest.mark.parametrize(
    ("query", "states"),
    [
        ("", {"running", "paused"}), ("state=running", {"running"}), ("state=paused", {"paused"}),
        ("state=running,paused", {"running", "paused"}), ("state=running%2Cpaused", {"running", "paused"}),
        ("state=running&state=paused", {"running", "paused"}), ("state=", {"running", "paused"}),
    ],
)  # fmt: skip
async def test_states_come_in_a_list(api: httpx.AsyncClient, node: FakeNode, query: str, states: set[str]) -> None:
    node.add_sandbox()
    node.add_sandbox(state=State.PAUSED, ends_at=None)

    answer = await api.get(f"/v2/sandboxes?{query}")

    assert {one["state"] for one in answer.json()} == states


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(Invalid, match="error"):
        parse_states(["running,error"])


async def test_order_and_start_choose_by_creation(api: httpx.AsyncClient, node: FakeNode) -> None:
    first, second = node.add_sandbox(), node.add_sandbox()

    ascending = await api.get("/v2/sandboxes?order=asc")
    descending = await api.get("/v2/sandboxes")
    after = await api.get("/v2/sandboxes", params={"startedAfter": first.created_at.isoformat()})
    unescaped = await api.get(f"/v2/sandboxes?startedAfter={first.created_at.isoformat()}")

    assert [one["sandboxID"] for one in ascending.json()] == [first.id, second.id]
    assert [one["sandboxID"] for one in descending.json()] == [second.id, first.id]
    assert [one["sandboxID"] for one in after.json()] == [second.id]
    assert [one["sandboxID"] for one in unescaped.json()] == [second.id]


async def test_a_template_is_chosen_by_id_or_by_any_form_of_its_name(api: httpx.AsyncClient, node: FakeNode) -> None:
    template = node.add_template("mine")
    mine = node.add_sandbox(template_id=template.id, template_name="mine")
    node.add_sandbox()

    for reference in (template.id, "mine", "mine:default", "team/mine"):
        answer = await api.get("/v2/sandboxes", params={"template": reference})

        assert [one["sandboxID"] for one in answer.json()] == [mine.id]
    assert (await api.get("/v2/sandboxes?template=nothing")).json() == []


async def test_sandboxes_of_a_deleted_template_are_still_found_by_its_name(
    api: httpx.AsyncClient, node: FakeNode
) -> None:
    template = node.add_template("mine")
    mine = node.add_sandbox(template_id=template.id, template_name="mine")
    await node.delete_snapshot("mine")

    answer = await api.get("/v2/sandboxes?template=mine")

    assert [one["sandboxID"] for one in answer.json()] == [mine.id]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=101", "limit=-1", "limit=x", "limit=1.5", "limit=", "nextToken=x", "nextToken=" + "a" * 600,
        "order=up", "state=error", "state=Running", "startedAfter=yesterday", "startedAfter=1700000000",
        "startedAfter=2026-01-01T00:00:00", "nonsense=1", "Limit=1", "metadata=a%3D1%26a%3D2", "template=" + "x" * 401,
        "metadata=a%3D1&metadata=b%3D2", "limit=1&limit=2", "order=asc&order=asc",
    ],
)  # fmt: skip
async def test_a_query_that_cannot_be_answered_is_refused_not_ignored(
    api: httpx.AsyncClient, node: FakeNode, query: str
) -> None:
    node.add_sandbox()

    refused(await api.get(f"/v2/sandboxes?{query}"), 400, "invalid")


async def test_pages_end_when_nothing_more_remains(api: httpx.AsyncClient, node: FakeNode) -> None:
    made = {node.add_sandbox(metadata={"group": "g"}).id for _ in range(4)}
    seen: list[str] = []
    token: str | None = ""
    for _ in range(2):
        answer = await api.get("/v2/sandboxes", params={"limit": 2, **({"nextToken": token} if token else {})})
        seen += [one["sandboxID"] for one in answer.json()]
        token = answer.headers.get("x-next-token")

    assert token is None
    assert len(seen) == 4
    assert set(seen) == made


async def test_churn_between_two_pages_shows_nothing_twice_and_loses_nothing(
    api: httpx.AsyncClient, node: FakeNode
) -> None:
    made = [node.add_sandbox().id for _ in range(6)]
    first = await api.get("/v2/sandboxes?limit=3")
    shown = [one["sandboxID"] for one in first.json()]

    await node.delete(shown[-1])
    await node.pause(made[0])
    await node.resume(made[0], 60)
    node.add_sandbox()
    rest = await api.get("/v2/sandboxes", params={"limit": 100, "nextToken": first.headers["x-next-token"]})

    assert [one["sandboxID"] for one in rest.json()] == [one for one in reversed(made) if one not in shown]


async def test_the_first_generation_lists_what_runs(api: httpx.AsyncClient, node: FakeNode) -> None:
    running = node.add_sandbox()
    node.add_sandbox(state=State.PAUSED)
    node.add_sandbox(state=State.ERROR, reason="gone")

    answer = await api.get("/sandboxes")

    assert [one["sandboxID"] for one in answer.json()] == [running.id]


def test_a_name_is_found_under_its_namespace_and_tag() -> None:
    assert bare_name("team/name:default") == "name"
    assert bare_name("!!") == "!!"


async def test_the_instant_of_a_filter_is_exclusive(api: httpx.AsyncClient, node: FakeNode) -> None:
    only = node.add_sandbox()
    before = (only.created_at - timedelta(microseconds=1)).isoformat()

    assert len((await api.get("/v2/sandboxes", params={"startedAfter": before})).json()) == 1
    assert (await api.get("/v2/sandboxes", params={"startedAfter": only.created_at.isoformat()})).json() == []
