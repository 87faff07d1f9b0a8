"""Health, nodes and the one team."""

import httpx
from fastapi import FastAPI

from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect, refused


async def test_health_needs_no_key(app: FastAPI) -> None:
    async with connect(app, key=None) as client:
        answer = await client.get("/health")

    assert (answer.status_code, answer.content) == (204, b"")


async def test_counts_of_a_node_follow_its_sandboxes(api: httpx.AsyncClient, node: FakeNode) -> None:
    (before,) = (await api.get("/nodes")).json()
    created = (await api.post("/sandboxes", json={"templateID": "base"})).json()
    detail = (await api.get("/nodes/fake-node")).json()
    await api.delete(f"/sandboxes/{created['sandboxID']}")
    (after,) = (await api.get("/nodes")).json()

    assert detail["sandboxCount"] == before["sandboxCount"] + 1
    assert detail["metrics"]["allocatedCPU"] == before["metrics"]["allocatedCPU"] + 2
    assert detail["metrics"]["allocatedMemoryBytes"] == before["metrics"]["allocatedMemoryBytes"] + (512 << 20)
    assert detail["createSuccesses"] == before["createSuccesses"] + 1
    assert detail["cachedBuilds"] == []
    assert after["sandboxCount"] == before["sandboxCount"]


async def test_another_node_or_cluster_is_not_here(api: httpx.AsyncClient) -> None:
    nil = "00000000-0000-0000-0000-000000000000"

    refused(await api.get("/nodes/other"), 404, "not_found")
    refused(await api.get("/nodes/fake-node?clusterID=other"), 404, "not_found")
    assert (await api.get("/nodes?clusterID=other")).json() == []
    assert len((await api.get(f"/nodes?clusterID={nil}")).json()) == 1


async def test_the_one_team_has_the_key_that_it_was_asked_with(api: httpx.AsyncClient) -> None:
    (team,) = (await api.get("/teams")).json()

    assert set(team) == {"teamID", "name", "apiKey", "isDefault"}
    assert team["apiKey"] == KEY
    assert team["isDefault"] is True
