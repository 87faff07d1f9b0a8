"""What Prometheus reads; a metric that nothing moves is a metric that nobody should trust."""

import asyncio

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from agentenv.api.app import create_app
from agentenv.api.settings import ApiSettings
from agentenv.model.errors import Exhausted
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect
from tests.unit.api.test_edge import request_scope

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(api: httpx.AsyncClient) -> Samples:
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def requests(samples: Samples, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(
        value
        for (name, found), value in samples.items()
        if name == "agentenv_http_request_duration_seconds_count" and wanted <= set(found)
    )


async def test_every_metric_is_moved_by_something(api: httpx.AsyncClient, node: FakeNode) -> None:
    before = await scrape(api)
    body, keyed = {"templateID": "base"}, {"Idempotency-Key": "k"}
    for _ in range(2):
        await api.post("/sandboxes", json=body, headers=keyed)
    paused = node.add_sandbox()
    await node.pause(paused.id)
    node.lose(node.add_sandbox().id, "gone")
    node.failures["create"] = Exhausted("full")
    await api.post("/sandboxes", json=body)
    node.failures["create"] = RuntimeError("bug")
    await api.post("/sandboxes", json=body)
    del node.failures["create"]
    hold = node.hold("create")
    waiting = asyncio.create_task(api.post("/sandboxes", json=body))
    await hold.reached.wait()
    after = await scrape(api)
    hold.released.set()
    await waiting

    moved = {name for (name, labels), value in after.items() if value != before.get((name, labels), 0.0)}
    constant = {  # facts about the host and this fake
        "agentenv_node_cpu_percent", "agentenv_node_cpus", "agentenv_node_memory_bytes", "agentenv_node_disk_bytes",
        "agentenv_node_info",
    }  # fmt: skip
    still = {name for name, _ in after if not name.endswith("_created")} - moved - constant
    assert still == set()
    assert all(value > 0 for (name, _), value in after.items() if name in constant)


async def test_requests_are_counted_by_template_and_status(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    await api.get(f"/sandboxes/{sandbox.id}")
    await api.get("/sandboxes/nobody")
    await api.head("/sandboxes/nobody")
    await api.get("/made/up/path")
    await api.request("MADEUP", "/sandboxes")
    await api.get("/v2/sandboxes?limit=0")

    samples = await scrape(api)

    assert requests(samples, route="/sandboxes/{sandbox_id}", method="GET", status="200") == 1
    assert requests(samples, route="/sandboxes/{sandbox_id}", method="GET", status="404") == 1
    assert requests(samples, route="/sandboxes/{sandbox_id}", method="HEAD", status="404") == 1
    assert requests(samples, route="unmatched", status="404") == 1
    assert requests(samples, method="OTHER", status="405") == 1
    assert requests(samples, route="/v2/sandboxes", status="400") == 1
    assert not any("made" in str(labels).lower() for _, labels in samples)


async def test_a_request_that_nobody_waited_for_is_canceled(app: FastAPI, api: httpx.AsyncClient) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError

    await app(request_scope("POST", "/sandboxes"), receive, send)

    assert requests(await scrape(api), status="canceled", route="/sandboxes") == 1


async def test_two_apps_in_one_process_do_not_meet(node: FakeNode) -> None:
    apps = [create_app(node, ApiSettings(api_key=KEY)) for _ in range(2)]
    async with connect(apps[0]) as first, connect(apps[1]) as second:
        await first.get("/nodes")

        assert requests(await scrape(second), route="/nodes") == 0
        assert requests(await scrape(first), route="/nodes") == 1
