"""The control API is for whoever sends its key, exactly once, in one header."""

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.edge import RouteIndex
from agentenv.api.settings import ApiSettings
from agentenv.testing.node import FakeNode
from tests.unit.api.client import KEY, connect, refused

OPEN = {"/health", "/metrics", "/openapi.json", "/docs"}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-API-Key", "")],
        [("X-API-Key", KEY[:-1])],
        [("X-API-Key", KEY + "0")],
        [("X-API-Key", KEY.upper())],
        [("X-API-Key", f"{KEY}, {KEY}")],
        [("X-API-Key", KEY), ("X-API-Key", "wrong")],
        [("X-API-Key", "wrong"), ("X-API-Key", KEY)],
        [("X-API-Key", KEY), ("X-API-Key", KEY)],
        [("Authorization", f"Bearer {KEY}")],
        [("X-Admin-Token", KEY)],
        [("X-Team-ID", KEY)],
        [("X-Access-Token", KEY)],
        [("Cookie", f"X-API-Key={KEY}")],
    ],
)
async def test_anything_but_the_key_once_is_refused(app: FastAPI, headers: list[tuple[str, str]]) -> None:
    async with connect(app, key=None) as client:
        answer = await client.get("/v2/sandboxes", headers=headers)

    refused(answer, 401, "unauthenticated")
    assert KEY not in answer.text


async def test_other_credentials_beside_the_key_are_ignored(api: httpx.AsyncClient) -> None:
    answer = await api.get("/v2/sandboxes", headers={"Authorization": "Bearer nonsense", "X-Team-ID": "nonsense"})

    assert answer.status_code == 200


async def test_the_tokens_of_a_sandbox_open_nothing_here(app: FastAPI, api: httpx.AsyncClient) -> None:
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    created = (await api.post("/sandboxes", json=body)).json()

    for token in (created["envdAccessToken"], created["trafficAccessToken"]):
        async with connect(app, key=token) as client:
            refused(await client.get("/v2/sandboxes"), 401, "unauthenticated")


async def test_every_route_but_the_open_ones_asks_for_the_key(app: FastAPI) -> None:
    asked = 0
    async with connect(app, key=None) as client:
        for route in RouteIndex(app.router.routes)._routes:
            for method in route.methods or ():
                answer = await client.request(method, route.path)
                asked += 1
                if route.path in OPEN:
                    assert answer.status_code in (200, 204)
                else:
                    refused(answer, 401, "unauthenticated")
    assert asked > 50


async def test_no_body_is_read_before_the_key_is_checked(app: FastAPI, node: FakeNode) -> None:
    async with connect(app, key=None) as client:
        answer = await client.post("/sandboxes", content=b"{not json" * 1000)

    refused(answer, 401, "unauthenticated")
    assert node.asked == []


def test_the_key_is_not_shown_where_settings_are_printed() -> None:
    assert KEY not in repr(ApiSettings(api_key=KEY))
