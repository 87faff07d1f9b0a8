"""The catalogue: templates and snapshots by id and by every form of a name."""

import httpx
import pytest

from agentenv.model.snapshot import Source
from agentenv.testing.node import FakeNode
from tests.unit.api.client import refused


@pytest.mark.parametrize(
    "form",
    [
        "mysnap",
        "mysnap:default",
        "mysnap%3Adefault",
        "team%2Fmysnap",
        "team%2Fmysnap%3Adefault",
        "{id}",
        "{id}:default",
    ],
)
async def test_a_snapshot_is_deleted_by_any_form_of_its_name(api: httpx.AsyncClient, node: FakeNode, form: str) -> None:
    snapshot = await node.snapshot(node.add_sandbox().id, "mysnap")
    path = f"/templates/{form.format(id=snapshot.id)}"

    assert (await api.delete(path)).status_code == 204

    assert node.snapshots(Source.SANDBOX) == []
    refused(await api.delete(path), 404, "not_found")


@pytest.mark.parametrize(
    "text", ["%2e%2e", "%2e%2e%2fbase", "base%00", "base%0a", "base:v2", "x" * 200, "base%252F", "ba se"]
)
async def test_what_cannot_be_a_name_is_not_found_and_deletes_nothing(
    api: httpx.AsyncClient, node: FakeNode, text: str
) -> None:
    for method in ("GET", "DELETE"):
        refused(await api.request(method, f"/templates/{text}"), 404, "not_found")

    assert [one.names for one in node.snapshots()] == [("base",)]


async def test_a_snapshot_is_not_listed_as_a_template_nor_the_other_way_round(
    api: httpx.AsyncClient, node: FakeNode
) -> None:
    snapshot = await node.snapshot(node.add_sandbox().id, "mysnap")
    template = node.find_snapshot("base")

    for path in ("/templates", "/v2/templates", "/templates?teamID=x"):
        assert [one["templateID"] for one in (await api.get(path)).json()] == [template.id]
    assert [one["snapshotID"] for one in (await api.get("/snapshots")).json()] == [snapshot.id]
    assert (await api.get("/snapshots/mysnap")).json()["snapshotID"] == snapshot.id
    refused(await api.get("/snapshots/base"), 404, "not_found")
    assert (await api.get("/templates/mysnap")).json()["templateID"] == snapshot.id


async def test_snapshots_are_chosen_by_sandbox_and_name(api: httpx.AsyncClient, node: FakeNode) -> None:
    one, other = node.add_sandbox(), node.add_sandbox()
    first = await node.snapshot(one.id, "first")
    await node.snapshot(other.id, "second")

    for query in ({"sandboxID": one.id}, {"name": "first"}, {"name": "team/first:default"}):
        assert [found["snapshotID"] for found in (await api.get("/snapshots", params=query)).json()] == [first.id]
    assert (await api.get("/snapshots", params={"sandboxID": "nobody"})).json() == []
    refused(await api.get("/snapshots?nonsense=1"), 400, "invalid")


@pytest.mark.parametrize("path", ["/snapshots", "/v2/templates"])
async def test_catalogues_come_in_pages(api: httpx.AsyncClient, node: FakeNode, path: str) -> None:
    sandbox = node.add_sandbox()
    for index in range(3):
        await node.snapshot(sandbox.id, f"s{index}")
        node.add_template(f"t{index}")
    expected = 3 if path == "/snapshots" else 4
    seen: list[str] = []
    token: str | None = None
    for _ in range(expected):
        answer = await api.get(path, params={"limit": 1} | ({"nextToken": token} if token else {}))
        seen += [one.get("snapshotID") or one["templateID"] for one in answer.json()]
        token = answer.headers.get("x-next-token")

    assert token is None
    assert len(set(seen)) == expected


async def test_an_alias_leads_to_an_id(api: httpx.AsyncClient, node: FakeNode) -> None:
    template = node.find_snapshot("base")

    assert (await api.get("/templates/aliases/base")).json() == {"templateID": template.id, "public": False}
    assert (await api.get("/templates/aliases/team%2Fbase")).status_code == 200
    refused(await api.get("/templates/aliases/nothing"), 404, "not_found")
    refused(await api.get("/templates/aliases/not%20a%20name"), 400, "invalid")


async def test_a_template_has_one_build_which_is_ready(api: httpx.AsyncClient, node: FakeNode) -> None:
    template = node.find_snapshot("base")

    (build,) = (await api.get("/templates/base")).json()["builds"]
    status = await api.get(f"/templates/base/builds/{template.id}/status?logsOffset=0")
    (tag,) = (await api.get("/templates/base%3Adefault/tags")).json()

    assert build["buildID"] == template.id
    assert status.json()["status"] == "ready"
    assert status.json()["logEntries"] == []
    assert (tag["tag"], tag["buildID"]) == ("default", template.id)
    refused(await api.get("/templates/base/builds/other/status"), 404, "not_found")
    refused(await api.get("/templates/nothing/tags"), 404, "not_found")


async def test_sandboxes_live_on_when_their_template_is_deleted(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = (await api.post("/sandboxes", json={"templateID": "base"})).json()

    assert (await api.delete("/templates/base")).status_code == 204

    assert (await api.get(f"/sandboxes/{sandbox['sandboxID']}")).json()["alias"] == "base"
    refused(await api.post("/sandboxes", json={"templateID": "base"}), 404, "not_found")
