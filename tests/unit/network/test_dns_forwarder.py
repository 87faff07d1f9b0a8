"""The forwarder on the loopback, with name servers that behave and some that do not."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from ipaddress import IPv4Address
from typing import TypeAlias

import pytest

from agentenv.model.errors import Conflict
from agentenv.network.dns.forwarder import DnsForwarder, Limits
from agentenv.network.dns.message import Rcode, is_truncated
from agentenv.network.dns.upstream import Upstreams
from agentenv.testing.clock import JumpingClock
from tests.unit.network.names import Asker, NameServer, address_in, answer, question, rcode

LIMITS = Limits(timeout_s=30, in_flight=8, in_flight_per_slot=4)
SHORT = Limits(timeout_s=0.6, in_flight=8, in_flight_per_slot=4)
ONE, TWO, NOBODY = "127.0.0.1", "127.0.0.2", "127.0.0.9"
SLOTS = {ONE: 1, TWO: 2}

Start: TypeAlias = Callable[..., Awaitable[DnsForwarder]]


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((ONE, 0))
        return int(probe.getsockname()[1])


class World:
    """A forwarder and what is around it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.slots = dict(SLOTS)
        self.port = free_port()

    async def server(self, respond: Callable[[bytes], list[bytes]] | None = None, *, tcp: bool = True) -> NameServer:
        server = await NameServer(respond, tcp=tcp).start()
        self._stack.push_async_callback(server.stop)
        return server

    async def forwarder(self, *servers: NameServer | str, limits: Limits = LIMITS) -> DnsForwarder:
        texts = [server if isinstance(server, str) else server.text for server in servers]
        forwarder = DnsForwarder(
            IPv4Address(ONE),
            self.port,
            upstreams=Upstreams(texts, own=IPv4Address(NOBODY)),
            admit=lambda address: self.slots.get(str(address)),
            limits=limits,
            clock=JumpingClock(),
        )
        await forwarder.start()
        self._stack.push_async_callback(forwarder.close)
        return forwarder

    async def asker(self, source: str = ONE) -> Asker:
        asker = await Asker((ONE, self.port), source).open()
        self._stack.push_async_callback(asker.close)
        return asker


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


async def test_a_question_is_answered(world: World) -> None:
    server = await world.server()
    await world.forwarder(server)
    asker = await world.asker()

    assert await asker.ask(question(query_id=77)) == answer(question(query_id=77))
    assert await asker.ask_tcp(question(query_id=1), question(query_id=2)) == [
        answer(question(query_id=1)),
        answer(question(query_id=2)),
    ]
    assert [way for way, _ in server.asked] == ["udp", "tcp", "tcp"]


async def test_answers_find_their_askers_in_whatever_order_they_come(world: World) -> None:
    waiting: list[bytes] = []

    def respond(data: bytes) -> list[bytes]:
        waiting.append(data)
        return []

    server = await world.server(respond)
    await world.forwarder(server)
    one, two = await world.asker(ONE), await world.asker(TWO)
    for asker in (one, two):
        for index in range(3):
            asker.send(question(f"name{index}.example.org", query_id=5))
    while len(waiting) < 6:
        await asyncio.sleep(0)
    for data, port in reversed(list(zip(waiting, server.sources, strict=True))):
        index = int(chr(data[17]))
        server._transport.sendto(answer(data, f"192.0.2.{index}"), (ONE, port))

    for asker in (one, two):
        answers = [await asker.answers.get() for _ in range(3)]
        assert sorted(address_in(reply) for reply in answers) == ["192.0.2.0", "192.0.2.1", "192.0.2.2"]
        assert all(address_in(reply)[-1] == chr(reply[17]) for reply in answers)


async def test_the_next_resolver_is_asked_when_one_is_silent_and_first_from_then_on(world: World) -> None:
    silent, good = await world.server(lambda _: []), await world.server()
    forwarder = await world.forwarder(silent, good, limits=SHORT)
    asker = await world.asker()

    assert address_in(await asker.ask(question())) == "192.0.2.7"
    assert address_in(await asker.ask(question())) == "192.0.2.7"

    assert (len(silent.asked), len(good.asked), forwarder.statistics().retried) == (1, 2, 1)


@pytest.mark.parametrize("code", [Rcode.SERVER_FAILURE, Rcode.REFUSED])
async def test_the_next_resolver_is_asked_when_one_cannot(world: World, code: Rcode) -> None:
    bad, good = await world.server(lambda data: [answer(data, rcode=code)]), await world.server()
    await world.forwarder(bad, good)

    assert address_in(await (await world.asker()).ask(question())) == "192.0.2.7"


async def test_that_a_name_does_not_exist_is_an_answer(world: World) -> None:
    first = await world.server(lambda data: [answer(data, rcode=Rcode.NO_SUCH_NAME)])
    second = await world.server()
    await world.forwarder(first, second)

    assert rcode(await (await world.asker()).ask(question())) == Rcode.NO_SUCH_NAME
    assert second.asked == []


@pytest.mark.parametrize("over_tcp", [False, True])
async def test_the_guest_is_told_when_no_resolver_answers_in_time(world: World, over_tcp: bool) -> None:
    silent = await world.server(lambda _: [], tcp=False)
    forwarder = await world.forwarder(silent, limits=SHORT)
    asker = await world.asker()

    reply = (await asker.ask_tcp(question()))[0] if over_tcp else await asker.ask(question())

    assert (reply[:2], rcode(reply)) == (question()[:2], Rcode.SERVER_FAILURE)
    assert (forwarder.statistics().failed, forwarder.statistics().in_flight) == (1, 0)


async def test_the_guest_is_told_at_once_when_nothing_listens_there(world: World) -> None:
    await world.forwarder(f"{ONE}:{free_port()}")

    assert rcode(await (await world.asker()).ask(question())) == Rcode.SERVER_FAILURE


async def test_a_long_answer_is_cut_over_udp_and_whole_over_tcp(world: World) -> None:
    await world.forwarder(await world.server(lambda data: [answer(data, padding=3000)]))
    asker = await world.asker()

    assert is_truncated(await asker.ask(question(size=1232)))
    assert len((await asker.ask_tcp(question()))[0]) > 3000


async def test_a_resolver_without_tcp_is_asked_over_udp(world: World) -> None:
    server = await world.server(tcp=False)
    await world.forwarder(server)

    assert [address_in(reply) for reply in await (await world.asker()).ask_tcp(question())] == ["192.0.2.7"]
    assert [way for way, _ in server.asked] == ["udp"]


async def test_nobody_but_a_slot_that_may_is_answered(world: World) -> None:
    server = await world.server()
    forwarder = await world.forwarder(server)
    stranger, one = await world.asker(NOBODY), await world.asker(ONE)

    stranger.send(question())
    assert await stranger.ask_tcp(question()) == []
    assert await one.ask(question()) == answer(question())  # sent after it, so it has had its chance

    assert stranger.answers.empty()
    assert (len(server.asked), forwarder.statistics().refused) == (1, 2)


async def test_a_slot_that_loses_its_right_is_not_answered_on_its_old_connection(world: World) -> None:
    await world.forwarder(await world.server())
    reader, writer = await asyncio.open_connection(ONE, world.port)
    try:
        for expected in (True, False):
            writer.write(len(question()).to_bytes(2, "big") + question())
            head = await reader.read(2)
            assert bool(head) == expected
            if head:
                await reader.readexactly(int.from_bytes(head, "big"))
                del world.slots[ONE]
    finally:
        writer.close()


async def test_one_slot_cannot_take_the_place_of_the_others(world: World) -> None:
    server = await world.server(lambda data: [answer(data)] if b"two" in data else [])
    forwarder = await world.forwarder(server)
    greedy, other = await world.asker(ONE), await world.asker(TWO)

    for index in range(20):
        greedy.send(question(f"one{index}.example.org"))
    assert address_in(await other.ask(question("two.example.org"))) == "192.0.2.7"

    now = forwarder.statistics()
    assert (now.in_flight, now.dropped) == (LIMITS.in_flight_per_slot, 20 - LIMITS.in_flight_per_slot)


async def test_all_slots_together_have_a_limit(world: World) -> None:
    world.slots = {f"127.0.1.{index}": index for index in range(1, 9)}
    forwarder = await world.forwarder(await world.server(lambda _: []))
    askers = [await world.asker(source) for source in world.slots]

    for asker in askers:
        for _ in range(3):
            asker.send(question())
    while (now := forwarder.statistics()).questions + now.dropped < 24:
        await asyncio.sleep(0)

    assert (now.in_flight, now.dropped) == (LIMITS.in_flight, 24 - LIMITS.in_flight)


async def test_a_slot_has_few_connections(world: World) -> None:
    forwarder = await world.forwarder(await world.server())
    opened = [await asyncio.open_connection(ONE, world.port) for _ in range(12)]
    try:
        while forwarder.statistics().dropped < 4:
            await asyncio.sleep(0)
        assert forwarder.statistics().dropped == 4
    finally:
        for _, writer in opened:
            writer.close()


async def test_nonsense_is_counted_and_does_no_harm(world: World) -> None:
    forwarder = await world.forwarder(await world.server())
    asker = await world.asker()

    asker.send(b"nonsense")
    assert rcode(await asker.ask(question(flags=0x2900))) == Rcode.NOT_IMPLEMENTED
    assert await asker.ask_tcp(b"nonsense") == []
    assert rcode((await asker.ask_tcp(question(kind=252)))[0]) == Rcode.REFUSED

    assert forwarder.statistics().malformed == 4
    assert await asker.ask(question()) == answer(question())


async def test_closing_gives_up_what_is_in_progress(world: World) -> None:
    server = await world.server(lambda _: [])
    forwarder = await world.forwarder(server)
    asker = await world.asker()
    asker.send(question())
    await server.arrived.wait()
    _, writer = await asyncio.open_connection(ONE, world.port)

    await forwarder.close()
    writer.close()
    await asyncio.sleep(0)

    assert forwarder.statistics().in_flight == 0
    again = await world.forwarder(server)  # the port is free
    assert again.statistics().questions == 0


async def test_a_port_that_is_taken_is_a_conflict_with_advice(world: World) -> None:
    server = await world.server()
    world.port = server.port

    with pytest.raises(Conflict) as refused:
        await world.forwarder(server)

    assert refused.value.hint is not None
    assert "dns_port" in refused.value.hint
