"""An agent that a guest's root has replaced: whatever it sends, the node gets an error of a kind and stays small."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, repeat

import pytest

from agentenv.guest import exchange
from agentenv.guest.agent import HttpAgent
from agentenv.guest.contract import Identity
from agentenv.model.errors import AgentEnvError, Bug, DeadlineExceeded, Unavailable

LONG_S = 60.0
SHORT_S = 0.3
# What may lie in the kernel's buffers of both ends, beside what the node has taken.
KERNEL_BYTES = 16 << 20
IDENTITY = Identity(
    sandbox_id="11111111-1111-4111-8111-111111111111",
    template_id="22222222-2222-4222-8222-222222222222",
    access_token=None,
    control_secret="new",
    timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    hostname="sandbox-1",
    machine_id="0" * 32,
    entropy=b"e" * 64,
)

Call = Callable[[HttpAgent, float], Coroutine[object, object, object]]
CALLS: dict[str, Call] = {
    "init": lambda agent, timeout_s: agent.init(IDENTITY, secret=None, timeout_s=timeout_s),
    "freeze": lambda agent, timeout_s: agent.freeze(timeout_s=timeout_s),
    "metrics": lambda agent, timeout_s: agent.metrics(access_token=None, timeout_s=timeout_s),
    "run": lambda agent, timeout_s: agent.run(["true"], user="root", access_token=None, timeout_s=timeout_s),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@dataclass(slots=True)
class Hostile:
    """Answers each request on a TCP connection with all that *say* gives, whatever HTTP has to say about it."""

    say: Callable[[], Iterator[bytes]]
    connections: int = 0
    sent_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, length = head.partition(b"content-length:")
            await reader.readexactly(int(length.split(b"\r\n")[0] or b"0"))
            for part in self.say():
                writer.write(part)
                await writer.drain()
                self.sent_bytes += len(part)
                await asyncio.sleep(0)
            await reader.read()
        self.ended.set()
        writer.close()


@asynccontextmanager
async def hostile(say: Callable[[], Iterator[bytes]]) -> AsyncIterator[tuple[HttpAgent, Hostile]]:
    guest = Hostile(say)
    server = await asyncio.start_server(guest.serve, "127.0.0.1", 0)
    agent = HttpAgent("127.0.0.1", server.sockets[0].getsockname()[1], secret="control")
    try:
        yield agent, guest
    finally:
        await agent.close()
        server.close()
        await server.wait_closed()
        if guest.connections:
            await guest.ended.wait()


def for_ever(part: bytes, *, after: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def say() -> Iterator[bytes]:
        return chain([after], repeat(part))

    return say


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "interim answers": for_ever(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "early hints": for_ever(b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 1000 + b"\r\n\r\n"),
    "headers": for_ever(b"X-A: b\r\n" * 1000, after=b"HTTP/1.1 200 OK\r\n"),
    "one header": for_ever(b"a" * 10_000, after=b"HTTP/1.1 200 OK\r\nX-A: "),
    "one header's name": for_ever(b"a" * 10_000, after=b"HTTP/1.1 200 OK\r\n"),
    "a reason": for_ever(b"a" * 10_000, after=b"HTTP/1.1 200 "),
    "a chunk's extension": for_ever(b"a" * 10_000, after=CHUNKED + b"1;"),
    "trailers": for_ever(b"X-A: b\r\n" * 1000, after=CHUNKED + b"0\r\n"),
    "empty lines": for_ever(b"\r\n" * 5000),
}


@each_call
@pytest.mark.parametrize("say", ENDLESS.values(), ids=ENDLESS)
async def test_what_has_no_end_is_cut_off(call: Call, say: Callable[[], Iterator[bytes]]) -> None:
    async with hostile(say) as (agent, guest):
        with pytest.raises(Unavailable):
            await call(agent, LONG_S)

    assert guest.connections == 1  # it is not asked again: it did answer
    assert guest.sent_bytes < KERNEL_BYTES


BODIES = {
    "chunks": for_ever(b"1\r\nx\r\n" * 1000, after=CHUNKED),
    "until the end": for_ever(b"x" * 10_000, after=b"HTTP/1.1 200 OK\r\n\r\n"),
    "of a huge length": for_ever(
        b"x" * 10_000, after=b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000000000000\r\n\r\n"
    ),
    "of an error": for_ever(b"x" * 10_000, after=b"HTTP/1.1 500 Oh\r\n\r\n"),
}


@each_call
@pytest.mark.parametrize("say", BODIES.values(), ids=BODIES)
async def test_a_body_without_end_is_cut_off(call: Call, say: Callable[[], Iterator[bytes]]) -> None:
    async with hostile(say) as (agent, guest):
        with pytest.raises(Unavailable):
            await call(agent, LONG_S)

    assert guest.connections == 1
    assert guest.sent_bytes < KERNEL_BYTES


def frame(message: object) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(payload)) + payload


async def test_a_stream_that_says_nothing_for_ever_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Streaming.parts, "__kwdefaults__", {"limit_bytes": 1 << 20})
    say = for_ever(frame({"event": {"keepalive": {}}}) * 100, after=b"HTTP/1.1 200 OK\r\n\r\n")
    async with hostile(say) as (agent, guest):
        with pytest.raises(Unavailable, match="more than"):
            await CALLS["run"](agent, LONG_S)

    assert guest.sent_bytes < KERNEL_BYTES


async def test_output_without_end_is_cut_off() -> None:
    say = for_ever(frame({"event": {"data": {"stdout": "eHh4" * 10_000}}}), after=b"HTTP/1.1 200 OK\r\n\r\n")
    async with hostile(say) as (agent, _):
        with pytest.raises(Bug, match="more than"):
            await CALLS["run"](agent, LONG_S)


TRICKLES = {"head": b"", "body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", "chunks": CHUNKED}


@each_call
@pytest.mark.parametrize("head", TRICKLES.values(), ids=TRICKLES)
async def test_an_answer_that_trickles_meets_the_deadline(call: Call, head: bytes) -> None:
    """Every byte is something new; only the whole of it is ever late."""
    trickling = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            for part in chain(b"HTTP/1.1 200 OK\r\nX: " if not head else b"", repeat(ord("1"))):
                writer.write(bytes([part]))
                await writer.drain()
                trickling.set()
                await asyncio.sleep(0.01)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        agent = HttpAgent("127.0.0.1", server.sockets[0].getsockname()[1], secret="control")
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await call(agent, SHORT_S)
        await agent.close()

    assert trickling.is_set()


async def test_what_is_said_out_of_turn_ends_the_connection_and_is_no_answer() -> None:
    """A second answer in advance would be taken for that to the next request."""
    whole = b"HTTP/1.1 204 No\r\n\r\n"
    async with hostile(lambda: iter([whole + b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"])) as (agent, guest):
        await agent.thaw(timeout_s=LONG_S)
        await guest.ended.wait()
        await agent.thaw(timeout_s=LONG_S)

    assert guest.connections == 2


async def test_a_guest_that_talks_while_nobody_asks_is_hung_up_on() -> None:
    async with hostile(for_ever(b"x" * 10_000, after=b"HTTP/1.1 204 No\r\n\r\n")) as (agent, guest):
        await agent.thaw(timeout_s=LONG_S)
        await guest.ended.wait()

    assert guest.sent_bytes < KERNEL_BYTES


@pytest.mark.parametrize("number", [-1, 1 << 63, 10**4000, 1e300])
async def test_figures_that_cannot_be_are_refused(number: float) -> None:
    figures = dict.fromkeys(
        ("ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "disk_total", "disk_used"), 1
    )
    body = json.dumps(figures | {"mem_used": number}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with hostile(lambda: iter([head + body])) as (agent, _):
        with pytest.raises(AgentEnvError):
            await agent.metrics(access_token=None, timeout_s=LONG_S)
