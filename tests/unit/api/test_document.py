"""The OpenAPI document: served, complete, current in the repository, and true of what is answered."""

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from agentenv.api.edge import RouteIndex
from agentenv.api.later import ROUTES
from tests.unit.api.client import connect
from tools import openapi

UNDOCUMENTED = {"/openapi.json", "/docs"}


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


async def test_it_is_served_with_a_page_to_read_it_and_needs_no_key(app: FastAPI, document: dict[str, Any]) -> None:
    async with connect(app, key=None) as client:
        served, page = await client.get("/openapi.json"), await client.get("/docs")

    assert served.json() == document
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


def test_every_route_is_in_it_or_says_that_it_is_absent(app: FastAPI, document: dict[str, Any]) -> None:
    documented = {(method, path) for method, path, _ in operations(document)}
    absent = {(method, path) for method, path, _ in ROUTES}
    routed = {
        (method, route.path)
        for route in RouteIndex(app.router.routes)._routes
        for method in route.methods or ()
        if route.path not in UNDOCUMENTED
    }

    assert documented | absent == routed
    assert not documented & absent


def test_every_reference_leads_somewhere_and_every_schema_is_used(document: dict[str, Any]) -> None:
    referred = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))

    assert referred == set(document["components"]["schemas"])


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert "default" in operation["responses"], where
        named = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), where
        assert ("security" in operation) == (path not in ("/health", "/metrics")), where
        assert ("401" in operation["responses"]) == ("security" in operation), where


def test_units_and_limits_are_in_it(document: dict[str, Any]) -> None:
    timeout = document["components"]["schemas"]["NewSandboxV2"]["properties"]["timeout"]

    assert (timeout["minimum"], timeout["maximum"], timeout["default"]) == (1, 2_592_000, 300)
    assert "seconds" in timeout["description"]
    assert timeout["examples"]
    assert "MiB" in document["components"]["schemas"]["SandboxDetail"]["properties"]["memoryMB"]["description"]


def test_a_wrong_request_is_never_a_422_of_the_framework(document: dict[str, Any]) -> None:
    with_422 = {path for _, path, operation in operations(document) if "422" in operation["responses"]}

    assert with_422 == {"/sandboxes", "/v2/sandboxes"}  # an Idempotency-Key used twice


def test_the_files_in_the_repository_are_current() -> None:
    assert openapi.stale() == []


async def test_e2b_paths_of_a_sandbox_are_all_routed(api: httpx.AsyncClient) -> None:
    """What the clients of E2B call; see the table of the reference."""
    called = [
        ("POST", "/v2/sandboxes"), ("POST", "/sandboxes"), ("GET", "/v2/sandboxes"), ("GET", "/sandboxes"),
        ("GET", "/sandboxes/x"), ("DELETE", "/sandboxes/x"), ("POST", "/sandboxes/x/timeout"),
        ("POST", "/v2/sandboxes/x/connect"), ("POST", "/sandboxes/x/connect"), ("POST", "/sandboxes/x/resume"),
        ("POST", "/sandboxes/x/pause"), ("POST", "/sandboxes/x/fork"), ("POST", "/sandboxes/x/snapshots"),
        ("GET", "/snapshots"), ("DELETE", "/templates/x"), ("PUT", "/sandboxes/x/network"),
        ("GET", "/sandboxes/x/metrics"), ("GET", "/sandboxes/x/logs"), ("GET", "/v2/sandboxes/x/logs"),
        ("POST", "/sandboxes/x/refreshes"), ("GET", "/sandboxes/metrics"), ("GET", "/teams"), ("GET", "/health"),
        ("POST", "/v3/templates"), ("GET", "/templates/x/files/h"), ("POST", "/v2/templates/x/builds/b"),
        ("GET", "/templates/x/builds/b/status"), ("GET", "/templates/aliases/x"), ("GET", "/templates"),
        ("GET", "/v2/templates"), ("GET", "/templates/x"), ("PATCH", "/v2/templates/x"), ("POST", "/templates/tags"),
        ("DELETE", "/templates/tags"), ("GET", "/templates/x/tags"),
    ]  # fmt: skip
    for method, path in called:
        answer = await api.request(method, path)

        assert answer.status_code != 405, f"{method} {path}"
        assert "route_not_found" not in answer.text, f"{method} {path}"
