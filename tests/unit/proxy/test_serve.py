"""The whole server: uvicorn's frame around our protocol, with real signals and a real process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.proxy import Proxy, ProxySettings, ServerLimits, http_server
from agentenv.proxy.asgi import Receive, Scope, Send
from tests.unit.proxy.world import Client, World, control_app, on_uvloop, until

PROGRAM = """
import sys
from agentenv.proxy import Proxy, serve
from agentenv.testing.node import FakeNode
from tests.unit.proxy.test_serve import slow_app
serve(Proxy(FakeNode(), slow_app), port=int(sys.argv[1]))
"""


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams until it is told to stop: ``/`` for ever, ``/two`` two parts."""
    if scope["type"] == "lifespan":
        for _ in range(2):
            message = await receive()
            await send({"type": message["type"] + ".complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await receive()
    await receive()


@contextlib.asynccontextmanager
async def running(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    root = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(port), cwd=root, env=os.environ | {"PYTHONPATH": f"{root}:{root}/src"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def connected(port: int, process: asyncio.subprocess.Process) -> Client:
    while True:
        assert process.returncode is None
        with contextlib.suppress(ConnectionError):
            return Client(*await asyncio.open_connection("127.0.0.1", port))
        await asyncio.sleep(0.02)


@pytest.mark.slow
@on_uvloop
async def test_a_server_stops_when_it_is_told_to_and_ends_idle_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with asyncio.timeout(30), running(port) as process:
        idle = await connected(port, process)
        busy = await connected(port, process)
        busy.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await busy.head()).header("date")
        process.send_signal(signal.SIGTERM)
        assert await idle.ended() == b""
        idle.writer.close()
        busy.writer.close()
        assert await process.wait() == -signal.SIGTERM


@pytest.mark.slow
@on_uvloop
async def test_a_server_does_not_wait_for_streams_for_ever() -> None:
    async with World() as world:
        guest = await world.guest()
        server = http_server(Proxy(world.node, slow_app), limits=ServerLimits(stop_timeout_s=1.0))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.head()
            with socket.socket() as other:
                other.setblocking(False)
                await asyncio.get_running_loop().sock_connect(other, ("127.0.0.1", port))
                server.should_exit = True
                await serving
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                async for _ in client.chunks():
                    pass  # cut, and never a clean end
            client.writer.close()
        assert guest.connections == 0


@on_uvloop
async def test_one_connection_too_many_is_told_so() -> None:
    async with World(limits=ServerLimits(max_connections=2)) as world:
        async with world.client() as one, world.client() as two, world.client() as three:
            assert (await one.ask("/a")).status == (await two.ask("/b")).status == 200
            answer = await three.answer()
            assert (answer.status, answer.json["code"]) == (503, 503)
            assert await three.ended() == b""
        await until(lambda: not world.connections, "closed connections are still counted")
        async with world.client() as again:
            assert (await again.ask("/c")).status == 200


@on_uvloop
async def test_an_idle_connection_is_closed_after_a_while() -> None:
    async with World(limits=ServerLimits(keep_alive_s=0.02)) as world, world.client() as client:
        assert (await client.ask("/a")).status == 200
        assert await client.ended() == b""


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"])
@on_uvloop
async def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with World(limits=ServerLimits(head_timeout_s=0.02)) as world, world.client() as client:
        client.send(sent)
        answer = await client.ended()
        assert (answer == b"") if not sent else answer.startswith(b"HTTP/1.1 408 ")


@on_uvloop
async def test_trickling_does_not_extend_the_time_for_a_head() -> None:
    async with World(limits=ServerLimits(head_timeout_s=0.05)) as world, world.client() as client:
        client.send(b"GET / HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                client.send(b"a: b\r\n")
                await asyncio.sleep(0.005)

        trickling = asyncio.create_task(trickle())
        with contextlib.suppress(ConnectionError):
            assert (await client.ended()).startswith(b"HTTP/1.1 408 ")
        trickling.cancel()


@on_uvloop
async def test_the_control_api_does_not_wait_for_a_body_for_ever() -> None:
    async with World(ProxySettings(control_body_timeout_s=0.02)) as world, world.client() as client:
        client.send(b"POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        assert (await client.answer()).status >= 400


@on_uvloop
async def test_garbage_after_good_requests_is_refused_after_their_answers() -> None:
    async with World() as world, world.client() as client:
        client.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b HTTP/1.1\r\nHost: x\r\n\r\nBREW / HTTP/1.1\r\n\r\n")
        assert (await client.answer()).json["control"] == "/a"
        assert (await client.answer()).json["control"] == "/b"
        answer = await client.answer()
        assert (answer.status, answer.json["code"], answer.header("connection")) == (400, 400, ["close"])
        assert await client.ended() == b""


@on_uvloop
async def test_garbage_in_a_body_is_refused_and_the_guest_never_gets_a_whole_request() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n" % guest.headers
            )
            assert (await client.answer()).status == 400
        await until(lambda: guest.open == 0, "the guest's connection is still open")
        assert guest.heads == []


@on_uvloop
async def test_too_many_requests_at_once_on_one_connection_are_too_many() -> None:
    async with World(limits=ServerLimits(max_pipelined=4)) as world, world.client() as client:
        client.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        statuses = [(await client.answer()).status for _ in range(5)]
        assert statuses == [200, 200, 200, 200, 429]
        assert await client.ended() == b""


async def long_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(100):
        await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@on_uvloop
async def test_a_client_that_stops_reading_an_answer_of_the_control_api_is_cut_off() -> None:
    settings = ProxySettings(control_body_timeout_s=0.02)
    async with World(settings, control=long_stream) as world, world.client() as client:
        client.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: not world.connections, "it keeps its connection")


@on_uvloop
async def test_an_application_that_fails_is_a_typed_answer_or_a_cut_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        if scope["path"] != "/silent":
            raise RuntimeError("secret")

    async with World(control=app) as world:
        for path in ("/early", "/silent"):
            async with world.client() as client:
                answer = await client.ask(path)
                assert (answer.status, answer.json["code"], answer.json["error_code"]) == (500, 500, "bug")
                assert b"secret" not in answer.body
        async with world.client() as client:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.ask("/late")


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\rb", b"a\0b"])
@on_uvloop
async def test_an_application_cannot_be_made_to_split_its_answer(value: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", value)]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with World(control=app) as world, world.client() as client:
        assert (await client.ask("/")).status == 500


@pytest.mark.parametrize("body", [b"ab", b"abcd"])
@on_uvloop
async def test_an_answer_that_is_not_as_long_as_it_says_is_cut(body: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": body})

    async with World(control=app) as world, world.client() as client:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.ask("/")


@on_uvloop
async def test_the_control_api_gets_whole_bodies_however_they_are_sent() -> None:
    async with World() as world, world.client() as client:
        assert (await client.ask("/a", method="POST", body=b"x" * 1_000_000)).json["body"] == "x" * 1_000_000
        client.send(b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            client.send(b"2\r\nab\r\n")
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).json == {"control": "/b", "body": "ababab"}
        client.send(b"POST /c HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.head()).status == 100
        client.send(b"ok")
        assert (await client.answer()).json["body"] == "ok"


@on_uvloop
async def test_the_scope_is_what_an_asgi_application_expects() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await control_app(scope, receive, send)

    async with World(control=app) as world, world.client() as client:
        answer = await client.ask("/a%2Fb%20%E2%82%AC//c?x=%20&y", headers=b"X-A: 1\r\nx-a: 2\r\n")
        assert json.loads(answer.body)["control"] == "/a/b €//c"
    scope = seen[0]
    assert scope["raw_path"] == b"/a%2Fb%20%E2%82%AC//c"
    assert scope["query_string"] == b"x=%20&y"
    assert scope["headers"][1:] == [(b"x-a", b"1"), (b"x-a", b"2")]
    assert scope["http_version"] == "1.1"
    assert scope["client"][0] == scope["server"][0] == "127.0.0.1"
    assert scope["server"][1] == world.port


@on_uvloop
async def test_another_server_can_serve_all_but_upgrades() -> None:
    async with World() as world:
        sent: list[dict[str, object]] = []

        async def receive() -> dict[str, object]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        await world.proxy({"type": "websocket", "headers": []}, receive, send)  # type: ignore[arg-type]
        assert sent[0]["type"] == "websocket.close"
