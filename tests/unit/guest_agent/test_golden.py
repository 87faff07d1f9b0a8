"""What node and agent say to each other, as `spec/agent` has it; the agent's own tests read the same files."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from agentenv.guest.agent import HttpAgent
from agentenv.guest.connect import FrameReader, encode_frame
from agentenv.guest.contract import CaBundle, GuestMetrics, Identity
from tests.capabilities import REPO
from tests.unit.guest_agent.server import answering, guest_server, in_order

SPEC = REPO / "spec/agent"
LONG_S = 30.0


def golden(name: str) -> Any:
    return json.loads((SPEC / name).read_text())


@pytest.mark.parametrize("vector", golden("frames.json"), ids=lambda vector: vector["name"])
def test_a_frame_is_read_and_written_as_specified(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["bytes"])

    (frame,) = FrameReader().feed(data)

    assert frame.end == vector["end"]
    assert frame.message == json.loads(vector["payload"])
    if vector["payload"].isascii():  # other text is escaped by one side and not by the other; both read both
        assert encode_frame(frame.message, end=frame.end) == data


async def test_the_nodes_calls_are_as_specified() -> None:
    calls = golden("calls.json")
    figures = json.dumps(golden("metrics.json")).encode()
    respond = in_order(answering(409), answering(204), answering(204), answering(204), answering(200, figures))
    async with guest_server(respond) as guest:
        agent = HttpAgent("127.0.0.1", guest.port, secret="control secret")
        identity = Identity(
            sandbox_id="11111111-1111-4111-8111-111111111111",
            template_id="22222222-2222-4222-8222-222222222222",
            access_token="token",
            control_secret="new control secret",
            timestamp=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
            hostname="sandbox-11111111",
            machine_id="0123456789abcdef" * 2,
            entropy=bytes(range(64)),
            env={"LANG": "C.UTF-8", "EMPTY": ""},
            default_user="user",
            default_workdir="/home/user",
            ca_bundle=CaBundle.of("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"),
        )
        await agent.init(identity, secret="control secret", timeout_s=LONG_S)
        await agent.freeze(timeout_s=5)
        await agent.thaw(timeout_s=LONG_S)
        await agent.metrics(access_token="token", timeout_s=LONG_S)
        await agent.close()

    for request, expected in zip(guest.requests, calls, strict=True):
        assert f"{request.method} {request.path}" == expected["call"]
        body = request.json if request.body else None
        if body is not None and "timestamp" in body:
            said = datetime.fromisoformat(str(body["timestamp"]))
            assert said >= identity.timestamp  # it goes on while the guest is waited for
            body["timestamp"] = identity.timestamp.isoformat()
        assert body == expected.get("body")
        for name, value in expected["headers"].items():
            assert value in ("<number>", request.headers[name])
            assert value != "<number>" or request.headers[name].isdecimal()


async def test_the_agents_figures_are_read_as_specified() -> None:
    figures = golden("metrics.json")
    async with guest_server(answering(200, json.dumps(figures).encode())) as guest:
        agent = HttpAgent("127.0.0.1", guest.port, secret="control secret")
        read = await agent.metrics(access_token=None, timeout_s=LONG_S)
        await agent.close()

    assert read == GuestMetrics(
        timestamp=figures["ts"],
        cpu_count=figures["cpu_count"],
        cpu_used_pct=figures["cpu_used_pct"],
        memory_total=figures["mem_total"],
        memory_used=figures["mem_used"],
        memory_cache=figures["mem_cache"],
        disk_total=figures["disk_total"],
        disk_used=figures["disk_used"],
    )
