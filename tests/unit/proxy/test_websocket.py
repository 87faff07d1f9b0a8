"""WebSockets, and whatever else a guest switches to: carried, not understood."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve

from agentenv.aio.cut import cut
from agentenv.model.lifecycle import State
from agentenv.proxy import ProxySettings
from tests.unit.proxy.world import PAUSED, PRIVATE, Guest, World, answering, on_uvloop, read_request, until


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


@contextlib.asynccontextmanager
async def app(world: World, guest: Guest, handler: Any = echo, **options: Any) -> AsyncIterator[Server]:
    """A WebSocket server in the sandbox of *guest*, on a port of its own."""
    async with serve(handler, guest.address, 0, **options) as server:
        guest.port = server.sockets[0].getsockname()[1]
        yield server


def url(world: World, path: str = "/") -> str:
    return f"ws://127.0.0.1:{world.port}{path}"


def routing(guest: Guest) -> dict[str, str]:
    return {"E2b-Sandbox-Id": guest.sandbox.id, "E2b-Sandbox-Port": str(guest.port)}


def to(world: World, guest: Guest, path: str = "/", **options: Any) -> connect:
    headers = options.pop("additional_headers", {})
    return connect(url(world, path), additional_headers=routing(guest) | headers, proxy=None, **options)


@on_uvloop
async def test_messages_go_both_ways_in_every_form() -> None:
    async with World() as world:
        guest = await world.guest()
        async with app(world, guest):
            async with to(world, guest, "/a?b=c") as socket:
                await socket.send("text €")
                assert await socket.recv() == "text €"
                await socket.send(b"\x00\xff")
                assert await socket.recv() == b"\x00\xff"
            agentenv = {"X-Agentenv-Sandbox-Id": guest.sandbox.id, "X-Agentenv-Target-Port": str(guest.port)}
            async with connect(url(world, "/proxy/x"), additional_headers=agentenv, proxy=None) as socket:
                assert socket.request is not None
                await socket.send("hello")
                assert await socket.recv() == "hello"
            host = f"ws://{guest.port}-{guest.sandbox.id}.localhost:{world.port}/"
            async with connect(host, host="127.0.0.1", port=world.port, proxy=None) as socket:
                await socket.send("hello")
                assert await socket.recv() == "hello"
        assert {status for _, _, status in world.seen} == {101}


@on_uvloop
async def test_the_guest_sees_the_request_without_what_routed_it() -> None:
    async def tell(socket: ServerConnection) -> None:
        assert socket.request is not None
        await socket.send(
            socket.request.path + "\n" + "\n".join(f"{k}: {v}" for k, v in socket.request.headers.raw_items())
        )

    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, tell), to(world, guest, "/a%20b?q=%zz", user_agent_header="me") as socket:
            seen = str(await socket.recv()).lower()
        assert seen.startswith("/a%20b?q=%zz\n")
        assert "\nuser-agent: me" in seen
        assert "\nsec-websocket-extensions: permessage-deflate" in seen
        assert "sandbox" not in seen


@on_uvloop
async def test_subprotocols_are_agreed_between_the_ends() -> None:
    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, subprotocols=["v2", "v1"]), to(world, guest, subprotocols=["v1", "v9"]) as socket:
            assert socket.subprotocol == "v1"


@on_uvloop
async def test_a_refusal_comes_through_with_its_status_and_body() -> None:
    def refuse(socket: ServerConnection, request: websockets.Request) -> websockets.Response:
        response = socket.respond(451, "not for you")
        response.headers["X-Why"] = "law"
        return response

    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, process_request=refuse):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await to(world, guest)
        response = refused.value.response
        assert (response.status_code, response.body, response.headers["X-Why"]) == (451, b"not for you", "law")


@on_uvloop
async def test_the_proxys_own_refusals_are_plain_answers() -> None:
    async with World() as world:
        guest = await world.guest()
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(url(world), additional_headers={"E2b-Sandbox-Id": "x"}, proxy=None)
        assert refused.value.response.status_code == 502
        guest.port = 1
        with pytest.raises(websockets.InvalidStatus) as refused:
            await to(world, guest)
        assert refused.value.response.status_code == 502
        assert b"port is not open" in (refused.value.response.body or b"")


@on_uvloop
async def test_a_private_sandbox_takes_the_token_in_the_query_of_an_upgrade_and_hides_it() -> None:
    async def tell(socket: ServerConnection) -> None:
        assert socket.request is not None
        await socket.send(socket.request.path)

    async with World() as world:
        guest = await world.guest(ingress=PRIVATE)
        async with app(world, guest, tell):
            for path in ("/", "/?traffic_access_token=wrong"):
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await to(world, guest, path)
                assert refused.value.response.status_code == 403
            token = f"traffic-{guest.sandbox.id}"
            async with to(world, guest, f"/x?a=b&traffic_access_token={token}") as socket:
                assert await socket.recv() == "/x?a=b"
            async with to(world, guest, "/y", additional_headers={"E2B-Traffic-Access-Token": token}) as socket:
                assert await socket.recv() == "/y"


@on_uvloop
async def test_an_upgrade_wakes_a_sandbox() -> None:
    async with World() as world:
        guest = await world.guest(auto_resume=True, **PAUSED)
        async with app(world, guest), to(world, guest) as socket:
            await socket.send("awake?")
            assert await socket.recv() == "awake?"
        assert world.node.get(guest.sandbox.id).state is State.RUNNING


@on_uvloop
async def test_close_codes_reach_the_other_end() -> None:
    closed: list[tuple[int | None, str | None]] = []

    async def handle(socket: ServerConnection) -> None:
        assert socket.request is not None
        if socket.request.path == "/server":
            await socket.close(4001, "enough")
        else:
            await socket.wait_closed()
            closed.append((socket.close_code, socket.close_reason))

    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, handle):
            async with to(world, guest, "/server") as socket:
                with pytest.raises(websockets.ConnectionClosed):
                    await socket.recv()
                assert (socket.close_code, socket.close_reason) == (4001, "enough")
            async with to(world, guest, "/client") as socket:
                await socket.close(4002, "bye")
            await until(lambda: bool(closed), "the close did not arrive")
        assert closed == [(4002, "bye")]


@on_uvloop
async def test_pings_are_answered_by_the_other_end_and_not_by_the_proxy() -> None:
    silent = asyncio.Event()

    async def handle(socket: ServerConnection) -> None:
        await asyncio.wait_for(await socket.ping(b"from the guest"), 5)
        await socket.send("ponged")
        await silent.wait()

    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, handle, ping_interval=None), to(world, guest, ping_interval=None) as socket:
            assert await socket.recv() == "ponged"
            await asyncio.wait_for(await socket.ping(b"from the client"), 5)
            silent.set()


@pytest.mark.parametrize("compression", ["deflate", None])
@on_uvloop
async def test_a_message_of_any_size_and_in_fragments(compression: str | None) -> None:
    options: dict[str, Any] = {"max_size": None, "compression": compression}

    async def parts() -> AsyncIterator[bytes]:
        for number in range(200):
            yield bytes([number]) * 1000

    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, **options), to(world, guest, **options) as socket:
            big = bytes(range(256)) * (20 << 12)  # 20 MiB
            await socket.send(big)
            assert await socket.recv() == big
            await socket.send(parts())
            assert await socket.recv() == b"".join(bytes([number]) * 1000 for number in range(200))


@on_uvloop
async def test_an_end_that_does_not_read_holds_the_other_back() -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * (1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n" % guest.headers)
            assert (await client.head()).header("upgrade") == ["bytes"]
            held = -1
            while held != sent:
                held = sent
                await asyncio.sleep(0.05)
            assert sent < 24 << 20
            assert len(await client.reader.readexactly(1000 << 16)) == 1000 << 16


@on_uvloop
async def test_what_is_sent_before_the_switch_is_known_of_is_not_lost() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\nfrom guest")
        writer.write(await reader.readexactly(len(b"from client")))

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(
                b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: bytes\r\n\r\nfrom client"
                % guest.headers
            )
            await client.head()
            assert await client.ended() == b"from guestfrom client"


@on_uvloop
async def test_one_half_may_end_before_the_other() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n")
        request = await reader.read()  # until the client has ended its half
        writer.write(request.upper())

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n" % guest.headers)
            await client.head()
            client.send(b"question")
            client.writer.write_eof()
            assert await client.ended() == b"QUESTION"


@on_uvloop
async def test_a_half_that_nobody_ends_is_cut_in_the_end() -> None:
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n")
        assert await reader.read() == b""
        await over.wait()  # it knows that the client has ended, and does not care

    async with World(ProxySettings(half_closed_timeout_s=0.05)) as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n" % guest.headers)
            await client.head()
            client.writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert await client.ended() == b""
        await until(lambda: world.proxy.statistics().busy == 0, "the tunnel is still there")
        over.set()


@on_uvloop
async def test_a_paused_sandbox_breaks_its_sockets() -> None:
    async with World() as world:
        guest = await world.guest()
        async with app(world, guest), to(world, guest) as socket:
            await socket.send("x")
            await socket.recv()
            await world.node.pause(guest.sandbox.id)
            world.proxy.forget(guest.sandbox.id)
            with pytest.raises(websockets.ConnectionClosedError):
                await socket.recv()


@pytest.mark.parametrize("side", ["guest", "client"])
@on_uvloop
async def test_a_side_that_breaks_breaks_the_other_and_does_not_end_it(side: str) -> None:
    ends: list[str] = []
    may_break = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n")
        if side == "guest":
            await may_break.wait()
            cut(writer.transport)
            return
        try:
            await reader.read()
            ends.append("ended")
        except ConnectionError:
            ends.append("broken")

    async with World() as world:
        guest = await world.guest(handle)
        async with world.client() as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n" % guest.headers)
            await client.head()
            may_break.set()
            if side == "client":
                cut(client.writer.transport)
                await until(lambda: bool(ends), "the guest has heard nothing")
                assert ends == ["broken"]
            else:
                with pytest.raises(ConnectionError):
                    await client.ended()


@on_uvloop
async def test_a_client_that_dies_ends_the_guests_socket() -> None:
    async with World() as world:
        guest = await world.guest()
        async with app(world, guest) as server:
            socket = await to(world, guest)
            await socket.send("x")
            await socket.recv()
            socket.transport.abort()
            await until(lambda: not server.connections, "the guest still has it")


@pytest.mark.slow
@on_uvloop
async def test_a_thousand_idle_sockets() -> None:
    count = 1000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with World() as world:
        guest = await world.guest()
        async with app(world, guest, ping_interval=None, compression=None):
            gate = asyncio.Semaphore(50)

            async def one() -> ClientConnection:
                async with gate:
                    return await to(world, guest, ping_interval=None, compression=None, open_timeout=None)

            sockets = await asyncio.gather(*(one() for _ in range(count)))
            assert world.proxy.statistics().busy == count
            for socket in sockets[::100]:
                await socket.send("still there")
                assert await socket.recv() == "still there"
            await asyncio.gather(*(socket.close() for socket in sockets))
        await until(lambda: world.proxy.statistics().busy == 0, "tunnels are left")


@on_uvloop
async def test_an_upgrade_that_the_guest_ignores_is_an_ordinary_request() -> None:
    async with World() as world:
        guest = await world.guest()
        async with world.client() as client:
            for number in range(2):
                client.send(
                    b"GET /%d HTTP/1.1\r\nHost: x\r\n%bConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
                    % (number, guest.headers)
                )
                assert (await client.answer()).status == 200
            assert (await client.ask("/nodes")).json["control"] == "/nodes"
            client.send(b"GET /c HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert (await client.answer()).json["control"] == "/c"
        assert guest.header("upgrade", 0) == ["websocket"]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 101 X\r\n\r\n",
    ],
)
@on_uvloop
async def test_a_guest_that_switches_unasked_is_garbage(raw: bytes) -> None:
    async with World() as world:
        guest = await world.guest(answering(raw, then_close=False))
        answer = await world.ask(guest)
        assert (answer.status, answer.json["error_code"]) == (502, "guest_garbage")
