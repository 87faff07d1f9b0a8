"""The client of the guest agent against real servers that refuse, stall, lie and break off."""

import asyncio
import base64
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from agentenv.guest import agent as agent_module
from agentenv.guest.agent import HttpAgent, HttpAgents
from agentenv.guest.connect import END_OF_STREAM
from agentenv.guest.contract import CaBundle, Identity
from agentenv.guest.exchange import MAX_ANSWER_BYTES, Answer, Exchange
from agentenv.guest.output import MAX_OUTPUT_BYTES
from agentenv.model.errors import AgentEnvError, Bug, DeadlineExceeded, Invalid, Unavailable
from tests.unit.guest_agent.server import (
    GuestServer,
    Request,
    Respond,
    answering,
    guest_server,
    hang_up,
    in_order,
    send,
    silence,
)

SHORT_S = 0.3
LONG_S = 30.0
IDENTITY = Identity(
    sandbox_id="11111111-1111-4111-8111-111111111111",
    template_id="22222222-2222-4222-8222-222222222222",
    access_token="token",
    control_secret="new",
    timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    hostname="sandbox-1",
    machine_id="0" * 32,
    entropy=b"e" * 64,
    env={"A": "b"},
    default_user="user",
    default_workdir="/home/user",
)
METRICS = {
    "ts": 5, "cpu_count": 2, "cpu_used_pct": 12.5, "mem_total": 10, "mem_used": 4, "mem_cache": 1, "disk_total": 9,
    "disk_used": 3,
}  # fmt: skip


@asynccontextmanager
async def talking(respond: Respond) -> AsyncIterator[tuple[HttpAgent, GuestServer]]:
    async with guest_server(respond) as guest:
        agent = HttpAgent("127.0.0.1", guest.port, secret="control")
        try:
            yield agent, guest
        finally:
            await agent.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# init


async def test_init_gives_the_whole_identity_with_the_secret_that_the_agent_holds() -> None:
    async with talking(answering(204)) as (agent, guest):
        await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    (request,) = guest.requests
    assert (request.method, request.path) == ("POST", "/init")
    assert request.headers["x-agentenv-control"] == "old"
    body = request.json
    assert base64.b64decode(str(body.pop("entropy"))) == IDENTITY.entropy
    assert datetime.fromisoformat(str(body.pop("timestamp"))) >= IDENTITY.timestamp
    assert body == {
        "accessToken": "token", "envVars": {"A": "b"}, "hostname": "sandbox-1", "machineId": "0" * 32,
        "sandboxId": IDENTITY.sandbox_id, "templateId": IDENTITY.template_id, "controlSecret": "new",
        "defaultUser": "user", "defaultWorkdir": "/home/user",
    }  # fmt: skip


async def test_a_fresh_guest_is_shown_no_secret() -> None:
    async with talking(answering(204)) as (agent, guest):
        await agent.init(IDENTITY, secret=None, timeout_s=LONG_S)

    assert "x-agentenv-control" not in guest.requests[0].headers


async def test_init_waits_for_an_agent_that_does_not_listen_yet() -> None:
    port = free_port()
    agent = HttpAgent("127.0.0.1", port, secret="control")
    starting = asyncio.create_task(agent.init(IDENTITY, secret="old", timeout_s=LONG_S))
    await asyncio.sleep(0.05)  # a few refusals
    assert not starting.done()

    async with guest_server(answering(204), port=port) as guest:
        await starting
        await agent.close()

    assert len(guest.requests) == 1


async def test_a_lost_connection_request_is_repeated_with_a_fresh_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops SYNs, as a guest does whose network is not up yet."""
    attempts: list[float] = []
    ask = Exchange.ask

    async def counted(self: Exchange, *args: Any, connect_timeout_s: float, **kwargs: Any) -> Answer:
        attempts.append(connect_timeout_s)
        return await ask(self, *args, connect_timeout_s=connect_timeout_s, **kwargs)

    monkeypatch.setattr(agent_module, "FIRST_CONNECT_S", 0.02)
    monkeypatch.setattr(Exchange, "ask", counted)
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = [_started_connection(listener.getsockname()) for _ in range(3)]
    agent = HttpAgent("127.0.0.1", listener.getsockname()[1], secret="control")
    starting = asyncio.create_task(agent.init(IDENTITY, secret="old", timeout_s=LONG_S))
    while len(attempts) < 3:
        await asyncio.sleep(0.001)
        assert not starting.done()

    for filler in fillers:
        filler.close()
    guest = GuestServer(answering(204))
    async with await asyncio.start_server(guest.serve, sock=listener):
        await starting
        await agent.close()

    assert attempts[:3] == [0.02, 0.04, 0.08]
    assert guest.requests


def _started_connection(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(address)
    return connection


async def test_each_connection_attempt_waits_longer_than_the_one_before() -> None:
    attempts = [agent_module.FIRST_CONNECT_S * 2**n for n in range(6)]

    given = agent_module._connect_timeouts()
    assert [next(given) for _ in range(6)] == [min(each, agent_module.LONGEST_CONNECT_S) for each in attempts]


async def test_init_of_a_silent_agent_ends_at_its_deadline() -> None:
    async with talking(silence) as (agent, _):
        with pytest.raises(DeadlineExceeded):
            await agent.init(IDENTITY, secret="old", timeout_s=SHORT_S)


async def test_a_step_that_failed_in_the_guest_is_told_by_name() -> None:
    async with talking(answering(500, b"cannot set the clock")) as (agent, guest):
        with pytest.raises(Bug, match="cannot set the clock"):
            await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    assert len(guest.requests) == 1


async def test_a_wrong_secret_is_not_tried_again() -> None:
    async with talking(answering(401, b"no")) as (agent, guest):
        with pytest.raises(Bug, match="401"):
            await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    assert len(guest.requests) == 1


async def test_an_answer_lost_after_the_secret_was_rotated_does_not_lock_the_node_out() -> None:
    async def rotated(request: Request, writer: asyncio.StreamWriter) -> None:
        send(writer, 204 if request.headers["x-agentenv-control"] == "new" else 401, b"")

    async with talking(in_order(hang_up, rotated)) as (agent, guest):
        await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    assert [r.headers["x-agentenv-control"] for r in guest.requests] == ["old", "old", "new"]


async def test_the_new_secret_is_not_shown_to_an_agent_that_got_nothing_yet() -> None:
    """Whoever refuses the old secret without ever having been told the new one must not learn it as a credential."""
    async with talking(answering(401)) as (agent, guest):
        with pytest.raises(Bug):
            await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    assert [r.headers["x-agentenv-control"] for r in guest.requests] == ["old"]


async def test_the_clock_is_that_of_the_attempt_which_arrives() -> None:
    async with talking(in_order(hang_up, hang_up, hang_up, answering(204))) as (agent, guest):
        await agent.init(IDENTITY, secret="old", timeout_s=LONG_S)

    times = [datetime.fromisoformat(str(r.json["timestamp"])) for r in guest.requests]
    assert times == sorted(set(times))


# The CA bundle

BUNDLED = replace(IDENTITY, ca_bundle=CaBundle.of("-----BEGIN CERTIFICATE-----"))


async def test_a_bundle_is_named_and_sent_only_when_it_is_wanted() -> None:
    async with talking(in_order(answering(409), answering(204))) as (agent, guest):
        await agent.init(BUNDLED, secret="old", timeout_s=LONG_S)

    named, sent = (r.json for r in guest.requests)
    assert BUNDLED.ca_bundle is not None
    assert named["caDigest"] == sent["caDigest"] == BUNDLED.ca_bundle.digest
    assert "caBundle" not in named
    assert sent["caBundle"] == BUNDLED.ca_bundle.pem


@pytest.mark.parametrize(("identity", "asked"), [(BUNDLED, 2), (IDENTITY, 1)])
async def test_an_agent_that_always_wants_a_bundle_is_an_error(identity: Identity, asked: int) -> None:
    async with talking(answering(409)) as (agent, guest):
        with pytest.raises(Bug, match="409"):
            await agent.init(identity, secret="old", timeout_s=LONG_S)

    assert len(guest.requests) == asked


# Short calls

CALLS: dict[str, Callable[[HttpAgent, float], Coroutine[object, object, object]]] = {
    "freeze": lambda agent, timeout_s: agent.freeze(timeout_s=timeout_s),
    "thaw": lambda agent, timeout_s: agent.thaw(timeout_s=timeout_s),
    "metrics": lambda agent, timeout_s: agent.metrics(access_token="token", timeout_s=timeout_s),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


async def test_freeze_and_thaw_carry_the_control_secret() -> None:
    async with talking(answering(204)) as (agent, guest):
        await agent.freeze(timeout_s=LONG_S)
        await agent.thaw(timeout_s=LONG_S)

    assert [(r.method, r.path) for r in guest.requests] == [("POST", "/freeze"), ("POST", "/thaw")]
    assert {r.headers["x-agentenv-control"] for r in guest.requests} == {"control"}


async def test_freezes_and_thaws_are_numbered_so_that_a_late_one_is_void() -> None:
    async with talking(in_order(answering(204), answering(204), hang_up, answering(204))) as (agent, guest):
        await agent.freeze(timeout_s=LONG_S)
        await agent.thaw(timeout_s=LONG_S)
        await agent.freeze(timeout_s=LONG_S)
        another = HttpAgent("127.0.0.1", guest.port, secret="control")  # as of a server that was started again
        await another.thaw(timeout_s=LONG_S)
        await another.close()

    turns = [int(request.headers["x-agentenv-turn"]) for request in guest.requests]
    assert turns[0] < turns[1] < turns[2]
    assert turns[2] == turns[3], "asked again, it is the same order"
    assert turns[3] < turns[4]


async def test_metrics_are_read() -> None:
    async with talking(answering(200, json.dumps(METRICS).encode())) as (agent, guest):
        metrics = await agent.metrics(access_token="token", timeout_s=LONG_S)

    assert guest.requests[0].headers["x-access-token"] == "token"
    assert (metrics.cpu_count, metrics.cpu_used_pct, metrics.memory_used, metrics.disk_total) == (2, 12.5, 4, 9)


@each_call
async def test_nobody_listening_is_unavailable(call: Callable[..., Coroutine[object, object, object]]) -> None:
    agent = HttpAgent("127.0.0.1", free_port(), secret="control")

    with pytest.raises(Unavailable, match="within"):
        await call(agent, SHORT_S)
    await agent.close()


@each_call
async def test_silence_is_unavailable(call: Callable[..., Coroutine[object, object, object]]) -> None:
    async with talking(silence) as (agent, _):
        with pytest.raises(Unavailable):
            await call(agent, SHORT_S)


@each_call
async def test_an_agent_that_cannot_now_is_unavailable(call: Callable[..., Coroutine[object, object, object]]) -> None:
    async with talking(answering(503, b"could not freeze in time")) as (agent, guest):
        with pytest.raises(Unavailable, match="could not freeze in time"):
            await call(agent, LONG_S)

    assert len(guest.requests) == 1


@each_call
@pytest.mark.parametrize("status", [301, 302, 307, 401, 404, 409, 418, 500, 599])
async def test_every_other_status_is_a_bug(call: Callable[..., Coroutine[object, object, object]], status: int) -> None:
    async with talking(answering(status, b"step 7", headers="Location: /elsewhere\r\n")) as (agent, guest):
        with pytest.raises(Bug, match=str(status)):
            await call(agent, LONG_S)

    assert len(guest.requests) == 1


@each_call
async def test_an_agent_that_starts_again_is_asked_again(
    call: Callable[..., Coroutine[object, object, object]],
) -> None:
    good = answering(200, json.dumps(METRICS).encode())
    async with talking(in_order(hang_up, hang_up, good)) as (agent, guest):
        await call(agent, LONG_S)

    assert len(guest.requests) == 3


@each_call
async def test_a_guest_cannot_send_the_node_elsewhere(call: Callable[..., Coroutine[object, object, object]]) -> None:
    async with guest_server(answering(200, b"{}")) as elsewhere:
        there = f"Location: {elsewhere.url}/secrets\r\nSet-Cookie: a=b\r\n"
        async with talking(answering(307, b"", headers=there)) as (agent, _):
            with pytest.raises(Bug):
                await call(agent, LONG_S)

    assert elsewhere.connections == 0


async def test_a_cookie_of_a_guest_is_not_kept() -> None:
    async with talking(answering(204, headers="Set-Cookie: a=b\r\n")) as (agent, guest):
        await agent.freeze(timeout_s=LONG_S)
        await agent.thaw(timeout_s=LONG_S)

    assert "cookie" not in guest.requests[1].headers


@each_call
async def test_an_endless_answer_is_cut_off(call: Callable[..., Coroutine[object, object, object]]) -> None:
    sent = 0

    async def endless(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        del request
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            sent += 0x10000
            await writer.drain()

    async with talking(endless) as (agent, _):
        with pytest.raises(Unavailable, match="more than"):
            await call(agent, LONG_S)

    assert sent < 64 * MAX_ANSWER_BYTES


async def test_a_packed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    async with talking(answering(200, bomb, headers="Content-Encoding: gzip\r\n")) as (agent, guest):
        with pytest.raises(Unavailable):
            await agent.metrics(access_token=None, timeout_s=LONG_S)

    assert guest.requests[0].headers["accept-encoding"] == "identity"


GARBAGE = {
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "huge header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
}


@each_call
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_unavailable(call: Callable[..., Coroutine[object, object, object]], garbage: bytes) -> None:
    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        del request
        writer.write(garbage)
        await writer.drain()
        writer.close()

    async with talking(respond) as (agent, _):
        with pytest.raises(Unavailable):
            await call(agent, SHORT_S)


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"


@each_call
async def test_an_answer_that_is_cut_off_is_unavailable(
    call: Callable[..., Coroutine[object, object, object]],
) -> None:
    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        del request
        writer.write(CUT)
        await writer.drain()
        writer.transport.abort()

    async with talking(respond) as (agent, _):
        with pytest.raises(Unavailable):
            await call(agent, SHORT_S)


BAD_METRICS = {
    "empty": b"",
    "not json": b"<html>",
    "deep": b"[" * 200_000,
    "a list": b"[]",
    "a number": b"7",
    "missing": json.dumps({k: v for k, v in METRICS.items() if k != "ts"}).encode(),
    "text": json.dumps(METRICS | {"mem_used": "lots"}).encode(),
    "infinite": json.dumps(METRICS | {"mem_used": float("inf")}).encode(),
    "nan": json.dumps(METRICS | {"cpu_used_pct": float("nan")}).encode(),
    "null": json.dumps(METRICS | {"disk_used": None}).encode(),
}


@pytest.mark.parametrize("body", BAD_METRICS.values(), ids=BAD_METRICS)
async def test_metrics_that_make_no_sense_are_an_error_of_a_kind(body: bytes) -> None:
    async with talking(answering(200, body)) as (agent, _):
        with pytest.raises(AgentEnvError):
            await agent.metrics(access_token=None, timeout_s=LONG_S)


# Connections


async def test_calls_in_a_row_share_a_connection() -> None:
    async with talking(answering(204)) as (agent, guest):
        for _ in range(5):
            await agent.thaw(timeout_s=LONG_S)

        assert guest.connections == 1


async def test_nothing_is_asked_after_close() -> None:
    """Its address may belong to another guest by then."""
    async with talking(answering(204)) as (agent, guest):
        await agent.thaw(timeout_s=LONG_S)
        await agent.close()
        await agent.close()

        for call in CALLS.values():
            with pytest.raises(Unavailable, match="closed"):
                await call(agent, LONG_S)
        with pytest.raises(Unavailable, match="closed"):
            await agent.init(IDENTITY, secret=None, timeout_s=LONG_S)
        with pytest.raises(Unavailable, match="closed"):
            await agent.run(["true"], user="root", access_token=None, timeout_s=LONG_S)

    assert guest.connections == 1


async def test_two_generations_share_no_connection() -> None:
    async with guest_server(answering(204)) as guest:
        for _ in range(3):
            agent = HttpAgent("127.0.0.1", guest.port, secret="control")
            await agent.thaw(timeout_s=LONG_S)
            await agent.close()

    assert guest.connections == 3


async def test_close_breaks_off_what_is_going_on() -> None:
    async with talking(silence) as (agent, guest):
        asking = asyncio.create_task(agent.freeze(timeout_s=LONG_S))
        while not guest.requests:
            await asyncio.sleep(0)

        await agent.close()

        with pytest.raises(Unavailable):
            await asking


async def test_a_cancelled_call_leaves_the_agent_usable() -> None:
    async with talking(in_order(silence, answering(204))) as (agent, guest):
        asking = asyncio.create_task(agent.freeze(timeout_s=LONG_S))
        while not guest.requests:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

        await agent.thaw(timeout_s=LONG_S)


@pytest.mark.slow
async def test_a_thousand_agents_leak_no_descriptor() -> None:
    async with guest_server(answering(204)) as guest:
        before = descriptors()
        for _ in range(1000):
            agent = HttpAgent("127.0.0.1", guest.port, secret="control")
            await agent.thaw(timeout_s=LONG_S)
            await agent.close()
        while guest.open_connections:
            await asyncio.sleep(0)

        assert guest.connections == 1000
        assert descriptors() <= before + 2


async def test_agents_are_made_for_an_address() -> None:
    agent = HttpAgents().agent(IPv4Address("127.0.0.1"), secret="control")

    await agent.close()


# run


def frames(*messages: object, end: object = None) -> bytes:
    def frame(message: object, flags: int) -> bytes:
        payload = message if isinstance(message, bytes) else json.dumps(message).encode()
        return struct.pack(">BI", flags, len(payload)) + payload

    whole = b"".join(frame(message, 0) for message in messages)
    return whole + (frame(end, END_OF_STREAM) if end is not None else b"")


def data(stream: str, text: bytes) -> dict[str, object]:
    return {"event": {"data": {stream: base64.b64encode(text).decode()}}}


def ended(code: int) -> dict[str, object]:
    return {"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}}


async def test_a_command_is_run_to_its_end() -> None:
    stream = frames({"event": {"start": {"pid": 7}}}, data("stdout", b"a\x00"), data("stderr", b"b"), ended(3), end={})
    async with talking(answering(200, stream)) as (agent, guest):
        done = await agent.run(["sh", "-c", "x"], user="root", access_token="token", timeout_s=LONG_S)

    assert (done.exit_code, done.stdout, done.stderr) == (3, b"a\x00", b"b")
    (request,) = guest.requests
    assert request.path == "/process.Process/Start"
    assert request.headers["x-access-token"] == "token"
    assert request.headers["authorization"] == "Basic " + base64.b64encode(b"root:").decode()
    assert json.loads(request.body[5:]) == {"process": {"cmd": "sh", "args": ["-c", "x"]}, "stdin": False}


async def test_frames_are_read_wherever_the_network_cuts_them() -> None:
    stream = frames(data("stdout", b"hello"), ended(0), end={})

    async def trickle(request: Request, writer: asyncio.StreamWriter) -> None:
        del request
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(stream)}\r\n\r\n".encode())
        for index in range(len(stream)):
            writer.write(stream[index : index + 1])
            await writer.drain()

    async with talking(trickle) as (agent, _):
        done = await agent.run(["true"], user="root", access_token=None, timeout_s=LONG_S)

    assert done.stdout == b"hello"


async def test_a_zero_exit_code_may_be_left_out() -> None:
    async with talking(answering(200, frames({"event": {"end": {"exited": True}}}, end={}))) as (agent, _):
        assert (await agent.run(["true"], user="root", access_token=None, timeout_s=LONG_S)).exit_code == 0


BAD_STREAMS: dict[str, tuple[bytes, type[AgentEnvError]]] = {
    "no end": (frames(data("stdout", b"x"), end={}), Unavailable),
    "nothing": (b"", Unavailable),
    "error": (frames(end={"error": {"code": "internal", "message": "out of order"}}), Bug),
    "no such program": (frames(end={"error": {"code": "invalid_argument", "message": "no such file"}}), Invalid),
    "odd error": (frames(end={"error": "text"}), Bug),
    "not json": (frames(b"{"), Unavailable),
    "deep": (frames(b"[" * 200_000), Unavailable),
    "a list": (frames([1, 2], end={}), Unavailable),
    "odd event": (frames({"event": 5}, end={}), Unavailable),
    "odd data": (frames({"event": {"data": [1]}}, end={}), Unavailable),
    "odd stream": (frames({"event": {"data": {"pty": "eA=="}}}, end={}), Unavailable),
    "odd text": (frames({"event": {"data": {"stdout": 5}}}, end={}), Unavailable),
    "not base64": (frames({"event": {"data": {"stdout": "***"}}}, end={}), Unavailable),
    "too big a frame": (struct.pack(">BI", 0, 1 << 30), Unavailable),
    "cut frame": (struct.pack(">BI", 0, 100) + b"{", Unavailable),
    "too much": (frames(*[data("stdout", bytes(MAX_OUTPUT_BYTES // 40 + 1))] * 40, end={}), Bug),
}


@pytest.mark.parametrize(("stream", "kind"), BAD_STREAMS.values(), ids=BAD_STREAMS)
async def test_a_stream_that_makes_no_sense_is_an_error_of_a_kind(stream: bytes, kind: type[AgentEnvError]) -> None:
    async with talking(answering(200, stream)) as (agent, _):
        with pytest.raises(kind):
            await agent.run(["true"], user="root", access_token=None, timeout_s=LONG_S)


async def test_a_command_that_is_refused_says_why() -> None:
    async with talking(answering(401, b"no such user")) as (agent, _):
        with pytest.raises(Bug, match="no such user"):
            await agent.run(["true"], user="nobody", access_token=None, timeout_s=LONG_S)


async def test_a_command_that_does_not_end_meets_its_deadline() -> None:
    async with talking(silence) as (agent, _):
        with pytest.raises(DeadlineExceeded):
            await agent.run(["sleep"], user="root", access_token=None, timeout_s=SHORT_S)


async def test_a_command_with_nobody_to_run_it_is_unavailable() -> None:
    agent = HttpAgent("127.0.0.1", free_port(), secret="control")

    with pytest.raises(Unavailable):
        await agent.run(["true"], user="root", access_token=None, timeout_s=LONG_S)
    await agent.close()
