"""Connections are kept for the VM they were made to, and within bounds."""

import asyncio
import contextlib
import socket

import pytest

from agentenv.guest.connection import GuestConnection
from agentenv.model.errors import Exhausted
from agentenv.model.lifecycle import State
from agentenv.node.contract import Route
from agentenv.proxy import ProxySettings
from agentenv.proxy.errors import GuestSilent, PortClosed
from agentenv.proxy.pool import Pool, RouteChanged
from tests.unit.proxy.world import Guest, World, on_uvloop, until


async def exchange(connection: GuestConnection) -> None:
    connection.begin(head_only=False)
    connection.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await connection.read_head()
    while not connection.is_complete:
        await connection.read_body()


def way(world: World, guest: Guest) -> Route:
    return world.node.route(guest.sandbox.id)


@on_uvloop
async def test_idle_connections_are_few_and_the_youngest_is_used_first() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings(max_idle_per_sandbox=2))
        used = [await pool.connect(way(world, guest), guest.port) for _ in range(3)]
        for connection in used:
            await exchange(connection)
            pool.give_back(connection)
        assert pool.statistics().idle == 2
        assert not used[2].is_open
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=True) is used[1]
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=True) is used[0]
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=True) is None
        assert pool.reuse_nowait(way(world, guest), guest.port + 1, repeatable=True) is None
        pool.close()
        await until(lambda: pool.statistics().busy == 0, "cut connections are still counted")


@on_uvloop
async def test_what_may_not_be_sent_twice_goes_where_the_guest_was_just_heard_of() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings(max_idle_unsafe_s=0.0))
        connection = await pool.connect(way(world, guest), guest.port)
        await exchange(connection)
        pool.give_back(connection)
        connection.idle_since -= 0.001
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=False) is None
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=True) is connection
        pool.close()


@on_uvloop
async def test_an_idle_connection_is_closed_after_a_while() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings(max_idle_s=0.02, sweep_interval_s=0.01))
        connection = await pool.connect(way(world, guest), guest.port)
        await exchange(connection)
        pool.give_back(connection)
        await guest.closed.wait()
        await until(lambda: pool.statistics().guests == 0, "the guest is still remembered")


@on_uvloop
async def test_a_guest_that_speaks_out_of_turn_loses_the_connection() -> None:
    speak = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await speak.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        await reader.read()

    async with World() as world:
        guest = await world.guest(handle)
        assert (await world.ask(guest)).status == 200
        assert world.proxy.statistics().idle == 1
        speak.set()
        await guest.closed.wait()
        assert world.proxy.statistics().idle == 0
        assert (await world.ask(guest)).body == b""


@on_uvloop
async def test_a_connection_of_an_old_generation_is_never_given_out() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings())
        idle = await pool.connect(way(world, guest), guest.port)
        busy = await pool.connect(way(world, guest), guest.port)
        await exchange(idle)
        await exchange(busy)
        pool.give_back(idle)
        world.node.change(guest.sandbox.id, generation=2)
        assert pool.reuse_nowait(way(world, guest), guest.port, repeatable=True) is None
        assert not idle.is_open
        assert not busy.is_open
        pool.give_back(busy)
        assert pool.statistics().idle == 0
        pool.close()


@on_uvloop
async def test_a_sandbox_that_changes_while_being_connected_to_is_not_spoken_to() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings())
        old = way(world, guest)
        connecting = asyncio.create_task(pool.connect(old, guest.port))
        await asyncio.sleep(0)
        world.node.change(guest.sandbox.id, state=State.PAUSED)
        with pytest.raises(RouteChanged):
            await connecting
        await until(lambda: guest.connections == 0 or guest.open == 0, "the connection is still open")
        assert guest.heads == []
        pool.close()


@on_uvloop
async def test_connections_to_one_sandbox_are_bounded_and_idle_ones_make_room() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings(max_connections_per_sandbox=2))
        first = await pool.connect(way(world, guest), guest.port)
        await pool.connect(way(world, guest), guest.port)
        with pytest.raises(Exhausted):
            await pool.connect(way(world, guest), guest.port)
        await exchange(first)
        pool.give_back(first)
        await pool.connect(way(world, guest), guest.port)
        assert not first.is_open
        pool.close()


@on_uvloop
async def test_a_closed_port_is_called_that() -> None:
    async with World() as world:
        guest = await world.guest()
        pool = Pool(world.node, ProxySettings())
        with pytest.raises(PortClosed):
            await pool.connect(way(world, guest), 1)
        pool.close()


@on_uvloop
async def test_a_guest_that_does_not_take_connections_is_silent() -> None:
    """A full backlog on loopback does what a frozen VM does: the handshake is not answered."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        async with World() as world:
            guest = await world.guest()
            world.node.addresses[guest.sandbox.id] = "127.0.0.1"
            pool = Pool(world.node, ProxySettings(connect_timeout_s=0.05))
            with pytest.raises(GuestSilent):
                await pool.connect(way(world, guest), full.getsockname()[1])
            assert pool.statistics().busy == 0
            # The same from a sandbox that was paused meanwhile is no fault of its port's.
            connecting = asyncio.create_task(pool.connect(way(world, guest), full.getsockname()[1]))
            await asyncio.sleep(0)
            world.node.change(guest.sandbox.id, state=State.PAUSED)
            with pytest.raises(RouteChanged):
                await connecting
            pool.close()
