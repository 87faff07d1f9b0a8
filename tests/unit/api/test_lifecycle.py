"""Verbs on one sandbox: exact success codes, and what is asked of the node."""

import asyncio
from typing import Any

import httpx
import pytest

from agentenv.model.errors import DeadlineExceeded, NotFound, Unavailable
from agentenv.model.lifecycle import State
from agentenv.model.policy import IngressPolicy
from agentenv.model.sandbox import OnTimeout
from agentenv.testing.clock import JumpingClock
from agentenv.testing.node import FakeNode
from tests.unit.api.client import NOBODY, refused

VERBS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "", None), ("DELETE", "", None), ("POST", "/pause", {}), ("POST", "/resume", {}), ("POST", "/connect", {}),
    ("POST", "/fork", {}), ("POST", "/snapshots", {}), ("POST", "/timeout", {"timeout": 5}), ("POST", "/refreshes", {}),
    ("PUT", "/network", {}), ("GET", "/custom-extension-params", None), ("PATCH", "/custom-extension-params", {}),
    ("GET", "/metrics", None), ("GET", "/logs", None),
]  # fmt: skip


@pytest.mark.parametrize(("method", "suffix", "body"), VERBS)
async def test_an_id_that_nothing_has_is_not_found(
    api: httpx.AsyncClient, method: str, suffix: str, body: dict[str, Any] | None
) -> None:
    for sandbox_id in (NOBODY, NOBODY.upper(), "x", "%2e%2e", "%00", "%2e%2e%2f", "a" * 1000, "{}"):
        answer = await api.request(method, f"/sandboxes/{sandbox_id}{suffix}", json=body)

        refused(answer, 404, "not_found")


@pytest.mark.parametrize("body", [None, b"", b"{}", b'{"memory":true}', b'{"memory":true,"requireHealthyGuest":false}'])
async def test_pause_answers_204_and_409_when_paused_already(
    api: httpx.AsyncClient, node: FakeNode, body: bytes | None
) -> None:
    sandbox = node.add_sandbox()

    paused = await api.post(f"/sandboxes/{sandbox.id}/pause", content=body)
    again = await api.post(f"/sandboxes/{sandbox.id}/pause", content=body)

    assert (paused.status_code, paused.content) == (204, b"")
    refused(again, 409, "conflict")
    assert node.get(sandbox.id).state is State.PAUSED


@pytest.mark.parametrize("silence", [Unavailable("the agent is gone"), DeadlineExceeded("the agent is silent")])
async def test_pause_can_ask_for_a_guest_that_answers(
    api: httpx.AsyncClient, node: FakeNode, silence: Exception
) -> None:
    sandbox = node.add_sandbox()
    node.failures["metrics"] = silence

    unhealthy = await api.post(f"/sandboxes/{sandbox.id}/pause", json={"requireHealthyGuest": True})

    assert str(silence) in refused(unhealthy, 503, "sandbox_snapshot_guest_agent_unresponsive")
    assert unhealthy.headers["should-retry"] == "false"
    assert node.get(sandbox.id).state is State.RUNNING
    assert (await api.post(f"/sandboxes/{sandbox.id}/pause", json={})).status_code == 204
    refused(await api.post(f"/sandboxes/{sandbox.id}/pause", json={"requireHealthyGuest": True}), 409, "conflict")


@pytest.mark.parametrize("verb", ["pause", "resume", "connect", "snapshots"])
async def test_giving_up_memory_is_not_supported(api: httpx.AsyncClient, node: FakeNode, verb: str) -> None:
    sandbox = node.add_sandbox()

    answer = await api.post(f"/sandboxes/{sandbox.id}/{verb}", json={"memory": False})

    assert "memory" in refused(answer, 400, "unsupported")
    assert node.get(sandbox.id) == sandbox


@pytest.mark.parametrize(("path", "default_s"), [("/sandboxes", 15), ("/v2/sandboxes", 300)])
async def test_connect_answers_201_if_it_resumed_and_200_if_it_ran(
    api: httpx.AsyncClient, node: FakeNode, clock: JumpingClock, path: str, default_s: int
) -> None:
    sandbox = node.add_sandbox(ends_at=clock.now())
    await node.pause(sandbox.id)

    resumed = await api.post(f"{path}/{sandbox.id}/connect", json={})
    running = await api.post(f"{path}/{sandbox.id}/connect", content=b"")

    assert (resumed.status_code, running.status_code) == (201, 200)
    assert resumed.json()["sandboxID"] == sandbox.id
    assert resumed.json()["envdAccessToken"] == running.json()["envdAccessToken"] == f"envd-{sandbox.id}"
    ends_at = node.get(sandbox.id).ends_at
    assert ends_at is not None
    assert (ends_at - clock.now()).total_seconds() == default_s


async def test_connect_never_shortens(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox()

    assert (await api.post(f"/sandboxes/{sandbox.id}/connect", json={"timeout": 1})).status_code == 200

    assert node.get(sandbox.id).ends_at == sandbox.ends_at


async def test_resume_answers_201_and_409_if_it_runs(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    refused(await api.post(f"/sandboxes/{sandbox.id}/resume"), 409, "conflict")
    await node.pause(sandbox.id)

    assert (await api.post(f"/sandboxes/{sandbox.id}/resume", json={"autoPause": True})).status_code == 201

    assert node.get(sandbox.id).on_timeout is OnTimeout.PAUSE


async def test_timeout_moves_the_end_either_way(api: httpx.AsyncClient, node: FakeNode, clock: JumpingClock) -> None:
    sandbox = node.add_sandbox()

    for seconds in (1000, 1):
        assert (await api.post(f"/sandboxes/{sandbox.id}/timeout", json={"timeout": seconds})).status_code == 204

        ends_at = node.get(sandbox.id).ends_at
        assert ends_at is not None
        assert (ends_at - clock.now()).total_seconds() == seconds


@pytest.mark.parametrize("body", [b"", b"{}", b'{"timeout":0}', b'{"timeout":-5}', b'{"timeout":"5"}', b'{"t":5}'])
async def test_a_timeout_without_a_right_one_changes_nothing(
    api: httpx.AsyncClient, node: FakeNode, body: bytes
) -> None:
    sandbox = node.add_sandbox()

    refused(await api.post(f"/sandboxes/{sandbox.id}/timeout", content=body), 400, "invalid")

    assert node.get(sandbox.id) == sandbox


async def test_a_paused_sandbox_has_no_end_to_move(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox(state=State.PAUSED)

    refused(await api.post(f"/sandboxes/{sandbox.id}/timeout", json={"timeout": 5}), 409, "conflict")


@pytest.mark.parametrize(
    ("duration", "status"), [(0, 204), (3600, 204), (3601, 400), (-1, 400), (True, 400), (1.5, 400)]
)
async def test_a_refresh_is_bounded_and_only_extends(
    api: httpx.AsyncClient, node: FakeNode, duration: object, status: int
) -> None:
    sandbox = node.add_sandbox()

    answer = await api.post(f"/sandboxes/{sandbox.id}/refreshes", json={"duration": duration})

    assert answer.status_code == status
    before, after = sandbox.ends_at, node.get(sandbox.id).ends_at
    assert before is not None
    assert after is not None
    assert after >= before


async def test_every_child_of_a_fork_has_its_own_outcome(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox(metadata={"a": "b"})
    node.fork_failures = {1: NotFound("the capture is gone"), 2: RuntimeError("secret")}

    answer = await api.post(f"/sandboxes/{sandbox.id}/fork", json={"count": 4, "timeout": 60})

    assert answer.status_code == 201
    first, second, third, fourth = answer.json()
    assert first["sandbox"]["sandboxID"] != fourth["sandbox"]["sandboxID"]
    assert first["sandbox"]["envdAccessToken"] != fourth["sandbox"]["envdAccessToken"]
    assert second == {"error": {"code": 404, "message": "the capture is gone", "error_code": "not_found"}}
    assert third["error"]["code"] == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize("count", [0, -1, 101, 1.0, "2", True, None])
async def test_a_fork_makes_1_to_100_children(api: httpx.AsyncClient, node: FakeNode, count: object) -> None:
    sandbox = node.add_sandbox()

    refused(await api.post(f"/sandboxes/{sandbox.id}/fork", json={"count": count}), 400, "invalid")
    assert len(node.sandboxes()) == 1
    assert len((await api.post(f"/sandboxes/{sandbox.id}/fork", json={"count": 100})).json()) == 100
    assert len((await api.post(f"/sandboxes/{sandbox.id}/fork")).json()) == 1


@pytest.mark.parametrize("name", ["mysnap", "mysnap:default", "team/mysnap"])
async def test_a_snapshot_has_its_bare_name(api: httpx.AsyncClient, node: FakeNode, name: str) -> None:
    sandbox = node.add_sandbox()

    answer = await api.post(f"/sandboxes/{sandbox.id}/snapshots", json={"name": name})

    assert answer.status_code == 201
    assert answer.json()["names"] == ["mysnap"]
    assert node.find_snapshot("mysnap").id == answer.json()["snapshotID"]
    assert node.get(sandbox.id).state is State.RUNNING


async def test_a_snapshot_needs_no_name(api: httpx.AsyncClient, node: FakeNode) -> None:
    answer = await api.post(f"/sandboxes/{node.add_sandbox().id}/snapshots")

    assert answer.status_code == 201
    assert answer.json()["names"] == []


@pytest.mark.parametrize(
    ("name", "error_code"),
    [
        ("../x", "invalid"),
        ("", "invalid"),
        ("a b", "invalid"),
        ("x\n", "invalid"),
        (1, "invalid"),
        ("x:v2", "unsupported"),
    ],
)
async def test_a_name_that_cannot_be_makes_no_snapshot(
    api: httpx.AsyncClient, node: FakeNode, name: object, error_code: str
) -> None:
    before = node.snapshots()

    answer = await api.post(f"/sandboxes/{node.add_sandbox().id}/snapshots", json={"name": name})

    refused(answer, 400, error_code)
    assert node.snapshots() == before


async def test_a_network_update_replaces_egress_and_leaves_ingress(api: httpx.AsyncClient, node: FakeNode) -> None:
    ingress = IngressPolicy(allow_public_traffic=False, mask_request_host="a:1")
    sandbox = node.add_sandbox(ingress=ingress)
    path = f"/sandboxes/{sandbox.id}/network"

    first = await api.put(
        path, json={"allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"], "allow_internet_access": False}
    )
    shown = (await api.get(f"/sandboxes/{sandbox.id}")).json()

    assert first.status_code == 204
    assert shown["allowInternetAccess"] is False
    assert shown["network"] == {
        "allowPublicTraffic": False, "allowOut": ["8.8.8.8/32"], "denyOut": ["0.0.0.0/0"], "maskRequestHost": "a:1",
    }  # fmt: skip
    assert (await api.put(path, json={"allowInternetAccess": True})).status_code == 204
    cleared = node.get(sandbox.id)
    assert cleared.egress.allow_out == cleared.egress.deny_out == ()
    assert cleared.egress.allow_internet is True
    assert cleared.ingress == ingress


@pytest.mark.parametrize(
    ("body", "error_code"),
    [
        ({"allowOut": ["example.com"]}, "invalid"), ({"allowOut": ["::/0"]}, "invalid"),
        ({"allowPublicTraffic": True}, "invalid"), ({"maskRequestHost": "a"}, "invalid"),
        ({"rules": {"a": []}}, "unsupported"), ({"allow_internet_access": 1}, "invalid"),
        ({"allow_internet_access": True, "allowInternetAccess": False}, "invalid"),
    ],
)  # fmt: skip
async def test_a_network_update_that_cannot_be_changes_nothing(
    api: httpx.AsyncClient, node: FakeNode, body: dict[str, Any], error_code: str
) -> None:
    sandbox = node.add_sandbox()

    refused(await api.put(f"/sandboxes/{sandbox.id}/network", json=body), 400, error_code)

    assert node.get(sandbox.id) == sandbox


async def test_no_extension_means_no_parameters(api: httpx.AsyncClient, node: FakeNode) -> None:
    path = f"/sandboxes/{node.add_sandbox().id}/custom-extension-params"

    assert (await api.get(path)).json() == {}
    assert (await api.patch(path, json={})).json() == {}
    refused(await api.patch(path, json={"a": 1}), 400, "unsupported")


async def test_a_sandbox_in_error_is_shown_refused_and_deleted(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    node.lose(sandbox.id, "the VMM was killed by signal 9")
    path = f"/sandboxes/{sandbox.id}"

    detail = (await api.get(path)).json()

    assert detail["state"] == "paused"
    assert detail["lifecycleState"] == "error"
    assert detail["error"] == {"reason": "the VMM was killed by signal 9"}
    refused(await api.post(f"{path}/pause"), 409, "conflict")
    refused(await api.post(f"{path}/connect", json={}), 409, "conflict")
    refused(await api.post(f"{path}/fork"), 409, "conflict")
    assert (await api.delete(path)).status_code == 204
    refused(await api.get(path), 404, "not_found")
    refused(await api.delete(path), 404, "not_found")


async def test_delete_works_in_the_middle_of_a_pause(api: httpx.AsyncClient, node: FakeNode) -> None:
    sandbox = node.add_sandbox()
    hold = node.hold("pause")
    pausing = asyncio.create_task(api.post(f"/sandboxes/{sandbox.id}/pause"))
    await hold.reached.wait()
    assert (await api.get(f"/sandboxes/{sandbox.id}")).json()["state"] == "paused"

    assert (await api.delete(f"/sandboxes/{sandbox.id}")).status_code == 204

    refused(await pausing, 409, "conflict")
    assert node.sandboxes() == []
