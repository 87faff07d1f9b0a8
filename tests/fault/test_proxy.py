"""Guests and clients at their worst: each fault ends in a typed answer or a broken connection, and leaves nothing."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from agentenv.aio.cut import cut
from agentenv.model.lifecycle import State
from agentenv.proxy import ProxySettings
from tests.unit.proxy.world import Guest, Handler, World, answering, on_uvloop, read_request, until

pytestmark = pytest.mark.fault

QUICK = ProxySettings(progress_timeout_s=0.05)


async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads, and says nothing."""
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    cut(writer.transport)


def sends(raw: bytes) -> Handler:
    return answering(raw)


@pytest.mark.parametrize(
    ("handler", "status", "error_code"),
    [
        (mute, 504, "guest_not_answering"),
        (hang_up, 502, "guest_not_answering"),
        (reset, 502, "guest_not_answering"),
        (sends(b"\x00\xff\x00\xff garbage"), 502, "guest_garbage"),
        (sends(b"SSH-2.0-OpenSSH_9.2p1\r\n"), 502, "guest_garbage"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Le"), 502, "guest_not_answering"),
        (sends(b"HTTP/1.1 100 Continue\r\n\r\n"), 502, "guest_not_answering"),
        (sends(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000), 502, "guest_garbage"),
        (sends(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 1000), 502, "guest_garbage"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc"), 502, "guest_garbage"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
@on_uvloop
async def test_a_guest_that_gives_no_answer_is_called_what_it_is(
    handler: Handler, status: int, error_code: str, method: str
) -> None:
    async with World(QUICK) as world:
        guest = await world.guest(handler)
        answer = await world.ask(guest, method=method, body=b"body" if method == "POST" else None)
        assert (answer.status, answer.json["code"], answer.json["error_code"]) == (status, status, error_code)
        assert guest.connections == 1  # nothing is tried twice on a fresh connection
        await until(lambda: guest.open == 0, "the connection to the guest is still open")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
    ],
)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@on_uvloop
async def test_an_answer_that_breaks_off_never_looks_whole(raw: bytes, version: str) -> None:
    async with World() as world:
        guest = await world.guest(answering(raw))
        async with world.client() as client:
            client.send(b"GET / HTTP/%b\r\nHost: x\r\n%b\r\n" % (version.encode(), guest.headers))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.answer()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@on_uvloop
async def test_a_reset_in_an_answer_without_a_length_is_not_its_end(version: str) -> None:
    may_reset = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await may_reset.wait()
        cut(writer.transport)

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/%b\r\nHost: x\r\n%b\r\n" % (version.encode(), guest.headers))
            await client.head()
            assert b"abc" in await client.reader.read(8)
            may_reset.set()
            with pytest.raises(ConnectionError):
                await client.ended()


@on_uvloop
async def test_a_guest_that_stops_reading_a_body_is_silent() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await over.wait()

    over = asyncio.Event()
    async with World(QUICK) as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 50000000\r\n\r\n" % guest.headers)
            client.send(b"x" * 50_000_000)
            answer = await client.answer()
            assert (answer.status, answer.json["error_code"]) == (504, "guest_not_answering")
        over.set()


@on_uvloop
async def test_a_client_that_stops_sending_a_body_is_told_that_it_did() -> None:
    async with World(QUICK) as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 5\r\n\r\nab" % guest.headers)
            answer = await client.answer()
            assert (answer.status, answer.json["error_code"]) == (408, "deadline")
        await until(lambda: guest.open == 0, "the guest still waits")


@on_uvloop
async def test_a_client_that_keeps_sending_is_waited_for() -> None:
    async with World(QUICK) as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 12\r\n\r\n" % guest.headers)
            for _ in range(12):
                client.send(b"x")
                await asyncio.sleep(0.01)  # in all more than the time-out
            assert (await client.answer()).body == b"x" * 12


@on_uvloop
async def test_input_for_a_process_may_pause_for_as_long_as_it_likes() -> None:
    async with World(QUICK) as world:
        agent = await world.guest(port=49983)
        async with world.client() as client:
            client.send(
                b"POST /process.Process/StreamInput HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n"
                % agent.headers
            )
            for _ in range(3):
                client.send(b"1\r\nx\r\n")
                await asyncio.sleep(0.1)  # twice the time-out
            client.send(b"0\r\n\r\n")
            assert (await client.answer()).body == b"xxx"


Stage = Callable[[Guest], bytes]

STAGES: dict[str, Stage] = {
    "in the head": lambda guest: b"GET / HTTP/1.1\r\nHost: x\r\n" + guest.headers,
    "before the answer": lambda guest: b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers,
    "in the body": lambda guest: b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 9\r\n\r\nabc" % guest.headers,
    "in a chunk": lambda guest: (
        b"POST / HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n9\r\nab" % guest.headers
    ),
    "while expecting": lambda guest: (
        b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 9\r\nExpect: 100-continue\r\n\r\n" % guest.headers
    ),
    "in the answer": lambda guest: b"GET /stream HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers,
    "in a tunnel": lambda guest: (
        b"GET /tunnel HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: x\r\n\r\n" % guest.headers
    ),
    "in a pipeline": lambda guest: b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers * 3,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["close", "reset"])
@on_uvloop
async def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(stage: str, how: str) -> None:
    reached = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b" /stream " in head:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        if b" /tunnel " in head:
            writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        reached.set()
        await reader.read()

    async with World(ProxySettings(continue_timeout_s=0.05)) as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(STAGES[stage](guest))
            if stage == "in the head":
                await until(lambda: bool(world.connections), "the client is not connected")
            else:
                await reached.wait()
            if stage in ("in the answer", "in a tunnel"):
                await client.head()
            if how == "reset":
                cut(client.writer.transport)
        await until(lambda: guest.open == 0, "the guest still has its connection")
        await until(lambda: not world.connections and not world.tasks, "the server still has the client")
        assert world.proxy.statistics().busy == 0


@on_uvloop
async def test_a_stale_connection_is_tried_again_only_where_that_is_safe() -> None:
    served = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and takes one more only to close."""
        nonlocal served
        await read_request(reader)
        served += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")

    async with World() as world:
        guest = await world.guest(once)
        for method in ("GET", "HEAD", "DELETE", "PUT", "OPTIONS"):
            before = served
            for _ in range(2):
                assert (await world.ask(guest, method=method)).status == 200
            assert served == before + 2
        connections = guest.connections
        assert (await world.ask(guest, method="GET")).status == 200  # leaves a connection that is about to close
        answer = await world.ask(guest, method="POST", body=b"pay")
        assert (answer.status, answer.json["error_code"]) == (502, "guest_not_answering")
        assert guest.connections == connections + 1
        assert (await world.ask(guest)).status == 200
        answer = await world.ask(guest, method="POST")
        assert answer.status == 502


@on_uvloop
async def test_an_answer_that_began_is_never_asked_for_again() -> None:
    hits = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hits
        await read_request(reader)
        hits += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await read_request(reader)
        hits += 1
        writer.write(b"HTTP/1.1 20")

    async with World() as world:
        guest = await world.guest(handle)
        assert (await world.ask(guest)).status == 200
        assert (await world.ask(guest)).status == 502
        assert hits == 2


@on_uvloop
async def test_a_sandbox_paused_in_the_middle_of_an_answer_breaks_it() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()

    for told in (True, False):
        async with World(ProxySettings(sweep_interval_s=0.01)) as world:
            guest = await world.guest(handle)
            async with world.client() as client:
                client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
                await client.head()
                chunks = client.chunks()
                assert await anext(chunks) == b"x"
                await world.node.pause(guest.sandbox.id)
                if told:
                    world.proxy.forget(guest.sandbox.id)
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await anext(chunks)


@pytest.mark.parametrize("kind", ["answer", "tunnel"])
@on_uvloop
async def test_a_client_that_does_not_read_does_not_keep_a_cut_connection_open(kind: str) -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        if kind == "tunnel":
            writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * (1 << 16))
            await writer.drain()
            sent += 1

    async with World(ProxySettings(broken_timeout_s=0.05)) as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: x\r\n\r\n" % guest.headers)
            await client.head()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            held = -1
            while held != sent:  # until every buffer on the way is full
                held = sent
                await asyncio.sleep(0.05)
            world.proxy.forget(guest.sandbox.id)
            await until(lambda: not world.connections and not world.tasks, "the client is still connected")


@pytest.mark.parametrize(("end", "error_code"), [("delete", "sandbox_not_found"), ("lose", "sandbox_not_running")])
@on_uvloop
async def test_a_sandbox_that_is_gone_ends_what_waits_for_it_and_is_called_gone(end: str, error_code: str) -> None:
    async with World(ProxySettings(sweep_interval_s=0.01)) as world:
        guest = await world.guest(mute)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
            await until(lambda: guest.open == 1, "the request has not arrived")
            if end == "delete":
                await world.node.delete(guest.sandbox.id)
            else:
                world.node.lose(guest.sandbox.id, "the VMM died")
            answer = await client.answer()
            assert (answer.status, answer.json["message"]) == (502, "The sandbox was not found")
            assert answer.json["error_code"] == error_code


@on_uvloop
async def test_a_sandbox_paused_between_waking_and_connecting_is_woken_again() -> None:
    async with World() as world:
        guest = await world.guest(auto_resume=True, state=State.PAUSED)
        wake, wakes = world.node.wake, 0

        async def wake_and_lose(sandbox_id: str) -> object:
            nonlocal wakes
            wakes += 1
            sandbox = await wake(sandbox_id)
            if wakes == 1:
                await world.node.pause(sandbox_id)
            return sandbox

        world.node.wake = wake_and_lose  # type: ignore[method-assign, assignment]
        assert (await world.ask(guest, method="POST", body=b"once")).body == b"once"
        assert wakes == 2
        assert len(guest.heads) == 1


@on_uvloop
async def test_a_sandbox_with_as_many_connections_as_it_may_have_says_so() -> None:
    async with World(ProxySettings(max_connections_per_sandbox=1)) as world:
        guest = await world.guest(mute)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % guest.headers)
            await until(lambda: guest.open == 1, "the request has not arrived")
            answer = await world.ask(guest)
            assert (answer.status, answer.json["error_code"]) == (503, "exhausted")


@pytest.mark.slow
@on_uvloop
async def test_nothing_is_left_after_a_storm() -> None:
    """Clients that leave at random moments, against guests of every kind."""

    async def some(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        match int(head.split(b" ")[1][1:]) % 5:
            case 0:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            case 1:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")
            case 2:
                writer.write(b"garbage")
            case 3:
                await reader.read()
            case _:
                cut(writer.transport)

    async with World(QUICK) as world:
        guests = [await world.guest(some) for _ in range(5)]

        async def one(number: int) -> None:
            guest = guests[number % 5]
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                async with world.client() as client:
                    client.send(b"GET /%d HTTP/1.1\r\nHost: x\r\n%b\r\n" % (number // 5, guest.headers))
                    if number % 3:
                        await client.answer()

        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                for number in range(200):
                    group.create_task(one(number))
        await until(lambda: sum(guest.open for guest in guests) <= 5 * 16, "connections to guests are left")
